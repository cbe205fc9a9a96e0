"""Keys one after the other, a row of codes each: what the keys that a scan of the front let pass are scored by.

A row has some numbers in 8 bits and more in 4, the most important first, and the rest not at all; how many of each
follows from their variances. At half a byte per number of a head of 128 it is one cache line, begun on one, so a key
that is looked at costs one line whatever its neighbours are.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.index.kernels.dots import TILE_QUERIES, _offset, _row_address, _shuffled, _spread, folded, intrinsic
from retrieval_attn.index.kernels.products import HAS_VNNI_256, add_products, add_small_products
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.sketch.blocks import (
    NARROW_LEVELS,
    NARROW_STEP,
    PAIR,
    WIDE_LEVELS,
    WIDE_STEP,
    BlockSteps,
    code_of,
)

ROW_STEP = 32
"""Bytes of a row that are taken at once: a row is padded to a multiple."""
AT_ONCE = 4
"""Rows that are scored together."""
PARTS = 3
"""Of a query, by what they meet in a row: bytes, lower halves, upper halves."""

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LANES = ROW_STEP // 4
_BYTES, _SUMS = ir.VectorType(_INT8, ROW_STEP), ir.VectorType(_INT32, _LANES)
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)


class KeyRows(NamedTuple):
    """Keys of `rank` = wide + narrow numbers each, most important first.

    rows: (capacity, width) uint8, C-contiguous, begun on a cache line, an even number of blocks of 16; its owner knows
    how many keys are written. Bytes [0, wide) are numbers; byte wide + b has two, see `row_order`; zeros to the end.
    mean, step, reach: see `blocks.NumberBlocks`.
    """

    rows: npt.NDArray[np.uint8]
    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]
    wide: int

    @property
    def narrow(self) -> int:
        """How many numbers of a key have 4 bits."""
        return len(self.step) - self.wide

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in (self.rows, self.mean, self.step, self.reach))


def key_bytes(wide: int, narrow: int) -> int:
    """Bytes of one key's numbers."""
    return wide + narrow // 2


