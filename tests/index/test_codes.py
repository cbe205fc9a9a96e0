"""Coded keys and queries against their definition in NumPy integers and float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.kernels import products as products_module
from retrieval_attn.index.kernels.codes import byte_products, code_width, dot_u8, encode_keys, encode_more, encode_query
from retrieval_attn.index.kernels.dots import prefetch_row
from tests.cpu.reference import strided, uneven

DIMS = (64, 128, 80, 7, 256)


_generic_one, _generic_two = byte_products(1, vnni=False), byte_products(2, vnni=False)


@njit
def _all_products(codes, planes, out, generic):  # type: ignore[no-untyped-def]
    width = codes.shape[1]
    for query in range(planes.shape[0]):
        for row in range(codes.shape[0]):
            prefetch_row(codes, row)
            if not generic:
                out[query, row] = dot_u8(codes, row, planes, query, width)
            elif planes.shape[1] == 1:
                out[query, row] = _generic_one(codes, row, planes, query, width)
            else:
                out[query, row] = _generic_two(codes, row, planes, query, width)


def products(codes: npt.NDArray[np.uint8], planes: npt.NDArray[np.int8], generic: bool) -> npt.NDArray[np.int32]:
    out = np.zeros((len(planes), len(codes)), np.int32)
    _all_products(codes, planes, out, generic)
    return out


def numbers(planes: npt.NDArray[np.int8]) -> npt.NDArray[np.int64]:
    """The integers that planes stand for: (n, width)."""
    wide = planes.astype(np.int64)
    return wide[:, 0] if planes.shape[1] == 1 else 128 * wide[:, 0] + wide[:, 1]


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("planes", [1, 2])
def test_products_are_exact_at_the_extremes(planes: int, generic: bool) -> None:
    """All sums equal int64 ones, also where every product is as large as it gets: breaks if a step saturates."""
    rng = np.random.default_rng(0)
    for width in (64, 128, 192, 256, 512):
        codes = rng.integers(0, 256, (20, width)).astype(np.uint8)
        coded = rng.integers(-127, 128, (7, planes, width)).astype(np.int8)
        codes[0], codes[1], coded[0], coded[1] = 255, 0, 127, -127
        if planes == 2:
            coded[:, 1] = coded[:, 1] // 2
        got = products(codes, coded, generic)
        np.testing.assert_array_equal(got, numbers(coded) @ codes.astype(np.int64).T)


@pytest.mark.parametrize("missing", ["+avx", "+avx512"])
def test_no_wide_instructions_elsewhere(missing: str) -> None:
    """A processor without VNNI, or without AVX2, compiles what it has and gets the same sums."""
    script = """
import numpy as np
from numba import njit
from retrieval_attn.index.kernels import codes as c
from retrieval_attn.index.kernels import products as p
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.sketch import rows as r
@njit
def run(codes, planes):
    return c.dot_u8(codes, 1, planes, 1, 128)
assert not p.HAS_VNNI
rng = np.random.default_rng(0)
codes = rng.integers(0, 256, (2, 128)).astype(np.uint8)
planes = rng.integers(-127, 128, (2, 1, 128)).astype(np.int8)
codes[1, :32], planes[1, 0, :32] = 255, -127
assert run(codes, planes) == codes[1].astype(int) @ planes[1, 0].astype(int)
@njit
def score(rows, places, planes, steps, bounds, scores):
    return r.row_scores(rows, places, 0, planes, 8, steps, bounds, scores)
