"""Projected keys in 16s: a few numbers in 8 bits, more in 4, the rest not at all, laid out for one vector per load.

A scan that goes key by key has to sum across a vector for every key. Here a vector holds the same four (or eight)
numbers of 16 keys, so sums stay in their lanes and a scan is as fast as memory brings the bytes. A *block* of 16 keys
is `wide / 4` vectors of four bytes per key, then `narrow / 8` vectors of eight halves of a byte: number 4 + b in the
upper half of the byte of number b. How many numbers get 8 bits, 4 bits or none follows from their variances.
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
"""Keys of a block: the int32 lanes of a vector."""
PAIR = 2 * BLOCK
"""Keys that a scan takes at once."""
VECTOR = 64
WIDE_STEP, NARROW_STEP = 4, 8
"""Numbers of a key in one vector."""
WIDE_LEVELS, NARROW_LEVELS = 256, 16
WIDE_ERROR, NARROW_ERROR = 1e-4, 0.0115
"""Mean squared error of a Gaussian number in so many levels, of its variance (Max, 1960, table 1, uniform steps)."""
FITTED_KEYS = 2048
"""Most keys that steps are chosen by."""
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.2)
"""Ranges that are tried for a number, of its largest distance from the mean; the one with the least error is taken."""


class KeyBlocks(NamedTuple):
    """Keys of `rank` = wide + narrow numbers each, most important first.

    blocks: (capacity / 16, bytes of a block) uint8, C-contiguous, begun on a cache line, an even number of rows; its
    owner knows how many keys are written. mean, step: (rank,) float32, number ~ mean + step * (code - half the levels
    + 1/2). reach: (rank,) float32, the largest distance from the mean among the keys that these were taken from.
    """

    blocks: npt.NDArray[np.uint8]
    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]
    wide: int

    @property
    def narrow(self) -> int:
        """How many numbers of a key have 4 bits."""
        return len(self.step) - self.wide

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in (self.blocks, self.mean, self.step, self.reach))


def key_bytes(wide: int, narrow: int) -> int:
    """Bytes of one key in a block."""
    return wide + narrow // 2


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


def empty_blocks(sample: npt.NDArray[np.float32], wide: int, capacity: int) -> KeyBlocks:
    """Blocks for `capacity` keys whose mean and steps are those of `sample` (m, rank) float32 finite, m may be 0."""
    rank = sample.shape[1]
    mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32) if len(sample) else np.zeros(rank, np.float32)
    reach = np.abs(sample - mean).max(axis=0, initial=0.0).astype(np.float32)
    few = np.ascontiguousarray(sample[:: max(1, len(sample) // FITTED_KEYS)])
    halves = np.where(np.arange(rank) < wide, WIDE_LEVELS // 2, NARROW_LEVELS // 2)
    step = best_steps(few, mean, reach, halves)
    pairs = -(-capacity // PAIR)
    blocks = aligned_empty((2 * pairs, key_bytes(wide, rank - wide) * BLOCK), np.uint8)
    return KeyBlocks(blocks, mean, step, reach, wide)


def decoded(keys: KeyBlocks, count: int) -> npt.NDArray[np.float32]:
    """The numbers (count, rank) that the first `count` keys were coded from, but for rounding; wide ones only."""
    assert not keys.narrow
    codes = keys.blocks.reshape(len(keys.blocks), -1, BLOCK, WIDE_STEP).transpose(0, 2, 1, 3)
    numbers = codes.reshape(len(keys.blocks) * BLOCK, -1)[:count].astype(np.float32)
    return keys.mean + keys.step * (numbers - (WIDE_LEVELS // 2 - 0.5))


def with_room(keys: KeyBlocks, count: int, written: int, copied: bool = False) -> KeyBlocks:
    """`keys` if `count` fit, else the first `written` of them in a larger array, with a quarter to spare; in another
    array in any case if `copied`.
    """
    if count <= len(keys.blocks) * BLOCK and not copied:
        return keys
    pairs = -(-(count + count // 4) // PAIR)
    blocks = aligned_empty((2 * pairs, keys.blocks.shape[1]), np.uint8)
    used = -(-written // BLOCK)
    blocks[:used] = keys.blocks[:used]
    return keys._replace(blocks=blocks)


def out_of_reach(keys: KeyBlocks, numbers: npt.NDArray[np.float32]) -> bool:
    """Whether any of numbers (n, rank) lies twice as far out as all that the steps were taken from."""
    return bool(len(numbers)) and bool((np.abs(numbers - keys.mean) > 2.0 * keys.reach.astype(np.float64)).any())


def clear_places(keys: KeyBlocks, start: int, stop: int) -> None:
    """Zeros in the blocks that keys [start, stop) will be the first in, and up to an even number of blocks: what is
    saved of places without keys must not be what lay in memory before.
    """
    keys.blocks[-(-start // BLOCK) : -(-stop // PAIR) * 2] = 0


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


@njit(nogil=True, cache=True)
def write_blocks(numbers, blocks, start, mean, step, wide):
    """Code numbers (n, rank) float32 as keys [start, start + n) of the blocks; beyond a range they are clipped."""
    rank = numbers.shape[1]
    for i in range(len(numbers)):
        block = blocks[(start + i) // BLOCK]
        lane = (start + i) % BLOCK * 4
        for j in range(rank):
            half = (WIDE_LEVELS if j < wide else NARROW_LEVELS) // 2
            code = 0
            if step[j] > 0:
                code = int(np.floor((np.float64(numbers[i, j]) - np.float64(mean[j])) / np.float64(step[j])))
            code = min(max(code, -half), half - 1) + half
            if j < wide:
                block[j // WIDE_STEP * VECTOR + lane + j % WIDE_STEP] = code
                continue
            at = wide // WIDE_STEP * VECTOR + (j - wide) // NARROW_STEP * VECTOR + lane + (j - wide) % WIDE_STEP
            if (j - wide) % NARROW_STEP < WIDE_STEP:
                block[at] = code  # the upper half follows
            else:
                block[at] |= code << 4
