"""Scans of blocks of 16 keys for four queries at once: the front's, and those of the means of leaves.

A scan of the front names the keys that are worth their rows (`rows.py`): nothing is written for the others. Rows are
asked for when they are named and scored some dozens at a time, when they have come.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.index.kernels.dots import (
    L1,
    TILE_QUERIES,
    _offset,
    _row_address,
    _spread,
    emit_prefetch,
    intrinsic,
    lowest_bit,
    prefetch_row,
    score_tile,
)
from retrieval_attn.index.kernels.packed import id_of, keep_best, pack_score, score_of
from retrieval_attn.index.kernels.products import HAS_VNNI, add_products, add_small_products
from retrieval_attn.index.sketch.rows import (
    AT_ONCE,
    BLOCK,
    NARROW_STEP,
    PAIR,
    THIN_STEP,
    VECTOR,
    WIDE_STEP,
    NumberBlocks,
    coded_blocks,
    row_scores,
)

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
                prefetch_row(rows, key)
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


TREE_NUMBERS = 16
"""Numbers of a key that the tree may split at: the first carry most of what queries tell keys apart by."""
LEAF_NUMBERS = 32
"""Most numbers of a leaf's mean, each in 8 bits."""
PLACE_BYTES = 4 + LEAF_NUMBERS // BLOCK
"""Bytes per key in addition to its codes: the id of its place, and its share of the leaf's mean."""
SPREAD_SAMPLE = 256
"""Keys of a node that the number which varies most is told from."""
SAMPLE_STEP = 8
"""One pair of blocks of means in SAMPLE_STEP is scanned first, to know how high a score the wanted share reaches."""
GOLDEN = 0.618
"""Leaves that follow each other lie about so much of the tree apart."""


class Leaves(NamedTuple):
    """means: coded means of leaves, 16 to a block. ordered: how many leaves there are: leaf i is block i of the sketch,
    and blocks behind the last are always looked at. share: of the leaves, what a search looks at; 1.0 is all.
    """

    means: NumberBlocks
    ordered: int
    share: float


