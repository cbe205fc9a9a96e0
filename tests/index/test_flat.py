"""The exact index against a full sort in float64."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index import FlatIndex, Format
from retrieval_attn.index.formats import from_float32, to_float32
from retrieval_attn.index.kernels.scan import BOUND_WORDS, scan_codes
from retrieval_attn.index.task.run import MAX_QUERIES
from retrieval_attn.index.threads import kernel_threads
from tests.cpu.reference import EPS, at_every_thread_count, best_ids, normal, recall, strided, uneven, whole_numbers
from tests.index.building import built

SIZES = (1, 63, 65, 1000)


def make(keys: npt.NDArray[np.float32], fmt: Format = Format.FLOAT32) -> FlatIndex:
    return FlatIndex(strided(from_float32(keys, fmt)), fmt)


def assert_search(index: FlatIndex, queries: npt.NDArray, keys: npt.NDArray, k: int, limit: int | None = None) -> None:
    """Equal to a stable sort; the numbers must be exact in float32."""
    found = index.search(queries, k, limit=limit)
    scores = queries.astype(np.float64) @ keys[:limit].astype(np.float64).T
    ids = best_ids(scores, k)
    np.testing.assert_array_equal(found.ids, ids)
    padded = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)  # id -1 -> the last column
    np.testing.assert_array_equal(found.scores, np.take_along_axis(padded, ids, axis=1))
    assert (found.ids.dtype, found.scores.dtype) == (np.int32, np.float32)
    assert found.keys_scanned == scores.size


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("size", SIZES)
def test_whole_numbers_with_ties(size: int, fmt: Format) -> None:
    """ids exactly as a stable sort gives them: breaks on any wrong score, tie order or k > keys handling."""
    rng = np.random.default_rng(size)
    for dim in (64, 80, 128, 256, 7):
        keys = whole_numbers(rng, (size, dim))
        if fmt is Format.INT8:
            keys[:, 0] = 127  # whole steps of 1 then
        index = make(keys, fmt)
        for group, k in ((1, 1), (4, 10), (8, 100), (5, 1500)):
            assert_search(index, whole_numbers(rng, (group, dim)), keys, k)


@pytest.mark.parametrize("fmt", list(Format))
def test_normal_numbers(fmt: Format) -> None:
    """Scores to twice the rounding of NumPy's float32 product; nothing better is left out."""
    rng = np.random.default_rng(3)
    for dim in (64, 128, 80, 7):
        stored = normal(rng, (5000, dim), fmt)
        keys = to_float32(stored, fmt)
        queries = rng.standard_normal((4, dim), dtype=np.float32)
        found = FlatIndex(strided(stored), fmt).search(queries, 50)
        exact = queries.astype(np.float64) @ keys.astype(np.float64).T
        allowed = 2 * max(np.abs(queries @ keys.T - exact).max(), EPS * np.abs(exact).max())
        assert np.abs(found.scores - np.take_along_axis(exact, found.ids, axis=1)).max() <= allowed
        left_out = exact.copy()
        np.put_along_axis(left_out, found.ids, -np.inf, axis=1)
        assert (left_out.max(axis=1) <= found.scores[:, -1] + 2 * allowed).all()
        assert (np.diff(found.scores, axis=1) <= 0).all()
        assert all(len(set(row)) == 50 for row in found.ids.tolist())


def test_pools_that_overflow_often() -> None:
    """Ascending scores push every key into the pool: breaks if halving it loses a candidate."""
    keys = np.repeat(np.arange(20000, dtype=np.float32)[:, None], 3, axis=1)
    queries = np.array([[1, 0, 0], [-1, 0, 0], [0, 1, -1], [1, 1, 0]], np.float32)
    for k in (1, 2, 99, 2500):
        assert_search(make(keys), queries, keys, k)


