"""What kernels that choose the best of many numbers share. Imported only where there is Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl

MAX_ROUNDS = 24
"""Cuts of a threshold's range at most: each leaves about a third, so 24 pass float32's resolution."""


@triton.jit
def threshold(values, k, enough, ROUNDS: tl.constexpr):
    """A number that at least `k` values reach, and hardly more than `enough` where they differ at all.

    values: fewer than 65,536, in rows; -inf is none. Fewer than `k` of them: the least; none: inf.
    """
    low = tl.min(tl.where(values > -float("inf"), values, float("inf")))
    high = tl.max(values)
    count = tl.sum(tl.where(values >= low, 1, 0))
    turn = 0
    while (turn < ROUNDS) & (count > enough):
        # two numbers are tried at once, for a sum over all threads is what a turn costs: 16 bits for each count
        first, second = low + (high - low) * 0.33, low + (high - low) * 0.67
        total = tl.sum(tl.where(values >= first, 1, 0) + tl.where(values >= second, 65536, 0))
        above1, above2 = total & 65535, (total >> 16) & 65535
        high = tl.where(above2 >= k, high, tl.where(above1 >= k, second, first))
        low = tl.where(above2 >= k, second, tl.where(above1 >= k, first, low))
        count = tl.where(above2 >= k, above2, tl.where(above1 >= k, above1, count))
        turn += 1
    return low


@triton.jit
def tell(products, lacking, best, scale, ROUNDS: tl.constexpr):
    """What codes tell of a query's keys that are named, see `search.Told`. products: q . k by codes, -inf: no key.
    lacking: the variance of a logit by them.
    """
    least_read = threshold(products, best, best + best // 4, ROUNDS)
    return tl.where(products >= least_read, float("inf"), products + lacking / (2 * scale))
