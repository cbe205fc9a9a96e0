"""The Triton kernels behind `mass.py`, which says what they compute. Imported only where there is Triton.

Exponentials meet their clusters in a product with a one-hot matrix, made four bytes at a time in registers: no addition
is atomic, and sums are the same at every run. Exponentials are relative to the least score that was named, which hardly
one of the others exceeds; keys so far below it that they vanish count as nothing against the named ones.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.clusters import mass as sizes
from retrieval_attn.gpu.clusters.mass import RUN, TABLE_WORDS, ClusterMass, TailPartial, mass_grid
from retrieval_attn.gpu.codes.codes import MOST_VARIANCE
from retrieval_attn.gpu.codes.search import TABLE_WORDS as CODE_WORDS
from retrieval_attn.gpu.codes.search import CodeSearch, QueryGroup, QuestionSearch, SearchScratch
from retrieval_attn.gpu.codes.search_triton import BLOCK_KEYS

TILE = BLOCK_KEYS
"""Keys that a program looks at at a time: scores are written so far behind the last key, and need no mask."""
FEW_CLUSTERS = 64
"""Up to which the lower digit of a cluster has 16 values, and 32 above: least numbers to make for a key."""
MOST_POWER, SHIFT = 15.0, 10.0
"""Of 2, what a float16 weight is at most, and one like that of the least score that was named: no weight overflows,
whatever was named, and one that is 2^24 times smaller keeps all of its bits. A key that was not named scores no more
than those.
"""
LOG2_E = 1.4426950408889634
JOINED_COLUMNS, JOINED_ROWS, JOINED_MASSES = 32, 128, 8192
"""Columns of a mean value that a program joins, and of how many programs it holds how many masses at a time."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VALUE_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)  # the exponential may overflow to inf, which gives 1


@triton.jit
def _terms(units, bases, variances, factors, least, number, i, scale, softcap, MOST_VARIANCE: tl.constexpr):
    """Compute the terms of queries by number, rows i of a turn: logit = unit * score + base; half the variance of the
    error of that logit; and the least logit that was named, to which exponentials are relative; NaN: there is no
    estimate.
    """
    # never 0, which times the -inf of a named key would be NaN
    unit, base = tl.maximum(tl.load(units + number) * scale, 1e-30), tl.load(bases + number) * scale
    start = tl.load(least + i) * unit + base
    if softcap > 0:  # not compiled twice: a launch ahead of time does not know it
        start = softcap * _tanh(start / softcap)
    # a query that is not finite has no factor
    start = tl.where(tl.abs(start * tl.load(factors + number)) < float("inf"), start, float("nan"))
    return unit, base, tl.minimum(tl.load(variances + number) * scale * scale, MOST_VARIANCE) * 0.5, start


def _digits_text(bits: int) -> str:
    """Instructions that make of four bytes their lower `bits` bits and those above, 16 bits each."""
    mask = 0x01010101 * ((1 << bits) - 1)
    return f"""{{ .reg .b32 x;
        and.b32 x, $4, {mask};
        prmt.b32 $0, x, 0, 0x4140;
        prmt.b32 $1, x, 0, 0x4342;
        and.b32 x, $4, {0xFFFFFFFF ^ mask};
        shr.b32 x, x, {bits};
        prmt.b32 $2, x, 0, 0x4140;
        prmt.b32 $3, x, 0, 0x4342; }}"""


