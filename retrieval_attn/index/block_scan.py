"""Scan of keys in blocks (see `blocks`) for all queries of a group: approximate scores, and the best of them.

The numbers of 8 and those of 4 bits are summed apart as integers, each with a scale of its own per query, and added as
float32: one scale for both would leave the important ones a few steps only.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils

from retrieval_attn.index.blocks import BLOCK, NARROW_STEP, PAIR, VECTOR, WIDE_STEP, KeyBlocks
from retrieval_attn.index.coded import best_in_parts
from retrieval_attn.index.codes import HAS_VNNI, add_products
from retrieval_attn.index.dots import (
    TILE_QUERIES,
    _offset,
    _row_address,
    _shuffled,
    _spread,
    dot,
    intrinsic,
    lowest_bit,
)
from retrieval_attn.index.packed import EMPTY, keep_best, pack_score, score_of

AHEAD = 8
"""Pairs of blocks that are asked for ahead: the processor does so itself, but not across pages."""
SAMPLE_STEP, SAMPLE_AHEAD = 16, 3
"""One pair of blocks in so many is scanned first, for a bound that few other keys pass."""
KEYS_PER_TASK = 16384
MOST_NUMBER = 127

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = ir.VectorType(_INT8, VECTOR)
_SUMS = ir.VectorType(_INT32, BLOCK)
_FLOATS = ir.VectorType(ir.FloatType(), BLOCK)


@intrinsic
def _pair_scores(typingctx, blocks, block, planes, first, wides, narrows, steps, bounds, scores):
    """scores[4 * j + i] = scores of the 16 keys of blocks[block + j] for query first + i, j < 2, i < 4.

    Two int64: bit 16 * i + t of the j-th says that key t's score is above bounds[first + i].
    """
    pair = types.UniTuple(types.int64, 2)
    signature = pair(blocks, types.int64, planes, types.int64, types.int64, types.int64, steps, bounds, scores)

    def codegen(context, builder, signature, args):
        blocks, block, planes, first, wides, narrows, steps, bounds, scores = args
        blocks_type, _, planes_type, _, _, _, steps_type, bounds_type, scores_type = signature.args

        def number(value):
            return ir.Constant(_INT64, value)

        def load(address, kind, align):
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        rows = [_row_address(context, builder, blocks_type, blocks, builder.add(block, number(j))) for j in range(2)]
        own = [builder.add(first, number(i)) for i in range(TILE_QUERIES)]
        queries = [_row_address(context, builder, planes_type, planes, i) for i in own]
        slots = [cgutils.alloca_once(builder, _SUMS) for _ in range(4 * TILE_QUERIES)]
        for slot in slots:
            builder.store(ir.Constant(_SUMS, [0] * BLOCK), slot)

        def add(part, codes, byte):
            """Sums of part (0 wide, 1 narrow) += two vectors of codes times the four numbers at `byte`."""
            for i, query in enumerate(queries):
                four = load(builder.add(query, byte), _INT32, 4)
                one = builder.insert_element(ir.Constant(_SUMS, ir.Undefined), four, ir.Constant(_INT32, 0))
                spread = builder.bitcast(_shuffled(builder, one, one, [0] * BLOCK), _BYTES)
                for j, own_codes in enumerate(codes):
                    slot = slots[8 * part + 4 * j + i]
                    builder.store(add_products(builder, builder.load(slot), own_codes, spread, HAS_VNNI), slot)

        with cgutils.for_range(builder, wides) as loop:
            codes = [load(_offset(builder, row, loop.index, VECTOR), _BYTES, VECTOR) for row in rows]
            add(0, codes, builder.mul(loop.index, number(WIDE_STEP)))
        behind = [_offset(builder, row, wides, VECTOR) for row in rows]
        low_half = ir.Constant(_BYTES, [15] * VECTOR)
        shift = ir.Constant(ir.VectorType(ir.IntType(16), VECTOR // 2), [4] * (VECTOR // 2))
        with cgutils.for_range(builder, narrows) as loop:
            both = [load(_offset(builder, row, loop.index, VECTOR), _BYTES, VECTOR) for row in behind]
            byte = builder.add(builder.mul(wides, number(WIDE_STEP)), builder.mul(loop.index, number(NARROW_STEP)))
            add(1, [builder.and_(one, low_half) for one in both], byte)
            upper = []
            for one in both:  # there is no shift of bytes: of pairs, and what came from the neighbour is cut off
                pairs = builder.bitcast(one, ir.VectorType(ir.IntType(16), VECTOR // 2))
                upper.append(builder.and_(builder.bitcast(builder.lshr(pairs, shift), _BYTES), low_half))
            add(1, upper, builder.add(byte, number(WIDE_STEP)))

        found = [number(0), number(0)]
        for i, query in enumerate(own):
            parts = [
                _spread(builder, load(_offset(builder, _row_address(context, builder, steps_type, steps, number(part)),
                                              query, 4), ir.FloatType(), 4))
                for part in range(2)
            ]  # fmt: skip
            base = builder.ptrtoint(context.make_array(bounds_type)(context, builder, bounds).data, _INT64)
            bound = _spread(builder, load(_offset(builder, base, query, 4), ir.FloatType(), 4))
            for j in range(2):
                wide, narrow = (builder.sitofp(builder.load(slots[8 * part + 4 * j + i]), _FLOATS) for part in (0, 1))
                score = builder.fadd(builder.fmul(wide, parts[0]), builder.fmul(narrow, parts[1]))
                row = _row_address(context, builder, scores_type, scores, number(4 * j + i))
                builder.store(score, builder.inttoptr(row, _FLOATS.as_pointer()), align=4)
                above = builder.zext(
                    builder.bitcast(builder.fcmp_ordered(">", score, bound), ir.IntType(BLOCK)), _INT64
                )
                found[j] = builder.or_(found[j], builder.shl(above, number(BLOCK * i)))
        return context.make_tuple(builder, signature.return_type, found)

    return signature, codegen


@intrinsic
def _prefetch_pair(typingctx, blocks, block):
    """Ask the cache for blocks[block] and the one behind it. Never faults, changes nothing."""

    def codegen(context, builder, signature, args):
        pointer_type = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, _INT32, _INT32, _INT32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        base = _row_address(context, builder, signature.args[0], args[0], args[1])
        width = builder.extract_value(context.make_array(signature.args[0])(context, builder, args[0]).shape, 1)
        lines = builder.udiv(width, ir.Constant(_INT64, VECTOR // 2))
        with cgutils.for_range(builder, lines) as loop:
            pointer = builder.inttoptr(_offset(builder, base, loop.index, VECTOR), pointer_type)
            builder.call(prefetch, [pointer, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.void(blocks, types.int64), codegen


@njit(nogil=True, cache=True)
def _offer_all(found, block, first, row, stop, kept, pool, counts, bounds, scores):
    """Add the keys of one block whose bits are set to their queries' pools; full ones are cut to their best."""
    capacity = pool.shape[1]
    while found:
        bit = lowest_bit(found)
        found &= found - 1
        query, lane = first + (bit >> 4), bit & 15
        key_id = block * BLOCK + lane
        if key_id >= stop:
            continue
        pool[query, counts[query]] = pack_score(scores[row + (bit >> 4), lane], key_id)
        counts[query] += 1
        if counts[query] == capacity:
            keep_best(pool[query], capacity, kept)
            counts[query] = kept
            bounds[query] = score_of(pool[query, kept - 1])


