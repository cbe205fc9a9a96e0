"""Scans of all keys of one head for all queries of its group: exact ones, and ones of coded keys with exact re-scoring.

Keys are read once, in order. Per query a pool takes what beats its bound and is cut to its best k when it is full.
Work arrays are the caller's: nothing is allocated, nothing is checked, and the GIL is not needed.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import overload

from retrieval_attn.index.kernels.codes import ZERO_CODE, _plane_address, _products
from retrieval_attn.index.kernels.dots import (
    LANES,
    TILE_QUERIES,
    _row_address,
    _scale_lanes,
    candidates,
    dot,
    intrinsic,
    lowest_bit,
    prefetch_row,
    score_tile,
)
from retrieval_attn.index.kernels.packed import EMPTY, id_of, keep_best, pack_score, pack_sum, score_of
from retrieval_attn.index.kernels.products import HAS_VNNI

TILE_KEYS = 64
"""Keys scored before their scores are filtered: 16 KiB of 128 bfloat16 stay in L1 for all query tiles."""
MOST_COLUMNS = 4160
"""Scores of a query that wait for a bound at most. No power of 2: rows of those meet in the same lines of a cache."""
KEPT_SCORES = 8 * MOST_COLUMNS
"""The same of all queries together: 130 KiB, which a second cache holds."""
GROUPS_OF_BOUND = 2
"""Groups of scores for each key that is wanted, whose best give a bound: a third more keys than wanted reach it."""
LEAST_GROUPS = 64
LOW_BITS = 10
"""Bits of a bound that are left at 0: it is lower by a part in ten thousand."""
LAST_ID, LEAST_CODE, INFINITY_CODE = np.int64(0xFFFFFFFF), np.int64(-0x80000000), np.int64(0x7F800000)
TILE_CODES = 16
"""Coded keys whose sums with 4 queries are compared with the bounds at once: one bit of an int64 for each."""
CODES_AHEAD = 64
"""Coded keys that are asked for ahead of a scan: the processor does so itself, but not across pages."""
SAMPLE_STEP = 32
"""One key in SAMPLE_STEP is scored first, for a bound that few others pass."""
BOUND_WORDS = 32
"""int32 that a tile of 4 queries has among the bounds of a coded scan: a bound for each lane of sums, and a zero."""
AHEAD = 32
"""Rows asked for ahead of the one that is scored again."""

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_SUMS = ir.VectorType(_INT32, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


def score_columns(padded: int) -> int:
    """Columns of the scratch `scores` in `scan_exact` for `padded` queries, a multiple of 4."""
    return max(TILE_KEYS, min(MOST_COLUMNS, KEPT_SCORES // padded // TILE_KEYS * TILE_KEYS))


compiled_columns: Any = njit(nogil=True, cache=True)(score_columns)
"""`score_columns` for compiled functions."""


@njit(nogil=True, cache=True)
def scan_exact(keys, queries, num_queries, start, stop, k, pool, counts, floors, bounds, scores):
    """Score keys[start:stop] for all queries; leave the k best of each, unordered, in pool[query, :k].

    keys (n, d) stored format; queries (multiple of 4, d) float32; pool (num_queries, capacity) int64 of packed
    candidates, capacity > k or more than stop - start; unused entries become EMPTY. floors (num_queries,) int64: a
    candidate that a key must beat to be kept (EMPTY: none), raised as better ones are known. Scratch: counts
    (num_queries,) int64, bounds (num_queries,) float32, scores (as many rows as queries, `score_columns`) float32, or
    (4, 64).

    Scores of the first keys, as many as there are columns, wait for the bound that all of them give: without one, some
    hundred keys per query enter a pool and leave it again before it is tight.
    """
    for query in range(num_queries):
        counts[query] = 0
        bounds[query] = -np.inf if floors[query] == EMPTY else score_of(floors[query])
    columns = min(stop - start, scores.shape[1] if scores.shape[0] >= num_queries else 0)
    groups = -(-max(GROUPS_OF_BOUND * k, LEAST_GROUPS) // LANES) * LANES
    begun = start
    if columns >= 2 * groups and groups <= 2 * pool.shape[1]:
        for column in range(0, columns, TILE_KEYS):
            size = min(TILE_KEYS, columns - column)
            for first in range(0, num_queries, TILE_QUERIES):
                score_tile(queries, first, keys, start + column, size, scores[first : first + TILE_QUERIES, column:])
        for query in range(num_queries):
            bound = bound_of_groups(scores, query, columns, groups, k, pool[query : query + 1].view(np.float32))
            if bound > bounds[query]:
                # what equals it may be among the best: the last id of all does not
                bounds[query], floors[query] = bound, max(floors[query], pack_score(bound, LAST_ID))
            _keep_above(scores, query, columns, start, k, pool, counts, floors, bounds, query)
        begun += columns
    for tile in range(begun, stop, TILE_KEYS):
        size = min(TILE_KEYS, stop - tile)
        for first in range(0, num_queries, TILE_QUERIES):
            score_tile(queries, first, keys, tile, size, scores)
            for query in range(first, min(first + TILE_QUERIES, num_queries)):
                _keep_above(scores, query - first, size, tile, k, pool, counts, floors, bounds, query)
    _pad(pool, counts, num_queries, k)


@intrinsic
def _best_of_groups(typingctx, scores, groups, each, best):
    """best[i] = the largest of scores[i + j * groups], j < each, for i < groups, a multiple of 16; -inf if all are NaN.

    Addresses of float32.
    """

    def codegen(context, builder, signature, args):
        scores, groups, each, best = args
        lanes, stride = ir.Constant(_INT64, LANES), builder.mul(groups, ir.Constant(_INT64, 4))
        slot = cgutils.alloca_once(builder, _FLOATS)
        with cgutils.for_range(builder, builder.udiv(groups, lanes)) as group:
            column = builder.mul(group.index, ir.Constant(_INT64, 4 * LANES))
            first = builder.add(scores, column)
            builder.store(ir.Constant(_FLOATS, [float("-inf")] * LANES), slot)
            with cgutils.for_range(builder, each) as loop:
                address = builder.add(first, builder.mul(loop.index, stride))
                own = builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
                held = builder.load(slot)
                builder.store(builder.select(builder.fcmp_ordered(">", own, held), own, held), slot)
            builder.store(
                builder.load(slot), builder.inttoptr(builder.add(best, column), _FLOATS.as_pointer()), align=4
            )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _bits_set(typingctx, bits):
    """How many bits of int64 `bits` are set."""
    return types.int64(types.int64), lambda context, builder, signature, args: builder.ctpop(args[0])


@njit(nogil=True, cache=True)
def bound_of_groups(scores, row, size, groups, k, best):
    """A score that k of scores[row, :size] reach at least, or -inf; of some thousand, few others do.

    The best of each of `groups` groups of scores, a multiple of 16 and size / 2 at most, are k scores at least with the
    k-th best of these. Neighbours are in different groups. best (1, at least groups) float32: scratch.
    """
    _best_of_groups(scores[row].ctypes.data, groups, size // groups, best.ctypes.data)
    code = LEAST_CODE
    for bit in range(31, LOW_BITS - 1, -1):
        higher = code + (np.int64(1) << bit)
        if higher > INFINITY_CODE:
            continue
        bound, reached = _score_of_code(higher), 0
        for column in range(0, groups, LANES):
            reached += _bits_set(candidates(best, 0, column, bound))
        if reached >= k:
            code = higher
    bound = _score_of_code(code)
    return bound if bound == bound else np.float32(-np.inf)


@njit(nogil=True, cache=True, inline="always")
def _score_of_code(code):
    """The float32 whose bits order as int32 `code`."""
    return score_of(code << 32)


@njit(nogil=True, cache=True)
def _keep_above(scores, row, size, first_key, k, pool, counts, floors, bounds, query):
    """Add the keys from `first_key` on with scores[row, :size] that reach a query's bound to its pool."""
    own, capacity = pool[query], pool.shape[1]
    count, floor, bound = counts[query], floors[query], bounds[query]
    for column in range(0, size, LANES):
        # few scores pass once there is a bound: look at them sixteen at a time
        left = candidates(scores, row, column, bound)
        if size - column < LANES:
            left &= (1 << (size - column)) - 1
        while left:
            i = column + lowest_bit(left)
            left &= left - 1
            packed = pack_score(scores[row, i], first_key + i)
            if packed <= floor:
                continue
            own[count] = packed
            count += 1
            if count == capacity:
                keep_best(own, capacity, k)
                count, floor = k, own[k - 1]
                bound = score_of(floor)
    counts[query], floors[query], bounds[query] = count, floor, bound


