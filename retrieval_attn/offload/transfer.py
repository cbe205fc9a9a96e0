"""Tensors to host arrays and back: the only place where torch and numpy storage formats meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.index.formats import MAX_STEP, MAX_STEPS, MIN_STEP, SCALE_BYTES, STEP_SHARE, Format
from retrieval_attn.offload.staging import brought_together

TORCH_DTYPE = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
    Format.INT8: torch.int8,
}
_AT_ONCE = 1 << 21
"""Numbers that are packed or unpacked at once: their float32 copies must not show beside a layer's keys."""

_TOKENS_AT_ONCE = 1 << 15
"""Tokens of int8 that cross to a device at once."""


def host_format(host_dtype: str, model_dtype: torch.dtype) -> Format:
    """Storage format of the host's keys and values: the named one, or for "auto" the model's own."""
    if host_dtype != "auto":
        return Format.from_name(host_dtype)
    for fmt, dtype in TORCH_DTYPE.items():
        if dtype == model_dtype:
            return fmt
    return Format.FLOAT32


def to_host(tensor: Tensor, fmt: Format) -> np.ndarray:
    """Copy to the CPU in storage format: float32, uint16 carrying the bits of a 16-bit float, int8 and its steps."""
    packed = pack(tensor.detach(), fmt).to("cpu")
    return packed.view(torch.uint16).numpy() if fmt.dtype == np.uint16 else packed.numpy()


def all_to_host(tensors: Iterable[Tensor], fmt: Format) -> list[np.ndarray]:
    """`to_host` of each, by the device's current stream, with one wait for all: through page-locked memory."""
    return packed_to_host([pack(tensor.detach(), fmt) for tensor in tensors], fmt)


def packed_to_host(packed: Sequence[Tensor], fmt: Format) -> list[np.ndarray]:
    """`all_to_host` of what `pack` made."""
    copied = brought_together(packed)
    return [one.view(torch.uint16).numpy() if fmt.dtype == np.uint16 else one.numpy() for one in copied]


def pack(tensor: Tensor, fmt: Format) -> Tensor:
    """`tensor` (..., dim) in storage format on its own device: (..., fmt.width(dim)), what a host array is copied from.

    int8: the same bits as `from_float32`, on every device. May be `tensor` itself.
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
    """What `pack` made, in `dtype` again, on its device: (..., dim). May be `packed` itself."""
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
        # a copy, for bytes within a row lie where no float32 may
        steps = some[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        torch.mul(some[:, :dim], steps, out=into)
    return numbers.view(*packed.shape[:-1], dim)


def _in_steps(rows: Tensor) -> Tensor:
    """float32 rows as int8 rows, number for number as `formats.from_float32` does it."""
    most = rows.abs().amax(dim=-1, keepdim=True)
    finite = most.isfinite()
    step = torch.where(most > 0, (most * float(STEP_SHARE)).clamp(float(MIN_STEP), float(MAX_STEP)), 0.0)
    numbers = torch.where(finite, rows, 0.0) / torch.where(finite & (most > 0), step, 1.0)
    steps = numbers.round().clamp(-MAX_STEPS, MAX_STEPS).to(torch.int8)
    behind = torch.where(finite, step, torch.nan).reshape(-1).view(torch.int8).view(-1, SCALE_BYTES)
    return torch.cat([steps, behind], dim=-1)


def _blocks(rows: Tensor, into: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut into as many rows as are to be worked on at once."""
    if not len(rows):
        return iter(())
    count = max(1, _AT_ONCE // max(rows.shape[1], into.shape[1]))
    return zip(rows.split(count), into.split(count), strict=True)


def stored_on(device: torch.device, array: np.ndarray, fmt: Format) -> Tensor:
    """A storage-format array on `device`, as it is stored: what `unpack` takes. It may share the array's memory."""
    return _as_tensor(array, fmt).to(device)


def to_device(array: np.ndarray, fmt: Format, like: Tensor) -> Tensor:
    """A copy of a storage-format array on the device and in the dtype of `like`."""
    if fmt is Format.INT8:
        return _to_device_in_blocks(array, like)
    return _as_tensor(array, fmt).to(like.device, like.dtype, copy=True)


def _to_device_in_blocks(array: np.ndarray, like: Tensor) -> Tensor:
    """`to_device` of int8 (..., tokens, dim + 4): the stored form crosses, but never lies there as a whole."""
    fmt = Format.INT8
    numbers = torch.empty((*array.shape[:-1], fmt.dim_of(array)), dtype=like.dtype, device=like.device)
    for start in range(0, array.shape[-2], _TOKENS_AT_ONCE):
        span = slice(start, start + _TOKENS_AT_ONCE)
        numbers[..., span, :] = unpack(stored_on(like.device, array[..., span, :], fmt), fmt, like.dtype)
    return numbers


def _as_tensor(array: np.ndarray, fmt: Format) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).view(TORCH_DTYPE[fmt])


def to_queries(query: Tensor) -> np.ndarray:
    """Queries as float32 on the CPU, the same shape."""
    return query.detach().to("cpu", torch.float32).numpy()
