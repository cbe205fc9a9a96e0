"""Scan of chosen blocks of keys (see `blocks`) for all queries of a group: approximate scores, and the best of them.

The numbers of 8 and those of 4 bits are summed apart as integers, each with a scale of its own per query, and added as
float32: one scale for both would leave the important ones a few steps only.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.index.kernels.codes import HAS_VNNI, add_products
from retrieval_attn.index.kernels.dots import (
    TILE_QUERIES,
    _offset,
    _row_address,
    _shuffled,
    _spread,
    intrinsic,
    lowest_bit,
    score_tile,
)
from retrieval_attn.index.kernels.packed import keep_best, pack_score, score_of
from retrieval_attn.index.sketch.blocks import BLOCK, NARROW_STEP, PAIR, VECTOR, WIDE_STEP

AHEAD = 6
"""Pairs of blocks that are asked for ahead."""
SAMPLED = 2048
"""About so many keys are scanned first, for a bound that few other keys pass."""
HALVINGS = 12
MAX_NUMBER = 127

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = ir.VectorType(_INT8, VECTOR)
_SUMS = ir.VectorType(_INT32, BLOCK)
_FLOATS = ir.VectorType(ir.FloatType(), BLOCK)


@intrinsic
def pair_scores(
    typingctx, blocks, left, right, next_left, next_right, planes, first, wides, narrows, steps, bounds, scores
):
    """scores[4 * j + i] = scores of the 16 keys of block left (j = 0) or right (j = 1) for query first + i, i < 4.

    Two int64: bit 16 * i + t of the j-th says that key t's score is above bounds[first + i]. The cache is asked for
    the blocks next_left and next_right, line by line between the products: all lines at once would have to queue.
    """
    pair = types.UniTuple(types.int64, 2)
    number = types.int64
    signature = pair(blocks, number, number, number, number, planes, number, number, number, steps, bounds, scores)

    def codegen(context, builder, signature, args):
        blocks, left, right, next_left, next_right, planes, first, wides, narrows, steps, bounds, scores = args
        blocks_type, planes_type = signature.args[0], signature.args[5]
        steps_type, bounds_type, scores_type = signature.args[9:]
        pointer_type = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer_type, _INT32, _INT32, _INT32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

        def number(value):
            return ir.Constant(_INT64, value)

        def load(address, kind, align):
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        rows = [_row_address(context, builder, blocks_type, blocks, block) for block in (left, right)]
        coming = [_row_address(context, builder, blocks_type, blocks, block) for block in (next_left, next_right)]

        def ask(line):
            for row in coming:
                pointer = builder.inttoptr(_offset(builder, row, line, VECTOR), pointer_type)
                builder.call(prefetch, [pointer, _INT32(0), _INT32(3), _INT32(1)])

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
            ask(loop.index)
            codes = [load(_offset(builder, row, loop.index, VECTOR), _BYTES, VECTOR) for row in rows]
            add(0, codes, builder.mul(loop.index, number(WIDE_STEP)))
        behind = [_offset(builder, row, wides, VECTOR) for row in rows]
        low_half = ir.Constant(_BYTES, [15] * VECTOR)
        shift = ir.Constant(ir.VectorType(ir.IntType(16), VECTOR // 2), [4] * (VECTOR // 2))
        with cgutils.for_range(builder, narrows) as loop:
            ask(builder.add(wides, loop.index))
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


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _count_above(values, count, bound):
    """How many of values[:count] (float32) are above; counted in float32, or it takes no vectors."""
    above = np.float32(0.0)
    for i in range(count):
        above += np.float32(1.0) if values[i] > bound else np.float32(0.0)
    return above


@njit(nogil=True, cache=True)
def value_of_rank(values, count, rank):
    """A number that about `rank` of values[:count] (float32) are above: -inf if rank >= count, never a NaN.

    By halving the range: passes over a few thousand numbers take a fraction of the time of ordering them.
    """
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for i in range(count):
        value = values[i]
        if value > np.float32(-np.inf):
            low, high = min(low, value), max(high, value)
    if rank >= count or not low < high or _count_above(values, count, low) < rank:
        return np.float32(-np.inf)
    for _ in range(HALVINGS):
        middle = low + (high - low) * np.float32(0.5)
        if _count_above(values, count, middle) > rank:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def sample_bounds(
    blocks, ids, planes, wide, steps, num_queries, chosen, count, least, stop, kept, sample, bounds, scores
):
    """bounds[q] = a score that very likely at least `kept` of the keys [least, stop) of the chosen blocks are above.

    Of the chosen blocks (see `scan_chosen`) evenly spaced ones are scanned, about SAMPLED keys. -inf where all keys
    are wanted or the sample is too small to say. sample: scratch, float32 (num_queries, 2 * SAMPLED).
    """
    layout = wide // WIDE_STEP, (planes.shape[1] - wide) // NARROW_STEP
    every = max(1, count * BLOCK // SAMPLED)
    bounds[:] = np.inf
    taken = 0
    for place in range(0, count - 1, 2 * every):
        left, right = chosen[place], chosen[place + 1]
        following = min(place + 2 * every * 3, count - 2)
        for first in range(0, num_queries, TILE_QUERIES):
            pair_scores(
                blocks, left, right, chosen[following], chosen[following + 1], planes, first, layout[0], layout[1],
                steps, bounds, scores,
            )  # fmt: skip
            for query in range(first, min(first + TILE_QUERIES, num_queries)):
                for lane in range(BLOCK):
                    key_id = ids[left * BLOCK + lane]
                    seen = (key_id >= least) & (key_id < stop)
                    sample[query, taken + lane] = scores[query - first, lane] if seen else np.float32(-np.inf)
                for lane in range(BLOCK):
                    key_id = ids[right * BLOCK + lane]
                    seen = (key_id >= least) & (key_id < stop)
                    value = scores[query - first + TILE_QUERIES, lane]
                    sample[query, taken + BLOCK + lane] = value if seen else np.float32(-np.inf)
        taken += PAIR
        if taken + PAIR > sample.shape[1]:
            break
    share = kept / every
    ranked = int(1.5 * share + 6.0 * np.sqrt(share) + 4.0)
    for query in range(num_queries):
        bounds[query] = np.float32(-np.inf)
        if every > 1:
            bounds[query] = value_of_rank(sample[query], taken, ranked)


@njit(nogil=True, cache=True)
def scan_chosen(
    blocks, ids, planes, wide, steps, num_queries, chosen, first, last, least, stop, kept, pool, counts, bounds,
    scores,
):  # fmt: skip
    """Approximate scores of the keys [least, stop) in the blocks chosen[first:last]; the `kept` best per query.

    least >= 0. blocks as in `KeyBlocks`;
    ids (16 * blocks,) int32 the key of every place, -1 for none; planes (multiple of 4, rank)
    int8 and steps (2, at least as many) float32 as `encode_block_queries` gives them; chosen int32, first even and last
    even or the end of `chosen`, in which the last block is repeated if their number is odd. Only scores above
    bounds[query] count; bounds (rows of planes,) float32 may be raised here. Leaves counts[query] <= kept packed
    candidates, unordered, in pool[query]. pool (num_queries, capacity) int64, capacity > kept. Of equal scores the
    lower id is kept. Scratch: scores (8, 16) float32.
    """
    wides, narrows = wide // WIDE_STEP, (planes.shape[1] - wide) // NARROW_STEP
    capacity = pool.shape[1]
    counts[:num_queries] = 0
    for query in range(num_queries, planes.shape[0]):
        bounds[query] = np.inf
    for place in range(first, last, 2):
        left, right = chosen[place], chosen[place + 1]
        following = min(place + 2 * AHEAD, max(first, (last - 1) // 2 * 2))
        for tile in range(0, num_queries, TILE_QUERIES):
            in_left, in_right = pair_scores(
                blocks, left, right, chosen[following], chosen[following + 1], planes, tile, wides, narrows, steps,
                bounds, scores,
            )  # fmt: skip
            if left == right:
                in_right = np.int64(0)
            for j in range(2):
                found = in_left if j == 0 else in_right
                block = left if j == 0 else right
                while found:
                    bit = lowest_bit(found)
                    found &= found - 1
                    query, lane = tile + (bit >> 4), bit & 15
                    key_id = np.int64(ids[block * BLOCK + lane])
                    if key_id < least or key_id >= stop:
                        continue
                    count = counts[query]
                    pool[query, count] = pack_score(scores[TILE_QUERIES * j + (bit >> 4), lane], key_id)
                    count += 1
                    if count == capacity:
                        keep_best(pool[query], count, kept)
                        count = kept
                        # of a score equal to the last that is kept a lower id would win: keep looking at those
                        bounds[query] = _just_below(score_of(pool[query, kept - 1]))
                    counts[query] = count
    for query in range(num_queries):
        if counts[query] > kept:
            keep_best(pool[query], counts[query], kept)
            counts[query] = kept


@njit(nogil=True, cache=True)
def _just_below(score):
    """The next float32 below a finite score, or one close to it; -inf and NaN stay."""
    return np.float32(np.nextafter(np.float32(score), np.float32(-np.inf)))


@njit(nogil=True, cache=True)
def project_queries(queries, query_side, projected, scores):
    """projected[i, j] = query_side[j] . queries[i], for a multiple of 4 queries.

    projected (n, rank) float32 of queries (n, head_dim) and query_side (rank, head_dim) float32. Scratch: scores
    (4, 32) float32.
    """
    for start in range(0, len(query_side), 32):
        size = min(32, len(query_side) - start)
        for first in range(0, len(queries), TILE_QUERIES):
            score_tile(queries, first, query_side, start, size, scores)
            for i in range(TILE_QUERIES):
                for j in range(size):
                    projected[first + i, start + j] = scores[i, j]


@njit(nogil=True, cache=True)
def encode_block_queries(projected, count, step, wide, planes, steps, numbers):
    """Fill planes (n, rank) int8 and steps (2, at least n) float32 from the first numbers of `count` projected queries.

    projected (n, at least rank) float32, see `project_queries`; step (rank,) of the keys. numbers: scratch (rank,)
    float64. The score of a key is steps[0] times the sum over its 8-bit numbers plus steps[1] times that over its
    4-bit ones, but for a constant of the query. A query that is not finite gets NaN for its steps.
    """
    rank = len(step)
    for i in range(count):
        for j in range(rank):
            numbers[j] = np.float64(projected[i, j]) * np.float64(step[j])
        for part in range(2):
            low, high = (0, wide) if part == 0 else (wide, rank)
            largest = 0.0
            finite = 0.0
            for j in range(low, high):
                finite += numbers[j] * 0.0
                largest = max(largest, abs(numbers[j]))
            usable = finite == finite and 0.0 < largest < np.float64(3e38) * MAX_NUMBER
            for j in range(low, high):
                planes[i, j] = np.int8(np.rint(numbers[j] / largest * MAX_NUMBER)) if usable else np.int8(0)
            steps[part, i] = largest / MAX_NUMBER if usable else (np.nan if finite != finite or largest else 0.0)
        if steps[0, i] != steps[0, i] or steps[1, i] != steps[1, i]:
            steps[0, i] = steps[1, i] = np.nan
