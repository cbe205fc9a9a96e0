"""Int8RowMirror: an int8 copy of a segment's keys and values in host memory, which a GPU reads over the bus.

A step attends to a few hundred scattered keys of each head. Loads of them by the CPU wait for its memory, and the
device waits for the CPU; loads by the device itself overlap by the thousand and fetch the same rows at the bus's rate
(`gpu/codes/host_row_gather.py`). A key and its value form one row, aligned to a multiple of its parts, so that no bus
request fetches other data; the float32 steps of the int8 numbers, which would not fit the row, stay on the device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.replica import KVReplica, register_replica
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.store import SequenceKV, segments_of
from retrieval_attn.errors import MemoryPlanError, StoreError
from retrieval_attn.gpu.codes.codes import capacity_for
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry, RowShape
from retrieval_attn.index.base import HeldMemory
from retrieval_attn.index.device import SPARE_TOKENS
from retrieval_attn.index.formats import Format
from retrieval_attn.memory.reclaim import register
from retrieval_attn.offload.codes import side_stream
from retrieval_attn.offload.managed import as_device, has_managed, host_rows, take_pages
from retrieval_attn.offload.page_lock import locked_rows
from retrieval_attn.offload.staging import TORCH_DTYPE, brought_together, copy_runs, pack, pinned, stored_on
from retrieval_attn.offload.threads import ThreadPool, foreground, with_device_memory
from retrieval_attn.store.mapped import populate

log = logging.getLogger(__name__)
AT_ONCE = 1 << 13
"""Tokens of a segment that are converted to rows at once: 32 MiB of keys and values of eight heads."""
KIND = "int8_rows"
"""Name of these replicas."""
ROWS_FROM = 128
"""Minimum tokens of a text with int8 rows. A shorter one is in the window, and allocating managed memory for all layers
delays its first token."""
MAKERS = max(1, min(3, (os.cpu_count() or 1) // 4))
"""Threads that make rows: the bandwidth of host memory bounds the copies out of files, and steps need most cores."""
NO_ROOM = MemoryPlanError, torch.OutOfMemoryError
WORD = torch.int32
"""Dtype of writes to rows."""


GROWN_SHARE = 4
"""Where rows outgrow their memory, a part in this number more are allocated than are needed: all are copied then."""


@register_replica
class Int8RowMirror(KVReplica[Segment]):
    """See the module. `length` tokens of the segment have rows, from token `first` on: before it are
    those of pages, which the host does not hold.

    Several threads may ask for rows at once, as forks do that share a segment. used: order of the last use.
    """

    kind = KIND
    of_segments = from_device = reclaimable = True

    def __init__(self, heads: int, shape: RowShape, expected: int, device: torch.device) -> None:
        """Allocate rows of `expected` tokens and some spare ones, of `heads` key-value heads; a thread populates the
        pages for a GPU. Raises MemoryPlanError.
        """
        self.shape, self.first, self.length = shape, 0, 0
        self._heads, self._device, self._turn = heads, device, threading.Lock()
        self._taken: Future[None] | None = None
        self._asked: tuple[tuple[int, ...], list[GatherEntry]] | None = None
        self._offloaded = False
        self._copy: Tensor | None = None  # of the steps, in host memory
        self._writes = 0  # begun and ended
        self.used = next(_uses)
        weakref.finalize(self, _held_bytes.pop, id(self), None)
        self._take(capacity_for(expected + SPARE_TOKENS))
        if device.type == "cuda" and has_managed(device):
            self._taken = _takers().submit(take_pages, self._memory.view(-1).numpy())

    def _take(self, capacity: int) -> None:
        rows = host_rows(self._heads, capacity, self.shape.width, self._device)
        self._rows = rows if self._device.type == "cpu" else as_device(rows, self._device)
        self._memory = rows  # referenced, since `_rows` is only its address
        self._steps = torch.empty(self._heads, capacity, 2, device=self._device)
        self._count()

    def _count(self) -> None:
        _held_bytes[id(self)] = self.nbytes.host

    @property
    def device(self) -> torch.device:
        """Device that reads the rows."""
        return self._device

    @classmethod
    def of_prefill(cls, path: SequenceKV, keys: Tensor, values: Tensor) -> Int8RowMirror | None:
        """Return rows of a path without tokens of its own whose device reads rows; None for a short one."""
        wanted = path.spec.host_reads.rows and keys.shape[1] >= ROWS_FROM
        return new_rows(keys, values) if wanted and all(one.is_hole for one in path.segments) else None

    def attach(self, owner: Segment, start: int) -> None:
        self.first = start
        _note(owner)

    @property
    def num_tokens(self) -> int:
        return self.first + self.length

    @property
    def nbytes(self) -> HeldMemory:
        """Bytes of rows, spare ones included, with a copy of the steps, and of the steps on the device."""
        host = self._memory.nbytes + (0 if (copy := self._copy) is None else copy.nbytes)
        return HeldMemory(host, self.offloadable_bytes())

    def offloadable_bytes(self, segments: Iterable[Segment] = ()) -> int:
        return 0 if self._offloaded else self._steps.nbytes

    def offload(self, segments: Iterable[Segment] = ()) -> None:
        """Move the steps to host memory until rows are asked for again. What reads the rows now keeps its steps."""
        with self._turn:
            if not self._offloaded:
                self._steps, self._asked, self._offloaded = self._copied(), None, True

    def copy_to_host(self) -> None:
        """Make the copy of the steps that `offload` needs, if there is none."""
        with self._turn:
            if not self._offloaded:
                self._copied()

    def _copied(self) -> Tensor:
        if (copy := self._copy) is not None:
            return copy
        writes = self._writes
        with side_stream(self._device):
            if self._device.type == "cuda":  # what wrote them
                torch.cuda.current_stream(self._device).wait_stream(torch.cuda.default_stream(self._device))
            copy = brought_together([self._steps])[0]
            if copy is self._steps:  # on a CPU; else page-locked memory, from where it comes back faster
                copy = copy.clone()
        self._copy = copy if writes == self._writes else None
        self._count()
        return copy

    def _load(self) -> None:
        if self._offloaded:
            self._steps, self._offloaded = self._steps.to(self._device, copy=True), False

    def append_device(self, owner: Segment, start: int, keys: Tensor, values: Tensor) -> None:
        """See `KVReplica`. Without memory for them the segment drops its rows."""
        with self._turn:
            self._load()
            if self._has_rows_to(owner, start) and self.num_tokens == start:
                self._written(owner, keys, values)

    def _has_rows_to(self, segment: Segment, stop: int) -> bool:
        """Copy rows of tokens before `stop` that are missing from the host. Return False if there is no memory."""
        if stop <= self.num_tokens:
            return True
        stored = segment.read(self.num_tokens, stop)
        return self._written(segment, *(stored_on(self._device, array, segment.fmt) for array in stored))

    def _written(self, segment: Segment, keys: Tensor, values: Tensor) -> bool:
        """Call `write`. Return False if there is no memory: the segment then drops its rows."""
        try:
            self.write(keys, values)
        except NO_ROOM as error:
            _say_none(segment.length, str(error))
            segment.replicas[KIND] = RowsUnderWay(done=True)
            return False
        return True

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Append rows of keys (heads, n, head_dim) and values (heads, n, value_dim), of a floating dtype or stored as
        int8, on the current stream. Raises MemoryPlanError.
        """
        start, stop = self.length, self.length + keys.shape[1]
        self._copy, self._writes = None, self._writes + 1
        if self._taken is not None:
            self._taken.result()
            self._taken = None
        if stop > self._rows.shape[1]:
            before, steps = self._rows, self._steps
            self._take(capacity_for(stop + stop // GROWN_SHARE))
            self._rows[:, :start], self._steps[:, :start] = before[:, :start], steps[:, :start]
        words = self._rows.view(WORD)
        for head, both in enumerate(zip(keys, values, strict=True)):
            place = 0
            for part, numbers in enumerate(both):
                packed = (numbers if numbers.dtype == torch.int8 else pack(numbers, Format.INT8)).view(WORD)
                count = packed.shape[1] - 1
                words[head, start:stop, place : place + count] = packed[:, :-1]
                self._steps[head, start:stop, part] = packed[:, -1].view(torch.float32)
                place += count
        self._copy, self._writes, self.length = None, self._writes + 1, stop
        self._count()

    def entries(self, segment: Segment, start: int, stop: int, least: int) -> list[GatherEntry] | None:
        """Return the int8 rows of tokens [start, stop) of the segment for each head; copy missing rows from the host.
        None if there is no memory for them: the segment then drops its rows.

        least: as in `GatherEntry`.
        """
        with self._turn:
            self.used = next(_uses)
            self._load()
            if not self._has_rows_to(segment, stop):
                return None
            asked = start, stop, least, self._rows.data_ptr()
            if self._asked is None or self._asked[0] != asked:  # the same objects, which plans compare by identity
                span = slice(start - self.first, stop - self.first)
                own = zip(self._rows.view(torch.int8)[:, span], self._steps[:, span], strict=True)
                self._asked = asked, [GatherEntry(rows, steps, stop - start, least) for rows, steps in own]
            return self._asked[1]

    def truncate(self, owner: Segment, length: int) -> bool:
        self.length = max(0, min(self.length, length - self.first))
        return True


def rows_of(segment: Segment) -> Int8RowMirror | RowsUnderWay | None:
    """Return the rows of a segment or their placeholder; None: nothing has asked for rows."""
    found = segment.replicas.get(KIND)
    assert found is None or isinstance(found, Int8RowMirror | RowsUnderWay)
    return found


def new_rows(keys: Tensor, values: Tensor) -> Int8RowMirror | None:
    """Allocate rows for keys (heads, n, head_dim) and values (heads, n, value_dim); None, with a log line, if kernels
    do not read rows of this shape or there is no memory.
    """
    shape = RowShape(keys.shape[2], values.shape[2])
    try:
        return Int8RowMirror(len(keys), shape, keys.shape[1], keys.device) if shape.readable else None
    except NO_ROOM as error:
        _say_none(keys.shape[1], str(error))
        return None


_held_bytes: dict[int, int] = {}
"""Bytes of host memory of all int8 rows of the process, by their ids."""


def held_rows_bytes() -> int:
    """Return the bytes of host memory of all int8 rows of the process."""
    return sum(list(_held_bytes.values()))  # a copy: other threads make and drop rows


def drop_rows(nbytes: int) -> int:
    """Free int8 rows of at least `nbytes` bytes, the least recently used ones first. Returns the freed bytes."""
    return _holder.reclaim(nbytes, 0)[0]


class RowHolder:
    """All int8 rows of the process, as a holder of memory: texts are worth more than a copy that speeds up others."""

    def reclaim(self, host: int, device: int) -> tuple[int, int]:
        """Free rows of at least `host` bytes, or all, the least recently used ones first.

        Rows that a captured step reads are freed once it serves another text.
        """
        freed = 0
        for segment, one in sorted(_present_rows(), key=lambda both: both[1].used):
            if freed >= host:
                break
            freed += one.nbytes.host
            segment.replicas[KIND] = RowsUnderWay(done=True)
        return freed, 0

    def idle_device_bytes(self) -> int:
        """Return 0: rows are in host memory."""
        return 0


_having: weakref.WeakSet[Segment] = weakref.WeakSet()
"""Segments with rows."""
_noting = threading.Lock()


def _note(segment: Segment) -> None:
    """Count a segment among those with rows. Any thread: a set must not grow while another one reads it."""
    with _noting:
        _having.add(segment)


def _present_rows() -> list[tuple[Segment, Int8RowMirror]]:
    with _noting:
        segments = list(_having)
    return [(segment, one) for segment in segments if isinstance(one := rows_of(segment), Int8RowMirror)]


_uses = itertools.count()
_holder = RowHolder()
register(_holder, first=True)


class RowsUnderWay(KVReplica[Segment]):
    """Placeholder of rows that a thread makes, that it failed to make, or that were dropped.

    done: whether no thread makes them any more.
    """

    kind = KIND
    of_segments = reclaimable = True
    num_tokens, nbytes = 0, HeldMemory(0)

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def truncate(self, owner: Segment, length: int) -> bool:
        return True


class AwaitedRows:
    """Int8 rows of some paths that threads make, for a plan that is to use them as soon as all are complete.

    A plan is made between `watch` and `watch_asked`.
    """

    def __init__(self) -> None:
        self._under_way: list[RowsUnderWay] = []
        self._waits, self._finished = False, 0

    @property
    def are_pending(self) -> bool:
        """Whether some rows are not complete."""
        while self._under_way and self._under_way[-1].done:
            self._under_way.pop()
        return bool(self._under_way)

    @property
    def are_complete(self) -> bool:
        """Whether rows were completed that the last plan did not find. Takes no time for rows that are not."""
        return self._waits and not self.are_pending

    def watch(self, paths: Iterable[SequenceKV]) -> None:
        """Watch the rows of these paths that threads make now."""
        self._finished = _finished.count
        self._under_way = _rows_under_way(paths)

    def watch_asked(self, paths: Iterable[SequenceKV]) -> None:
        """Watch the rows that the plan asked for, too."""
        self._under_way += [one for one in _rows_under_way(paths) if one not in self._under_way]
        # a thread that finished meanwhile may have made rows that the plan asked for and did not find
        self._waits = bool(self._under_way) or self._finished != _finished.count


class _Finished:
    """Number of segments for which a thread made rows or failed to."""

    def __init__(self) -> None:
        self.count, self._lock = 0, threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


_finished = _Finished()


def _rows_under_way(paths: Iterable[SequenceKV]) -> list[RowsUnderWay]:
    held = [rows_of(segment) for segment in segments_of(paths)]
    return [one for one in held if isinstance(one, RowsUnderWay) and not one.done]


def ask_for_rows(segment: Segment, device: torch.device) -> None:
    """Make rows of a frozen segment without any in a thread, such as one of an opened context. Plans use the rows once
    they are complete.
    """
    if rows_of(segment) is None and segment.frozen:
        segment.replicas[KIND] = under_way = RowsUnderWay(done=False)
        _makers().submit(_make_rows, weakref.ref(segment), device, under_way)


def _make_rows(reference: weakref.ref[Segment], device: torch.device, under_way: RowsUnderWay) -> None:
    segment = reference()
    try:
        if segment is not None:
            segment.replicas[KIND] = _made_rows(segment, device)
            _note(segment)
    except (*NO_ROOM, StoreError, OSError) as error:
        assert segment is not None
        _say_none(segment.length, str(error))
    finally:
        _finished.add()
        under_way.done = True  # at last: plans look for the rows when they see it


def _made_rows(segment: Segment, device: torch.device) -> Int8RowMirror:
    """Make the rows of a frozen segment, piece by piece. Raises StoreError, OSError and what NO_ROOM lists.

    While foreground work runs, one thread makes rows at a time, and it rests as long as it used the bus.
    """
    dims = (segment.fmt.dim_of(array) for array in (segment.keys, segment.values))
    shape = RowShape(*dims)
    rows = with_device_memory(lambda: Int8RowMirror(len(segment.keys), shape, segment.length, device), _sleep)
    for start in range(0, segment.length, AT_ONCE):
        write = functools.partial(_write_piece, rows, segment, start, min(start + AT_ONCE, segment.length))
        with _alone if foreground.is_recent else contextlib.nullcontext():
            seconds = with_device_memory(write, _sleep)
            if foreground.is_recent:
                _sleep(seconds)
    return rows


def _write_piece(rows: Int8RowMirror, segment: Segment, start: int, stop: int) -> float:
    """Write the rows of tokens [start, stop). Return the seconds in which the device worked."""
    device = rows.device
    if device.type == "cuda" and segment.locked_rows is not None:
        stored = [torch.from_numpy(array) for array in locked_rows(segment, start, stop)]
    else:
        stored = [_staged(array, device) for array in segment.read(start, stop)]
    began = time.perf_counter()
    with side_stream(device):
        rows.write(*(_sent(one, device).view(TORCH_DTYPE[segment.fmt]) for one in stored))
    return time.perf_counter() - began


def _staged(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy keys or values (heads, n, width) out of their file, to pinned memory for a GPU."""
    for head in array:
        populate(head)
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    room = pinned(array.nbytes).view(torch.from_numpy(array[:0]).dtype).view(array.shape)
    np.copyto(room.numpy(), array)
    return room


def _sent(stored: Tensor, device: torch.device) -> Tensor:
    """Copy page-locked keys or values to a GPU by the current stream, without waiting."""
    if device.type != "cuda":
        return stored
    there = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    copy_runs(there, stored)
    return there


def _sleep(seconds: float) -> None:
    """Sleep, unless the process ends: it joins its threads. Raises MemoryPlanError then, as if there were no memory."""
    if not threading.main_thread().is_alive():
        raise MemoryPlanError("the process ends")
    time.sleep(seconds)


_alone = threading.Lock()
"""Held by the one thread that makes rows while foreground work runs."""


@functools.cache
def _say_none(tokens: int, reason: str) -> None:
    """Log once, not for every layer."""
    log.warning("no int8 rows for the GPU, so the CPU attends to the candidates of %d tokens (%s)", tokens, reason)


@functools.cache
def _makers() -> ThreadPool:
    return ThreadPool(MAKERS, "retrieval_attn-rows")


@functools.cache
def _takers() -> ThreadPool:
    return ThreadPool(2, "retrieval_attn-pages")