@njit(nogil=True, cache=True)
def _pad(pool, counts, num_queries, k):
    """Cut each pool to its best k; where it has fewer, EMPTY follows."""
    for query in range(num_queries):
        count = counts[query]
        if count > k:
            keep_best(pool[query], count, k)
            count = k
        for i in range(count, k):
            pool[query, i] = EMPTY


def _tile_sums(num_keys: int) -> Any:
    """Return the intrinsic sums[step, 4 * i + j] = codes[row + j * stride] . planes[first + i, 0], i, j < 4, int32.

    int8 keys: times the key's step, as int32 that order like it. `width`: of the rows of codes or keys.
    Bit 4 * i + j of the result: it is above bounds[first // 4, 4 * i + j].
    num_keys=1: only the first key is read, and all four columns are its sums.
    """

    def codegen(context, builder, signature, args):
        planes, first, codes, row, stride, width, bounds, sums, step = args
        planes_type, _, codes_type, _, _, _, bounds_type, sums_type, _ = signature.args
        numbers = [builder.add(first, ir.Constant(_INT64, i)) for i in range(TILE_QUERIES)]
        queries = [_plane_address(context, builder, planes_type, planes, number, 0) for number in numbers]
        keys = [builder.add(row, builder.mul(stride, ir.Constant(_INT64, i))) for i in range(num_keys)]
        rows = [_row_address(context, builder, codes_type, codes, key) for key in keys]
        while len(rows) < 4:
            rows.append(rows[-1])  # sums of keys that are not there: the caller leaves their bits out
        stored = codes_type.dtype == types.int8
        result = _products(builder, queries, rows, width, HAS_VNNI, signed=stored)
        group = builder.udiv(first, ir.Constant(_INT64, TILE_QUERIES))
        bounds_at = _row_address(context, builder, bounds_type, bounds, group)
        bound = builder.load(builder.inttoptr(bounds_at, _SUMS.as_pointer()), align=4)
        if stored:
            zero_at = builder.add(bounds_at, ir.Constant(_INT64, 4 * LANES))
            zero = builder.load(builder.inttoptr(zero_at, _SUMS.as_pointer()), align=4)
            scales = _scale_lanes(builder, rows, codes_type.dtype, width)
            result = _ordered(builder, builder.fmul(builder.sitofp(builder.sub(result, zero), scales.type), scales))
        sums_at = _row_address(context, builder, sums_type, sums, step)
        builder.store(result, builder.inttoptr(sums_at, _SUMS.as_pointer()), align=4)
        above = builder.icmp_signed(">", result, bound)
        return builder.zext(builder.bitcast(above, ir.IntType(LANES)), _INT64)

    def tile(typingctx, planes, first, codes, row, stride, width, bounds, sums, step):
        word = types.int64
        return word(planes, word, codes, word, word, word, bounds, sums, word), codegen

    return intrinsic(tile)


