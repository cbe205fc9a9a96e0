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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

from retrieval_attn.errors import ConfigError, ShapeError

intrinsic: Any = _numba_intrinsic  # untyped: callers do not pass the typing context that the definition has

LANES = 16
"""Elements that `dot1` and `dot4` take per step; the rest of a row is the caller's (`dot_tail`)."""

CACHE_LINE = 64


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
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(
        np.uint16
    )  # rounding could carry a NaN into infinity
    return np.where(np.isnan(array), quiet, rounded)


def check_dtype(name: str, array: npt.NDArray[Any], fmt: Format) -> None:
    """Raise ShapeError unless `array` is a NumPy array of fmt.dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != fmt.dtype:
        given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ShapeError(
            f"{name} must be a NumPy array of {fmt.dtype} ({fmt.value}), got {given}; convert it first"
        )


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
            f"{name} must have contiguous, aligned rows, got strides {array.strides}; "
            f"pass np.ascontiguousarray({name})"
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


_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT64 = ir.IntType(64)


def _is_stored(array: types.Type, ndim: int) -> bool:
    return isinstance(array, types.Array) and array.ndim == ndim and array.dtype in _STORED


_STORED = (types.float32, types.uint16, types.int16)


def _widen_value(builder: Any, value: Any, stored: types.Type, lanes: int) -> Any:
    """Emit stored bits -> float32, for a scalar (lanes 0) or a vector."""

    def shaped(scalar: ir.Type) -> ir.Type:
        return ir.VectorType(scalar, lanes) if lanes else scalar

    if stored == types.float32:
        return value
    if stored == types.int16:
        return builder.fpext(builder.bitcast(value, shaped(ir.HalfType())), shaped(_FLOAT))
    wide = shaped(ir.IntType(32))
    shift = ir.Constant(wide, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), shaped(_FLOAT))


@intrinsic
def widen(typingctx: Any, value: Any) -> Any:
    """One stored element (float32, uint16 = bfloat16 bits, int16 = float16 bits) as float32."""
    if value not in _STORED:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widen_value(builder, args[0], value, 0)

    return types.float32(value), codegen


@intrinsic
def bits_to_float(typingctx: Any, bits: Any) -> Any:
    """int32 -> the float32 of the same bits."""
    if bits != types.int32:
        return None
    return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def float_to_bits(typingctx: Any, value: Any) -> Any:
    """float32 -> the int32 of the same bits."""
    if value != types.float32:
        return None
    return types.int32(value), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


def _row_address(context: Any, builder: Any, array_type: Any, value: Any, row: Any) -> Any:
    """Emit the address of row `row` of a two-axis array, by its real stride, in 64-bit arithmetic."""
    array = context.make_array(array_type)(context, builder, value)
    stride = builder.extract_value(array.strides, 0)
    return builder.add(builder.ptrtoint(array.data, _INT64), builder.mul(row, stride))


def _dot_codegen(num_queries: int, query_type: Any, key_type: Any) -> Any:
    stored = key_type.dtype
    stored_ir = {types.float32: _FLOAT}.get(stored, ir.IntType(16))
    key_vector = ir.VectorType(stored_ir, LANES)
    key_bytes = 4 if stored == types.float32 else 2

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries, first, keys, row, width = args
        one = ir.Constant(_INT64, 1)
        key_row = _row_address(context, builder, key_type, keys, row)
        query_rows = []
        for i in range(num_queries):
            query_rows.append(_row_address(context, builder, query_type, queries, first))
            first = builder.add(first, one) if i + 1 < num_queries else first
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(num_queries)]
        for slot in sums:
            builder.store(zero, slot)
        muladd_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        muladd = cgutils.get_or_insert_function(builder.module, muladd_type, f"llvm.fmuladd.v{LANES}f32")
        steps = builder.udiv(width, ir.Constant(_INT64, LANES))
        with cgutils.for_range(builder, steps) as loop:
            offset = builder.mul(loop.index, ir.Constant(_INT64, LANES))
            address = builder.add(key_row, builder.mul(offset, ir.Constant(_INT64, key_bytes)))
            pointer = builder.inttoptr(address, key_vector.as_pointer())
            key = _widen_value(builder, builder.load(pointer, align=key_bytes), stored, LANES)
            for query_row, slot in zip(query_rows, sums, strict=True):
                address = builder.add(query_row, builder.mul(offset, ir.Constant(_INT64, 4)))
                pointer = builder.inttoptr(address, _VECTOR.as_pointer())
                query = builder.load(pointer, align=4)
                builder.store(builder.call(muladd, [query, key, builder.load(slot)]), slot)
        reduce_type = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        reduce = cgutils.get_or_insert_function(builder.module, reduce_type, name)
        start = ir.Constant(_FLOAT, 0.0)
        # "reassoc" lets the lanes be added as a tree; the order depends on nothing but the machine
        totals = [builder.call(reduce, [start, builder.load(slot)], fastmath=("reassoc",)) for slot in sums]
        return totals[0] if num_queries == 1 else cgutils.pack_array(builder, totals)

    return codegen


@intrinsic
def dot1(typingctx: Any, queries: Any, first: Any, keys: Any, row: Any, width: Any) -> Any:
    """float32 inner product of queries[first] and keys[row] over its first width // LANES * LANES."""
    if not (_is_stored(queries, 2) and queries.dtype == types.float32 and _is_stored(keys, 2)):
        return None
    signature = types.float32(queries, types.int64, keys, types.int64, types.int64)
    return signature, _dot_codegen(1, queries, keys)


@intrinsic
def dot4(typingctx: Any, queries: Any, first: Any, keys: Any, row: Any, width: Any) -> Any:
    """Four inner products, queries[first .. first + 3] with keys[row], the key read and widened once (see
    `dot1`).

    Each of the four is bit-identical to dot1 of the same rows.
    """
    if not (_is_stored(queries, 2) and queries.dtype == types.float32 and _is_stored(keys, 2)):
        return None
    result = types.UniTuple(types.float32, 4)
    signature = result(queries, types.int64, keys, types.int64, types.int64)
    return signature, _dot_codegen(4, queries, keys)


@intrinsic
def prefetch_row(typingctx: Any, array: Any, row: Any) -> Any:
    """Ask the cache for every line of array[row] (two axes). Never faults, changes nothing."""
    if not _is_stored(array, 2):
        return None
    item_bytes = 4 if array.dtype == types.float32 else 2

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        name = "llvm.prefetch.p0"
        prefetch_type = ir.FunctionType(ir.VoidType(), [pointer_type, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, prefetch_type, name)
        base = _row_address(context, builder, array, args[0], args[1])
        shape = context.make_array(array)(context, builder, args[0]).shape
        row_bytes = builder.mul(builder.extract_value(shape, 1), ir.Constant(_INT64, item_bytes))
        line = ir.Constant(_INT64, CACHE_LINE)
        lines = builder.udiv(builder.add(row_bytes, ir.Constant(_INT64, CACHE_LINE - 1)), line)
        with cgutils.for_range(builder, lines) as loop:
            address = builder.add(base, builder.mul(loop.index, line))
            pointer = builder.inttoptr(address, pointer_type)
            builder.call(prefetch, [pointer, int32(0), int32(3), int32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen
