"""Inner products of one query with rows here and there, four rows at a time."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from retrieval_attn.index.kernels.dots import (
    _FLOAT,
    _INT64,
    LANES,
    _is_float_rows,
    _is_rows,
    _products,
    _row_address,
    _shuffled,
    dot,
    intrinsic,
    prefetch_row,
    scale_of,
    widen,
)

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
