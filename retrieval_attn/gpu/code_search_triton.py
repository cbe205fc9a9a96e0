"""The Triton kernels behind `code_search.py`, which says what they compute. Imported only where there is Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.code_search import TABLE_WORDS, CodeSearch, Scratch

KEYS = 128
"""Keys that a program scores at a time."""
PROGRAMS = 1056
"""That score keys, about, of all heads."""
TURNS = 24
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEAST_TILE = 16
"""Of a matrix instruction, in every direction."""


@triton.jit
def _side_kernel(
    query, table, sides, query_b, query_h, q_heads, kv_heads, dim, rank,
    WORDS: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """sides[i] = query_side . query i, over its largest number: exact in half precision what small codes need."""
    i = tl.program_id(0)
    row, head = i // q_heads, i % q_heads
    words = table + (row * kv_heads + head // (q_heads // kv_heads)).to(tl.int64) * WORDS
    column, number = tl.arange(0, D), tl.arange(0, R)
    used = tl.load(words + 2) > 0
    side = tl.load(words + 1).to(tl.pointer_type(tl.float32))
    inside = (number < rank)[:, None] & (column < dim)[None, :] & used
    matrix = tl.load(side + number[:, None] * dim + column[None, :], mask=inside, other=0.0)
    own = tl.load(query + row.to(tl.int64) * query_b + head * query_h + column, mask=column < dim, other=0.0)
    result = tl.sum(matrix * own.to(tl.float32)[None, :], axis=1)
    most = tl.max(tl.abs(result), axis=0)
    # a number that is not finite must be seen as one: the largest may be taken without it
    sound = tl.sum(tl.where(own.to(tl.float32) - own.to(tl.float32) == 0, 0, 1), axis=0) == 0
    result = tl.where(sound, result / tl.where(most > 0, most, 1.0), float("nan"))
    tl.store(sides + i.to(tl.int64) * rank + number, result.to(tl.float16), mask=number < rank)


@triton.jit
def _eights(codes, FAST: tl.constexpr):
    """Signed bytes as half-precision numbers."""
    if FAST:
        # 1024 + (c + 128) is a half whose low bits are the byte: no conversion, of which a multiprocessor does few
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, y, m;
            xor.b32 x, $2, 0x80808080;
            mov.b32 m, 0x64646464;
            prmt.b32 y, x, m, 0x4140; prmt.b32 x, x, m, 0x4342;
            mov.b32 m, 0x64806480;
            sub.f16x2 $0, y, m; sub.f16x2 $1, x, m; }""",
            "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return codes.to(tl.int8, bitcast=True).to(tl.float16)


