"""Posting lists: made of what queries name, every key somewhere, and searches that score only what they probe."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index import FlatIndex, Format, PostingsIndex, SearchResult
from retrieval_attn.index import postings as postings_module
from retrieval_attn.index.formats import from_float32, to_float32
from retrieval_attn.index.probe import Lists, lists_of_queries
from retrieval_attn.index.query_clusters import cluster_queries, directions
from retrieval_attn.index.threads import kernel_threads
from tests.cpu.reference import strided

N, DIM = 9000, 32
OPTIONS = {"exact_below": 100, "list_k": 30, "centroids": 40, "probe": 4, "most": 300}


def make(seed: int = 0) -> tuple[npt.NDArray, npt.NDArray[np.float32]]:
    """Keys (N, DIM) bfloat16 and queries (2, 500, DIM) around 30 directions, far from the keys' mean."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((N, DIM)) * rng.uniform(0.3, 2, DIM) + 2 * rng.standard_normal(DIM)
    topics = rng.standard_normal((30, DIM))
    queries = topics[rng.integers(0, 30, (2, 500))] + 0.3 * rng.standard_normal((2, 500, DIM))
    return from_float32(keys.astype(np.float32), Format.BFLOAT16), (3 * queries).astype(np.float32)


def recall(found: SearchResult, exact: SearchResult) -> float:
    k = exact.ids.shape[1]
    return float(
        np.mean([len(set(a) & set(b)) / k for a, b in zip(found.ids.tolist(), exact.ids.tolist(), strict=True)])
    )


@pytest.fixture(scope="module")
def built() -> tuple[npt.NDArray, npt.NDArray[np.float32], PostingsIndex]:
    keys, queries = make()
    return keys, queries, PostingsIndex.build(strided(keys), Format.BFLOAT16, queries[:, :450], **OPTIONS)


def test_finds_most_and_scores_little(built: tuple) -> None:
    """Held-out queries: most of the exact best from a tenth of the keys; scores are exact; the count is true."""
    keys, queries, index = built
    held = np.ascontiguousarray(queries[:, 450:].reshape(-1, DIM))
    exact, found = FlatIndex(keys, Format.BFLOAT16).search(held, 20), index.search(held, 20)
    assert recall(found, exact) >= 0.9
    assert found.keys_scanned < 0.15 * len(held) * N
    scores = held.astype(np.float64) @ to_float32(keys, Format.BFLOAT16).astype(np.float64).T
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, found.ids, axis=1), rtol=1e-4, atol=1e-4)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 20 for row in found.ids.tolist())
    every = PostingsIndex(index._keys, index._codes, index.lists, postings_module.PostingOptions(probe=40))
    all_lists = every.search(held, 20)
    assert recall(all_lists, exact) >= 0.99
    assert all_lists.keys_scanned == len(held) * N  # each key once, however many lists name it


def test_every_key_is_in_a_list(built: tuple) -> None:
    """Keys that no training list names are reachable: breaks if they are left out."""
    keys, queries, index = built
    lists = index.lists
    assert lists is not None and lists.listed == N
    np.testing.assert_array_equal(np.unique(lists.ids), np.arange(N))
    lone = to_float32(keys, Format.BFLOAT16)
    direction = np.zeros(DIM, np.float32)
    direction[3] = 1
    lone[777] = lone.mean(axis=0) + 30 * direction  # best of all for a query that nothing was trained on
    again = PostingsIndex.build(lone, Format.FLOAT32, queries, lists=index_lists(lone, queries, without=777), **OPTIONS)
    assert 777 in again.search(direction[None] * 4, 5).ids[0]


def index_lists(keys: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], without: int) -> npt.NDArray[np.int32]:
    found = FlatIndex(keys, Format.FLOAT32).search(queries.reshape(-1, DIM), 10).ids
    return np.where(found == without, -1, found).reshape(*queries.shape[:2], 10).astype(np.int32)


def test_lists_count_votes() -> None:
    """Most named first, then the lower id, cut at `most`; -1 names nothing; a centroid without queries has no keys."""
    named = np.array([[5, 7, -1], [7, 2, 5], [9, -1, -1], [7, 9, 2]], np.int32)
    member = np.array([0, 0, 2, 0], np.int32)
    lists = lists_of_queries(np.eye(3, dtype=np.float32), member, named, 3, 10)
    assert lists.offsets.tolist() == [0, 3, 3, 4]
    assert lists.ids.tolist() == [7, 2, 5, 9]


