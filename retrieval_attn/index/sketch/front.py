"""The front: a first plane of few bytes per key, in 16s, which a search scans; keys that pass are scored by their rows.

It has the first numbers of a key in 4 bits and the next in 2, made from the key's row: a scan of the front reads an
eighth to a half of the rows' bytes, and of 131,072 keys a few thousand are worth a cache line each. Which numbers get
4 bits and which 2 is told by what is missed of keys that the steps were not chosen by, as in `kernels/key_codes.py`.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.sketch.blocks import (
    BLOCK,
    FITTED_KEYS,
    NARROW_LEVELS,
    NARROW_STEP,
    THIN_LEVELS,
    THIN_STEP,
    VECTOR,
    WIDE_LEVELS,
    WIDE_STEP,
    best_steps,
)
from retrieval_attn.index.sketch.rows import KeyRows, place_of_number

BYTES_STEP = 4
"""A front's bytes per key are a multiple: a vector's bytes of one key."""
THINNEST = 4
"""Most numbers to a byte."""


class Front(NamedTuple):
    """blocks: (capacity / 16, bytes of a block) uint8, C-contiguous, begun on a cache line, as many keys as the rows.

    A block is `narrow / 8` vectors of eight numbers in 4 bits of 16 keys, number 4 + b in the upper half of the byte of
    number b, then vectors of sixteen numbers in 2 bits, number 4 * c + b from bit 2 * c of the byte of number b on.
    step: (narrow + thin,) float32, number ~ mean of the rows + step * (code - half the levels + 1/2).
    """

    blocks: npt.NDArray[np.uint8]
    step: npt.NDArray[np.float32]
    narrow: int

    @property
    def thin(self) -> int:
        """How many numbers of a key have 2 bits."""
        return len(self.step) - self.narrow

    @property
    def key_bytes(self) -> int:
        """Bytes of one key."""
        return self.narrow // 2 + self.thin // THINNEST

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.blocks.nbytes + self.step.nbytes)


class FrontPlan(NamedTuple):
    """Sizes of the front of a head: see `Front`."""

    step: npt.NDArray[np.float32]
    narrow: int


def splits(key_bytes: int, rank: int) -> list[tuple[int, int]]:
    """How many numbers may get 4 bits and how many 2 in `key_bytes`; they end less than 16 behind the last one."""
    ways = [(8 * ones, 16 * (key_bytes // BYTES_STEP - ones)) for ones in range(key_bytes // BYTES_STEP + 1)]
    most = -(-rank // THIN_STEP) * THIN_STEP
    return [way for way in ways if sum(way) <= most] or [ways[-1]]


def plan_front(
    numbers: npt.NDArray[np.float32], mean: npt.NDArray[np.float32], sizes: list[int]
) -> dict[int, FrontPlan]:
    """For each of these many bytes per key the split and the steps that miss least of numbers (n, rank) float32."""
    rank, some = numbers.shape[1], numbers[:: max(1, len(numbers) // FITTED_KEYS)]
    distances = np.zeros((len(some), -(-rank // THIN_STEP) * THIN_STEP), np.float32)
    distances[:, :rank] = some - mean
    reach = np.abs(distances).max(axis=0, initial=0.0)
    fitted, judged = np.ascontiguousarray(distances[::2]), distances[1::2] if len(distances) > 1 else distances
    none = np.zeros(distances.shape[1], np.float32)
    errors, steps = np.zeros((3, distances.shape[1])), []
    for i, half in enumerate((NARROW_LEVELS // 2, THIN_LEVELS // 2)):
        steps.append(best_steps(fitted, none, reach, np.full(len(none), half)))
        if len(judged):
            errors[i] = np.square(quantised(judged, steps[i], half) - judged).mean(axis=0)
    if len(judged):
        errors[2] = np.square(judged).mean(axis=0)
    plans = {}
    for size in sizes:
        missed = [
            errors[0, :narrow].sum() + errors[1, narrow : narrow + thin].sum() + errors[2, narrow + thin :].sum()
            for narrow, thin in splits(size, rank)
        ]
        narrow, thin = splits(size, rank)[int(np.argmin(missed))]
        step = np.zeros(narrow + thin, np.float32)
        own = min(len(step), len(none))
        step[:own] = np.concatenate([steps[0][:narrow], steps[1][narrow:]])[:own]
        plans[size] = FrontPlan(step, narrow)
    return plans


def quantised(
    distances: npt.NDArray[np.float32], step: npt.NDArray[np.float32], half: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return the values that the codes of distances (n, rank) from the mean represent."""
    over = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    codes = np.clip(np.floor(distances * over), -half, half - 1)
    return np.asarray((codes + np.float32(0.5)) * step, np.float32)


