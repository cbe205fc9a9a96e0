"""Attention over ids and over ranges against float64 NumPy."""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.cpu import gather
from retrieval_attn.cpu.attend import Partial, attend_range_heads, merge_partials
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, to_float32
from tests.cpu.reference import EPS, assert_attention, at_every_thread_count, attend_ids_heads, attention, normal

SIZES = (1, 63, 65, 1000)
DIMS = ((64, 64), (80, 80), (128, 128), (256, 256), (7, 5), (40, 96))
SCORES = ((0.125, None), (1.0, 2.5), (0.0, None), (1.0, None))
GROUPS = (1, 4, 7)


def attend_ids(queries: Any, keys: Any, values: Any, ids: Any, *others: Any) -> Partial:
    """`attend_ids_heads` of one head."""
    out, lse = attend_ids_heads(queries[None], keys[None], values[None], ids[None], *others)
    return out[0], lse[0]


def attend_range(queries: Any, keys: Any, values: Any, *others: Any) -> Partial:
    """`attend_range_heads` of one head."""
    out, lse = attend_range_heads(queries[None], keys[None], values[None], *others)
    return out[0], lse[0]


def mask_of(ids: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.bool_]:
    taken = np.zeros((len(ids), tokens), bool)
    for row, chosen in zip(taken, ids, strict=True):
        row[chosen[chosen >= 0]] = True
    return taken


@pytest.mark.parametrize("fmt", list(Format))
def test_ids(fmt: Format) -> None:
    """Any ids in any order, holes included: breaks on a wrong row, weight, scale, soft-cap or hole."""
    rng = np.random.default_rng(0)
    for case, ((dim, value_dim), size) in enumerate(itertools.product(DIMS, SIZES)):
        group, (scale, softcap) = GROUPS[case % 3], SCORES[case % 4]
        keys, values = normal(rng, (size, dim), fmt), normal(rng, (size, value_dim), fmt)
        queries = rng.standard_normal((group, dim), dtype=np.float32)
        ids = np.stack([rng.permutation(size)[:101] for _ in range(group)]).astype(np.int32)
        ids[rng.random(ids.shape) < 0.2] = -1
        got = attend_ids(queries, keys, values, ids, fmt, scale, softcap)
        wide = to_float32(keys, fmt), to_float32(values, fmt)
        assert_attention(got, queries, *wide, mask_of(ids, size), scale, softcap)


@pytest.mark.parametrize("fmt", list(Format))
def test_range(fmt: Format) -> None:
    """All tokens of ranges that begin and end anywhere: breaks on a lost tile, part, or rescaling."""
    rng = np.random.default_rng(1)
    ranges = ((1, 0, 1), (63, 0, 63), (65, 1, 65), (1000, 3, 998), (4100, 0, 4099))
    for case, ((dim, value_dim), (size, start, stop)) in enumerate(itertools.product(DIMS, ranges)):
        group, (scale, softcap) = GROUPS[case % 3], SCORES[case % 4]
        keys, values = normal(rng, (size, dim), fmt), normal(rng, (size, value_dim), fmt)
        queries = rng.standard_normal((group, dim), dtype=np.float32)
        taken = np.zeros((group, size), bool)
        taken[:, start:stop] = True
        got = attend_range(queries, keys, values, start, stop, fmt, scale, softcap)
        wide = to_float32(keys, fmt), to_float32(values, fmt)
        assert_attention(got, queries, *wide, taken, scale, softcap)


def test_extreme_scores() -> None:
    """One token takes everything, or scores rise all the way: breaks if the maximum is not followed."""
    rng = np.random.default_rng(2)
    keys = (np.arange(3000, dtype=np.float32)[:, None] - 1500) * np.ones((1, 8), np.float32)
    values = rng.standard_normal((3000, 8), dtype=np.float32)
    taken = np.ones((4, 3000), bool)
    for factor in (1e-6, 0.01, 1.0, 100.0):
        queries = np.array([[1], [-1], [0], [0.5]], np.float32) * np.float32(factor) * np.ones((1, 8), np.float32)
        got = attend_range(queries, keys, values, 0, 3000, Format.FLOAT32, 1.0)
        exact = attention(queries, keys, values, taken, 1.0)
        np.testing.assert_allclose(got[1], exact[1], rtol=2e-7, atol=1e-6)
        np.testing.assert_allclose(got[0], exact[0], atol=2e-5)
        ids = np.tile(np.arange(3000, dtype=np.int32), (4, 1))
        again = attend_ids(queries, keys, values, ids, Format.FLOAT32, 1.0)
        np.testing.assert_allclose(again[1], exact[1], rtol=2e-7, atol=1e-6)
        np.testing.assert_allclose(again[0], exact[0], atol=2e-5)


