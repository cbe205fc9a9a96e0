"""Every registered kind, on inputs that break search code: a defined answer or a named error, never another thing.

The answer of any kind must be sound (distinct ids of existing keys, exact scores, best first) even where it may
approximate which keys are best; `flat` must also be exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (ivf and hnsw are kinds, too)
from retrieval_attn.errors import ConfigError, RetrievalAttentionError, ShapeError
from retrieval_attn.index import Format, IndexSpec, KeyIndex, SearchResult, available, create
from retrieval_attn.index.base import MAX_KEYS
from retrieval_attn.index.formats import from_float32, to_float32

# The package's own: kinds that other test files register would be here or not by the order of imports.
KINDS = [kind for kind in available() if kind != "auto" and not kind.startswith("test-")]
Keys = npt.NDArray[Any]
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def build(kind: str, keys: Keys, fmt: Format = Format.FLOAT32, group: int = 2, seed: int = 0) -> KeyIndex:
    train = np.random.default_rng(seed + 1).standard_normal((group, 40, fmt.dim_of(keys)), dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrieval_attn.index.roargraph.index.EXACT_BELOW", 0)
        return create(kind, keys, fmt=fmt, queries=train)


def normal(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def check_sound(found: SearchResult, keys: npt.NDArray[np.float32], queries: Any, k: int, limit: int | None) -> None:
    """Shapes, dtypes, padding, distinct ids below the limit, exact scores, order, and a count of work that can be."""
    stop = len(keys) if limit is None else min(limit, len(keys))
    kept = min(k, stop)
    assert found.ids.shape == found.scores.shape == (len(queries), k)
    assert found.ids.dtype == np.int32 and found.scores.dtype == np.float32
    assert (found.ids[:, kept:] == -1).all() and np.isneginf(found.scores[:, kept:]).all()
    ids, scores = found.ids[:, :kept], found.scores[:, :kept]
    assert ((ids >= 0) & (ids < stop)).all()
    assert all(len(set(row)) == kept for row in ids.tolist())
    right = np.einsum("qd,qkd->qk", queries.astype(np.float64), keys[ids].astype(np.float64))
    size = np.abs(queries).astype(np.float64) @ np.abs(keys).max(0, initial=0).astype(np.float64)
    assert (np.abs(scores - right) <= 1e-5 * size[:, None] + 1e-30).all()
    assert (np.diff(scores, axis=1) <= 0).all()
    ties = scores[:, 1:] == scores[:, :-1]
    assert (np.diff(ids, axis=1)[ties] > 0).all(), "equal scores must be ordered by id"
    assert 0 <= found.keys_scanned <= 4 * len(queries) * max(len(keys), 1) + k


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(data=st.data())
def test_any_size_dtype_and_group_gives_sound_answers(kind: str, data: st.DataObject) -> None:
    """Zero to a few hundred keys, k below and beyond them, limits, all formats, dims that are no multiple of 16."""
    n = data.draw(st.sampled_from([0, 1, 2, 3, 17, 64, 65, 300]))
    dim = data.draw(st.sampled_from([1, 7, 16, 64, 80]))
    fmt = data.draw(st.sampled_from(list(Format)))
    k = data.draw(st.sampled_from([1, 2, 10, 64, 400]))
    limit = data.draw(st.sampled_from([None, 0, 1, 20, 10_000]))
    count = data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 3))
    keys = from_float32(normal((n, dim), seed), fmt)
    index = build(kind, keys, fmt, group=data.draw(st.integers(1, 4)), seed=seed)
    queries = normal((count, dim), seed + 9)
    assert len(index) == n and min(index.memory) >= 0
    check_sound(index.search(queries, k, limit=limit), to_float32(keys, fmt), queries, k, limit)
    if kind == "flat":
        stop = n if limit is None else min(n, limit)
        best = -np.sort(-(queries.astype(np.float64) @ to_float32(keys, fmt)[:stop].T.astype(np.float64)), axis=1)[
            :, :k
        ]
        np.testing.assert_allclose(index.search(queries, k, limit=limit).scores[:, : best.shape[1]], best, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(sizes=st.lists(st.sampled_from([0, 1, 5, 90, 300]), min_size=1, max_size=5), seed=st.integers(0, 3))
def test_inserting_in_any_pieces_gives_sound_answers(kind: str, sizes: list[int], seed: int) -> None:
    """From an empty index on; each piece is another array."""
    keys = normal((sum(sizes), 16), seed)
    index = build(kind, keys[: sizes[0]].copy())
    done = sizes[0]
    for size in sizes[1:]:
        index.insert(keys[done : done + size].copy())
        done += size
        assert len(index) == done
    queries = normal((3, 16), seed + 5)
    check_sound(index.search(queries, 7), keys, queries, 7, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["equal", "zero", "pairs", "one direction", "huge", "tiny"])
def test_degenerate_keys(kind: str, what: str) -> None:
    """Keys without order, without length, twice, on one line, near the ends of the format's range."""
    keys = {
        "equal": np.tile(normal((1, 16)), (300, 1)),
        "zero": np.zeros((300, 16), np.float32),
        "pairs": np.repeat(normal((150, 16)), 2, axis=0),
        "one direction": normal((300, 1)) * normal((1, 16), 1),
        "huge": normal((300, 16)) * np.float32(1e15),
        "tiny": normal((300, 16)) * np.float32(1e-20),
    }[what]
    index = build(kind, keys)
    queries = normal((4, 16), 2)
    check_sound(index.search(queries, 20), keys, queries, 20, None)
    zero = np.zeros((1, 16), np.float32)
    check_sound(index.search(zero, 20), keys, zero, 20, None)
    check_sound(index.search(queries, 300), keys, queries, 300, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_that_are_not_finite(kind: str, bad: float) -> None:
    """Refused by name, or (flat) ranked: NaN below everything. Inserts leave the index as it was when they fail."""
    keys = normal((100, 16))
    keys[40, 3] = bad
    queries = np.abs(normal((2, 16), 1))
    for insert in (False, True):
        try:
            index = build(kind, keys[:0] if insert else keys)
            if insert:
                index.insert(keys)
        except ShapeError as error:
            assert kind != "flat" and "finite" in str(error)
            if insert:
                assert len(index) == 0
            continue
        ids = index.search(queries, 100).ids
        assert (np.sort(ids, axis=1) == np.arange(100)).all()
        place = (ids == 40).argmax(axis=1)
        assert (place == (0 if bad == np.inf else 99)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_queries_that_are_not_finite(kind: str, bad: float) -> None:
    """Existing keys, each once, with the scores that the arithmetic gives; other queries are not touched."""
    keys = normal((400, 16))
    index = build(kind, keys)
    queries = normal((3, 16), 1)
    good = index.search(queries, 10)
    queries[1, 5] = bad
    found = index.search(queries, 10)
    for row in (0, 2):
        np.testing.assert_array_equal(found.scores[row], good.scores[row])
    assert len(set(found.ids[1].tolist())) == 10 and found.ids[1].min() >= 0 and found.ids[1].max() < 400
    if not np.isfinite(np.float32(bad)):
        assert not np.isfinite(found.scores[1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_and_dtypes(kind: str) -> None:
    """Named before any kernel sees them; the index still answers afterwards."""
    keys = normal((200, 16))
    index = build(kind, keys)
    wrong: Any
    for wrong in (keys[:, :8], keys[None], keys[0], keys.astype(np.float64), keys.astype(np.float16), keys[:, ::2]):
        with pytest.raises(ShapeError):
            index.insert(wrong)
        with pytest.raises(ShapeError):
            index.search(wrong, 3)
    for k, limit in ((0, None), (-1, None), (1.5, None), (True, None), (2, -1), (2, 1.5)):
        with pytest.raises(ConfigError):
            index.search(keys[:2], k, limit=limit)  # type: ignore[arg-type]
    for wrong in (keys[0], keys[None], keys.astype(np.float64), np.zeros((3, 0), np.float32)):
        with pytest.raises(ShapeError):
            create(kind, wrong, fmt=Format.FLOAT32, queries=normal((1, 40, 16)))
    with pytest.raises(ShapeError):
        create(kind, keys, fmt=Format.BFLOAT16, queries=normal((1, 40, 16)))
    check_sound(index.search(keys[:2], 3), keys, keys[:2], 3, None)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_layouts(kind: str) -> None:
    """Strided rows and read-only arrays are taken or refused by name, and give the same answers as plain ones."""
    keys, queries = normal((300, 16)), normal((4, 16), 1)
    plain = build(kind, keys).search(queries, 9)
    wide = np.zeros((300, 40), np.float32)
    wide[:, 8:24] = keys
    frozen = keys.copy()
    frozen.flags.writeable = False
    backwards = keys[::-1].copy()[::-1]
    for same in (wide[:, 8:24], frozen, np.asfortranarray(keys), backwards):
        try:
            index = build(kind, same)
        except ShapeError as error:
            assert "contiguous" in str(error)
            continue
        found = index.search(queries, 9)
        np.testing.assert_array_equal(found.ids, plain.ids)
        frozen_queries = queries.copy()
        frozen_queries.flags.writeable = False
        for other in (frozen_queries, np.asfortranarray(queries), np.repeat(queries, 2, axis=0)[::2]):
            np.testing.assert_array_equal(index.search(other, 9).ids, plain.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_more_keys_than_ids(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2**31 keys are refused before anything is allocated for them: the array is one row, seen 2**31 times."""
    row = np.zeros((1, 2), np.float32)
    many = np.lib.stride_tricks.as_strided(row, (MAX_KEYS + 1, 2), (0, 4), writeable=False)
    with pytest.raises(ShapeError, match="2147483647|contiguous"):
        build(kind, many)
    index = build(kind, normal((50, 2)))
    with pytest.raises(ShapeError, match="2147483647|contiguous"):
        index.insert(many)
    assert len(index) == 50


@pytest.mark.parametrize("kind", KINDS)
def test_training_data_of_another_head(kind: str) -> None:
    """Wrong training queries are named by kinds that train, and ignored by the others."""
    keys = normal((300, 16))
    wrong: Any
    for wrong in (normal((40, 16)), normal((2, 40, 8)), normal((2, 40, 16)).astype(np.float64)):
        try:
            index = create(kind, keys, fmt=Format.FLOAT32, queries=wrong)
        except ShapeError:
            continue
        assert not IndexSpec.of(kind).trains and len(index) == 300
    empty = np.zeros((2, 0, 16), np.float32)
    try:
        index = create(kind, keys, fmt=Format.FLOAT32, queries=empty)
    except RetrievalAttentionError:
        return
    check_sound(index.search(keys[:2], 4), keys, keys[:2], 4, None)


@pytest.mark.parametrize("kind", KINDS)
def test_search_after_truncate(kind: str) -> None:
    """Kinds that forget do it exactly; others say so and stay as they were."""
    keys = normal((300, 16))
    index = build(kind, keys)
    left = 120 if index.truncate(120) else 300
    assert len(index) == left
    queries = normal((2, 16), 1)
    check_sound(index.search(queries, 9), keys[:left], queries, 9, None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_searches_take_no_memory(kind: str) -> None:
    """10,000 queries in batches: the process does not grow."""
    resource = pytest.importorskip("resource")
    keys, queries = normal((1000, 16)), normal((100, 16), 1)
    index = build(kind, keys)
    for _ in range(10):
        index.search(queries, 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        index.search(queries, 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8192  # KiB
