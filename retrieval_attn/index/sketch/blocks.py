"""Numbers in a few bits: how many numbers get how many, by which steps, and rows of 16 at a time.

A scan that goes row by row has to sum across a vector for every row. Here a vector holds the same four (eight, sixteen)
numbers of 16 rows in 8 (4, 2) bits, so sums stay in their lanes and a scan is as fast as memory brings the bytes.
`NumberBlocks` are rows of numbers in 8 bits laid out so; `front.py` has those of fewer bits.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.memory import aligned_empty

BLOCK = 16
"""Rows of a block: the int32 lanes of a vector."""
PAIR = 2 * BLOCK
"""Rows that a scan takes at once."""
VECTOR = 64
WIDE_STEP, NARROW_STEP, THIN_STEP = 4, 8, 16
"""Numbers of a row in one vector: in 8, 4 and 2 bits."""
WIDE_LEVELS, NARROW_LEVELS, THIN_LEVELS = 256, 16, 4
WIDE_ERROR, NARROW_ERROR = 1e-4, 0.0115
"""Mean squared error of a Gaussian number in these levels, of its variance (Max, 1960, table 1, uniform steps)."""
FITTED_KEYS = 2048
"""Most keys that steps are chosen by."""
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.2)
"""Ranges that are tried for a number, of its largest distance from the mean; the one with the least error is taken."""


class NumberBlocks(NamedTuple):
    """Rows of `rank` numbers in 8 bits each, rank a multiple of 4.

    blocks: (capacity / 16, 16 * rank) uint8, C-contiguous, begun on a cache line, an even number of rows; its owner
    knows how many are written. mean, step: (rank,) float32, number ~ mean + step * (code - half the levels + 1/2).
    reach: (rank,) float32, the largest distance from the mean among the rows that these were taken from.
    """

    blocks: npt.NDArray[np.uint8]
    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in self)

    def decoded(self, count: int) -> npt.NDArray[np.float32]:
        """The numbers (count, rank) that the first `count` rows were coded from, but for rounding."""
        codes = self.blocks.reshape(len(self.blocks), -1, BLOCK, WIDE_STEP).transpose(0, 2, 1, 3)
        numbers = codes.reshape(len(self.blocks) * BLOCK, -1)[:count].astype(np.float32)
        return self.mean + self.step * (numbers - (WIDE_LEVELS // 2 - 0.5))


class BlockSteps(NamedTuple):
    """float32 (rank,) each: see `NumberBlocks`."""

    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]

    @classmethod
    def of(cls, sample: npt.NDArray[np.float32], halves: npt.NDArray[np.int64]) -> BlockSteps:
        """Those of `sample` (m, rank) float32 finite, m may be 0; halves (rank,): half the levels of each number."""
        rank = sample.shape[1]
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32) if len(sample) else np.zeros(rank, np.float32)
        reach = np.abs(sample - mean).max(axis=0, initial=0.0).astype(np.float32)
        few = np.ascontiguousarray(sample[:: max(1, len(sample) // FITTED_KEYS)])
        return cls(mean, best_steps(few, mean, reach, halves), reach)


def coded_blocks(numbers: npt.NDArray[np.float32]) -> NumberBlocks:
    """Blocks of numbers (n, rank), rank a multiple of 4."""
    rank = numbers.shape[1]
    steps = BlockSteps.of(numbers, np.full(rank, WIDE_LEVELS // 2))
    pairs = -(-len(numbers) // PAIR)
    blocks = aligned_empty((2 * pairs, rank * BLOCK), np.uint8)
    blocks[:] = 0
    write_blocks(numbers, blocks, steps.mean, steps.step)
    return NumberBlocks(blocks, *steps)


def allocate(variances: npt.NDArray[np.float64], budget: int) -> tuple[int, int]:
    """How many of the numbers, in order of falling variance, get 8 bits and how many 4, in at most `budget` bytes.

    The choice with the least total squared error. wide is a multiple of 4, narrow one of 8, and they may end up to 7
    numbers behind the last one. budget: at least 4.
    """
    total = np.concatenate([[0.0], np.cumsum(variances)])
    count = len(variances)

    def between(first: int, last: int) -> float:
        return float(total[min(last, count)] - total[min(first, count)])

    best, chosen = np.inf, (WIDE_STEP, 0)
    for wide in range(0, min(budget, count + WIDE_STEP - 1) + 1, WIDE_STEP):
        left = max(0, count - wide)
        narrow = min((budget - wide) * 2 // NARROW_STEP, -(-left // NARROW_STEP)) * NARROW_STEP
        if not wide + narrow:
            continue
        error = WIDE_ERROR * between(0, wide) + NARROW_ERROR * between(wide, wide + narrow)
        error += between(wide + narrow, count)
        if error < best:
            best, chosen = error, (wide, narrow)
    return chosen


@njit(nogil=True, cache=True)
def best_steps(sample, mean, reach, halves):
    """float32 (rank,): of every number the step, in twice `halves` levels, that codes the sample with the least squared
    error; 0 where all are equal.
    """
    step = np.zeros(sample.shape[1], np.float32)
    distances = np.empty(len(sample), np.float32)
    for j in range(sample.shape[1]):
        distances[:] = sample[:, j] - mean[j]
        least = np.inf
        for share in SHARES:
            size = np.float64(reach[j]) * share / halves[j]
            if size <= 0:
                break
            error = _missed(distances, np.float32(size), np.float32(halves[j]))
            if error < least:
                least = error
                step[j] = size
    return step


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _missed(distances, size, half):
    """Sum of squares of what rounding takes, in steps: sums of several at once, in any order."""
    over, error = np.float32(1) / size, np.float32(0)
    for i in range(len(distances)):
        number = distances[i] * over
        missed = min(max(np.floor(number), -half), half - np.float32(1)) + np.float32(0.5) - number
        error += missed * missed
    return np.float64(error) * np.float64(size) ** 2


@njit(nogil=True, cache=True, error_model="numpy")
def rounding_errors(numbers, step, halves):
    """float64 (rank,): mean square of what rounding by these steps, in twice `halves` levels, takes from each of the
    numbers (n, rank), n > 0.
    """
    errors, over = np.zeros(numbers.shape[1]), 1 / step.astype(np.float64)
    for i in range(len(numbers)):
        for j in range(numbers.shape[1]):
            code = numbers[i, j] * over[j]
            missed = min(max(np.floor(code), -halves[j]), halves[j] - 1.0) + 0.5 - code
            errors[j] += missed * missed
    return errors * step.astype(np.float64) ** 2 / len(numbers)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def sum_of_squares(rows):
    """Sum the squares of rows (n, d) float32, as float64; NaN or infinite if an element is not finite."""
    total = 0.0
    for i in range(len(rows)):
        for j in range(rows.shape[1]):
            total += np.float64(rows[i, j]) ** 2
    return total


@njit(nogil=True, cache=True)
def write_blocks(numbers, blocks, mean, step):
    """Code numbers (n, rank) float32 as the first n rows of the blocks; beyond a range they are clipped."""
    for i in range(len(numbers)):
        block = blocks[i // BLOCK]
        lane = i % BLOCK * 4
        for j in range(numbers.shape[1]):
            block[j // WIDE_STEP * VECTOR + lane + j % WIDE_STEP] = code_of(
                numbers[i, j], mean[j], step[j], WIDE_LEVELS // 2
            )


@njit(nogil=True, cache=True, inline="always")
def code_of(number, mean, step, half):
    """The code of a number in twice `half` levels."""
    code = 0
    if step > 0:
        code = int(np.floor((np.float64(number) - np.float64(mean)) / np.float64(step)))
    return min(max(code, -half), half - 1) + half