@njit(nogil=True, cache=True)
def scan_blocks(blocks, planes, wide, steps, num_queries, start, stop, kept, pool, counts, bounds, scores):
    """Approximate scores of keys [start, stop); leave the `kept` best of each query, unordered, in pool[query, :kept].

    blocks as in `KeyBlocks`; planes (multiple of 4, rank) int8 and steps (2, at least as many) float32 as
    `encode_block_queries` gives them; start a multiple of 32. pool (num_queries, capacity) int64 of packed candidates,
    capacity > kept or more than stop - start; unused entries become EMPTY. Of equal scores the lower id is kept.
    Scratch: counts (num_queries,) int64, bounds (rows of planes,) float32, scores (8, 16) float32.
    """
    layout = wide // WIDE_STEP, (planes.shape[1] - wide) // NARROW_STEP
    work = pool, counts, bounds, scores
    for query in range(planes.shape[0]):
        bounds[query] = -np.inf if query < num_queries else np.inf
    counts[:num_queries] = 0
    share = kept / SAMPLE_STEP
    ranked = int(1.5 * share + 6.0 * np.sqrt(share) + 4.0)
    if stop - start >= 8 * SAMPLE_STEP * ranked and ranked < pool.shape[1]:
        # a bound that very likely a little more than `kept` keys are above: without, thousands pass before it is tight
        _scan_pairs(blocks, planes, layout, steps, num_queries, start, stop, SAMPLE_STEP, ranked, work)
        for query in range(num_queries):
            enough = counts[query] >= ranked
            if enough:
                keep_best(pool[query], counts[query], ranked)
            bounds[query] = score_of(pool[query, ranked - 1]) if enough else -np.inf
            counts[query] = 0
    _scan_pairs(blocks, planes, layout, steps, num_queries, start, stop, 1, kept, work)
    misled = False
    for query in range(num_queries):
        enough = counts[query] >= min(kept, stop - start)
        misled = misled or not enough
        counts[query] = counts[query] if enough else 0
        bounds[query] = np.inf if enough else -np.inf
    if misled:
        _scan_pairs(blocks, planes, layout, steps, num_queries, start, stop, 1, kept, work)
    for query in range(num_queries):
        count = counts[query]
        if count > kept:
            keep_best(pool[query], count, kept)
            count = kept
        for i in range(count, kept):
            pool[query, i] = EMPTY