def row_width(wide: int, narrow: int) -> int:
    """Bytes of one key's row."""
    return -(-key_bytes(wide, narrow) // ROW_STEP) * ROW_STEP


def row_order(wide: int, narrow: int) -> npt.NDArray[np.int64]:
    """The numbers in the order of a row: those of 8 bits, those in the lower halves of bytes, those in the upper ones.

    Byte b of the latter has numbers b and b + 4 of every eight.
    """
    half = np.arange(narrow // 2)
    number = half // WIDE_STEP * NARROW_STEP + half % WIDE_STEP
    return np.concatenate([np.arange(wide), wide + number, wide + number + WIDE_STEP]).astype(np.int64)


def empty_rows(sample: npt.NDArray[np.float32], wide: int, capacity: int) -> KeyRows:
    """Rows for `capacity` keys whose mean and steps are those of `sample` (m, rank) float32 finite, m may be 0."""
    rank = sample.shape[1]
    steps = BlockSteps.of(sample, np.where(np.arange(rank) < wide, WIDE_LEVELS // 2, NARROW_LEVELS // 2))
    rows = aligned_empty((-(-capacity // PAIR) * PAIR, row_width(wide, rank - wide)), np.uint8)
    return KeyRows(rows, *steps, wide)


def with_room(keys: KeyRows, count: int, written: int, copied: bool = False) -> KeyRows:
    """`keys` if `count` fit, else the first `written` of them in a larger array, with a quarter to spare; in another
    array in any case if `copied`.
    """
    if count <= len(keys.rows) and not copied:
        return keys
    rows = aligned_empty((-(-(count + count // 4) // PAIR) * PAIR, keys.rows.shape[1]), np.uint8)
    rows[:written] = keys.rows[:written]
    return keys._replace(rows=rows)


def out_of_reach(keys: KeyRows, numbers: npt.NDArray[np.float32]) -> bool:
    """Whether any of numbers (n, rank) lies twice as far out as all that the steps were taken from."""
    return bool(len(numbers)) and bool((np.abs(numbers - keys.mean) > 2.0 * keys.reach.astype(np.float64)).any())


def decoded(keys: KeyRows, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The numbers (n, rank) that the keys in n places were coded from, but for rounding."""
    rows, middle = keys.rows[places], np.where(np.arange(len(keys.step)) < keys.wide, WIDE_LEVELS, NARROW_LEVELS) / 2
    halves = rows[:, keys.wide : key_bytes(keys.wide, keys.narrow)]
    codes = np.concatenate([rows[:, : keys.wide], halves & 15, halves >> 4], axis=1)
    numbers = np.empty(codes.shape, np.float32)
    numbers[:, row_order(keys.wide, keys.narrow)] = codes
    return np.asarray(keys.mean + keys.step * (numbers - (middle - 0.5)), np.float32)


def clear_places(keys: KeyRows, stop: int) -> None:
    """Zeros from place `stop` to an even number of blocks: what is saved of places without keys must not be what lay
    in memory before.
    """
    keys.rows[stop : -(-stop // PAIR) * PAIR] = 0


@njit(nogil=True, cache=True)
def write_rows(numbers, rows, start, mean, step, wide):
    """Code numbers (n, rank) float32 as keys [start, start + n); beyond a range they are clipped."""
    for i in range(len(numbers)):
        row = rows[start + i]
        row[:] = 0
        for j in range(numbers.shape[1]):
            half = (WIDE_LEVELS if j < wide else NARROW_LEVELS) // 2
            code = code_of(numbers[i, j], mean[j], step[j], half)
            byte, shift, _ = place_of_number(j, wide)
            row[byte] |= code << shift


@njit(nogil=True, cache=True, inline="always")
def place_of_number(number, wide):
    """Where a number is in a row: byte, lowest bit, and a mask for what lies from there on."""
    if number < wide:
        return number, 0, 255
    at = number - wide
    return wide + at // NARROW_STEP * WIDE_STEP + at % WIDE_STEP, at % NARROW_STEP // WIDE_STEP * 4, 15


@njit(nogil=True, cache=True)
def spread_planes(planes, count, wide, spread):
    """Fill spread (4, PARTS * width) int8 with planes (4, rank) int8 of `count` queries, in the order of a row's bytes:
    for its bytes, its lower and its upper halves, zeros where none of a part's numbers are.
    """
    spread[:] = 0
    width = spread.shape[1] // PARTS
    for i in range(count):
        for j in range(planes.shape[1]):
            byte, shift, _ = place_of_number(j, wide)
            part = 0 if j < wide else 1 + shift // 4
            spread[i, part * width + byte] = planes[i, j]


@intrinsic
def row_scores(typingctx, rows, places, at, planes, wide, steps, bounds, scores):
    """scores[4 * j + i] = score of query i < 4 and row places[at + j], j < 4; bit 4 * j + i says it is above bounds[i].

    rows (n, width) uint8; places int64; planes (4, PARTS * width) int8, see `spread_planes`; steps (2, 4), bounds (4,)
    and scores (16,) float32.
    """
    signature = types.int64(rows, places, types.int64, planes, types.int64, steps, bounds, scores)

    def codegen(context, builder, signature, args):
        rows, places, at, planes, wide, steps, bounds, scores = args
        types_ = signature.args

        def base(number, value):
            return builder.ptrtoint(context.make_array(types_[number])(context, builder, value).data, _INT64)

        def load(address, kind, align):
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        def number(value):
            return ir.Constant(_INT64, value)

        width = builder.extract_value(context.make_array(types_[0])(context, builder, rows).shape, 1)
        first = _offset(builder, base(1, places), at, 8)
        own = [
            _row_address(context, builder, types_[0], rows, load(builder.add(first, number(8 * j)), _INT64, 8))
            for j in range(AT_ONCE)
        ]
        queries = [_row_address(context, builder, types_[3], planes, number(i)) for i in range(TILE_QUERIES)]
        wide_end = builder.mul(
            builder.udiv(builder.add(wide, number(ROW_STEP - 1)), number(ROW_STEP)), number(ROW_STEP)
        )
        narrow_start = builder.mul(builder.udiv(wide, number(ROW_STEP)), number(ROW_STEP))
        low = ir.Constant(_BYTES, [15] * ROW_STEP)
        shift = ir.Constant(ir.VectorType(ir.IntType(16), ROW_STEP // 2), [4] * (ROW_STEP // 2))
        scale = []
        for part in range(2):
            each = [builder.add(base(5, steps), number(4 * (TILE_QUERIES * part + i))) for i in range(TILE_QUERIES)]
            scale.append([_spread(builder, load(one, ir.FloatType(), 4), _LANES) for one in each])
        totals = []
        for row in own:
            slots = [[cgutils.alloca_once(builder, _SUMS) for _ in range(TILE_QUERIES)] for _ in range(2)]
            for slot in slots[0] + slots[1]:
                builder.store(ir.Constant(_SUMS, [0] * _LANES), slot)

            def query(i, part, byte):
                place = builder.add(builder.mul(width, number(part)), byte)
                return load(builder.add(queries[i], place), _BYTES, 1)

            with cgutils.for_range_slice(builder, number(0), wide_end, number(ROW_STEP), intp=_INT64) as (byte, _):
                codes = load(builder.add(row, byte), _BYTES, ROW_STEP)
                for i, slot in enumerate(slots[0]):
                    sums = add_products(builder, builder.load(slot), codes, query(i, 0, byte), HAS_VNNI_256)
                    builder.store(sums, slot)
            with cgutils.for_range_slice(builder, narrow_start, width, number(ROW_STEP), intp=_INT64) as (byte, _):
                codes = load(builder.add(row, byte), _BYTES, ROW_STEP)
                pairs = builder.lshr(builder.bitcast(codes, shift.type), shift)
                halves = builder.and_(codes, low), builder.and_(builder.bitcast(pairs, _BYTES), low)
                for i, slot in enumerate(slots[1]):
                    both = [(half, query(i, part + 1, byte)) for part, half in enumerate(halves)]
                    builder.store(add_small_products(builder, builder.load(slot), both, HAS_VNNI_256), slot)
            for i in range(TILE_QUERIES):
                parts = [
                    builder.fmul(builder.sitofp(builder.load(slots[part][i]), _FLOATS), scale[part][i])
                    for part in range(2)
                ]
                totals.append(builder.fadd(*parts))
        found = number(0)
        bound = load(base(6, bounds), ir.VectorType(ir.FloatType(), TILE_QUERIES), 4)
        bound = _shuffled(builder, bound, bound, [0, 1, 2, 3] * 2)
        for half, sums in enumerate(folded(builder, totals, builder.fadd)):
            place = builder.add(base(7, scores), number(4 * _LANES * half))
            builder.store(sums, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
            above = builder.bitcast(builder.fcmp_ordered(">", sums, bound), ir.IntType(_LANES))
            found = builder.or_(found, builder.shl(builder.zext(above, _INT64), number(_LANES * half)))
        return found

    return signature, codegen
