"""Number formats of stored keys and values, and the loads that turn them into float32 inside Numba kernels.

A host array is float32, or uint16 that carries the bits of bfloat16 or float16. Inside kernels the dtype
alone says the format (float32; uint16 = bfloat16; int16 = float16, see `kernel_view`), so every load is
resolved at compile time. Arithmetic is always float32: formats differ only through the bytes that they
move.

Numba's cache of other files does not notice edits of this one: after changing an intrinsic here, delete the
`__pycache__` folders of `index` and `cpu`.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError


class Format(enum.Enum):
    """How a key or value element is stored in host memory."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is Format.FLOAT32 else 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of host arrays in this format: float32, or uint16 for the two 16-bit formats."""
        return np.dtype(np.float32) if self is Format.FLOAT32 else np.dtype(np.uint16)

    @classmethod
    def from_name(cls, name: str) -> Format:
        """The format called `name`; raises ConfigError for any other name."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(item.value for item in cls)
            raise ConfigError(f"format={name!r} is not a storage format; use one of {known}") from None


def to_float32(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[np.float32]:
    """The exact float32 values of `array` (any shape, dtype fmt.dtype); always a new array. Raises
    ShapeError.
    """
    check_dtype("array", array, fmt)
    if fmt is Format.BFLOAT16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt is Format.FLOAT16:
        return array.view(np.float16).astype(np.float32)
    return array.astype(np.float32)


def from_float32(array: npt.NDArray[np.float32], fmt: Format) -> npt.NDArray[Any]:
    """Round float32 `array` (any shape) to `fmt`: nearest, ties to even; always a new array of dtype
    fmt.dtype.

    NaN stays NaN, infinities stay; what is too large for the format becomes infinity. Raises ShapeError for
    another dtype.
    """
    check_dtype("array", array, Format.FLOAT32)
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


def check_dtype(name: str, array: npt.NDArray[Any], fmt: Format) -> None:
    """Raise ShapeError unless `array` is a NumPy array of fmt.dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != fmt.dtype:
        given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(f"{name} must be a NumPy array of {fmt.dtype} ({fmt.value}), got {given}; convert it first")


def check_rows(name: str, array: npt.NDArray[Any], fmt: Format, ndim: int) -> None:
    """Raise ShapeError unless `array` has `ndim` axes, fmt.dtype and contiguous aligned rows (axes before
    are free).
    """
    check_dtype(name, array, fmt)
    if array.ndim != ndim or array.shape[-1] < 1:
        raise ShapeError(f"{name} must have {ndim} axes, the last at least 1 long, got shape {array.shape}")
    strides_ok = array.size == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize
    if not strides_ok or not array.flags.aligned or min(array.strides) < 0:
        raise ShapeError(
            f"{name} must have contiguous, aligned rows, got strides {array.strides}; pass np.ascontiguousarray({name})"
        )


def check_queries(name: str, array: npt.NDArray[Any], ndim: int) -> npt.NDArray[np.float32]:
    """`array` as C-contiguous float32 with `ndim` axes (copied if strided); raises ShapeError for another
    dtype.
    """
    check_dtype(name, array, Format.FLOAT32)
    if array.ndim != ndim:
        raise ShapeError(f"{name} must have {ndim} axes, got shape {array.shape}")
    return np.require(array, requirements=("C", "A"))


def kernel_view(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[Any]:
    """`array` as kernels take it: float16 bits as int16, everything else unchanged. No copy."""
    return array.view(np.int16) if fmt is Format.FLOAT16 else array
