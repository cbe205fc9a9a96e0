"""The Triton kernel behind `sampling/sampler.py`, which says what it computes. Imported only where there is
Triton.

A program chooses for one row. The thresholds of top-k and top-p are found by halving the range in which they lie, each
time with one pass over the row, which stays in the device's cache: no sort, and nothing but a token id is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

WARPS = 16
COLUMNS = 128 * WARPS
"""Four numbers for each thread, which are loaded at once."""
LOADS = 4
"""Of each thread, under way at a time: a program is alone on its multiprocessor. Of eight, registers are spilled."""

if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has no device functions

    @triton.jit
    def _log(x):
        return tl.log(x)

    @triton.jit
    def _log1p(x):
        whole = 1.0 + x
        return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))

else:
    from triton.language.extra import libdevice

    @triton.jit
    def _log(x):
        return libdevice.log(x)

    @triton.jit
    def _log1p(x):
        return libdevice.log1p(x)


@triton.jit
def _weight(scaled, most):
    """exp(scaled - most) as an integer, the largest 2^40: `sampling/sampler.py` says why."""
    return (tl.exp(scaled - most) * 1099511627776.0).to(tl.int64)


@triton.jit
def _gumbel(word):
    """Compute a Gumbel number from a random word, uint32, as `sampling/sampler.py` does."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    return -_log(-_log1p(-uniform))


@triton.jit
def _loaded(row, start, size, C: tl.constexpr, R: tl.constexpr):
    """R x C numbers of the row from `start` on, -inf behind its end. A thread holds columns: R loads are under way."""
    place = start + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(row + place, mask=place < size, other=float("-inf"))


