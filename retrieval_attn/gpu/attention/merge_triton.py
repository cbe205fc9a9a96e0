"""The Triton kernel that merges two partials, behind `merge.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Queries of a head that a program merges."""
_ANY = ["heads", "queries", "la_b", "la_h", "la_q", "lb_b", "lb_h", "lb_q"]
"""Numbers for which nothing is compiled again. Strides of the numbers are multiples of 16, but for rare head sizes."""


@triton.jit(do_not_specialize=_ANY)
def _merge_kernel(
    a, b, c, a_lse, b_lse, c_lse, heads, queries, dim, a_b, a_h, a_q, b_b, b_h, b_q, c_b, c_h, c_q,
    la_b, la_h, la_q, lb_b, lb_h, lb_q, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """c = (exp(a_lse) a + exp(b_lse) b) / (exp(a_lse) + exp(b_lse)), c_lse its logarithm: N queries of one head."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    query, column = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64), tl.arange(0, D)
    real = query < queries
    first = tl.load(a_lse + row * la_b + head * la_h + query * la_q, mask=real, other=-float("inf"))
    second = tl.load(b_lse + row * lb_b + head * lb_h + query * lb_q, mask=real, other=-float("inf"))
    top = tl.maximum(first, second)
    top = tl.where(top == -float("inf"), 0.0, top)  # both are empty: the weights below are 0, not NaN
    first, second = tl.exp(first - top), tl.exp(second - top)
    total = first + second
    share = 1.0 / tl.where(total > 0, total, 1.0)
    here = real[:, None] & (column < dim)[None, :]
    mine = tl.load(a + row * a_b + head * a_h + query[:, None] * a_q + column[None, :], mask=here, other=0.0)
    other = tl.load(b + row * b_b + head * b_h + query[:, None] * b_q + column[None, :], mask=here, other=0.0)
    out = mine * (first * share)[:, None] + other * (second * share)[:, None]
    tl.store(c + row * c_b + head * c_h + query[:, None] * c_q + column[None, :], out, mask=here)
    known = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(c_lse + tl.program_id(0).to(tl.int64) * queries + query, known, mask=real)


def merge_two(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out (batch, heads, queries, dim) and lse (batch, heads, queries), float32, of partials of such shapes."""
    a, b = (part if part.stride(-1) == 1 else part.contiguous() for part in (a, b))
    c, c_lse = torch.empty_like(a), torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    batch, heads, queries, dim = a.shape
    strides = *a.stride()[:3], *b.stride()[:3], *c.stride()[:3]
    if a.numel():
        _merge_kernel[(batch * heads, triton.cdiv(queries, ROWS))](
            a, b, c, a_lse, b_lse, c_lse, heads, queries, dim, *strides, *a_lse.stride(), *b_lse.stride(),
            N=ROWS, D=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
    return c, c_lse
