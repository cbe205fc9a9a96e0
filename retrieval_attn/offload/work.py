"""HostWork: transfer of one layer's prefill to the host: keys and values (`KVCopy`), then indexes over them.

With a GPU both run in threads while the next layers compute: one thread copies (`offload/staging.py`), a pool builds
indexes of several heads at once. The device holds the keys of the layer that computes and of one under copy
(`offload/traffic.py`). On the CPU the same work runs synchronously.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future

import numpy as np
import torch
from torch import Tensor

import retrieval_attn.offload.int8_rows  # noqa: F401  # registers a replica
from retrieval_attn.cpu.replica import Replicas, replica_kinds
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import (
    CacheMismatchError,
    MemoryPlanError,
    NotFiniteError,
    RetrievalAttentionError,
    UnsupportedModelError,
)
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.build import BudgetBuild, IndexBuild, event_now
from retrieval_attn.offload.clusters import ClusterBuild
from retrieval_attn.offload.codes import side_stream
from retrieval_attn.offload.page_lock import lock_pages
from retrieval_attn.offload.staging import CopyChunk, all_to_host, pack, staging
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.traffic import LayerStats, traffic

FILLERS = 4
"""Threads that write copied keys and values into the store."""
SHARED_COPY = 4 << 20
"""Bytes of keys from which several threads write."""


class KVCopy:
    """Copy of keys and values (batch, kv_heads, new, dim) of one prefill; they are released once copied.

    The tensors must not be written to any more.
    """

    def __init__(self, fmt: Format, key: Tensor, value: Tensor, stop: threading.Event) -> None:
        """stop: if it is set, copies that have not begun raise CancelledError."""
        self.device = key.device
        self._fmt, self._stop = fmt, stop
        graph = key.requires_grad or value.requires_grad
        self._kv = [(key.detach(), value.detach()) if graph else (key, value)]  # empty once they are copied
        self._rows: list[tuple[int, SequenceKV, np.ndarray | None]] = []
        self._whole: set[int] = set()
        self._begun: dict[int, Replicas] = {}

    def append(self, row: int, host: SequenceKV, real: np.ndarray | None, *, replicates: bool = True) -> None:
        """Queue row `row` for the end of `host`. real: (new,) bool, columns that are tokens; None: all.

        replicates: replicas follow the tokens on the device, see `staged` and `direct`.
        """
        self._rows.append((row, host, real))
        if real is None and len(host) == 0:
            self._whole.add(id(host))
        if not replicates:
            return
        key, value = (tensor[row] for tensor in self._kv[0])
        kinds = replica_kinds(of_segments=True)
        self._begun[id(host)] = {cls.kind: cls.of_prefill(host, key, value) for cls in kinds}

    @property
    def tokens(self) -> int:
        """New columns, before they are copied."""
        return int(self._kv[0][0].shape[2])

    def is_whole(self, host: SequenceKV) -> bool:
        """Return True if `host` holds nothing but this prefill, so that its keys are on the device unchanged."""
        return id(host) in self._whole

    def staged(self, ready: torch.cuda.Event | None) -> None:
        """Copy through the device's ring of pinned buffers after the event `ready`."""
        for key, value in self._kv:
            staging(self.device).bring(self._pieces(key, value), ready)
        self._replicate(ready)
        self.filled()

    def fill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Append tokens (kv_heads, tokens, width) in storage format to the only row; `filled` follows the last."""
        [(_, host, real)] = self._rows
        _append(host, real, keys, values)

    def filled(self) -> None:
        """Release the device's tensors and page-lock the segments after the last token."""
        self._kv.clear()  # the device has read them: their memory may be written at once
        if self.device.type != "cuda":
            return  # nothing copies them back from page-locked memory
        for segment in {id(one): one for _, host, _ in self._rows for one in host.segments}.values():
            lock_pages(segment)

    def direct(self) -> None:
        """Copy row by row on this thread and the device's current stream."""
        for kv in self._kv:
            for row, host, real in self._rows:
                key, value = all_to_host([tensor[row] for tensor in kv], self._fmt)
                _append(host, real, key, value)
        self._replicate(None)
        self._kv.clear()

    def _replicate(self, ready: torch.cuda.Event | None) -> None:
        """Have replicas follow the appended tokens by their tensors on the device, after the event `ready`."""
        for key, value in self._kv:
            for row, host, real in self._rows:
                if not host.segments:
                    continue
                segment, tokens = host.segments[-1], key.shape[2] if real is None else int(real.sum())
                replicas = segment.replicas_from_device(tokens, self._begun[id(host)])
                if not replicas:
                    continue
                with side_stream(self.device):
                    if ready is not None:
                        torch.cuda.current_stream(self.device).wait_event(ready)
                    kept = slice(None) if real is None else torch.from_numpy(real).to(self.device)
                    for one in replicas:
                        one.append_device(segment, segment.length - tokens, key[row][:, kept], value[row][:, kept])

    def _pieces(self, key: Tensor, value: Tensor) -> Iterator[CopyChunk]:
        """Yield chunks of tokens that fit a buffer, keys and values together."""
        heads, count = key.shape[1:3]
        bytes_of = heads * (self._fmt.row_bytes(key.shape[3]) + self._fmt.row_bytes(value.shape[3]))
        step = max(1, (staging(self.device).size - 128) // bytes_of)
        for row, host, real in self._rows:
            for start in range(0, count, step):
                if self._stop.is_set():
                    raise CancelledError
                span = slice(start, min(start + step, count))
                tensors = pack(key[row, :, span], self._fmt), pack(value[row, :, span], self._fmt)
                yield tensors, functools.partial(_append, host, None if real is None else real[span])


@functools.cache
def _fillers() -> ThreadPool:
    return ThreadPool(FILLERS, "retrieval_attn-fill")


def _append(host: SequenceKV, real: np.ndarray | None, keys: np.ndarray, values: np.ndarray) -> None:
    """Append to the store, by several threads if large: first writes to new memory are slow."""
    if real is not None:
        keys, values = keys[:, real], values[:, real]
    if keys.nbytes < SHARED_COPY:
        host.append(keys, values)
    else:
        host.append(keys, values, _fillers().map)


LAYERS_AT_ONCE = 3
"""Layers whose indexes are built at the same time: the last heads of one must not leave cores without work."""


class HostWork:
    """Copies one layer's new keys and values (batch, kv_heads, new, dim) into paths and builds their indexes.

    Order: `append` for each row, `continue_first` or `merge` of paths, `start_copy`, `index` or `extend` for each path,
    and what `clusters` and `budgets` are asked for, `start_build`; then `finish` before anybody else touches the paths.

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

    def merge(self, host: SequenceKV) -> None:
        """See `SequenceKV.merge`; the new tokens, which are appended later, have room."""
        host.merge(self._copy.tokens, _fillers().map if self._overlaps else map)

    def continue_first(self, host: SequenceKV) -> bool:
        """See `SequenceKV.continue_first`; the new tokens are appended later."""
        copied = (len(host) - host.spans[0].length) * host.token_bytes
        return host.continue_first(self._copy.tokens, map if copied < SHARED_COPY else _fillers().map)

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
        self._futures["copy"] = copier().submit(self._timed, copy)

    def copy_now(self) -> None:
        """Copy and return when it is done: for few tokens, and in the middle of a step."""
        self._timed(self._copy.direct)

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

    def _timed(self, copy: Callable[[], None]) -> None:
        """Copy, and add the seconds to `stats`."""
        began = time.perf_counter()
        self._named(copy)
        self._stats.copy_seconds += time.perf_counter() - began

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
                f"Layer {self._number}: the host ran out of memory while keys were copied or indexed ({error}); read a "
                "shorter text, store keys with host_dtype='int8' or use a machine with more memory"
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