def test_all_equal_keys_and_signed_zeros() -> None:
    """The lowest ids win, and 0.0 equals -0.0: breaks if equal scores order by bits or by thread."""
    for value in (1.0, 0.0, -0.0):
        keys = np.full((9000, 16), value, np.float32)
        keys[::3] *= -1 if value == 0 else 1
        found = make(keys).search(np.ones((2, 16), np.float32), 20)
        np.testing.assert_array_equal(found.ids, np.tile(np.arange(20), (2, 1)))
    keys = np.full((50, 1), 1e-30, np.float32)  # times 1e-30 is 0.0, and of a negative key -0.0
    keys[::3] *= -1
    found = make(keys).search(np.full((1, 1), 1e-30, np.float32), 20)
    assert (found.scores == 0).all() and not np.signbit(found.scores).any()
    np.testing.assert_array_equal(found.ids, [np.arange(20)])


def test_a_score_does_not_depend_on_the_place_in_a_tile() -> None:
    """One key repeated: all scores bit-identical, or ties would order by position modulo the tile."""
    rng = np.random.default_rng(1)
    for dim in (128, 80, 7):
        keys = np.tile(rng.standard_normal((1, dim), dtype=np.float32), (71, 1))
        found = make(keys).search(rng.standard_normal((5, dim), dtype=np.float32), 71)
        assert (found.scores == found.scores[:, :1]).all()
        np.testing.assert_array_equal(found.ids, np.tile(np.arange(71), (5, 1)))


def test_limit_and_growth() -> None:
    """Only ids below the limit, over inserts that do and do not lie next to each other in memory."""
    rng = np.random.default_rng(5)
    keys = whole_numbers(rng, (3000, 16))
    queries = whole_numbers(rng, (4, 16))
    stored = strided(keys)
    index = FlatIndex(stored[:0], Format.FLOAT32)
    assert_search(index, queries, keys[:0], 3)
    index.insert(stored[:1])
    index.insert(stored[1:1000])  # joins the first
    index.insert(stored[1000:1000])
    index.insert(stored[1000:1700].copy())  # lies elsewhere
    index.insert(stored[1700:])
    assert len(index) == 3000 and index.memory.host >= keys.nbytes  # copied
    for limit in (None, 0, 1, 999, 1001, 1700, 2999, 5000):
        assert_search(index, queries, keys, 30, limit)
    assert index.truncate(1200) and len(index) == 1200
    assert_search(index, queries, keys[:1200], 30)
    index.insert(stored[2000:2500])
    assert_search(index, queries, np.concatenate([keys[:1200], keys[2000:2500]]), 30)


def test_neighbours_with_another_stride_are_not_joined() -> None:
    """Keys that follow in memory but lie further apart: joined, they would be read from between."""
    room = np.arange(64, dtype=np.float32)
    index = FlatIndex(room[:8].reshape(4, 2), Format.FLOAT32)
    apart = room[8:56].reshape(6, 8)[:, :2]
    index.insert(apart)
    assert_search(index, np.eye(2, dtype=np.float32), np.concatenate([room[:8].reshape(4, 2), apart]), 10)


def test_keys_stay_the_callers() -> None:
    """Views, not copies, and one however often keys are inserted: decoding inserts one key per token."""
    keys = whole_numbers(np.random.default_rng(10), (2, 90, 8))
    indexes = [FlatIndex(head[:20], Format.FLOAT32) for head in keys]
    for i in range(20, 80):
        for index, head in zip(indexes, keys, strict=True):
            index.insert(head[i : i + 1])
    for index, head in zip(indexes, keys, strict=True):
        assert np.shares_memory(index._keys.whole, head) and index._keys.whole.base is keys
        assert index.memory.host == 0
        assert_search(index, whole_numbers(np.random.default_rng(11), (3, 8)), head[:80], 9)


