"""The Triton kernels behind `partials.py`: one walks a plan's work list, one merges what it leaves for each query head.

Scores are exact products summed in float32. Where a batch is small, and memory is what bounds the kernel, weights meet
the values in two 16-bit terms, elsewhere in one, as flash attention has it. Rows of int8 are multiplied as they are
stored, with queries and weights as two int8 numbers each, of which the second counts 1/254: sums are exact, nothing is
turned into another format, and their steps meet the scores, and the weights, in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.shared.partials import PagedKeys
from retrieval_attn.gpu.shared.plan import (
    ITEM,
    PACKED_SIDE_BY_SIDE,
    PAGE_TOKENS,
    SMALLEST_TILE,
    WIDE_DIM,
    SharedPlan,
    processors,
)

LOG2_E = 1.4426950408889634
TWO_TERMS = 256
"""Queries of a key-value head up to which weights have two terms."""
PACKED_TILE = 8
"""Queries of a program over int8 pages at least."""
MERGED = 32
"""Partials that a program of the merge holds."""


class Launch(NamedTuple):
    """How the attention kernel is launched. programs: per multiprocessor. registers: of a thread; 0: as many as the
    compiler takes.
    """

    warps: int
    stages: int
    programs: int
    registers: int = 0


@triton.jit
def _scores(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores times log2(e): the exponential of the hardware is to base 2. Without a cap they have it already."""
    if HAS_SOFTCAP:  # the exponential may overflow to inf, which gives 1
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1)) * 1.4426950408889634
    return scores


