"""Host arrays that kernels read at random: begun on a cache line, in 2 MiB pages when they are large.

A page table walk per row costs as much as the row (measured 1.3-2.4x on gathers), and small allocations start
anywhere, so that a row of two cache lines would take three.
"""

from __future__ import annotations

import functools
import logging
import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import MemoryPlanError

log = logging.getLogger(__name__)

CACHE_LINE = 64
PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
# Python names it from 3.13 on; more is reserved than is used, which strict accounting would charge for
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def base_of(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array whose memory `array` is a view of, itself if it is no view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A C-contiguous array of arbitrary content (fresh pages hold zeros), its first byte on a cache line.

    From 4 MiB on it starts on a 2 MiB boundary and asks for 2 MiB pages, and memory is taken page by page as it
    is written to. One log line says so where the system has no such pages. Raises MemoryPlanError if the system
    refuses the memory.
    """
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    huge = nbytes >= 2 * HUGE_PAGE
    step = HUGE_PAGE if huge else CACHE_LINE
    try:
        buffer = mapped(nbytes + step, "index arrays") if huge else np.empty(nbytes + step, np.uint8)
    except (MemoryError, OSError, OverflowError, ValueError) as error:
        raise MemoryPlanError(
            f"{nbytes / 2**20:.1f} MiB of host memory are needed, but the allocation failed ({error}); free memory"
        ) from error
    offset = -int(buffer.__array_interface__["data"][0]) % step
    return buffer[offset : offset + nbytes].view(kind).reshape(shape)


def usable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array` itself where kernels can take and change it: writable, C-contiguous, begun on a cache line; else a copy.

    Numba compiles kernels once more for read-only arrays, and vectors are loaded from whole cache lines.
    """
    flags = array.flags
    if flags.writeable and flags.c_contiguous and flags.aligned and not (array.size and array.ctypes.data % CACHE_LINE):
        return array
    copied = aligned_empty(array.shape, array.dtype)
    copied[...] = array
    return copied


def one_layout(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`keys` (heads, n, d) as an array that is never contiguous: Numba compiles a kernel once more for those that are.

    A contiguous array gets one head and one row more than it has; the kernel is told how many are real. Read-only
    memory is typed as writable for the same reason: nothing that takes keys writes to them.
    """
    if not keys.flags.writeable:
        keys = np.asarray(_Writable(keys))
    if not keys.flags.c_contiguous:
        return keys
    heads, length, dim = keys.shape
    strides = (length * dim * keys.itemsize, dim * keys.itemsize, keys.itemsize)
    return np.lib.stride_tricks.as_strided(keys, (heads + 1, length + 1, dim), strides)


class _Writable:
    """The memory of an array under an interface that does not say read-only; keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def mapped(nbytes: int, what: str, huge: bool = True) -> npt.NDArray[np.uint8]:
    """Memory that is taken page by page as it is written to, in 2 MiB pages if `huge`. what: named in a log line."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if huge:
        try:
            _madvise(memory)
        except (AttributeError, OSError) as error:
            _say_refused(what, str(error))
    return np.frombuffer(memory, np.uint8)


def _madvise(memory: mmap.mmap) -> None:
    memory.madvise(mmap.MADV_HUGEPAGE)


@functools.cache
def _say_refused(what: str, reason: str) -> None:
    log.warning("2 MiB pages are not available for %s (%s): search will be slower", what, reason)
