"""The Triton kernels that turn a model's rows into int8, and back into its dtype, behind `offload/staging.py`."""

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


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["packed"])
def _pack_kernel(
    numbers, packed, count, dim, share, least, largest, N: tl.constexpr, D: tl.constexpr, MAX_STEPS: tl.constexpr
):
    """The inverse: the step is the row's largest absolute number times `share`, from `least` to `largest`; 0 of zeros,
    and NaN of a row with anything that is not finite. Bit for bit what `index/formats.py` gives.
    """
    row, column = tl.program_id(0) * N + tl.arange(0, N).to(tl.int64), tl.arange(0, D)
    inside = row < count
    here = inside[:, None] & (column < dim)[None, :]
    found = tl.load(numbers + row[:, None] * dim + column[None, :], mask=here, other=0.0).to(tl.float32)
    odd = tl.sum((tl.abs(found) < float("inf")).to(tl.int32), axis=1) < D  # a largest number does not tell of NaN
    found = tl.where(odd[:, None], 0.0, found)
    most = tl.max(tl.abs(found), axis=1)
    step = tl.minimum(tl.maximum(most * share, least), largest)
    shares = tl.div_rn(found, tl.broadcast_to(tl.where(most > 0, step, 1.0)[:, None], (N, D)))
    # half to even: what is below 2^22 has no bits behind the point next to a number of this size
    steps = (shares + 12582912.0) - 12582912.0
    steps = tl.minimum(tl.maximum(steps, -MAX_STEPS), MAX_STEPS)
    begin = packed + row * (dim + 4)
    tl.store(begin[:, None] + column[None, :], steps.to(tl.int8), mask=here)
    bits = tl.where(odd, float("nan"), tl.where(most > 0, step, 0.0)).to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(begin + dim + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8).to(tl.int8, bitcast=True), mask=inside)


def pack(numbers: Tensor, packed: Tensor, share: float, least: float, largest: float, most_steps: int) -> None:
    """packed (n, dim + 4) int8 from numbers (n, dim) of a floating dtype, both contiguous. A row's step is `share` of
    its largest absolute number, from `least` to `largest`; at most `most_steps` of them are a number.
    """
    count, dim = numbers.shape
    _pack_kernel[(triton.cdiv(count, ROWS),)](
        numbers, packed, count, dim, share, least, largest,
        N=ROWS, D=triton.next_power_of_2(dim), MAX_STEPS=most_steps, num_warps=4,
    )  # fmt: skip


def unpack(packed: Tensor, numbers: Tensor) -> None:
    """numbers (n, dim) of a floating dtype, contiguous, from packed (n, dim + 4) int8, contiguous."""
    count, dim = numbers.shape
    _unpack_kernel[(triton.cdiv(count, ROWS),)](
        packed.view(torch.int8), numbers, count, dim, N=ROWS, D=triton.next_power_of_2(dim), num_warps=4
    )
