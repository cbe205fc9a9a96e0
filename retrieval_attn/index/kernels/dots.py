"""What Numba kernels read stored rows with: widening loads, inner products of tiles, prefetch.

Inside kernels the dtype alone says the storage format (float32; uint16 = bfloat16; int16 = float16; int8 = steps
of a size that follows the row, see `formats.kernel_view`), so every load is resolved at compile time. Explicit
vectors, because LLVM keeps plain loops to half the width of AVX-512; they lower to what the machine has.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic

from retrieval_attn.index.formats import SCALE_BYTES

intrinsic: Any = _numba_intrinsic  # untyped: callers do not pass the typing context that the definition has

LANES = 16
"""Elements of a row that are taken per step; what is left over at its end is taken one by one."""
TILE_QUERIES = 4
TILE_KEYS = 4
CACHE_LINE = 64
L1, L2 = 3, 2
"""Caches that lines are asked for into, as LLVM numbers them. A core waits for more lines at once on their way to its
second cache than to its first: rows here and there come twice as fast so (AMD, 157 rows of 256 bytes: 37 and 17 to 27
ns each; Intel 43 and 36)."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_STORED = (types.float32, types.uint16, types.int16, types.int8)


def _is_rows(array: Any) -> bool:
    return isinstance(array, types.Array) and array.ndim == 2 and array.dtype in _STORED


def _is_float_rows(array: Any) -> bool:
    return _is_rows(array) and array.dtype == types.float32


def _stored_ir(stored: Any) -> tuple[Any, int]:
    """LLVM type and bytes of a stored element."""
    if stored == types.float32:
        return _FLOAT, 4
    return (ir.IntType(8), 1) if stored == types.int8 else (ir.IntType(16), 2)


def _row_scale(builder: Any, stored: Any, row: Any, width: Any) -> Any:
    """Emit the float32 behind the `width` elements of the row at address `row`; None if the format has none."""
    if stored != types.int8:
        return None
    return builder.load(builder.inttoptr(builder.add(row, width), _FLOAT.as_pointer()), align=1)


def _widen(builder: Any, value: Any, stored: Any, lanes: int) -> Any:
    """Emit stored bits -> float32, for a scalar (lanes 0) or a vector."""

    def shaped(scalar: Any) -> Any:
        return ir.VectorType(scalar, lanes) if lanes else scalar

    if stored == types.float32:
        return value
    if stored == types.int16:
        return builder.fpext(builder.bitcast(value, shaped(ir.HalfType())), shaped(_FLOAT))
    if stored == types.int8:
        return builder.sitofp(builder.sext(value, shaped(_INT32)), shaped(_FLOAT))
    wide = shaped(_INT32)
    shift = ir.Constant(wide, [16] * lanes if lanes else 16)
    return builder.bitcast(builder.shl(builder.zext(value, wide), shift), shaped(_FLOAT))


@intrinsic
def widen(typingctx, value):
    """One stored element (float32, uint16 = bfloat16 bits, int16 = float16 bits, int8 = steps) as float32.

    Steps are to be multiplied by `scale_of` their row.
    """
    if value not in _STORED:
        return None

    def codegen(context, builder, signature, args):
        return _widen(builder, args[0], value, 0)

    return types.float32(value), codegen


@intrinsic
def bits_to_float(typingctx, bits):
    """int32 -> the float32 of the same bits."""
    if bits != types.int32:
        return None
    return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def float_to_bits(typingctx, value):
    """float32 -> the int32 of the same bits."""
    if value != types.float32:
        return None
    return types.int32(value), lambda context, builder, signature, args: builder.bitcast(args[0], _INT32)


def _row_address(context: Any, builder: Any, array_type: Any, value: Any, row: Any) -> Any:
    """Emit the address of row `row` of a two-axis array, by its real stride, in 64-bit arithmetic."""
    array = context.make_array(array_type)(context, builder, value)
    stride = builder.extract_value(array.strides, 0)
    return builder.add(builder.ptrtoint(array.data, _INT64), builder.mul(row, stride))


