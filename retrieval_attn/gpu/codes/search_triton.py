"""The Triton kernels of `search.py`: scores by codes, the best keys, and their scores by finer codes.

Imported only with Triton. Scores are sums of products of bytes, exact in int32, so that the keys named do not depend on
the order of additions: every replay names the same keys. A query keeps 16 bits in two planes of 8. A stored score is
the difference to the score of a key whose codes are all in the middle of their levels, in 11 bits: half the bytes.

The finer codes of some hundred keys per query are scattered over host memory. Reads over the bus have a high latency
and overlap: a large number of programs reads few keys each; a second kernel keeps the best keys of a query.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.codes.codes import MOST_VARIANCE
from retrieval_attn.gpu.codes.search import (
    FINE,
    MIN_WIDTH,
    SMALL_BLOCK,
    TABLE_WORDS,
    CodedHeads,
    CodeSearch,
    QueryGroup,
    SearchScratch,
)
from retrieval_attn.gpu.products_triton import begin, overlap

MAX_ROUNDS = 24
"""Cuts of a threshold's range at most: each leaves about a third, so 24 pass float32's resolution."""


@triton.jit
def threshold(values, k, enough, ROUNDS: tl.constexpr):
    """A number that at least `k` values reach, and hardly more than `enough` where they differ at all.

    values: fewer than 65,536, in rows; -inf is none. Fewer than `k` of them: the least; none: inf.
    """
    low = tl.min(tl.where(values > -float("inf"), values, float("inf")))
    high = tl.max(values)
    count = tl.sum(tl.where(values >= low, 1, 0))
    turn = 0
    while (turn < ROUNDS) & (count > enough):
        # two numbers are tried at once, for a sum over all threads is what a turn costs: 16 bits for each count
        first, second = low + (high - low) * 0.33, low + (high - low) * 0.67
        total = tl.sum(tl.where(values >= first, 1, 0) + tl.where(values >= second, 65536, 0))
        above1, above2 = total & 65535, (total >> 16) & 65535
        high = tl.where(above2 >= k, high, tl.where(above1 >= k, second, first))
        low = tl.where(above2 >= k, second, tl.where(above1 >= k, first, low))
        count = tl.where(above2 >= k, above2, tl.where(above1 >= k, above1, count))
        turn += 1
    return low


@triton.jit
def tell(products, lacking, best, scale, ROUNDS: tl.constexpr):
    """Estimate logits of a query's candidates from codes, see `search.EstimatedLogits`. products: q . k by codes, -inf:
    no key. lacking: the variance of such a logit.
    """
    least_read = threshold(products, best, best + best // 4, ROUNDS)
    return tl.where(products >= least_read, float("inf"), products + lacking / (2 * scale))


REFINED_KEYS = 64
"""Keys of a program."""
REFINED_COLUMNS = 8
"""Of a product of bytes at least; a query has two."""
REFINED_SCORE = 60000.0
"""What is left of a score is a float16."""


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count"])
def _read_kernel(
    table, planes, centres, factors, units, bases, keys, said, picked_room,
    members, first_entry, first_member, count,
    WORDS: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, PICKED: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, FINE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Estimate q . k from the finer codes of the N keys that were picked for a query; -inf in places without a key."""
    i = tl.program_id(0)
    at = i.to(tl.int64)
    entry = (first_entry + i // count).to(tl.int64)
    query = entry * members + first_member + i % count
    codes = table.to(tl.pointer_type(tl.int8), bitcast=True) + tl.multiple_of(tl.load(table + entry * WORDS), 16)
    byte, column, slot = tl.arange(0, K), tl.arange(0, COLUMNS), tl.program_id(1) * N + tl.arange(0, N)
    begin(OVERLAP)
    key = tl.load(keys + at * picked_room + slot, mask=slot < picked_room, other=-1)
    inside = key >= 0
    line = codes + key.to(tl.int64)[:, None] * BYTES + byte[None, :]
    code = tl.load(line, mask=inside[:, None] & (byte < BYTES)[None, :], other=0)
    # the two planes of the query are the first columns, as in `_score_keys`
    own = planes + query * 8 * K + column[None, :] * K + byte[:, None]
    here = (column < 2)[None, :]
    products = tl.dot(code, tl.load(own, mask=here, other=0), out_dtype=tl.int32)
    products = tl.dot(code & 63, tl.load(own + 2 * K, mask=here, other=0), products, out_dtype=tl.int32)
    products = tl.dot(code & 15, tl.load(own + 4 * K, mask=here, other=0), products, out_dtype=tl.int32)
    products = tl.dot(code & 3, tl.load(own + 6 * K, mask=here, other=0), products, out_dtype=tl.int32)
    share = tl.where(column == 0, FINE, tl.where(column == 1, 1, 0))[None, :]
    total = tl.sum(products * share, axis=1).to(tl.float32) - tl.load(centres + query)
    value = total * (tl.load(units + query) * tl.load(factors + query)) + tl.load(bases + query)
    tl.store(said + at * PICKED + slot, tl.where(inside, value, -float("inf")), mask=slot < picked_room)


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count", "told_best"])
def _keep_kernel(
    variances, code_units, code_bases, code_variances, least, scores, hits, keys, said, places, ids, told,
    k, enough, picked_room, room, told_best, scale, members, first_entry, first_member, count, max_keys,
    PICKED: tl.constexpr, ROOM: tl.constexpr, MOST_VARIANCE: tl.constexpr, MOST_SCORE: tl.constexpr,
    HAS_PLACES: tl.constexpr, TELLS: tl.constexpr, ROUNDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the ids of the `k` best of the keys that were picked for a query, by their finer codes, to ids, and the
    estimated logits of the other keys to scores. TELLS: write those of the selected keys to told, see
    `search.EstimatedLogits`.
    """
    i = tl.program_id(0)
    at = i.to(tl.int64)
    query = (first_entry + i // count).to(tl.int64) * members + first_member + i % count
    row = query
    if HAS_PLACES:
        row = tl.load(places + query).to(tl.int64)
    slot = tl.arange(0, PICKED)
    begin(OVERLAP)
    value = tl.load(said + at * PICKED + slot, mask=slot < picked_room, other=-float("inf"))
    key = tl.load(keys + at * picked_room + slot, mask=slot < picked_room, other=-1)
    least_named = threshold(value, k, enough, ROUNDS)
    chosen = value >= least_named
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    is_named = chosen & (place < room)
    # first to the device's own memory, for the host's takes whole lines far better than scattered words
    tl.store(hits + at * picked_room + place, key, mask=is_named)
    lacking = tl.minimum(tl.load(variances + query) * scale * scale, MOST_VARIANCE)
    if TELLS:
        product = tell(tl.where(is_named, value, -float("inf")), lacking, told_best, scale, ROUNDS)
        tl.store(told + row * room + place, product, mask=is_named)
    # what is left of a key that is not named is what its finer code says, with the variance that this lacks: the code
    # that sums up takes that of the others for it
    code_lacking = tl.minimum(tl.load(code_variances + query) * scale * scale, MOST_VARIANCE)
    shift = (lacking - code_lacking) / (2 * scale) - tl.load(code_bases + query)
    code_unit = tl.maximum(tl.load(code_units + query), 1e-30)
    left = tl.minimum(tl.maximum((value + shift) / code_unit, -MOST_SCORE), MOST_SCORE)
    tl.store(scores + at * max_keys + key, left.to(tl.float16), mask=(key >= 0) & (is_named == 0))
    tl.store(least + at, tl.maximum(tl.load(least + at), (least_named + shift) / code_unit))
    tl.debug_barrier()  # what was written is read by other threads of the program
    number = tl.sum(is_named.to(tl.int32), axis=0)
    slot = tl.arange(0, ROOM)
    line = tl.load(hits + at * picked_room + slot, mask=slot < number, other=-1)
    tl.store(ids + row * room + slot, line, mask=slot < room)


def refine(
    search: CodeSearch,
    finer: CodedHeads,
    ids: Tensor,
    places: Tensor | None,
    scratch: SearchScratch,
    turn: QueryGroup,
    members: int,
    scale: float,
) -> None:
    """Name the best of the keys that were picked for the queries of a turn in ids, as `CodeSearch.run` does."""
    shape, k, told = search.shape, search.shape.kept, search.told
    queries, own = turn.entries * turn.members, (members, turn.first_entry, turn.first_member, turn.members)
    _read_kernel[(queries, triton.cdiv(shape.picked_room, REFINED_KEYS))](
        finer.table, finer.planes, finer.centres, finer.factors, finer.units, finer.bases,
        scratch.keys, scratch.said, shape.picked_room, *own,
        WORDS=TABLE_WORDS, BYTES=shape.finer_bytes, K=finer.planes.shape[2], PICKED=scratch.picked,
        N=REFINED_KEYS, COLUMNS=REFINED_COLUMNS, FINE=FINE, num_warps=4, **overlap(finer.planes.device),
    )  # fmt: skip
    _keep_kernel[(queries,)](
        finer.variances, search.units, search.bases, search.variances, scratch.least, scratch.scores, scratch.hits,
        scratch.keys, scratch.said, scratch.hits if places is None else places, ids,
        scratch.said if told is None else told.products, k, k + k // 16,
        shape.picked_room, shape.room, 0 if told is None else told.best, float(scale), *own, scratch.max_keys,
        PICKED=scratch.picked, ROOM=triton.next_power_of_2(shape.room), MOST_VARIANCE=MOST_VARIANCE,
        MOST_SCORE=REFINED_SCORE, HAS_PLACES=places is not None, TELLS=told is not None, ROUNDS=MAX_ROUNDS, num_warps=4,
        **overlap(finer.planes.device),
    )  # fmt: skip


BLOCK_KEYS = 128
"""Keys that a program scores at a time."""
PROGRAMS = 1056
"""Programs that score keys, of all heads together: eight for each multiprocessor of an H100."""
LONG = 1 << 20
"""Keys of a head from which on twice as many programs share them: 67 us for 72, of 1M keys of 4 heads for 6 queries."""
WIDE_TILE, WIDE_WARPS = 32, 8
"""Queries of a tile from which on a program has more warps: four would hold 194 registers a thread."""
NARROW_TILE, MOST_REGISTERS = 64, 64
"""Bytes of a code up to which a program of SMALL_BLOCK queries, and half of them up to which one of twice as many needs
no more than MOST_REGISTERS a thread: eight programs then fit a multiprocessor of an H100. With 70 seven fit, and the
last of 1,056 come alone (33.6 us in place of 30.0)."""
COLUMNS = 32
"""Numbers of a row at most, as keys are picked: what is chosen of it are the bits of a word."""
MOST_SCORE = 32000.0
"""The largest score that codes could have, as it is stored: float16 has twice as much."""
TILE_BYTES = 48 << 10
"""Codes on their way that a program holds at most: what else it shares then fits the 99 KiB of the smallest cards."""


@triton.jit(do_not_specialize=["query_b", "q_heads", "members"])
def _project_kernel(
    query, table, planes, centres, factors, units, bases, variances, query_b, query_h, q_heads, members, dim,
    WORDS: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, D: tl.constexpr, FINE: tl.constexpr,
    MOST_SCORE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """query_projection . query i as whole numbers: two planes of 8 bits, of which the second counts 1 / FINE.

    planes[i] (4, 2, K): what meets byte b of a code, and what meets its lowest 6, 4 and 2 bits. Numbers are not taken
    out of a byte: 64 d + 16 c + 4 b + a, d with a sign, is a byte as it is, and so are its lowest bits, so that a query
    asks for these with what is left of its own numbers. A score is (sum of products - centres[i]) * factors[i]; NaN for
    a query that is not finite. units[i]: what a score of 1 counts; bases[i] and variances[i]: what is to be added, and
    how far off scores are then.
    """
    i = tl.program_id(0)
    row, head = i // q_heads, i % q_heads
    words = table + (i // members).to(tl.int64) * WORDS
    column, number, byte = tl.arange(0, D), tl.arange(0, D), tl.arange(0, K)
    used = tl.load(words + 2) > 0
    # an address out of the table: the graph was captured for no cache in particular
    projection = tl.load(words + 1).to(tl.pointer_type(tl.float32))
    estimate = tl.load(words + 3).to(tl.pointer_type(tl.float32))
    split = tl.load(words + 4)
    wide, narrow = (split & 65535).to(tl.int32), ((split >> 16) & 65535).to(tl.int32)
    thin = BYTES - wide - narrow
    inside = (number < dim)[:, None] & (column < dim)[None, :] & used
    matrix = tl.load(projection + number[:, None] * dim + column[None, :], mask=inside, other=0.0)
    offset = tl.load(estimate + column, mask=(column < dim) & used, other=0.0)
    noise = tl.load(estimate + dim + number, mask=(number < dim) & used, other=0.0)
    begin(OVERLAP)  # what is read before depends on no kernel
    own = tl.load(query + row.to(tl.int64) * query_b + head * query_h + column, mask=column < dim, other=0.0)
    own = own.to(tl.float32)
    # one vector fills no tile of a matrix instruction: float32 additions
    result = tl.sum(matrix * own[None, :], axis=1)
    finite = tl.sum(tl.where(result - result == 0, 0, 1), axis=0) == 0
    result = tl.where(finite, result, 0.0)
    # the numbers of each byte, from the lowest bits up; of one number it is the last
    is_thin = (byte >= wide + narrow) & (byte < BYTES)
    is_narrow = (byte >= wide) & (byte < wide + narrow)
    lower = tl.where(is_thin, byte + narrow, byte)
    upper = tl.where(is_thin, byte + narrow + 3 * thin, tl.where(is_narrow, byte + narrow, byte))
    a, d = _numbers_at(result, lower, is_narrow | is_thin, D), _numbers_at(result, upper, byte < BYTES, D)
    b = _numbers_at(result, byte + narrow + thin, is_thin, D)
    c = _numbers_at(result, byte + narrow + 2 * thin, is_thin, D)
    d_share = d * tl.where(is_thin, 1.0 / 64, tl.where(is_narrow, 1.0 / 16, 1.0))
    six = tl.where(is_thin, c / 16 - d_share, 0.0)
    four = tl.where(is_thin, b / 4 - c / 16, tl.where(is_narrow, a - d_share, 0.0))
    two = tl.where(is_thin, a - b / 4, 0.0)
    largest = tl.maximum(_largest(d_share), tl.maximum(_largest(six), tl.maximum(_largest(four), _largest(two))))
    # to name keys it is not undone: scores are only compared with those of the same query
    scale = 127.0 / tl.where(largest > 0, largest, 1.0)
    at = planes + i.to(tl.int64) * 8 * K + byte
    # of a code with all numbers in the middle of their levels, bytes and their lowest bits
    centre = tl.sum(
        _store_planes(at, d_share * scale, K, FINE) * tl.where(is_thin, 42, tl.where(is_narrow, 8, 0)), axis=0
    )
    centre += tl.sum(_store_planes(at + 2 * K, six * scale, K, FINE) * 42, axis=0)
    centre += tl.sum(_store_planes(at + 4 * K, four * scale, K, FINE) * tl.where(is_thin, 10, 8), axis=0)
    centre += tl.sum(_store_planes(at + 6 * K, two * scale, K, FINE) * 2, axis=0)
    half = tl.where(is_thin, 2.0, 8.0)
    most = tl.sum(tl.abs(d) * tl.where(byte < wide, 128.0, half) + (tl.abs(a) + tl.abs(b) + tl.abs(c)) * half, axis=0)
    factor = MOST_SCORE / tl.maximum(most * scale * FINE, 1.0)
    unit = largest / (127.0 * FINE)
    tl.store(centres + i, centre)
    tl.store(factors + i, tl.where(finite, factor, float("nan")))
    tl.store(units + i, unit / factor)
    tl.store(bases + i, tl.sum(offset * own, axis=0) + centre * unit)
    tl.store(variances + i, tl.sum(result * result * noise, axis=0))


@triton.jit
def _numbers_at(numbers, index, here, D: tl.constexpr):
    """numbers[index], (K,), 0 where not `here`."""
    return tl.where(here, tl.gather(numbers, tl.minimum(index, D - 1), 0), 0.0)


@triton.jit
def _largest(numbers):
    return tl.max(tl.abs(numbers), axis=0)


@triton.jit
def _store_planes(at, scaled, K: tl.constexpr, FINE: tl.constexpr):
    """Write numbers of up to 127 as two planes (2, K), and return them in steps of the second."""
    coarse = tl.floor(scaled + 0.5)
    fine = tl.floor((scaled - coarse) * FINE + 0.5)
    tl.store(at, coarse.to(tl.int8))
    tl.store(at + K, fine.to(tl.int8))
    return coarse * FINE + fine


@triton.jit
def _score_keys(
    codes, length, first, step, planes, centres, factors, query, column_query, row, here, scores, best, max_keys,
    BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Scores of N codes from `first` on, and so on by `step`, for G queries, and the best of every GROUP of them.

    query, row (G,): their numbers, and rows of scores and best; column_query (2 * G,): each query twice;
    here: which count.
    """
    # the two planes of a query are neighbouring columns of one product: codes are loaded once, for all of them, and a
    # thread has both
    k, column = tl.arange(0, K), tl.arange(0, 2 * G)
    own = planes + column_query[None, :] * 8 * K + (column % 2)[None, :] * K + k[:, None]
    own_query = (column_query >= 0)[None, :]
    all_planes, six_planes = tl.load(own, mask=own_query, other=0), tl.load(own + 2 * K, mask=own_query, other=0)
    four_planes, two_planes = (
        tl.load(own + 4 * K, mask=own_query, other=0),
        tl.load(own + 6 * K, mask=own_query, other=0),
    )
    plane = tl.where(tl.arange(0, 2) == 0, FINE, 1)[None, None, :]
    centre = tl.load(centres + query, mask=here, other=0.0)[None, :]
    factor = tl.load(factors + query, mask=here, other=1.0)[None, :]
    # the grid is captured, the length is not: a fixed number of programs shares the current keys
    for start in range(first, length, step):
        key = start + tl.arange(0, N)
        inside = key < length
        at = codes + key.to(tl.int64)[:, None] * BYTES + k[None, :]
        code = tl.load(at, mask=inside[:, None] & (k < BYTES)[None, :], other=0)
        # bytes go to the matrix units as they are, or by one operation on four of them; those are for whole bytes only,
        # and more than masks would send them through shared memory once more. int32 holds K up to 256
        products = tl.dot(code, all_planes, out_dtype=tl.int32)
        products = tl.dot(code & 63, six_planes, products, out_dtype=tl.int32)
        products = tl.dot(code & 15, four_planes, products, out_dtype=tl.int32)
        products = tl.dot(code & 3, two_planes, products, out_dtype=tl.int32)
        total = (tl.sum(tl.reshape(products, (N, G, 2)) * plane, axis=2).to(tl.float32) - centre) * factor
        # what lies behind the last key is written as well: its group's best is then right, and scratch has room
        total = tl.where(inside[:, None], total, -float("inf")).to(tl.float16)
        tl.store(scores + row[None, :] * max_keys + key.to(tl.int64)[:, None], total, mask=here[None, :])
        highest = tl.max(tl.reshape(total, (N // GROUP, GROUP, G)), axis=1)
        some = start // GROUP + tl.arange(0, N // GROUP)
        tl.store(best + row[None, :] * (max_keys // GROUP) + some.to(tl.int64)[:, None], highest, mask=here[None, :])


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count"])
def _score_kernel(
    planes, centres, factors, table, scores, best, members, first_entry, first_member, count, max_keys,
    WORDS: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    FINE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores of all codes of an entry for `count` of its `members` queries, see `_score_keys`.

    A program has G of the queries: how many there are is no matter of the compiled code.
    """
    program, programs = tl.program_id(1), tl.num_programs(1)
    entry, block = first_entry + tl.program_id(0), tl.program_id(2) * G
    words = table + entry.to(tl.int64) * WORDS
    length = tl.load(words + 2)
    codes = table.to(tl.pointer_type(tl.int8), bitcast=True) + tl.multiple_of(tl.load(words), 16)
    own = entry.to(tl.int64) * members + first_member
    member, column = block + tl.arange(0, G), block + tl.arange(0, 2 * G) // 2
    column_query = tl.where(column < count, own + column, -1)
    row = tl.program_id(0).to(tl.int64) * count + member  # scratch has rows for the queries of this turn
    begin(OVERLAP)
    _score_keys(
        codes, length, program * N, programs * N, planes, centres, factors, own + member, column_query,
        row, member < count, scores, best, max_keys,
        BYTES, K, N, G, GROUP, FINE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["members"])
def _score_tiles_kernel(
    planes, centres, factors, table, tiles, scores, best, members, max_keys,
    WORDS: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    FINE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores of all codes of a tile's entry for the tile's queries, see `_score_keys`; row i of scratch is query i's.

    The grid is captured, the number of tiles is not: a fixed number of programs shares the current tiles.
    """
    count = tl.maximum(tl.load(tiles).to(tl.int32), 1)
    parts = tl.num_programs(0) // count
    tile, part = tl.program_id(0) % count, tl.program_id(0) // count
    own = tiles + (1 + tile) * G
    query, column_query = tl.load(own + tl.arange(0, G)), tl.load(own + tl.arange(0, 2 * G) // 2)
    entry = tl.load(own) // members  # no tiles: -1 // members, which is not used
    is_used = (part < parts) & (tl.load(own) >= 0)
    words = table + tl.where(is_used, entry, 0) * WORDS
    length = tl.where(is_used, tl.load(words + 2), 0)
    codes = table.to(tl.pointer_type(tl.int8), bitcast=True) + tl.multiple_of(tl.load(words), 16)
    begin(OVERLAP)
    _score_keys(
        codes, length, part * N, parts * N, planes, centres, factors, query, column_query, query, query >= 0,
        scores, best, max_keys,
        BYTES, K, N, G, GROUP, FINE,
    )  # fmt: skip


@triton.jit
def _ones(bits):
    """How many bits of an int32 are 1: sums of neighbouring bits, of pairs, of fours, and of bytes."""
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


@triton.jit
def _store_chosen(at, chosen, room, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the numbers of the `chosen` (ROWS, COLUMNS), row by row, `room` at most, and return how many there are.

    Places are told by a running sum, not by an atomic counter: the order is the same at every run. The sum is one of
    rows, whose bits are stored one after the other: that of all numbers took most of the kernel's instructions, and
    another layout of all of them for the sake of the store.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    bits = tl.sum(tl.where(chosen, 1 << column, 0), axis=1)
    count = _ones(bits)
    place = tl.cumsum(count, axis=0) - count
    for _ in range(tl.max(count, axis=0)):
        lowest = bits & -bits
        # its place in the word is the exponent of a float
        number = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 255) - 127
        tl.store(at + place, row * COLUMNS + number, mask=(bits != 0) & (place < room))
        bits ^= lowest
        place += 1
    return tl.minimum(tl.sum(count, axis=0), room)


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count", "told_best"])
def _pick_kernel(
    table, scores, least, best, groups, hits, places, ids, told, units, bases, variances,
    k, enough_groups, enough, room, told_best, scale, members, first_entry, first_member, count, max_keys,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PICKED: tl.constexpr, ROOM: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PLACES: tl.constexpr, REFINES: tl.constexpr,
    TELLS: tl.constexpr, MOST_VARIANCE: tl.constexpr, ROUNDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The groups whose best scores are among the `k` best, and of their keys those whose scores are.

    A group that is left out has k groups before it, each with a better key than its own best. REFINES: ids are those
    of the turn, for kernels that name the best of them. TELLS: and what their codes tell, see `EstimatedLogits`.
    """
    i = tl.program_id(0)
    at = i.to(tl.int64)
    entry = (first_entry + i // count).to(tl.int64)
    length = tl.cdiv(tl.load(table + entry * WORDS + 2), GROUP).to(tl.int32)
    query = entry * members + first_member + i % count
    row = query
    if HAS_PLACES:
        row = tl.load(places + row).to(tl.int64)
    if REFINES:
        row = at

    begin(OVERLAP)
    group_rows: tl.constexpr = GROUPS // GROUP_COLUMNS
    first = tl.arange(0, group_rows) * GROUP_COLUMNS
    number = first[:, None] + tl.arange(0, GROUP_COLUMNS)[None, :]
    # whole rows are loaded, or none: 16 bytes at once
    values = tl.load(best + at * GROUPS + number, mask=(first < length)[:, None], other=-float("inf"))
    values = tl.where(number < length, values.to(tl.float32), -float("inf"))
    chosen = values >= threshold(values, k, enough_groups, ROUNDS)
    picked = _store_chosen(groups + at * PICKED, chosen, PICKED, group_rows, GROUP_COLUMNS)
    tl.debug_barrier()  # what was written is read by other threads of the program

    rows: tl.constexpr = PICKED * GROUP // COLUMNS
    first = tl.arange(0, rows) * COLUMNS
    inside = first // GROUP < picked
    key = tl.load(groups + at * PICKED + first // GROUP, mask=inside, other=0) * GROUP + first % GROUP
    key = key[:, None] + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(scores + at * max_keys + key, mask=inside[:, None], other=-float("inf")).to(tl.float32)
    least_chosen = threshold(values, k, enough, ROUNDS)
    tl.store(least + at, least_chosen)
    # first to the device's own memory, for the host's takes whole lines far better than scattered words
    named = _store_chosen(hits + at * room, values >= least_chosen, room, rows, COLUMNS)
    tl.debug_barrier()
    slot = tl.arange(0, ROOM)
    number = tl.load(hits + at * room + slot, mask=slot < named, other=0)
    group = tl.load(groups + at * PICKED + number // GROUP, mask=slot < named, other=0)
    line = tl.where(slot < named, group * GROUP + number % GROUP, -1)
    tl.store(ids + row * room + slot, line, mask=slot < room)
    if TELLS:
        score = tl.load(scores + at * max_keys + line, mask=slot < named, other=-float("inf")).to(tl.float32)
        product = score * tl.load(units + query) + tl.load(bases + query)
        lacking = tl.minimum(tl.load(variances + query) * scale * scale, MOST_VARIANCE)
        product = tell(product, lacking, told_best, scale, ROUNDS)
        tl.store(told + row * room + slot, product, mask=slot < named)
    # the kernel that sums up the others finds the named ones gone, and need not read what went to the host
    tl.store(scores + at * max_keys + line, -float("inf"), mask=slot < named)


def search(
    search: CodeSearch,
    query: Tensor,
    ids: Tensor,
    places: Tensor | None,
    scratch: SearchScratch,
    after: Callable[[SearchScratch, QueryGroup], None] | None,
    scale: float,
) -> None:
    """See `CodeSearch.run`."""
    batch, q_heads = query.shape[:2]
    shape, group, finer, told = search.shape, scratch.group, search.finer, search.told
    entries, members = batch * search.kv_heads, q_heads // search.kv_heads
    enough = shape.k + shape.k // 16
    _project(search, shape.key_bytes, query, members)
    if finer is not None:
        _project(finer, shape.finer_bytes, query, members)
    for turn in scratch.turns(entries, members):
        _score(search, scratch, turn, members)
        groups, numbers = scratch.max_keys // group, scratch.picked * group
        warps = _warps(max(groups, numbers))
        _pick_kernel[(turn.entries * turn.members,)](
            search.table, scratch.scores, scratch.least, scratch.best, scratch.groups, scratch.hits,
            scratch.groups if places is None else places, ids if finer is None else scratch.keys,
            scratch.least if told is None else told.products, search.units, search.bases, search.variances,
            shape.k, min(enough, scratch.picked), enough, shape.picked_room, 0 if told is None else told.best,
            float(scale), members, turn.first_entry, turn.first_member, turn.members, scratch.max_keys,
            WORDS=TABLE_WORDS, GROUP=group, GROUPS=groups, PICKED=scratch.picked,
            ROOM=triton.next_power_of_2(shape.picked_room), GROUP_COLUMNS=_columns(groups, warps),
            COLUMNS=min(_columns(numbers, warps), group), HAS_PLACES=places is not None and finer is None,
            REFINES=finer is not None, TELLS=told is not None and finer is None, MOST_VARIANCE=MOST_VARIANCE,
            ROUNDS=MAX_ROUNDS, num_warps=warps, **overlap(query.device),
        )  # fmt: skip
        if finer is not None:
            refine(search, finer, ids, places, scratch, turn, members, scale)
        if after is not None:
            after(scratch, turn)


def _project(heads: CodedHeads, key_bytes: int, query: Tensor, members: int) -> None:
    """Project queries for the codes of these heads."""
    (batch, q_heads, _, dim), columns = query.shape, triton.next_power_of_2(query.shape[3])
    _project_kernel[(batch * q_heads,)](
        query, heads.table, heads.planes, heads.centres, heads.factors, heads.units, heads.bases, heads.variances,
        query.stride(0), query.stride(1), q_heads, members, dim,
        WORDS=TABLE_WORDS, BYTES=key_bytes, K=heads.planes.shape[2], D=columns, FINE=FINE,
        MOST_SCORE=MOST_SCORE, num_warps=min(32, max(8, columns**2 // 2048)), **overlap(query.device),
    )  # fmt: skip


def _score(search: CodeSearch, scratch: SearchScratch, turn: QueryGroup, members: int) -> None:
    """Score all codes for the queries of a turn: tile by tile where the turn has all that there are."""
    shape, width = search.shape, search.planes.shape[2]
    options: dict[str, Any] = {
        "WORDS": TABLE_WORDS, "BYTES": shape.key_bytes, "K": width,
        "N": BLOCK_KEYS, "GROUP": scratch.group, "FINE": FINE, "num_warps": 4, **overlap(search.planes.device),
    }  # fmt: skip
    queries = search.planes, search.centres, search.factors, search.table
    if search.tiles is not None and turn == QueryGroup(0, len(search.entries), 0, members):
        for tiles in search.tiles.tables:
            most, at_once = len(tiles) - 1, tiles.shape[1]
            programs = max(most, min(_tile_programs(at_once), most * scratch.max_keys // BLOCK_KEYS))
            options["num_warps"] = WIDE_WARPS if at_once >= WIDE_TILE else 4
            options["num_stages"] = _stages(at_once, shape.key_bytes, width)
            _score_tiles_kernel[(programs,)](
                *queries, tiles, scratch.scores, scratch.best, members, scratch.max_keys, G=at_once,
                **options, **_registers(at_once, width),
            )  # fmt: skip
        return
    blocks = triton.cdiv(turn.members, search.block)
    options["num_stages"] = stages = _stages(search.block, shape.key_bytes, width)
    most = 2 * PROGRAMS if stages == 1 or scratch.max_keys >= LONG else PROGRAMS
    programs = max(1, min(most // (turn.entries * blocks), scratch.max_keys // BLOCK_KEYS))
    _score_kernel[(turn.entries, programs, blocks)](
        *queries, scratch.scores, scratch.best,
        members, turn.first_entry, turn.first_member, turn.members, scratch.max_keys, G=search.block,
        **options, **_registers(search.block, width),
    )  # fmt: skip


def _stages(queries: int, key_bytes: int, width: int) -> int:
    """Codes that are loaded at once by a program of `queries` queries.

    One for few: eight programs of a multiprocessor hide each other's loads, and do not pass codes through shared memory
    first. 128K keys of 8 heads take 47 us for 52 with codes of 64 bytes, 39 for 40 with 40, those of four texts 129 for
    133 and 103 for 109 (H100). Codes of 24 bytes, which no loads of 16 divide, take 17.3 for 15.7, of 32 bytes 18.0 for
    17.1 by their scores alone.
    """
    if queries <= SMALL_BLOCK and (MIN_WIDTH < width <= NARROW_TILE or key_bytes <= MIN_WIDTH // 2):
        return 1
    return max(1, min(3, TILE_BYTES // (BLOCK_KEYS * width)))


def _tile_programs(queries: int) -> int:
    """Programs for all tiles of `queries` queries: no more than fit an H100 at once, for where there are no such tiles
    the others wait only to find that.
    """
    return PROGRAMS if queries <= SMALL_BLOCK else PROGRAMS // 2 if queries < WIDE_TILE else PROGRAMS // 4


def _registers(queries: int, width: int) -> dict[str, int]:
    """A limit for a program that scores `queries` queries at a time, of codes of `width` columns; none for many."""
    return {"maxnreg": MOST_REGISTERS} if queries * width <= SMALL_BLOCK * NARROW_TILE else {}


def _warps(numbers: int) -> int:
    """Return the warps with which a thread holds 32 numbers, or 64 of many: a sum over few threads is quick."""
    return min(max(4, numbers // 1024), max(8, numbers // 2048))


def _columns(numbers: int, warps: int) -> int:
    """Numbers of a row, so that every thread has one: threads without a row would do what others do."""
    return max(1, min(COLUMNS, numbers // (32 * warps)))