def test_exponential_is_accurate_to_an_ulp() -> None:
    """Every weight goes through it; 1.5 ulp against float64, 0 below the smallest normal number, NaN kept."""
    numbers = -np.concatenate([np.linspace(0, 86.9, 200_001), np.logspace(-12, 1, 1000)]).astype(np.float32)
    got = numbers.copy()
    gather.exponentiate(got, got.size, np.float32(0))
    exact = np.exp(numbers.astype(np.float64))
    assert (np.abs(got - exact) / np.spacing(exact.astype(np.float32))).max() <= 1.5
    edges = np.array([-87.5, -1e30, -np.inf, np.nan, 0.0], np.float32)
    gather.exponentiate(edges, edges.size, np.float32(0))
    np.testing.assert_array_equal(edges, [0, 0, 0, np.nan, 1])


def test_nothing_to_attend_to(compiled: None, nan_empty: None) -> None:
    """Only -1, no ids, an empty range, no queries: out 0 and lse -inf, never NaN."""
    keys = np.ones((5, 16), np.float32)
    queries = np.ones((3, 16), np.float32)
    for ids in (np.full((3, 7), -1, np.int32), np.zeros((3, 0), np.int32)):
        out, lse = attend_ids(queries, keys, keys, ids, Format.FLOAT32, 1.0)
        assert (out == 0).all() and np.isneginf(lse).all() and out.shape == (3, 16)
    for tokens, start in ((keys, 2), (keys[:0], 0)):
        out, lse = attend_range(queries, tokens, tokens, start, start, Format.FLOAT32, 1.0)
        assert (out == 0).all() and np.isneginf(lse).all() and out.shape == (3, 16)
    out, lse = attend_range(queries[:0], keys, keys, 0, 5, Format.FLOAT32, 1.0)
    assert out.shape == (0, 16) and lse.shape == (0,)
    out, lse = attend_ids(queries[:0], keys, keys, np.zeros((0, 4), np.int32), Format.FLOAT32, 1.0)
    assert out.shape == (0, 16) and lse.shape == (0,)


def test_scores_of_minus_infinity_and_nan() -> None:
    """Keys at -inf count nothing, alone they are an empty set; NaN reaches its own query and no other."""
    keys = np.array([[-np.inf, 0], [1, 0], [-np.inf, 0], [0, np.nan]], np.float32)
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    queries = np.array([[1, 0.0]] * 4, np.float32)
    ids = np.array([[0, 1], [0, 2], [1, 3], [1, 1]], np.int32)
    with np.errstate(invalid="ignore"):
        out, lse = attend_ids(queries, keys, values, ids, Format.FLOAT32, 1.0)
    np.testing.assert_array_equal(out[[0, 1, 3]], [[2, 3], [0, 0], [2, 3]])
    np.testing.assert_allclose(lse[[0, 1, 3]], [1, -np.inf, 1 + np.log(2)], rtol=1e-6)
    assert np.isnan(out[2]).all() and np.isnan(lse[2])
    out, lse = attend_range(queries, keys, values, 0, 3, Format.FLOAT32, 1.0)
    np.testing.assert_array_equal(out, [[2, 3]] * 4)
    out, lse = attend_range(queries, keys, values, 2, 3, Format.FLOAT32, 1.0)
    assert (out == 0).all() and np.isneginf(lse).all()
    assert np.isnan(attend_range(queries, keys, values, 0, 4, Format.FLOAT32, 1.0)[0]).all()


