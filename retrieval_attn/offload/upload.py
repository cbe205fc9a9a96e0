"""Uploads: keys and values of host paths on their way back to a device, block by block, ahead of who attends to them.

An exact question attends to the whole context once per layer, in blocks of tokens; a long one through the index wants
all tokens of a head at once, in blocks of heads. Blocks cross on a stream of their own into a ring of
buffers while earlier ones are attended to; the ring goes on into the next layer's path, so that the bus never waits for
a layer to end. The device holds a few blocks, whatever the length of the context. From page-locked memory
(`offload/page_lock.py`) a block crosses as it lies; the rest is gathered by threads into page-locked buffers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.segment import PathPart, Segment
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.memory import spare_bytes
from retrieval_attn.offload.page_lock import lock_file, lockable, locked_rows
from retrieval_attn.offload.staging import TORCH_DTYPE, copy_runs, pinned, unpack
from retrieval_attn.offload.threads import ThreadPool, foreground, questions

BLOCK_BYTES = 128 << 20
"""Bytes of a block's keys and values as stored: few calls for a layer, and a ring that does not show."""
BLOCKS = 3
GATHERERS = 8
"""Threads that gather rows of ordinary memory: one alone copies at 4 GB/s, a tenth of the bus."""
GATHER_BUFFERS = 3
INLINE_BYTES = 4 << 20
"""So little outside page-locked memory is copied at once; more is left to the threads."""
ALIGNED = 16
"""Alignment of the values of a block in bytes; without it kernels would be compiled for others, too."""
HEADROOM = 512 << 20
"""Bytes of a device that `Uploads.reserve` leaves to the rest of a layer."""


class UploadPart(NamedTuple):
    """Content of a block: the tokens that are in `parts`, of key-value heads [first_head, stop_head)."""

    parts: tuple[PathPart, ...]
    first_head: int
    stop_head: int

    @property
    def heads(self) -> int:
        """How many."""
        return self.stop_head - self.first_head

    @property
    def tokens(self) -> int:
        """How many."""
        return sum(part.high - part.low for part in self.parts)


