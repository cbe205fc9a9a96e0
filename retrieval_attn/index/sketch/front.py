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
from retrieval_attn.index.sketch.rows import (
    BLOCK,
    FITTED_KEYS,
    NARROW_LEVELS,
    NARROW_STEP,
    THIN_LEVELS,
    THIN_STEP,
    VECTOR,
    WIDE_LEVELS,
    WIDE_STEP,
    KeyRows,
    best_steps,
    place_of_number,
)

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


SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
"""Bytes of a key's front that are tried, up to 2 bits for every number."""
PASSING = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
"""Keys that pass the front, of each that gets an exact score."""
SHARES = (0.02, 0.03, 0.045, 0.065, 0.09, 0.125, 0.18, 0.25, 1.0)
"""Shares of leaves that are tried."""
ROW_BYTES = 128.0
"""What a key costs that passes: its cache line, fetched from anywhere, and the sums of four queries, in bytes of a
front that is read from one end to the other."""
LEAF_BYTES = 2.0
"""What choosing leaves costs per key."""
FOUND = 0.98
"""Least share of the best keys, by number and by weight, that lie in the leaves looked at and pass the front."""
HELD_OUT, HELD_K = 64, 100
"""Training queries, and best keys of each, that ways are weighed by."""
WEIGHED = 200
"""Keys that got an exact score for each of them, by default."""
FEW_KEYS = 8192
"""Fewer keys have nothing to weigh: the largest front, and FEW_PASSING."""
FEW_PASSING = 8.0


class Way(NamedTuple):
    """size: bytes of the front per key. passing: keys that pass it, of each that gets an exact score. share: of the
    leaves, what is looked at.
    """

    size: int
    passing: float
    share: float


class FitQueries(NamedTuple):
    """Queries that measure search methods: m queries, a multiple of `group`; those of one group are searched together.

    queries (m, rank) float32, projected. best (m, k, rank) float32: distances from the mean of the numbers of each
    one's best keys; weights (m, k): theirs in attention, each row adding up to 1. sample (s, rank) float32: distances
    of some of the keys, evenly spaced. leaves (m, leaves) float32: scores of the leaves, of which `homes` (m, k) and
    `sample_homes` (s,) int64 say whose the keys are; no leaves: (m, 0), and zeros. keys: how many there are.
    """

    group: int
    queries: npt.NDArray[np.float32]
    best: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float64]
    sample: npt.NDArray[np.float32]
    leaves: npt.NDArray[np.float32]
    homes: npt.NDArray[np.int64]
    sample_homes: npt.NDArray[np.int64]
    keys: int


def sizes_for(rank: int) -> list[int]:
    """The SIZES that a front of `rank` numbers can have."""
    return [size for size in SIZES if 4 * size <= rank] or [SIZES[0]]


def way_for_few(rank: int) -> Way:
    """Without queries to weigh by, or for few keys: all leaves."""
    return Way(sizes_for(rank)[-1], FEW_PASSING, 1.0)


def best_way(held: FitQueries, plans: dict[int, FrontPlan], kept: int) -> Way:
    """The way that reads least of those that find FOUND; if none does, the one that finds most.

    plans: see `front.plan_front`. kept: keys that get an exact score.
    """
    looked = [(share, *_looked_at(held, share)) for share in (SHARES if held.leaves.shape[1] else (1.0,))]
    best, chosen, most = np.inf, None, (-1.0, Way(next(iter(plans)), PASSING[-1], 1.0))
    for size, plan in plans.items():
        scanned = [1.0 if in_sample is None else float(in_sample.mean()) for _, _, in_sample in looked]
        costs = [size * part + (LEAF_BYTES if part < 1.0 else 0.0) for part in scanned]
        if min(costs) >= best:
            continue
        passed = _passed(held, plan, kept)
        largest = max(passed)
        if not _finds(held, passed[largest][0]):  # with fewer leaves, or fewer that pass, it finds less
            most = max(most, (float(passed[largest][0].mean()), Way(size, largest, 1.0)))
            continue
        for (share, in_best, in_sample), cost in zip(looked, costs, strict=True):
            for passing, (seen, read) in passed.items():
                if cost >= best:
                    break
                both = seen & in_best
                if _finds(held, both):  # more would pass for more
                    rows = float((read if in_sample is None else read & in_sample).mean())
                    if cost + ROW_BYTES * rows < best:
                        best, chosen = cost + ROW_BYTES * rows, Way(size, passing, share)
                    break
    return chosen or most[1]


def _finds(held: FitQueries, seen: npt.NDArray[np.bool_]) -> bool:
    """Whether the best keys that are `seen`, bool (m, k), are enough."""
    weight = float((seen * held.weights).sum(axis=1).mean())
    return min(float(seen.mean()), weight) >= FOUND


def _looked_at(held: FitQueries, share: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_] | None]:
    """Which of each query's best keys (m, k), and which of the sample for each group (groups, s), lie in the leaves
    that the group looks at; None: in all.
    """
    count = held.leaves.shape[1]
    if share >= 1.0 or not count:
        return np.ones(held.homes.shape, bool), None
    bound = np.partition(held.leaves, count - max(1, int(share * count)), axis=1)[:, count - max(1, int(share * count))]
    above: npt.NDArray[np.bool_] = (held.leaves >= bound[:, None]).reshape(-1, held.group, count)
    looked = np.asarray(above.any(axis=1))
    own = np.take_along_axis(np.repeat(looked, held.group, axis=0), held.homes, axis=1)
    return own, looked[:, held.sample_homes]


def _passed(
    held: FitQueries, plan: FrontPlan, kept: int
) -> dict[float, tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """For each of PASSING which of the best keys (m, k) and of the sample (groups, s) pass for a query of the group.

    As many of the sample pass for each query as shall of all keys.
    """
    rank, size = min(len(plan.step), held.queries.shape[1]), len(held.sample)
    step, halves = plan.step[:rank], halves_of(plan)[:rank]
    queries = held.queries[:, :rank].reshape(-1, held.group, rank)
    sample = queries.reshape(-1, rank) @ quantised(held.sample[:, :rank], step, halves).T
    best = quantised(held.best[..., :rank].reshape(-1, rank), step, halves).reshape(len(queries), -1, rank)
    own = queries @ best.transpose(0, 2, 1)
    places = {passing: size - 1 - int(np.ceil(passing * kept * size / held.keys)) for passing in PASSING}
    places = {passing: place for passing, place in places.items() if place >= 0}
    ordered = np.partition(sample, sorted(set(places.values())), axis=1) if places else sample
    found = {}
    for passing, place in places.items():
        bounds = ordered[:, place].reshape(-1, held.group, 1)
        seen = np.asarray((own > bounds).any(axis=1)).reshape(held.homes.shape)
        read = (sample.reshape(len(queries), held.group, size) > bounds).any(axis=1)
        found[passing] = seen, np.asarray(read)
    if not found:  # so few keys that all pass
        found[PASSING[0]] = np.ones(held.homes.shape, bool), np.ones((len(queries), size), bool)
    return found