def test_clusters_are_of_directions() -> None:
    """Lengths do not matter, groups that are far apart are separated, and the seed says all."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 100)
    wide = (np.eye(8)[group] + 0.05 * rng.standard_normal((400, 8))) * rng.uniform(1e-20, 1e20, (400, 1))
    rows = wide.astype(np.float32)
    centroids, member = cluster_queries(rows, 25, 3)
    assert centroids.shape == (25, 8)
    np.testing.assert_allclose((centroids.astype(np.float64) ** 2).sum(axis=1), 1, atol=1e-5)
    assert all(len(set(group[member == one].tolist())) <= 1 for one in range(25))
    np.testing.assert_array_equal(cluster_queries(rows, 25, 3)[0], centroids)
    assert (cluster_queries(rows, 25, 4)[0] != centroids).any()
    assert cluster_queries(rows[:1], 25, 0)[0].shape == (1, 8)
    assert (directions(np.zeros((2, 3), np.float32)) == 0).all()


def test_the_same_at_every_thread_count(built: tuple) -> None:
    """Lists bit for bit: breaks if sums or votes depend on threads."""
    keys, queries, index = built
    for threads in range(1, numba.get_num_threads() + 1):
        with kernel_threads(threads):
            again = PostingsIndex.build(keys, Format.BFLOAT16, queries[:, :450], **OPTIONS)
        assert again.lists is not None and index.lists is not None
        np.testing.assert_array_equal(again.lists.ids, index.lists.ids)
        np.testing.assert_array_equal(again.lists.centroids, index.lists.centroids)


def test_insert_and_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added keys are found before and after they are listed; forgotten ids never come back."""
    monkeypatch.setattr(postings_module, "RECENT", 300)
    keys, queries = make(1)
    index = PostingsIndex.build(keys[:7000], Format.BFLOAT16, queries, **OPTIONS)
    held = np.ascontiguousarray(queries[0, :40])
    for start in range(7000, N, 250):
        index.insert(keys[start : start + 250])
    assert len(index) == N and index.lists is not None and N - 300 < index.lists.listed <= N
    exact = FlatIndex(keys, Format.BFLOAT16)
    assert recall(index.search(held, 20), exact.search(held, 20)) >= 0.9
    # the inserted keys alone: as many of them are found as of the first ones
    right = exact.search(held, 20).ids
    found = index.search(held, 20).ids
    late = [set(row[row >= 7000].tolist()) for row in right]
    got = sum(len(want & set(row.tolist())) for want, row in zip(late, found, strict=True))
    assert got >= 0.85 * sum(map(len, late))
    limited = index.search(held, 20, limit=5000)
    assert limited.ids.max() < 5000 and (limited.ids >= 0).all()
    assert index.truncate(6000) and len(index) == 6000
    assert index.search(held, 20).ids.max() < 6000
    index.insert(keys[8000:])
    moved = np.concatenate([keys[:6000], keys[8000:]])
    assert recall(index.search(held, 20), FlatIndex(moved, Format.BFLOAT16).search(held, 20)) >= 0.9


def test_exact_where_lists_are_not_enough(built: tuple) -> None:
    """More wanted than probed, queries that are not finite, few keys: the answers of the exact index."""
    keys, queries, index = built
    exact = FlatIndex(keys, Format.BFLOAT16)
    held = queries[0, :3].copy()
    np.testing.assert_array_equal(index.search(held, 5000).ids, exact.search(held, 5000).ids)
    held[1, 4] = np.nan
    held[2, 0] = -np.inf
    np.testing.assert_array_equal(index.search(held, 9).ids[1:], exact.search(held, 9).ids[1:])
    few = PostingsIndex.build(keys[:80], Format.BFLOAT16, None, exact_below=100)
    few.insert(keys[80:90])
    right = FlatIndex(keys[:90], Format.BFLOAT16).search(queries[0], 100)
    np.testing.assert_array_equal(few.search(queries[0], 100).ids, right.ids)
    none = PostingsIndex.build(keys[:0], Format.BFLOAT16, queries, exact_below=0)
    assert (none.search(queries[0], 3).ids == -1).all()
    assert index.search(queries[0, :0], 3).ids.shape == (0, 3)
    assert (index.search(queries[0], 3, limit=0).ids == -1).all()


def test_state_round_trip(built: tuple) -> None:
    """A loaded index answers as the saved one and grows on; a state that does not fit is refused."""
    keys, queries, index = built
    state = index.state()
    held = queries[1, :30]
    again = PostingsIndex.from_state(keys, Format.BFLOAT16, state)
    np.testing.assert_array_equal(again.search(held, 9).ids, index.search(held, 9).ids)
    assert again.options == index.options and again.nbytes == index.nbytes
    again.insert(keys[:3])
    assert len(again) == N + 3 and len(index) == N
    worse = {"ids": np.full_like(state["ids"], N), "offsets": state["offsets"][::-1], "listed": N + 1, "probe": 0}
    for name, value in worse.items():
        with pytest.raises(InputDataError):
            PostingsIndex.from_state(keys, Format.BFLOAT16, {**state, name: value})
    with pytest.raises(InputDataError):
        PostingsIndex.from_state(keys[:500], Format.BFLOAT16, state)
    with pytest.raises(InputDataError):
        PostingsIndex.from_state(keys, Format.BFLOAT16, {})


def test_bad_input_is_named(built: tuple) -> None:
    """Options out of range, nothing to train on, lists of other keys."""
    keys, queries, _ = built
    for name in ("centroids", "probe", "most", "list_k", "rescore"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            PostingsIndex.build(keys, Format.BFLOAT16, queries, **{name: 0})
    for given in (None, np.full_like(queries, np.inf)):
        with pytest.raises(ConfigError, match="finite training queries"):
            PostingsIndex.build(keys, Format.BFLOAT16, given)
    lists = np.zeros((*queries.shape[:2], 4), np.int32)
    with pytest.raises(ShapeError, match="other keys"):
        PostingsIndex.build(keys, Format.BFLOAT16, queries, lists=lists + N)
    one = Lists(np.zeros((1, DIM), np.float32), np.array([0, 0]), np.zeros(0, np.int32), 0)
    assert one.nbytes == DIM * 4 + 16