@triton.jit
def _block(
    queries, key_at, value_at, key_t, value_t, left, scale, softcap, top, total, mixed,
    HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, FINE: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One page: key_at and value_at point to it. MASKED: only its first `left` tokens are there."""
    token, column, value_column = tl.arange(0, N), tl.arange(0, D), tl.arange(0, V)
    # what lies behind the last token of a page may be NaN, and 0 times NaN is no 0: it is not loaded
    keys_from = key_at + token[None, :] * key_t + column[:, None]
    values_from = value_at + token[:, None] * value_t + value_column[None, :]
    if MASKED:
        keys = tl.load(keys_from, mask=(token < left)[None, :] & (column < DIM)[:, None], other=0.0)
    elif DIM == D:
        keys = tl.load(keys_from)
    else:
        keys = tl.load(keys_from, mask=(column < DIM)[:, None], other=0.0)
    scores = _scores(tl.dot(queries, keys, input_precision="ieee") * scale, softcap, HAS_SOFTCAP)
    if MASKED:
        scores = tl.where((token < left)[None, :], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))  # finite: a page has at least one token
    decay = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    if MASKED:
        values = tl.load(values_from, mask=(token < left)[:, None] & (value_column < VALUE_DIM)[None, :], other=0.0)
    elif VALUE_DIM == V:
        values = tl.load(values_from)
    else:
        values = tl.load(values_from, mask=(value_column < VALUE_DIM)[None, :], other=0.0)
    mixed = mixed * decay[:, None]
    if EXACT:
        mixed += tl.dot(weights, values, input_precision="ieee")
    else:
        coarse = weights.to(values.dtype)
        mixed = tl.dot(coarse, values, mixed)
        if FINE:
            mixed = tl.dot((weights - coarse.to(tl.float32)).to(values.dtype), values, mixed)
    return higher, total, mixed


@triton.jit
def _two_terms(shares):
    """int8 numbers coarse and fine of numbers from -127 to 127 (rows, M): coarse + fine / 254, to 1/508. As (rows,
    2 * M), all coarse ones before all fine ones.
    """
    coarse = tl.floor(shares + 0.5)
    fine = tl.floor((shares - coarse) * 254.0 + 0.5)
    both = tl.join(coarse.to(tl.int8), fine.to(tl.int8))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (shares.shape[0], 2 * shares.shape[1]))


@triton.jit
def _product(numbers, terms, M: tl.constexpr):
    """254 times numbers (rows, n) int8 by what `_two_terms` made (n, 2 * M): (rows, M) float32, exact but for its own
    rounding, for up to 512 products a sum.
    """
    sums = tl.dot(numbers, terms, out_dtype=tl.int32)
    counts = tl.where(tl.arange(0, 2 * M) < M, 254, 1)
    return tl.sum(tl.reshape(sums * counts[None, :], (numbers.shape[0], 2, M)), axis=1).to(tl.float32)


@triton.jit
def _packed_block(
    queries, query_steps, key_at, value_at, key_step_at, value_step_at, key_t, value_c, left, softcap, top, total,
    mixed, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The same of int8: keys (tokens, head_dim), values (value_dim, tokens). A column for each query here, so that
    matrix instructions take keys and values from where they are copied to, and a group of 4 fills one with its terms.

    queries: their terms (head_dim, 2 * M), to be multiplied by query_steps; EXACT: float32 (head_dim, M).
    key_step_at, value_step_at: a step per token.
    """
    token, column, value_column = tl.arange(0, N), tl.arange(0, D), tl.arange(0, V)
    keys_from = key_at + token[:, None] * key_t + column[None, :]
    values_from = value_at + value_column[:, None] * value_c + token[None, :]
    if MASKED:
        here = token < left
        keys = tl.load(keys_from, mask=here[:, None] & (column < DIM)[None, :], other=0)
        values = tl.load(values_from, mask=here[None, :] & (value_column < VALUE_DIM)[:, None], other=0)
        key_steps = tl.load(key_step_at + token, mask=here, other=0.0)
        steps = tl.load(value_step_at + token, mask=here, other=0.0)
    else:
        keys = tl.load(keys_from) if DIM == D else tl.load(keys_from, mask=(column < DIM)[None, :], other=0)
        if VALUE_DIM == V:
            values = tl.load(values_from)
        else:
            values = tl.load(values_from, mask=(value_column < VALUE_DIM)[:, None], other=0)
        key_steps, steps = tl.load(key_step_at + token), tl.load(value_step_at + token)
    scores = tl.dot(keys.to(tl.float32), queries, input_precision="ieee") if EXACT else _product(keys, queries, M)
    scores = _scores(scores * query_steps[None, :] * key_steps[:, None], softcap, HAS_SOFTCAP)
    if MASKED:
        scores = tl.where((token < left)[:, None], scores, -float("inf"))
    here_top = tl.max(scores, axis=0)
    higher = tl.maximum(top, here_top)
    decay = tl.exp2(top - higher)
    weights = tl.exp2(scores - here_top[None, :])  # of the page's largest: small ones of a later page stay numbers
    share = tl.exp2(here_top - higher)
    # a value that is no number makes none of the sum; in int8 it would count as some
    total = total * decay + tl.sum(weights + (steps * 0.0)[:, None], axis=0) * share
    mixed = mixed * decay[None, :]
    if EXACT:
        found = tl.dot(values.to(tl.float32), weights * steps[:, None], input_precision="ieee")
        mixed += found * share[None, :]
    else:
        largest = tl.max(steps, axis=0)
        most = largest * (1.0 / 127.0)
        terms = _two_terms(weights * (steps / tl.where(largest > 0, most, 1.0))[:, None])
        mixed += _product(values, terms, M) * (share * (most * (1.0 / 254.0)))[None, :]
    return higher, total, mixed


@triton.jit(do_not_specialize=["group", "slots"])
def _attend_kernel(
    query, key, value, key_steps, value_steps, count, work, rows, pages, out, lse, scale, softcap,
    query_b, query_h, key_h, key_p, key_t, value_h, value_p, value_t, step_h, group, q_heads, slots,
    HAS_SOFTCAP: tl.constexpr, EXACT: tl.constexpr, FINE: tl.constexpr, INT8: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Items program_id, program_id + programs, ... of the work list: M queries of one key-value head over some pages.

    Strides end in _b (row), _h (head), _p (page) and _t (token). key_steps, value_steps: of INT8; value_t is the stride
    of a column of values then.
    """
    column, value_column = tl.arange(0, D), tl.arange(0, V)
    # from memory, as all that follows: a graph is replayed while the batch changes
    for item in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        entry = work + item * ITEM
        head, first_row, members = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        tile, first_page = tl.load(entry + 3), tl.load(entry + 4)
        begin, end, slot = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
        unit = tile * M + tl.arange(0, M)  # queries of all rows and of the head's group, as one matrix
        real = unit < members * group
        row = tl.load(rows + first_row + unit // group, mask=real, other=0).to(tl.int64)
        q_head = head * group + unit % group
        queries = tl.load(
            query + (row * query_b + q_head * query_h)[:, None] + column[None, :],
            mask=real[:, None] & (column < DIM)[None, :],
            other=0.0,
        )
        top = tl.full((M,), -float("inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        mixed = tl.zeros((V, M) if INT8 else (M, V), tl.float32)
        key_from, value_from = head.to(tl.int64) * key_h, head.to(tl.int64) * value_h
        step_from = head.to(tl.int64) * step_h
        table = pages + first_page
        if INT8:
            queries, query_steps = tl.trans(queries.to(tl.float32)), tl.full((M,), 1.0, tl.float32) * scale
            if not EXACT:
                most = tl.max(tl.abs(queries), axis=0)
                most = tl.where(most > 0, most, 1.0) + tl.sum(queries * 0.0, axis=0)  # none of what is no number
                queries = _two_terms(queries * (127.0 / most)[None, :])
                query_steps *= most * (1.0 / (127.0 * 254.0))
        for block in range(begin // N, end // N):
            page = tl.load(table + block).to(tl.int64)
            key_at, value_at = key + key_from + page * key_p, value + value_from + page * value_p
            if INT8:
                step_at = step_from + page * N
                top, total, mixed = _packed_block(
                    queries, query_steps, key_at, value_at, key_steps + step_at, value_steps + step_at, key_t,
                    value_t, N, softcap, top, total, mixed, HAS_SOFTCAP, False, EXACT, DIM, VALUE_DIM, M, N, D, V,
                )  # fmt: skip
            else:
                top, total, mixed = _block(
                    queries, key_at, value_at, key_t, value_t, N, scale, softcap, top, total, mixed,
                    HAS_SOFTCAP, False, EXACT, FINE, DIM, VALUE_DIM, N, D, V,
                )  # fmt: skip
        if end % N != 0:
            page = tl.load(table + end // N).to(tl.int64)
            key_at, value_at = key + key_from + page * key_p, value + value_from + page * value_p
            if INT8:
                step_at = step_from + page * N
                top, total, mixed = _packed_block(
                    queries, query_steps, key_at, value_at, key_steps + step_at, value_steps + step_at, key_t,
                    value_t, end % N, softcap, top, total, mixed, HAS_SOFTCAP, True, EXACT, DIM, VALUE_DIM, M, N, D, V,
                )  # fmt: skip
            else:
                top, total, mixed = _block(
                    queries, key_at, value_at, key_t, value_t, end % N, scale, softcap, top, total, mixed,
                    HAS_SOFTCAP, True, EXACT, FINE, DIM, VALUE_DIM, N, D, V,
                )  # fmt: skip
        # an item has at least one token: total is 1 or more
        place = (row * q_heads + q_head) * slots + slot
        tl.store(
            out + place[:, None] * VALUE_DIM + value_column[None, :],
            (tl.trans(mixed) if INT8 else mixed) / total[:, None],
            mask=real[:, None] & (value_column < VALUE_DIM)[None, :],
        )
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=["pairs", "q_heads", "slots", "splits", "levels"])
def _merge_kernel(
    out, lse, used, target, target_lse, pairs, q_heads, slots, splits, levels,
    VALUE_DIM: tl.constexpr, N: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """All parts of N query heads. What no item has written is not read: `used` says which parts there are."""
    pair, part, column = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, S), tl.arange(0, V)
    real = pair < pairs
    first = pair.to(tl.int64) * slots
    top = tl.full((N,), -float("inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    mixed = tl.zeros((N, V), tl.float32)
    for level in range(levels):
        known = tl.load(used + (pair // q_heads) * levels + level, mask=real, other=0)
        inside = part[None, :] < known[:, None]
        at = first[:, None] + level * splits + part[None, :]
        scores = tl.load(lse + at, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no part yet: -inf - -inf would be NaN
        decay = tl.exp(top - shift)
        weights = tl.exp(scores - shift[:, None])
        parts = tl.load(
            out + at[:, :, None] * VALUE_DIM + column[None, None, :],
            mask=inside[:, :, None] & (column < VALUE_DIM)[None, None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, axis=1)
        mixed = mixed * decay[:, None] + tl.sum(weights[:, :, None] * parts, axis=1)
        top = higher
    some = total > 0
    total = tl.where(some, total, 1.0)
    at = pair.to(tl.int64)
    tl.store(
        target + at[:, None] * VALUE_DIM + column[None, :],
        mixed / total[:, None],
        mask=real[:, None] & (column < VALUE_DIM)[None, :],
    )
    tl.store(target_lse + at, tl.where(some, top + tl.log(total), -float("inf")), mask=real)


def launch_for(tile: int, head_dim: int, itemsize: int, packed: bool = False) -> Launch:
    """Return launch options that fit a tile of queries to registers and shared memory. packed: over int8 pages."""
    if head_dim > WIDE_DIM:  # a page's keys and values at once would not fit
        return Launch(8, 1, 1)
    if itemsize == 4:
        return Launch(8, 1, 2)
    if packed and tile == SMALLEST_TILE and head_dim <= 256:
        return Launch(4, 3, PACKED_SIDE_BY_SIDE, 168)
    if head_dim > 128:
        return Launch(8, 2, 1)
    return Launch(8, 3, 1) if tile >= 128 else Launch(4, 3, 2)


def shared_partials(
    query: Tensor, pool: PagedKeys, plan: SharedPlan, scale: float, softcap: float | None,
    launch: Launch | None = None, two_terms: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `partials.shared_partials`: out (rows, q_heads, 1, value_dim) and lse (rows, q_heads, 1), float32."""
    query = query if query.stride(3) == 1 else query.contiguous()
    shape, (rows, q_heads, _, dim) = plan.shape, query.shape
    exact, packed, (key, value, steps) = query.dtype == torch.float32, pool.steps is not None, pool
    value_dim = pool.dims[1]
    key_steps, value_steps = (key, value) if steps is None else (steps[0], steps[1])
    launch = launch_for(shape.tile, max(dim, value_dim), query.element_size(), packed) if launch is None else launch
    if two_terms is None:
        two_terms = rows * shape.group <= TWO_TERMS
    parts = torch.empty(rows, q_heads, shape.slots, value_dim, dtype=torch.float32, device=query.device)
    parts_lse = torch.empty(rows, q_heads, shape.slots, dtype=torch.float32, device=query.device)
    widths = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    tile = shape.tile
    if packed:  # fewer than those of other tiles fill a matrix instruction
        tile = min(tile, max(PACKED_TILE, triton.next_power_of_2(rows * shape.group)))
    options = {"maxnreg": launch.registers} if launch.registers else {}
    programs = min(shape.items, launch.programs * processors(query.device))
    _attend_kernel[(programs,)](
        query, key, value, key_steps, value_steps, plan.count, plan.work, plan.rows, plan.pages, parts, parts_lse,
        scale if softcap is not None else scale * LOG2_E, softcap or 0.0,
        query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3], key_steps.stride(0),
        shape.group, q_heads, shape.slots,
        HAS_SOFTCAP=softcap is not None, EXACT=exact, FINE=two_terms, INT8=packed, DIM=dim, VALUE_DIM=value_dim,
        ITEM=ITEM, M=tile, N=PAGE_TOKENS, D=max(32 if packed else 16, widths[0]),
        V=max(16, widths[1]), num_warps=launch.warps, num_stages=launch.stages, **options,
    )  # fmt: skip
    out = torch.empty(rows, q_heads, 1, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, q_heads, 1, dtype=torch.float32, device=query.device)
    wide = triton.next_power_of_2(shape.splits)
    together = max(1, MERGED // wide)
    _merge_kernel[(triton.cdiv(rows * q_heads, together),)](
        parts, parts_lse, plan.levels, out, lse, rows * q_heads, q_heads, shape.slots, shape.splits, shape.levels,
        VALUE_DIM=value_dim, N=together, S=wide, V=widths[1], num_warps=4,
    )  # fmt: skip
    return out, lse