@intrinsic
def scale_of(typingctx, array, row):
    """Return the factor of the widened elements of array[row] (two axes): float32, 1 except for int8."""
    if not _is_rows(array):
        return None

    def codegen(context, builder, signature, args):
        if array.dtype != types.int8:
            return ir.Constant(_FLOAT, 1.0)
        address = _row_address(context, builder, array, args[0], args[1])
        width = builder.extract_value(context.make_array(array)(context, builder, args[0]).shape, 1)
        return _row_scale(builder, array.dtype, address, width)

    return types.float32(array, types.int64), codegen


def emit_prefetch(builder: Any, address: Any, cache: int) -> None:
    """Emit a request for the cache line at an address (int64) into L1 or L2. It never faults and changes nothing."""
    pointer = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), _INT32(0), _INT32(cache), _INT32(1)])


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """Emit the value of an LLVM type at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _offset(builder: Any, address: Any, elements: Any, size: int) -> Any:
    return builder.add(address, builder.mul(elements, ir.Constant(_INT64, size)))


def _fold(builder: Any, sums: list[Any]) -> Any:
    """Emit the sum over the lanes of each of 1, 2, 4, 8 or 16 vectors: lane i of the result is sums[i]'s.

    Always adds lane i to lane i + 8, then + 4, + 2, + 1: a sum is bit-identical whichever vectors it is
    folded with, so that a score does not depend on how keys fall into tiles.
    """
    return folded(builder, sums, builder.fadd)[0]


def folded(builder: Any, sums: list[Any], add: Callable[[Any, Any], Any]) -> list[Any]:
    """Emit the sums over the lanes of a power of two of vectors, in their order, in as few vectors as hold them."""
    lanes = sums[0].type.count
    width = lanes  # of a group: what is left of one sum
    while width > 1:
        half = width // 2
        low = [source + g * width + i for source in (0, lanes) for g in range(lanes // width) for i in range(half)]
        high = [lane + half for lane in low]
        pairs = zip(sums[::2], sums[1::2], strict=True) if len(sums) > 1 else [(sums[0], sums[0])]
        sums = [add(_shuffled(builder, a, b, low), _shuffled(builder, a, b, high)) for a, b in pairs]
        width = half
    return sums


def _shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _spread(builder: Any, scalar: Any, lanes: int = LANES) -> Any:
    """Emit a vector of copies of a number."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_INT32, 0))
    return _shuffled(builder, first, first, [0] * lanes)


def _muladd(builder: Any) -> Any:
    signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{LANES}f32")


def _products(builder: Any, query_rows: list[Any], key_rows: list[Any], stored: Any, width: Any) -> Any:
    """Emit the inner products of all rows at the given addresses: query-major in the lanes of one vector.

    Over width // LANES * LANES elements; times the rows' scales, if the format has some behind all `width`.
    """
    stored_ir, size = _stored_ir(stored)
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    slots = [cgutils.alloca_once(builder, _VECTOR) for _ in range(len(query_rows) * len(key_rows))]
    for slot in slots:
        builder.store(zero, slot)
    muladd = _muladd(builder)
    lanes = ir.Constant(_INT64, LANES)
    with cgutils.for_range(builder, builder.udiv(width, lanes)) as loop:
        element = builder.mul(loop.index, lanes)
        keys = []
        for row in key_rows:
            pointer = builder.inttoptr(
                _offset(builder, row, element, size), ir.VectorType(stored_ir, LANES).as_pointer()
            )
            keys.append(_widen(builder, builder.load(pointer, align=size), stored, LANES))
        for i, row in enumerate(query_rows):
            pointer = builder.inttoptr(_offset(builder, row, element, 4), _VECTOR.as_pointer())
            query = builder.load(pointer, align=4)
            for j, key in enumerate(keys):
                slot = slots[i * len(keys) + j]
                builder.store(builder.call(muladd, [query, key, builder.load(slot)]), slot)
    products = _fold(builder, [builder.load(slot) for slot in slots])
    scales = _scale_lanes(builder, key_rows, stored, width)
    return products if scales is None else builder.fmul(products, scales)