def halves_of(plan: FrontPlan) -> npt.NDArray[np.int64]:
    """Half the levels of each number."""
    return np.where(np.arange(len(plan.step)) < plan.narrow, NARROW_LEVELS // 2, THIN_LEVELS // 2)


def empty_front(plan: FrontPlan, capacity: int) -> Front:
    """A front for `capacity` keys, a multiple of PAIR, that has none yet."""
    width = BLOCK * (plan.narrow // 2 + (len(plan.step) - plan.narrow) // THINNEST)
    blocks = aligned_empty((capacity // BLOCK, width), np.uint8)
    blocks[:] = 0
    return Front(blocks, plan.step, plan.narrow)


def write_front(front: Front, keys: KeyRows, start: int, stop: int) -> None:
    """Write the keys [start, stop) of rows."""
    own = min(len(front.step), len(keys.step))
    _write_front(keys.rows, _tables(front, keys), start, stop, keys.wide, own, front.narrow, front.blocks)


def with_room(front: Front, keys: KeyRows, written: int, copied: bool = False) -> Front:
    """`front` if it has the room of `keys`, else the first `written` keys in one that has; see `rows.with_room`."""
    if len(front.blocks) * BLOCK == len(keys.rows) and not copied:
        return front
    larger = empty_front(FrontPlan(front.step, front.narrow), len(keys.rows))
    used = -(-written // BLOCK)
    larger.blocks[:used] = front.blocks[:used]
    return larger


def _tables(front: Front, keys: KeyRows) -> npt.NDArray[np.uint8]:
    """The front's code for every code of a row: (numbers, 256); numbers that rows have not are in the middle."""
    halves = halves_of(FrontPlan(front.step, front.narrow))
    tables = np.repeat(halves.astype(np.uint8)[:, None], WIDE_LEVELS, axis=1)
    for j in range(min(len(front.step), len(keys.step))):
        levels = WIDE_LEVELS if j < keys.wide else NARROW_LEVELS
        if front.step[j] > 0:
            numbers = (np.arange(levels) - (levels // 2 - 0.5)) * keys.step[j]
            codes = np.floor(numbers / np.float64(front.step[j]))
            tables[j, :levels] = np.clip(codes, -halves[j], halves[j] - 1) + halves[j]
    return tables


@njit(nogil=True, cache=True)
def _write_front(rows, tables, start, stop, wide, own, narrow, blocks):
    """See `write_front`. own: how many of the front's numbers rows have."""
    rank = len(tables)
    bytes_, shifts, masks = np.empty(rank, np.int64), np.empty(rank, np.int64), np.empty(rank, np.int64)
    at, into = np.empty(rank, np.int64), np.empty(rank, np.int64)
    for j in range(rank):
        bytes_[j], shifts[j], masks[j] = 0, 0, 0
        if j < own:
            bytes_[j], shifts[j], masks[j] = place_of_number(j, wide)
        if j < narrow:
            at[j] = j // NARROW_STEP * VECTOR + j % WIDE_STEP
            into[j] = j % NARROW_STEP // WIDE_STEP * 4
        else:
            rest = j - narrow
            at[j] = (narrow // NARROW_STEP + rest // THIN_STEP) * VECTOR + rest % WIDE_STEP
            into[j] = rest % THIN_STEP // WIDE_STEP * 2
    for place in range(start, stop):
        row, block, lane = rows[place], blocks[place // BLOCK], place % BLOCK * 4
        for first in range(lane, blocks.shape[1], VECTOR):
            block[first : first + 4] = 0  # a key that was forgotten may have been here
        for j in range(rank):
            code = tables[j, row[bytes_[j]] >> shifts[j] & masks[j]]
            block[at[j] + lane] |= code << into[j]
