"""Kernels that start while the one ahead of them ends (programmatic dependent launch). Imported only with Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

OVERLAP_FROM = 9, 0
"""Compute capability from which a kernel can start before the one ahead of it has ended."""


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start, and wait until the kernels before this one have written all they write."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may begin before the kernel ahead has ended, where the device can."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= OVERLAP_FROM
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