@njit(nogil=True, cache=True)
def _scan_pairs(blocks, planes, layout, steps, num_queries, start, stop, every, kept, work):
    """Add the keys of one pair of blocks in `every` that are above their query's bound to its pool."""
    pool, counts, bounds, scores = work
    for block in range(start // BLOCK, -(-stop // BLOCK), 2 * every):
        ahead = block + 2 * every * (AHEAD if every == 1 else SAMPLE_AHEAD)
        if ahead + 2 <= blocks.shape[0]:
            _prefetch_pair(blocks, ahead)
        for first in range(0, num_queries, TILE_QUERIES):
            left, right = _pair_scores(blocks, block, planes, first, layout[0], layout[1], steps, bounds, scores)
            if left:
                _offer_all(left, block, first, 0, stop, kept, pool, counts, bounds, scores)
            if right:
                _offer_all(right, block + 1, first, 4, stop, kept, pool, counts, bounds, scores)


@njit(nogil=True, cache=True)
def encode_block_queries(queries, query_side, step, wide, planes, steps, numbers):
    """Fill planes (n, rank) int8 and steps (2, at least n) float32 from queries (n, head_dim) float32.

    query_side (rank, head_dim) float32: what the queries are projected by. numbers: scratch (rank,) float64. The score
    of a key is steps[0] times the sum over its 8-bit numbers plus steps[1] times that over its 4-bit ones, but for a
    constant of the query. A query that is not finite gets NaN for its steps.
    """
    rank = len(query_side)
    for i in range(len(queries)):
        for j in range(rank):
            numbers[j] = np.float64(dot(queries, i, query_side, j)) * np.float64(step[j])
        for part in range(2):
            low, high = (0, wide) if part == 0 else (wide, rank)
            largest = 0.0
            finite = 0.0
            for j in range(low, high):
                finite += numbers[j] * 0.0
                largest = max(largest, abs(numbers[j]))
            usable = finite == finite and 0.0 < largest < np.float64(3e38) * MOST_NUMBER
            for j in range(low, high):
                planes[i, j] = np.int8(np.rint(numbers[j] / largest * MOST_NUMBER)) if usable else np.int8(0)
            steps[part, i] = largest / MOST_NUMBER if usable else (np.nan if finite != finite or largest else 0.0)
        if steps[0, i] != steps[0, i] or steps[1, i] != steps[1, i]:
            steps[0, i] = steps[1, i] = np.nan


@njit(parallel=True, nogil=True, cache=True)
def _scan_parts(blocks, length, planes, wide, steps, num_queries, kept, pools):
    parts = pools.shape[0]
    pairs = -(-length // PAIR)
    for part in prange(parts):
        counts = np.empty(num_queries, np.int64)
        bounds = np.empty(planes.shape[0], np.float32)
        scores = np.empty((8, BLOCK), np.float32)
        start, stop = pairs * part // parts * PAIR, min(pairs * (part + 1) // parts * PAIR, length)
        scan_blocks(blocks, planes, wide, steps, num_queries, start, stop, kept, pools[part], counts, bounds, scores)


def best_of_blocks(
    keys: KeyBlocks, length: int, queries: npt.NDArray[np.float32], query_side: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The `kept` keys of the first `length` with the largest approximate scores, per query.

    queries (n, head_dim) float32. Returns packed candidates (n, min(kept, length)), unordered, and which queries are
    not finite (n,) bool, whose candidates say nothing. The same at any number of threads.
    """
    lost = np.zeros(len(queries), bool)

    def scan(some: slice, count: int, pools: npt.NDArray[np.int64]) -> None:
        planes = np.zeros((-(-count // TILE_QUERIES) * TILE_QUERIES, len(query_side)), np.int8)
        steps = np.zeros((2, len(planes)), np.float32)
        numbers = np.empty(len(query_side), np.float64)
        encode_block_queries(queries[some], query_side, keys.step, keys.wide, planes[:count], steps, numbers)
        _scan_parts(keys.blocks, length, planes, keys.wide, steps, count, min(kept, length), pools)
        lost[some] = np.isnan(steps[0, :count])

    return best_in_parts(len(queries), length, kept, KEYS_PER_TASK, scan), lost
