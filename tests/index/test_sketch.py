"""The low-rank sketch: the projection is the best one, the index finds what the exact one finds where it can."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index import FlatIndex, Format, SketchIndex
from retrieval_attn.index.formats import from_float32, to_float32
from retrieval_attn.index.sketch.index import learn_projection, second_moment
from tests.cpu.reference import recall, strided
from tests.index.building import built

N, DIM, RANK = 12000, 64, 16


def make(seed: int = 0, fmt: Format = Format.BFLOAT16) -> tuple[npt.NDArray, npt.NDArray[np.float32]]:
    """Keys (N, DIM), and queries (2, 300, DIM) that look mostly at RANK directions in which the keys vary least."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(4, 0.5, DIM)
    basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    keys = (rng.standard_normal((N, DIM)) * spread) @ basis.T + 3 * rng.standard_normal(DIM)
    seen = np.where(np.arange(DIM) >= DIM - RANK, 1.0, 0.01)
    queries = (rng.standard_normal((2, 300, DIM)) * seen / spread) @ basis.T
    return from_float32(keys.astype(np.float32), fmt), queries.astype(np.float32)


def recall_of(index: SketchIndex, keys: npt.NDArray, queries: npt.NDArray[np.float32]) -> float:
    return recall(index.search(queries, 20).ids, FlatIndex(keys, Format.BFLOAT16).search(queries, 20).ids)


def test_projection_has_the_least_error() -> None:
    """Against the optimum: what is left of Sq^1/2 Sk Sq^1/2 after its leading eigenvalues."""
    stored, queries = make()
    keys, rows = to_float32(stored[:500], Format.BFLOAT16), queries[:, :50].reshape(-1, DIM)
    centred = keys.astype(np.float64) - keys.mean(axis=0, dtype=np.float64)
    exact = rows.astype(np.float64) @ centred.T
    for rank in (4, RANK):
        query_side, key_side = learn_projection(second_moment(rows), keys, rank)
        assert query_side.shape == key_side.shape == (rank, DIM)
        mine = float(
            ((rows @ query_side.T).astype(np.float64) @ (centred @ key_side.T.astype(np.float64)).T - exact).std()
        )
        # the singular values of queries times keys, computed directly: no projection of this rank can do better
        left = np.linalg.svd(exact, compute_uv=False)[rank:]
        best = float(np.sqrt((left**2).sum() / exact.size))
        assert mine <= 1.01 * best + 1e-6
    query_side, key_side = learn_projection(second_moment(rows), keys, DIM)
    np.testing.assert_allclose(query_side.T.astype(np.float64) @ key_side, np.eye(DIM), atol=1e-2)


