"""Where an index of kind "device" keeps its codes: on the device that the layer computes on.

The index is built by several threads while the device computes, from keys in host memory. The codes themselves are made
on the device, on a stream of their own, in a fraction of the time that the host would take: of keys that still lie
there, where those are lent; others cross once more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import MemoryPlanError, NotFiniteError
from retrieval_attn.gpu.codes.codes import DeviceCodes, DeviceSpace, add_to_heads, capacity_for, write_codes
from retrieval_attn.gpu.codes.search import select_candidates
from retrieval_attn.index.device import NOT_FINITE, SPARE_TOKENS, CodeRows
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.key_codes import CodeSpace, splits
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.managed import CodeMemory, CodesOnHost, HeadSlabs, host_rows, reads_host
from retrieval_attn.offload.staging import pinned, stored_on, unpack
from retrieval_attn.offload.threads import ThreadPool, TurnLock
from retrieval_attn.store.mapped import populate

SENT_AT_ONCE = 1 << 17
"""Keys that cross to the device at once."""
_ALIGNED_FLOATS = 64
"""Alignment of the tensors of one copy in float32 numbers: kernels load several numbers at once."""
SENDERS = 8
"""Threads that copy saved codes to page-locked memory: one alone copies at a sixth of the bus's rate."""
SENT_BYTES = 8 << 20
"""Of saved codes: one part crosses while the next is copied to page-locked memory. Parts of 2 MiB cross at half the
rate when several threads send some."""

Loan = tuple[Tensor, torch.cuda.Event | None]
"""Keys on the device, and the event after which they may be read."""


