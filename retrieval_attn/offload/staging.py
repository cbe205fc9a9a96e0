"""Copies between device and host: storage formats, and a ring of pinned buffers on the way to ordinary host memory.

The store's pages are not pinned (it would pin the whole context), and copies from a device into unpinned memory are
slow and wait. So each piece goes to a pinned buffer by the device's copy engine, on a stream of its own, and from
there into the store by the calling thread, while the next pieces are under way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.index.formats import MAX_STEP, MAX_STEPS, MIN_STEP, SCALE_BYTES, STEP_SHARE, Format
from retrieval_attn.index.memory import mapped
from retrieval_attn.offload.managed import take_pages
from retrieval_attn.offload.page_lock import lock_array, say_refused

BUFFER_BYTES = 32 << 20
BUFFERS = 3
_ALIGNED = 64
LARGE_BYTES = 4 << 20

CopyChunk = tuple[Sequence[Tensor], Callable[..., None]]
"""Tensors that fit a buffer together, and who takes them as NumPy arrays (16-bit floats as their bits, uint16)."""


class Staging:
    """The ring of one device. `bring` is for one thread at a time.

    For tensors that are on the CPU already it does the same without streams.
    """

    def __init__(self, device: torch.device, size: int = BUFFER_BYTES, count: int = BUFFERS) -> None:
        """size: bytes of a buffer. Where a GPU's pinned memory is refused they are ordinary memory; it is said once."""
        self.size = size
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._turn = threading.Lock()
        self._buffers = [pinned(size) if self._cuda else torch.empty(size, dtype=torch.uint8) for _ in range(count)]

    def bring(self, pieces: Iterable[CopyChunk], ready: torch.cuda.Event | None) -> None:
        """Copy each piece to the host and hand it to its taker, in order; returns when the last was taken.

        ready: what the device must have done before (None: nothing is pending). The tensors must stay as they are
        until this returns; then the device has read them and any stream may write over them. The arrays a taker gets
        are overwritten afterwards. Pieces are drawn from the iterable while this module's stream is current.
        """
        with self._turn, self._streaming(ready):
            under_way: deque[tuple[list[np.ndarray], torch.cuda.Event | None, Callable[..., None]]] = deque()
            for number, (tensors, taker) in enumerate(pieces):
                if len(under_way) == len(self._buffers):
                    _hand_over(*under_way.popleft())
                arrays = self._send(tensors, self._buffers[number % len(self._buffers)])
                under_way.append((arrays, self._sent(), taker))
            while under_way:
                _hand_over(*under_way.popleft())

    @contextlib.contextmanager
    def _streaming(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            try:
                yield
            finally:
                if sent := self._sent():
                    sent.synchronize()  # after an error too: nothing may still read the tensors

    def _send(self, tensors: Sequence[Tensor], buffer: Tensor) -> list[np.ndarray]:
        arrays = []
        offset = 0
        for tensor in tensors:
            into = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            offset += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            copy_runs(into, tensor)
            bits = into.view(torch.uint16) if into.dtype in (torch.bfloat16, torch.float16) else into
            arrays.append(bits.numpy())
        return arrays

    def _sent(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event


@functools.cache
def staging(device: torch.device) -> Staging:
    """The ring of `device` that everything shares."""
    return Staging(device)


def _hand_over(arrays: list[np.ndarray], sent: torch.cuda.Event | None, taker: Callable[..., None]) -> None:
    if sent is not None:
        sent.synchronize()
    taker(*arrays)


def sent(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of any plain array on a device, by its current stream, without waiting: from page-locked memory.

    Maps of files, above all, are not given to the driver: it copies such pages one by one.
    """
    if device.type != "cuda" or not array.nbytes:
        return torch.from_numpy(np.array(array, copy=True)).to(device)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    room = pinned(array.nbytes).view(dtype).view(array.shape)  # PyTorch keeps it until the copy is over
    np.copyto(room.numpy(), array)
    return room.to(device, non_blocking=True)


MAX_RUNS = 1024
"""Copies into which one of a tensor is split; a tensor of more pieces is gathered on the device first."""


def copy_runs(into: Tensor, source: Tensor) -> None:
    """Copy a tensor to a contiguous one of the same shape by the current stream, without waiting.

    A copy engine takes runs of memory. For other tensors torch allocates a gathered copy on the device; so a window of
    each head is copied by itself.
    """
    if not source.numel():
        return
    dims = source.ndim
    while dims > 1 and not source[(0,) * (source.ndim - dims)].is_contiguous():
        dims -= 1
    heads = source.shape[: source.ndim - dims]
    for place in itertools.product(*map(range, heads)) if math.prod(heads) <= MAX_RUNS else [()]:
        into[place].copy_(source[place], non_blocking=True)


def brought(tensor: Tensor) -> np.ndarray:
    """A copy on the host of what a tensor, of a dtype that NumPy knows, has when the current stream's work is done."""
    [there] = brought_together([tensor.detach()])
    return there.numpy().copy()  # page-locked memory is for copies under way


def brought_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each on the CPU, once the current stream has got there: one wait for all. One that is there is itself.

    The calling thread waits outside of the driver: within it, in a copy to ordinary memory, it would hold up threads
    that launch, until all that they launched is done. What is launched meanwhile does not wait for the copies.
    """
    device = next((one.device for one in tensors if one.is_cuda), None)
    if device is None:
        return [one.cpu() for one in tensors]
    stream = _bringing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        sizes = [-(-one.nbytes // _ALIGNED) * _ALIGNED if one.is_cuda else 0 for one in tensors]
        rooms = page_locked(sum(sizes)).split(sizes)
        into = [
            room[: one.nbytes].view(one.dtype).view(one.shape) if one.is_cuda else one
            for one, room in zip(tensors, rooms, strict=True)
        ]
        try:
            for one, held in zip(tensors, into, strict=True):
                if one.is_cuda:
                    copy_runs(held, one)
                    one.record_stream(stream)
        except BaseException:
            stream.synchronize()  # the memory goes now
            raise
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    done.synchronize()
    return into


@contextlib.contextmanager
def bringing(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Within it, a separate stream of the device is current, which waits for `after` alone. The caller waits for
    what it does there.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_bringing_stream(device)) as _:
        if after is not None:
            _bringing_stream(device).wait_event(after)
        yield


@functools.cache
def _bringing_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def page_locked(size: int) -> Tensor:
    """uint8 (size,), any contents; as `pinned`, and large memory without holding up threads that launch.

    Where the driver takes pages itself, no thread can launch meanwhile; it registers pages that are there in .05 s per
    GiB.
    """
    if size < LARGE_BYTES:
        return pinned(size)
    array = mapped(size, "page-locked copies", huge=False)  # pages of its own: a page is registered once
    take_pages(array)
    return pinned(size) if lock_array(array) else torch.from_numpy(array)


def pinned(size: int) -> Tensor:
    """uint8 (size,), any contents; ordinary memory where pinned memory is refused, which is said once."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        say_refused(str(error).splitlines()[0], "keys and values are copied through ordinary memory, slower")
        return torch.empty(size, dtype=torch.uint8)


TORCH_DTYPE = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
    Format.INT8: torch.int8,
}
_AT_ONCE = 1 << 21
"""Numbers that are packed or unpacked at once, so that float32 copies stay small compared with a layer's keys."""

_TOKENS_AT_ONCE = 1 << 15
"""Tokens of int8 that are copied to a device at once."""


def host_format(host_dtype: str, model_dtype: torch.dtype) -> Format:
    """Return the storage format of keys and values on the host: the named one, or for "auto" the model's own."""
    if host_dtype != "auto":
        return Format.from_name(host_dtype)
    for fmt, dtype in TORCH_DTYPE.items():
        if dtype == model_dtype:
            return fmt
    return Format.FLOAT32


def all_to_host(tensors: Iterable[Tensor], fmt: Format) -> list[np.ndarray]:
    """Copy tensors to the CPU in storage format on the current stream, with one synchronization: float32, uint16 with
    the bits of a 16-bit float, int8 and its steps. Page-locked memory.
    """
    return packed_to_host([pack(tensor.detach(), fmt) for tensor in tensors], fmt)


def packed_to_host(packed: Sequence[Tensor], fmt: Format) -> list[np.ndarray]:
    """Copy results of `pack` to the host like `all_to_host`."""
    copied = brought_together(packed)
    return [one.view(torch.uint16).numpy() if fmt.dtype == np.uint16 else one.numpy() for one in copied]


def pack(tensor: Tensor, fmt: Format) -> Tensor:
    """Convert `tensor` (..., dim) to storage format (..., fmt.width(dim)) on its own device.

    int8: the same bits as `from_float32` on every device. May return `tensor` itself.
    """
    if fmt is not Format.INT8:
        return tensor.to(TORCH_DTYPE[fmt])
    rows = tensor.reshape(-1, tensor.shape[-1])
    packed = torch.empty(len(rows), fmt.width(rows.shape[1]), dtype=torch.int8, device=tensor.device)
    kernels = kernels_for(rows, "attention.int8_triton")
    if kernels is not None and len(rows):
        kernels.pack(rows.contiguous(), packed, *map(float, (STEP_SHARE, MIN_STEP, MAX_STEP)), MAX_STEPS)
        return packed.view(*tensor.shape[:-1], packed.shape[1])
    for some, into in _blocks(rows, packed):
        into.copy_(_in_steps(some.float()))
    return packed.view(*tensor.shape[:-1], packed.shape[1])


def unpack(packed: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Convert a result of `pack` back to `dtype` (..., dim) on its device. May return `packed` itself."""
    if fmt is not Format.INT8:
        return packed.to(dtype)
    rows = packed.reshape(-1, packed.shape[-1])
    dim = rows.shape[1] - SCALE_BYTES
    numbers = torch.empty(len(rows), dim, dtype=dtype, device=packed.device)
    kernels = kernels_for(rows, "attention.int8_triton")
    if kernels is not None and len(rows):
        kernels.unpack(rows.contiguous(), numbers)
        return numbers.view(*packed.shape[:-1], dim)
    for some, into in _blocks(rows, numbers):
        # a copy, because the bytes are not aligned for float32
        steps = some[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        torch.mul(some[:, :dim], steps, out=into)
    return numbers.view(*packed.shape[:-1], dim)


def _in_steps(rows: Tensor) -> Tensor:
    """Convert float32 rows to int8 rows with the same bits as `formats.from_float32`."""
    most = rows.abs().amax(dim=-1, keepdim=True)
    finite = most.isfinite()
    step = torch.where(most > 0, (most * float(STEP_SHARE)).clamp(float(MIN_STEP), float(MAX_STEP)), 0.0)
    numbers = torch.where(finite, rows, 0.0) / torch.where(finite & (most > 0), step, 1.0)
    steps = numbers.round().clamp(-MAX_STEPS, MAX_STEPS).to(torch.int8)
    behind = torch.where(finite, step, torch.nan).reshape(-1).view(torch.int8).view(-1, SCALE_BYTES)
    return torch.cat([steps, behind], dim=-1)


def _blocks(rows: Tensor, into: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both tensors into blocks of at most _AT_ONCE numbers."""
    if not len(rows):
        return iter(())
    count = max(1, _AT_ONCE // max(rows.shape[1], into.shape[1]))
    return zip(rows.split(count), into.split(count), strict=True)


def stored_on(device: torch.device, array: np.ndarray, fmt: Format) -> Tensor:
    """Copy a storage-format array to `device` unconverted, for `unpack`. May share the array's memory."""
    return _as_tensor(array, fmt).to(device)


def to_device(array: np.ndarray, fmt: Format, like: Tensor) -> Tensor:
    """Copy a storage-format array to the device and dtype of `like`."""
    if fmt is Format.INT8:
        return _to_device_in_blocks(array, like)
    return _as_tensor(array, fmt).to(like.device, like.dtype, copy=True)


def _to_device_in_blocks(array: np.ndarray, like: Tensor) -> Tensor:
    """Apply `to_device` to int8 (..., tokens, dim + 4) in blocks, so that the stored form is never there as a whole."""
    fmt = Format.INT8
    numbers = torch.empty((*array.shape[:-1], fmt.dim_of(array)), dtype=like.dtype, device=like.device)
    for start in range(0, array.shape[-2], _TOKENS_AT_ONCE):
        span = slice(start, start + _TOKENS_AT_ONCE)
        numbers[..., span, :] = unpack(stored_on(like.device, array[..., span, :], fmt), fmt, like.dtype)
    return numbers


def _as_tensor(array: np.ndarray, fmt: Format) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).view(TORCH_DTYPE[fmt])


def to_queries(query: Tensor) -> np.ndarray:
    """Copy queries to the CPU as float32, in the same shape."""
    return query.detach().to("cpu", torch.float32).numpy()
