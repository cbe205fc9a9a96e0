"""Keys per query head: how they are chosen, and steps that obey them."""

from typing import Any

import numpy as np
import pytest

from retrieval_attn.cpu.budgets import LEVELS, HeadBudgets, allocated, measured_errors
from retrieval_attn.cpu.host_attend import attend_path, attend_paths
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format
from tests.cpu.test_clusters import GROUP, KV_HEADS, SCALE, VALUE_DIM, make_path, make_queries

COUNTS = (5, 40, 17, 40, 1, 30)


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.INT8])
@pytest.mark.parametrize("n", [1, 5])
def test_a_head_attends_to_as_many_as_it_was_given(fmt: Format, n: int, clusters: bool) -> None:
    """The same, bit by bit, as when all heads get its number."""
    path, queries = make_path(700, fmt), make_queries(n)
    if not clusters:
        path.clusters = None
    found = attend_path(path, queries, 4, 690, HeadBudgets(COUNTS), scale=SCALE)
    for head, count in enumerate(COUNTS):
        alone = attend_path(path, queries, 4, 690, count, scale=SCALE)
        np.testing.assert_array_equal(found.out[head], alone.out[head])
        np.testing.assert_array_equal(found.lse[head], alone.lse[head])


def test_budgets_change_from_step_to_step_and_end() -> None:
    path, queries = make_path(700), make_queries()
    plain = attend_path(path, queries, 4, 690, 40, scale=SCALE)
    few = attend_path(path, queries, 4, 690, HeadBudgets((40,) + (3,) * 5), scale=SCALE)
    many = attend_path(path, queries, 4, 690, HeadBudgets((40,) * 6), scale=SCALE)
    np.testing.assert_array_equal(many.out, plain.out)
    np.testing.assert_array_equal(few.out[0], plain.out[0])
    assert np.abs(few.out[1:] - plain.out[1:]).max(axis=(1, 2)).min() > 1e-4
    np.testing.assert_array_equal(attend_path(path, queries, 4, 690, 40, scale=SCALE).out, plain.out)


def test_more_than_there_is_and_several_paths() -> None:
    paths = [make_path(50, seed=seed) for seed in (0, 1)]
    queries = [make_queries(seed=seed) for seed in (1, 2)]
    found = attend_paths(paths, queries, [(0, 50)] * 2, HeadBudgets((400, 2) * 3), scale=SCALE)
    for one, path, query in zip(found, paths, queries, strict=True):
        np.testing.assert_array_equal(one.out[0], attend_path(path, query, 0, 50, 400, scale=SCALE).out[0])
        np.testing.assert_array_equal(one.out[1], attend_path(path, query, 0, 50, 2, scale=SCALE).out[1])


def test_wrong_budgets_are_refused() -> None:
    for counts in ((), (5, 0)):
        with pytest.raises(ConfigError, match="at least 1 key"):
            HeadBudgets(counts)
    with pytest.raises(ShapeError, match="budgets of 2 heads .* 6 query heads"):
        attend_path(make_path(100), make_queries(), 0, 100, HeadBudgets((5, 5)), scale=SCALE)


def test_heads_that_gain_more_get_more() -> None:
    """Under one sum; a head that gains nothing keeps the fewest."""
    falling = np.array([8.0, 4.0, 2.0, 1.0, 0.5])
    errors = np.stack([falling, 0.1 * falling, np.ones(5), 100 * falling, np.full(5, np.nan)])
    counts = allocated(errors, 100).counts
    assert counts[3] == 400 and counts[2] == counts[4] == 25 and counts[0] >= counts[1] >= 25
    assert sum(counts) <= 500 and set(counts) <= set(LEVELS)
    assert allocated(np.ones((3, 5)), 100).counts == (25, 25, 25)
    assert allocated(np.tile(falling, (4, 1)), 100).counts == (100,) * 4


def test_errors_are_those_of_whole_outputs() -> None:
    """A head whose sinks and window weigh nearly all has hardly an error, however wrong the host's part is."""
    path, queries = make_path(900), make_queries(4)
    out, lse = np.zeros((KV_HEADS * GROUP, 4, VALUE_DIM), np.float32), np.full((KV_HEADS * GROUP, 4), -30, np.float32)
    lse[2] = 60

    def attend(k: int | None) -> Any:
        return attend_path(path, queries, 0, 900, k, scale=SCALE)

    errors = measured_errors((out, lse), attend)
    assert errors.shape == (6, len(LEVELS)) and errors[2].max() < 1e-6 * errors[[0, 1, 3]].min()
    exact, near = attend(None).out[0].astype(float), attend(100).out[0].astype(float)
    np.testing.assert_allclose(errors[0, 2], ((near - exact) ** 2).sum(axis=1).mean(), rtol=1e-3)
    assert (np.diff(errors.sum(axis=0)) < 0).all()