rows, spread = aligned_empty((4, 64), np.uint8), np.zeros((4, 3 * 64), np.int8)
rows[:] = 255
numbers = rng.integers(-127, 128, (4, 8 + 112)).astype(np.int8)
numbers[0] = 127
r.spread_planes(numbers, 4, 8, spread)
scores = np.zeros(16, np.float32)
score(rows, np.arange(4), spread, np.ones((2, 4), np.float32), np.zeros(4, np.float32), scores)
sums = numbers[:, :8].sum(axis=1, dtype=int) * 255 + numbers[:, 8:].sum(axis=1, dtype=int) * 15
assert (scores.reshape(4, 4) == sums).all(), (scores, sums)
(text,) = run.inspect_asm().values()
assert "zmm" not in text and "vpdpbusd" not in text
"""
    host = products_module._compiled_features()
    portable = ",".join("-" + one[1:] if one.startswith(missing) else one for one in host.split(","))
    env = {**os.environ, "NUMBA_CPU_FEATURES": portable, "NUMBA_CPU_NAME": "x86-64"}
    if "+sse2" not in host:
        pytest.skip("needs an x86 processor")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fmt", list(Format))
def test_codes_are_the_nearest_step(fmt: Format) -> None:
    """Every code against the definition; whole and strided arrays alike; padding is 128."""
    for dim in DIMS:
        stored = from_float32(uneven(dim, 301, dim), fmt)
        keys = to_float32(stored, fmt).astype(np.float64)
        for given_keys in (stored, strided(stored)):
            codes = encode_keys(given_keys, fmt)
            assert codes.codes.shape == (301, code_width(dim)) and codes.codes.ctypes.data % 64 == 0
            np.testing.assert_array_equal(codes.mean, keys.mean(axis=0).astype(np.float32))
            right = np.abs(keys - codes.mean.astype(np.float64)).max(axis=0) / 127
            np.testing.assert_allclose(codes.scale, right, rtol=1e-6)
            steps = (keys - codes.mean.astype(np.float64)) / codes.scale.astype(np.float64)
            error = np.abs(codes.codes[:, :dim].astype(np.float64) - 128 - steps).max()
            assert error <= 0.5 + 1e-6
            assert (codes.codes[:, dim:] == 128).all()


def test_scores_are_as_near_as_the_steps_allow() -> None:
    """offset + step * integer within half a step of every key and query number: breaks on a wrong constant."""
    rng = np.random.default_rng(1)
    for dim in DIMS:
        stored = from_float32(uneven(dim, 500, dim), Format.BFLOAT16)
        keys = to_float32(stored, Format.BFLOAT16).astype(np.float64)
        codes = encode_keys(stored, Format.BFLOAT16)
        queries = rng.standard_normal((4, dim), dtype=np.float32)
        coded = encode_query(queries, codes)
        integers = products(codes.codes, coded.planes, False).astype(np.float64)
        scores = coded.offset[:, None].astype(np.float64) + coded.step[:, None] * integers
        exact = queries.astype(np.float64) @ keys.T
        centred = np.abs(keys - codes.mean)
        scale = codes.scale.astype(np.float64)
        largest = (np.abs(queries) * scale).max(axis=1) / 127
        from_keys = np.abs(queries) @ scale / 2
        from_queries = largest[:, None] / 2 * ((centred + scale / 2) / np.where(scale > 0, scale, 1)).sum(axis=1)
        allowed = (from_keys[:, None] + from_queries) * (1 + 1e-5) + 1e-5 * np.abs(exact).max()
        assert (np.abs(scores - exact) <= allowed).all()
        assert np.corrcoef(scores.ravel(), exact.ravel())[0, 1] > 0.999


def test_equal_keys_and_extreme_numbers() -> None:
    """A constant channel has no scale; channels as wide as float32 must not overflow on the way."""
    keys = np.array([[3, -3.4e38, 1e-45, 0], [3, 3.4e38, 0, 0]], np.float32)
    codes = encode_keys(keys, Format.FLOAT32)
    assert np.isfinite(codes.mean).all() and np.isfinite(codes.scale).all()
    assert codes.scale[0] == codes.scale[3] == 0
    assert codes.codes[:, 0].tolist() == [128, 128] and codes.codes[:, 1].tolist() == [1, 255]
    coded = encode_query(np.array([[1, 0, 0, 1], [1, 3e38, 3e38, 3e38]], np.float32), codes)
    assert coded.step[0] == 0 and coded.offset[0] == 3 and not coded.planes[0].any()
    assert coded.planes[1, 0, 1] == 127
    empty = encode_keys(keys[:0], Format.FLOAT32)
    assert len(empty.codes) == 0 and not empty.mean.any() and not empty.scale.any()
    assert encode_query(keys[:0], empty).planes.shape == (0, 1, 64)


def test_a_query_that_is_not_finite() -> None:
    """All keys tie, scored NaN: never an integer made from a NaN."""
    codes = encode_keys(uneven(4, 10, 16), Format.FLOAT32)
    queries = np.ones((3, 16), np.float32)
    queries[0, 3], queries[2, 15] = np.nan, np.inf
    coded = encode_query(queries, codes)
    assert not coded.planes[[0, 2]].any() and coded.planes[1].any()
    assert np.isnan(coded.offset[[0, 2]]).all() and np.isfinite(coded.offset[1])
    assert (coded.step[[0, 2]] == 0).all()


def test_rows_added_later() -> None:
    """Same codes as before for keys in range, clipped beyond it, in place while there is room."""
    stored = from_float32(uneven(5, 900, 80), Format.BFLOAT16)
    codes = encode_keys(stored, Format.BFLOAT16, capacity=950)
    assert len(codes.codes) == 950
    kept = codes.codes[:900].copy()
    more = encode_more(codes, stored[100:150], Format.BFLOAT16, 900)
    assert more.codes is codes.codes
    np.testing.assert_array_equal(more.codes[900:950], kept[100:150])
    grown = encode_more(more, stored[:40], Format.BFLOAT16, 940)
    assert grown.codes is not codes.codes and len(grown.codes) >= 980
    np.testing.assert_array_equal(grown.codes[:900], kept)
    np.testing.assert_array_equal(grown.codes[940:980], kept[:40])
    far = from_float32(1e6 * np.array([[1.0] * 80, [-1.0] * 80], np.float32), Format.BFLOAT16)
    clipped = encode_more(codes, far, Format.BFLOAT16, 0)
    assert (clipped.codes[0, :80] == 255).all() and (clipped.codes[1, :80] == 0).all()
    assert (clipped.codes[:2, 80:] == 128).all()


def test_bad_input_is_named() -> None:
    """Each would otherwise be coded as other numbers."""
    keys = np.zeros((5, 4), np.float32)
    codes = encode_keys(keys, Format.FLOAT32)
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = keys.copy()
        spoilt[2, 1] = spoilt[4] = bad
        with pytest.raises(ShapeError, match="got 2 with NaN or infinity, the first at id 2"):
            encode_keys(spoilt, Format.FLOAT32)
        with pytest.raises(ShapeError, match="the first at id 7"):
            encode_more(encode_more(codes, keys, Format.FLOAT32, 5), spoilt, Format.FLOAT32, 5)
    with pytest.raises(ShapeError, match="uint16"):
        encode_keys(keys, Format.BFLOAT16)
    with pytest.raises(ShapeError, match=r"\(n, 4\)"):
        encode_more(codes, keys[:, :3].copy(), Format.FLOAT32, 0)
    with pytest.raises(ShapeError, match="start=6"):
        encode_more(codes, keys, Format.FLOAT32, 6)
    with pytest.raises(ShapeError, match=r"\(n, 4\)"):
        encode_query(keys[:, :3], codes)
    with pytest.raises(ShapeError, match="at most 65536"):
        encode_keys(np.zeros((1, 65537), np.float32), Format.FLOAT32)


@settings(max_examples=40)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 3, 16, 64, 65, 130]),
    st.sampled_from(list(Format)),
    st.integers(0, 2**32 - 1),
)
def test_any_shape(n: int, dim: int, fmt: Format, seed: int) -> None:
    """Sizes, formats and seeds: integers equal NumPy's, scores near the exact ones."""
    rng = np.random.default_rng(seed)
    stored = from_float32(rng.standard_normal((n, dim), dtype=np.float32), fmt)
    queries = rng.standard_normal((3, dim), dtype=np.float32)
    codes = encode_keys(stored, fmt)
    coded = encode_query(queries, codes)
    got = products(codes.codes, coded.planes, False)
    np.testing.assert_array_equal(got, numbers(coded.planes) @ codes.codes.astype(np.int64).T)
    keys = to_float32(stored, fmt).astype(np.float64)
    exact = queries.astype(np.float64) @ keys.T
    # half a step of each channel's keys, and what rounding the query costs: a single number is not rounded
    steps = np.abs(keys - keys.mean(axis=0)).max(axis=0) / 127 if n else np.zeros(dim)
    most = np.abs(queries) @ steps / 2 * 1.01 + 0.02 * (dim - 1) + 1e-5
    assert (np.abs(coded.offset[:, None] + coded.step[:, None] * got - exact) < most[:, None]).all()
