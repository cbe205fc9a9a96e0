"""The Triton kernels of `host_row_gather.py`, which documents them. Imported only where there is Triton.

A load over the bus takes a microsecond or more, so what counts is how many are under way. A query's keys are shared out
to many small programs, and each asks for all words of its keys and values before it needs the first of them. Rows are
read by words of four numbers: a warp asks for four keys of 128 numbers at once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.codes.host_row_gather import STEP_BYTES, TABLE_WORDS, WIDE, HostRowGather

WORD = 4
"""Numbers of a word."""
TILE_WORDS = 1024
"""Words of keys that a program asks for at a time, and as many of values: 8 for each thread."""
WARPS = 4
MAX_PARTS = 64
"""Parts that a query's keys are cut into at most: the merge holds all of them in one tile."""


@triton.jit
def _numbers(words, place: tl.constexpr):
    """float32: the number at `place` of each word."""
    return ((words << (24 - 8 * place)) >> 24).to(tl.float32)


@triton.jit
def _products(words, query, place: tl.constexpr, dim, W: tl.constexpr):
    """Multiply the number at `place` in each word by the query's number for it."""
    number = tl.arange(0, W) * 4 + place
    return _numbers(words, place) * tl.load(query + number, mask=number < dim, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _mixed(words, weights, place: tl.constexpr):
    """float32 (W,): weighted sum over rows of the numbers at `place`."""
    return tl.sum(weights[:, None] * _numbers(words, place), axis=0)


@triton.jit(do_not_specialize=["query_b", "q_heads", "members", "room"])
def _reach_kernel(
    query, ids, told, table, anchor, outs, lses, query_b, query_h, q_heads, members, room, scale, softcap,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, N: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    PARTS: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr, IS_TOLD: tl.constexpr,
):  # fmt: skip
    """Attention of query i to part p of what is named for it: outs[i, p] and lses[i, p]; 0 and -inf where it is empty.

    UNIT, STEPS: words of what the table counts rows and steps in. IS_TOLD: keys are read where `told` says inf.
    """
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = table + i // members * TABLE
    rows_at, steps_at = tl.load(places), tl.load(places + 1)
    count, least = tl.load(places + 2), tl.load(places + 3)
    needed = tl.minimum(least, count)
    named_enough = tl.load(ids + i * room + needed - 1, mask=needed > 0, other=0) >= 0
    turns = tl.where(named_enough, 1, tl.cdiv(count, N * PARTS))
    own = query + i // q_heads * query_b + i % q_heads * query_h

    key_word, value_word = tl.arange(0, KW), tl.arange(0, VW)
    here = value_word < VALUE_DIM // 4
    top, total = -float("inf"), 0.0
    mixed_0, mixed_1 = tl.zeros((VW,), tl.float32), tl.zeros((VW,), tl.float32)
    mixed_2, mixed_3 = tl.zeros((VW,), tl.float32), tl.zeros((VW,), tl.float32)
    for turn in range(0, turns):
        slot = (turn * PARTS + part) * N + tl.arange(0, N)
        named = tl.load(ids + i * room + slot, mask=named_enough & (slot < room), other=-1)
        token = tl.where(named_enough, named.to(tl.int64), slot.to(tl.int64))
        inside = (token >= 0) & (token < count)
        token = tl.where(inside, token, 0)
        # multiples of UNIT words: the compiler knows what rows begin on, and loads as much at once
        row = anchor + (rows_at + token * ((DIM + VALUE_DIM) // 4 // UNIT)) * UNIT
        # all that is needed is asked for before any of it is used: values first, for keys may have to be told of
        values = tl.load(row[:, None] + DIM // 4 + value_word[None, :], mask=inside[:, None] & here[None, :], other=0)
        is_read = inside
        if IS_TOLD:
            product = tl.load(told + i * room + slot, mask=named_enough & inside, other=float("inf"))
            is_read = inside & (product == float("inf"))
        keys = tl.load(
            row[:, None] + key_word[None, :], mask=is_read[:, None] & (key_word < DIM // 4)[None, :], other=0
        )
        step = anchor + (steps_at + token) * STEPS
        key_step = tl.load(step, mask=inside, other=0).to(tl.float32, bitcast=True)
        value_step = tl.load(step + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        products = _products(keys, own, 0, DIM, KW) + _products(keys, own, 1, DIM, KW)
        products += _products(keys, own, 2, DIM, KW) + _products(keys, own, 3, DIM, KW)
        score = tl.sum(products, axis=1) * key_step
        if IS_TOLD:
            score = tl.where(is_read, score, product)
        score *= scale
        if softcap > 0:  # not compiled twice: a launch ahead of time does not know it
            score = softcap * (1 - 2 / (tl.exp(2 * score / softcap) + 1))
        score = tl.where(inside, score, -float("inf"))
        higher = tl.maximum(top, tl.max(tl.where(score == score, score, -float("inf")), axis=0))
        shift = tl.where(higher > -float("inf"), higher, 0.0)  # no key: -inf - -inf would be NaN
        weight = tl.where(inside, tl.exp(score - shift), 0.0)
        kept = tl.exp(top - shift)
        top, total = higher, total * kept + tl.sum(weight, axis=0)
        weight = weight * value_step
        mixed_0 = mixed_0 * kept + _mixed(values, weight, 0)
        mixed_1 = mixed_1 * kept + _mixed(values, weight, 1)
        mixed_2 = mixed_2 * kept + _mixed(values, weight, 2)
        mixed_3 = mixed_3 * kept + _mixed(values, weight, 3)

    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    shift = tl.where(top > -float("inf"), top, 0.0)
    tl.store(lses + i * PARTS + part, tl.where(empty, -float("inf"), shift + tl.log(divisor)))
    into = outs + (i * PARTS + part) * VALUE_DIM + value_word * 4
    tl.store(into, mixed_0 / divisor, mask=here)
    tl.store(into + 1, mixed_1 / divisor, mask=here)
    tl.store(into + 2, mixed_2 / divisor, mask=here)
    tl.store(into + 3, mixed_3 / divisor, mask=here)


@triton.jit
def _merge_kernel(outs, lses, out, lse, PARTS: tl.constexpr, P: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr):
    """Attention of query i to the union of its parts."""
    i = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, P), tl.arange(0, D)
    some = part < PARTS
    own = tl.load(lses + i * PARTS + part, mask=some, other=-float("inf"))
    top = tl.max(tl.where(own == own, own, -float("inf")), axis=0)
    shift = tl.where(top > -float("inf"), top, 0.0)
    weight = tl.exp(own - shift)
    total = tl.sum(weight, axis=0)
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    at = outs + (i * PARTS + part)[:, None] * VALUE_DIM + column[None, :]
    parts = tl.load(at, mask=some[:, None] & (column < VALUE_DIM)[None, :], other=0.0)
    mixed = tl.sum(weight[:, None] * parts, axis=0) / divisor
    tl.store(out + i * VALUE_DIM + column, mixed, mask=column < VALUE_DIM)
    tl.store(lse + i, tl.where(empty, -float("inf"), shift + tl.log(divisor)))


def reach(
    reached: HostRowGather, query: Tensor, ids: Tensor, scoring: Scoring, into: Partial, told: Tensor | None
) -> None:
    """Attend to what ids name; see `HostRowGather.run`."""
    (batch, q_heads, _, dim), room = query.shape, ids.shape[1]
    count, value_dim = batch * q_heads, reached.shape.value_dim
    widths = [triton.next_power_of_2(size // WORD) for size in (dim, value_dim)]
    at_once = max(1, triton.next_power_of_2(-(-room // MAX_PARTS)), TILE_WORDS // max(widths))
    parts = -(-room // at_once)
    outs, lses = into.out, into.lse
    if parts > 1:
        outs = torch.empty(count, parts, value_dim, dtype=torch.float32, device=query.device)
        lses = torch.empty(count, parts, dtype=torch.float32, device=query.device)
    _reach_kernel[(count, parts)](
        query, ids, ids if told is None else told, reached.table, reached.table.view(torch.int32), outs, lses,
        query.stride(0), query.stride(1), q_heads, count // len(reached.entries), room,
        float(scoring.scale), float(scoring.softcap or 0.0),
        DIM=dim, VALUE_DIM=value_dim, N=at_once, KW=widths[0], VW=widths[1], PARTS=parts, TABLE=TABLE_WORDS,
        UNIT=WIDE // WORD, STEPS=STEP_BYTES // WORD, IS_TOLD=told is not None, num_warps=WARPS,
    )  # fmt: skip
    if parts > 1:
        _merge_kernel[(count,)](
            outs, lses, into.out, into.lse,
            PARTS=parts, P=triton.next_power_of_2(parts), VALUE_DIM=value_dim, D=triton.next_power_of_2(value_dim),
            num_warps=1,
        )  # fmt: skip
