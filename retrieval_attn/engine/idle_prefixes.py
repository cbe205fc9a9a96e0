"""Memory of prefixes that no request uses: in GPU memory, in host memory below it, and on the disk.

After each step of the engine, idle prefixes beyond the limits of the GPU are offloaded, those beyond the limits of host
memory are evicted, or saved to the disk before (`DiskTier`). After each prefill a thread copies what an offload would
copy. The engine's thread offloads copied prefixes only, which moves nothing; the thread offloads the others. Another
thread frees what is evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from transformers import PreTrainedModel

from retrieval_attn.config import Config
from retrieval_attn.engine.background_saves import DiskTier
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.node import Node, Payload, Sizes
from retrieval_attn.engine.paged_prefix import PagedKVPool
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput
from retrieval_attn.memory.device_room import prefix_cache_device_bytes
from retrieval_attn.offload.int8_rows import drop_rows, held_rows_bytes
from retrieval_attn.offload.page_lock import unhurried
from retrieval_attn.offload.threads import ThreadPool

__all__ = ["IdlePrefixes", "most_device_bytes"]

ROWS_SHARE = 0.25
"""Share of the requests' host memory that int8 rows keep when idle prefixes need it."""


def most_device_bytes(limits: Limits, model: PreTrainedModel, config: Config, exact: PagedKVPool | None) -> int | None:
    """Return the GPU memory for idle prefixes, at most what pages of paged prefixes leave; None: no limit."""
    most = limits.prefix_cache_device_bytes
    if most is None or exact is None:
        return most
    left = prefix_cache_device_bytes(model, config, limits.rows + limits.ahead)
    return most if left is None else min(most, max(0, left - exact.nbytes))


class IdlePrefixes:
    """Keeps the idle prefixes of an engine within its limits. Belongs to the engine's thread."""

    def __init__(
        self,
        tree: RadixCache,
        disk: DiskTier | None,
        limits: Limits,
        host: int,
        device: int | None,
        scheduler: Scheduler,
        changed: threading.Condition,
        waited_for: Callable[[], dict[Node, int]],
    ) -> None:
        """host: bytes of host memory that idle prefixes may have. device: of GPU memory; None: no limit. changed: the
        lock of `scheduler`. waited_for: see `PrefillWorker.waited_for`.
        """
        self._tree, self._disk, self._limits, self._host, self._device = tree, disk, limits, host, device
        self._scheduler, self._changed, self._waited_for = scheduler, changed, waited_for
        self._copies = ThreadPool(1, "retrieval_attn-copy")
        self._releases = ThreadPool(2, "retrieval_attn-free")
        self._dropping: Future[int] | None = None  # int8 rows
        self._added = False  # there may be prefixes that no thread has copied

    @property
    def is_copying(self) -> bool:
        """Whether a thread copies prefixes to host memory."""
        return self._copies.busy > 0

    def after_step(self, plan: SchedulerOutput) -> None:
        """Offload, save and evict prefixes after a step that did `plan`."""
        self._added = self._added or bool(plan.read or plan.leave)
        self._evict()
        if self._added and not plan.read and not self.is_copying:
            self._added = False
            self._copies.submit(self._tree.copy_ahead)
        if not any(plan) and self._disk is not None:
            self._disk.wait()  # requests may wait for the memory of a text that is being saved

    def _release(self, gone: list[Payload]) -> None:
        self._releases.submit(_free, gone)

    def _evict(self) -> None:
        """Evict idle prefixes if they hold more than their limit, or if the next request lacks host memory."""
        with self._changed:
            lacking = self._scheduler.lacking_bytes
        most = self._device
        uncopied = 0 if most is None else self._tree.offload_copied(most)
        if uncopied and not self.is_copying:
            self._copies.submit(self._tree.offload, uncopied)
        held, idle, limits = self._tree.sizes, self._tree.idle, self._limits
        held_rows = held_rows_bytes()
        rows = min(held_rows, int(limits.host_bytes * ROWS_SHARE))
        room = min(self._host, limits.host_bytes - rows)
        over = max(idle.host - room, min(lacking, idle.host)), 0 if most is None or uncopied else held.device - most
        limit = Sizes(room, held.device if most is None else most, held.pages)
        if self._disk is not None:
            with self._changed:
                free = min(room - idle.host, limits.host_bytes - self._scheduler.host_bytes_in_use)
            self._disk.evict(Sizes(*over), limit, self._waited_for, free, lacking, self._release)
        elif max(over) > 0:
            self._tree.evict(Sizes(*over), limit, waiting=self._waited_for(), release=self._release)
        with self._changed:
            self._scheduler.set_outside(self._tree.sizes.host)
            more = self._scheduler.host_bytes_in_use + held_rows - limits.host_bytes
        if more > 0 and held_rows > rows and (self._dropping is None or self._dropping.done()):
            nbytes = min(more, held_rows - rows)
            self._dropping = self._releases.submit(drop_rows, nbytes)  # in a thread: the driver waits for the device


def _free(gone: list[Payload]) -> None:
    with unhurried():
        gone.clear()
