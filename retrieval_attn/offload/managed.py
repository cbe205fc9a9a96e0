"""Host memory that a GPU reads in place: managed by CUDA, page-locked if it cannot be; codes and embeddings in it.

Managed pages stay on the host, and the device maps large ones. Page-locked memory is mapped in small pages, however it
was locked: random reads then miss the translation cache. 19,200 rows of 64 bytes take 40 us out of 512 MiB, but 320 out
of 2 GiB; managed memory takes 44 and 52 (one H100, driver of CUDA 13).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.gpu.codes.codes import DeviceCodes
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.model.placement import is_spread, mark_host_table
from retrieval_attn.offload.page_lock import lock_array, outside_capture

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


def take_pages(array: npt.NDArray[np.uint8]) -> None:
    """Write to each page of managed memory, so that it is there. Any thread, without the interpreter's lock.

    0.41 s per GiB on an H200 machine, 0.23 by two threads, while other threads launch kernels. The driver's own
    prefetch took 0.32 s, in which no thread could launch any.
    """
    array[:: mmap.PAGESIZE] = 0


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


def host_rows(heads: int, tokens: int, key_bytes: int, device: torch.device) -> Tensor:
    """Allocate (heads, tokens, key_bytes) uint8 of host memory that `device` can read in place.

    Managed memory, else page-locked memory. Contents are undefined. Raises MemoryPlanError if the system refuses both.
    """
    managed = managed_bytes(heads * tokens * key_bytes, device) if device.type == "cuda" else None
    if managed is not None:
        return torch.from_numpy(managed).view(heads, tokens, key_bytes)
    array = aligned_empty((heads, tokens, key_bytes), np.uint8)
    if device.type == "cuda" and array.nbytes and (reason := lock_array(array)):
        raise MemoryPlanError(
            f"{array.nbytes / 2**20:.1f} MiB of host memory must be page-locked for the GPU to read them, but locking "
            f"failed ({reason}); raise the limit that `ulimit -l` shows, or use index='device', which has no finer "
            "codes"
        )
    return torch.from_numpy(array)


class CodeMemory(NamedTuple):
    """Memory for the codes of one head.

    codes: (tokens, key_bytes) uint8, on the GPU or in page-locked host memory. finer: the same for finer codes, always
    on the host. on: GPU that reads codes on the host; None if `codes` is on the GPU.
    """

    codes: Tensor
    finer: Tensor | None = None
    on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Device that reads the codes."""
        return self.codes.device if self.on is None else self.on


class HeadSlabs:
    """Memory for codes of a layer's heads, of all of them at once: allocators round each of many up to their pages."""

    def __init__(
        self, heads: int, device: torch.device, taken: Callable[[int, int, int, torch.device], Tensor]
    ) -> None:
        """taken: new memory (heads, tokens, key_bytes) uint8, for a device."""
        self._heads, self._device, self._taken = heads, device, taken
        self._lock = threading.Lock()
        self._slab: list[Tensor] = []

    def take(self, tokens: int, key_bytes: int) -> Tensor:
        """(tokens, key_bytes) uint8, any contents. Raises MemoryPlanError."""
        with self._lock:
            if not self._slab or self._slab[-1].shape != (tokens, key_bytes):
                self._slab = list(self._taken(self._heads, tokens, key_bytes, self._device).unbind(0))
            return self._slab.pop()


class _Address:
    """Adapter that exposes a host tensor by the CUDA array interface."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.__cuda_array_interface__ = {
            "shape": tuple(rows.shape), "typestr": "|u1", "data": (rows.data_ptr(), False), "version": 3,
        }  # fmt: skip


def as_device(rows: Tensor, device: torch.device) -> Tensor:
    """Return `rows` of `host_rows` as a tensor of `device` without a copy: kernels read host memory in place.

    Raises MemoryPlanError if the driver maps them to another device.
    """
    try:
        seen = torch.as_tensor(_Address(rows), device=device)
    except (RuntimeError, ValueError) as error:
        raise MemoryPlanError(
            f"{device} cannot map host memory ({error}); index='device' without int8_rows and embedding='device' do "
            "not need it"
        ) from error
    if seen.data_ptr() != rows.data_ptr():
        raise MemoryPlanError(
            f"host memory is mapped to another device than {device}; index='device' without int8_rows and "
            "embedding='device' do not need it"
        )
    return seen


PROBED_ROWS, PROBED_BYTES = 1 << 18, 64
"""Size of the probe of `reads_host`: above the usual limit of locked memory in containers."""


class CodesOnHost(DeviceCodes):
    """Codes like `DeviceCodes`, with rows in host memory."""

    on_host = True

    def _room(self, tokens: int) -> Tensor:
        return host_rows(1, tokens, self.codes.shape[1], self.device)[0]


@functools.cache
def reads_host(device: torch.device) -> bool:
    """Return True if `device` can read host memory in place; log the system's refusal once."""
    try:
        host_rows(1, PROBED_ROWS, PROBED_BYTES, device)
    except MemoryPlanError as error:
        log.warning("keys have no finer codes on the host, and tokens take longer after long texts: %s", error)
        return False
    return True


def move_table(model: Any) -> bool:
    """Move a model's input embedding to host memory. Return False, with a log line, if it must stay on the GPU.

    A token needs a single row of it. The parameter stays a tensor of the GPU, whose kernels read the rows over PCIe, so
    modules, graphs and hooks see no difference. For a model on one GPU whose output has a table of its own.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    reason = _why_not(model, embedding, output, weight)
    if reason is None:
        try:
            rows = host_rows(1, len(weight), weight.shape[1] * weight.element_size(), weight.device)
            seen = as_device(rows[0], weight.device)
        except MemoryPlanError as error:
            reason = str(error)
    if reason is not None:
        log.warning("the input embedding stays on the GPU: %s", reason)
        return False
    rows[0].view(weight.dtype).copy_(weight.detach())
    embedding.weight = nn.Parameter(seen.view(weight.dtype), requires_grad=weight.requires_grad)
    mark_host_table(embedding.weight)
    del weight
    torch.cuda.empty_cache()  # or what the table had would be cut up for smaller tensors
    log.info("the input embedding, %d bytes, is in host memory", rows.numel())
    return True


def _why_not(model: Any, embedding: Any, output: Any, weight: Any) -> str | None:
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or type(weight) is not nn.Parameter:
        return "it is no plain table"
    if output is None or output.weight is weight:
        return "the output multiplies by it"
    if weight.device.type != "cuda" or is_spread(model):
        return "the model is not on one GPU"
    return None
