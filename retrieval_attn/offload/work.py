"""HostWork: a finished pass of one layer on its way to the host: keys and values first, then the indexes over them.

Beside a GPU both happen in threads while the next layers compute: one thread copies (`offload/staging.py`), a pool
builds the indexes of several heads at once. The device holds the keys of the layer that computes and of one that is
being copied (`offload/traffic.py`). On the CPU, where all want the same cores, the same work is done on the spot.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import (
    CacheMismatchError,
    MemoryPlanError,
    NotFiniteError,
    RetrievalAttentionError,
    UnsupportedModelError,
)
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.budgets import BudgetBuild
from retrieval_attn.offload.build import IndexBuild, event_now
from retrieval_attn.offload.clusters import ClusterBuild
from retrieval_attn.offload.copy import KVCopy
from retrieval_attn.offload.stats import LayerStats
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.traffic import traffic

LAYERS_AT_ONCE = 3
"""Layers whose indexes are built at the same time: the last heads of one must not leave cores without work."""


class HostWork:
    """Copies one layer's new keys and values (batch, kv_heads, new, dim) into paths and builds their indexes.

    Order: `append` for each row, `start_copy`, `index` or `extend` for each path, and what `clusters` and `budgets` are
    asked for, `start_build`; then `finish` before anybody else touches the paths.

    shares: what later layers of the pass find as long as it is kept here: until all of them are read and finished.
    """

    shares: Sequence[object] = ()

    def __init__(self, number: int, fmt: Format, threads: int | None, stats: LayerStats, kv: tuple[Tensor, Tensor]):
        """number: of the layer, named in errors. threads: of index builds, None = all. stats: gets the seconds."""
        self._number, self._stats = number, stats
        self._stop = threading.Event()
        self._overlaps = overlaps(kv[0].device)
        self._copy = KVCopy(fmt, *kv, self._stop)
        self._build = IndexBuild(number, kv[0].device, threads, self._overlaps, self._stop)
        self.clusters = ClusterBuild(kv[0].device)
        self.budgets = BudgetBuild()
        self._futures: dict[str, Future[None]] = {}  # by what is done: "copy", "fetch" (training data), "build"
        self._ready: torch.cuda.Event | None = None  # keys and values lie on the device
        self._complete = False  # all that will be asked for was asked for

    @property
    def device(self) -> torch.device:
        """Where the keys come from."""
        return self._copy.device

    def append(self, row: int, host: SequenceKV, real: np.ndarray | None) -> None:
        """See `KVCopy.append`."""
        self._copy.append(row, host, real)

    def extend(self, host: SequenceKV, stop: int) -> None:
        """See `IndexBuild.extend`."""
        self._build.extend(host, stop)

    def index(
        self, host: SequenceKV, span: tuple[int, int], queries: Tensor | None, keys: Callable[[], Tensor]
    ) -> None:
        """See `IndexBuild.add`."""
        self._build.add(host, span, queries, keys, self._copy.is_whole(host))

    def start_copy(self) -> None:
        """Begin to copy, or copy now on the CPU."""
        if not self._overlaps:
            self.copy_now()
            return
        self._ready = event_now(self.device)
        traffic(self.device).add(self)
        copy = functools.partial(self._copy.staged, self._ready)
        self._futures["copy"] = copier().submit(self._timed, "copy_seconds", copy)

    def copy_now(self) -> None:
        """Copy and return when it is done: for few tokens, and in the middle of a step."""
        self._timed("copy_seconds", self._copy.direct)

    def start_build(self) -> None:
        """Begin to build what was asked for as soon as the keys are copied, or build now on the CPU."""
        if self._start_fetch():
            if self._overlaps:
                self._futures["build"] = layers().submit(self._named, self._build_after_copy)
            else:
                self._named(self._build_after_copy)
        self._complete = True

    def _start_fetch(self) -> bool:
        """Begin to bring what the builds need, or bring it now on the CPU; whether there is anything to build."""
        if self._build.fetches or self.clusters.fetches:
            fetch = functools.partial(_fetch, self._build, self.clusters, event_now(self.device))
            if self._overlaps:
                # fetched at once, not when their turn to be built comes: many layers may wait for that
                self._futures["fetch"] = copier().submit(self._named, fetch)
            else:
                self._named(fetch)
        return self._build.requested or self.clusters.requested

    def _build_after_copy(self) -> None:
        for name in ("copy", "fetch"):
            if name in self._futures:
                self._futures[name].result()
        began = time.perf_counter()
        self.clusters.place()
        self._build.run(self._ready)
        self.budgets.run()
        self._stats.index_seconds += time.perf_counter() - began

    def finish_copy(self) -> None:
        """Wait until keys and values are on the host. Raises what went wrong there."""
        if "copy" in self._futures:
            self._wait(self._futures["copy"])

    def finish(self) -> None:
        """Wait until everything is done. Raises what went wrong, with the layer named, or CacheMismatchError after
        `abandon`.
        """
        for future in self._futures.values():
            self._wait(future)
        self._stats.lists_seconds += self._build.take_list_seconds()

    def check(self) -> None:
        """Raise what went wrong so far, without waiting."""
        for future in self._futures.values():
            if future.done():
                self._wait(future)

    def abandon(self) -> None:
        """Do not begin what has not begun, and stop after the heads that are being built. Does not wait."""
        self._stop.set()
        for future in reversed(self._futures.values()):
            future.cancel()

    @property
    def done(self) -> bool:
        return self._complete and all(future.done() for future in self._futures.values())

    def leaving(self) -> list[Future[None]]:
        reading = ("copy", "fetch", "build") if self._build.keeps_keys else ("copy", "fetch")
        return [self._futures[name] for name in reading if name in self._futures and not self._futures[name].done()]

    def building(self) -> list[Future[None]]:
        return [self._futures["build"]] if "build" in self._futures and not self._futures["build"].done() else []

    def _wait(self, future: Future[None]) -> None:
        try:
            future.result()
        except CancelledError:
            raise CacheMismatchError(
                f"Layer {self._number}: reading was interrupted before its keys were indexed. Make a new cache and "
                "read again."
            ) from None

    def _timed(self, seconds: str, work: Callable[[], None]) -> None:
        """Do it, and add what it took to `stats`."""
        began = time.perf_counter()
        self._named(work)
        setattr(self._stats, seconds, getattr(self._stats, seconds) + time.perf_counter() - began)

    def _named(self, work: Callable[[], None]) -> None:
        """Do it; errors name the layer, and keep their class."""
        try:
            work()
        except NotFiniteError as error:
            raise UnsupportedModelError(
                f"Layer {self._number}: the model computed keys that are NaN or infinite ({error}). Plain attention "
                "answers with NaN there, too: check the weights, or load them in a wider dtype such as bfloat16 or "
                "float32."
            ) from error
        except RetrievalAttentionError as error:
            raise type(error)(f"Layer {self._number}: {error}") from error
        except MemoryError as error:
            raise MemoryPlanError(
                f"Layer {self._number}: the host ran out of memory while keys were copied or indexed ({error}); read "
                "less text, store keys with host_dtype='int8' or take a machine with more memory"
            ) from error
        except CancelledError:
            raise
        except Exception as error:
            error.add_note(f"while the keys of layer {self._number} were copied or indexed")
            raise


def _fetch(build: IndexBuild, clusters: ClusterBuild, ready: torch.cuda.Event | None) -> None:
    build.fetch(ready)
    clusters.fetch(ready)


def overlaps(device: torch.device) -> bool:
    """Whether the host works while the device computes. On the CPU both want the same cores."""
    return device.type == "cuda"


@functools.cache
def copier() -> ThreadPool:
    """Copies keys and values to the host, in order."""
    return ThreadPool(1, "retrieval_attn-copy")


@functools.cache
def layers() -> ThreadPool:
    """Builds the indexes of layers."""
    return ThreadPool(LAYERS_AT_ONCE, "retrieval_attn-layer")