def test_the_same_at_every_thread_count() -> None:
    """Bit for bit: breaks if a merge depends on which thread came first or on how the keys were cut."""
    rng = np.random.default_rng(7)
    index = make(np.concatenate([rng.standard_normal((30000, 64), dtype=np.float32)] * 2))
    queries = rng.standard_normal((4, 64), dtype=np.float32)
    before = numba.get_num_threads()
    ids = at_every_thread_count(lambda: index.search(queries, 101)).ids
    assert numba.get_num_threads() == before
    assert (ids[:, 1:100:2] == ids[:, :100:2] + 30000).all()


def test_many_queries_take_several_runs() -> None:
    """A bound on memory must not change answers."""
    rng = np.random.default_rng(8)
    keys, queries = whole_numbers(rng, (700, 16)), whole_numbers(rng, (301, 16))
    assert len(queries) > MAX_QUERIES
    assert_search(make(keys), queries, keys, 12)


def test_nan_and_infinity() -> None:
    """NaN ranks below -inf, infinities rank as numbers; a NaN query gets the first keys, scored NaN."""
    keys = np.array([[1.0], [np.nan], [np.inf], [-np.inf], [2.0]], np.float32)
    found = make(keys).search(np.array([[1.0], [np.nan], [-1.0]], np.float32), 6)
    np.testing.assert_array_equal(found.ids, [[2, 4, 0, 3, 1, -1], [0, 1, 2, 3, 4, -1], [3, 0, 4, 2, 1, -1]])
    np.testing.assert_array_equal(found.scores[0], [np.inf, 2, 1, -np.inf, np.nan, -np.inf])
    assert np.isnan(found.scores[1, :5]).all()
    keys = np.full((9000, 1), np.nan, np.float32)
    keys[8999] = -1
    assert make(keys).search(np.ones((1, 1), np.float32), 2).ids.tolist() == [[8999, 0]]


def test_scratch_is_not_read(compiled: None, nan_empty: None) -> None:
    """Pools start with arbitrary memory: an entry that nobody wrote must not be a candidate."""
    rng = np.random.default_rng(9)
    keys, queries = whole_numbers(rng, (9001, 16)), whole_numbers(rng, (3, 16))
    for k in (5, 4000):  # more than a worker's share of the keys
        assert_search(make(keys), queries, keys, k)
    assert_search(make(keys[:3]), queries, keys[:3], 5)


def test_bad_input_is_named() -> None:
    """Each would otherwise be read as other numbers, or out of bounds."""
    keys = np.zeros((5, 4), np.float32)
    index = FlatIndex(keys, Format.FLOAT32)
    queries = np.zeros((2, 4), np.float32)
    for k in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="k="):
            index.search(queries, k)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit=-1"):
        index.search(queries, 1, limit=-1)
    with pytest.raises(ShapeError, match="float64"):
        index.search(np.zeros((2, 4)), 1)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\(n, 4\)"):
        index.search(np.zeros((2, 5), np.float32), 1)
    with pytest.raises(ShapeError, match="2 axes"):
        index.search(np.zeros(4, np.float32), 1)
    with pytest.raises(ShapeError, match="uint16"):
        FlatIndex(keys, Format.BFLOAT16)
    with pytest.raises(ShapeError, match="contiguous"):
        FlatIndex(np.zeros((4, 5), np.float32).T, Format.FLOAT32)
    with pytest.raises(ShapeError, match=r"\(n, 4\)"):
        index.insert(np.zeros((2, 5), np.float32))
    with pytest.raises(ShapeError, match="at least 1 long"):
        FlatIndex(np.zeros((3, 0), np.float32), Format.FLOAT32)
    with pytest.raises(ShapeError, match="at most 2147483647"):
        index.insert(np.broadcast_to(np.zeros(4, np.float32), (2**31, 4)))
    assert index.search(queries[:0], 3).ids.shape == (0, 3)
    strided_queries = np.ones((2, 8), np.float32)[:, ::2]
    np.testing.assert_array_equal(index.search(strided_queries, 1).ids, [[0], [0]])


