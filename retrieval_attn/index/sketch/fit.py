"""How a head is searched, from its own held-out queries: bytes of the front, keys that pass it, leaves looked at.

All ways of the tables below are weighed for some of the training queries: what they find of the exact best keys, and
what they read. The cheapest way that finds enough is taken; leaves are looked at in part only where that saves and
loses nothing, for a tree does not help every head. Nothing is timed: the tables say what is tried and what a row costs
relative to a byte of the front.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.sketch.front import FrontPlan, halves_of, quantised

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
OLD_PASSING = 24.0
"""With the largest front, where nothing is known of the queries."""


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