@triton.jit
def _digits(clusters, L: tl.constexpr, TEXT: tl.constexpr, FAST: tl.constexpr):
    """The lower digit of clusters, bytes, and the upper one, int16. TEXT: of `_digits_text`."""
    if FAST:
        return tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r", [clusters], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
    else:
        return (clusters % L).to(tl.int16), (clusters // L).to(tl.int16)


@triton.jit
def _one_hot(number, own, FAST: tl.constexpr):
    """1 where number is own, both int16 from 0 on, else 0: float16, or float32 where not FAST."""
    if FAST:
        # two comparisons at once; as float16 such numbers are tiny ones, each of its own value
        return tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r", [number, own], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.where(number == own, 1.0, 0.0)


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count"])
def _mass_kernel(
    scores, units, bases, variances, factors, least, code_table, table, sums,
    members, first_entry, first_member, count, max_keys, scale, softcap,
    CODE_WORDS: tl.constexpr, WORDS: tl.constexpr, MOST_VARIANCE: tl.constexpr, MOST_POWER: tl.constexpr,
    SHIFT: tl.constexpr, LOG2_E: tl.constexpr, H: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    SAMPLED: tl.constexpr, RUN: tl.constexpr, DIGITS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """sums[i, program] (H * L,): the exponentials of every programs-th N keys of an entry, of G of its `count` queries.
    Of more than SAMPLED keys those that `mass.is_sampled` says, which count for the others.

    A cluster is two digits: a key's exponentials stand in the rows of the upper, its one-hot vector has the lower one.
    """
    program, programs = tl.program_id(1), tl.num_programs(1)
    entry, member = (first_entry + tl.program_id(0)).to(tl.int64), tl.program_id(2) * G + tl.arange(0, G)
    address = tl.load(table + entry * WORDS)
    length = tl.where(address == 0, 0, tl.load(code_table + entry * CODE_WORDS + 2)).to(tl.int32)
    every, last_run = 1, tl.maximum(length - 1, 0) // RUN
    while 2 * every <= length // SAMPLED:
        every *= 2
    clusters = address.to(tl.pointer_type(tl.uint8))
    in_group = member < count
    # a row of scores to read there is for all; behind the last query, one that is not stored
    last = tl.minimum(member, count - 1)
    here, number = tl.program_id(0).to(tl.int64) * count + last, entry * members + first_member + last
    unit, base, lacking, start = _terms(
        units, bases, variances, factors, least, number, here, scale, softcap, MOST_VARIANCE
    )
    unit, base, lacking, start = unit[:, None], base[:, None], lacking[:, None], start[:, None]
    slope_2, base_2 = unit * LOG2_E, (base + lacking - start) * LOG2_E + SHIFT
    upper, lower = tl.arange(0, H).to(tl.int16), (4 * tl.arange(0, L // 4)).to(tl.int16)[None, :]
    rows = scores + here[:, None] * max_keys
    total = tl.zeros((H * G, L), tl.float32)
    # the grid is captured, the length is not: a fixed number of programs shares the current keys
    for first in range(program * N, tl.cdiv(length, every * RUN) * RUN, programs * N):
        run = first // RUN + tl.arange(0, N) // RUN
        run = run * every + (run * 7 & (every - 1))
        key = tl.minimum(run, last_run) * RUN + tl.arange(0, N) % RUN
        own_lower, own_upper = _digits(tl.load(clusters + key, mask=key < length, other=0), L, DIGITS, FAST)
        # without a mask: a copy that lies ahead can fill in nothing but zeros
        score = tl.load(rows + key[None, :]).to(tl.float32)
        score = tl.where((run <= last_run)[None, :], score, -float("inf"))
        if softcap > 0:
            bent = _tanh((score * unit + base) / softcap)
            slope = 1 - bent * bent
            logit = softcap * bent + lacking * slope * (slope - 2 * bent / softcap)
            power = tl.where(score > -float("inf"), (logit - start) * LOG2_E + SHIFT, score)
        else:
            power = score * slope_2 + base_2
        weight = tl.exp2(tl.minimum(power, MOST_POWER))
        if FAST:  # the interpreter multiplies no float16
            weight = weight.to(tl.float16)
        if H > 1:
            keep = _one_hot(upper[:, None], own_upper[None, :], FAST)
            weight = tl.reshape(weight[None] * keep[:, None, :], (H * G, N))
        # four neighbours in one thread, which go to shared memory at once
        own = own_lower[:, None]
        even = tl.join(_one_hot(lower, own, FAST), _one_hot(lower + 2, own, FAST))
        odd = tl.join(_one_hot(lower + 1, own, FAST), _one_hot(lower + 3, own, FAST))
        total = tl.dot(weight, tl.reshape(tl.join(even, odd), (N, L)), total)
    at = sums + ((here * programs + program) * (H * L))[None, :, None]
    at += tl.arange(0, H)[:, None, None] * L + tl.arange(0, L)[None, None, :]
    tl.store(at, tl.reshape(total * (tl.exp2(-SHIFT) * every), (H, G, L)), mask=in_group[None, :, None])


@triton.jit(do_not_specialize=["members", "first_entry", "first_member", "count", "programs"])
def _join_kernel(
    sums, units, bases, variances, factors, least, table, out, lse,
    members, first_entry, first_member, count, programs, dim, scale, softcap,
    WORDS: tl.constexpr, MOST_VARIANCE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """out (D of the columns) and lse of query i: what all programs summed, P of them at a time."""
    i = tl.program_id(0)
    entry = (first_entry + i // count).to(tl.int64)
    query = entry * members + first_member + i % count
    address = tl.load(table + entry * WORDS + 1)
    values = address.to(tl.pointer_type(VALUE))
    part, number, column = tl.arange(0, P), tl.arange(0, C), tl.program_id(1) * D + tl.arange(0, D)
    # all clusters at once: additions of one turn wait for nothing but their loads, and threads meet once, at the end
    masses = tl.zeros((P, C), tl.float32)
    for some in range(0, programs, P):
        at = sums + (i.to(tl.int64) * programs + some + part)[:, None] * C + number[None, :]
        masses += tl.load(at, mask=(some + part < programs)[:, None], other=0.0)
    mass = tl.sum(masses, axis=0)
    total = tl.sum(mass, axis=0)
    at = values + number[:, None] * dim + column[None, :]
    mean = tl.load(at, mask=(column < dim)[None, :] & (address != 0), other=0.0).to(tl.float32)
    mixed = tl.sum(mean * mass[:, None], axis=0)
    _, _, _, start = _terms(units, bases, variances, factors, least, query, i, scale, softcap, MOST_VARIANCE)
    empty = (total == 0) | (start != start)
    total = tl.where(empty, 1.0, total)
    tl.store(out + query * dim + column, tl.where(empty, 0.0, mixed / total), mask=column < dim)
    tl.store(lse + query, tl.where(empty, -float("inf"), start + tl.log(total)), mask=tl.program_id(1) == 0)


def estimate(
    mass: ClusterMass,
    search: CodeSearch,
    query: Tensor,
    scoring: Scoring,
    scratch: SearchScratch,
    turn: QueryGroup,
    into: TailPartial,
) -> None:
    """Write the rows of `into` of a turn's queries, out of query (batch, q_heads, 1, head_dim)."""
    members = query.shape[1] // search.kv_heads
    group, blocks, programs = mass_grid(turn.entries, turn.members, step=not isinstance(search, QuestionSearch))
    clusters = mass.clusters
    low = 16 if clusters <= FEW_CLUSTERS else 32
    programs = max(1, min(programs, scratch.max_keys // TILE))
    queries = turn.entries * turn.members
    sums = torch.empty(queries, programs, clusters, dtype=torch.float32, device=into.out.device)
    known = search.units, search.bases, search.variances, search.factors, scratch.least
    bent = float(scoring.scale), float(scoring.softcap or 0.0)
    _mass_kernel[(turn.entries, programs, blocks)](
        scratch.scores, *known, search.table, mass.table, sums,
        members, turn.first_entry, turn.first_member, turn.members, scratch.max_keys, *bent,
        CODE_WORDS=CODE_WORDS, WORDS=TABLE_WORDS, MOST_VARIANCE=MOST_VARIANCE, MOST_POWER=MOST_POWER, SHIFT=SHIFT,
        LOG2_E=LOG2_E, H=clusters // low, L=low, N=TILE, G=group,
        SAMPLED=sizes.SAMPLED, RUN=RUN, DIGITS=_digits_text(low.bit_length() - 1), FAST=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    columns = min(JOINED_COLUMNS, triton.next_power_of_2(mass.value_dim))
    _join_kernel[(queries, triton.cdiv(mass.value_dim, columns))](
        sums, *known, mass.table, into.out, into.lse,
        members, turn.first_entry, turn.first_member, turn.members, programs, mass.value_dim, *bent,
        WORDS=TABLE_WORDS, MOST_VARIANCE=MOST_VARIANCE, C=clusters, P=min(JOINED_ROWS, JOINED_MASSES // clusters),
        D=columns, VALUE=VALUE_TYPES[mass.dtype], num_warps=8,
    )  # fmt: skip