def _ordered(builder: Any, scores: Any) -> Any:
    """Emit int32 that order as the float32 in the lanes do, as `packed.pack_score` has it."""
    bits = builder.bitcast(scores, _SUMS)
    low = ir.Constant(_SUMS, [0x7FFFFFFF] * LANES)
    return builder.xor(bits, builder.and_(builder.ashr(bits, ir.Constant(_SUMS, [31] * LANES)), low))


_sums_4x4, _sums_4x1 = _tile_sums(4), _tile_sums(1)


@njit(nogil=True, cache=True)
def scan_codes(codes, planes, num_queries, start, stop, kept, pool, counts, bounds, sums):
    """Sums of codes[start:stop] for all queries; leave the `kept` best of each, unordered, in pool[query, :kept].

    codes (n, width) uint8, or int8 keys (n, head_dim) as stored, all finite; planes (multiple of 4, 1, width) int8, of
    which num_queries are real, zero beyond head_dim; pool (num_queries, capacity) int64 of candidates packed by their
    int32 sum, capacity > kept or more than stop - start; unused entries become EMPTY. Of equal sums the lower id is
    kept. Scratch: counts (num_queries,) int64, bounds (queries / 4, BOUND_WORDS) int32, sums (4, 16) int32.
    """
    _set_zeros(codes, planes, bounds)
    _sample_bounds(codes, planes, num_queries, start, stop, kept, pool, counts, bounds, sums)
    _scan_range(codes, planes, num_queries, start, stop, kept, pool.shape[1], pool, counts, bounds, sums)
    misled = False  # a bound from the sample that too few keys are above
    for query in range(num_queries):
        enough = counts[query] >= min(kept, stop - start)
        misled = misled or not enough
        if not enough:
            counts[query] = 0
        _set_bound(bounds, query, np.iinfo(np.int32).max if enough else np.iinfo(np.int32).min)
    if misled:
        _scan_range(codes, planes, num_queries, start, stop, kept, pool.shape[1], pool, counts, bounds, sums)
    _pad(pool, counts, num_queries, kept)


