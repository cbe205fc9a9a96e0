"""The Triton kernel that turns rows stored in int8 into a model's dtype, behind `offload/transfer.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows that a program turns."""


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["packed"])
def _unpack_kernel(packed, numbers, count, dim, N: tl.constexpr, D: tl.constexpr):
    """numbers[i] = packed[i, :dim] * step of row i, whose float32 bits follow the numbers byte by byte."""
    row, column = tl.program_id(0) * N + tl.arange(0, N).to(tl.int64), tl.arange(0, D)
    inside = row < count
    begin = packed + row * (dim + 4)
    bits = tl.zeros((N,), tl.uint32)
    for byte in tl.static_range(4):  # a row of any width: no float32 lies where one could be loaded
        part = tl.load(begin + dim + byte, mask=inside, other=0).to(tl.uint8, bitcast=True)
        bits |= part.to(tl.uint32) << (8 * byte)
    step = bits.to(tl.float32, bitcast=True)
    here = inside[:, None] & (column < dim)[None, :]
    steps = tl.load(begin[:, None] + column[None, :], mask=here, other=0).to(tl.float32)
    out = steps * step[:, None]
    tl.store(numbers + row[:, None] * dim + column[None, :], out.to(numbers.dtype.element_ty), mask=here)


def unpack(packed: Tensor, numbers: Tensor) -> None:
    """numbers (n, dim) of a floating dtype, contiguous, from packed (n, dim + 4) int8, contiguous."""
    count, dim = numbers.shape
    _unpack_kernel[(triton.cdiv(count, ROWS),)](
        packed.view(torch.int8), numbers, count, dim, N=ROWS, D=triton.next_power_of_2(dim), num_warps=4
    )
