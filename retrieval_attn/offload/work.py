"""A finished pass of one layer on its way to the host: keys and values first, then the indexes over them.

Beside a GPU both happen in threads while the next layers compute: one thread copies (`offload/staging.py`), a crew
builds the indexes of several heads at once. The device holds the keys of the layer that computes and of one that is
being copied.
On the CPU, where all want the same cores, the same work is done on the spot.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.formats import Format
from retrieval_attn.cpu.store import HostPath
from retrieval_attn.errors import CacheMismatchError, MemoryPlanError, RetrievalAttentionError
from retrieval_attn.gpu.knn import nearest_keys
from retrieval_attn.index.cores import usable_cores
from retrieval_attn.index.threads import kernel_threads, single_blas
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.offload.staging import Piece, staging
from retrieval_attn.offload.stats import LayerStats
from retrieval_attn.offload.threads import Crew
from retrieval_attn.offload.transfer import pack, to_host

log = logging.getLogger(__name__)

LAYERS_AT_ONCE = 3
"""Layers whose indexes are built at the same time: the last heads of one must not leave cores without work."""
CODERS = 4
"""Threads that send keys to be coded on the device, by an index of that kind."""
FILLERS = 4
"""Threads that write copied keys and values to their places."""
SHARED_COPY = 4 << 20
"""Bytes of keys from which they do it together."""
BACKLOG = 8
"""Layers that may wait for their indexes, with their training data in memory, before prefill waits."""


@dataclass
class _Job:
    """Build the index of a path over tokens [start, stop), or extend it; queries and lists to train on.

    keys: (kv_heads, stop - start, head_dim) of these tokens where they still lie on the device, for a kind that has
    them coded there.
    """

    host: HostPath
    start: int
    stop: int
    extend: bool
    queries: Tensor | np.ndarray | None = None
    lists: Tensor | np.ndarray | None = None
    keys: Tensor | None = None


class HostWork:
    """Copies one layer's new keys and values (batch, kv_heads, new, dim) into paths and builds their indexes.

    Order: `append` for each row, `start_copy`, `index` for each path, `start_build`; then `finish` before anybody
    else touches the paths. The tensors must not be written to any more; they are let go when they are copied.
    """

    def __init__(self, number: int, fmt: Format, threads: int | None, stats: LayerStats, kv: tuple[Tensor, Tensor]):
        """number: of the layer, named in errors. threads: of index builds, None = all. stats: gets the seconds."""
        self.device = kv[0].device
        self._number, self._fmt, self._threads, self._stats = number, fmt, threads, stats
        self._kv: tuple[Tensor, Tensor] | None = (kv[0].detach(), kv[1].detach())
        self._whole: set[int] = set()  # paths that hold nothing but this pass: their keys lie on the device as they are
        self._rows: list[tuple[int, HostPath, np.ndarray | None]] = []
        self._jobs: list[_Job] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stop = threading.Event()
        self._ready: torch.cuda.Event | None = None  # keys and values
        self._trained: torch.cuda.Event | None = None  # queries and lists
        self._lends = False  # keys stay on the device until indexes are built
        self._complete = False  # all that will be asked for was asked for
        self.copied: Future[None] | None = None
        self.fetched: Future[None] | None = None  # queries and lists
        self.built: Future[None] | None = None

    def append(self, row: int, host: HostPath, real: np.ndarray | None) -> None:
        """Row `row` goes to the end of `host`; real: (new,) bool, the columns that are tokens, None = all."""
        self._rows.append((row, host, real))
        if real is None and len(host) == 0:
            self._whole.add(id(host))

    def extend(self, host: HostPath, stop: int) -> None:
        """The index of `host` takes in the tokens up to `stop`."""
        self._jobs.append(_Job(host, 0, stop, True))

    def index(self, host: HostPath, start: int, stop: int, queries: Tensor | None, keys: Callable[[], Tensor]) -> None:
        """Tokens [start, stop) of `host` get an index.

        queries: (q_heads, m, head_dim) on the device, to train on, or None. keys: gives the path's keys (kv_heads,
        tokens, head_dim) there, which the training lists are computed from where the device is a GPU.
        """
        job = _Job(host, start, stop, False)
        if queries is not None:
            job.queries, job.lists = queries, self._lists(host, queries, keys, start, stop)
            if job.lists is not None and host.spec.lists_suffice:
                job.queries = None  # the lists say it all
        if host.spec.keeps_device_keys and beside(self.device) and id(host) in self._whole:
            job.keys, self._lends = keys()[:, start:stop], True
        self._jobs.append(job)

    def _lists(
        self, host: HostPath, queries: Tensor, keys: Callable[[], Tensor], start: int, stop: int
    ) -> Tensor | None:
        kk = host.spec.list_length(stop - start)
        if not kk or not beside(self.device):
            return None
        begin = _mark(self.device, timing=True)
        try:
            return nearest_keys(queries, keys()[:, start:stop], kk)
        except torch.cuda.OutOfMemoryError as error:
            log.warning(
                "layer %d: no room for training lists on the device (%s): the CPU makes them", self._number, error
            )
            return None
        finally:
            end = _mark(self.device, timing=True)
            if begin is not None and end is not None:
                self._events.append((begin, end))

    def start_copy(self) -> None:
        """Begin to copy, or copy now on the CPU."""
        if not beside(self.device):
            self._run(self._copy)
            return
        self._ready = _mark(self.device)
        _note(self)
        self.copied = _copier().submit(self._run, self._copy)

    def copy_now(self) -> None:
        """Copy and return when it is done: for few tokens, and in the middle of a step."""
        self._run(self._copy_directly)

    def start_build(self) -> None:
        """Begin to build what `index` asked for as soon as the keys are copied, or build now on the CPU."""
        self._trained = _mark(self.device)
        if not self._jobs:
            pass
        elif beside(self.device):
            # at once, not when their turn to be built comes: many layers may wait for that
            self.fetched = _copier().submit(self._run, self._fetch)
            self.built = _layers().submit(self._run, self._build)
        else:
            self._run(self._fetch)
            self._run(self._build)
        self._complete = True

    def finish_copy(self) -> None:
        """Wait until keys and values are on the host. Raises what went wrong there."""
        self._wait(self.copied)

    def finish(self) -> None:
        """Wait until everything is done. Raises what went wrong, with the layer named, or CacheMismatchError after
        `abandon`.
        """
        for future in self._futures():
            self._wait(future)
        for begin, end in self._events:
            end.synchronize()
            self._stats.lists_seconds += begin.elapsed_time(end) / 1000
        self._events = []

    def check(self) -> None:
        """Raise what went wrong so far, without waiting."""
        for future in self._futures():
            if future.done():
                self._wait(future)

    def abandon(self) -> None:
        """Do not begin what has not begun, and stop after the heads that are being built. Does not wait."""
        self._stop.set()
        for future in reversed(self._futures()):
            future.cancel()

    def give_up(self) -> None:
        """`abandon`, and wait until nothing is under way. What was copied or indexed so far stays."""
        self.abandon()
        concurrent.futures.wait(self._futures())

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return self._complete and all(future.done() for future in self._futures())

    def leaving(self) -> list[Future[None]]:
        """What is under way from the device."""
        futures = self.copied, self.fetched, self.built if self._lends else None
        return [future for future in futures if future is not None and not future.done()]

    def _futures(self) -> list[Future[None]]:
        return [future for future in (self.copied, self.fetched, self.built) if future is not None]

    def _wait(self, future: Future[None] | None) -> None:
        if future is None:
            return
        try:
            future.result()
        except CancelledError:
            raise CacheMismatchError(
                f"Layer {self._number}: reading was interrupted before its keys were indexed. Make a new cache and "
                "read again."
            ) from None

    def _run(self, work: Callable[[], None]) -> None:
        """Errors with the layer named; they keep their class."""
        try:
            work()
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

    # -- copying --------------------------------------------------------------------------------------

    def _copy(self) -> None:
        if not beside(self.device):
            self._copy_directly()
            return
        began = time.perf_counter()
        assert self._kv is not None
        staging(self.device).bring(self._pieces(*self._kv), self._ready)
        self._kv = None  # the device has read them: whoever takes their memory next may write to it at once
        self._stats.copy_seconds += time.perf_counter() - began

    def _copy_directly(self) -> None:
        began = time.perf_counter()
        assert self._kv is not None
        for row, host, real in self._rows:
            key, value = (to_host(tensor[row], self._fmt) for tensor in self._kv)
            _append(host, real, key, value)
        self._kv = None
        self._stats.copy_seconds += time.perf_counter() - began

    def _pieces(self, key: Tensor, value: Tensor) -> Iterator[Piece]:
        """As many tokens of a row as fit a buffer, keys and values together."""
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

    # -- building -------------------------------------------------------------------------------------

    def _build(self) -> None:
        if self.copied is not None:
            self.copied.result()
        if self.fetched is not None:
            self.fetched.result()
        began = time.perf_counter()
        while self._jobs:
            job = self._jobs.pop(0)
            if self._stop.is_set():
                raise CancelledError
            if job.extend:
                job.host.extend_index(job.stop)
                continue
            assert not isinstance(job.queries, Tensor) and not isinstance(job.lists, Tensor)
            keys, job.keys = job.keys, None  # the device's memory is free again once they are coded
            coded = job.host.spec.keeps_device_keys
            coder = DeviceCoder(self.device, job.host.num_kv_heads) if coded else None
            each = None
            if beside(self.device):
                each = functools.partial(self._each, _coders() if coded else _heads(self._threads))
            with contextlib.nullcontext() if coder is None or keys is None else coder.lent(keys, self._ready):
                job.host.build_index(job.start, job.stop, job.queries, job.lists, each, coder)
        self._stats.index_seconds += time.perf_counter() - began

    def _each(self, crew: Crew, build: Callable[[int], Any], heads: Iterable[int]) -> list[Any]:
        """build(head) for all heads by the crew, each with the threads that are left to it."""

        def one(head: int) -> Any:
            if self._stop.is_set():
                raise CancelledError
            with kernel_threads(max(1, crew.most // max(1, crew.busy))), single_blas():
                return build(head)

        return crew.map(one, heads)

    def _fetch(self) -> None:
        """Queries and lists as host arrays."""
        for job in self._jobs:
            for name in ("queries", "lists"):
                tensor = getattr(job, name)
                if isinstance(tensor, Tensor):
                    setattr(job, name, self._fetched(tensor.float() if name == "queries" else tensor))

    def _fetched(self, tensor: Tensor) -> np.ndarray:
        if self.device.type != "cuda":
            return tensor.cpu().numpy()
        array = np.empty(tensor.shape, np.float32 if tensor.dtype == torch.float32 else np.int32)
        flat, out = tensor.reshape(-1), array.reshape(-1)
        ring = staging(self.device)
        step = ring.size // tensor.element_size()

        def pieces() -> Iterator[Piece]:
            for start in range(0, len(flat), step):
                yield [flat[start : start + step]], functools.partial(_fill, out[start : start + step])

        ring.bring(pieces(), self._trained)
        return array


def beside(device: torch.device) -> bool:
    """Whether the host works while the device computes. On the CPU both want the same cores."""
    return device.type == "cuda"


def make_room(device: torch.device) -> float:
    """Called before a layer takes memory for its keys: one earlier layer may still be copied, and few may wait for
    their indexes. Returns the seconds waited. What went wrong is left to `finish`.
    """
    began = time.perf_counter()
    works = _under_way(device)
    leaving = [left for work in works if (left := work.leaving())]
    concurrent.futures.wait([future for left in leaving[:-1] for future in left])
    building = [work.built for work in works if work.built is not None and not work.built.done()]
    concurrent.futures.wait(building[: max(0, len(building) - BACKLOG)])
    return time.perf_counter() - began if leaving[:-1] or building[BACKLOG:] else 0.0


def drain(device: torch.device) -> None:
    """Wait until no layer's keys are being copied from the device any more, so that their memory is free."""
    concurrent.futures.wait([future for work in _under_way(device) for future in work.leaving()])


