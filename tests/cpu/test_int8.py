"""Keys and values in int8 on the host: exact about what is stored, and within half a step of what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.cpu.attend import attend_range_heads
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV, held_memory
from retrieval_attn.errors import ShapeError
from retrieval_attn.index import FlatIndex
from retrieval_attn.index.formats import MIN_STEP, Format, from_float32, row_steps, to_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn_eval.bench.synthetic import synthetic_head
from tests.cpu.apart import attend_apart
from tests.cpu.reference import EPS, attend_ids_heads, attention, strided
from tests.index.building import built

INT8 = Format.INT8


def error_bounds(
    queries: npt.NDArray[np.float32], keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32], scale: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How far attention over stored rows may be from that over the rows given: out (n, dv), lse (n,), float64.

    A number is off by half a step at most, so a score by no more than E = scale * |q|_1 * (largest step) / 2, and the
    log-sum-exp as well. Weights change by factors within exp(-2E) .. exp(2E), and still sum to 1: with the exact output
    o as origin, the output moves by at most (exp(2E) - 1) * sum w |v - o|, and half a step of the values. Float32 adds
    what `assert_attention` grants it.
    """
    wide = queries.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    key_step, value_step = (max(np.abs(array).max(initial=0.0) / 127, float(MIN_STEP)) for array in wide[1:])
    off = scale * np.abs(wide[0]).sum(axis=1) * key_step / 2
    everything = np.ones((len(queries), len(keys)), bool)
    right, _ = attention(*wide, everything, scale)
    logits = scale * wide[0] @ wide[1].T
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    spread = np.stack([w @ np.abs(wide[2] - o) for w, o in zip(weights, right, strict=True)])
    largest = np.abs(wide[2]).max(initial=0.0)
    float32 = 64 * EPS * (1 + np.abs(logits).max(initial=0.0))
    return np.expm1(2 * off)[:, None] * spread + value_step / 2 + float32 * largest, off + float32


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.sampled_from([1, 7, 16, 33, 64, 80, 128]),
    st.sampled_from([1, 5, 16, 64, 130]),
    st.sampled_from(["normal", "zeros", "outliers", "tiny", "huge", "channels"]),
    st.integers(0, 9),
)
def test_attention_is_within_half_a_step(n: int, dim: int, value_dim: int, kind: str, seed: int) -> None:
    """Over a range, over ids, and through a path, against float64 over the unrounded rows; and over the stored ones
    to float32's rounding. Breaks under a clipped row, a step of another row, or one that is not applied."""
    rng = np.random.default_rng(seed)
    queries, keys = rng.standard_normal((1, 4, dim), dtype=np.float32), rng.standard_normal((1, n, dim), np.float32)
    values = rng.standard_normal((1, n, value_dim), dtype=np.float32)
    scale = dim**-0.5
    if kind == "zeros":
        keys[:, :: 1 + seed % 3], values[:, ::2] = 0, 0
    elif kind == "outliers":
        keys[0, rng.integers(0, n, 3), rng.integers(0, dim, 3)] *= 40
        values[0, rng.integers(0, n, 3)] *= 1000
    elif kind == "tiny":
        keys, values = keys * np.float32(1e-30), values * np.float32(1e-36)
    elif kind == "huge":
        keys, queries, values = keys * np.float32(1e30), queries * np.float32(1e-30), values * np.float32(1e30)
    elif kind == "channels":
        keys += (np.arange(dim) % 5 == 0) * np.float32(8)
    stored = from_float32(keys, INT8), from_float32(values, INT8)
    ids = np.tile(rng.permutation(n).astype(np.int32), (1, 4, 1))
    path = SequenceKV(1, dim, value_dim, INT8).reserve(n)
    path.append(*stored)
    bounds = error_bounds(queries[0], keys[0], values[0], scale)
    plain = to_float32(stored[0], INT8)[0].astype(np.float64), to_float32(stored[1], INT8)[0].astype(np.float64)
    every = np.ones((4, n), bool)
    exact = attention(queries[0].astype(np.float64), keys[0], values[0], every, scale)
    held = attention(queries[0].astype(np.float64), *plain, every, scale)
    rounding = 64 * EPS * (1 + np.abs(scale * queries[0].astype(np.float64) @ plain[0].T).max())
    found = attend_path(path, queries, 0, n, None, scale=scale)
    best = attend_path(path, queries, 0, n, n, scale=scale)
    for out, lse in (
        attend_range_heads(queries, *stored, 0, n, INT8, scale),
        attend_ids_heads(queries, strided(stored[0]), strided(stored[1]), ids, INT8, scale),
        (found.out, found.lse),
        (best.out, best.lse),
    ):
        assert (np.abs(out[0] - exact[0]) <= bounds[0]).all() and (np.abs(lse[0] - exact[1]) <= bounds[1]).all()
        assert np.abs(out[0] - held[0]).max() <= rounding * np.abs(plain[1]).max(initial=0.0)
        assert np.abs(lse[0] - held[1]).max() <= rounding