@dataclass(frozen=True)
class UploadSpan:
    """Tokens [start, stop) of a path, as blocks of `tokens` tokens of `heads` key-value heads."""

    host: SequenceKV
    stop: int
    tokens: int
    heads: int
    start: int = 0

    @classmethod
    def of(cls, host: SequenceKV, stop: int | None = None, start: int = 0) -> UploadSpan:
        """Blocks of all heads. stop: None = all tokens of `host`."""
        # a power of two, whatever the format: a long question's attention makes a plan for each length of keys
        tokens = 1 << (max(1, BLOCK_BYTES // host.token_bytes).bit_length() - 1)
        return cls(host, len(host) if stop is None else stop, tokens, host.num_kv_heads, start)

    @classmethod
    def by_heads(cls, host: SequenceKV, stop: int) -> UploadSpan:
        """Blocks of all tokens, of one head at least: larger than others where a context is long."""
        head_bytes = max(1, stop * host.token_bytes // host.num_kv_heads)
        return cls(host, stop, max(1, stop), max(1, min(BLOCK_BYTES // head_bytes, host.num_kv_heads)))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block at most."""
        return (
            ALIGNED
            + self.heads * min(self.tokens, self.stop - self.start) * self.host.token_bytes // self.host.num_kv_heads
        )

    def blocks(self) -> list[UploadPart]:
        """Return the content of each block, tokens before heads; [] for no tokens."""
        heads = [
            (at, min(at + self.heads, self.host.num_kv_heads)) for at in range(0, self.host.num_kv_heads, self.heads)
        ]
        starts = range(self.start, self.stop, self.tokens)
        parts = [tuple(self.host.parts(start, min(start + self.tokens, self.stop))) for start in starts]
        return [UploadPart(some, *of) for some in parts for of in heads]


class _Rows(NamedTuple):
    """Stored keys and values (heads, tokens, width) of a block, the one behind the other in `flat` (bytes,)."""

    flat: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, host: SequenceKV, cut: UploadPart, buffer: Tensor) -> _Rows:
        """buffer: uint8, large enough, anywhere."""
        widths = host.fmt.row_bytes(host.head_dim), host.fmt.row_bytes(host.value_dim)
        sizes = [cut.heads * cut.tokens * width for width in widths]
        begin = -(-sizes[0] // ALIGNED) * ALIGNED
        flat, dtype = buffer[: begin + sizes[1]], TORCH_DTYPE[host.fmt]
        key, value = (part.view(dtype).view(cut.heads, cut.tokens, -1) for part in (flat[: sizes[0]], flat[begin:]))
        return cls(flat, key, value)


@dataclass
class _Block:
    """A block in a buffer of the device, or on its way there. cut: what it holds, alive until it has arrived."""

    host: SequenceKV
    cut: UploadPart
    buffer: Tensor
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    gathering: Future[None] | None = None

    @property
    def loose_bytes(self) -> int:
        """Bytes of its rows that are not page-locked."""
        loose = sum(part.high - part.low for part, _, locked in _pieces(self.cut.parts) if not locked)
        return loose * self.host.token_bytes * self.cut.heads // self.host.num_kv_heads

    def rows_in(self, buffer: Tensor) -> _Rows:
        """The block's rows, laid out in `buffer`."""
        return _Rows.of(self.host, self.cut, buffer)


class Uploads:
    """The blocks under way to one device. For one thread at a time; `clear` before the host's tokens change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._ahead: deque[_Block] = deque()
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._refused_bytes = sys.maxsize

    def reserve(self, one: UploadSpan) -> bool:
        """Take the memory that a walk over `one` needs. False, and nothing held: the device has too little."""
        missing = BLOCKS - sum(buffer.nbytes >= one.block_bytes for buffer in self._buffers())
        if missing <= 0:
            return True
        made: list[Tensor] = []
        if one.block_bytes < self._refused_bytes:
            if spare_bytes(self._device) >= missing * one.block_bytes + HEADROOM:
                # what is free may lie in pieces
                with contextlib.suppress(torch.OutOfMemoryError):
                    made.extend(self._new_buffer(one.block_bytes) for _ in range(missing))
            if len(made) == missing:
                self._free.extend((buffer, None) for buffer in made)
                return True
            self._refused_bytes = one.block_bytes  # every layer asks, and each refusal empties the allocator's cache
        self.clear()
        return False

    def walk(
        self, stretches: Sequence[UploadSpan], dtype: torch.dtype | None, then: Sequence[UploadSpan] = ()
    ) -> Generator[tuple[int, Tensor, Tensor], None, None]:
        """Number of the stretch, keys (1, heads, tokens, head_dim) and values of its next block, in `dtype`.

        dtype: None: as they are stored, (1, heads, tokens, width). then: what will be walked next; its first blocks are
        sent ahead; without any the buffers are given back. A block may be overwritten once the next one is asked for,
        by what runs on the current stream after this.
        """
        wanted = [(number, one, cut) for number, one in enumerate(stretches) for cut in one.blocks()]
        later = [(one, cut) for one in then for cut in one.blocks()[: BLOCKS - 1]]
        todo = deque([*((one, cut) for _, one, cut in wanted), *later])
        for block, (_, cut) in zip(list(self._ahead), list(todo), strict=False):
            if _same(block.cut, cut):
                todo.popleft()
            else:
                self._forget_ahead()
                todo = deque([*((one, cut) for _, one, cut in wanted), *later])
                break
        try:
            yield from self._walk(wanted, todo, dtype)
        except BaseException:  # also if the caller stops iterating
            self.clear()
            raise
        if not then:
            self.clear()

    def _walk(
        self,
        wanted: Sequence[tuple[int, UploadSpan, UploadPart]],
        todo: deque[tuple[UploadSpan, UploadPart]],
        dtype: torch.dtype | None,
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
            if dtype is not None:
                key, value = unpack(key, fmt, dtype), unpack(value, fmt, dtype)
            yield number, key[None], value[None]
            del key, value
            used = torch.cuda.Event()
            used.record(current)
            self._free.append((block.buffer, used))
            self._send_ahead(todo)

    def clear(self) -> None:
        """Forget what was sent ahead, and give the buffers back."""
        self._forget_ahead()
        self._free.clear()

    def _forget_ahead(self) -> None:
        while self._ahead:
            block = self._ahead.popleft()
            if block.gathering is not None:
                block.gathering.exception()
            block.arrived.synchronize()  # the host's memory may go now
            self._free.append((block.buffer, block.arrived))

    def __del__(self) -> None:
        self.clear()

    def _send_ahead(self, todo: deque[tuple[UploadSpan, UploadPart]]) -> None:
        while todo and len(self._ahead) < BLOCKS - 1:
            self._send(*todo.popleft())

    def _send(self, one: UploadSpan, cut: UploadPart) -> None:
        foreground.note()
        questions.note()
        host = one.host
        buffer, used = self._buffer(one.block_bytes)
        block = _Block(host, cut, buffer)
        if used is not None:
            self._stream.wait_event(used)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what had the memory before
        self._ahead.append(block)
        files = [part.segment for part in cut.parts if lockable(part.segment)]
        if files:
            block.gathering = _gatherer().submit(self._lock_and_copy, files, block)
        elif block.loose_bytes > INLINE_BYTES:
            block.gathering = _gatherer().submit(self._gather, block)
        else:
            self._copy_block(block)

    def _copy_block(self, block: _Block) -> None:
        """Send a block as it lies, nearly all of it in page-locked memory."""
        with torch.cuda.stream(self._stream):
            placed = block.rows_in(block.buffer)
            for part, offset, locked in _pieces(block.cut.parts):
                for source, target in _rows(part, offset, placed, block.cut.first_head, locked):
                    target.copy_(source if locked else source.pin_memory(), non_blocking=True)
            block.arrived.record(self._stream)

    def _lock_and_copy(self, files: list[Segment], block: _Block) -> None:
        """Send a block of files, whose pages are locked from now on: who asks again finds them so."""
        with torch.cuda.device(self._device):
            for segment in files:
                lock_file(segment)
            (self._gather if block.loose_bytes > INLINE_BYTES else self._copy_block)(block)

    def _gather(self, block: _Block) -> None:
        """Send a block with rows in ordinary memory through a page-locked buffer, which threads fill meanwhile.

        Page-locked rows are copied to the device directly.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            placed = block.rows_in(block.buffer)
            buffer, sent = _gather_ring().take(placed.flat.nbytes)
            staged, first, pieces = block.rows_in(buffer), block.cut.first_head, list(_pieces(block.cut.parts))
            for part, offset in [(part, offset) for part, offset, locked in pieces if locked]:
                for source, target in _rows(part, offset, placed, first, locked=True):
                    target.copy_(source, non_blocking=True)
            loose = [(part, offset) for part, offset, locked in pieces if not locked]
            _copiers().map(_copy, [pair for part, offset in loose for pair in _rows(part, offset, staged, first)])
            if len(loose) == len(pieces):
                placed.flat.copy_(staged.flat, non_blocking=True)
            else:
                for low, high in ((offset, offset + part.high - part.low) for part, offset in loose):
                    for into, rows in zip(placed[1:], staged[1:], strict=True):
                        copy_runs(into[:, low:high], rows[:, low:high])
            sent.record(self._stream)
            block.arrived.record(self._stream)

    def _buffer(self, nbytes: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a buffer of at least `nbytes` bytes, and when its last block was used."""
        for number, (buffer, _) in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(number)
        self._free.clear()  # of another path's size
        return self._new_buffer(nbytes), None

    def _new_buffer(self, nbytes: int) -> Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        made.record_stream(self._stream)
        return made

    def _buffers(self) -> Iterator[Tensor]:
        """All that are held."""
        yield from (block.buffer for block in self._ahead)
        yield from (buffer for buffer, _ in self._free)


class _GatherRing:
    """Page-locked buffers that blocks of ordinary memory pass. For one thread at a time."""

    def __init__(self) -> None:
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def take(self, nbytes: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a buffer of at least `nbytes` bytes, and the event to record when it has been read."""
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


def _same(one: UploadPart, other: UploadPart) -> bool:
    """Whether both name the same heads of the same tokens of the same segments."""
    parts = one.parts, other.parts
    return (
        one[1:] == other[1:]
        and len(one.parts) == len(other.parts)
        and all(mine.segment is yours.segment and mine[1:] == yours[1:] for mine, yours in zip(*parts, strict=True))
    )


def _pieces(parts: Sequence[PathPart]) -> Iterator[tuple[PathPart, int, bool]]:
    """The parts cut where page-locked ranges end: (part, first token within the block, whether it is page-locked)."""
    offset = 0
    for part in parts:
        ends = [end for end in part.segment.locked_ends if part.low < end < part.high]
        for low, high in zip([part.low, *ends], [*ends, part.high], strict=True):
            yield part._replace(low=low, high=high), offset, high <= part.segment.locked_tokens
            offset += high - low


def _rows(
    part: PathPart, offset: int, block: _Rows, first: int, locked: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per head from `first` on, rows on the host and their place in a block: one run of memory each.

    locked: at addresses that are page-locked.
    """
    count = part.high - part.low
    arrays = (locked_rows if locked else Segment.read)(part.segment, part.low, part.high)
    for array, into in zip(arrays, (block.key, block.value), strict=True):
        for head in range(len(into)):
            yield torch.from_numpy(array[first + head]).view(into.dtype), into[head, offset : offset + count]


def as_blocks(
    stretches: Sequence[UploadSpan], like: Tensor, *, stored: bool = False
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the blocks of `Uploads.walk` without CUDA: all tokens at once, on the device and in the dtype of `like`.

    On the CPU they lie in place where they are stored in that dtype. stored: as they are stored, whatever that is.
    """
    for number, one in enumerate(stretches):
        if one.stop <= one.start:
            continue
        fmt = one.host.fmt
        key, value = (torch.from_numpy(array).view(TORCH_DTYPE[fmt]) for array in one.host.read(one.start, one.stop))
        if not stored:
            key, value = unpack(key, fmt, like.dtype), unpack(value, fmt, like.dtype)
        for keys, values in zip(key[None].split(one.heads, 1), value[None].split(one.heads, 1), strict=True):
            yield number, keys.to(like.device), values.to(like.device)


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
