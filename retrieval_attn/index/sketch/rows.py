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

BLOCK = 16
"""Rows of a block: the int32 lanes of a vector."""
PAIR = 2 * BLOCK
"""Rows that a scan takes at once."""
VECTOR = 64
WIDE_STEP, NARROW_STEP, THIN_STEP = 4, 8, 16
"""Numbers of a row in one vector: in 8, 4 and 2 bits."""
WIDE_LEVELS, NARROW_LEVELS, THIN_LEVELS = 256, 16, 4
WIDE_ERROR, NARROW_ERROR = 1e-4, 0.0115
"""Mean squared error of a Gaussian number in these levels, of its variance (Max, 1960, table 1, uniform steps)."""
FITTED_KEYS = 2048
"""Most keys that steps are chosen by."""
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.2)
"""Ranges that are tried for a number, of its largest distance from the mean; the one with the least error is taken."""


class NumberBlocks(NamedTuple):
    """Rows of `rank` numbers in 8 bits each, rank a multiple of 4.

    blocks: (capacity / 16, 16 * rank) uint8, C-contiguous, begun on a cache line, an even number of rows; its owner
    knows how many are written. mean, step: (rank,) float32, number ~ mean + step * (code - half the levels + 1/2).
    reach: (rank,) float32, the largest distance from the mean among the rows that these were taken from.
    """

    blocks: npt.NDArray[np.uint8]
    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in self)

    def decoded(self, count: int) -> npt.NDArray[np.float32]:
        """The numbers (count, rank) that the first `count` rows were coded from, but for rounding."""
        codes = self.blocks.reshape(len(self.blocks), -1, BLOCK, WIDE_STEP).transpose(0, 2, 1, 3)
        numbers = codes.reshape(len(self.blocks) * BLOCK, -1)[:count].astype(np.float32)
        return self.mean + self.step * (numbers - (WIDE_LEVELS // 2 - 0.5))


class BlockSteps(NamedTuple):
    """float32 (rank,) each: see `NumberBlocks`."""

    mean: npt.NDArray[np.float32]
    step: npt.NDArray[np.float32]
    reach: npt.NDArray[np.float32]

    @classmethod
    def of(cls, sample: npt.NDArray[np.float32], halves: npt.NDArray[np.int64]) -> BlockSteps:
        """Those of `sample` (m, rank) float32 finite, m may be 0; halves (rank,): half the levels of each number."""
        rank = sample.shape[1]
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32) if len(sample) else np.zeros(rank, np.float32)
        reach = np.abs(sample - mean).max(axis=0, initial=0.0).astype(np.float32)
        few = np.ascontiguousarray(sample[:: max(1, len(sample) // FITTED_KEYS)])
        return cls(mean, best_steps(few, mean, reach, halves), reach)


def coded_blocks(numbers: npt.NDArray[np.float32]) -> NumberBlocks:
    """Blocks of numbers (n, rank), rank a multiple of 4."""
    rank = numbers.shape[1]
    steps = BlockSteps.of(numbers, np.full(rank, WIDE_LEVELS // 2))
    pairs = -(-len(numbers) // PAIR)
    blocks = aligned_empty((2 * pairs, rank * BLOCK), np.uint8)
    blocks[:] = 0
    write_blocks(numbers, blocks, steps.mean, steps.step)
    return NumberBlocks(blocks, *steps)


def allocate(variances: npt.NDArray[np.float64], budget: int) -> tuple[int, int]:
    """How many of the numbers, in order of falling variance, get 8 bits and how many 4, in at most `budget` bytes.

    The choice with the least total squared error. wide is a multiple of 4, narrow one of 8, and they may end up to 7
    numbers behind the last one. budget: at least 4.
    """
    total = np.concatenate([[0.0], np.cumsum(variances)])
    count = len(variances)

    def between(first: int, last: int) -> float:
        return float(total[min(last, count)] - total[min(first, count)])

    best, chosen = np.inf, (WIDE_STEP, 0)
    for wide in range(0, min(budget, count + WIDE_STEP - 1) + 1, WIDE_STEP):
        left = max(0, count - wide)
        narrow = min((budget - wide) * 2 // NARROW_STEP, -(-left // NARROW_STEP)) * NARROW_STEP
        if not wide + narrow:
            continue
        error = WIDE_ERROR * between(0, wide) + NARROW_ERROR * between(wide, wide + narrow)
        error += between(wide + narrow, count)
        if error < best:
            best, chosen = error, (wide, narrow)
    return chosen


@njit(nogil=True, cache=True)
def best_steps(sample, mean, reach, halves):
    """float32 (rank,): of every number the step, in twice `halves` levels, that codes the sample with the least squared
    error; 0 where all are equal.
    """
    return _fitted_steps(_columns(sample, mean), reach, halves)


@njit(nogil=True, cache=True)
def _columns(sample, mean):
    """Distances (rank, m) of sample (m, rank) from the mean, a few rows at a time: one column has a line per number."""
    distances = np.empty((sample.shape[1], len(sample)), np.float32)
    for start in range(0, len(sample), BLOCK):
        stop = min(start + BLOCK, len(sample))
        for j in range(sample.shape[1]):
            for i in range(start, stop):
                distances[j, i] = sample[i, j] - mean[j]
    return distances


@njit(nogil=True, cache=True)
def _fitted_steps(distances, reach, halves):
    """See `best_steps`; distances as `_columns` gives them."""
    step = np.zeros(len(distances), np.float32)
    for j in range(len(distances)):
        least = np.inf
        for share in SHARES:
            size = np.float64(reach[j]) * share / halves[j]
            if size <= 0:
                break
            error = _missed(distances[j], np.float32(size), np.float32(halves[j]))
            if error < least:
                least = error
                step[j] = size
    return step


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _missed(distances, size, half):
    """Sum of squares of what rounding takes, in steps: sums of several at once, in any order."""
    over, error = np.float32(1) / size, np.float32(0)
    for i in range(len(distances)):
        number = distances[i] * over
        missed = min(max(np.floor(number), -half), half - np.float32(1)) + np.float32(0.5) - number
        error += missed * missed
    return np.float64(error) * np.float64(size) ** 2


@njit(nogil=True, cache=True, error_model="numpy")
def rounding_errors(numbers, step, halves):
    """float64 (rank,): mean square of what rounding by these steps, in twice `halves` levels, takes from each of the
    numbers (n, rank), n > 0.
    """
    errors, over = np.zeros(numbers.shape[1]), 1 / step.astype(np.float64)
    for i in range(len(numbers)):
        for j in range(numbers.shape[1]):
            code = numbers[i, j] * over[j]
            missed = min(max(np.floor(code), -halves[j]), halves[j] - 1.0) + 0.5 - code
            errors[j] += missed * missed
    return errors * step.astype(np.float64) ** 2 / len(numbers)


@njit(nogil=True, cache=True)
def write_blocks(numbers, blocks, mean, step):
    """Code numbers (n, rank) float32 as the first n rows of the blocks; beyond a range they are clipped."""
    for i in range(len(numbers)):
        block = blocks[i // BLOCK]
        lane = i % BLOCK * 4
        for j in range(numbers.shape[1]):
            block[j // WIDE_STEP * VECTOR + lane + j % WIDE_STEP] = code_of(
                numbers[i, j], mean[j], step[j], WIDE_LEVELS // 2
            )


@njit(nogil=True, cache=True, inline="always")
def code_of(number, mean, step, half):
    """The code of a number in twice `half` levels."""
    code = 0
    if step > 0:
        code = int(np.floor((np.float64(number) - np.float64(mean)) / np.float64(step)))
    return min(max(code, -half), half - 1) + half


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


@njit(nogil=True, cache=True, error_model="numpy")
def scaled_rows(rows):
    """Rows (heads, n, d) float32, finite, n > 0, over their head's largest number and less their mean; what that was.

    Returns float32 (heads, n, d), the mean over the largest, float64 (heads, d), and the largest, float64 (heads,).
    """
    heads, count, dim = rows.shape
    scaled, means, largest = np.empty(rows.shape, np.float32), np.zeros((heads, dim)), np.empty(heads)
    for head in range(heads):
        farthest = np.full(dim, np.finfo(np.float32).tiny)
        for i in range(count):
            for j in range(dim):
                farthest[j] = max(farthest[j], abs(rows[head, i, j]))
        most = farthest.max()
        for i in range(count):
            for j in range(dim):
                scaled[head, i, j] = rows[head, i, j] / most
                means[head, j] += np.float64(scaled[head, i, j])
        means[head] /= count
        middle = means[head].astype(np.float32)
        for i in range(count):
            for j in range(dim):
                scaled[head, i, j] -= middle[j]
        largest[head] = np.float64(most)
    return scaled, means, largest


@njit(nogil=True, cache=True)
def centred_rows(rows):
    """Means of rows (heads, n, d) float32, n > 0, (heads, d), and their distances (heads, n, d) from these, float32."""
    heads, count, dim = rows.shape
    means, centred = np.empty((heads, dim), np.float32), np.empty(rows.shape, np.float32)
    for head in range(heads):
        sums = np.zeros(dim)
        for i in range(count):
            for j in range(dim):
                sums[j] += np.float64(rows[head, i, j])
        for j in range(dim):
            means[head, j] = sums[j] / count
        for i in range(count):
            for j in range(dim):
                centred[head, i, j] = rows[head, i, j] - means[head, j]
    return means, centred


@njit(nogil=True, cache=True, error_model="numpy")
def fit_numbers(numbers, halves):
    """Fit codes to numbers (n, d) float32, n > 0, centred.

    halves: half the levels of each way to store a number. Returns a sample (at most 2 * FITTED_KEYS, d); how far each
    number reaches (d,) and its deviation (d,), float32; and the mean squared error (ways + 1, d) of each way, then of
    not storing it, on one half of the sample by steps of the other.
    """
    count, dim = numbers.shape
    reach = np.full(dim, np.finfo(np.float32).tiny * np.float32(2.0**16))
    squares = np.zeros(dim)
    for i in range(count):
        for j in range(dim):
            reach[j] = max(reach[j], abs(numbers[i, j]))
            squares[j] += np.float64(numbers[i, j]) ** 2
    deviation = np.sqrt(squares / count).astype(np.float32)
    sample = numbers[:: max(1, count // FITTED_KEYS)].copy()
    fitted, judged = sample[::2].copy(), sample[min(1, len(sample) - 1) :: 2].copy()
    errors, distances = np.zeros((len(halves) + 1, dim)), _columns(fitted, np.zeros(dim, np.float32))
    for way in range(len(halves)):
        own = np.full(dim, halves[way])
        errors[way] = rounding_errors(judged, _fitted_steps(distances, reach, own), own)
    for i in range(len(judged)):
        for j in range(dim):
            errors[-1, j] += np.float64(judged[i, j]) ** 2
    errors[-1] /= len(judged)
    return sample, reach, deviation, errors