@triton.jit
def _halves(codes, FAST: tl.constexpr):
    """Lower and upper halves of bytes as half-precision numbers."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, y, m, l, h;
            mov.b32 m, 0x64646464; mov.b32 l, 0x64006400;
            prmt.b32 y, $4, m, 0x4140; prmt.b32 x, $4, m, 0x4342;
            and.b32 h, y, 0xFF0FFF0F; sub.f16x2 $0, h, l;
            and.b32 h, x, 0xFF0FFF0F; sub.f16x2 $1, h, l;
            shr.b32 y, y, 4; and.b32 y, y, 0x000F000F; or.b32 y, y, l; sub.f16x2 $2, y, l;
            shr.b32 x, x, 4; and.b32 x, x, 0x000F000F; or.b32 x, x, l; sub.f16x2 $3, x, l; }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return (codes & 15).to(tl.float16), (codes >> 4).to(tl.float16)


@triton.jit
def _score_kernel(
    sides, table, scores, best, kv_heads, group, most,
    WORDS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, W: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """scores[query] of all codes of the query's head, and the best of every GROUP of them."""
    entry, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = table + entry.to(tl.int64) * WORDS
    length = tl.load(words + 2)
    codes = table.to(tl.pointer_type(tl.uint8), bitcast=True) + tl.multiple_of(tl.load(words), 16)
    HALF: tl.constexpr = NARROW // 2
    BYTES: tl.constexpr = WIDE + HALF
    member, w, h = tl.arange(0, G), tl.arange(0, W), tl.arange(0, H)
    in_group = member < group
    query = entry.to(tl.int64) * group + member
    own = sides + query[None, :] * (WIDE + NARROW)
    wide_side = tl.load(own + w[:, None], mask=(w < WIDE)[:, None] & in_group[None, :], other=0.0)
    if NARROW > 0:
        in_half = (h < HALF)[:, None] & in_group[None, :]
        low_side = tl.load(own + WIDE + h[:, None], mask=in_half, other=0.0)
        high_side = tl.load(own + WIDE + HALF + h[:, None], mask=in_half, other=0.0)
    for start in range(program * N, length, programs * N):
        key = start + tl.arange(0, N)
        inside = key < length
        at = codes + key.to(tl.int64)[:, None] * BYTES
        eights = tl.load(at + w[None, :], mask=inside[:, None] & (w < WIDE)[None, :], other=0)
        total = tl.dot(_eights(eights, FAST), wide_side)
        if NARROW > 0:
            packed = tl.load(at + WIDE + h[None, :], mask=inside[:, None] & (h < HALF)[None, :], other=0)
            low, high = _halves(packed, FAST)
            total = tl.dot(low, low_side, total)
            total = tl.dot(high, high_side, total)
        total = tl.where(inside[:, None], total, -float("inf"))
        tl.store(scores + query[None, :] * most + key.to(tl.int64)[:, None], total, mask=in_group[None, :])
        highest = tl.max(tl.reshape(total, (N // GROUP, GROUP, G)), axis=1)
        some = start // GROUP + tl.arange(0, N // GROUP)
        tl.store(best + query[None, :] * (most // GROUP) + some.to(tl.int64)[:, None], highest, mask=in_group[None, :])


@triton.jit
def _threshold(values, inside, wanted, enough, TIMES: tl.constexpr):
    """A number that at least `wanted` values reach, and hardly more than `enough` where they differ at all.

    values, fewer than 65,536, with -inf where not `inside`. Fewer than `wanted` of them: the least.
    """
    low = tl.min(tl.where(inside, values, float("inf")), axis=0)
    high = tl.max(values, axis=0)
    count = tl.sum(tl.where(inside & (values >= low), 1, 0), axis=0)
    turn = 0
    while (turn < TIMES) & (count > enough):
        # two numbers are tried at once, for a sum over all threads is what a turn costs: 16 bits for each count
        first, second = low + (high - low) * 0.33, low + (high - low) * 0.67
        total = tl.sum(tl.where(values >= first, 1, 0) + tl.where(values >= second, 65536, 0), axis=0)
        above1, above2 = total & 65535, (total >> 16) & 65535
        high = tl.where(above2 >= wanted, high, tl.where(above1 >= wanted, second, first))
        low = tl.where(above2 >= wanted, second, tl.where(above1 >= wanted, first, low))
        count = tl.where(above2 >= wanted, above2, tl.where(above1 >= wanted, above1, count))
        turn += 1
    return low


@triton.jit
def _pick_kernel(
    table, scores, best, groups, found, places, ids, wanted, most_groups, enough, room, q_heads, kv_heads, most,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PICKED: tl.constexpr, ROOM: tl.constexpr,
    HAS_PLACES: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """The groups whose best scores are among the `wanted` best, and of their keys those whose scores are."""
    i = tl.program_id(0)
    at = i.to(tl.int64)
    words = table + (i // q_heads * kv_heads + i % q_heads // (q_heads // kv_heads)).to(tl.int64) * WORDS
    count = tl.cdiv(tl.load(words + 2), GROUP)
    row = at
    if HAS_PLACES:
        row = tl.load(places + i).to(tl.int64)

    number = tl.arange(0, GROUPS)
    values = tl.load(best + at * (most // GROUP) + number, mask=number < count, other=-float("inf"))
    inside = (number < count) & (values > -float("inf"))
    chosen = inside & (values >= _threshold(values, inside, wanted, most_groups, TIMES))
    place = tl.cumsum(tl.where(chosen, 1, 0), axis=0) - 1
    tl.store(groups + at * PICKED + place, number, mask=chosen & (place < PICKED))
    picked = tl.minimum(tl.sum(tl.where(chosen, 1, 0), axis=0), PICKED)
    tl.debug_barrier()  # what was written is read by other threads of the program

    number = tl.arange(0, PICKED * GROUP)
    inside = number // GROUP < picked
    group = tl.load(groups + at * PICKED + number // GROUP, mask=inside, other=0)
    key = group * GROUP + number % GROUP
    values = tl.load(scores + at * most + key, mask=inside, other=-float("inf"))
    inside = inside & (values > -float("inf"))
    chosen = inside & (values >= _threshold(values, inside, wanted, enough, TIMES))
    place = tl.cumsum(tl.where(chosen, 1, 0), axis=0) - 1
    # first to the device's own memory, for the host's takes whole lines far better than scattered words
    tl.store(found + at * room + place, key, mask=chosen & (place < room))
    named = tl.minimum(tl.sum(tl.where(chosen, 1, 0), axis=0), room)
    tl.debug_barrier()
    slot = tl.arange(0, ROOM)
    line = tl.load(found + at * room + slot, mask=slot < named, other=-1)
    tl.store(ids + row * room + slot, line, mask=slot < room)


def search(search: CodeSearch, query: Tensor, ids: Tensor, places: Tensor | None, scratch: Scratch) -> None:
    """See `CodeSearch.run`."""
    batch, q_heads, _, dim = query.shape
    kv_heads, shape = search.kv_heads, search.shape
    entries, group = batch * kv_heads, q_heads // kv_heads
    queries, rank, enough = batch * q_heads, shape.wide + shape.narrow, shape.wanted + shape.wanted // 16
    most, size = scratch.most, scratch.group
    _side_kernel[(queries,)](
        query, search.table, search.sides, query.stride(0), query.stride(1), q_heads, kv_heads, dim, rank,
        WORDS=TABLE_WORDS, D=triton.next_power_of_2(dim), R=triton.next_power_of_2(rank), num_warps=8,
    )  # fmt: skip
    _score_kernel[(entries, max(1, min(PROGRAMS // entries, most // KEYS)))](
        search.sides, search.table, scratch.scores, scratch.best, kv_heads, group, most,
        WORDS=TABLE_WORDS, WIDE=shape.wide, NARROW=shape.narrow, W=_tile(shape.wide), H=_tile(shape.narrow // 2),
        N=KEYS, G=_tile(group), GROUP=size, FAST=not INTERPRETED, num_warps=8, num_stages=3,
    )  # fmt: skip
    _pick_kernel[(queries,)](
        search.table, scratch.scores, scratch.best, scratch.groups, scratch.found,
        scratch.groups if places is None else places, ids, shape.wanted, min(enough, scratch.picked), enough,
        shape.room, q_heads, kv_heads, most,
        WORDS=TABLE_WORDS, GROUP=size, GROUPS=most // size, PICKED=scratch.picked,
        ROOM=triton.next_power_of_2(shape.room), HAS_PLACES=places is not None, TIMES=TURNS,
        num_warps=_warps(max(most // size, scratch.picked * size)),
    )  # fmt: skip


def _tile(number: int) -> int:
    return max(LEAST_TILE, triton.next_power_of_2(number))


def _warps(numbers: int) -> int:
    """So many that a thread holds about 16 numbers: a sum over few threads is quick."""
    return min(32, max(4, triton.next_power_of_2(numbers) // 512))