def test_an_id_twice_counts_twice_and_equal_keys_share() -> None:
    """Duplicates are not removed; all-equal keys give the mean of the values."""
    keys = np.ones((70, 8), np.float32)
    values = np.arange(70, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    queries = np.ones((1, 8), np.float32)
    out, lse = attend_ids(queries, keys, values, np.array([[0, 3, 3]], np.int32), Format.FLOAT32, 0.5)
    np.testing.assert_allclose(out, [[2, 2, 2]], rtol=1e-6)
    np.testing.assert_allclose(lse, [4 + np.log(3)], rtol=1e-6)
    out, lse = attend_range(queries, keys, values, 0, 70, Format.FLOAT32, 0.5)
    np.testing.assert_allclose(out, [[34.5] * 3], rtol=1e-6)
    np.testing.assert_allclose(lse, [4 + np.log(70)], rtol=1e-6)


def test_heads_and_strides_and_partials() -> None:
    """Several heads in strided arrays equal each head alone; ranges merge to the whole."""
    rng = np.random.default_rng(4)
    room = normal(rng, (3, 900, 64), Format.FLOAT32)
    keys, values = room[:, :700], room[:, 100:800]
    queries = rng.standard_normal((3, 5, 64), dtype=np.float32)
    whole = attend_range_heads(queries, keys, values, 0, 700, Format.FLOAT32, 0.125)
    cuts = (0, 1, 65, 65, 400, 700)
    parts = [
        attend_range_heads(queries, keys, values, a, b, Format.FLOAT32, 0.125)
        for a, b in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    ids = np.tile(rng.permutation(700).astype(np.int32), (3, 5, 1))
    by_ids = attend_ids_heads(queries, keys, values, ids, Format.FLOAT32, 0.125)
    for got in (whole, merge_partials(parts), by_ids):
        for head in range(3):
            taken = np.ones((5, 700), bool)
            assert_attention((got[0][head], got[1][head]), queries[head], keys[head], values[head], taken, 0.125)


def test_merge_of_empty_partials() -> None:
    """Empty parts count nothing, even if their lse is -inf on both sides."""
    rng = np.random.default_rng(5)
    full = rng.standard_normal((2, 3, 4), dtype=np.float32), rng.standard_normal((2, 3), dtype=np.float32)
    empty = np.zeros((2, 3, 4), np.float32), np.full((2, 3), -np.inf, np.float32)
    out, lse = merge_partials([empty, full, empty])
    np.testing.assert_allclose(out, full[0], rtol=2 * EPS)
    np.testing.assert_allclose(lse, full[1], rtol=2 * EPS)
    out, lse = merge_partials([empty, empty])
    assert (out == 0).all() and np.isneginf(lse).all()
    with pytest.raises(ShapeError, match="at least one"):
        merge_partials([])
    with pytest.raises(ShapeError, match="equal shapes"):
        merge_partials([full, (full[0][:1], full[1][:1])])


def test_the_same_at_every_thread_count() -> None:
    """Bit for bit: breaks if the parts that a range is cut into depend on the number of threads."""
    rng = np.random.default_rng(6)
    keys = rng.standard_normal((9000, 64), dtype=np.float32)
    queries = rng.standard_normal((4, 64), dtype=np.float32)
    at_every_thread_count(lambda: attend_range(queries, keys, keys, 0, 9000, Format.FLOAT32, 0.125))


def test_offsets_beyond_two_to_the_31() -> None:
    """Rows past element 2**31: breaks if row * head_dim is computed in 32 bits. Takes little memory."""
    dim, tokens = 128, 2**31 // 128 + 70
    memory = mmap.mmap(-1, tokens * dim * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keys = np.frombuffer(memory, np.uint16).reshape(tokens, dim)
    rng = np.random.default_rng(7)
    last = normal(rng, (64, dim), Format.BFLOAT16)
    keys[-64:] = last
    queries = rng.standard_normal((4, dim), dtype=np.float32)
    taken = np.ones((4, 64), bool)
    wide = to_float32(last, Format.BFLOAT16)
    ids = np.tile(np.arange(tokens - 64, tokens, dtype=np.int32), (4, 1))
    got = attend_ids(queries, keys, keys, ids, Format.BFLOAT16, 0.125)
    assert_attention(got, queries, wide, wide, taken, 0.125)
    got = attend_range(queries, keys, keys, tokens - 64, tokens, Format.BFLOAT16, 0.125)
    assert_attention(got, queries, wide, wide, taken, 0.125)


def test_bad_input_is_named() -> None:
    """Each would otherwise be read out of bounds or as other numbers."""
    keys, queries = np.ones((5, 8), np.float32), np.ones((2, 8), np.float32)
    good: tuple[Any, ...] = (queries, keys, keys, Format.FLOAT32, 1.0)
    for place, value in (
        (0, queries.astype(np.float64)),
        (0, queries[:, :4].copy()),
        (0, queries[0]),
        (1, keys.astype(np.float16)),
        (1, keys[:, ::2]),
        (1, keys[:3]),
        (2, keys.view(np.uint16)),
        (2, keys[0]),
        (3, Format.BFLOAT16),
    ):
        given: list[Any] = [*good]
        given[place] = value
        with pytest.raises(ShapeError):
            attend_range(*given[:3], 0, 2, *given[3:])
    for factor, softcap in ((np.nan, None), (np.inf, None), (1.0, 0.0), (1.0, -1.0), (1.0, np.inf)):
        with pytest.raises(ConfigError, match="scale|softcap"):
            attend_range(queries, keys, keys, 0, 2, Format.FLOAT32, factor, softcap)
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ShapeError, match="within 0 .. 5"):
            attend_range(queries, keys, keys, start, stop, Format.FLOAT32, 1.0)
