"""Number formats of stored keys and values, and the loads that turn them into float32 inside Numba kernels.

A host array is float32, or uint16 that carries the bits of bfloat16 or float16, or int8. A row of int8 is the numbers
as whole steps, -127 to 127, followed by the size of its step as float32 in 4 more bytes, so that a row is copied, cut
and gathered as one: what a key needs lies in as many cache lines as with an array of scales apart, and in one page
instead of two. Only `Format` knows of those bytes: `width`, `dim_of` and `row_bytes` say what an array holds.

Inside kernels the dtype alone says the format (float32; uint16 = bfloat16; int16 = float16; int8 = steps, with
the step's size right behind the row), see `kernel_view`, so every load is resolved at compile time. Arithmetic is
always float32: formats differ only through the bytes that they move.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError

SCALE_BYTES = 4
"""Of the float32 behind each row of int8."""
MAX_STEPS = 127
"""Largest absolute number of a row of int8."""
STEP_SHARE = np.float32(1 / MAX_STEPS)
"""A row's step as a share of its largest absolute number. Multiplied, not divided: the same bits on every device."""
MIN_STEP = np.finfo(np.float32).tiny
"""Smallest step but 0 (a row of zeros): what is below half of it becomes 0."""
MAX_STEP = np.nextafter(np.finfo(np.float32).max / np.float32(MAX_STEPS), np.float32(0))
"""Largest step: 127 of them are finite."""


class Format(enum.Enum):
    """How a key or value element is stored in host memory."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"

    @property
    def bytes(self) -> int:
        """Bytes of one element of an array; a row of numbers may have more of them than numbers (`row_bytes`)."""
        return self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of host arrays in this format: float32, uint16 for the two 16-bit formats, int8."""
        if self is Format.FLOAT32:
            return np.dtype(np.float32)
        return np.dtype(np.int8 if self is Format.INT8 else np.uint16)

    def width(self, dim: int) -> int:
        """Elements of a stored row of `dim` numbers: the last axis of an array."""
        return dim + SCALE_BYTES if self is Format.INT8 else dim

    def dim_of(self, array: npt.NDArray[Any]) -> int:
        """Numbers in a row of an array in this format."""
        return int(array.shape[-1]) - (SCALE_BYTES if self is Format.INT8 else 0)

    def row_bytes(self, dim: int) -> int:
        """Bytes of a stored row of `dim` numbers."""
        return self.width(dim) * self.bytes

    @classmethod
    def from_name(cls, name: str) -> Format:
        """The format called `name`; raises ConfigError for any other name."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(item.value for item in cls)
            raise ConfigError(f"format={name!r} is not a storage format; use one of {known}") from None


def to_float32(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[np.float32]:
    """The float32 values of `array` (any shape, dtype fmt.dtype); always a new array. Raises ShapeError.

    Exact, but that int8 gives number times step, rounded; its last axis loses the bytes of the step.
    """
    check_dtype("array", array, fmt)
    if fmt is Format.INT8:
        return array[..., :-SCALE_BYTES].astype(np.float32) * row_steps(array)[..., None]
    if fmt is Format.BFLOAT16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt is Format.FLOAT16:
        return array.view(np.float16).astype(np.float32)
    return array.astype(np.float32)


def from_float32(array: npt.NDArray[np.float32], fmt: Format) -> npt.NDArray[Any]:
    """Round float32 `array` (any shape) to `fmt`: nearest, ties to even; always a new array of dtype fmt.dtype.

    NaN stays NaN, infinities stay; what is too large for the format becomes infinity. int8: rows (the last axis)
    become whole steps of their largest absolute number / 127, so that no number is off by more than half a step, and
    the last axis gains the bytes of the step; a row with a NaN or an infinity becomes NaN as a whole. Raises
    ShapeError for another dtype.
    """
    check_dtype("array", array, Format.FLOAT32)
    if fmt is Format.INT8:
        return _in_steps(array)
    if fmt is Format.FLOAT32:
        return array.copy()
    if fmt is Format.FLOAT16:
        with np.errstate(over="ignore"):
            return array.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(array).view(np.uint32).reshape(array.shape)
    half_ulp = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half_ulp) >> np.uint32(16)).astype(np.uint16)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)  # rounding could carry a NaN into infinity
    return np.where(np.isnan(array), quiet, rounded)


def _in_steps(array: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    """Rows as whole steps, with the step behind them. `staging.pack` is the same for tensors."""
    if array.ndim < 1 or array.shape[-1] < 1:
        raise ShapeError(f"int8 needs rows of at least one number, got shape {array.shape}")
    dim = array.shape[-1]
    most = np.abs(array).max(axis=-1, keepdims=True)
    finite = np.isfinite(most)
    step = np.where(most > 0, np.clip(most * STEP_SHARE, MIN_STEP, MAX_STEP), np.float32(0))
    numbers = np.where(finite, array, np.float32(0)) / np.where(finite & (most > 0), step, np.float32(1))
    rows = np.empty((*array.shape[:-1], Format.INT8.width(dim)), np.int8)
    rows[..., :dim] = np.clip(np.rint(numbers), -MAX_STEPS, MAX_STEPS)
    rows[..., dim:] = np.where(finite, step, np.float32(np.nan)).astype(np.float32).view(np.int8)
    return rows


def _check_scaled(array: npt.NDArray[Any]) -> None:
    if array.ndim < 1 or array.shape[-1] <= SCALE_BYTES:
        raise ShapeError(
            f"rows of int8 are their numbers and {SCALE_BYTES} bytes of step, at least {SCALE_BYTES + 1} elements, "
            f"got shape {array.shape}; make them with from_float32"
        )


def row_steps(array: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Steps (...,) of int8 rows (..., dim + 4); a copy. NaN: the row had numbers that are not finite."""
    _check_scaled(array)
    return np.ascontiguousarray(array[..., -SCALE_BYTES:]).view(np.float32)[..., 0]