def leaf_order(codes: npt.NDArray[np.int8], steps: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Keys of numbers codes * steps, (n, rank) int8 and (rank,) float32, in leaves: (n,) int32, every 16 in a row are
    one.

    Neighbours in the tree do not follow each other: of leaves in a row searches take samples.
    """
    order = np.arange(len(codes), dtype=np.int32)
    if len(codes) > BLOCK:
        _split(codes, steps.astype(np.float64) ** 2, order, np.empty(len(codes), np.int32))
    whole = len(codes) // BLOCK
    if whole > 1:
        stride = next(step for step in range(int(GOLDEN * whole) | 1, 2 * whole + 2) if np.gcd(step, whole) == 1)
        mixed = np.arange(whole) * stride % whole
        order[: whole * BLOCK] = order[: whole * BLOCK].reshape(whole, BLOCK)[mixed].ravel()
    return order


@njit(nogil=True, cache=True)
def _split(codes, weights, order, others):
    """Order keys (n, d) int8 into leaves. weights: of a number's variance; others: scratch (n,) int32.

    Nodes wait on a stack; the larger half has no turn. Keys are counted by their code, and keep their order.
    """
    starts, stops = np.empty(64, np.int64), np.empty(64, np.int64)
    counts = np.empty(256, np.int64)
    totals, squares = np.empty(codes.shape[1], np.int64), np.empty(codes.shape[1], np.int64)
    starts[0], stops[0] = 0, len(order)
    waiting = 1
    while waiting:
        waiting -= 1
        start, stop = starts[waiting], stops[waiting]
        if stop - start <= BLOCK:
            continue
        number = _widest(codes, weights, order, start, stop, totals, squares)
        counts[:] = 0
        for i in range(start, stop):
            counts[np.int64(codes[order[i], number]) + 128] += 1
        half = ((stop - start) // 2 + BLOCK - 1) // BLOCK * BLOCK
        border = before = np.int64(0)
        while before + counts[border] <= half:
            before += counts[border]
            border += 1
        ties = half - before
        border -= 128
        left, right = start, np.int64(0)
        for i in range(start, stop):
            key = order[i]
            code = np.int64(codes[key, number])
            tie = code == border
            if code < border or (tie and ties > 0):
                order[left] = key
                left += 1
                ties -= tie
            else:
                others[right] = key
                right += 1
        order[left:stop] = others[:right]
        starts[waiting], stops[waiting] = start, start + half
        starts[waiting + 1], stops[waiting + 1] = start + half, stop
        waiting += 2


@njit(nogil=True, cache=True)
def _widest(codes, weights, order, start, stop, totals, squares):
    """The number with the largest variance among the keys order[start:stop]. totals, squares: scratch (d,) int64."""
    step = max(1, (stop - start) // SPREAD_SAMPLE)
    totals[:] = 0
    squares[:] = 0
    count = 0
    for i in range(start, stop, step):
        key = order[i]
        for j in range(len(totals)):
            code = np.int64(codes[key, j])
            totals[j] += code
            squares[j] += code * code
        count += 1
    best, widest = -1.0, 0
    for j in range(len(totals)):
        spread = (squares[j] - np.float64(totals[j]) * totals[j] / count) * weights[j]
        if spread > best:
            best, widest = spread, j
    return widest


def code_means(means: npt.NDArray[np.float32]) -> NumberBlocks:
    """Blocks of the leaves' means (leaves, rank) float32: the first LEAF_NUMBERS numbers, in 8 bits."""
    numbers = means[:, :LEAF_NUMBERS]
    wide = -(-numbers.shape[1] // WIDE_STEP) * WIDE_STEP
    padded = np.zeros((len(numbers), wide), np.float32)
    padded[:, : numbers.shape[1]] = numbers
    return coded_blocks(padded)


@njit(nogil=True, cache=True)
def choose_blocks(means, ordered, total, share, planes, steps, num_queries, chosen, sample, bounds, scores):
    """Put the blocks that a search looks at into `chosen`, lowest first, and return how many.

    Leaves among the best `share` for any of the queries, about, and all of the blocks from `ordered` to `total`.
    means: blocks of leaves' means; planes, steps: queries coded for them. chosen: int32, room for total + 1; behind an
    odd number the last is repeated. Scratch: sample float32 (num_queries, at least 4 * rows of means), bounds, scores.
    """
    count = 0
    if share >= 1.0 or not ordered:
        for block in range(total):
            chosen[block] = block
        count = total
    else:
        wides = planes.shape[1] // WIDE_STEP
        rows = means.shape[0]
        bounds[:] = np.inf
        taken = 0
        for row in range(0, rows, 2 * SAMPLE_STEP):
            after = min(row + 6 * SAMPLE_STEP, rows - 2)
            mean_scores(means, row, row + 1, after, after + 1, planes, wides, 0, steps, bounds, scores)
            for query in range(num_queries):
                for lane in range(BLOCK):
                    sample[query, taken + lane] = scores[query, lane]
                    sample[query, taken + BLOCK + lane] = scores[query + TILE_QUERIES, lane]
            taken += min(PAIR, ordered - row * BLOCK)
        for query in range(num_queries):
            bounds[query] = value_of_rank(sample[query], taken, int(share * taken + 0.5))
        for row in range(0, rows, 2):
            after = min(row + 12, rows - 2)
            left, right = mean_scores(means, row, row + 1, after, after + 1, planes, wides, 0, steps, bounds, scores)
            near = any_query(left) | (any_query(right) << BLOCK)
            leaf = row * BLOCK
            while near:
                if near & 1 and leaf < ordered:
                    chosen[count] = leaf
                    count += 1
                near >>= 1
                leaf += 1
        for block in range(ordered, total):
            chosen[count] = block
            count += 1
    if count & 1:
        chosen[count] = chosen[count - 1]
    return count
