"""Storage formats: conversions are exact one way, rounded to nearest even the other."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32


@pytest.mark.parametrize("fmt", list(Format))
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
    for fmt in Format:
        np.testing.assert_array_equal(to_float32(from_float32(numbers, fmt), fmt), numbers)
        assert from_float32(np.zeros((0, 3), np.float32), fmt).shape == (0, 3)


def test_wrong_dtype_and_name_are_named() -> None:
    """A float64 array or an unknown name must not pass silently."""
    with pytest.raises(ShapeError, match="float32 .*got float64"):
        from_float32(np.zeros(3), Format.BFLOAT16)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="uint16"):
        to_float32(np.zeros(3, np.float32), Format.BFLOAT16)
    with pytest.raises(ConfigError, match="'int8'.*float32, bfloat16, float16"):
        Format.from_name("int8")
    assert [Format.from_name(fmt.value) for fmt in Format] == list(Format)
    assert [fmt.bytes for fmt in Format] == [4, 2, 2]