def layer(n: int) -> tuple[Any, ...]:
    """Stored keys and values (2, n, 64 + 4), training queries (8, 300, 64) and queries (8, 1, 64)."""
    heads = [synthetic_head(n, head_dim=64, group=4, train=300, decode=1, seed=seed) for seed in (0, 1)]
    keys = from_float32(np.stack([head.keys for head in heads]), INT8)
    values = from_float32(np.random.default_rng(0).standard_normal((2, n, 64), dtype=np.float32), INT8)
    train, asked = (np.concatenate([getattr(head, name) for head in heads]) for name in ("train_rotated", "decode"))
    return keys, values, train, np.ascontiguousarray(asked)


def test_stored_keys_are_their_own_codes() -> None:
    """Index and tail, in a step and apart: the answers of an exact scan, from as many bytes, and nothing held beside.

    Breaks if a coded scan takes a part's rows for another's, forgets the steps, or ids count from the index's start.
    """
    n = 18_000
    keys, values, _, asked = layer(n)
    paths = [
        SequenceKV(2, 64, 64, INT8, index=IndexSpec.of("flat", {"codes": codes})).reserve(n)
        for codes in ("none", "int8")
    ]
    for path in paths:
        path.append(keys[:, :15_000], values[:, :15_000])
        path.build_index(4, 15_000)
        path.append(keys[:, 15_000:], values[:, 15_000:])
    assert held_memory(paths[1:]).host == paths[1].nbytes == 2 * n * (68 + 68)
    for stop in (9000, 15_000, 16_000, n):
        exact, coded = (attend_path(path, asked, 4, stop, 50, scale=0.125) for path in paths)
        apart = attend_apart(paths[1], asked, 4, stop, 50, 0.125)
        np.testing.assert_allclose(coded.lse, exact.lse, atol=2e-4)  # one key of 50 may be another
        np.testing.assert_allclose(coded.lse, apart.lse, atol=2e-6)
        assert np.median(np.abs(coded.out - exact.out)) < 1e-6
        assert coded.cost.keys_scanned == exact.cost.keys_scanned == 8 * (stop - 4)
        assert 2 * (stop - 4) * 68 <= coded.cost.bytes_read <= 2 * (stop - 4) * 68 + 8 * 50 * 68


def test_a_graph_over_int8_keys() -> None:
    """Its search in a step equals its own search, and finds what a scan of the stored keys finds."""
    n = 9000
    keys, values, train, asked = layer(n)
    path = SequenceKV(2, 64, 64, INT8, index=IndexSpec.of("roargraph")).reserve(n)
    path.append(keys, values)
    path.build_index(4, n - 500, train)
    scan = SequenceKV(2, 64, 64, INT8).reserve(n)
    scan.append(keys, values)
    found, exact = (attend_path(one, asked, 4, n, 50, scale=0.125) for one in (path, scan))
    apart = attend_apart(path, asked, 4, n - 500, 50, 0.125)
    step = attend_path(path, asked, 4, n - 500, 50, scale=0.125)
    np.testing.assert_allclose(step.out, apart.out, atol=2e-6)
    assert found.cost.keys_scanned < exact.cost.keys_scanned / 2
    assert np.exp(found.lse - exact.lse).mean() > 0.9 and (found.lse <= exact.lse + 1e-5).all()


def test_numbers_that_are_not_finite() -> None:
    """A row with one is NaN as a whole: last in a ranking, and in the answer where it takes part, as in other formats.

    Where keys serve as codes they are refused by id, as they are where other formats are coded.
    """
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((1, 3000, 16), dtype=np.float32)
    keys[0, 7, 3], keys[0, 90, 15] = np.nan, -np.inf
    stored = from_float32(keys, INT8)
    assert np.isnan(row_steps(stored)[0, [7, 90]]).all()
    index = built(FlatIndex, stored[0], INT8, None)
    queries = rng.standard_normal((1, 2, 16), dtype=np.float32)
    assert not {7, 90} & set(index.search(queries[0], 2998).ids.ravel().tolist())
    path = SequenceKV(1, 16, 16, INT8).reserve(3000)
    path.append(stored, stored)
    assert np.isfinite(attend_path(path, queries, 0, 3000, 50, scale=0.25).out).all()
    assert np.isnan(attend_path(path, queries, 0, 3000, None, scale=0.25).out).all()
    with pytest.raises(ShapeError, match="2 with NaN or infinity, the first at id 7"):
        built(FlatIndex, stored[0], INT8, None, codes="int8")
    coded = built(FlatIndex, stored[0, :7], INT8, None, codes="int8")
    with pytest.raises(ShapeError, match="1 with NaN or infinity, the first at id 7"):
        coded.insert(stored[0, 7:9])
    coded.insert(stored[0, 8:80])
    assert len(coded) == 79


@pytest.mark.parametrize("codes", ["none", "int8"])
def test_an_index_comes_back_from_its_state(codes: str) -> None:
    """Over the same keys; the answers are the same to the bit."""
    keys = from_float32(np.random.default_rng(1).standard_normal((5000, 24), dtype=np.float32), INT8)
    queries = np.random.default_rng(2).standard_normal((3, 24), dtype=np.float32)
    index = built(FlatIndex, keys, INT8, None, codes=codes)
    loaded = FlatIndex.from_state(keys, INT8, index.state())
    assert isinstance(loaded, FlatIndex) and loaded.scans_stored == (codes == "int8")
    found, right = loaded.search(queries, 20), index.search(queries, 20)
    np.testing.assert_array_equal(found.ids, right.ids)
    np.testing.assert_array_equal(found.scores, right.scores)
