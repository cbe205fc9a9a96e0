"""Tensors to host arrays and back: the only place where torch and numpy storage formats meet."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.formats import Format

_TORCH_DTYPE = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
}


def host_format(host_dtype: str, model_dtype: torch.dtype) -> Format:
    """Storage format of the host's keys and values: the named one, or for "auto" the model's own."""
    if host_dtype != "auto":
        return Format.from_name(host_dtype)
    for fmt, dtype in _TORCH_DTYPE.items():
        if dtype == model_dtype:
            return fmt
    return Format.FLOAT32


def to_host(tensor: Tensor, fmt: Format) -> np.ndarray:
    """Copy to the CPU in storage format: float32, or uint16 carrying the bits of a 16-bit float."""
    stored = tensor.detach().to("cpu", _TORCH_DTYPE[fmt])
    return stored.numpy() if fmt is Format.FLOAT32 else stored.view(torch.uint16).numpy()


def to_device(array: np.ndarray, fmt: Format, like: Tensor) -> Tensor:
    """A copy of a storage-format array on the device and in the dtype of `like`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if fmt is not Format.FLOAT32:
        tensor = tensor.view(_TORCH_DTYPE[fmt])
    return tensor.to(like.device, like.dtype, copy=True)


def to_queries(query: Tensor) -> np.ndarray:
    """Queries as float32 on the CPU, the same shape."""
    return query.detach().to("cpu", torch.float32).numpy()
