"""The Triton kernel of a rotary embedding, behind `gpu/rotary.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["heads", "rows"])
def _rotate_kernel(
    q, k, cos, sin, q_out, k_out, heads, rows, half, q_b, q_h, q_s, k_b, k_h, k_s, c_b, c_s, s_b, s_s,
    qo_b, qo_h, qo_s, ko_b, ko_h, ko_s, H: tl.constexpr,
):  # fmt: skip
    """One head of one token. Each product and the sum are rounded, as one operation after the other rounds them:
    without fused multiply-add, which a compiler makes of them unless it is told not to.
    """
    head, row, token = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    of_query = head < heads
    if of_query:
        numbers = q + row * q_b + head * q_h + token * q_s
        target = q_out + row * qo_b + head * qo_h + token * qo_s
    else:
        numbers = k + row * k_b + (head - heads) * k_h + token * k_s
        target = k_out + row * ko_b + (head - heads) * ko_h + token * ko_s
    table = tl.where(rows > 1, row, 0)  # one row of tables may stand for all
    column = tl.arange(0, H)
    here = column < half
    kind = q_out.dtype.element_ty
    low, high = (
        tl.load(numbers + column, mask=here).to(tl.float32),
        tl.load(numbers + half + column, mask=here).to(tl.float32),
    )
    cosines, sines = cos + table * c_b + token * c_s + column, sin + table * s_b + token * s_s + column
    low_cos, high_cos = tl.load(cosines, mask=here).to(tl.float32), tl.load(cosines + half, mask=here).to(tl.float32)
    low_sin, high_sin = tl.load(sines, mask=here).to(tl.float32), tl.load(sines + half, mask=here).to(tl.float32)
    first = (low * low_cos).to(kind).to(tl.float32) + (-high * low_sin).to(kind).to(tl.float32)
    second = (high * high_cos).to(kind).to(tl.float32) + (low * high_sin).to(kind).to(tl.float32)
    tl.store(target + column, first.to(kind), mask=here)
    tl.store(target + half + column, second.to(kind), mask=here)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `rotary.rotate`."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, heads, tokens, dim = q.shape
    _rotate_kernel[(heads + k.shape[1], batch, tokens)](
        q, k, cos, sin, q_out, k_out, heads, cos.shape[0], dim // 2, *q.stride()[:3], *k.stride()[:3],
        *cos.stride()[:2], *sin.stride()[:2], *q_out.stride()[:3], *k_out.stride()[:3],
        H=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out