def _set_zeros(codes, planes, bounds):
    """Note the sums that int8 keys of zeros would have, which are to be taken off: 128 is added to their numbers."""


@overload(_set_zeros)
def _choose_zeros(codes, planes, bounds):
    if codes.dtype != types.int8:
        return lambda codes, planes, bounds: None

    def note(codes, planes, bounds):
        for query in range(planes.shape[0]):
            total = 0
            for j in range(codes.shape[1]):
                total += planes[query, 0, j]
            for j in range(4):
                bounds[query // 4, LANES + query % 4 * 4 + j] = ZERO_CODE * total

    return note


@njit(nogil=True, cache=True)
def _sample_bounds(codes, planes, num_queries, start, stop, kept, pool, counts, bounds, sums):
    """Empty the pools, and set bounds that very likely a little more than `kept` keys of the range are above.

    One key in 32 is scored for it: without, some thousand keys would pass through a pool before its bound is tight.
    """
    for query in range(planes.shape[0]):
        _set_bound(bounds, query, np.iinfo(np.int32).min if query < num_queries else np.iinfo(np.int32).max)
    for query in range(num_queries):
        counts[query] = 0
    share = kept / SAMPLE_STEP
    ranked = int(share + 4.0 * np.sqrt(share) + 4.0)
    capacity = min(pool.shape[1], 2 * ranked + 32)
    if stop - start < 8 * SAMPLE_STEP * ranked or capacity <= ranked:
        return
    width = codes.shape[1]
    ahead = 4 * AHEAD * SAMPLE_STEP
    for row in range(start, stop - 3 * SAMPLE_STEP, 4 * SAMPLE_STEP):
        if row + ahead + 3 * SAMPLE_STEP < stop:
            for j in range(4):
                prefetch_row(codes, row + ahead + j * SAMPLE_STEP)
        for first in range(0, num_queries, TILE_QUERIES):
            found = _sums_4x4(planes, first, codes, row, SAMPLE_STEP, width, bounds, sums, 0)
            while found:
                bit = lowest_bit(found)
                found &= found - 1
                key_id = row + (bit & 3) * SAMPLE_STEP
                _offer(pool, counts, bounds, first + (bit >> 2), sums[0, bit], key_id, ranked, capacity)
    for query in range(num_queries):
        keep_best(pool[query], counts[query], ranked)
        # one less: where many keys tie at the bound, they must pass
        _set_bound(bounds, query, np.int32(pool[query, ranked - 1] >> 32) - np.int32(1))
        counts[query] = 0


@njit(nogil=True, cache=True)
def _scan_range(codes, planes, num_queries, start, stop, kept, capacity, pool, counts, bounds, sums):
    """Add the keys of [start, stop) that are above their query's bound to its pool."""
    width = codes.shape[1]
    for tile in range(start, stop, TILE_CODES):
        size = min(TILE_CODES, stop - tile)
        for j in range(TILE_CODES):
            prefetch_row(codes, tile + CODES_AHEAD + j)
        for first in range(0, num_queries, TILE_QUERIES):
            found = np.int64(0)
            for step in range(size >> 2):
                found |= _sums_4x4(planes, first, codes, tile + 4 * step, 1, width, bounds, sums, step) << (16 * step)
            while found:
                bit = lowest_bit(found)
                found &= found - 1
                key_id = tile + (bit >> 4) * 4 + (bit & 3)
                query = first + (bit >> 2 & 3)
                _offer(pool, counts, bounds, query, sums[bit >> 4, bit & 15], key_id, kept, capacity)
            for t in range(size & ~3, size):
                found = _sums_4x1(planes, first, codes, tile + t, 1, width, bounds, sums, 0)
                for i in range(min(TILE_QUERIES, num_queries - first)):
                    if found >> (4 * i) & 1:
                        _offer(pool, counts, bounds, first + i, sums[0, 4 * i], tile + t, kept, capacity)


@njit(nogil=True, cache=True, inline="always")
def _set_bound(bounds, query, bound):
    for j in range(4):
        bounds[query // 4, query % 4 * 4 + j] = bound


@njit(nogil=True, cache=True, inline="always")
def _offer(pool, counts, bounds, query, total, key_id, kept, capacity):
    """Add a key to a query's pool; a full pool is cut to its best, whose last becomes the bound."""
    pool[query, counts[query]] = pack_sum(total, key_id)
    counts[query] += 1
    if counts[query] == capacity:
        keep_best(pool[query], capacity, kept)
        counts[query] = kept
        _set_bound(bounds, query, np.int32(pool[query, kept - 1] >> 32))


@njit(nogil=True, cache=True)
def rescore(keys, length, queries, query, coded, count, base, exact):
    """exact[i] = the candidate coded[i] packed by its inner product with the stored key, for i < count.

    keys (at least length, d) stored format, key i < length of them having id base + i; candidates of other ids are
    left alone, so that keys may lie in several arrays. queries (at least query + 1, d) float32. coded and exact (at
    least count) int64 may be one array only if all ids are in these keys.
    """
    stop = base + length
    for i in range(min(AHEAD, count)):
        _prefetch_within(keys, coded[i], base, stop)
    for i in range(count):
        if i + AHEAD < count:
            _prefetch_within(keys, coded[i + AHEAD], base, stop)
        key_id = id_of(coded[i])
        if coded[i] != EMPTY and base <= key_id < stop:
            exact[i] = pack_score(dot(queries, query, keys, key_id - base), key_id)


@njit(nogil=True, cache=True, inline="always")
def _prefetch_within(keys, candidate, base, stop):
    key_id = id_of(candidate)
    if candidate != EMPTY and base <= key_id < stop:
        prefetch_row(keys, key_id - base)
