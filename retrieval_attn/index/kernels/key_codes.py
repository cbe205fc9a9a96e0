"""Keys in a few bytes each, row by row, for a device that scans all of them: `device.py` has the index.

q . k - q . mean is approximated by (A q) . (B (k - mean)), A and B by `sketch.index.learn_projection`. The first
`wide` numbers of B (k - mean) are stored in 8 bits, the next `narrow` in 4, the next `thin` in 2, the rest not at all;
the steps are folded into A. The bytes per key are given and each head has the split that misses least of them, on keys
that its steps were not chosen by: the kernels read where its classes begin with its codes.

To order keys a code's score needs no more. As large as q . k it is together with q . offset: of the mean, and of what
lies between a number and its floor. What is then left is spread about 0, whatever the score: the more, the more a query
asks for what is not stored. A sum of exponentials of such scores is too small by half of that variance, of its
logarithm: by .1 to .3 at half a byte per number for synthetic heads, whose logits are spread by 3; by .00 to .02 when
the variance is counted in.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.sketch.rows import best_steps, centred_rows, fit_numbers, rounding_errors

HALVES = 128, 8, 2
"""Half the levels of a number in 8, 4 and 2 bits: what the least code lies below zero."""


SIGN = np.uint8(128)
"""A byte's highest bit: what makes a number that counts from its least level one with a sign."""


class CodeSpace(NamedTuple):
    """Parameters of the codes of one head's keys.

    query_side (head_dim, head_dim) float32: A with the steps folded in; of numbers that are not stored, A times the
    deviation of each. key_side: B over the steps, as many rows as numbers are stored or, behind them, zeros. shift: one
    for each row, key_side . mean. wide + narrow + thin numbers are stored, a key's code being `wide` int8, then
    `narrow / 2` bytes, of which byte b has number wide + b in its lower half and number wide + narrow / 2 + b in its
    upper half, then `thin / 4` bytes of four numbers each, laid out the same way from the lowest two bits up. The
    number in a byte's highest bits has a sign, as the byte then has; others count from their least level.

    estimate (2, head_dim) float32: what makes a score as large as q . k. Row 0: offset; q . k is near
    `code_scores` + q . offset. Row 1: the variance of what rounding took from each number, 1 of those not stored.

    query_side and estimate are empty where no query is scored.
    """

    query_side: npt.NDArray[np.float32]
    key_side: npt.NDArray[np.float32]
    shift: npt.NDArray[np.float32]
    estimate: npt.NDArray[np.float32]
    wide: int
    narrow: int
    thin: int = 0

    @property
    def rank(self) -> int:
        """How many numbers are stored."""
        return self.wide + self.narrow + self.thin

    @property
    def key_bytes(self) -> int:
        """Bytes of one key's code."""
        return self.wide + self.narrow // 2 + self.thin // 4


Split = tuple[int, int, int]
"""How many numbers get 8, 4 and 2 bits."""


@functools.cache
def splits(key_bytes: int, head_dim: int) -> tuple[Split, ...]:
    """All ways to store numbers of a key in exactly `key_bytes`; as many bytes as numbers, or more: 8 bits each."""
    if key_bytes >= head_dim:
        return ((head_dim, 0, 0),)
    found = [
        (wide, 2 * (key_bytes - wide - quarters), 4 * quarters)
        for wide in range(key_bytes + 1)
        for quarters in range(key_bytes - wide + 1)
    ]
    return tuple(split for split in found if sum(split) <= head_dim)