def _scale_lanes(builder: Any, rows: list[Any], stored: Any, width: Any) -> Any:
    """Emit a vector whose lane i is the scale of row i % len(rows); None if the format has none."""
    scales = [_row_scale(builder, stored, row, width) for row in rows]
    if scales[0] is None:
        return None
    vector = ir.Constant(_VECTOR, ir.Undefined)
    for lane, scale in enumerate(scales):
        vector = builder.insert_element(vector, scale, ir.Constant(_INT32, lane))
    return _shuffled(builder, vector, vector, [lane % len(rows) for lane in range(LANES)])


def _tile_products(num_keys: int) -> Any:
    """Return the intrinsic out[i, column + j] = queries[first + i] . keys[row + j] for i < 4, j < num_keys.

    Over width // LANES * LANES. The numbers of keys give bit-identical products.
    """

    def codegen(context, builder, signature, args):
        queries, first, keys, row, width, out, column = args
        query_type, _, key_type, _, _, out_type, _ = signature.args

        def rows(array_type, array, start, count):
            numbers = [builder.add(start, ir.Constant(_INT64, i)) for i in range(count)]
            return [_row_address(context, builder, array_type, array, number) for number in numbers]

        query_rows = rows(query_type, queries, first, TILE_QUERIES)
        products = _products(builder, query_rows, rows(key_type, keys, row, num_keys), key_type.dtype, width)
        pointer_type = ir.VectorType(_FLOAT, num_keys).as_pointer()
        for i, address in enumerate(rows(out_type, out, ir.Constant(_INT64, 0), TILE_QUERIES)):
            pointer = builder.inttoptr(_offset(builder, address, column, 4), pointer_type)
            lanes = list(range(i * num_keys, (i + 1) * num_keys))
            builder.store(_shuffled(builder, products, products, lanes), pointer, align=4)
        return context.get_dummy_value()

    def tile(typingctx, queries, first, keys, row, width, out, column):
        if not (_is_float_rows(queries) and _is_rows(keys) and _is_float_rows(out)):
            return None
        return types.void(queries, types.int64, keys, types.int64, types.int64, out, types.int64), codegen

    return intrinsic(tile)


_dot_4x4, _dot_4x1 = _tile_products(TILE_KEYS), _tile_products(1)


@intrinsic
def _dot_1x1(typingctx, queries, first, keys, row, width):
    """queries[first] . keys[row] over width // LANES * LANES, bit-identical to what _dot_4x4 gives."""
    if not (_is_float_rows(queries) and _is_rows(keys)):
        return None

    def codegen(context, builder, signature, args):
        queries, first, keys, row, width = args
        query_row = _row_address(context, builder, signature.args[0], queries, first)
        key_row = _row_address(context, builder, signature.args[2], keys, row)
        products = _products(builder, [query_row], [key_row], signature.args[2].dtype, width)
        return builder.extract_element(products, ir.Constant(_INT32, 0))

    return types.float32(queries, types.int64, keys, types.int64, types.int64), codegen


