"""Uploads: keys and values of host paths on their way back to a device, block by block, ahead of who attends to them.

An exact question attends to the whole context once per layer. Blocks cross on a stream of their own into a ring of
buffers while earlier ones are attended to; the ring goes on into the next layer's path, so that the bus never waits for
a layer to end. The device holds a few blocks, whatever the length of the context. From page-locked memory
(`offload/page_lock.py`) a block crosses as it lies; the rest is gathered by threads into page-locked buffers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.store import PathPart, SequenceKV
from retrieval_attn.offload.staging import pinned
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.transfer import TORCH_DTYPE, unpack

BLOCK_BYTES = 128 << 20
"""Bytes of a block's keys and values as stored: few calls for a layer, and a ring that does not show."""
BLOCKS = 3
GATHERERS = 8
"""Threads that gather rows of ordinary memory: one alone copies at 4 GB/s, a tenth of the bus."""
GATHER_BUFFERS = 3
INLINE_BYTES = 4 << 20
"""So little outside page-locked memory is copied at once; more is left to the threads."""


@dataclass(frozen=True)
class Stretch:
    """The first `stop` tokens of a path, as blocks of `tokens`."""

    host: SequenceKV
    stop: int
    tokens: int

    @classmethod
    def of(cls, host: SequenceKV, stop: int | None = None) -> Stretch:
        """stop: None = all tokens of `host`."""
        return cls(host, len(host) if stop is None else stop, max(1, BLOCK_BYTES // host.token_bytes))

    def blocks(self) -> list[tuple[PathPart, ...]]:
        """The parts that each block's tokens lie in; [] for no tokens."""
        starts = range(0, self.stop, self.tokens)
        return [tuple(self.host.parts(start, min(start + self.tokens, self.stop))) for start in starts]


class _Rows(NamedTuple):
    """Stored keys and values (kv_heads, tokens, width) of a block, the one behind the other in `flat` (bytes,)."""

    flat: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, host: SequenceKV, tokens: int, buffer: Tensor) -> _Rows:
        """buffer: uint8, large enough, anywhere."""
        widths = host.fmt.row_bytes(host.head_dim), host.fmt.row_bytes(host.value_dim)
        sizes = [host.num_kv_heads * tokens * width for width in widths]
        flat = buffer[: sum(sizes)]
        dtype = TORCH_DTYPE[host.fmt]
        key, value = (part.view(dtype).view(host.num_kv_heads, tokens, -1) for part in flat.split(sizes))
        return cls(flat, key, value)


@dataclass
class _Block:
    """A block in a buffer of the device, or on its way there. parts: what it holds, alive until it has arrived."""

    host: SequenceKV
    parts: tuple[PathPart, ...]
    buffer: Tensor
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    gathering: Future[None] | None = None

    def rows_in(self, buffer: Tensor) -> _Rows:
        """The block's rows, laid out in `buffer`."""
        return _Rows.of(self.host, sum(part.high - part.low for part in self.parts), buffer)


class Uploads:
    """The blocks under way to one device. For one thread at a time; `clear` before the host's tokens change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._ahead: deque[_Block] = deque()
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def walk(
        self, stretches: Sequence[Stretch], dtype: torch.dtype, then: Sequence[Stretch] = ()
    ) -> Generator[tuple[int, Tensor, Tensor], None, None]:
        """Number of the stretch, keys (1, kv_heads, tokens, head_dim) and values of its next block, in `dtype`.

        A block may be overwritten once the next one is asked for, by what runs on the current stream after this.
        then: what will be walked next; its first blocks are sent ahead. Without any the buffers are given back.
        """
        wanted = [(number, one, parts) for number, one in enumerate(stretches) for parts in one.blocks()]
        later = [(one, parts) for one in then for parts in one.blocks()[: BLOCKS - 1]]
        todo = deque([*((one, parts) for _, one, parts in wanted), *later])
        for block, (_, parts) in zip(list(self._ahead), list(todo), strict=False):
            if _same(block.parts, parts):
                todo.popleft()
            else:
                self.clear()
                todo = deque([*((one, parts) for _, one, parts in wanted), *later])
                break
        try:
            yield from self._walk(wanted, todo, dtype)
        except BaseException:  # also where nobody goes on asking
            self.clear()
            raise
        if not then:
            self.clear()

    def _walk(
        self,
        wanted: Sequence[tuple[int, Stretch, tuple[PathPart, ...]]],
        todo: deque[tuple[Stretch, tuple[PathPart, ...]]],
        dtype: torch.dtype,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        self._send_ahead(todo)
        for number, one, _ in wanted:
            block = self._ahead.popleft()
            if block.gathering is not None:
                block.gathering.result()
            current = torch.cuda.current_stream(self._device)
            current.wait_event(block.arrived)
            fmt = one.host.fmt
            _, key, value = block.rows_in(block.buffer)
            yield number, unpack(key, fmt, dtype)[None], unpack(value, fmt, dtype)[None]
            del key, value
            used = torch.cuda.Event()
            used.record(current)
            self._free.append((block.buffer, used))
            self._send_ahead(todo)

    def clear(self) -> None:
        """Forget what was sent ahead, and give the buffers back."""
        while self._ahead:
            block = self._ahead.popleft()
            if block.gathering is not None:
                block.gathering.exception()
            block.arrived.synchronize()  # the host's memory may go now
        self._free.clear()

    def __del__(self) -> None:
        self.clear()

    def _send_ahead(self, todo: deque[tuple[Stretch, tuple[PathPart, ...]]]) -> None:
        while todo and len(self._ahead) < BLOCKS - 1:
            self._send(*todo.popleft())

    def _send(self, one: Stretch, parts: tuple[PathPart, ...]) -> None:
        host = one.host
        buffer, used = self._buffer(min(one.tokens, one.stop) * host.token_bytes)
        block = _Block(host, parts, buffer)
        pieces = list(_pieces(parts))
        loose = sum((part.high - part.low) * host.token_bytes for part, _, locked in pieces if not locked)
        if used is not None:
            self._stream.wait_event(used)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what had the memory before
        self._ahead.append(block)
        if loose > INLINE_BYTES:
            block.gathering = _gatherer().submit(self._gather, pieces, block)
            return
        with torch.cuda.stream(self._stream):
            placed = block.rows_in(buffer)
            for part, offset, locked in pieces:
                for source, target in _rows(part, offset, placed):
                    target.copy_(source if locked else source.pin_memory(), non_blocking=True)
            block.arrived.record(self._stream)

    def _gather(self, pieces: list[tuple[PathPart, int, bool]], block: _Block) -> None:
        """Send a block of ordinary memory: threads copy its rows into a page-locked buffer that looks like it."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            placed = block.rows_in(block.buffer)
            buffer, sent = _gather_ring().take(placed.flat.nbytes)
            staged = block.rows_in(buffer)
            _copiers().map(_copy, [pair for part, offset, _ in pieces for pair in _rows(part, offset, staged)])
            placed.flat.copy_(staged.flat, non_blocking=True)
            sent.record(self._stream)
            block.arrived.record(self._stream)

    def _buffer(self, nbytes: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """A buffer of at least so many bytes, and when its last block was used."""
        for number, (buffer, _) in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(number)
        self._free.clear()  # of another path's size
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        made.record_stream(self._stream)
        return made, None


class _GatherRing:
    """Page-locked buffers that blocks of ordinary memory pass. For one thread at a time."""

    def __init__(self) -> None:
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def take(self, nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer of at least so many bytes, and the event to record when it has been read."""
        if len(self._buffers) < GATHER_BUFFERS:
            self._buffers.appendleft((pinned(nbytes), torch.cuda.Event(blocking=True)))
        buffer, sent = self._buffers.popleft()
        sent.synchronize()
        if buffer.nbytes < nbytes:
            buffer = pinned(nbytes)
        self._buffers.append((buffer, sent))
        return buffer, sent


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    source, target = (rows.view(torch.uint8).numpy() for rows in pair)
    np.copyto(target, source)


def _same(one: tuple[PathPart, ...], other: tuple[PathPart, ...]) -> bool:
    """Whether both name the same tokens of the same segments."""
    return len(one) == len(other) and all(
        mine.segment is yours.segment and mine[1:] == yours[1:] for mine, yours in zip(one, other, strict=True)
    )


def _pieces(parts: Sequence[PathPart]) -> Iterator[tuple[PathPart, int, bool]]:
    """The parts cut where page-locked ranges end: (part, first token within the block, whether it is page-locked)."""
    offset = 0
    for part in parts:
        ends = [end for end in part.segment.locked_ends if part.low < end < part.high]
        for low, high in zip([part.low, *ends], [*ends, part.high], strict=True):
            yield part._replace(low=low, high=high), offset, high <= part.segment.locked_tokens
            offset += high - low


def _rows(part: PathPart, offset: int, block: _Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Per head, rows on the host and their place in a block: one run of memory each."""
    count = part.high - part.low
    for array, into in zip(part.segment.read(part.low, part.high), (block.key, block.value), strict=True):
        for head in range(len(array)):
            yield torch.from_numpy(array[head]).view(into.dtype), into[head, offset : offset + count]


def as_blocks(stretches: Sequence[Stretch], like: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What `Uploads.walk` gives where there is no CUDA: each path as one block, where `like` is and in its dtype.

    On the CPU it lies in place where it is stored in that dtype.
    """
    for number, one in enumerate(stretches):
        if not one.stop:
            continue
        key, value = (
            unpack(torch.from_numpy(array).view(TORCH_DTYPE[one.host.fmt]), one.host.fmt, like.dtype).to(like.device)[
                None
            ]
            for array in one.host.read(0, one.stop)
        )
        yield number, key, value


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _gather_ring() -> _GatherRing:
    return _GatherRing()


@functools.cache
def _gatherer() -> ThreadPool:
    """One: blocks are sent in order."""
    return ThreadPool(1, "retrieval_attn-upload")


@functools.cache
def _copiers() -> ThreadPool:
    return ThreadPool(GATHERERS, "retrieval_attn-gather")
