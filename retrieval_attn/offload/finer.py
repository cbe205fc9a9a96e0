"""Codes of a layer's keys in host memory that a device reads: finer ones, of the keys that it picked, or all of them.

What kernels do with finer ones, `gpu/codes/search.py` says; how all of them are brought, `gpu/codes/streamer.py`.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.gpu.codes.codes import DeviceCodes
from retrieval_attn.offload.host_rows import host_rows

log = logging.getLogger(__name__)
PROBED_ROWS, PROBED_BYTES = 1 << 18, 64
"""What is taken to see whether it can be had: more than containers let a process lock that may lock little."""


class CodesOnHost(DeviceCodes):
    """Codes as `DeviceCodes`, whose space is on the device and whose rows are in host memory."""

    on_host = True

    def _room(self, tokens: int) -> Tensor:
        return host_rows(1, tokens, self.codes.shape[1], self.device)[0]


@functools.cache
def reads_host(device: torch.device) -> bool:
    """Whether a device can read host memory in place; what the system says against it is logged once."""
    try:
        host_rows(1, PROBED_ROWS, PROBED_BYTES, device)
    except MemoryPlanError as error:
        log.warning("keys have no finer codes on the host, and tokens take longer after long texts: %s", error)
        return False
    return True