_works: list[HostWork] = []
_works_lock = threading.Lock()


def _note(work: HostWork) -> None:
    with _works_lock:
        _works[:] = [other for other in _works if not other.done]
        _works.append(work)


def _under_way(device: torch.device) -> list[HostWork]:
    with _works_lock:
        _works[:] = [work for work in _works if not work.done]
        return [work for work in _works if work.device == device]


@functools.cache
def _copier() -> Crew:
    return Crew(1, "retrieval_attn-copy")


@functools.cache
def _fillers() -> Crew:
    return Crew(FILLERS, "retrieval_attn-fill")


@functools.cache
def _coders() -> Crew:
    """Few: coding is the device's work, and each thread more holds the one up that drives the device."""
    return Crew(CODERS, "retrieval_attn-code")


@functools.cache
def _layers() -> Crew:
    return Crew(LAYERS_AT_ONCE, "retrieval_attn-layer")


@functools.cache
def _heads(threads: int | None) -> Crew:
    """Builders of heads: one core is left to the thread that drives the device."""
    most = min(vars(numba.config)["NUMBA_NUM_THREADS"], len(usable_cores()))  # of several ranks on a machine: its share
    return Crew(max(1, (most if threads is None else threads) - 1), "retrieval_attn-index")


def _mark(device: torch.device, timing: bool = False) -> torch.cuda.Event | None:
    """An event at this point of the device's current stream; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timing)
    event.record(torch.cuda.current_stream(device))
    return event


def _append(host: HostPath, real: np.ndarray | None, keys: np.ndarray, values: np.ndarray) -> None:
    """By several threads where there is much: memory that is written for the first time is slow to be had."""
    if real is not None:
        keys, values = keys[:, real], values[:, real]
    if keys.nbytes < SHARED_COPY:
        host.append(keys, values)
    else:
        host.append(keys, values, _fillers().map)


def _fill(out: np.ndarray, part: np.ndarray) -> None:
    out[...] = part
