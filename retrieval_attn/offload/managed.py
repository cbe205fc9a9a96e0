"""Host memory that CUDA manages: its pages stay on the host, and a device that reads them in place maps large ones.

Page-locked memory is mapped in small pages, whether the driver took it or it was registered. Read at random, a device
then waits for one translation after the other as soon as it does not remember all of them: 19,200 rows of 64 bytes take
40 us out of 512 MiB, but 320 out of 2 GiB. Managed memory takes 44 and 52 (one H100, driver of CUDA 13).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrieval_attn.offload.page_lock import outside_capture

log = logging.getLogger(__name__)

_CONCURRENT_MANAGED_ACCESS = 89  # a device attribute: both sides may read at the same time
_ATTACH_GLOBAL = 1  # every stream of every device
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # advice: where pages are, and who maps them there
_CPU = -1
_NOT_SUPPORTED = 801


def managed_bytes(nbytes: int, device: torch.device) -> npt.NDArray[np.uint8] | None:
    """uint8 (nbytes,), any contents, given back with the array; None where the driver has no such memory.

    Its pages are taken as they are written to.
    """
    driver = _driver()
    if driver is None or not nbytes:
        return None
    torch.cuda.init()  # the driver's functions are refused before
    number = torch.cuda.current_device() if device.index is None else device.index
    context = _context(number)
    if isinstance(context, int):
        _say(context)
        return None
    address, size, there = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_int()
    with _current(driver, context):
        failed = (
            driver.cuCtxGetDevice(ctypes.byref(there))
            or driver.cuMemAllocManaged(ctypes.byref(address), size, _ATTACH_GLOBAL)
            or driver.cuMemAdvise(address, size, _PREFERRED_LOCATION, _CPU)
            or driver.cuMemAdvise(address, size, _ACCESSED_BY, there)
        )
    if failed:
        if address.value:
            _free(driver, context, address)
        _say(failed)
        return None
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value))
    weakref.finalize(array.base, outside_capture, _free, driver, context, address).atexit = False
    return array


@functools.cache
def has_managed(device: torch.device) -> bool:
    """Whether a device reads such memory."""
    return device.type == "cuda" and managed_bytes(1 << 20, device) is not None


def take_pages(array: npt.NDArray[np.uint8], stream: torch.cuda.Stream) -> None:
    """Take the pages of managed memory by work of a stream: faster than one after the other as they are written to."""
    driver = _driver()
    failed = driver.cuMemPrefetchAsync(
        ctypes.c_uint64(array.ctypes.data), ctypes.c_size_t(array.nbytes), _CPU, ctypes.c_void_p(stream.cuda_stream)
    )
    if failed:  # they are taken as they are written to
        log.debug("pages of managed memory are not taken ahead (%d)", failed)


@functools.cache
def _context(number: int) -> ctypes.c_void_p | int:
    """The context of a device that PyTorch uses, too, kept for as long as the process lives; or why there is none."""
    driver = _driver()
    there, can, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    failed: int = (
        driver.cuDeviceGet(ctypes.byref(there), number)
        or driver.cuDeviceGetAttribute(ctypes.byref(can), _CONCURRENT_MANAGED_ACCESS, there)
        or (0 if can.value else _NOT_SUPPORTED)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), there)
    )
    return failed or context


@contextlib.contextmanager
def _current(driver: Any, context: ctypes.c_void_p) -> Iterator[None]:
    """The driver's functions are of this context, whatever the thread is: one that has launched nothing has none."""
    driver.cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _free(driver: Any, context: ctypes.c_void_p, address: ctypes.c_uint64) -> None:
    with _current(driver, context):
        driver.cuMemFree_v2(address)


@functools.cache
def _say(code: int) -> None:
    log.warning(
        "the driver has no managed memory (%d): page-locked memory is read in its place, slower after long texts", code
    )


@functools.cache
def _driver() -> Any:
    """The driver's library; None where it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
