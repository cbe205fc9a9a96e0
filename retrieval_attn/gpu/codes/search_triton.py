"""The Triton kernels behind `search.py`, which says what they compute. Imported only where there is Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.codes.search import TABLE_WORDS, CodeSearch, Scratch

KEYS = 128
"""Keys that a program scores at a time."""
PROGRAMS = 1056
"""That score keys, about, of all heads."""
TURNS = 24
FINE = 254
"""Steps of the second plane of a query in one of the first: the first is off by half a step at most."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LEAST_TILE = 16
"""Of a matrix instruction, in every direction."""


@triton.jit
def _side_kernel(
    query, table, sides, sound, query_b, query_h, q_heads, kv_heads, dim, rank,
    WORDS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """query_side . query i as whole numbers: two planes of 8 bits, of which the second counts 1 / FINE.

    sides[i] (4, K): planes of what meets bytes or their lower halves, then of what meets their upper halves. sound[i]:
    1, or NaN for a query that is not finite.
    """
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
    finite = tl.sum(tl.where(result - result == 0, 0, 1), axis=0) == 0
    most = tl.max(tl.abs(tl.where(finite, result, 0.0)), axis=0)
    scaled = tl.where(finite, result, 0.0) * (127.0 / tl.where(most > 0, most, 1.0))
    coarse = tl.floor(scaled + 0.5)
    fine = tl.floor((scaled - coarse) * FINE + 0.5)
    upper = number >= WIDE + HALF
    at = sides + i.to(tl.int64) * 4 * K + tl.where(upper, 2 * K + number - HALF, number)
    tl.store(at, coarse.to(tl.int8), mask=number < rank)
    tl.store(at + K, fine.to(tl.int8), mask=number < rank)
    tl.store(sound + i, tl.where(finite, 1.0, float("nan")))


@triton.jit
def _halves(codes, keep, FAST: tl.constexpr):
    """Codes with the bits that `keep` has, and the upper halves of their bytes; four bytes at a time."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x;
            and.b32 $0, $2, $3;
            shr.b32 x, $2, 4;
            and.b32 $1, x, 0x0F0F0F0F; }""",
            "=r,=r,r,r", [codes, keep], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return codes & keep, (codes >> 4) & 15


@triton.jit
def _score_kernel(
    sides, sound, table, scores, best, kv_heads, group, most,
    WORDS: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, FINE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """scores[query] of all codes of the query's head, and the best of every GROUP of them.

    Whole numbers all through: bytes go to the matrix units as they are, for a multiprocessor converts few.
    """
    entry, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    words = table + entry.to(tl.int64) * WORDS
    length = tl.load(words + 2)
    codes = table.to(tl.pointer_type(tl.int8), bitcast=True) + tl.multiple_of(tl.load(words), 16)
    k, column, member = tl.arange(0, K), tl.arange(0, 2 * G), tl.arange(0, G)
    query = entry.to(tl.int64) * group + column % G
    own = sides + query[None, :] * 4 * K + (column // G)[None, :] * K + k[:, None]
    lower_side = tl.load(own, mask=(column % G < group)[None, :], other=0)
    upper_side = tl.load(own + 2 * K, mask=(column % G < group)[None, :], other=0)
    keep = tl.where(k < WIDE, -1, 15).to(tl.int8)[None, :] + tl.zeros((N, K), tl.int8)
    plane = tl.where(tl.arange(0, 2) == 0, FINE, 1)[None, :, None]
    in_group = member < group
    query = entry.to(tl.int64) * group + member
    factor = tl.load(sound + query, mask=in_group, other=1.0)
    for start in range(program * N, length, programs * N):
        key = start + tl.arange(0, N)
        inside = key < length
        at = codes + key.to(tl.int64)[:, None] * BYTES + k[None, :]
        lower, upper = _halves(tl.load(at, mask=inside[:, None] & (k < BYTES)[None, :], other=0), keep, FAST)
        planes = tl.dot(lower, lower_side, out_dtype=tl.int32)
        planes = tl.dot(upper, upper_side, planes, out_dtype=tl.int32)
        total = tl.sum(tl.reshape(planes, (N, 2, G)) * plane, axis=1).to(tl.float32) * factor[None, :]
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
    k = search.sides.shape[2]
    _side_kernel[(queries,)](
        query, search.table, search.sides, search.sound, query.stride(0), query.stride(1), q_heads, kv_heads, dim, rank,
        WORDS=TABLE_WORDS, WIDE=shape.wide, HALF=shape.narrow // 2, K=k, D=triton.next_power_of_2(dim),
        R=triton.next_power_of_2(rank), FINE=FINE, num_warps=8,
    )  # fmt: skip
    _score_kernel[(entries, max(1, min(PROGRAMS // entries, most // KEYS)))](
        search.sides, search.sound, search.table, scratch.scores, scratch.best, kv_heads, group, most,
        WORDS=TABLE_WORDS, WIDE=shape.wide, BYTES=shape.wide + shape.narrow // 2, K=k, N=KEYS,
        G=max(LEAST_TILE // 2, triton.next_power_of_2(group)), GROUP=size, FINE=FINE, FAST=not INTERPRETED,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _pick_kernel[(queries,)](
        search.table, scratch.scores, scratch.best, scratch.groups, scratch.found,
        scratch.groups if places is None else places, ids, shape.wanted, min(enough, scratch.picked), enough,
        shape.room, q_heads, kv_heads, most,
        WORDS=TABLE_WORDS, GROUP=size, GROUPS=most // size, PICKED=scratch.picked,
        ROOM=triton.next_power_of_2(shape.room), HAS_PLACES=places is not None, TIMES=TURNS,
        num_warps=_warps(max(most // size, scratch.picked * size)),
    )  # fmt: skip


def _warps(numbers: int) -> int:
    """So many that a thread holds about 16 numbers: a sum over few threads is quick."""
    return min(32, max(4, triton.next_power_of_2(numbers) // 512))
