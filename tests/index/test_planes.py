"""Planes of a sketch: what finds enough is chosen, recall holds for heads of every size, a broken plane is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index import FlatIndex, Format, SketchIndex
from retrieval_attn.index.sketch import front as fit
from retrieval_attn.index.sketch.front import PASSING, FitQueries, Way, best_way, plan_front
from retrieval_attn.index.sketch.task import SketchArguments
from retrieval_attn_eval.bench.synthetic import synthetic_head
from tests.cpu.reference import recall
from tests.index.building import built

RANK = 64


def held(leaves: float = 0.0, seed: int = 0, keys: int = 40_000, loud: int = 8) -> FitQueries:
    """Of 16 queries in fours over keys of 64 numbers, of which the first `loud` count. leaves: how well the score of a
    key's leaf, of 1,000, tells the key's; 0: there are none.
    """
    rng = np.random.default_rng(seed)
    scale = np.where(np.arange(RANK) < loud, 1.0, 0.05)
    sample = (rng.standard_normal((8000, RANK)) * scale).astype(np.float32)
    queries = rng.standard_normal((16, RANK)).astype(np.float32)
    exact = queries @ sample.T
    top = np.argsort(-exact, axis=1)[:, :20]
    scores, homes, sample_homes = np.zeros((16, 0), np.float32), np.zeros((16, 20), np.int64), np.zeros(8000, np.int64)
    if leaves:
        sample_homes = np.arange(8000) // 8
        order = np.argsort(exact.sum(axis=0))  # near keys together, as the sum of all queries has them
        sample, exact = sample[order], exact[:, order]
        top = np.argsort(-exact, axis=1)[:, :20]
        homes = sample_homes[top]
        noise = rng.standard_normal((16, 1000)) * exact.std() * (1 / leaves - 1)
        scores = (exact.reshape(16, 1000, 8).max(axis=2) + noise).astype(np.float32)
    weights = np.full((16, 20), 0.05)
    return FitQueries(4, queries, sample[top], weights, sample, scores, homes, sample_homes, keys)


def way_of(told: FitQueries, sizes: list[int], kept: int = 40) -> Way:
    numbers = told.sample
    return best_way(told, plan_front(numbers, np.zeros(RANK, np.float32), sizes), kept)


def test_the_cheapest_way_that_finds_enough() -> None:
    """Few bytes where few numbers count, more where all do; rows that need not be read are not."""
    loud, quiet = way_of(held(), [4, 8, 16]), way_of(held(loud=64), [4, 8, 16])
    assert loud.size < quiet.size and loud.share == quiet.share == 1.0
    assert loud.passing <= quiet.passing
    # every way that would be cheaper finds too little
    told = held()
    plans = plan_front(told.sample, np.zeros(RANK, np.float32), [4, 8, 16])
    for size, plan in plans.items():
        for passing, (seen, read) in fit._passed(told, plan, 40).items():
            cost = size + fit.ROW_BYTES * read.mean()
            own = fit._passed(told, plans[loud.size], 40)[loud.passing]
            if cost < loud.size + fit.ROW_BYTES * own[1].mean() - 1e-9:
                assert seen.mean() < fit.FOUND, (size, passing)


def test_leaves_are_left_out_only_where_nothing_is_lost() -> None:
    exact, useless = way_of(held(leaves=1.0, loud=64), [16]), way_of(held(leaves=0.2, loud=64), [16])
    assert exact.share < 1.0 and useless.share == 1.0


def test_the_one_that_finds_most_where_none_finds_enough() -> None:
    """All keys pass that a table has; none is left out for being dear."""
    told = held(loud=64, keys=1_000_000)
    assert way_of(told, [4, 8], kept=20) == Way(8, PASSING[-1], 1.0)


def head(level: str, n: int, dim: int, group: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    made = synthetic_head(n, level=level, seed=3, head_dim=dim, group=group, train=1024, decode=8)
    held_out = np.ascontiguousarray(made.decode.transpose(1, 0, 2).reshape(-1, dim))
    return np.ascontiguousarray(made.keys), made.train_rotated, held_out


SHAPES = [(dim, group) for dim in (64, 128, 256) for group in (1, 4, 7)]
IN_CI = ((64, 7), (128, 4), (256, 1))
"""Each dim and each group once."""


@pytest.mark.parametrize(
    ("dim", "group"), [pytest.param(*shape, marks=() if shape in IN_CI else pytest.mark.fuzz) for shape in SHAPES]
)
def test_recall_for_heads_and_groups_of_every_size(dim: int, group: int) -> None:
    """The best 50 of 12,000 keys, synthetic "hard" heads; a front whose keys are mixed up finds far less."""
    check_recall("hard", dim, group, lambda search: search.front.blocks)


def test_rows_that_are_wrong_are_seen() -> None:
    check_recall("mid", 64, 4, lambda search: search.keys.rows)


def check_recall(level: str, dim: int, group: int, part: Callable[[SketchArguments], npt.NDArray[Any]]) -> None:
    """Of the best 50 of 12,000 keys .95 are found; with a part of what is searched mixed up far less."""
    keys, train, queries = head(level, 12_000, dim, group)
    index = built(SketchIndex, keys, Format.FLOAT32, train)
    exact = FlatIndex(keys, Format.FLOAT32).search(queries, 50)
    assert recall(index.search(queries, 50).ids, exact.ids) >= 0.95
    mixed = part(index.search_arguments())
    mixed[:] = mixed[::-1].copy()
    assert recall(index.search(queries, 50).ids, exact.ids) < 0.6


@pytest.mark.parametrize("n", [0, 1, 15, 17, 500])
def test_few_keys_and_none(n: int) -> None:
    keys, train, queries = head("mid", 600, 64, 4)
    index = built(SketchIndex, keys[:n], Format.FLOAT32, train)
    exact = FlatIndex(keys[:n], Format.FLOAT32)
    np.testing.assert_array_equal(index.search(queries, 3).ids, exact.search(queries, 3).ids)
    again = SketchIndex.from_state(keys[:n], Format.FLOAT32, index.state())
    again.insert(keys[n:])
    assert recall(again.search(queries, 20).ids, FlatIndex(keys, Format.FLOAT32).search(queries, 20).ids) >= 0.9