@triton.jit
def _threshold(
    row, size, low, high, bound, temperature, most, MASS: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """The least number of the row for which what is larger than it weighs less than `bound`.

    It lies in [low, high], which are numbers of the row. MASS: numbers are divided by the temperature and weigh
    `_weight`; otherwise each weighs 1. A pass tries three numbers, and narrows the range to numbers of the row.
    """
    while low < high:
        quarter = high * 0.25 - low * 0.25
        first = tl.where((low + quarter > low) & (low + quarter <= high), low + quarter, high)
        second = tl.minimum(tl.maximum(low * 0.5 + high * 0.5, first), high)
        third = tl.minimum(tl.maximum(high - quarter, second), high)
        weight1, weight2 = tl.zeros((C,), tl.int64), tl.zeros((C,), tl.int64)
        weight3 = tl.zeros((C,), tl.int64)
        least1, least2 = tl.full((C,), float("inf"), tl.float32), tl.full((C,), float("inf"), tl.float32)
        least3 = tl.full((C,), float("inf"), tl.float32)
        largest1, largest2 = tl.full((C,), float("-inf"), tl.float32), tl.full((C,), float("-inf"), tl.float32)
        largest3 = tl.full((C,), float("-inf"), tl.float32)
        for start in range(0, size, C * R):
            number = _loaded(row, start, size, C, R)
            if MASS:
                number = tl.div_rn(number, temperature)
                weight = _weight(number, most)
            else:
                weight = tl.full((R, C), 1, tl.int64)
            weight1 += tl.sum(tl.where(number >= first, weight, 0), axis=0)
            weight2 += tl.sum(tl.where(number >= second, weight, 0), axis=0)
            weight3 += tl.sum(tl.where(number >= third, weight, 0), axis=0)
            least1 = tl.minimum(least1, tl.min(tl.where(number >= first, number, float("inf")), axis=0))
            least2 = tl.minimum(least2, tl.min(tl.where(number >= second, number, float("inf")), axis=0))
            least3 = tl.minimum(least3, tl.min(tl.where(number >= third, number, float("inf")), axis=0))
            largest1 = tl.maximum(largest1, tl.max(tl.where(number < first, number, float("-inf")), axis=0))
            largest2 = tl.maximum(largest2, tl.max(tl.where(number < second, number, float("-inf")), axis=0))
            largest3 = tl.maximum(largest3, tl.max(tl.where(number < third, number, float("-inf")), axis=0))
        reached1, reached2 = tl.sum(weight1) >= bound, tl.sum(weight2) >= bound
        reached3 = tl.sum(weight3) >= bound
        above = tl.min(tl.where(reached3, least3, tl.where(reached2, least2, least1)))
        below = tl.max(tl.where(reached2, largest3, tl.where(reached1, largest2, largest1)))
        low = tl.where(reached1, above, low)
        high = tl.where(reached3, high, below)
    return low


@triton.jit
def _least(row, size, C: tl.constexpr, R: tl.constexpr):
    """The row's least finite number, and how many are finite."""
    least = tl.full((C,), float("inf"), tl.float32)
    count = tl.zeros((C,), tl.int32)
    for start in range(0, size, C * R):
        number = _loaded(row, start, size, C, R)
        finite = number > float("-inf")
        least = tl.minimum(least, tl.min(tl.where(finite, number, float("inf")), axis=0))
        count += tl.sum(finite.to(tl.int32), axis=0)
    return tl.min(least), tl.sum(count)


@triton.jit
def _mass(row, size, floor, temperature, most, C: tl.constexpr, R: tl.constexpr):
    """Sum the weights of the scaled numbers >= floor."""
    mass = tl.zeros((C,), tl.int64)
    for start in range(0, size, C * R):
        scaled = tl.div_rn(_loaded(row, start, size, C, R), temperature)
        mass += tl.sum(tl.where(scaled >= floor, _weight(scaled, most), 0), axis=0)
    return tl.sum(mass)


@triton.jit
def _choose_kernel(logits, most, numbers, words, positions, ids, stride, size, C: tl.constexpr, R: tl.constexpr):
    """ids[r]: the draw of row r. numbers: float64 temperature, top-p, min-p; words: int64 top-k, seed low and high."""
    r = tl.program_id(0).to(tl.int64)
    row, most = logits + r * stride, tl.load(most + r)
    if (most > float("-inf")) & (most < float("inf")):  # false for NaN: the row has failed, and its id is there
        temperature = tl.load(numbers + 3 * r).to(tl.float32)
        top_p = tl.load(numbers + 3 * r + 1)
        top_k = tl.load(words + 3 * r)
        greedy = temperature == 0.0
        min_p = tl.where(greedy, 0.0, tl.load(numbers + 3 * r + 2).to(tl.float32))
        temperature = tl.where(greedy, 1.0, temperature)
        most_scaled = tl.div_rn(most, temperature)
        floor = -float("inf")
        if (not greedy) & ((top_k > 0) | (top_p < 1.0)):
            low, finite = _least(row, size, C, R)
            if (top_k > 0) & (top_k < finite):
                low = _threshold(row, size, low, most, top_k, temperature, most, False, C, R)
                floor = tl.div_rn(low, temperature)
            if top_p < 1.0:
                low_scaled = tl.div_rn(low, temperature)
                total = _mass(row, size, low_scaled, temperature, most_scaled, C, R)
                bound = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
                floor = _threshold(row, size, low_scaled, most_scaled, bound, temperature, most_scaled, True, C, R)
        seed = tl.load(words + 3 * r + 1) | (tl.load(words + 3 * r + 2) << 32)
        position = tl.load(positions + r)
        early, late = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
        best = tl.full((C,), float("-inf"), tl.float32)
        token = tl.zeros((C,), tl.int32)
        for start in range(0, size, 4 * C):
            block = start // 4 + tl.arange(0, C)
            none = block * 0
            drawn = tl.philox(
                seed, block.to(tl.uint32), none.to(tl.uint32) + early, none.to(tl.uint32) + late, none.to(tl.uint32)
            )
            for w in tl.static_range(4):
                place = block * 4 + w
                number = tl.load(row + place, mask=place < size, other=float("-inf"))
                scaled = tl.div_rn(number, temperature)
                score = scaled + tl.where(greedy, 0.0, _gumbel(drawn[w]))
                stays = (scaled >= floor) & (tl.exp(scaled - most_scaled) >= min_p)
                better = stays & (score > best)
                best = tl.where(better, score, best)
                token = tl.where(better, place, token)
        winner = tl.max(best)
        tl.store(ids + r, tl.min(tl.where(best == winner, token, 2147483647)).to(tl.int64))


def choose(logits: Tensor, most: Tensor, options: tuple[Tensor, Tensor], positions: Tensor, ids: Tensor) -> None:
    """Write the draws of all rows that did not fail into `ids`, int64 (rows,).

    logits: float32 (rows, vocabulary), numbers of a row side by side. most: each row's largest. options: float64 and
    int64 (rows, 3), contiguous, as `_choose_kernel` takes them. positions: int64 (rows,), contiguous.
    """
    rows, size = logits.shape
    _choose_kernel[(rows,)](
        logits, most, *options, positions, ids, logits.stride(0), size, C=COLUMNS, R=LOADS, num_warps=WARPS
    )
