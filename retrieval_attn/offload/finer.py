"""Finer codes of a layer's keys: in host memory, where the device reads those of the keys that it picked.

What kernels do with them, `gpu/codes/search.py` says.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.gpu.codes.codes import DeviceCodes
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.offload.managed import managed_bytes
from retrieval_attn.offload.page_lock import lock_array

log = logging.getLogger(__name__)
PROBED_ROWS, PROBED_BYTES = 1 << 18, 64
"""What is taken to see whether it can be had: more than containers let a process lock that may lock little."""


class FinerRows(DeviceCodes):
    """Codes as `DeviceCodes`, whose space is on the device and whose rows are in host memory."""

    def _room(self, tokens: int) -> Tensor:
        return host_rows(1, tokens, self.codes.shape[1], self.space.shift.device)[0]


@functools.cache
def reads_host(device: torch.device) -> bool:
    """Whether a device can read host memory in place; what the system says against it is logged once."""
    try:
        host_rows(1, PROBED_ROWS, PROBED_BYTES, device)
    except MemoryPlanError as error:
        log.warning("keys have no finer codes on the host, and tokens take longer after long texts: %s", error)
        return False
    return True


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
            f"{array.nbytes} bytes of host memory for finer codes cannot be page-locked ({reason}): `ulimit -l` shows "
            "a limit; raise it, or give index_options={'finer_bytes': 0}"
        )
    return torch.from_numpy(array)