def test_thread_counts_that_cannot_be_had() -> None:
    """More threads than there are would otherwise be a ValueError deep in Numba."""
    for threads in (0, 10_000, 1.0, True):
        with pytest.raises(ConfigError, match="threads="), kernel_threads(threads):  # type: ignore[arg-type]
            pass


def coded(keys: npt.NDArray[np.float32], fmt: Format = Format.BFLOAT16, **options: Any) -> FlatIndex:
    return built(FlatIndex, strided(from_float32(keys, fmt)), fmt, None, codes="int8", **options)


@pytest.mark.parametrize("fmt", list(Format))
def test_codes_find_the_exact_best(fmt: Format) -> None:
    """Recall against the exact scan of the same keys, for sizes of head, group and k; scores are the exact ones."""
    rng = np.random.default_rng(1)
    for dim, group, k in ((64, 4, 100), (128, 7, 10), (80, 1, 200), (7, 3, 1)):
        keys = uneven(dim, 10_007, dim)
        queries = rng.standard_normal((group, dim), dtype=np.float32)
        index = coded(keys, fmt)
        found, exact = index.search(queries, k), make(keys, fmt).search(queries, k)
        assert recall(found.ids, exact.ids) >= 0.99
        same = found.ids == exact.ids
        np.testing.assert_array_equal(found.scores[same], exact.scores[same])
        assert found.keys_scanned == group * len(keys)
        # int8 keys are their own codes
        copied = index._keys.nbytes
        assert index.memory.host == copied if fmt is Format.INT8 else index.memory.host >= copied + len(keys) * dim


