"""A ring of pinned host memory that tensors pass on their way from a device into ordinary host memory.

The store's pages are not pinned (it would pin the whole context), and copies from a device into unpinned memory are
slow and wait. So each piece goes to a pinned buffer by the device's copy engine, on a stream of its own, and from
there into the store by the calling thread, while the next pieces are under way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.offload.page_lock import say_refused

BUFFER_BYTES = 32 << 20
BUFFERS = 3
_ALIGNED = 64

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
            if tensor.is_contiguous() or tensor.ndim < 2:
                into.copy_(tensor, non_blocking=True)
            else:  # a copy engine takes runs of memory: one per head, instead of a gathered copy on the device
                for one, source in zip(into, tensor, strict=True):
                    one.copy_(source, non_blocking=True)
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


def brought(tensor: Tensor) -> np.ndarray:
    """A copy on the host of what a tensor, of a dtype that NumPy knows, has when the current stream's work is done."""
    [there] = brought_together([tensor.detach()])
    return there.numpy().copy()  # page-locked memory is for copies under way


def brought_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each on the CPU, once the current stream has got there: one wait for all. One that is there is itself.

    The calling thread waits beside the driver: within it, in a copy to ordinary memory, it would hold up threads that
    launch, until all that they launched is done. What is launched meanwhile does not wait for the copies.
    """
    device = next((one.device for one in tensors if one.is_cuda), None)
    if device is None:
        return [one.cpu() for one in tensors]
    stream = _bringing_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        into = [pinned(one.nbytes).view(one.dtype).view(one.shape) if one.is_cuda else one for one in tensors]
        for one, held in zip(tensors, into, strict=True):
            if one.is_cuda:
                held.copy_(one, non_blocking=True)
                one.record_stream(stream)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    done.synchronize()
    return into


@contextlib.contextmanager
def bringing(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Within it, a stream beside the device's others is current, which waits for `after` alone. The caller waits for
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


def pinned(size: int) -> Tensor:
    """uint8 (size,), any contents; ordinary memory where pinned memory is refused, which is said once."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        say_refused(str(error).splitlines()[0], "keys and values are copied through ordinary memory, slower")
        return torch.empty(size, dtype=torch.uint8)
