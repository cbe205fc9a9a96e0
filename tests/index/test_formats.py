"""Storage formats: conversions are exact one way, rounded to nearest even the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, from_float32, kernel_view, row_steps, to_float32

FLOATS = [Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16]


@pytest.mark.parametrize("fmt", FLOATS)
def test_every_stored_number_survives_a_round_trip(fmt: Format) -> None:
    """All 65,536 bit patterns (NaN stays NaN): breaks if a conversion drops or shifts a bit."""
    bits = np.arange(2**16, dtype=np.uint16)
    stored = bits if fmt is not Format.FLOAT32 else (bits.astype(np.uint32) << 16).view(np.float32)
    values = to_float32(stored, fmt)
    back = from_float32(values, fmt)
    assert back.dtype == fmt.dtype
    nan = np.isnan(values)
    np.testing.assert_array_equal(back[~nan], stored[~nan])
    assert np.isnan(to_float32(back[nan], fmt)).all() and nan.any()


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    """Against float64 distances to both neighbours: breaks under truncation and under ties away from zero."""
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(20000).astype(np.float32) * np.float32(10) ** rng.integers(-30, 30, 20000)
    ties = (rng.integers(0x3F80, 0x4200, 1000).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    numbers = np.concatenate([numbers.astype(np.float32), ties, -ties])
    down = numbers.view(np.uint32) >> 16
    low = (down << 16).view(np.float32).astype(np.float64)
    high = ((down + 1) << 16).view(np.float32).astype(np.float64)
    nearer_high = np.abs(high - numbers) < np.abs(low - numbers)
    tie = np.abs(high - numbers) == np.abs(low - numbers)
    wanted = np.where(nearer_high | (tie & (down % 2 == 1)), down + 1, down).astype(np.uint16)
    np.testing.assert_array_equal(from_float32(numbers, Format.BFLOAT16), wanted)


@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.FLOAT16])
def test_too_large_becomes_infinite(fmt: Format) -> None:
    """Not NaN and not the largest finite number, and without a warning."""
    numbers = np.array([3.4e38, -3.4e38, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(to_float32(from_float32(numbers, fmt), fmt), [np.inf, -np.inf] * 2)


def test_strided_and_empty_arrays() -> None:
    """Shape is kept whatever the layout: breaks if bits are reinterpreted before the copy."""
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::2, ::2]
    for fmt in FLOATS:
        np.testing.assert_array_equal(to_float32(from_float32(numbers, fmt), fmt), numbers)
        assert from_float32(np.zeros((0, 3), np.float32), fmt).shape == (0, 3)
    assert from_float32(np.zeros((2, 0, 3), np.float32), Format.INT8).shape == (2, 0, 7)
    np.testing.assert_array_equal(from_float32(numbers, Format.INT8), from_float32(numbers.copy(), Format.INT8))


def test_wrong_dtype_and_name_are_named() -> None:
    """A float64 array or an unknown name must not pass silently."""
    with pytest.raises(ShapeError, match="float32 .*got float64"):
        from_float32(np.zeros(3), Format.BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="uint16"):
        to_float32(np.zeros(3, np.float32), Format.BFLOAT16)
    with pytest.raises(ConfigError, match="'int4'.*float32, bfloat16, float16, int8"):
        Format.from_name("int4")
    assert [Format.from_name(fmt.value) for fmt in Format] == list(Format)
    assert [fmt.bytes for fmt in Format] == [4, 2, 2, 1]
    assert [fmt.row_bytes(128) for fmt in Format] == [512, 256, 256, 132]
    for fmt in Format:
        assert fmt.dim_of(from_float32(np.zeros((2, 9), np.float32), fmt)) == 9
    with pytest.raises(ShapeError, match="from_float32"):
        to_float32(np.zeros((3, 4), np.int8), Format.INT8)  # no room for a number before the step
    with pytest.raises(ShapeError, match="at least one number"):
        from_float32(np.zeros((3, 0), np.float32), Format.INT8)


@given(
    arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 40)), elements=st.floats(width=32)),
    st.integers(-148, 127),
)
def test_int8_is_off_by_at_most_half_a_step(rows: npt.NDArray[np.float32], exponent: int) -> None:
    """Any numbers at all: zeros, denormals, the largest float32, outliers, NaN and infinity (the whole row is NaN).

    Breaks if the step is taken of another axis, a row is clipped, a step overflows, or one is lost below 1e-38.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.concatenate([rows, rows * np.float32(2.0**exponent), np.zeros_like(rows[:1])])
    stored = from_float32(rows, Format.INT8)
    steps = row_steps(stored)
    finite = np.isfinite(rows).all(axis=1)
    assert stored.dtype == np.int8 and stored.shape == (len(rows), rows.shape[1] + 4)
    np.testing.assert_array_equal(np.isfinite(steps), finite)
    back = to_float32(stored, Format.INT8)
    assert np.isnan(back[~finite]).all() and np.isfinite(back[finite]).all()
    most = np.abs(rows[finite]).max(axis=1).astype(np.float64)
    largest = np.maximum(most / 127 * (1 + 2e-7), np.finfo(np.float32).tiny) * (most > 0)
    assert (steps[finite] <= largest).all() and (steps[finite] >= 0).all()
    # half a step, and three roundings of numbers up to `most`: the step, the quotient, and the product here
    wrong = np.abs(back[finite].astype(np.float64) - rows[finite])
    assert (wrong <= (steps[finite].astype(np.float64) / 2 + 2e-7 * most)[:, None]).all()
    kernel = kernel_view(stored, Format.INT8)
    assert kernel.shape == rows.shape and np.shares_memory(kernel, stored)
    assert kernel.min(initial=0) >= -127


def test_int8_uses_all_steps() -> None:
    """The largest number is 127 steps: breaks if the scale wastes a bit, which no bound above would see."""
    rows = np.random.default_rng(0).standard_normal((500, 64), dtype=np.float32)
    steps = from_float32(rows, Format.INT8)[:, :64]
    assert (np.abs(steps.astype(np.int32)).max(axis=1) == 127).all()
