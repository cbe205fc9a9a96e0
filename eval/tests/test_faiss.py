"""`ivf` and `hnsw`: exact where they must be, good where they may approximate, and well-behaved guests."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import pytest

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index import Format, KeyIndex, create
from retrieval_attn.index.formats import from_float32, to_float32
from retrieval_attn_eval.bench.synthetic import synthetic_head

KINDS = ("ivf", "hnsw")
DIM = 16


def vectors(n: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, DIM), dtype=np.float32)


def exact(keys: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    return np.argsort(-(queries.astype(np.float64) @ keys.T.astype(np.float64)), axis=1, kind="stable")[:, :k]


def recall(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]))


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_search_is_exact(kind: str, fmt: Format) -> None:
    """All lists, or a beam as wide as the index: the same ids as float64 arithmetic, scores of the stored keys."""
    keys, queries = from_float32(vectors(600), fmt), vectors(9, 1)
    options: dict[str, Any] = {"ivf": {"centroids": 8, "nprobe": 8}, "hnsw": {"ef_search": 600}}[kind]
    index = create(kind, keys, fmt=fmt, **options)
    found = index.search(queries, 20)
    plain = to_float32(keys, fmt)
    assert recall(found.ids, exact(plain, queries, 20)) > 0.99
    wanted = np.einsum("qd,qkd->qk", queries.astype(np.float64), plain[found.ids].astype(np.float64))
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-5, atol=1e-5)
    assert (np.diff(found.scores) <= 0).all() and found.ids.dtype == np.int32 and found.scores.dtype == np.float32
    if kind == "ivf":
        assert found.keys_scanned == 9 * 600
    assert len(index) == 600 and index.memory.host > 600 * DIM * 4


@pytest.mark.parametrize("kind", KINDS)
def test_default_options_approximate(kind: str) -> None:
    """Fewer keys scored than there are, most of the best found: a broken metric switch finds almost none."""
    keys, queries = vectors(6000), vectors(20, 1)
    found = create(kind, keys, fmt=Format.FLOAT32).search(queries, 10)
    assert found.keys_scanned < 0.6 * 20 * 6000
    assert recall(found.ids, exact(keys, queries, 10)) > 0.85


def test_hnsw_by_l2_beats_ip_on_attention_keys() -> None:
    """Outlying keys hide all others in a graph built by inner product; searches score by inner product in both."""
    head = synthetic_head(4000, head_dim=64, group=1, train=0, decode=20)
    wanted = exact(head.keys, head.decode[0], 50)
    found = {
        metric: create("hnsw", head.keys, fmt=Format.FLOAT32, metric=metric, ef_search=200).search(head.decode[0], 50)
        for metric in ("l2", "ip")
    }
    assert recall(found["l2"].ids, wanted) > recall(found["ip"].ids, wanted) + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_inserted_keys_are_found(kind: str) -> None:
    """From nothing, in pieces: later keys are as reachable as early ones, and ids count on."""
    keys, queries = vectors(900), vectors(12, 1)
    index = create(kind, keys[:0], fmt=Format.FLOAT32)
    assert index.search(queries, 3).ids.tolist() == [[-1] * 3] * 12 and index.memory.host == 0
    for start, stop in ((0, 500), (500, 500), (500, 501), (501, 900)):
        index.insert(keys[start:stop])
        assert len(index) == stop
    assert recall(index.search(queries, 5).ids, exact(keys, queries, 5)) > 0.6
    own = index.search(10 * keys[890:] / np.linalg.norm(keys[890:], axis=1, keepdims=True), 20)
    assert all(890 + i in row for i, row in enumerate(own.ids.tolist()))
    assert not index.truncate(500)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_hides_later_keys(kind: str) -> None:
    """A fork sees only its part of a shared index."""
    keys, queries = vectors(700), vectors(5, 1)
    index = create(kind, keys, fmt=Format.FLOAT32)
    for limit in (0, 1, 7, 300, 700, 9999):
        found = index.search(queries, 8, limit=limit)
        stop = min(limit, 700)
        assert found.ids.max() < max(stop, 1)
        assert ((found.ids >= 0).sum(1) == min(8, stop)).all()
        if stop >= 300:
            assert recall(found.ids, exact(keys[:stop], queries, 8)) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_there_is_and_duplicates(kind: str) -> None:
    """k beyond the keys pads with -1; equal keys are all found, each once, the lower id first."""
    keys = np.repeat(vectors(3), 40, axis=0)
    found = create(kind, keys, fmt=Format.FLOAT32).search(vectors(4, 1), 200)
    assert (np.sort(found.ids, axis=1)[:, 80:] == np.arange(120)).all()
    assert (found.ids[:, 120:] == -1).all() and np.isneginf(found.scores[:, 120:]).all()
    ties = found.scores[:, 1:120] == found.scores[:, :119]
    assert ties.sum() > 300 and (np.diff(found.ids[:, :120])[ties] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_index_whatever_threads_there_are(kind: str) -> None:
    """faiss's parallel building would depend on timing: it is not used unless asked for."""
    keys, queries = vectors(2000), vectors(20, 1)
    before = faiss.omp_get_max_threads()
    found = []
    for threads in (1, 2):
        faiss.omp_set_num_threads(threads)
        try:
            index = create(kind, keys, fmt=Format.FLOAT32, seed=3)
            assert faiss.omp_get_max_threads() == threads
        finally:
            faiss.omp_set_num_threads(before)
        found.append(index.search(queries, 10))
    np.testing.assert_array_equal(found[0].ids, found[1].ids)
    assert found[0].keys_scanned == found[1].keys_scanned
    other = create(kind, keys, fmt=Format.FLOAT32, seed=4).search(queries, 10)
    assert other.keys_scanned != found[0].keys_scanned