def test_finds_what_queries_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dimensions are enough where queries use few, though the keys vary most in others."""
    keys, queries = make()
    monkeypatch.setattr("retrieval_attn.index.sketch.index.RESCORE", 10)
    index = built(SketchIndex, strided(keys), Format.BFLOAT16, queries[:, :250], key_bytes=RANK)
    held = np.ascontiguousarray(queries[:, 250:].reshape(-1, DIM))
    assert recall_of(index, keys, held) >= 0.95
    blind = built(SketchIndex, keys, Format.BFLOAT16, np.ones((1, 1, DIM), np.float32), key_bytes=RANK)
    assert recall_of(blind, keys, held) < 0.5
    found = index.search(held, 20)
    exact = np.take_along_axis(held.astype(np.float64) @ to_float32(keys, Format.BFLOAT16).T, found.ids, axis=1)
    np.testing.assert_allclose(found.scores, exact, rtol=1e-4, atol=1e-4)
    assert found.keys_scanned == len(held) * N


def test_insert_truncate_and_state() -> None:
    """Keys added in parts get the codes that they get at once; a loaded index answers as the saved one."""
    keys, queries = make(1)
    part = built(SketchIndex, keys[:9000], Format.BFLOAT16, queries, key_bytes=RANK)
    for start in range(9000, N, 701):
        part.insert(keys[start : start + 701])
    assert len(part) == N
    held = queries[0, :20]
    assert recall_of(part, keys, held) >= 0.95
    before = part.search(held, 20, limit=9000)
    assert before.ids.max() < 9000
    assert part.truncate(9500) and len(part) == 9500
    part.insert(keys[10000:])
    moved = np.concatenate([keys[:9500], keys[10000:]])
    assert recall_of(part, moved, held) >= 0.95
    state = part.state()
    for array in state.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    again = SketchIndex.from_state(moved, Format.BFLOAT16, state)
    np.testing.assert_array_equal(again.search(held, 20).ids, part.search(held, 20).ids)
    again.insert(keys[:10])
    assert len(again) == len(moved) + 10
    for name in ("rows", "front", "front_step", "front_narrow", "passing", "whole", "query_side", "wide", "step"):
        with pytest.raises(InputDataError):
            SketchIndex.from_state(moved, Format.BFLOAT16, {**state, name: np.zeros((2, 2), np.float32)})
    with pytest.raises(InputDataError):
        SketchIndex.from_state(moved[:100], Format.BFLOAT16, state)


def test_exact_where_a_sketch_saves_nothing() -> None:
    """Few keys, many wanted, and queries that are not finite: the answers of the exact index."""
    keys, queries = make(2)
    index = built(SketchIndex, keys, Format.BFLOAT16, queries, key_bytes=RANK)
    held = queries[1, :4].copy()
    held[1, 3], held[2, 0] = np.nan, np.inf
    exact = FlatIndex(keys, Format.BFLOAT16)
    for k, limit in ((10, None), (10, 30), (3000, None), (5, 0)):
        found, right = index.search(held, k, limit=limit), exact.search(held, k, limit=limit)
        rows = [1, 2] if limit is None and k == 10 else [0, 1, 2, 3]
        np.testing.assert_array_equal(found.ids[rows], right.ids[rows])
        np.testing.assert_array_equal(found.scores[rows], right.scores[rows])
    empty = built(SketchIndex, keys[:0], Format.BFLOAT16, queries)
    empty.insert(keys[:50])
    grown = built(SketchIndex, keys[:0], Format.BFLOAT16, queries)
    for first in range(0, 6000, 1000):
        grown.insert(keys[first : first + 1000])
    assert recall_of(grown, keys[:6000], queries[0, :9]) >= 0.95  # the range of no keys would tell none apart
    np.testing.assert_array_equal(
        empty.search(queries[0], 5).ids, FlatIndex(keys[:50], Format.BFLOAT16).search(queries[0], 5).ids
    )


def test_bad_input_is_named() -> None:
    """What it cannot learn from, and options out of range."""
    keys, queries = make(3)
    for budget in (0, 7, True, 16.0):
        with pytest.raises(ConfigError, match="key_bytes="):
            built(SketchIndex, keys, Format.BFLOAT16, queries, key_bytes=budget)
    for given in (None, queries[:, :0], np.full_like(queries, np.nan)):
        with pytest.raises(ConfigError, match="finite training queries"):
            built(SketchIndex, keys, Format.BFLOAT16, given)
    spoilt = to_float32(keys, Format.BFLOAT16)
    spoilt[7, 1] = np.inf
    with pytest.raises(ShapeError, match="finite"):
        built(SketchIndex, spoilt, Format.FLOAT32, queries)
    index = built(SketchIndex, keys, Format.BFLOAT16, queries)
    with pytest.raises(ShapeError, match=r"\(n, 64\)"):
        index.insert(keys[:, :5].copy())


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_a_projection_is_that_of_sums_in_float64(size: float) -> None:
    """Of queries and keys of any size: as good to six digits as with all sums of products in float64."""
    rng = np.random.default_rng(0)
    spread = np.geomspace(0.01, 3, 32)
    keys = ((rng.standard_normal((700, 32)) * spread + 5) * size).astype(np.float32)
    queries = (rng.standard_normal((300, 32)) * spread[::-1] + 3).astype(np.float32)
    exact_queries, exact_keys = queries.astype(np.float64), keys.astype(np.float64) - keys.mean(axis=0, dtype=float)
    moment, covariance = exact_queries.T @ exact_queries, exact_keys.T @ exact_keys
    values, vectors = np.linalg.eigh(moment)
    root, inverse = vectors * np.sqrt(values) @ vectors.T, vectors / np.sqrt(values) @ vectors.T
    leading = np.linalg.eigh(root @ (covariance / size**2) @ root)[1][:, ::-1][:, :8]
    wanted = exact_queries @ exact_keys.T

    def missed(query_side: npt.NDArray[np.generic], key_side: npt.NDArray[np.generic]) -> float:
        found = exact_queries @ query_side.T.astype(float) @ (key_side.astype(float) @ exact_keys.T)
        return float(np.square((found - wanted) / size).mean())

    best = missed(leading.T @ inverse, leading.T @ root)
    assert missed(*learn_projection(second_moment(queries), keys, 8)) == pytest.approx(best, rel=1e-6)
