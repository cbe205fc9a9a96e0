"""Scans of blocks of 16 keys for four queries at once: the front's, and those of the means of leaves.

A scan of the front names the keys that are worth their rows (`rows.py`): nothing is written for the others. Rows are
asked for when they are named and scored some dozens at a time, when they have come.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.index.kernels.codes import prefetch_codes
from retrieval_attn.index.kernels.dots import (
    L1,
    TILE_QUERIES,
    _offset,
    _row_address,
    _spread,
    emit_prefetch,
    intrinsic,
    lowest_bit,
    score_tile,
)
from retrieval_attn.index.kernels.packed import id_of, keep_best, pack_score, score_of
from retrieval_attn.index.kernels.products import HAS_VNNI, add_products, add_small_products
from retrieval_attn.index.sketch.blocks import BLOCK, NARROW_STEP, PAIR, THIN_STEP, VECTOR
from retrieval_attn.index.sketch.rows import AT_ONCE, row_scores

AHEAD_BYTES = 12 << 10
"""So far ahead blocks are asked for."""
SAMPLED = 4096
"""Most keys that are scanned first, for a bound that about as many keys pass as are wanted."""
SAMPLED_SHARE, LEAST_SAMPLED = 16, 512
"""Of the keys one in SAMPLED_SHARE is, but never fewer than these."""
HALVINGS = 12
MAX_NUMBER = 127
WAITING = 16
"""Rows that are asked for while others are scored: as many come from memory at a time, and no burst of them queues."""
SCORED = 16
"""Rows that are scored by one call: a call with SCORED arrays takes as long as four."""
WAITING_ROOM = 256
"""Places of rows that wait."""
SCORES = 8 * BLOCK

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = ir.VectorType(_INT8, VECTOR)
_SUMS = ir.VectorType(_INT32, BLOCK)
_FLOATS = ir.VectorType(ir.FloatType(), BLOCK)
_WORDS = ir.VectorType(ir.IntType(16), VECTOR // 2)


def _scanning(classes: tuple[int, int], stored: bool) -> Any:
    """The code of a scan of blocks whose numbers have classes[0] bits and then classes[1]; 0: there are no more."""

    def codegen(context, builder, signature, args):
        blocks, left, right, next_left, next_right, planes, first_vectors, last_vectors, steps, bounds, scores = args
        blocks_type, planes_type = signature.args[0], signature.args[5]
        steps_type, bounds_type, scores_type = signature.args[8:]

        def number(value):
            return ir.Constant(_INT64, value)

        def load(address, kind, align):
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        rows = [_row_address(context, builder, blocks_type, blocks, block) for block in (left, right)]
        coming = [_row_address(context, builder, blocks_type, blocks, block) for block in (next_left, next_right)]
        queries = [_row_address(context, builder, planes_type, planes, number(i)) for i in range(TILE_QUERIES)]
        slots = [cgutils.alloca_once(builder, _SUMS) for _ in range(4 * TILE_QUERIES)]
        for slot in slots:
            builder.store(ir.Constant(_SUMS, [0] * BLOCK), slot)

        def four_numbers(query, byte):
            return builder.bitcast(_spread(builder, load(builder.add(query, byte), _INT32, 4), BLOCK), _BYTES)

        def add(part, own, line, byte):
            """Sums of class `part` += a vector of each of the blocks `own`, whose numbers begin at `byte`."""
            bits = classes[part]
            vectors = [
                _unpacked(builder, load(_offset(builder, rows[j], line, VECTOR), _BYTES, VECTOR), bits) for j in own
            ]
            for i, query in enumerate(queries):
                numbers = [four_numbers(query, builder.add(byte, number(4 * at))) for at in range(8 // bits)]
                for j, codes in zip(own, vectors, strict=True):
                    slot = slots[8 * part + 4 * j + i]
                    sums = builder.load(slot)
                    if bits == 8:
                        sums = add_products(builder, sums, codes[0], numbers[0], HAS_VNNI)
                    else:
                        sums = add_small_products(builder, sums, list(zip(codes, numbers, strict=True)), HAS_VNNI)
                    builder.store(sums, slot)

        # without VNNI vectors are half as wide and half as many: sums of two blocks would not fit
        for number_of, own in enumerate([[0, 1]] if HAS_VNNI else [[0], [1]]):
            start, before = number(0), number(0)
            for part, count in enumerate((first_vectors, last_vectors)):
                if not classes[part]:
                    continue
                numbers_of_vector = 4 * (8 // classes[part])
                with cgutils.for_range(builder, count) as loop:
                    line = builder.add(start, loop.index)
                    if not number_of:
                        for row in coming:
                            emit_prefetch(builder, _offset(builder, row, line, VECTOR), L1)
                    add(part, own, line, builder.add(before, builder.mul(loop.index, number(numbers_of_vector))))
                start = builder.add(start, count)
                before = builder.add(before, builder.mul(count, number(numbers_of_vector)))

        found = [number(0), number(0)]
        for i in range(TILE_QUERIES):
            parts = [
                _spread(builder, load(_offset(builder, _row_address(context, builder, steps_type, steps, number(part)),
                                              number(i), 4), ir.FloatType(), 4))
                for part in range(2)
            ]  # fmt: skip
            base = builder.ptrtoint(context.make_array(bounds_type)(context, builder, bounds).data, _INT64)
            bound = _spread(builder, load(builder.add(base, number(4 * i)), ir.FloatType(), 4))
            for j in range(2):
                one, other = (builder.sitofp(builder.load(slots[8 * part + 4 * j + i]), _FLOATS) for part in (0, 1))
                score = builder.fadd(builder.fmul(one, parts[0]), builder.fmul(other, parts[1]))
                if stored:
                    row = _row_address(context, builder, scores_type, scores, number(4 * j + i))
                    builder.store(score, builder.inttoptr(row, _FLOATS.as_pointer()), align=4)
                above = builder.zext(
                    builder.bitcast(builder.fcmp_ordered(">", score, bound), ir.IntType(BLOCK)), _INT64
                )
                found[j] = builder.or_(found[j], builder.shl(above, number(BLOCK * i)))
        return context.make_tuple(builder, signature.return_type, found)

    return codegen


def _unpacked(builder: Any, codes: Any, bits: int) -> list[Any]:
    """Emit the numbers in a vector of bytes, from the lowest bits up."""
    if bits == 8:
        return [codes]
    mask = ir.Constant(_BYTES, [(1 << bits) - 1] * VECTOR)
    parts = [builder.and_(codes, mask)]
    words = builder.bitcast(codes, _WORDS)
    for at in range(bits, 8, bits):  # there is no shift of bytes: of pairs, and what came from the neighbour is cut off
        moved = builder.lshr(words, ir.Constant(_WORDS, [at] * (VECTOR // 2)))
        parts.append(builder.and_(builder.bitcast(moved, _BYTES), mask))
    return parts


def _scan_signature(blocks: Any, planes: Any, steps: Any, bounds: Any, scores: Any) -> Any:
    pair, number = types.UniTuple(types.int64, 2), types.int64
    return pair(blocks, number, number, number, number, planes, number, number, steps, bounds, scores)


@intrinsic
def mean_scores(typingctx, blocks, left, right, next_left, next_right, planes, wides, none, steps, bounds, scores):
    """scores[4 * j + i] = scores of the 16 rows of block left (j = 0) or right (j = 1) for query i < 4.

    Two int64: bit 16 * i + t of the j-th says that row t's score is above bounds[i]. The cache is asked for the blocks
    next_left and next_right, line by line between the products: all lines at once would have to queue. blocks: see
    `blocks.NumberBlocks`, of `wides` vectors; none: 0.
    """
    return _scan_signature(blocks, planes, steps, bounds, scores), _scanning((8, 0), True)


@intrinsic
def front_scores(typingctx, blocks, left, right, next_left, next_right, planes, narrows, thins, steps, bounds, scores):
    """The same of blocks of a front, see `front.Front`: of `narrows` vectors in 4 bits and `thins` in 2."""
    return _scan_signature(blocks, planes, steps, bounds, scores), _scanning((4, 2), True)


@intrinsic
def front_found(typingctx, blocks, left, right, next_left, next_right, planes, narrows, thins, steps, bounds, scores):
    """The same, but no scores are written."""
    return _scan_signature(blocks, planes, steps, bounds, scores), _scanning((4, 2), False)


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
def front_layout(planes, narrow):
    """Vectors of a block in 4 bits and in 2, and pairs of blocks to ask for ahead."""
    narrows, thins = narrow // NARROW_STEP, (planes.shape[1] - narrow) // THIN_STEP
    return narrows, thins, AHEAD_BYTES // (2 * VECTOR * (narrows + thins))


@njit(nogil=True, cache=True)
def sample_bounds(
    blocks, ids, planes, narrow, steps, num_queries, chosen, count, least, stop, wanted, sample, bounds, scores
):
    """bounds[q] = a score that about `wanted` of the keys [least, stop) of the chosen blocks are above.

    Of the chosen blocks (see `scan_front`) evenly spaced ones are scanned. -inf where all keys are wanted or the sample
    is too small to say. sample: scratch, float32 (num_queries, at least SAMPLED + PAIR).
    """
    narrows, thins, ahead = front_layout(planes, narrow)
    sampled = max(LEAST_SAMPLED, min(SAMPLED, count * BLOCK // SAMPLED_SHARE))
    every = -(-count * BLOCK // sampled)
    bounds[:] = np.inf
    if every <= 1:
        bounds[:num_queries] = np.float32(-np.inf)
        return
    taken = 0
    for place in range(0, count - 1, 2 * every):
        left, right = chosen[place], chosen[place + 1]
        following = min(place + 2 * every * 3, count - 2)
        front_scores(
            blocks, left, right, chosen[following], chosen[following + 1], planes, narrows, thins, steps, bounds, scores
        )
        for j in range(2):
            block = left if j == 0 else right
            for lane in range(BLOCK):
                key_id = ids[block * BLOCK + lane]
                seen = (key_id >= least) & (key_id < stop)
                for query in range(num_queries):
                    value = scores[TILE_QUERIES * j + query, lane]
                    sample[query, taken + lane] = value if seen else np.float32(-np.inf)
            taken += BLOCK
        if taken + PAIR > SAMPLED:
            break
    share = wanted * taken / (count * BLOCK)
    ranked = int(share + np.sqrt(share) + 1.0)  # rather too many than too few
    for query in range(num_queries):
        bounds[query] = value_of_rank(sample[query], taken, ranked)


@njit(nogil=True, cache=True)
def scan_front(
    blocks, rows, ids, planes, narrow, steps, row_planes, wide, row_steps, num_queries, chosen, first, last, whole,
    least, stop, kept, pool, counts, bounds, floors, waiting, scores,
):  # fmt: skip
    """The `kept` best keys [least, stop) by their rows, of those in the blocks chosen[first:last] that the front lets
    pass for one of the up to 4 queries; returns how many rows were scored.

    least >= 0. whole: blocks below have only such keys. blocks, narrow: see `Front`; rows, wide: see `KeyRows`; ids
    (16 * blocks,) int32 the key of every place, -1 for none; planes (4, numbers of the front) int8 and steps (2, 4)
    float32 as `encode_block_queries` gives them, row_planes (4, PARTS * width) as `spread_planes` does, with row_steps;
    chosen int32, first even and last even or the end of `chosen`, in which the last block is repeated if their number
    is odd. bounds (4,) float32: keys whose score by the front is above pass. Leaves counts[query] <= kept packed
    candidates, unordered, in pool[query]. pool (num_queries, capacity) int64, capacity > kept. Of equal scores the
    lower place is kept. Scratch: floors (4,) float32, waiting int64 (WAITING_ROOM,), scores (8, 16) float32.
    """
    narrows, thins, ahead = front_layout(planes, narrow)
    counts[:num_queries] = 0
    for query in range(TILE_QUERIES):
        floors[query] = np.float32(-np.inf) if query < num_queries else np.float32(np.inf)
        if query >= num_queries:
            bounds[query] = np.inf
    head = tail = scored = np.int64(0)  # rows waiting[head:tail] are asked for
    for place in range(first, last, 2):
        left, right = chosen[place], chosen[place + 1]
        following = min(place + 2 * ahead, max(first, (last - 1) // 2 * 2))
        in_left, in_right = front_found(
            blocks, left, right, chosen[following], chosen[following + 1], planes, narrows, thins, steps, bounds, scores
        )
        if left == right:
            in_right = np.int64(0)
        found = any_query(in_left) | any_query(in_right) << BLOCK
        while found:
            bit = lowest_bit(found)
            found &= found - 1
            block = left if bit < BLOCK else right
            key = block * BLOCK + (bit & (BLOCK - 1))
            # ids that need not be looked at are a cache line saved for every few keys
            if block < whole or least <= ids[key] < stop:
                waiting[tail] = key
                prefetch_codes(rows, key)
                tail += 1
        while tail - head >= WAITING + SCORED:
            _score_rows(
                rows, row_planes, wide, row_steps, head, head + SCORED, kept, pool, counts, floors, waiting, scores
            )
            head += SCORED
        if tail > WAITING_ROOM - PAIR - AT_ONCE:
            for at in range(head, tail):
                waiting[at - head] = waiting[at]
            scored += head
            head, tail = np.int64(0), tail - head
    _score_rows(rows, row_planes, wide, row_steps, head, tail, kept, pool, counts, floors, waiting, scores)
    for query in range(num_queries):
        if counts[query] > kept:
            keep_best(pool[query], counts[query], kept)
            counts[query] = kept
        for at in range(counts[query]):
            packed = pool[query, at]
            pool[query, at] = pack_score(score_of(packed), ids[id_of(packed)])
    return scored + tail


@njit(nogil=True, cache=True)
def _score_rows(rows, planes, wide, steps, start, stop, kept, pool, counts, floors, waiting, scores):
    """Score the rows waiting[start:stop] for four queries; what is above their floors is kept, with its place."""
    capacity = pool.shape[1]
    for at in range(stop, start + -(-(stop - start) // AT_ONCE) * AT_ONCE):
        waiting[at] = waiting[stop - 1]
    own = scores.reshape(SCORES)
    for at in range(start, stop, AT_ONCE):
        found = row_scores(rows, waiting, at, planes, wide, steps, floors, own)
        found &= (1 << (TILE_QUERIES * min(AT_ONCE, stop - at))) - 1
        while found:
            bit = lowest_bit(found)
            found &= found - 1
            query = bit & (TILE_QUERIES - 1)
            count = counts[query]
            pool[query, count] = pack_score(own[bit], waiting[at + (bit >> 2)])
            count += 1
            if count == capacity:
                keep_best(pool[query], count, kept)
                count = kept
                # of a score equal to the last that is kept a lower place would win: keep looking at those
                floors[query] = _just_below(score_of(pool[query, kept - 1]))
            counts[query] = count


@njit(nogil=True, cache=True, inline="always")
def any_query(found):
    """Bit t: whether key t has its bit set for any of four queries, see `mean_scores`."""
    two = found | ((found >> 32) & 0xFFFFFFFF)
    return (two | (two >> 16)) & 0xFFFF


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

    projected (n, numbers) float32, see `project_queries`; step (rank,) of the keys, 0 for numbers that are not
    projected. numbers: scratch (rank,) float64. The score of a key is steps[0] times the sum over its first `wide`
    numbers plus steps[1] times that over the others, but for a constant of the query. A query that is not finite gets
    NaN for its steps.
    """
    rank, known = len(step), projected.shape[1]
    for i in range(count):
        for j in range(rank):
            numbers[j] = np.float64(projected[i, j]) * np.float64(step[j]) if j < known else 0.0
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
