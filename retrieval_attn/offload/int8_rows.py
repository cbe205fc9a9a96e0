"""Int8RowMirror: an int8 copy of a segment's keys and values in host memory, which a GPU reads over the bus.

A step attends to a few hundred keys of each head, wherever they are. The processor's loads of them wait for its memory,
and the device for the processor's answer; the device itself has thousands of loads under way, and brings the same rows
at the bus's rate (`gpu/codes/host_row_gather.py`). What a key and its value take there is one row, begun on a multiple
of its parts, so that no request of the bus brings anything else; their steps, which would not fit, lie on the device.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref

import torch
from torch import Tensor

from retrieval_attn.cpu.segment import Segment
from retrieval_attn.errors import MemoryPlanError, StoreError
from retrieval_attn.gpu.codes.codes import capacity_for
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry, RowShape
from retrieval_attn.index.device import SPARE_TOKENS
from retrieval_attn.index.formats import Format
from retrieval_attn.memory.reclaim import register
from retrieval_attn.offload.codes import beside
from retrieval_attn.offload.managed import as_device, has_managed, host_rows, take_pages
from retrieval_attn.offload.staging import pack, stored_on
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.store.mapped import populate

log = logging.getLogger(__name__)
AT_ONCE = 1 << 14
"""Tokens of a segment whose rows are made at a time, of what the host stores."""
NO_ROOM = MemoryPlanError, torch.OutOfMemoryError
WORD = torch.int32
"""Rows are written by numbers of it."""


class Int8RowMirror:
    """See the module. `length` tokens of the segment have rows, from token `first` on: before it are
    those of pages, which the host does not hold.

    Several threads may ask for rows at once, as forks do that share a segment.
    """

    def __init__(self, heads: int, shape: RowShape, expected: int, device: torch.device) -> None:
        """Memory for `expected` tokens and a few more, of `heads` key-value heads: for a GPU its pages are taken
        while the caller goes on. Raises MemoryPlanError.
        """
        self.shape, self.first, self.length = shape, 0, 0
        self._heads, self._device, self._turn = heads, device, threading.Lock()
        self._taken: torch.cuda.Event | None = None
        self._asked: tuple[tuple[int, ...], list[GatherEntry]] | None = None
        self._take(capacity_for(expected + SPARE_TOKENS))
        if device.type == "cuda" and has_managed(device):
            stream = _taking(device)
            take_pages(self._memory.view(-1).numpy(), stream)
            self._taken = stream.record_event()

    def _take(self, capacity: int) -> None:
        rows = host_rows(self._heads, capacity, self.shape.width, self._device)
        self._rows = rows if self._device.type == "cpu" else as_device(rows, self._device)
        self._memory = rows  # kept: the other one is its address
        self._steps = torch.empty(self._heads, capacity, 2, device=self._device)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, with room for more."""
        return self._memory.nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory."""
        return self._steps.nbytes

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Rows of the next tokens, keys (heads, n, head_dim) and values (heads, n, value_dim) of a floating dtype, or
        as int8 is stored, by the current stream. Raises MemoryPlanError.
        """
        start, stop = self.length, self.length + keys.shape[1]
        if self._taken is not None:
            torch.cuda.current_stream(self._device).wait_event(self._taken)
            self._taken = None
        if stop > self._rows.shape[1]:
            before, steps = self._rows, self._steps
            self._take(capacity_for(stop + stop // 16))
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
        self.length = stop

    def entries(self, segment: Segment, start: int, stop: int, least: int) -> list[GatherEntry] | None:
        """Return the int8 rows of tokens [start, stop) of the segment for each head; copy missing rows from the host.
        None if there is no memory for them: the segment then drops its rows.

        least: as in `GatherEntry`.
        """
        with self._turn:
            if stop > self.first + self.length:
                stored = segment.read(self.first + self.length, stop)
                if not write_rows(segment, self, *(stored_on(self._device, array, segment.fmt) for array in stored)):
                    return None
            asked = start, stop, least, self._rows.data_ptr()
            if self._asked is None or self._asked[0] != asked:  # the same objects, which plans know again
                span = slice(start - self.first, stop - self.first)
                own = zip(self._rows.view(torch.int8)[:, span], self._steps[:, span], strict=True)
                self._asked = asked, [GatherEntry(rows, steps, stop - start, least) for rows, steps in own]
            return self._asked[1]

    def cut(self, length: int) -> None:
        """The segment's tokens from `length` on are others."""
        self.length = max(0, min(self.length, length - self.first))


def new_rows(keys: Tensor, values: Tensor) -> Int8RowMirror | None:
    """Memory for rows of keys (heads, n, head_dim) and values (heads, n, value_dim); None where no device reads such,
    or no memory is had: the log says so.
    """
    shape = RowShape(keys.shape[2], values.shape[2])
    try:
        return Int8RowMirror(len(keys), shape, keys.shape[1], keys.device) if shape.readable else None
    except NO_ROOM as error:
        _say_none(keys.shape[1], str(error))
        return None


def rows_behind(segment: Segment, tokens: int, empty: Int8RowMirror | None) -> Int8RowMirror | None:
    """Memory for the rows of the segment's newest `tokens` tokens; None: it has no rows, or not those of all before.
    empty: for a segment whose first tokens they are.
    """
    start = segment.length - tokens
    if start < 0:  # they went to two segments
        return None
    if segment.rounded is None and empty is not None:
        segment.rounded, empty.first = empty, start
        _having.add(segment)
    rounded = segment.rounded
    return rounded if isinstance(rounded, Int8RowMirror) and rounded.first + rounded.length == start else None


def write_rows(segment: Segment, rounded: Int8RowMirror, keys: Tensor, values: Tensor) -> bool:
    """`Int8RowMirror.write` for a segment that has these rows. False: there is no memory, and it has none any more."""
    try:
        rounded.write(keys, values)
    except NO_ROOM as error:
        _say_none(segment.length, str(error))
        segment.rounded = RowsUnderWay()
        return False
    return True


class RowHolder:
    """All int8 rows of the process, as a holder of memory: texts are worth more than a copy that speeds up others."""

    def reclaim(self, host: int, device: int) -> tuple[int, int]:
        """Free rows of at least `host` bytes, or all; those that a captured step reads once it serves another text."""
        freed = 0
        for segment in list(_having):
            if freed >= host:
                break
            if isinstance(segment.rounded, Int8RowMirror):
                freed += segment.rounded.nbytes
                segment.rounded = RowsUnderWay()
        return freed, 0

    def idle_device_bytes(self) -> int:
        """Return 0: rows are in host memory."""
        return 0


_having: weakref.WeakSet[Segment] = weakref.WeakSet()
"""Segments that were given rows."""
_holder = RowHolder()
register(_holder, first=True)


class RowsUnderWay:
    """In place of rows that a thread makes, or could not make, or that were dropped."""

    nbytes = device_nbytes = 0

    def cut(self, length: int) -> None:
        """There are none, and a frozen segment is not cut."""


def ask_for_rows(segment: Segment, device: torch.device) -> None:
    """Have a thread make rows of a segment without any, if nothing is added to it any more: of a context that was
    opened, say. Plans find them once they are there.
    """
    if segment.rounded is None and segment.frozen:
        segment.rounded = RowsUnderWay()
        _makers().submit(_make_rows, weakref.ref(segment), device)


def _make_rows(reference: weakref.ref[Segment], device: torch.device) -> None:
    segment = reference()
    if segment is None:
        return
    dims = (segment.fmt.dim_of(array) for array in (segment.keys, segment.values))
    try:
        rows = Int8RowMirror(len(segment.keys), RowShape(*dims), segment.length, device)
        for start in range(0, segment.length, AT_ONCE):
            stored = segment.read(start, min(start + AT_ONCE, segment.length))
            for array in stored:
                for head in array:
                    populate(head)
            with beside(device):
                rows.write(*(stored_on(device, array, segment.fmt) for array in stored))
    except (*NO_ROOM, StoreError, OSError) as error:
        _say_none(segment.length, str(error))
        return
    segment.rounded = rows
    _having.add(segment)


@functools.cache
def _say_none(tokens: int, reason: str) -> None:
    """Once, not of every layer."""
    log.warning("the host attends to what is named of %d tokens: no rows for the device (%s)", tokens, reason)


@functools.cache
def _makers() -> ThreadPool:
    return ThreadPool(1, "retrieval_attn-rows")


@functools.cache
def _taking(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