def best_codes(codes: npt.NDArray, stop: int, planes: npt.NDArray, kept: int) -> npt.NDArray[np.int64]:
    """Ids (n, min(kept, stop)) of the best sums among codes[:stop], by the coded scan."""
    count, kept = len(planes), min(kept, stop)
    padded = np.zeros((-(-count // 4) * 4, *planes.shape[1:]), np.int8)
    padded[:count] = planes
    pool, counts = np.empty((count, 2 * kept + 64), np.int64), np.empty(count, np.int64)
    bounds, sums = np.empty((len(padded) // 4, BOUND_WORDS), np.int32), np.empty((4, 16), np.int32)
    scan_codes(codes, padded, count, 0, stop, kept, pool, counts, bounds, sums)
    return (pool[:, :kept] & 0xFFFFFFFF) ^ 0xFFFFFFFF


def test_best_codes_are_exactly_the_best() -> None:
    """The pools of the coded scan against a stable sort of all sums: any size, ties, and a misleading sample."""
    rng = np.random.default_rng(2)
    for n, group, kept in ((1, 1, 1), (15, 3, 4), (70_001, 5, 60), (30_000, 4, 2000), (30_000, 2, 1)):
        codes = rng.integers(100, 140, (n, 64)).astype(np.uint8)
        planes = rng.integers(-4, 5, (group, 1, 64)).astype(np.int8)
        codes[: n // 2 : 32] += 100  # exactly the keys that a sample looks at first
        sums = planes[:, 0].astype(np.float64) @ codes.astype(np.float64).T
        found = best_codes(codes, n, planes, kept)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(best_ids(sums, kept), axis=1))
        part = best_codes(codes, n // 2, planes, kept)
        few = min(kept, n // 2)
        np.testing.assert_array_equal(np.sort(part, axis=1), np.sort(best_ids(sums[:, : n // 2], few), axis=1))
    same = np.full((40_000, 64), 9, np.uint8)
    found = best_codes(same, 40_000, np.ones((2, 1, 64), np.int8), 50)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(50), (2, 1)))


@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.INT8])
def test_codes_grow_and_shrink(fmt: Format) -> None:
    """Inserted keys, in range of the first and far beyond, truncation, limits, and keys in several arrays."""
    keys = uneven(3, 9000, 64)
    keys[8000:8010] *= 4
    stored = from_float32(keys, fmt)
    queries = np.random.default_rng(3).standard_normal((4, 64), dtype=np.float32)
    index = built(FlatIndex, stored[:5000], fmt, None, codes="int8")
    index.insert(stored[5000:7000].copy())
    for i in range(7000, 9000, 500):
        index.insert(stored[i : i + 500])

    def agree(right: npt.NDArray, limit: int | None = None) -> None:
        found = index.search(queries, 50, limit=limit)
        exact = FlatIndex(right, fmt).search(queries, 50, limit=limit)
        assert recall(found.ids, exact.ids) >= 0.98
        assert set(range(8000, 8010)) & set(exact.ids.ravel().tolist()) <= set(found.ids.ravel().tolist())

    agree(stored)
    agree(stored, 6000)
    assert index.truncate(6500) and len(index) == 6500
    index.insert(stored[8000:])
    agree(np.concatenate([stored[:6500], stored[8000:]]))


def test_codes_have_exact_answers_where_they_cannot_rank() -> None:
    """Queries that are not finite, all-equal keys, few keys, more wanted than there are: as the exact scan."""
    keys = uneven(4, 5000, 16)
    index, exact = coded(keys), make(keys, Format.BFLOAT16)
    queries = np.ones((3, 16), np.float32)
    queries[0, 3], queries[2, 15] = np.nan, -np.inf
    found, right = index.search(queries, 9), exact.search(queries, 9)
    np.testing.assert_array_equal(found.ids[[0, 2]], right.ids[[0, 2]])
    np.testing.assert_array_equal(found.scores[[0, 2]], right.scores[[0, 2]])
    for k in (2000, 5000, 6000):
        np.testing.assert_array_equal(index.search(queries[1:2], k).ids, exact.search(queries[1:2], k).ids)
    same = coded(np.ones((5000, 16), np.float32)).search(queries[1:2], 20)
    np.testing.assert_array_equal(same.ids, [np.arange(20)])
    empty = coded(keys[:0])
    assert (empty.search(queries, 2).ids == -1).all()
    with pytest.raises(ShapeError, match="finite"):
        empty.insert(np.full((1, 16), 0x7FC0, np.uint16))
    assert len(empty) == 0
    with pytest.raises(ConfigError, match="codes='int4'"):
        built(FlatIndex, keys, Format.FLOAT32, None, codes="int4")


def test_codes_are_the_same_at_every_thread_count() -> None:
    """Ids and scores bit for bit, however the keys are cut."""
    index = coded(np.concatenate([uneven(5, 20_000, 64)] * 2))
    queries = np.random.default_rng(5).standard_normal((4, 64), dtype=np.float32)
    at_every_thread_count(lambda: index.search(queries, 101))


def test_state_of_both_kinds() -> None:
    """A loaded index answers as the saved one and may grow; arrays of other keys are refused."""
    keys = from_float32(uneven(6, 3000, 16), Format.BFLOAT16)
    queries = np.random.default_rng(6).standard_normal((2, 16), dtype=np.float32)
    for kind in ("none", "int8"):
        index = built(FlatIndex, keys, Format.BFLOAT16, None, codes=kind)
        state = index.state()
        frozen = keys.copy()
        for array in (frozen, *(one for one in state.values() if isinstance(one, np.ndarray))):
            array.flags.writeable = False
        again = FlatIndex.from_state(frozen, Format.BFLOAT16, state)
        np.testing.assert_array_equal(again.search(queries, 20).ids, index.search(queries, 20).ids)
        again.truncate(2000)
        again.insert(keys[2500:])
        assert len(again) == 2500
        with pytest.raises(InputDataError, match="flat"):
            FlatIndex.from_state(keys, Format.BFLOAT16, {**state, "codes": "int4"})
    with pytest.raises(InputDataError, match="rows"):
        FlatIndex.from_state(keys[:5], Format.BFLOAT16, state)
    with pytest.raises(InputDataError, match="scale"):
        FlatIndex.from_state(keys, Format.BFLOAT16, {**state, "scale": np.full(16, np.nan, np.float32)})
