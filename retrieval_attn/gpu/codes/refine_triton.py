"""Triton kernels that read finer codes for `search.py`, and the threshold of a top-k. Imported only with Triton.

The finer codes of some hundred keys per query are scattered over host memory. Reads over the bus have a high latency
and overlap, so many programs read few keys each; a second kernel keeps the best keys of a query.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.codes.codes import MOST_VARIANCE
from retrieval_attn.gpu.codes.search import FINE, TABLE_WORDS, CodedHeads, CodeSearch, QueryGroup, SearchScratch
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
    """What codes tell of a query's keys that are named, see `search.Told`. products: q . k by codes, -inf: no key.
    lacking: the variance of a logit by them.
    """
    least_read = threshold(products, best, best + best // 4, ROUNDS)
    return tl.where(products >= least_read, float("inf"), products + lacking / (2 * scale))


BLOCK_KEYS = 64
"""Keys of a program."""
COLUMNS = 8
"""Of a product of bytes at least; a query has two."""
MOST_SCORE = 60000.0
"""What is left of a score is a float16."""


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count"])
def _read_kernel(
    table, planes, centres, factors, units, bases, keys, said, picked_room,
    members, first_entry, first_member, count,
    WORDS: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, PICKED: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, FINE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What the finer codes of N keys that were picked for a query say of q . k; -inf where there is no key."""
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
    """Of the keys that were picked for a query, the `k` best by their finer codes to ids; of the others, to scores,
    what those say of them. TELLS: of those that are named, to told, see `search.Told`.
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
    # what is left of a key that is not named is what its finer code says, with the variance that this lacks: whoever
    # sums up takes that of the others for it
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
    _read_kernel[(queries, triton.cdiv(shape.picked_room, BLOCK_KEYS))](
        finer.table, finer.planes, finer.centres, finer.factors, finer.units, finer.bases,
        scratch.keys, scratch.said, shape.picked_room, *own,
        WORDS=TABLE_WORDS, BYTES=shape.finer_bytes, K=finer.planes.shape[2], PICKED=scratch.picked,
        N=BLOCK_KEYS, COLUMNS=COLUMNS, FINE=FINE, num_warps=4, **overlap(finer.planes.device),
    )  # fmt: skip
    _keep_kernel[(queries,)](
        finer.variances, search.units, search.bases, search.variances, scratch.least, scratch.scores, scratch.hits,
        scratch.keys, scratch.said, scratch.hits if places is None else places, ids,
        scratch.said if told is None else told.products, k, k + k // 16,
        shape.picked_room, shape.room, 0 if told is None else told.best, float(scale), *own, scratch.max_keys,
        PICKED=scratch.picked, ROOM=triton.next_power_of_2(shape.room), MOST_VARIANCE=MOST_VARIANCE,
        MOST_SCORE=MOST_SCORE, HAS_PLACES=places is not None, TELLS=told is not None, ROUNDS=MAX_ROUNDS, num_warps=4,
        **overlap(finer.planes.device),
    )  # fmt: skip
