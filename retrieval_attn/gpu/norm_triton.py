"""The Triton kernel of an RMS norm, behind `gpu/norm.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(hidden, weight, out, eps, dim, FROM_ONE: tl.constexpr, D: tl.constexpr):
    """One program per row: out = weight * round(hidden / sqrt(mean(hidden ** 2) + eps)); FROM_ONE: 1 + weight times
    what is not rounded.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < dim
    numbers = tl.load(hidden + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / dim + eps)
    normal, own = numbers * scale, tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if FROM_ONE:
        own += 1
    else:  # rounded before the weight, as transformers' modules round: the answer is to be the one that they give
        normal = normal.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + column, (own * normal).to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, from_one: bool) -> Tensor:
    """See `norm.rms_norm`."""
    hidden = hidden.contiguous()
    out, dim = torch.empty_like(hidden), hidden.shape[-1]
    width = triton.next_power_of_2(dim)
    warps = max(1, min(16, width // 512))
    _norm_kernel[(hidden.numel() // dim,)](hidden, weight, out, eps, dim, FROM_ONE=from_one, D=width, num_warps=warps)
    return out
