"""Softmax over a handful of keys and the weighted sum of their values, gathered row by row: compiled, for one query.

Nothing here allocates: scratch comes from the caller. Arithmetic is float32, the sum of weights float64.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.index.kernels.dots import (
    CACHE_LINE,
    L2,
    LANES,
    _load,
    _muladd,
    _offset,
    _row_scale,
    _spread,
    _stored_ir,
    _widen,
    bits_to_float,
    emit_prefetch,
    float_to_bits,
    load_word,
    widen,
)
from retrieval_attn.index.task.atomics import bytes_of_row, intrinsic

AHEAD = 32
"""Gathered rows that are asked for before their turn, see `dots.L2`."""
AHEAD_OF_SOFTMAX = 32
"""Rows of values that are asked for before the weights are computed."""
BLOCK = 32
"""Rows that are summed before the sum joins that of the rows before: errors grow with the blocks, not the rows."""
VECTORS = 8
"""Vectors of sums that are kept in registers while the rows pass by: 128 elements."""

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits: n * _LN2_HIGH is exact
_LN2_LOW = np.float32(0.693147180559945309 - 0.693359375)
_LEAST = np.float32(-87.0)  # exp below is under the smallest normal float32 times 2: taken as 0
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1.0 / math.factorial(n)) for n in range(2, 8))

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_STORED = (types.float32, types.uint16, types.int16, types.int8)


@njit(nogil=True, cache=True, inline="always")
def exp(x):
    """exp(x) for float32 x <= 0, to about 1 ulp; 0 below -87; NaN for NaN. Branch-free, so loops over it
    vectorise.
    """
    safe = x if x > _LEAST else _LEAST  # NaN too: converting it to int would be undefined
    n = np.int32(safe * _LOG2E - np.float32(0.5))
    r = safe - np.float32(n) * _LN2_HIGH
    r = r - np.float32(n) * _LN2_LOW
    p = _C6 + r * _C7  # Taylor series: |r| <= ln(2) / 2 leaves 5e-9
    p = _C5 + r * p
    p = _C4 + r * p
    p = _C3 + r * p
    p = _C2 + r * p
    p = np.float32(1.0) + r * (np.float32(1.0) + r * p)
    value = p * bits_to_float(np.int32((n + np.int32(127)) << np.int32(23)))
    zero = np.float32(0.0) if x == x else x
    return value if x > _LEAST else zero


@njit(nogil=True, cache=True)
def scale_scores(scores, count, scale, softcap):
    """Turn products scores[:count] into scores in place; returns the largest, or -inf without any.

    NaN: the result may be anything, the weights that follow are NaN all the same.
    """
    for i in range(count):
        scores[i] *= scale
    if softcap > 0:
        for i in range(count):
            scores[i] = softcap * np.float32(math.tanh(np.float32(scores[i] / softcap)))
    top = np.int32(-0x7F800001)  # the code of -inf
    for i in range(count):  # in integers, which LLVM takes several at a time: the maximum of floats it does not
        bits = float_to_bits(scores[i])
        code = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        top = max(top, code)
    return bits_to_float(np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(nogil=True, cache=True)
def exponentiate(scores, count, shift):
    """scores[:count] = exp(scores[:count] - shift), all scores <= shift."""
    for i in range(count):
        scores[i] = exp(scores[i] - shift)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def total_of(weights, count):
    """Sum of weights[:count] in float64."""
    total = 0.0
    for i in range(count):
        total += np.float64(weights[i])
    return total


@intrinsic
def prefetch_at(typingctx, address, nbytes):
    """Ask the cache for the lines of `nbytes` bytes from `address` on. Never faults, changes nothing."""

    def codegen(context, builder, signature, args):
        line = ir.Constant(_INT64, CACHE_LINE)
        lines = builder.udiv(builder.add(args[1], ir.Constant(_INT64, CACHE_LINE - 1)), line)
        with cgutils.for_range(builder, lines) as loop:
            emit_prefetch(builder, builder.add(args[0], builder.mul(loop.index, line)), L2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _weighted_sum(vectors: int) -> Any:
    """Return the intrinsic that sums vectors * LANES elements of weighted rows, whose format is the dtype of `like`.

    All arguments but the counts are addresses.
    """

    def codegen(context, builder, signature, args):
        _, rows, weights, count, left, skip, width, out = args
        stored = signature.args[0].dtype
        stored_ir, size = _stored_ir(stored)
        vector = ir.VectorType(stored_ir, LANES)
        muladd = _muladd(builder)
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        slots = [cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)]
        for slot in slots:
            builder.store(zero, slot)
        last = builder.sub(left, ir.Constant(_INT64, 1))
        with cgutils.for_range(builder, count) as loop:
            ahead = builder.add(loop.index, ir.Constant(_INT64, AHEAD))
            ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
            coming = load_word(builder, rows, ahead)
            lines = -(-vectors * LANES * size // CACHE_LINE) + (stored == types.int8)  # rows of int8 begin anywhere
            for line in range(lines):
                offset = builder.add(skip, ir.Constant(_INT64, line * CACHE_LINE))
                emit_prefetch(builder, builder.add(coming, offset), L2)
            start = load_word(builder, rows, loop.index)
            row = builder.add(start, skip)
            weight = _load(builder, _offset(builder, weights, loop.index, 4), _FLOAT, 4)
            scale = _row_scale(builder, stored, start, width)
            if scale is not None:
                weight = builder.fmul(weight, scale)
            spread = _spread(builder, weight)
            for i, slot in enumerate(slots):
                address = builder.add(row, ir.Constant(_INT64, i * LANES * size))
                element = _load(builder, address, vector, size)
                value = _widen(builder, element, stored, LANES)
                builder.store(builder.call(muladd, [spread, value, builder.load(slot)]), slot)
        for i, slot in enumerate(slots):
            address = builder.add(out, ir.Constant(_INT64, i * LANES * 4))
            pointer = builder.inttoptr(address, _VECTOR.as_pointer())
            builder.store(builder.fadd(builder.load(pointer, align=4), builder.load(slot)), pointer, align=4)
        return context.get_dummy_value()

    def weighted(typingctx, like, rows, weights, count, left, skip, width, out):
        if not (isinstance(like, types.Array) and like.dtype in _STORED):
            return None
        return types.void(like, *[types.int64] * 7), codegen

    return intrinsic(weighted)


_sum_wide, _sum_narrow = _weighted_sum(VECTORS), _weighted_sum(1)


@intrinsic
def _element(typingctx, like, address):
    """The element at `address`, as stored: of the dtype of `like`."""
    if not (isinstance(like, types.Array) and like.dtype in _STORED):
        return None

    def codegen(context, builder, signature, args):
        stored_ir, size = _stored_ir(like.dtype)
        return _load(builder, args[1], stored_ir, size)

    return like.dtype(like, types.int64), codegen


@intrinsic
def _scale_at(typingctx, like, row, width):
    """Return the factor of the elements of the row of `width` at address `row`: float32, 1 except for int8."""
    if not (isinstance(like, types.Array) and like.dtype in _STORED):
        return None

    def codegen(context, builder, signature, args):
        scale = _row_scale(builder, like.dtype, args[1], args[2])
        return ir.Constant(_FLOAT, 1.0) if scale is None else scale

    return types.float32(like, types.int64, types.int64), codegen


@njit(nogil=True, cache=True, fastmath={"contract"})
def sum_rows(like, rows, weights, count, out):
    """out = sum over i < count of weights[i] * the row of len(out) elements at address rows[i], block by block.

    like: an array of the rows' format; rows int64 addresses; weights float32; out (value_dim,) float32 contiguous.
    """
    value_dim = out.shape[0]
    size = like.itemsize
    row_list, weight_list, target = rows.ctypes.data, weights.ctypes.data, out.ctypes.data
    out[:] = np.float32(0.0)
    for first in range(0, count, BLOCK):
        number, left = min(BLOCK, count - first), count - first
        block_rows, block_weights = row_list + 8 * first, weight_list + 4 * first
        done = np.int64(0)
        while value_dim - done >= VECTORS * LANES:
            _sum_wide(like, block_rows, block_weights, number, left, done * size, value_dim, target + 4 * done)
            done += VECTORS * LANES
        while value_dim - done >= LANES:
            _sum_narrow(like, block_rows, block_weights, number, left, done * size, value_dim, target + 4 * done)
            done += LANES
        for j in range(done, value_dim):
            total = np.float32(0.0)
            for i in range(first, first + number):
                value = widen(_element(like, rows[i] + j * size)) * _scale_at(like, rows[i], value_dim)
                total += weights[i] * value
            out[j] += total


@njit(nogil=True, cache=True)
def attend_rows(like, rows, scores, count, scale, softcap, out):
    """Softmax of `count` scores and the weighted sum of the values at addresses rows[:count]; returns the lse.

    like: an array of the values' format; rows (at least count,) int64; scores (at least count,) float32: inner
    products, overwritten by weights; softcap 0: none; out (value_dim,) float32. Without rows: out 0 and -inf.
    """
    for i in range(min(AHEAD_OF_SOFTMAX, count)):
        prefetch_at(rows[i], bytes_of_row(like, out.shape[0]))
    top = scale_scores(scores, count, scale, softcap)
    shift = top if top > -np.inf else np.float32(0.0)  # all -inf: -inf - -inf would be NaN
    exponentiate(scores, count, shift)
    total = total_of(scores, count)
    if total == 0.0:
        out[:] = np.float32(0.0)
        return np.float32(-np.inf)
    sum_rows(like, rows, scores, count, out)
    inverse = np.float32(1.0 / total)
    for j in range(out.shape[0]):
        out[j] *= inverse
    return np.float32(np.float64(shift) + math.log(total))
