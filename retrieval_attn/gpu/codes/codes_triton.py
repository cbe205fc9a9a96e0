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

BLOCK_KEYS = 64
"""Keys that a program codes."""
MIN_TILE = 16
"""Smallest tile of a matrix instruction, in every direction."""


@triton.jit(do_not_specialize=["count"])
def _encode_kernel(
    keys, key_projection, shift, codes, bad, count, stride, dim,
    NUM_8BIT: tl.constexpr, NUM_4BIT: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """codes[i] of keys[i]; bad becomes 1 if one is not finite. D: columns that are multiplied at once."""
    HALF: tl.constexpr = NUM_4BIT // 2
    BYTES: tl.constexpr = NUM_8BIT + HALF
    key = tl.program_id(0) * N + tl.arange(0, N)
    inside = key < count
    rows = keys + key.to(tl.int64)[:, None] * stride
    wrong = tl.zeros((N,), tl.int32)
    for start in range(0, dim, D):
        column = start + tl.arange(0, D)
        some = tl.load(rows + column[None, :], mask=inside[:, None] & (column < dim)[None, :], other=0.0).to(tl.float32)
        # inf - inf and NaN - NaN are NaN
        wrong += tl.sum(tl.where(some - some == 0, 0, 1), axis=1)
    tl.store(bad, 1, mask=tl.sum(wrong, axis=0) > 0)  # no atomic: all who write, write 1
    out = codes + key.to(tl.int64)[:, None] * BYTES
    w, h = tl.arange(0, W), tl.arange(0, H)
    numbers = _numbers(rows, inside, key_projection, shift, w, w < NUM_8BIT, dim, N, D, W)
    tl.store(out + w[None, :], numbers.to(tl.int8), mask=inside[:, None] & (w < NUM_8BIT)[None, :])
    if NUM_4BIT > 0:
        # a byte has a number of the first and one of the second half, not two neighbours: each half is one product,
        # and nothing moves between threads
        low = _numbers(rows, inside, key_projection, shift, NUM_8BIT + h, h < HALF, dim, N, D, H)
        low = tl.minimum(tl.maximum(low + 8, 0.0), 15.0)
        high = _numbers(rows, inside, key_projection, shift, NUM_8BIT + HALF + h, h < HALF, dim, N, D, H)
        high = tl.minimum(tl.maximum(high + 8, 0.0), 15.0)
        packed = (low.to(tl.int32) | (high.to(tl.int32) << 4)).to(tl.int8)
        tl.store(out + NUM_8BIT + h[None, :], packed, mask=inside[:, None] & (h < HALF)[None, :])


@triton.jit
def _numbers(
    rows, inside, key_projection, shift, number, used, dim, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """floor(rows . key_projection - shift) of the M numbers named, within -128 .. 127.

    Few columns at once: a product in full float32 keeps both sides in registers, and what does not fit them goes to
    local memory, which the driver takes for every thread of the device (3.5 GiB for all 128 columns at once).
    """
    result = tl.zeros((N, M), tl.float32)
    for start in range(0, dim, D):
        column = start + tl.arange(0, D)
        here = column < dim
        some = tl.load(rows + column[None, :], mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        at = key_projection + number[None, :] * dim + column[:, None]
        side = tl.load(at, mask=used[None, :] & here[:, None], other=0.0)
        # ieee: TF32 would move numbers over a step's border, and codes would differ from those the CPU writes
        result = tl.dot(some, side, result, input_precision="ieee")
    result = tl.floor(result - tl.load(shift + number, mask=used, other=0.0)[None, :])
    return tl.minimum(tl.maximum(result, -128.0), 127.0)


def encode(keys: Tensor, key_projection: Tensor, shift: Tensor, num_8bit: int, codes: Tensor, bad: Tensor) -> None:
    """codes (n, key_bytes) of keys (n, head_dim) of a floating dtype, rows contiguous. bad: int32 (1,), see above."""
    count, dim = keys.shape
    num_4bit = 2 * (codes.shape[1] - num_8bit)
    _encode_kernel[(triton.cdiv(count, BLOCK_KEYS),)](
        keys, key_projection, shift, codes.view(torch.int8), bad, count, keys.stride(0), dim,
        NUM_8BIT=num_8bit, NUM_4BIT=num_4bit, N=BLOCK_KEYS, D=MIN_TILE, W=_tile(num_8bit), H=_tile(num_4bit // 2),
        num_warps=4,
    )  # fmt: skip


def _tile(number: int) -> int:
    return max(MIN_TILE, triton.next_power_of_2(number))
