"""Host memory that a device reads in place: what is read in single rows and too seldom to lie beside the model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.offload.managed import managed_bytes
from retrieval_attn.offload.page_lock import lock_array


def host_rows(heads: int, tokens: int, key_bytes: int, device: torch.device) -> Tensor:
    """(heads, tokens, key_bytes) uint8 of any contents in host memory that a device can read in place.

    Managed memory, or where there is none page-locked memory. Raises MemoryPlanError where the system refuses it.
    """
    managed = managed_bytes(heads * tokens * key_bytes, device) if device.type == "cuda" else None
    if managed is not None:
        return torch.from_numpy(managed).view(heads, tokens, key_bytes)
    array = aligned_empty((heads, tokens, key_bytes), np.uint8)
    if device.type == "cuda" and array.nbytes and (reason := lock_array(array)):
        raise MemoryPlanError(
            f"{array.nbytes} bytes of host memory that the device would read cannot be page-locked ({reason}): "
            "`ulimit -l` shows a limit; raise it. For codes, index='device' does without finer ones"
        )
    return torch.from_numpy(array)


class _Address:
    """A host tensor, for libraries that ask a CUDA array for its address."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.__cuda_array_interface__ = {
            "shape": tuple(rows.shape), "typestr": "|u1", "data": (rows.data_ptr(), False), "version": 3,
        }  # fmt: skip


def as_device(rows: Tensor, device: torch.device) -> Tensor:
    """`host_rows` (uint8) as a tensor of `device`, whose kernels read them where they lie: nothing is copied.

    Raises MemoryPlanError where the driver takes them for another device's.
    """
    try:
        seen = torch.as_tensor(_Address(rows), device=device)
    except (RuntimeError, ValueError) as error:
        raise MemoryPlanError(f"the driver does not show host memory to {device}: {error}") from error
    if seen.data_ptr() != rows.data_ptr():
        raise MemoryPlanError(f"the driver shows host memory to another device than {device}")
    return seen
