"""Page-locked host memory: the store's own pages, registered with the CUDA driver once they are filled.

A copy from page-locked memory runs at the bus's full rate without the processor; from ordinary memory the driver copies
piece by piece through its own buffer, at a seventh of that (7.5 against 55 GB/s on one H100). Registering costs .05 s
per GiB, once, during the device's work.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieval_attn.cpu.segment import Segment
from retrieval_attn.errors import StoreError
from retrieval_attn.index.memory import base_of
from retrieval_attn.store.disk import guarded
from retrieval_attn.store.mapped import file_bytes, is_mapped, populate

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
"""Less of a head's keys than this is not registered: it crosses in no time from ordinary memory."""
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_READ_ONLY = 8  # cudaHostRegisterReadOnly: the device does not write there
_TAKEN = "already mapped"  # cudaErrorHostMemoryAlreadyRegistered
_refused = threading.Event()
_file_refused = threading.Event()
_locking = threading.Lock()
_said: set[str] = set()
_pace = threading.local()
RESTS = 4
"""Rest after an unregistration, as a multiple of its duration: those of a text of 13 GB take .45 s in all."""


def lock_pages(segment: Segment) -> None:
    """Register what `segment` holds and what is not registered yet, but for the last page of each head.

    Where the system refuses (a limit of locked memory, no room), it is said once, nothing is registered from then on,
    and copies go through a ring of page-locked buffers instead. For one thread at a time.
    """
    if _refused.is_set() or not segment.page_tokens:
        return
    start, stop = segment.locked_tokens, segment.length // segment.page_tokens * segment.page_tokens
    if (stop - start) * segment.keys.strides[1] < LEAST_BYTES:
        return
    _lock(segment, start, stop)


def _lock(segment: Segment, start: int, stop: int) -> None:
    """Register tokens [start, stop) of a segment whose heads begin pages.

    Threads take turns; one that comes late does nothing.
    """
    with _locking:
        if segment.locked_tokens == start:
            _register_tokens(segment, start, stop)


def _register_tokens(segment: Segment, start: int, stop: int) -> None:
    done: list[int] = []
    for array in (segment.keys, segment.values):
        for rows in array[:, start:stop]:
            if reason := register(rows.ctypes.data, rows.nbytes):
                unregister(done)
                if _TAKEN in reason:
                    return  # by what had these addresses before: they are free soon
                _refused.set()
                say_refused(reason, "keys and values cross to the device through a ring of page-locked buffers, slower")
                return
            done.append(rows.ctypes.data)
    for array, addresses in zip((segment.keys, segment.values), np.array_split(np.array(done), 2), strict=True):
        # before the memory is given back: a callback on the array that owns the mapping runs while it still exists
        weakref.finalize(base_of(array), unregister, addresses.tolist()).atexit = False
    segment.locked_ends = (*segment.locked_ends, stop)


def locked_rows(segment: Segment, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the page-locked tokens as `Segment.read` does, at their page-locked addresses."""
    keys, values = segment.read(0, segment.length) if segment.locked_rows is None else segment.locked_rows
    return keys[:, start:stop], values[:, start:stop]


def lockable(segment: Segment) -> bool:
    """Whether `lock_file` would page-lock what a loaded segment holds."""
    return (
        not segment.locked_ends
        and not segment.page_tokens
        and not _file_refused.is_set()
        and segment.frozen
        and segment.keys[:1].nbytes >= LEAST_BYTES
        and is_mapped(segment.keys)
    )


def lock_file(segment: Segment) -> None:
    """Register keys and values of a loaded segment: the file's own pages, which are not copied for it.

    A launch of any thread waits while the driver registers an array, 45 GB a second. Where the driver refuses files, it
    is said once, and they are gathered from then on. Threads take turns. Raises StoreError.
    """
    with _locking:
        if lockable(segment):
            _lock_file(segment)


def _lock_file(segment: Segment) -> None:
    keys, values = file_bytes(segment.keys), file_bytes(segment.values)
    if keys is None or values is None:
        return
    done: list[int] = []
    for view, array in zip((segment.keys, segment.values), (keys, values), strict=True):
        with guarded("read", Path("the file of a saved context")):
            populate(view)  # in the driver's hands, pages would come from the disk one by one
        if reason := register(array.ctypes.data, array.nbytes, _PORTABLE | _READ_ONLY):
            unregister(done)
            _file_refused.set()
            say_refused(reason, "keys and values of saved contexts cross through page-locked buffers, slower")
            return
        done.append(array.ctypes.data)
    for array, address in zip((keys, values), done, strict=True):
        weakref.finalize(base_of(array), unregister, [address]).atexit = False
    segment.locked_rows, segment.locked_ends = (keys, values), (segment.length,)


def lock_array(array: np.ndarray) -> str:
    """Page-lock an array's memory until it is given back. Why the driver refused; empty where it is page-locked now."""
    reason = register(array.ctypes.data, array.nbytes)
    if not reason:
        weakref.finalize(base_of(array), unregister, [array.ctypes.data]).atexit = False
    return reason


def register(address: int, nbytes: int, flags: int = _PORTABLE) -> str:
    """Page-lock these bytes. Why the driver refused; empty where the memory is page-locked now."""
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(address, nbytes, flags)
    if int(error) == 0:
        return ""
    _forget_error()
    return str(cudart.cudaGetErrorString(error))


def unregister(addresses: list[int]) -> None:
    """Unregister these addresses: their memory is pageable again."""
    outside_capture(_unregister, addresses)


def outside_capture(function: Callable[..., object], *arguments: object) -> None:
    """Give memory back, say: garbage may be collected during a capture, when the driver forbids it to this thread."""
    if torch.cuda.is_current_stream_capturing():
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        thread.join()
    else:
        function(*arguments)


def _unregister(addresses: list[int]) -> None:
    cudart: Any = torch.cuda.cudart()
    for address in addresses:
        began = time.perf_counter()
        if int(cudart.cudaHostUnregister(address)):
            _forget_error()
        if rests := getattr(_pace, "rests", 0):
            time.sleep(rests * (time.perf_counter() - began))


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Rest after each unregistration by this thread: no other thread can launch anything during one."""
    _pace.rests = RESTS
    try:
        yield
    finally:
        _pace.rests = 0


def _forget_error() -> None:
    """The driver keeps a refusal for the next kernel of this thread to report: let one report it that means nothing."""
    try:
        torch.empty(1, device="cuda").zero_()
    except RuntimeError as error:
        log.debug("forgotten: %s", error)


def say_refused(reason: str, instead: str) -> None:
    """Log that the system refuses page-locked memory, and what happens instead. Once in a process for each of these."""
    if instead not in _said:
        _said.add(instead)
        log.warning("page-locked memory was refused (%s; `ulimit -l` shows a limit): %s", reason, instead)


def lock_ahead(segments: Iterable[weakref.ref[Segment]], stop: Callable[[], bool]) -> None:
    """Page-lock the files of an opened context's live segments in order, until `stop` (which may block) returns True.

    The driver registers 45 GB per second and blocks launches meanwhile: 16 GiB would delay a first exact question by
    half a second.
    """
    for reference in segments:
        if stop():
            return
        segment = reference()
        if segment is not None:
            try:
                lock_file(segment)
            except StoreError as error:  # raised again when the bytes are needed
                log.info("pages of a saved context were not locked ahead: %s", error)
                return
        del segment  # `stop` may block
