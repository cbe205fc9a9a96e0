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

from retrieval_attn.index.sketch.rows import FITTED_KEYS, best_steps, rounding_errors

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


def best_split(errors: npt.NDArray[np.float64], key_bytes: int) -> Split:
    """The one of `splits` with the least error. errors (4, head_dim): of each number in 8, 4, 2 bits and not stored."""
    ways = np.array(splits(key_bytes, errors.shape[1]))
    stops = np.cumsum(np.pad(ways, ((0, 0), (1, 0))), axis=1)
    sums = np.pad(np.cumsum(errors, axis=1), ((0, 0), (1, 0)))
    ends = np.concatenate([stops, np.full((len(ways), 1), errors.shape[1])], axis=1)
    missed = sum(sums[i, ends[:, i + 1]] - sums[i, ends[:, i]] for i in range(4))
    wide, narrow, thin = ways[int(np.argmin(missed))]
    return int(wide), int(narrow), int(thin)


def learn_spaces(
    sides: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]], keys: npt.NDArray[np.float32], sizes: Sequence[int]
) -> list[CodeSpace]:
    """A space of each of some bytes per key for keys like `keys` (n, head_dim), n > 0, under A and B of `sides`, both
    (head_dim, head_dim).

    Steps are those of `blocks.SHARES` with the least squared error on a sample. The split is the one that misses least
    of one half of it by steps of the other: queries ask for all numbers alike, as A makes them.
    """
    dim = keys.shape[1]
    mean = keys.mean(axis=0, dtype=np.float64).astype(np.float32)
    numbers = (keys - mean) @ sides[1].T
    reach = np.maximum(np.maximum(numbers.max(axis=0), -numbers.min(axis=0)), np.finfo(np.float32).tiny * 2**16)
    sample = np.ascontiguousarray(numbers[:: max(1, len(numbers) // FITTED_KEYS)])
    fitted, judged = np.ascontiguousarray(sample[::2]), np.ascontiguousarray(sample[min(1, len(sample) - 1) :: 2])
    centre, errors = np.zeros(dim, np.float32), np.empty((4, dim))
    for i, half in enumerate(HALVES):
        halves = np.full(dim, half)
        errors[i] = rounding_errors(judged, best_steps(fitted, centre, reach, halves), halves)
    errors[3] = np.square(judged).mean(axis=0)
    deviation = np.sqrt(np.square(numbers).mean(axis=0))
    return [_space_of(sides, (mean, deviation), (sample, reach), best_split(errors, size)) for size in sizes]


def _space_of(
    sides: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    keys: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    numbers: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    split: Split,
) -> CodeSpace:
    """keys: their mean, and the deviation of each of their numbers. numbers: some of them (n, head_dim), and how far
    each reaches.
    """
    (mean, deviation), (sample, reach), dim = keys, numbers, len(keys[0])
    rank, halves = sum(split), np.repeat(HALVES, split)
    stored = np.ascontiguousarray(sample[:, :rank])
    step = best_steps(stored, np.zeros(rank, np.float32), reach, halves)
    key_side, shift = np.zeros((dim, dim), np.float32), np.zeros(dim, np.float32)
    key_side[:rank] = sides[1][:rank] / step[:, None]
    shift[:rank] = key_side[:rank] @ mean
    query_side = (sides[0] * np.concatenate([step, deviation[rank:]])[:, None]).astype(np.float32)
    estimate = np.ones((2, dim), np.float32)
    # a code is the floor of a number, half a step below it on average; most of few bits are stored without a sign
    below = np.repeat([0, 8, 0, 2, 0], [split[0], split[1] // 2, split[1] // 2, split[2] // 4 * 3, split[2] // 4])
    estimate[0] = mean + (0.5 - below) @ query_side[:rank].astype(np.float64)
    estimate[1, :rank] = rounding_errors(stored, step, halves) / np.square(step.astype(np.float64))
    return CodeSpace(query_side, key_side, shift, estimate, *split)


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
