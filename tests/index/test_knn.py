"""Training lists against exact ones, and the candidate pools that they and other searches use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.kernels import knn as knn_module
from retrieval_attn.index.kernels.codes import encode_keys
from retrieval_attn.index.kernels.knn import training_lists
from retrieval_attn.index.kernels.packed import id_of, keep_best, pack_score, score_of, sort_best
from tests.cpu.reference import at_every_thread_count, best_ids, recall, strided, uneven


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("dim", [64, 128, 80])
def test_agreement_with_exact_lists(dim: int, fmt: Format) -> None:
    """At least .97 of the exact lists, and in exact order; whole and strided keys alike."""
    keys = from_float32(uneven(dim, 9000, dim), fmt)
    queries = np.random.default_rng(1).standard_normal((2, 70, dim), dtype=np.float32)
    exact_scores = queries.reshape(140, dim).astype(np.float64) @ to_float32(keys, fmt).astype(np.float64).T
    codes = encode_keys(keys, fmt)
    lists = training_lists(queries, strided(keys), fmt, codes, 50)
    assert lists.shape == (2, 70, 50) and lists.dtype == np.int32
    np.testing.assert_array_equal(training_lists(queries, keys, fmt, codes, 50), lists)
    flat = lists.reshape(140, 50)
    assert recall(flat, best_ids(exact_scores, 50)) >= 0.97
    listed = np.take_along_axis(exact_scores, flat, axis=1)
    assert (np.diff(listed, axis=1) <= 1e-5 * np.abs(exact_scores).max()).all()
    assert all(len(set(row)) == 50 for row in flat.tolist())


def test_keys_that_follow_each_other_in_the_lists() -> None:
    """All best keys in one run of the context: breaks if the sample that sets the bound can miss or take them all."""
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((20000, 64), dtype=np.float32)
    direction = np.zeros(64, np.float32)
    direction[5] = 1
    for first in (0, 7000, 19900):
        hot = keys.copy()
        hot[first : first + 100, 5] += 50
        codes = encode_keys(hot, Format.FLOAT32)
        queries = np.tile(direction, (1, 9, 1))
        lists = training_lists(queries, hot, Format.FLOAT32, codes, 90)[0]
        exact = best_ids((hot @ direction)[None], 90)
        assert recall(lists, np.tile(exact, (9, 1))) >= 0.97


def test_a_sample_that_misleads() -> None:
    """Every best key lies in the sampled tiles, so the bound from them is too high: those queries scan again."""
    rng = np.random.default_rng(3)
    keys = 0.1 * rng.standard_normal((20000, 64), dtype=np.float32)
    tiles = -(-len(keys) // knn_module.TILE_KEYS)
    in_sample = np.flatnonzero(np.arange(len(keys)) % tiles % knn_module.SAMPLE_STEP == 0)[:60]
    keys[in_sample, 0] += 10
    queries = np.zeros((1, 20, 64), np.float32)
    queries[0, :, 0] = 1
    queries[0, ::2, 1:] = rng.standard_normal((10, 63))  # half of them ordinary
    queries[0, ::2, 0] = 0
    lists = training_lists(queries, keys, Format.FLOAT32, encode_keys(keys, Format.FLOAT32), 100)[0]
    assert (lists >= 0).all()
    exact = best_ids(queries[0].astype(np.float64) @ keys.astype(np.float64).T, 100)
    assert recall(lists[::2], exact[::2]) >= 0.97
    assert all(set(in_sample.tolist()) <= set(row) for row in lists[1::2].tolist())


def test_whole_lists_and_equal_keys() -> None:
    """kk from one to more than there are keys; where all keys tie every list is full and without repeats."""
    keys = from_float32(uneven(4, 300, 16), Format.BFLOAT16)
    codes = encode_keys(keys, Format.BFLOAT16)
    queries = np.random.default_rng(4).standard_normal((1, 3, 16), dtype=np.float32)
    exact = search_exact(keys, queries[0], 300, Format.BFLOAT16).ids
    for kk in (300, 400):
        lists = training_lists(queries, keys, Format.BFLOAT16, codes, kk)[0]
        np.testing.assert_array_equal(lists[:, :300], exact)
        assert (lists[:, 300:] == -1).all()
    np.testing.assert_array_equal(training_lists(queries, keys, Format.BFLOAT16, codes, 1)[0], exact[:, :1])
    np.testing.assert_array_equal(
        training_lists(queries, keys[:1], Format.BFLOAT16, codes, 2)[0], [[0, -1], [0, -1], [0, -1]]
    )
    same = np.ones((12000, 16), np.float32)
    lists = training_lists(queries, same, Format.FLOAT32, encode_keys(same, Format.FLOAT32), 20)[0]
    assert (lists >= 0).all() and all(len(set(row)) == 20 for row in lists.tolist())


def test_the_same_at_every_thread_count() -> None:
    """Bit for bit: breaks if blocks of queries share anything."""
    keys = from_float32(uneven(5, 5000, 64), Format.BFLOAT16)
    codes = encode_keys(keys, Format.BFLOAT16)
    queries = np.random.default_rng(5).standard_normal((1, 700, 64), dtype=np.float32)
    lists = at_every_thread_count(lambda: training_lists(queries, keys, Format.BFLOAT16, codes, 10))
    part = training_lists(queries[:, 130:140], keys, Format.BFLOAT16, codes, 10)
    np.testing.assert_array_equal(part, lists[:, 130:140])


def test_empty_and_bad_input() -> None:
    """Nothing to list is an empty answer; what cannot be listed is named."""
    keys = from_float32(uneven(6, 40, 8), Format.BFLOAT16)
    codes = encode_keys(keys, Format.BFLOAT16)
    queries = np.ones((2, 3, 8), np.float32)
    assert training_lists(queries[:, :0], keys, Format.BFLOAT16, codes, 5).shape == (2, 0, 5)
    assert (training_lists(queries, keys[:0], Format.BFLOAT16, codes, 5) == -1).all()
    queries[0, 1, 2], queries[1, 2, 7] = np.nan, -np.inf
    lists = training_lists(queries, keys, Format.BFLOAT16, codes, 5)
    assert (lists[[0, 1], [1, 2]] == -1).all()
    assert (lists >= 0).sum() == 4 * 5
    for kk in (0, True, 2.0):
        with pytest.raises(ConfigError, match="kk="):
            training_lists(queries, keys, Format.BFLOAT16, codes, kk)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="codes must cover 40 keys"):
        training_lists(queries, keys, Format.BFLOAT16, encode_keys(keys[:39], Format.BFLOAT16), 5)
    with pytest.raises(ShapeError, match="training queries"):
        training_lists(queries[..., :5], keys, Format.BFLOAT16, codes, 5)


@settings(max_examples=30)
@given(st.lists(st.floats(width=32), min_size=1, max_size=60), st.integers(1, 60))
def test_candidates_order_like_scores(scores: list[float], k: int) -> None:
    """Packed numbers sort as (score, lower id) with NaN last; cutting and sorting pools keep exactly the best."""
    floats = np.array(scores, np.float32)
    pool = np.array([pack_score(score, i) for i, score in enumerate(floats)], np.int64)
    order = np.argsort(np.where(np.isnan(floats), np.inf, -floats), kind="stable")
    order = np.concatenate([order[~np.isnan(floats[order])], np.flatnonzero(np.isnan(floats))])
    k = min(k, len(floats))
    cut = pool.copy()
    keep_best(cut, len(cut), k)
    assert {id_of(one) for one in cut[:k]} == set(order[:k].tolist())
    assert id_of(cut[k - 1]) == order[k - 1]
    sort_best(cut, k)
    assert [id_of(one) for one in cut[:k]] == order[:k].tolist()
    for one, right in zip(cut[:k], floats[order[:k]], strict=True):
        assert score_of(one) == right or (np.isnan(right) and np.isnan(score_of(one)))