@njit(nogil=True, cache=True, fastmath={"contract"})
def dot(queries, query, keys, row):
    """Inner product of queries[query] (float32) and keys[row] (stored format), float32."""
    dim = keys.shape[1]
    total = _dot_1x1(queries, query, keys, row, dim)
    scale = scale_of(keys, row)
    for j in range(dim // LANES * LANES, dim):
        total += queries[query, j] * (widen(keys[row, j]) * scale)
    return total


@njit(nogil=True, cache=True, fastmath={"contract"})
def score_tile(queries, first, keys, start, size, out):
    """out[i, t] = queries[first + i] . keys[start + t] for i < 4, t < size.

    queries (at least first + 4, d) float32, keys (n, d) stored format, out (4, at least size) float32; rows
    contiguous. A score is bit-identical wherever the key falls in a tile.
    """
    dim = keys.shape[1]
    whole = size // TILE_KEYS * TILE_KEYS
    for t in range(0, whole, TILE_KEYS):
        _dot_4x4(queries, first, keys, start + t, dim, out, t)
    for t in range(whole, size):
        _dot_4x1(queries, first, keys, start + t, dim, out, t)
    for j in range(dim // LANES * LANES, dim):
        for t in range(size):
            key = widen(keys[start + t, j]) * scale_of(keys, start + t)
            for i in range(TILE_QUERIES):
                out[i, t] += queries[first + i, j] * key


@intrinsic
def _weigh(typingctx, weights, values, start, size, sums, column):
    """sums[i, column:][:LANES] += weights[i, t] * values[start + t, column:][:LANES], i < 4, t < size."""
    if not (_is_float_rows(weights) and _is_rows(values) and _is_float_rows(sums)):
        return None
    stored = values.dtype
    stored_ir, item = _stored_ir(stored)

    def codegen(context, builder, signature, args):
        weights, values, start, size, sums, column = args
        width = builder.extract_value(context.make_array(signature.args[1])(context, builder, values).shape, 1)
        weights_type, values_type, _, _, sums_type, _ = signature.args
        numbers = [ir.Constant(_INT64, i) for i in range(TILE_QUERIES)]
        weight_rows = [_row_address(context, builder, weights_type, weights, i) for i in numbers]
        pointers, slots = [], []
        for i in numbers:
            address = _offset(builder, _row_address(context, builder, sums_type, sums, i), column, 4)
            pointers.append(builder.inttoptr(address, _VECTOR.as_pointer()))
            slots.append(cgutils.alloca_once(builder, _VECTOR))
            builder.store(builder.load(pointers[-1], align=4), slots[-1])
        muladd = _muladd(builder)
        with cgutils.for_range(builder, size) as loop:
            row = _row_address(context, builder, values_type, values, builder.add(start, loop.index))
            pointer = builder.inttoptr(
                _offset(builder, row, column, item), ir.VectorType(stored_ir, LANES).as_pointer()
            )
            value = _widen(builder, builder.load(pointer, align=item), stored, LANES)
            scale = _row_scale(builder, stored, row, width)
            if scale is not None:
                value = builder.fmul(value, _spread(builder, scale))
            for weight_row, slot in zip(weight_rows, slots, strict=True):
                address = _offset(builder, weight_row, loop.index, 4)
                weight = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()))
                spread = _spread(builder, weight)
                builder.store(builder.call(muladd, [spread, value, builder.load(slot)]), slot)
        for pointer, slot in zip(pointers, slots, strict=True):
            builder.store(builder.load(slot), pointer, align=4)
        return context.get_dummy_value()

    return types.void(weights, values, types.int64, types.int64, sums, types.int64), codegen


@njit(nogil=True, cache=True, fastmath={"contract"})
def weigh_tile(weights, values, start, size, sums):
    """sums[i] += weights[i, t] * values[start + t] for i < 4, summed over t < size in that order.

    weights (4, at least size) float32, values (n, dv) stored format, sums (4, dv) float32; rows contiguous.
    """
    value_dim = values.shape[1]
    whole = value_dim // LANES * LANES
    for column in range(0, whole, LANES):
        _weigh(weights, values, start, size, sums, column)
    for j in range(whole, value_dim):
        for t in range(size):
            value = widen(values[start + t, j]) * scale_of(values, start + t)
            for i in range(TILE_QUERIES):
                sums[i, j] += weights[i, t] * value


@intrinsic
def candidates(typingctx, scores, row, column, bound):
    """Bit i of the result: not scores[row, column + i] < bound, for i < LANES (a NaN sets it)."""
    if not (_is_float_rows(scores) and bound == types.float32):
        return None

    def codegen(context, builder, signature, args):
        scores, row, column, bound = args
        address = _row_address(context, builder, signature.args[0], scores, row)
        pointer = builder.inttoptr(_offset(builder, address, column, 4), _VECTOR.as_pointer())
        keep = builder.fcmp_unordered(">=", builder.load(pointer, align=4), _spread(builder, bound))
        return builder.zext(builder.bitcast(keep, ir.IntType(LANES)), _INT64)

    return types.int64(scores, types.int64, types.int64, types.float32), codegen