@functools.cache
def _ways(key_bytes: int, head_dim: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`splits` as an array (ways, 3), and where each class of numbers begins and ends, (ways, 5)."""
    ways = np.array(splits(key_bytes, head_dim))
    return ways, np.pad(np.cumsum(ways, axis=1), ((0, 0), (1, 1)), constant_values=((0, 0), (0, head_dim)))


def best_split(errors: npt.NDArray[np.float64], key_bytes: int) -> Split:
    """The one of `splits` with the least error. errors (4, head_dim): of each number in 8, 4, 2 bits and not stored."""
    ways, stops = _ways(key_bytes, errors.shape[1])
    wide, narrow, thin = ways[_least_missed(errors, stops)].tolist()
    return wide, narrow, thin


@njit(nogil=True, cache=True)
def _least_missed(errors, stops):  # type: ignore[no-untyped-def]
    """The first of ways with the least error. errors: see `best_split`. stops (ways, 5): see `_ways`."""
    sums, missed = np.zeros((len(errors), errors.shape[1] + 1)), np.zeros(len(stops))
    for i in range(len(errors)):
        for j in range(errors.shape[1]):
            sums[i, j + 1] = sums[i, j] + errors[i, j]
    for way in range(len(stops)):
        for i in range(len(errors)):
            missed[way] += sums[i, stops[way, i + 1]] - sums[i, stops[way, i]]
    return np.argmin(missed)


Sides = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""A and B, both (heads, head_dim, head_dim)."""


def learn_spaces(sides: Sides, keys: npt.NDArray[np.float32], sizes: Sequence[int]) -> list[list[CodeSpace]]:
    """A space of each of some bytes per key for keys like `keys` (heads, n, head_dim), n > 0, under A and B of `sides`.

    Steps are those of `blocks.SHARES` with the least squared error on a sample. The split is the one that misses least
    of one half of it by steps of the other: queries ask for all numbers alike, as A makes them.
    """
    heads, dim = keys.shape[0], keys.shape[2]
    means, centred = centred_rows(keys)
    numbers = centred @ sides[1].swapaxes(1, 2)
    ways, stops = (np.concatenate(parts) for parts in zip(*(_ways(size, dim) for size in sizes), strict=True))
    ends = np.cumsum([len(_ways(size, dim)[0]) for size in sizes])
    arrays = [np.empty((heads, len(sizes), *shape), np.float32) for shape in ((dim, dim), (dim, dim), (dim,), (2, dim))]
    chosen = np.empty((heads, len(sizes)), np.int64)
    _fit_spaces(*sides, means, numbers, stops, ways, ends, (arrays[0], arrays[1], arrays[2], arrays[3]), chosen)
    return [
        [CodeSpace(*(array[head, i] for array in arrays), *ways[way].tolist()) for i, way in enumerate(own)]
        for head, own in enumerate(chosen)
    ]


@njit(nogil=True, cache=True, error_model="numpy")
def _fit_spaces(  # type: ignore[no-untyped-def]
    query_sides, key_sides, means, numbers, stops, ways, ends, spaces, chosen
):
    """Write the arrays of each head's spaces, with a leading (heads, sizes), and chosen (heads, sizes): their ways.

    ways (n, 3), stops (n, 5): of all sizes, those of one up to `ends` of it.
    """
    for head in range(len(numbers)):
        sample, reach, deviation, errors = fit_numbers(numbers[head], HALVES)
        begin = 0
        for i in range(len(ends)):
            way = begin + _least_missed(errors, stops[begin : ends[i]])
            made = _space(
                query_sides[head], key_sides[head], means[head], deviation, sample, reach,
                ways[way, 0], ways[way, 1], ways[way, 2],
            )  # fmt: skip
            spaces[0][head, i], spaces[1][head, i], spaces[2][head, i], spaces[3][head, i] = made
            chosen[head, i], begin = way, ends[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _space(  # type: ignore[no-untyped-def]
    query_side, key_side, mean, deviation, sample, reach, wide, narrow, thin
):
    """Arrays of a CodeSpace under A (query_side) and B (key_side), float32 (head_dim, head_dim).

    mean, deviation: of the keys, and of each of their numbers. sample: some of the numbers (n, head_dim); reach: how
    far each goes.
    """
    dim, rank = len(mean), wide + narrow + thin
    halves = np.empty(rank, np.int64)
    halves[:wide], halves[wide : wide + narrow], halves[wide + narrow :] = HALVES
    stored = sample[:, :rank].copy()
    step = best_steps(stored, np.zeros(rank, np.float32), reach, halves)
    kept = rounding_errors(stored, step, halves)
    own_keys, shift = np.zeros((dim, dim), np.float32), np.zeros(dim, np.float32)
    own_queries, estimate = np.empty((dim, dim), np.float32), np.ones((2, dim), np.float32)
    offset = mean.astype(np.float64)
    for i in range(dim):
        size = step[i] if i < rank else deviation[i]
        # a code is the floor of a number, half a step below it on average; most of few bits have no sign
        below = 0.5
        if wide <= i < wide + narrow // 2:
            below -= 8
        elif wide + narrow <= i < wide + narrow + thin // 4 * 3:
            below -= 2
        total = 0.0
        for j in range(dim):
            own_queries[i, j] = query_side[i, j] * size
            if i < rank:
                own_keys[i, j] = key_side[i, j] / size
                total += np.float64(own_keys[i, j]) * mean[j]
                offset[j] += below * own_queries[i, j]
        shift[i] = total
        if i < rank:
            estimate[1, i] = kept[i] / np.float64(size) ** 2
    estimate[0] = offset
    return own_queries, own_keys, shift, estimate


def encode(space: CodeSpace, keys: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Codes (n, key_bytes) of keys (n, head_dim)."""
    numbers = np.floor(keys @ space.key_side[: space.rank].T - space.shift[: space.rank])
    wide, narrow, thin = np.split(numbers, [space.wide, space.wide + space.narrow], axis=1)
    codes = [np.clip(wide, -128, 127).astype(np.int8).view(np.uint8)]
    for some, bits in (narrow, 4), (thin, 2):
        half, parts = 1 << bits - 1, 8 // bits
        unsigned = np.clip(some + half, 0, 2 * half - 1).astype(np.uint8)
        at = bits * np.arange(parts, dtype=np.uint8)[:, None]
        packed = np.bitwise_or.reduce(unsigned.reshape(len(keys), parts, some.shape[1] // parts) << at, axis=1)
        codes.append(packed ^ SIGN)
    return np.concatenate(codes, axis=1)


def code_scores(
    space: CodeSpace, codes: npt.NDArray[np.uint8], queries: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Estimate q . k from codes, up to a constant per query: (queries, codes) float32; queries (m, head_dim)."""
    wide, narrow, thin = np.split(codes, [space.wide, space.wide + space.narrow // 2], axis=1)
    parts = [wide.view(np.int8), narrow & 15, narrow.view(np.int8) >> 4]
    parts += [*((thin >> at) & 3 for at in (0, 2, 4)), thin.view(np.int8) >> 6]
    numbers = np.concatenate([part.astype(np.float32) for part in parts], axis=1)
    return queries @ space.query_side[: space.rank].T @ numbers.T
