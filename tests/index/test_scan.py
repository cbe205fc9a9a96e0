"""The exact scan with a bound from the scores themselves, against a sort of all candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.kernels.scan import bound_of_groups, scan_exact, score_columns
from tests.cpu.reference import whole_numbers

Floats = npt.NDArray[np.float32]


def packed(scores: Floats, first: int) -> npt.NDArray[np.int64]:
    """Candidates of scores (queries, n), whose ids count from `first`, as `pack_score` makes them."""
    bits = (scores + np.float32(0.0)).view(np.int32).copy()
    bits[bits < 0] ^= 0x7FFFFFFF
    bits[np.isnan(scores)] = -0x80000000
    ids = np.arange(first, first + scores.shape[1])
    found: npt.NDArray[np.int64] = (bits.astype(np.int64) << 32) | (0xFFFFFFFF - ids)
    return found


def scanned(
    keys: Floats, queries: Floats, span: tuple[int, int], k: int, columns: int, **given: Any
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Sorted candidates (queries, k) of `scan_exact` with scratch of so many columns, and the bounds it had.

    given: capacity of the pools, floors.
    """
    count = len(queries)
    padded = np.zeros((-(-count // 4) * 4, queries.shape[1]), np.float32)
    padded[:count] = queries
    pool = np.full((count, given.get("capacity", 2 * k + 64)), 7, np.int64)
    floors = given.get("floors", np.full(count, EMPTY)).copy()
    bounds, scores = np.empty(count, np.float32), np.full((len(padded), columns), np.nan, np.float32)
    scan_exact(keys, padded, count, *span, k, pool, np.empty(count, np.int64), floors, bounds, scores)
    return np.sort(pool[:, :k], axis=1)[:, ::-1], bounds


def expected(keys: Floats, queries: Floats, span: tuple[int, int], k: int) -> npt.NDArray[np.int64]:
    """The same by a sort; numbers must be whole and small, so that their products are exact."""
    with np.errstate(invalid="ignore"):
        scores = queries @ keys[slice(*span)].T
    every = np.sort(packed(scores, span[0]), axis=1)[:, ::-1][:, :k]
    return np.pad(every, ((0, 0), (0, k - every.shape[1])), constant_values=EMPTY)


@pytest.mark.parametrize("columns", [64, 1024, 4160])
@pytest.mark.parametrize("span", [(0, 3456), (128, 3584), (5, 133), (3, 1000), (0, 5003)])
def test_whole_numbers_with_ties(span: tuple[int, int], columns: int) -> None:
    """The candidates of a sort, whatever waits for a bound: breaks where a key that equals the bound is left out."""
    rng = np.random.default_rng(span[1])
    keys = whole_numbers(rng, (5003, 16))
    for count, k in ((1, 1), (4, 100), (7, 10), (8, 400), (4, 1500)):
        queries = whole_numbers(rng, (count, 16))
        found, _ = scanned(keys, queries, span, k, columns)
        np.testing.assert_array_equal(found, expected(keys, queries, span, k))


def test_numbers_that_are_not_finite() -> None:
    """NaN comes last, infinities in their places, and zeros of both signs are equal."""
    rng = np.random.default_rng(1)
    keys = whole_numbers(rng, (4000, 16))
    query = np.zeros((1, 16), np.float32)
    query[0, 0] = 1
    for share in (0.01, 0.5, 0.99, 1.0):
        for special in (np.nan, -np.inf, np.inf, -0.0):
            own = keys.copy()
            own[rng.random(len(own)) < share, 0] = special
            found, _ = scanned(own, query, (0, 4000), 100, 4160)
            # a product with 15 zeros: exact, but inf * 0 would be NaN in the others
            scores = own[None, :, 0] + np.float32(0.0)
            np.testing.assert_array_equal(found[0], np.sort(packed(scores, 0)[0])[::-1][:100])


def test_a_floor_that_is_known() -> None:
    """What does not beat it is left out, bound or not: the other parts of a range have found it."""
    rng = np.random.default_rng(2)
    keys, queries = whole_numbers(rng, (4000, 16)), whole_numbers(rng, (4, 16))
    best = expected(keys, queries, (0, 4000), 100)
    for place in (0, 30, 99):
        found, _ = scanned(keys, queries, (0, 4000), 100, 4160, floors=best[:, place])
        np.testing.assert_array_equal(found, np.where(best > best[:, place, None], best, EMPTY))


def test_a_pool_that_is_never_full_has_a_bound() -> None:
    """The scores alone give it, before any key is kept: without, every key of the range enters the pool."""
    rng = np.random.default_rng(3)
    keys, queries = rng.standard_normal((3456, 32), np.float32), rng.standard_normal((4, 32), np.float32)
    _, without = scanned(keys, queries, (0, 3456), 100, 64, capacity=4000)
    found, bounds = scanned(keys, queries, (0, 3456), 100, score_columns(4), capacity=4000)
    assert np.isneginf(without).all()
    reached = (queries @ keys.T >= bounds[:, None]).sum(axis=1)
    assert (reached >= 100).all() and (reached <= 200).all()
    assert (found != EMPTY).all()


@pytest.mark.parametrize("k", [1, 16, 100, 400])
def test_bound_of_groups(k: int) -> None:
    """k scores reach it at least, few others do; one score that many have is one that all of them reach."""
    rng = np.random.default_rng(k)
    groups, best = max(64, -(-2 * k // 16) * 16), np.empty((1, 2048), np.float32)
    for size in (2 * groups, 3456, 4001):
        for scores in (rng.standard_normal((2, 4160), np.float32), np.full((2, 4160), np.float32(-2.5))):
            bound = bound_of_groups(scores, 1, size, groups, k, best)
            reached = int((scores[1, :size] >= bound).sum())
            assert reached >= k
            assert reached <= max(2 * k, 16) or scores[0, 0] == scores[1, 0]


def test_bound_of_groups_without_numbers() -> None:
    """Fewer numbers than wanted: no bound, not even where the others are NaN."""
    best = np.empty((1, 64), np.float32)
    for nothing in (np.nan, -np.inf):
        scores = np.full((1, 640), nothing, np.float32)
        scores[0, :15] = 1
        assert bound_of_groups(scores, 0, 640, 64, 16, best) == -np.inf
        scores[0, 15] = np.inf
        assert bound_of_groups(scores, 0, 640, 64, 16, best) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("padded", [4, 8, 12, 64, 256, 40000])
def test_score_columns(padded: int) -> None:
    """Whole tiles, at least one, and no more memory than a near cache has, but for so many queries."""
    columns = score_columns(padded)
    assert columns % 64 == 0 and columns >= 64
    assert columns == 64 or 4 * padded * columns <= 133_120
