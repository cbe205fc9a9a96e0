"""The Triton kernel that codes keys, behind `codes.py`. Imported only where there is Triton.

One launch for all keys of a head: while a long kernel of prefill holds every multiprocessor, each further launch waits
for the next gap between two of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64
LEAST_TILE = 16


@triton.jit
def _encode_kernel(
    keys, key_side, shift, codes, bad, count, stride, dim,
    WIDE: tl.constexpr, NARROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """codes[i] of keys[i]; bad becomes 1 if one is not finite."""
    HALF: tl.constexpr = NARROW // 2
    BYTES: tl.constexpr = WIDE + HALF
    key, column = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, D)
    inside = key < count
    at = keys + key.to(tl.int64)[:, None] * stride + column[None, :]
    rows = tl.load(at, mask=inside[:, None] & (column < dim)[None, :], other=0.0).to(tl.float32)
    wrong = tl.sum(tl.sum(tl.where(rows - rows == 0, 0, 1), axis=1), axis=0)
    tl.store(bad, 1, mask=wrong > 0)
    out = codes + key.to(tl.int64)[:, None] * BYTES
    w, h = tl.arange(0, W), tl.arange(0, H)
    numbers = _numbers(rows, key_side, shift, w, w < WIDE, column, dim)
    tl.store(out + w[None, :], numbers.to(tl.int8), mask=inside[:, None] & (w < WIDE)[None, :])
    if NARROW > 0:
        low = tl.minimum(tl.maximum(_numbers(rows, key_side, shift, WIDE + h, h < HALF, column, dim) + 8, 0.0), 15.0)
        high = _numbers(rows, key_side, shift, WIDE + HALF + h, h < HALF, column, dim)
        high = tl.minimum(tl.maximum(high + 8, 0.0), 15.0)
        packed = (low.to(tl.int32) | (high.to(tl.int32) << 4)).to(tl.int8)
        tl.store(out + WIDE + h[None, :], packed, mask=inside[:, None] & (h < HALF)[None, :])


@triton.jit
def _numbers(rows, key_side, shift, number, used, column, dim):
    """floor(rows . key_side - shift) of the numbers named, within -128 .. 127."""
    at = key_side + number[None, :] * dim + column[:, None]
    side = tl.load(at, mask=used[None, :] & (column < dim)[:, None], other=0.0)
    result = tl.floor(
        tl.dot(rows, side, input_precision="ieee") - tl.load(shift + number, mask=used, other=0.0)[None, :]
    )
    return tl.minimum(tl.maximum(result, -128.0), 127.0)


def encode(keys: Tensor, key_side: Tensor, shift: Tensor, wide: int, codes: Tensor, bad: Tensor) -> None:
    """codes (n, key_bytes) of keys (n, head_dim) of a floating dtype, rows contiguous. bad: int32 (1,), see above."""
    count, dim = keys.shape
    narrow = 2 * (codes.shape[1] - wide)
    _encode_kernel[(triton.cdiv(count, KEYS),)](
        keys, key_side, shift, codes.view(torch.int8), bad, count, keys.stride(0), dim,
        WIDE=wide, NARROW=narrow, N=KEYS, D=_tile(dim), W=_tile(wide), H=_tile(narrow // 2), num_warps=4,
    )  # fmt: skip


def _tile(number: int) -> int:
    return max(LEAST_TILE, triton.next_power_of_2(number))