@intrinsic
def lowest_bit(typingctx, bits):
    """Position of the lowest bit set in int64 `bits`, which must not be 0."""
    if bits != types.int64:
        return None
    return types.int64(bits), lambda context, builder, signature, args: builder.cttz(
        args[0], ir.Constant(ir.IntType(1), 1)
    )


@intrinsic
def prefetch_row(typingctx, array, row):
    """Ask the cache for every line of array[row] (two axes). Never faults, changes nothing.

    Rows of int8 end with their step; the last line of one may be left to the row behind.
    """
    if not (isinstance(array, types.Array) and array.ndim == 2):
        return None
    size = array.dtype.bitwidth // 8
    behind = SCALE_BYTES if array.dtype == types.int8 else 0

    def codegen(context, builder, signature, args):
        base = _row_address(context, builder, array, args[0], args[1])
        shape = context.make_array(array)(context, builder, args[0]).shape
        row_bytes = builder.mul(builder.extract_value(shape, 1), ir.Constant(_INT64, size))
        lines = builder.udiv(
            builder.add(row_bytes, ir.Constant(_INT64, behind + CACHE_LINE - 1)), ir.Constant(_INT64, CACHE_LINE)
        )
        with cgutils.for_range(builder, lines) as loop:
            emit_prefetch(builder, _offset(builder, base, loop.index, CACHE_LINE), L2)
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


AHEAD = 40
"""Rows that are asked for before they are scored: a row comes from memory, which takes as long as scoring dozens."""


def load_word(builder: Any, array: Any, index: Any) -> Any:
    """Emit the int64 at an index of the words at an address."""
    address = builder.add(array, builder.mul(index, ir.Constant(_INT64, 8)))
    return builder.load(builder.inttoptr(address, _INT64.as_pointer()))


@intrinsic
def _dot_four(typingctx, queries, query, keys, rows, width, out):
    """Write queries[query] . keys[rows[i]], i < 4, to address `out`; rows: address of int64. Bit-identical to `dot`."""
    if not (_is_float_rows(queries) and _is_rows(keys)):
        return None

    def codegen(context, builder, signature, args):
        queries_type, _, keys_type, _, _, _ = signature.args
        query_row = _row_address(context, builder, queries_type, args[0], args[1])
        numbers = [load_word(builder, args[3], ir.Constant(_INT64, i)) for i in range(4)]
        key_rows = [_row_address(context, builder, keys_type, args[2], number) for number in numbers]
        products = _products(builder, [query_row], key_rows, keys_type.dtype, args[4])
        first = _shuffled(builder, products, products, list(range(4)))
        pointer = builder.inttoptr(args[5], ir.VectorType(_FLOAT, 4).as_pointer())
        builder.store(first, pointer, align=4)
        return context.get_dummy_value()

    return types.void(queries, types.int64, keys, types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True, fastmath={"contract"})
def score_gathered(queries, query, keys, rows, count, scores):
    """scores[i] = queries[query] . keys[rows[i]] for i < count: bit for bit what `dot` gives.

    rows int64 and scores float32, C-contiguous, at least `count` long.
    """
    dim = keys.shape[1]
    row_list, target = rows.ctypes.data, scores.ctypes.data
    for i in range(min(AHEAD, count)):
        prefetch_row(keys, rows[i])
    fours = count // 4 * 4
    for i in range(0, fours, 4):
        for ahead in range(i + AHEAD, min(i + AHEAD + 4, count)):
            prefetch_row(keys, rows[ahead])
        _dot_four(queries, query, keys, row_list + 8 * i, dim, target + 4 * i)
        for j in range(dim // LANES * LANES, dim):
            for t in range(i, i + 4):
                scores[t] += queries[query, j] * (widen(keys[rows[t], j]) * scale_of(keys, rows[t]))
    for i in range(fours, count):
        scores[i] = dot(queries, query, keys, rows[i])
