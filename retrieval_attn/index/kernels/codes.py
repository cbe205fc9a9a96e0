"""Keys as one byte per channel: a quarter to half of the stored bytes, and integer inner products.

key ~ mean + scale * (code - 128) with one mean and one scale per channel, so that a code row is exactly head_dim
bytes (two cache lines at 128) and the scale folds into the query: q . k ~ offset + step * sum(q8 * code). The
constants do not change the ranking of keys for one query. Query numbers are 8 bits (one plane of int8) or 15 (two).

What uses codes ranks by them and scores the best again with the stored keys.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.errors import InputDataError, NotFiniteError, ShapeError
from retrieval_attn.index.formats import Format, check_queries, check_rows, kernel_view
from retrieval_attn.index.kernels.dots import _row_address, folded, intrinsic, scale_of, widen
from retrieval_attn.index.kernels.products import HAS_VNNI, add_products
from retrieval_attn.index.memory import aligned_empty, one_layout, usable

STEP = 64
"""Codes of a row that are taken per step: a row is padded to a multiple."""
ZERO_CODE = 128
"""The code of a channel's mean, and of padding."""
MAX_CODE = 127
"""Largest absolute value of a query number of one plane, and of code - 128 when keys are first encoded."""
PLANE_BASE = 128
"""A query number of two planes is PLANE_BASE * first + second."""
MAX_DIM = 65536
"""Above it a sum of one plane could: 127 * 255 * 65536 < 2**31."""

_LANES = 16
_INT8 = ir.IntType(8)
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_BYTES = ir.VectorType(_INT8, STEP)
_SUMS = ir.VectorType(_INT32, _LANES)


class Codes(NamedTuple):
    """Coded keys of one key-value head.

    codes: (capacity, width) uint8, C-contiguous, begun on a cache line; width is head_dim rounded up to 64, padding
    bytes are 128. Its owner knows how many rows are written. mean, scale: (head_dim,) float32; a channel in which
    all keys are equal has scale 0.
    """

    codes: npt.NDArray[np.uint8]
    mean: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.codes.nbytes + self.mean.nbytes + self.scale.nbytes)


class CodedQueries(NamedTuple):
    """planes: (n, 1, width) int8; step, offset: (n,) float32, so that q . key ~ offset + step * dot_u8.

    A query that is not finite has zero planes, step 0 and offset NaN: every key gets the same integer, and NaN as
    its score.
    """

    planes: npt.NDArray[np.int8]
    step: npt.NDArray[np.float32]
    offset: npt.NDArray[np.float32]