@pytest.mark.parametrize("kind", KINDS)
def test_state_brings_the_same_index_back(kind: str) -> None:
    """Answers, options and later inserts equal those of the index that was saved; foreign states are refused."""
    keys, queries = vectors(800), vectors(6, 1)
    options: dict[str, Any] = {"ivf": {"centroids": 9, "nprobe": 3}, "hnsw": {"m": 5, "metric": "l2", "ef_search": 30}}
    index = create(kind, keys, fmt=Format.FLOAT32, **options[kind])
    state = index.state()
    back = type(index).from_state(keys, Format.FLOAT32, state)
    for _ in range(2):
        one, other = (i.search(queries, 10) for i in (index, back))
        np.testing.assert_array_equal(one.ids, other.ids)
        assert one.keys_scanned == other.keys_scanned
        for i in (index, back):
            i.insert(vectors(50, 9))
    empty = create(kind, keys[:0], fmt=Format.FLOAT32)
    assert len(type(index).from_state(keys[:0], Format.FLOAT32, empty.state())) == 0
    for wrong in ({}, {**state, "faiss": np.arange(40, dtype=np.uint8)}, {**state, "seed": "x"}):
        with pytest.raises(InputDataError):
            type(index).from_state(keys, Format.FLOAT32, wrong)
    with pytest.raises(InputDataError, match="800 keys"):
        type(index).from_state(keys[:7], Format.FLOAT32, state)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ivf", {"centroids": 0}),
        ("ivf", {"nprobe": 1.5}),
        ("ivf", {"seed": -1}),
        ("hnsw", {"m": 1}),
        ("hnsw", {"metric": "cosine"}),
        ("hnsw", {"ef_search": 0}),
        ("hnsw", {"build_threads": 0}),
        ("hnsw", {"nprobe": 3}),
    ],
)
def test_wrong_options_are_named(kind: str, options: dict[str, Any]) -> None:
    """faiss would clamp, crash or ignore them."""
    with pytest.raises(ConfigError):
        create(kind, vectors(10), fmt=Format.FLOAT32, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arrays_are_named(kind: str) -> None:
    """Wrong width, dtype or values that have no order."""
    index: KeyIndex = create(kind, vectors(10), fmt=Format.FLOAT32)
    for keys in (
        vectors(3)[:, :8],
        vectors(3).astype(np.float16),
        vectors(3)[0],
        np.full((1, DIM), np.nan, np.float32),
    ):
        with pytest.raises(ShapeError):
            index.insert(keys)
    assert len(index) == 10
    with pytest.raises(ShapeError):
        index.search(vectors(2)[:, :8], 1)
    queries = vectors(3)
    queries[1, 0] = np.nan
    queries[2, 0] = np.inf
    found = index.search(queries, 4)
    assert (found.ids >= 0).all() and np.isnan(found.scores[1]).all() and not np.isfinite(found.scores[2]).any()
    assert np.isfinite(found.scores[0]).all()