class DeviceCoder:
    """Makes codes for the heads of one layer (a `Coder`), in memory taken for all of them at once."""

    def __init__(
        self, device: torch.device, heads: int, sent: SentCodes | None = None, *, on_host: bool = False
    ) -> None:
        """heads: key-value heads that codes will be asked for, again and again. sent: sends restored codes; without it
        they are there when `restored` returns. on_host: codes lie in host memory, where the device reads them.
        """
        self._device, self._sent, self._turn, self._on_host = device, sent, threading.Lock(), on_host
        self._codes = HeadSlabs(heads, device, host_rows if on_host else _taken)
        self._finer = HeadSlabs(heads, device, host_rows)
        self._lent: Loan | None = None

    def for_head(self, head: int) -> HeadCoder:
        """Return the coder of this head."""
        return HeadCoder(self, head)

    def code(
        self, spaces: Sequence[tuple[CodeSpace, CodeSpace | None]], fmt: Format, keys: np.ndarray[Any, Any], first: int
    ) -> list[HeadCodes]:
        """See `device.HeadsCoder`: lent keys take one copy of the spaces and one wait for all of these heads."""
        if self._lent is None or self._lent[0].shape[1] != keys.shape[1]:
            found = [self(space, fmt, keys.shape[1], finer, first + i) for i, (space, finer) in enumerate(spaces)]
            for codes, own in zip(found, keys, strict=True):
                codes.add(own)
            return found
        rows, ready = self._lent
        try:
            with side_stream(self._device):
                rooms = [self._room_for(keys.shape[1], *both) for both in spaces]
                blocks, placed = _spaces_on([one for both in spaces for one in both if one], self._device)
                for block in blocks:
                    block.send()
                there = iter(placed)
                codes_of = [
                    _empty_codes(room, next(there), next(there) if finer else None)
                    for room, (_, finer) in zip(rooms, spaces, strict=True)
                ]
                if ready is not None:
                    torch.cuda.current_stream(self._device).wait_event(ready)
                if not add_to_heads(codes_of, rows[first : first + len(spaces)].unbind(0)):
                    raise NotFiniteError(NOT_FINITE)
        except torch.OutOfMemoryError as error:
            raise _no_room(error) from error
        return [HeadCodes(codes, fmt, space) for codes, (space, _) in zip(codes_of, spaces, strict=True)]

    @contextlib.contextmanager
    def lent(self, keys: Tensor, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Within the context, encode the first keys of each head from keys (heads, tokens, head_dim) on the device,
        after the event `ready`, instead of uploading them.
        """
        self._lent = keys, ready
        try:
            yield
        finally:
            self._lent = None

    def rows(self, space: CodeSpace, fmt: Format, keys: np.ndarray[Any, Any], head: int) -> np.ndarray[Any, Any]:
        """See `sketch.coding.RowCoder`: the device holds codes of one head at a time. Raises MemoryPlanError, too."""
        with self._turn:
            with side_stream(self._device):
                memory = _taken(1, capacity_for(len(keys)), space.key_bytes, self._device)[0]
                codes = HeadCodes.empty(space, fmt, CodeMemory(memory), lent=self._lent_to(head))
            codes.add(keys)
            return codes.rows().codes

    def _lent_to(self, head: int | None) -> Loan | None:
        lent = self._lent
        return None if lent is None or head is None else (lent[0][head], lent[1])

    def restored(
        self, space: CodeSpace, fmt: Format, rows: CodeRows, finer: CodeSpace | None = None, head: int | None = None
    ) -> HeadCodes:
        """The codes that had these rows; without finer ones where the device cannot read them. Raises MemoryPlanError
        where there is no room.
        """
        if finer is not None and not reads_host(self._device):
            finer = None
        with side_stream(self._device):
            memory = self._room_for(len(rows.codes), space, finer)
            if self._sent is not None and self._device.type == "cuda":
                return self._sent.add(space, fmt, memory, rows, finer)
            codes = HeadCodes.empty(space, fmt, memory, finer)
            codes.fill(rows)
        return codes

    def __call__(
        self, space: CodeSpace, fmt: Format, expected: int, finer: CodeSpace | None = None, head: int | None = None
    ) -> HeadCodes:
        """Empty codes. Raises MemoryPlanError where there is no room for them."""
        with side_stream(self._device):
            return HeadCodes.empty(space, fmt, self._room_for(expected, space, finer), finer, self._lent_to(head))

    def _room_for(self, expected: int, space: CodeSpace, finer: CodeSpace | None) -> CodeMemory:
        """Memory for the codes of one head, on the stream of `side_stream`."""
        tokens = capacity_for(expected + SPARE_TOKENS)
        host = None if finer is None else self._finer.take(tokens, finer.key_bytes)
        return CodeMemory(self._codes.take(tokens, space.key_bytes), host, self._device if self._on_host else None)


class SentCodes:
    """Upload of saved codes of all layers by threads: `flush` starts the copies, `wait` blocks until they end."""

    def __init__(self, heads: int = 16) -> None:
        """heads: how many have room together, at most."""
        self._heads = heads
        self._futures: list[Future[None]] = []
        self._spaces: list[_Spaces] = []
        self._codes: list[tuple[HeadCodes, CodeRows]] = []

    def add(
        self, space: CodeSpace, fmt: Format, memory: CodeMemory, rows: CodeRows, finer: CodeSpace | None
    ) -> HeadCodes:
        """The codes of the first keys of a head, on a GPU; they leave with the next `flush`."""
        device = memory.device
        there = _empty_codes(memory, self._space(space, device), None if finer is None else self._space(finer, device))
        there.hold(len(rows.codes))
        codes = HeadCodes(there, fmt, space, sent=self)
        self._codes.append((codes, rows))
        return codes

    def _space(self, space: CodeSpace, device: torch.device) -> DeviceSpace:
        if not self._spaces or not self._spaces[-1].fits(space):
            self._spaces.append(_Spaces(space, self._heads, device))
        return self._spaces[-1].add(space)

    def flush(self) -> None:
        """Send what was added, the heads of a layer say: their spaces by one copy of the current stream."""
        for spaces in self._spaces:
            spaces.send()
        if self._codes:
            self._futures.append(_senders().submit(_send, self._codes))
        self._spaces, self._codes = [], []

    def wait(self) -> None:
        """Until all are there: nothing may read them before. Raises what went wrong, OSError where a disk fails.

        Within `side_stream` of the device, if something was added since the last `flush`.
        """
        self.flush()
        futures, self._futures = self._futures, []
        wait(futures)
        for future in futures:
            future.result()


class _Spaces:
    """Spaces of one shape on their way to a device, in one block."""

    def __init__(self, like: CodeSpace, heads: int, device: torch.device) -> None:
        """heads: how many there is room for."""
        self._shapes = [side.shape for side in like[:4]]
        self._sizes = [-(-side.size // _ALIGNED_FLOATS) * _ALIGNED_FLOATS for side in like[:4]]
        self._there = torch.empty(heads, sum(self._sizes), device=device)
        self._spaces: list[CodeSpace] = []

    def fits(self, space: CodeSpace) -> bool:
        """Whether there is room for this one."""
        return len(self._spaces) < len(self._there) and [side.shape for side in space[:4]] == self._shapes

    def add(self, space: CodeSpace) -> DeviceSpace:
        """Where it will be."""
        parts = self._there[len(self._spaces)].split(self._sizes)
        self._spaces.append(space)
        sides = [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return DeviceSpace(sides[0], sides[1], sides[2], sides[3], space.wide, space.narrow, space.thin)

    def send(self) -> None:
        """By one copy of the current stream; PyTorch keeps the page-locked memory until it is over."""
        there = self._there[: len(self._spaces)]
        left = pinned(there.nbytes) if there.is_cuda else torch.empty(there.nbytes, dtype=torch.uint8)
        rows = left.view(torch.float32).view(there.shape)
        for held, space in zip(rows.numpy(), self._spaces, strict=True):
            place = 0
            for size, side in zip(self._sizes, space[:4], strict=True):
                held[place : place + side.size] = side.reshape(-1)
                place += size
        there.copy_(rows, non_blocking=True)


def _empty_codes(memory: CodeMemory, space: DeviceSpace, finer: DeviceSpace | None) -> DeviceCodes:
    """Codes of no keys."""
    rows = None if finer is None or memory.finer is None else CodesOnHost(finer, memory.finer)
    return (DeviceCodes if memory.on is None else CodesOnHost)(space, memory.codes, rows)


def _send(some: list[tuple[HeadCodes, CodeRows]]) -> None:
    device = some[0][0].device.device
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(_sending_stream(device)):
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(_stream(device))  # what had the memory before
        for codes, rows in some:
            populate(rows.codes)
            codes.copy(rows)
        stream.synchronize()


class HeadCoder(NamedTuple):
    """Coder of one head: a `device.Coder` and a `sketch.coding.RowCoder`."""

    coder: DeviceCoder
    head: int

    def __call__(self, space: CodeSpace, fmt: Format, expected: int, finer: CodeSpace | None = None) -> HeadCodes:
        return self.coder(space, fmt, expected, finer, self.head)

    def restored(self, space: CodeSpace, fmt: Format, rows: CodeRows, finer: CodeSpace | None = None) -> HeadCodes:
        return self.coder.restored(space, fmt, rows, finer, self.head)

    def rows(self, space: CodeSpace, fmt: Format, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.coder.rows(space, fmt, keys, self.head)


class HeadCodes:
    """`KeyCodes` of one head on a device.

    owner: what offloads the codes, see `offload_codes`; None: nothing does.
    """

    def __init__(
        self, device: DeviceCodes, fmt: Format, space: CodeSpace, lent: Loan | None = None,
        sent: SentCodes | None = None,
    ) -> None:  # fmt: skip
        """space: of the codes, in host memory. lent: see `DeviceCoder.lent`, of this head. sent: pending upload of
        codes and space; None once complete.
        """
        self._device, self._fmt, self._space, self._lent, self._sent = device, fmt, space, lent, sent
        self._copy: np.ndarray[Any, Any] | None = None  # in host memory, of codes that were offloaded once
        self._loading: Tensor | None = None  # memory of codes that are being loaded
        self._loaded: DeviceCodes | None = None  # in that memory
        self._load_future: Future[None] | None = None  # done when they are
        self.owner: weakref.ref[Any] | None = None

    @property
    def offloaded(self) -> bool:
        """Whether the codes are in host memory until the next use, and are not being loaded."""
        return self._loading is None and _is_offloaded(self._device)

    @property
    def device(self) -> DeviceCodes:
        """The codes as tensors on the device; offloaded ones are copied back."""
        self._finish_load()
        while _is_offloaded(codes := self._device):
            load_codes([self])
            self._finish_load()
        return codes

    def _finish_load(self) -> None:
        """Wait for codes that are being loaded, and use them. Any thread. Raises what their copy raised."""
        if (future := self._load_future) is None:
            return
        try:
            future.result()
        except BaseException:
            with _landing:
                if self._load_future is future:  # else another thread has begun another load
                    self._loading = self._loaded = self._load_future = None  # they stay offloaded
            raise
        with _landing:
            if self._load_future is future and self._loaded is not None:
                self._device, self._loading, self._loaded, self._load_future = self._loaded, None, None, None

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the copy in host memory that offloading made."""
        return 0 if self._copy is None else self._copy.nbytes

    def settle(self) -> None:
        """Wait until codes of a saved context, or offloaded ones, are on the device."""
        self._finish_load()
        if self._sent is not None:
            self._sent.wait()
            self._sent = None

    def offload(self) -> None:
        """Free the codes and their space on the device; the caller of `offload_codes` has settled them."""
        there = self._device
        if not self.copy_to_host():
            return
        # what holds the old object keeps its memory: a step that reads the codes is not disturbed
        side, codes = _empty_tensors(there.device, there.codes.shape[1])
        space = there.space._replace(query_projection=side, key_projection=side, shift=side, estimate=side)
        away = DeviceCodes(space, codes, there.finer)
        away.length = there.length
        self._device = away

    def copy_to_host(self) -> bool:
        """Make the copy that offloading needs, if there is none. Return whether the codes can be offloaded."""
        there = self._device
        if there.on_host or _is_offloaded(there) or not there.length:
            return False
        if self._copy is None or len(self._copy) != there.length:
            self._copy = self.rows().codes.copy()
        return True

    def expect(self, memory: Tensor, coming: Future[None]) -> None:
        """Use memory (capacity, key_bytes) once `coming` is done, which copies the codes to it by `load`."""
        with _landing:
            self._loading, self._load_future = memory, coming

    def load(self, memory: Tensor, space: DeviceSpace) -> None:
        """Copy the codes to memory (capacity, key_bytes), by the current stream. space: theirs, on the device."""
        assert self._copy is not None
        for start, some in _outbox.parts(self._copy, memory.device):
            memory[start : start + len(some)].copy_(torch.from_numpy(some), non_blocking=True)
        loaded = DeviceCodes(space, memory, self._device.finer)
        loaded.length = self._device.length
        self._loaded = loaded

    @classmethod
    def empty(
        cls, space: CodeSpace, fmt: Format, memory: CodeMemory, finer: CodeSpace | None = None, lent: Loan | None = None
    ) -> HeadCodes:
        """memory: where codes will go. Within `side_stream` of its device."""
        spaces = _Spaces(space, 1 if finer is None else 2, memory.device)
        there = spaces.add(space), None if finer is None else spaces.add(finer)
        spaces.send()
        return cls(_empty_codes(memory, *there), fmt, space, lent)

    @property
    def device_nbytes(self) -> int:
        there, memory = self._device, self._loading
        return 0 if there.on_host else (there.codes if memory is None else memory).nbytes

    @property
    def host_nbytes(self) -> int:
        finer = 0 if self._device.finer is None else self._device.finer.codes.nbytes
        return finer + (self._device.codes.nbytes if self._device.on_host else 0)

    def fill(self, rows: CodeRows) -> None:
        """Copy saved codes of the first n keys into the allocated memory, n <= capacity.

        Call it within `side_stream` of the device; complete when that exits.
        """
        self.copy(rows)
        self._lent = None
        self.device.hold(len(rows.codes))

    def copy(self, rows: CodeRows) -> None:
        """The bytes of `fill`, by the current stream, without waiting: through page-locked memory, a part while the
        next is being read from its file.
        """
        codes = self.device.codes
        for start, some in _outbox.parts(rows.codes, codes.device):
            codes[start : start + len(some)].copy_(torch.from_numpy(some), non_blocking=True)
        if self.device.finer is not None:
            assert rows.finer is not None
            self.device.finer.codes[: len(rows.finer)].copy_(torch.from_numpy(rows.finer))

    def add(self, keys: np.ndarray[Any, Any]) -> None:
        """See `KeyCodes`. Raises MemoryPlanError where the device has no room."""
        self.settle()  # more room may be taken for all of them
        device = self.device.device
        with side_stream(device):
            _add([self], ([rows] for rows in self._on_device(keys, device)))

    def add_heads(self, heads: Sequence[HeadCodes], keys: np.ndarray[Any, Any]) -> None:
        """See `KeyCodes`: one copy to the device and one wait for all heads. Raises as `add`."""
        for one in heads:
            one.settle()
        device, most = self.device.device, max(1, SENT_AT_ONCE // len(heads))
        with side_stream(device):
            there = (
                stored_on(device, _outbox.filled(keys[:, start : start + most], device), self._fmt)
                for start in range(0, keys.shape[1], most)
            )
            int8 = self._fmt is Format.INT8
            _add(heads, (list(unpack(rows, self._fmt, torch.float32) if int8 else rows) for rows in there))

    def _on_device(self, keys: np.ndarray[Any, Any], device: torch.device) -> Iterator[Tensor]:
        """Keys (n, head_dim), as stored, there: in pieces."""
        lent, self._lent = self._lent, None
        if lent is not None and len(lent[0]) == len(keys):
            rows, ready = lent
            if ready is not None:
                torch.cuda.current_stream(device).wait_event(ready)
            yield rows
            return
        for start in range(0, len(keys), SENT_AT_ONCE):
            rows = stored_on(device, _outbox.filled(keys[start : start + SENT_AT_ONCE], device), self._fmt)
            yield unpack(rows, self._fmt, torch.float32) if self._fmt is Format.INT8 else rows

    def rows(self) -> CodeRows:
        """The codes in host memory, until the calling thread's next call."""
        length, finer = self._device.length, self._device.finer
        there = None if finer is None else finer.codes[: finer.length].numpy()
        copy = self._copy
        if copy is not None and len(copy) == length:
            return CodeRows(copy, there)
        codes = self._device.codes[:length]
        if codes.device.type != "cuda":
            return CodeRows(codes.numpy(), there)
        held = _inbox.room(codes.nbytes).view(codes.shape)
        with side_stream(codes.device):
            held.copy_(codes, non_blocking=True)
            torch.cuda.current_stream(codes.device).synchronize()
        return CodeRows(held.numpy(), there)

    def cut(self, length: int) -> None:
        if length < self._device.length:
            self.device.hold(length)
            self._copy = None

    def find(self, queries: np.ndarray[Any, Any], count: int, stop: int) -> np.ndarray[Any, Any]:
        """Return int32 (m, room) ids below `stop` of the best `count` keys of queries (m, head_dim), -1: none."""
        where = self.device.device
        with side_stream(where):
            found: np.ndarray[Any, Any] = (
                select_candidates(self.device, torch.from_numpy(queries).to(where), count, stop).cpu().numpy()
            )
        return found


def _add(heads: Sequence[HeadCodes], pieces: Iterable[Sequence[Tensor]]) -> None:
    """Code pieces of keys (n, head_dim) of each head on the device: all of the keys, or none. Raises as `add`."""
    codes = [one.device for one in heads]
    lengths = [one.length for one in codes]
    for one in heads:
        one._copy = None
    try:
        for rows in pieces:
            if not add_to_heads(codes, rows):
                raise NotFiniteError(NOT_FINITE)
    except (torch.OutOfMemoryError, MemoryPlanError, NotFiniteError) as error:
        for own, length in zip(codes, lengths, strict=True):
            own.hold(length)
        if isinstance(error, torch.OutOfMemoryError):
            raise _no_room(error) from error
        raise


@functools.cache
def _empty_tensors(device: torch.device, key_bytes: int) -> tuple[Tensor, Tensor]:
    """Return an empty side of a space and empty codes: one pair for all heads, whose own would be five operations."""
    return torch.empty(0, device=device), torch.empty(0, key_bytes, dtype=torch.uint8, device=device)


def offload_codes(codes: Iterable[HeadCodes]) -> None:
    """Copy codes to host memory, once, and free them on the device until `HeadCodes.device` or `load_codes`.

    Codes in host memory are left there.
    """
    with _offloading:
        some = list(codes)
        for one in some:
            one.settle()  # not in a thread of the pool that brings them
        uncopied = [one for one in some if not one.copied_nbytes]
        _senders().map(_copy_some, [uncopied[at : at + SLAB_HEADS] for at in range(0, len(uncopied), SLAB_HEADS)])
        for one in some:
            one.offload()


def copy_codes(codes: Sequence[HeadCodes]) -> None:
    """Copy codes to host memory, once, so that `offload_codes` need not; some heads at a time, for others that load."""
    for start in range(0, len(codes), SLAB_HEADS):
        with _offloading.later():
            for one in codes[start : start + SLAB_HEADS]:
                one.settle()
                one.copy_to_host()


def load_codes(codes: Iterable[HeadCodes]) -> None:
    """Begin to copy offloaded codes back to the device; threads go on, in this order, and `HeadCodes.device` waits.

    Raises MemoryPlanError where the device has no room; all stay offloaded then.
    """
    with _offloading:
        groups: dict[tuple[torch.device, int, int], list[HeadCodes]] = {}
        for one in codes:
            there = one._device
            if one.offloaded:
                groups.setdefault((there.device, capacity_for(there.length), there.codes.shape[1]), []).append(one)
        tasks: list[tuple[list[HeadCodes], Tensor, list[_Spaces], list[DeviceSpace]]] = []
        for (device, tokens, key_bytes), heads in groups.items():
            with side_stream(device):
                for start in range(0, len(heads), SLAB_HEADS):
                    part = heads[start : start + SLAB_HEADS]
                    memory = _taken(len(part), tokens, key_bytes, device)
                    tasks.append((part, memory, *_spaces_on([one._space for one in part], device)))
        for part, memory, *spaces in tasks:
            coming = _senders().submit(_load_some, part, memory, *spaces)
            for head, own in zip(part, memory, strict=True):
                head.expect(own, coming)


SLAB_HEADS = 8
"""Heads whose loaded codes share one allocation."""
_offloading = TurnLock()
_landing = threading.Lock()


def _is_offloaded(codes: DeviceCodes) -> bool:
    """Return whether this stands for codes that are offloaded."""
    return not codes.on_host and len(codes.codes) < codes.length


def _spaces_on(spaces: Sequence[CodeSpace], device: torch.device) -> tuple[list[_Spaces], list[DeviceSpace]]:
    """Allocate spaces on a device, in blocks whose `send` copies them."""
    blocks, placed = list[_Spaces](), list[DeviceSpace]()
    for space in spaces:
        if not blocks or not blocks[-1].fits(space):
            blocks.append(_Spaces(space, len(spaces), device))
        placed.append(blocks[-1].add(space))
    return blocks, placed


def _copy_some(heads: list[HeadCodes]) -> None:
    for head in heads:
        head.copy_to_host()


def _load_some(heads: list[HeadCodes], memory: Tensor, blocks: list[_Spaces], placed: list[DeviceSpace]) -> None:
    """Copy codes of heads to memory (heads, capacity, key_bytes), and their spaces."""
    device = memory.device

    def copy() -> None:
        for block in blocks:
            block.send()
        for head, own, space in zip(heads, memory, placed, strict=True):
            head.load(own, space)

    with torch.inference_mode(False), torch.no_grad():
        if device.type != "cuda":
            copy()
            return
        with torch.cuda.stream(_sending_stream(device)):
            stream = torch.cuda.current_stream(device)
            stream.wait_stream(_stream(device))  # what had the memory before
            copy()
            stream.synchronize()


def load_coder(device: torch.device, dtype: torch.dtype, spec: IndexSpec, head_dim: int) -> None:
    """Compile, or load, what codes keys (n, head_dim) of this dtype for an index whose keys are coded on the device."""
    shape = spec.code_shape(head_dim, 1)
    if shape is None:
        return
    sides = torch.zeros(head_dim, head_dim, device=device)
    for key_bytes in filter(None, {shape.key_bytes, shape.finer_bytes}):
        space = DeviceSpace(sides, sides, sides.new_zeros(len(sides)), sides[:0], *splits(key_bytes, head_dim)[0])
        codes, bad = (torch.zeros(1, size, dtype=torch.uint8, device=device) for size in (key_bytes, 4))
        write_codes(space, torch.zeros(1, head_dim, dtype=dtype, device=device), codes, bad[0].view(torch.int32))


class _PinnedBuffer(threading.local):
    """Pinned memory of each thread for what is on its way: a copy from other memory waits inside the driver, and with
    it the thread that launches the model's layers.
    """

    _buffer: Tensor | None = None
    _sent: torch.cuda.Event | None = None

    def room(self, size: int) -> Tensor:
        """uint8 (size,), any contents."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
        if self._buffer is None or self._buffer.nbytes < size:
            self._buffer = pinned(size)
        return self._buffer[:size]

    def filled(self, keys: np.ndarray[Any, Any], device: torch.device) -> np.ndarray[Any, Any]:
        """The keys, there until the next call."""
        if device.type != "cuda" or not keys.nbytes:
            return keys
        return _copied(keys, self.room(keys.nbytes))

    def parts(self, rows: np.ndarray[Any, Any], device: torch.device) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Rows (n, ...) there, one part after the other with the number of its first row; all there until the next
        call, which waits until the current stream has copied them.
        """
        if device.type != "cuda" or not rows.nbytes:
            yield 0, rows
            return
        room, each = self.room(rows.nbytes), rows.nbytes // len(rows)
        for start in range(0, len(rows), max(1, SENT_BYTES // each)):
            some = rows[start : start + max(1, SENT_BYTES // each)]
            yield start, _copied(some, room[start * each :][: some.nbytes])
        self._sent = torch.cuda.Event(blocking=True)
        self._sent.record(torch.cuda.current_stream(device))


def _copied(rows: np.ndarray[Any, Any], room: Tensor) -> np.ndarray[Any, Any]:
    held = room.numpy().view(rows.dtype).reshape(rows.shape)
    np.copyto(held, rows)
    return held


_outbox, _inbox = _PinnedBuffer(), _PinnedBuffer()


def _taken(heads: int, tokens: int, key_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(heads, tokens, key_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise _no_room(error) from error


def _no_room(error: BaseException) -> MemoryPlanError:
    return MemoryPlanError(
        f"the device has too little free memory for the codes of all keys ({error}); use "
        f"index_options={{'key_bytes': 32}} or fewer, or keep the index on the host (index='auto')"
    )


@contextlib.contextmanager
def side_stream(device: torch.device) -> Any:
    """On a stream other than the one that reads; its work is finished afterwards for every stream.

    Within another one of the same thread: when that ends.
    """
    if getattr(_entered, "device", None) == device:
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        if device.type != "cuda":
            yield
            return
        stream, _entered.device = _stream(device), device
        try:
            with torch.cuda.stream(stream):
                yield
                stream.synchronize()
        finally:
            _entered.device = None


_entered = threading.local()


@functools.cache
def _senders() -> ThreadPool:
    return ThreadPool(SENDERS, "retrieval_attn-send")


@functools.cache
def _sending_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # reading keeps the device full: codes come in between