def code_width(head_dim: int) -> int:
    """Bytes of a code row: head_dim rounded up to a multiple of 64."""
    return -(-head_dim // STEP) * STEP


def encode_keys(keys: npt.NDArray[Any], fmt: Format, capacity: int | None = None) -> Codes:
    """Codes of keys (n, head_dim) stored in `fmt`, with room for `capacity` (None: n) of them.

    mean and scale come from these keys: the largest distance from the mean is 127 steps. n may be 0: all zero,
    and keys encoded later all get the code 128. Raises ShapeError for another shape or dtype, or keys that are not
    finite (their number and the first are named).
    """
    check_rows("keys", keys, fmt, 2)
    stored = one_layout(kernel_view(keys, fmt)[None])
    length, dim = len(keys), fmt.dim_of(keys)
    if dim > MAX_DIM:
        raise ShapeError(f"keys of at most {MAX_DIM} elements can be coded, got {dim}; use index='flat' without codes")
    mean, largest, bad = _channel_statistics(stored, length)
    check_finite(bad, 0)
    codes = Codes(
        aligned_empty((max(length, capacity or 0), code_width(dim)), np.uint8), mean, (largest / MAX_CODE).astype("f4")
    )
    _encode_rows(stored, length, codes.codes, 0, codes.mean, codes.scale)
    return codes


def encode_more(codes: Codes, keys: npt.NDArray[Any], fmt: Format, start: int) -> Codes:
    """Write codes of keys (n, head_dim) to rows [start, start + n) with the mean and scale that `codes` has.

    Values beyond their range are clipped to it. Returns `codes`, or one with a larger array if there is no room
    (rows before start are copied). Raises ShapeError as `encode_keys` does, before anything is written.
    """
    check_rows("keys", keys, fmt, 2)
    length, dim = len(keys), fmt.dim_of(keys)
    if dim != len(codes.mean):
        raise ShapeError(f"keys must be (n, {len(codes.mean)}) as the codes are, got {(length, dim)}")
    if not 0 <= start <= len(codes.codes):
        raise ShapeError(f"start={start} must be from 0 to {len(codes.codes)}, the number of coded keys")
    stored = one_layout(kernel_view(keys, fmt)[None])
    check_finite(_channel_statistics(stored, length)[2], start)
    if start + length > len(codes.codes):
        grown = aligned_empty((max(start + length, start + start // 2, 64), codes.codes.shape[1]), np.uint8)
        grown[:start] = codes.codes[:start]
        codes = codes._replace(codes=grown)
    _encode_rows(stored, length, codes.codes, start, codes.mean, codes.scale)
    return codes


def extend_codes(
    codes: Codes,
    keys: npt.NDArray[Any],
    fmt: Format,
    start: int,
    measured: int,
    together: Callable[[], npt.NDArray[Any]],
) -> tuple[Codes, int]:
    """`encode_more`, or all keys coded again if the old range no longer fits: codes, and keys it was taken from.

    measured: how many keys the range of `codes` was taken from. A new range is taken once there are twice as many, and
    for keys that may lie twice as far out as any before (coarser steps for all, but none is lost). together: returns
    the keys [0, start + n). Raises ShapeError.
    """
    total = start + len(keys)
    stored = one_layout(kernel_view(keys, fmt)[None])
    mean, largest, bad = _channel_statistics(stored, len(keys))
    check_finite(bad, start)
    distance = np.abs(mean.astype(np.float64) - codes.mean) + largest
    far = len(keys) and bool((distance > 2 * MAX_CODE * codes.scale.astype(np.float64)).any())
    if len(keys) and (far or total >= 2 * measured):
        return encode_keys(together(), fmt, capacity=total + total // 4), total
    return encode_more(codes, keys, fmt, start), measured


def codes_from_state(state: Mapping[str, Any], length: int, head_dim: int, trusted: bool = False) -> Codes:
    """Codes from the arrays "rows", "mean" and "scale" of a saved state, for `length` keys; rows may be read-only.

    Rows are copied unless they are trusted (`KeyIndex.from_state`): an insert makes room for more elsewhere. Raises
    InputDataError for arrays that are not such codes.
    """
    shapes = {"rows": (np.uint8, (length, code_width(head_dim))), "mean": (np.float32, (head_dim,))}
    shapes["scale"] = shapes["mean"]
    arrays: list[npt.NDArray[Any]] = []
    for name, (dtype, shape) in shapes.items():
        array = state.get(name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "nothing"
            raise InputDataError(
                f"{name} of the codes must be {np.dtype(dtype)} {shape}, got {given}; build the index again"
            )
        if not np.isfinite(array).all() or (name == "scale" and (array < 0).any()):
            raise InputDataError(f"{name} of the codes must be finite numbers, scale >= 0; build the index again")
        arrays.append(array)
    rows, mean, scale = arrays
    if trusted:
        return Codes(usable(rows), np.array(mean), np.array(scale))
    copied = aligned_empty(rows.shape, np.uint8)
    copied[:] = rows
    return Codes(copied, np.array(mean), np.array(scale))


def encode_query(queries: npt.NDArray[np.float32], codes: Codes) -> CodedQueries:
    """Queries (n, head_dim) float32 as integers of 8 bits against `codes`. Raises ShapeError."""
    queries = check_queries("queries", queries, 2)
    width = codes.codes.shape[1]
    if queries.shape[1] != len(codes.mean):
        raise ShapeError(f"queries must be (n, {len(codes.mean)}) as the codes are, got {queries.shape}")
    coded = CodedQueries(
        aligned_empty((len(queries), 1, width), np.int8),
        np.empty(len(queries), np.float32),
        np.empty(len(queries), np.float32),
    )
    encode_query_rows(queries, codes.mean, codes.scale, *coded)
    return coded


def check_finite(bad: tuple[int, int], start: int) -> None:
    """Raise NotFiniteError if there are bad = (how many, the first of them) rows of those with ids from `start` on."""
    count, first = bad
    if count:
        raise NotFiniteError(
            f"keys to be coded must be finite, got {count} with NaN or infinity, the first at id {start + first}; "
            "remove them or use index='flat' without codes"
        )


@njit(nogil=True, cache=True)
def _channel_statistics(keys, length):
    """mean float32, largest distance from it float64 (head_dim,), and (number, first) of rows that are not finite.

    Sums are taken in float64, in order: the same on every machine and at every thread count.
    """
    rows = keys[0]
    dim = rows.shape[1]
    total = np.zeros(dim, np.float64)
    low = np.full(dim, np.inf, np.float64)
    high = np.full(dim, -np.inf, np.float64)
    bad = 0
    first = -1
    for i in range(length):
        finite = np.float32(0.0)
        step = scale_of(rows, i)
        for j in range(dim):
            key = widen(rows[i, j]) * step
            finite += key * np.float32(0.0)
            total[j] += np.float64(key)
            low[j] = min(low[j], np.float64(key))
            high[j] = max(high[j], np.float64(key))
        if finite != finite:
            bad += 1
            if first < 0:
                first = i
    mean = np.zeros(dim, np.float32)
    largest = np.zeros(dim, np.float64)
    if length:
        for j in range(dim):
            mean[j] = total[j] / length
            largest[j] = max(high[j] - np.float64(mean[j]), np.float64(mean[j]) - low[j])
    return mean, largest, (bad, first)


@njit(nogil=True, cache=True)
def _encode_rows(keys, length, codes, start, mean, scale):
    """codes[start + i] = coded keys[0, i] for i < length; keys (heads, rows, head_dim) stored format."""
    rows = keys[0]
    dim = rows.shape[1]
    width = codes.shape[1]
    center = np.empty(dim, np.float64)  # float64: the distance of two float32 keys may be beyond float32
    inverse = np.empty(dim, np.float64)
    for j in range(dim):
        center[j] = mean[j]
        inverse[j] = 1.0 / np.float64(scale[j]) if scale[j] > 0 else 0.0
    for i in range(length):
        row = codes[start + i]
        step = scale_of(rows, i)
        for j in range(dim):
            steps = np.rint((np.float64(widen(rows[i, j]) * step) - center[j]) * inverse[j])
            row[j] = np.uint8(np.int32(min(max(steps, -128.0), 127.0)) + np.int32(ZERO_CODE))
        for j in range(dim, width):
            row[j] = ZERO_CODE


@njit(nogil=True, cache=True)
def encode_query_rows(queries, mean, scale, planes, step, offset):
    """Fill planes (n, 1, width) int8, step and offset (n,) float32 from queries (n, head_dim) float32.

    What `encode_query` does, for callers that bring the arrays: allocates nothing.
    """
    dim = queries.shape[1]
    most = np.float64(MAX_CODE)
    for i in range(len(queries)):
        largest = 0.0
        constant = 0.0
        finite = np.float32(0.0)
        for j in range(dim):
            finite += queries[i, j] * np.float32(0.0)
            largest = max(largest, abs(np.float64(queries[i, j]) * np.float64(scale[j])))
            constant += np.float64(queries[i, j]) * np.float64(mean[j])
        planes[i] = 0
        step[i] = 0.0
        offset[i] = constant
        if finite != finite:
            offset[i] = np.nan
            continue
        if largest == 0.0:
            continue
        total = 0.0
        for j in range(dim):
            number = np.int32(np.rint(np.float64(queries[i, j]) * np.float64(scale[j]) / largest * most))
            total += number
            planes[i, 0, j] = number
        step[i] = largest / most
        offset[i] = constant - ZERO_CODE * (largest / most) * total


def _is_codes(array: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 2 and array.dtype == types.uint8


def _is_planes(array: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 3 and array.dtype == types.int8


def _plane_address(context: Any, builder: Any, array_type: Any, value: Any, query: Any, plane: int) -> Any:
    """Emit the address of plane `plane` of query `query`."""
    array = context.make_array(array_type)(context, builder, value)
    start = builder.mul(query, builder.extract_value(array.strides, 0))
    inner = builder.mul(ir.Constant(_INT64, plane), builder.extract_value(array.strides, 1))
    return builder.add(builder.ptrtoint(array.data, _INT64), builder.add(start, inner))


def _fold(builder: Any, sums: list[Any]) -> Any:
    """Emit the sum over the lanes of each of 1, 2, 4, 8 or 16 vectors: lane i of the result is sums[i]'s."""
    return folded(builder, sums, builder.add)[0]


def _products(builder: Any, queries: list[Any], rows: list[Any], width: Any, vnni: bool, signed: bool = False) -> Any:
    """Emit the sums of products of all rows at the given addresses, query-major in the lanes of one vector.

    signed: rows are int8, of any width: 128 is added to each of their numbers.
    """
    zero = ir.Constant(_SUMS, [0] * _LANES)
    slots = [cgutils.alloca_once(builder, _SUMS) for _ in range(len(queries) * len(rows))]
    for slot in slots:
        builder.store(zero, slot)

    def load(address: Any, at: Any) -> Any:
        return builder.load(builder.inttoptr(builder.add(address, at), _BYTES.as_pointer()), align=1)

    def add(codes: list[Any], at: Any) -> None:
        if signed:
            codes = [builder.xor(code, ir.Constant(_BYTES, [ZERO_CODE] * STEP)) for code in codes]
        for i, query in enumerate(queries):
            numbers = load(query, at)
            for j, code in enumerate(codes):
                slot = slots[i * len(codes) + j]
                builder.store(add_products(builder, builder.load(slot), code, numbers, vnni), slot)

    with cgutils.for_range(builder, builder.udiv(width, ir.Constant(_INT64, STEP))) as loop:
        at = builder.mul(loop.index, ir.Constant(_INT64, STEP))
        add([load(row, at) for row in rows], at)
    if signed:
        left = builder.urem(width, ir.Constant(_INT64, STEP))
        with builder.if_then(builder.icmp_unsigned("!=", left, ir.Constant(_INT64, 0)), likely=False):
            at = builder.sub(width, left)
            add([_load_part(builder, builder.add(row, at), left) for row in rows], at)
    return _fold(builder, [builder.load(slot) for slot in slots])


def _load_part(builder: Any, address: Any, count: Any) -> Any:
    """Emit the `count` < 64 bytes at an address as a vector, zeros behind them; nothing behind them is read."""
    room = cgutils.alloca_once(builder, _BYTES)
    builder.store(ir.Constant(_BYTES, [0] * STEP), room)
    into = builder.ptrtoint(room, _INT64)
    done = ir.Constant(_INT64, 0)
    for kind, size in ((ir.VectorType(_INT8, _LANES), _LANES), (_INT8, 1)):
        number = builder.udiv(builder.sub(count, done), ir.Constant(_INT64, size))
        with cgutils.for_range(builder, number) as loop:
            at = builder.add(done, builder.mul(loop.index, ir.Constant(_INT64, size)))
            source, target = (builder.inttoptr(builder.add(one, at), kind.as_pointer()) for one in (address, into))
            builder.store(builder.load(source, align=1), target, align=1)
        done = builder.add(done, builder.mul(number, ir.Constant(_INT64, size)))
    return builder.load(room)


def byte_products(planes: int, vnni: bool) -> Any:
    """Return the intrinsic codes[row] . planes[query, 0] over `width` bytes (a multiple of 64), int32.

    planes=2: 128 times that + codes[row] . planes[query, 1].
    """

    def codegen(context, builder, signature, args):
        codes, row, queries, query, width = args
        code_row = _row_address(context, builder, signature.args[0], codes, row)
        planes_at = [
            _plane_address(context, builder, signature.args[2], queries, query, plane) for plane in range(planes)
        ]
        sums = _products(builder, planes_at, [code_row], width, vnni)
        first = builder.extract_element(sums, ir.Constant(_INT32, 0))
        if planes == 1:
            return first
        second = builder.extract_element(sums, ir.Constant(_INT32, 1))
        return builder.add(builder.mul(first, ir.Constant(_INT32, PLANE_BASE)), second)

    def product(typingctx, codes, row, queries, query, width):
        if not (_is_codes(codes) and _is_planes(queries)):
            return None
        return types.int32(codes, types.int64, queries, types.int64, types.int64), codegen

    return intrinsic(product)


dot_u8_one, dot_u8_two = byte_products(1, HAS_VNNI), byte_products(2, HAS_VNNI)


@njit(nogil=True, cache=True, inline="always")
def dot_u8(codes, row, planes, query, width):
    """Inner product of code row `row` and coded query `query`, int32: q . k ~ offset + step * it.

    codes (rows, at least width) uint8; planes (queries, 1 or 2, at least width) int8; width a multiple of 64.
    Nothing is checked. Exact: the same on every processor.
    """
    if planes.shape[1] == 1:
        return dot_u8_one(codes, row, planes, query, width)
    return dot_u8_two(codes, row, planes, query, width)