def check_dtype(name: str, array: npt.NDArray[Any], fmt: Format) -> None:
    """Raise ShapeError unless `array` is a NumPy array of fmt.dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != fmt.dtype:
        given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"{name} must be a NumPy array of {fmt.dtype} ({fmt.value}), got {given}; convert it first")


def check_rows(name: str, array: npt.NDArray[Any], fmt: Format, ndim: int) -> None:
    """Raise ShapeError unless `array` has `ndim` axes, fmt.dtype and contiguous aligned rows (axes before are free)."""
    check_dtype(name, array, fmt)
    if array.ndim != ndim or array.shape[-1] < 1:
        raise ShapeError(f"{name} must have {ndim} axes, the last at least 1 long, got shape {array.shape}")
    if fmt is Format.INT8:
        _check_scaled(array)
    strides_ok = array.size == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize
    if not strides_ok or not array.flags.aligned or min(array.strides) < 0:
        raise ShapeError(
            f"{name} must have contiguous, aligned rows, got strides {array.strides}; pass np.ascontiguousarray({name})"
        )


def check_queries(name: str, array: npt.NDArray[Any], ndim: int) -> npt.NDArray[np.float32]:
    """`array` as C-contiguous float32 with `ndim` axes (copied if strided); raises ShapeError for another dtype."""
    check_dtype(name, array, Format.FLOAT32)
    if array.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} axes, got shape {array.shape}")
    return np.require(array, requirements=("C", "A"))


def kernel_view(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[Any]:
    """`array` as kernels take it, its last axis as long as the numbers of a row. No copy.

    float16 bits as int16; int8 without the bytes of the step, which kernels find behind each row; else unchanged.
    """
    if fmt is Format.INT8:
        return array[..., : fmt.dim_of(array)]
    return array.view(np.int16) if fmt is Format.FLOAT16 else array
