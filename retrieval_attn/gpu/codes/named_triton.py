"""The Triton kernels of `candidates.py`, which documents them. Imported only where there is Triton.

Rows lie anywhere in a layer's keys and values: what counts is how many are under way at a time. A program takes few
rows and no matrix instruction, which would serve one query with a sixteenth of its numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.codes.candidates import Candidates, Found, StoredRows

TILE_NUMBERS = 4096
"""Numbers of gathered rows that a program holds at a time: 32 for each thread. Of int8 half as many, for rows that
begin anywhere are loaded byte by byte."""
MAX_ROWS = 64
"""Rows of them at most."""


@triton.jit
def _gathered(rows, row, stride, dim, inside, D: tl.constexpr, STEP: tl.constexpr):
    """float32 (N, D) of rows[row[i]] where inside[i], else 0. STEP: bytes of a float32 step behind int8 numbers."""
    column = tl.arange(0, D)
    begin = rows + row * stride
    here = inside[:, None] & (column < dim)[None, :]
    numbers = tl.load(begin[:, None] + column[None, :], mask=here, other=0).to(tl.float32)
    if STEP > 0:
        bits = tl.zeros(row.shape, tl.uint32)
        for byte in tl.static_range(STEP):  # rows of any width: no float32 lies where one could be loaded
            part = tl.load(begin + dim + byte, mask=inside, other=0).to(tl.uint8, bitcast=True)
            bits |= part.to(tl.uint32) << (8 * byte)
        numbers = numbers * bits.to(tl.float32, bitcast=True)[:, None]
    return numbers


@triton.jit(do_not_specialize=["members", "length", "first", "room"])
def _score_kernel(
    queries, keys, ids, tokens, products, members, length, first, room, dim, stride,
    SLOTS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """tokens[i] = first + ids[i], -1 for none, and products[i] of N of them with query i."""
    i = tl.program_id(0).to(tl.int64)
    slot, column = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, D)
    here = slot < room
    named = tl.load(ids + i * room + slot, mask=here, other=-1)
    inside = named >= 0
    token = tl.where(inside, named + first, -1)
    own = tl.load(queries + i * dim + column, mask=column < dim, other=0.0)
    row = i // members * length + token.to(tl.int64)
    key = _gathered(keys, row, stride, dim, inside, D, STEP)
    tl.store(tokens + i * SLOTS + slot, token, mask=here)
    tl.store(products + i * SLOTS + slot, tl.sum(key * own[None, :], axis=1), mask=here)


@triton.jit
def _count(chosen):
    return tl.sum(tl.where(chosen, 1, 0), axis=0)


@triton.jit(do_not_specialize=["members", "length", "used", "k"])
def _attend_kernel(
    values, tokens, products, out, lse, members, length, used, k, dim, stride, scale, softcap,
    SLOTS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The best k of the first `used` products of query i, their softmax, and the weighted sum of their values.

    Overwrites tokens and products with the keys chosen and their weights.
    """
    i = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    token = tl.load(tokens + i * SLOTS + slot, mask=slot < used, other=-1)
    inside = token >= 0
    product = tl.load(products + i * SLOTS + slot, mask=inside, other=0.0)

    # the k-th best number, bit by bit, in an order of whole numbers: NaN before all, -0.0 the same as 0.0
    bits = (product + 0.0).to(tl.int32, bitcast=True)
    code = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    code = tl.where(product == product, code, -2147483648)
    wanted = tl.minimum(k, _count(inside))
    threshold = tl.where(_count(inside & (code >= 0)) >= wanted, 0, -2147483648)
    for turn in tl.static_range(31):
        higher = threshold + (1 << (30 - turn))
        threshold = tl.where(_count(inside & (code >= higher)) >= wanted, higher, threshold)
    better, equal = inside & (code > threshold), inside & (code == threshold)
    # of equal numbers the first ones
    chosen = better | (equal & (tl.cumsum(tl.where(equal, 1, 0), axis=0) <= wanted - _count(better)))

    score = product * scale
    if softcap > 0:  # not compiled twice: a launch ahead of time does not know it
        score = softcap * (1 - 2 / (tl.exp(2 * score / softcap) + 1))
    top = tl.max(tl.where(chosen & (score == score), score, -float("inf")), axis=0)
    shift = tl.where(top > -float("inf"), top, 0.0)  # no key: -inf - -inf would be NaN
    weight = tl.where(chosen, tl.exp(score - shift), 0.0)
    total = tl.sum(weight, axis=0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + i, tl.where(empty, -float("inf"), shift + tl.log(total)))

    place = tl.cumsum(tl.where(chosen, 1, 0), axis=0) - 1
    tl.debug_barrier()  # all have been read
    tl.store(tokens + i * SLOTS + place, token, mask=chosen)
    tl.store(products + i * SLOTS + place, weight, mask=chosen)
    tl.debug_barrier()  # what was written is read by other threads of the program
    number, column = tl.arange(0, N), tl.arange(0, D)
    mixed = tl.zeros((N, D), tl.float32)
    for start in range(0, wanted, N):
        some = start + number < wanted
        taken = tl.load(tokens + i * SLOTS + start + number, mask=some, other=0)
        share = tl.load(products + i * SLOTS + start + number, mask=some, other=0.0)
        row = i // members * length + taken.to(tl.int64)
        mixed += share[:, None] * _gathered(values, row, stride, dim, some, D, STEP)
    result = tl.where(empty, 0.0, tl.sum(mixed, axis=0) / total)
    tl.store(out + i * dim + column, result, mask=column < dim)


def score(queries: Tensor, rows: StoredRows, named: Candidates, found: Found) -> None:
    """Write the tokens that are named, and their products, to the first slots of `found`."""
    heads, members, dim = queries.shape
    room, slots = named.ids.shape[1], found.tokens.shape[1]
    tile = _tile(dim, rows)
    _score_kernel[(heads * members, triton.cdiv(room, tile["N"]))](
        queries, rows.keys, named.ids, found.tokens, found.products,
        members, rows.keys.shape[1], named.first, room, dim, rows.keys.shape[2],
        SLOTS=slots, **tile, num_warps=4,
    )  # fmt: skip


def attend(rows: StoredRows, k: int, found: Found, scoring: tuple[float, float | None], into: Partial) -> None:
    """Attend to the best k keys of `found`, which is overwritten. scoring: scale and soft cap."""
    heads, members, dim = into.out.shape
    scale, softcap = scoring
    slots = found.tokens.shape[1]
    _attend_kernel[(heads * members,)](
        rows.values, found.tokens, found.products, into.out, into.lse,
        members, rows.values.shape[1], found.used, k, dim, rows.values.shape[2], float(scale), float(softcap or 0.0),
        SLOTS=slots, **_tile(dim, rows),
        num_warps=max(4, slots // 512),
    )  # fmt: skip


def _tile(dim: int, rows: StoredRows) -> dict[str, int]:
    """Rows, and numbers of a row, that a program gathers at a time, and bytes of a row's step."""
    width, step = triton.next_power_of_2(dim), rows.extra
    return {"N": max(1, min(MAX_ROWS, TILE_NUMBERS // (2 if step else 1) // width)), "D": width, "STEP": step}
