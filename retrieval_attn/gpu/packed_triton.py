"""The Triton kernels behind `products.py` for weights of 4 bits, as `packed.py` describes them.

A word holds eight weights of one row. Its lower half and its upper half are moved right by 0, 4, 8 and 12 bits and get
a bfloat16's exponent of 128 instead of a conversion: 128 + q is exact there. Torch packs words in the order in which a
matrix instruction takes a matrix from a warp's registers, so nothing changes places between threads. A group's sums go
through scale and zero point behind the instructions, in float32:

    sum (scale * (q - 8) + zero) x = scale * sum (128 + q) x + (zero - 136 * scale) * sum x

Each warp of a program walks along a part of the columns of its own, and their sums are added at the end. One row
fills all columns of a tile with the same numbers, for that needs no mask. As in `products_triton.py`, its norm's scale
stands behind the product; its weights are multiplied on the way, and rounded to bfloat16 once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.expert_blocks import ADDRESS_UNIT, BlockLayout, PlacedExperts
from retrieval_attn.gpu.memory import DEEP_TILE_BYTES, shared_bytes
from retrieval_attn.gpu.packed import STRIP, TILE_ROWS, PackedWeights
from retrieval_attn.gpu.packed_experts import PackedExperts
from retrieval_attn.gpu.products import MAX_ROWS, Attending, Gated, Norm, Projected, Rotation
from retrieval_attn.gpu.products_triton import begin, largest, normed, overlap, pair, projected, turned

MAGIC = 0x43004300
"""Two numbers of bfloat16, 128 each: their last four bits are free. An argument of kernels, because an instruction has
room for one constant, which is the mask of the bits.
"""


@triton.jit
def _numbers(words, FLOATS: tl.constexpr):
    """The numbers q in the lowest four bits of each half of words; FLOATS: `packed.FLOAT_NUMBERS` of them."""
    bits = words & 0x000F000F
    if FLOATS:  # of a number's bits, from the highest: sign, two of the exponent, one of the mantissa
        even = bits & 0x00010001
        odd = ((bits >> 1) & 0x00010001) * 15
        large, negative = ((bits >> 2) & 0x00010001) * 15, ((bits >> 3) & 0x00010001) * 15
        twice = 0x00040004 + even * 2
        twice = (twice + (twice & odd)) & large | (bits & 0x00030003) & ~large
        bits = 0x00100010 + twice - (twice & negative) * 2
    return bits


@triton.jit
def _unpacked(words, magic, T: tl.constexpr, W: tl.constexpr, P: tl.constexpr, FLOATS: tl.constexpr):
    """128 + q, bfloat16 (P * W, 8 * T, 128 // P), of words (T, W * 128): of T tiles of rows, W strips of P parts.

    Columns of a part, whose weights share a scale, are in the order of `_place`.
    """
    low = _numbers(words, FLOATS) | magic
    second = _numbers(words >> 4, FLOATS) | magic
    third = _numbers(words >> 8, FLOATS) | magic
    last = _numbers(words >> 12, FLOATS) | magic
    pairs = tl.join(tl.join(low, second), tl.join(third, last))
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    # tile, strip, row, pair of four, group, word, which eight (2 bits), number of a pair
    bits = tl.reshape(halves, (T, W, 8, 4, P, 4 // P, 2, 2, 2))
    bits = tl.permute(bits, (4, 1, 0, 2, 5, 7, 3, 6, 8))
    return tl.reshape(bits, (P * W, 8 * T, 128 // P))


@triton.jit
def _place(W: tl.constexpr, P: tl.constexpr):
    """Columns (P * W, 128 // P) of a tile of W strips, as `_in_order` wants them: what a thread needs is one span."""
    group, at = tl.arange(0, P * W), tl.arange(0, 128 // P)
    within = at % 2 + at // 2 % 2 * 16 + at // 4 % 2 * 8 + at // 8 % (4 // P) * 32 + at // (32 // P) * 2
    return (group % W * 128 + group // W * (128 // P))[:, None] + within[None, :]


@triton.jit
def _in_order(x, M: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """x (P * W, M, 128 // P) from `_place` as the right side of a product with `_unpacked`, (P * W, 128 // P, M)."""
    x = tl.reshape(x, (P * W, M, 4, 4 // P, 2, 2, 2))
    return tl.reshape(tl.permute(x, (0, 3, 5, 2, 4, 6, 1)), (P * W, 128 // P, M))


@triton.jit
def _scale_and_zero(both):
    """float32: two halves of words, bfloat16; or half a power of two by its exponent, a byte, for E2M1."""
    if both.dtype == tl.uint8:
        scale = (both.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
        zero = -8 * scale
    else:
        scale, zero = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    return scale, zero


@triton.jit
def _products(
    words, scales, numbers, norm, magic, rows, dim, ahead, eps,
    GROUP: tl.constexpr, ONE: tl.constexpr, HAS_NORM: tl.constexpr, FROM_ONE: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """Products (8 * T, M), float32, of T tiles of rows with rows of numbers.

    words (T, 1), scales (1, 8 * T): pointers to the first word of a tile and to a row's first scale, whose next one
    lies `ahead` words behind it. ONE: of one row, normed on the way with HAS_NORM, M times the same; else of `rows` of
    M. WHOLE: strips of a turn divide dim.
    """
    # larger groups in halves of a strip, too: whole strips a product take 97 us a layer of four rows, halves 67 (H100)
    P: tl.constexpr = max(2, 128 // GROUP)
    column, place, group, member = tl.arange(0, W * 128), _place(W, P), tl.arange(0, P * W), tl.arange(0, M)
    total = tl.zeros((P * W, 8 * T, M), tl.float32)
    half = tl.full((P * W, 8 * T, 64 // P), 1.0, numbers.dtype.element_ty)
    ones = tl.reshape(tl.join(half, half), (P * W, 8 * T, 128 // P))  # joined, as the weights are: in the same order
    squares = tl.zeros((W * 128,), tl.float32)
    row = numbers + tl.minimum(member, rows - 1)[None, :, None] * dim
    for start in tl.range(0, dim, W * 128, num_stages=STAGES):
        weights = _unpacked(tl.load(words + start + column[None, :]), magic, T, W, P, FLOATS).to(
            numbers.dtype.element_ty
        )
        if ONE:
            inside = None if WHOLE else start + place < dim
            x = tl.load(numbers + start + place, mask=inside, other=None if WHOLE else 0.0)
            if HAS_NORM:
                factor = tl.load(norm + start + place, mask=inside, other=None if WHOLE else 0.0).to(tl.float32)
                factor = factor + 1 if FROM_ONE else factor
                x = (x.to(tl.float32) * factor).to(numbers.dtype.element_ty)
                inside = None if WHOLE else start + column < dim
                own = tl.load(numbers + start + column, mask=inside, other=None if WHOLE else 0.0).to(tl.float32)
                squares += own * own
            x = tl.broadcast_to(x[:, None, :], (P * W, M, 128 // P))
        else:
            inside = None if WHOLE else (start + place < dim)[:, None, :]
            # rows that are not there are the last one again: that needs no mask, and their products are not stored
            x = tl.load(row + (start + place)[:, None, :], mask=inside, other=None if WHOLE else 0.0)
        x = _in_order(x, M, W, P)
        both = tl.load(scales + ((start + group % W * 128 + group // W * (128 // P)) // GROUP * ahead)[:, None])
        scale, zero = _scale_and_zero(both)
        total += tl.dot(weights, x, input_precision="ieee") * scale[:, :, None]
        total += tl.dot(ones, x, input_precision="ieee") * (zero - 136 * scale)[:, :, None]
    out = tl.sum(total, axis=0)
    if HAS_NORM:
        out *= tl.rsqrt(tl.sum(squares, axis=0) / dim + eps)
    return out


@triton.jit
def _halves(numbers, T: tl.constexpr, M: tl.constexpr):
    """The products (4 * T, M) of the first half of T tiles and those of the second."""
    return tl.split(tl.permute(tl.reshape(numbers, (2, 4 * T, M)), (1, 2, 0)))


@triton.jit(do_not_specialize=["rows", "magic"])
def _project_kernel(
    numbers, norm, query, key, value, query_scales, key_scales, value_scales, query_bias, key_bias, value_bias,
    cosines, sines, out_query, out_key, out_value,
    magic, rows, dim, long, query_ahead, key_ahead, value_ahead, eps, q_heads, kv_heads, head_dim,
    GROUP: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr, FROM_ONE: tl.constexpr, HAS_BIAS: tl.constexpr,
    TURNS: tl.constexpr, OVERLAP: tl.constexpr, M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per T / 2 tiles of the first half of a head and those of the second that they are turned with."""
    cuts = head_dim // (8 * T)
    entry, place = tl.program_id(0) // cuts, tl.program_id(0) % cuts * (4 * T)
    if entry < q_heads:
        head, heads, words, scales, ahead, bias, out = (
            entry, q_heads, query, query_scales, query_ahead, query_bias, out_query,
        )  # fmt: skip
    elif entry < q_heads + kv_heads:
        head, heads, words, scales, ahead, bias, out = (
            entry - q_heads, kv_heads, key, key_scales, key_ahead, key_bias, out_key,
        )  # fmt: skip
    else:
        head, heads, words, scales, ahead, bias, out = (
            entry - q_heads - kv_heads, kv_heads, value, value_scales, value_ahead, value_bias, out_value,
        )  # fmt: skip
    tile, row = tl.arange(0, T), tl.arange(0, 8 * T)
    first = head * head_dim + place
    tile = first // 8 + tile % (T // 2) + tile // (T // 2) * (head_dim // 16)
    row = first + row % (4 * T) + row // (4 * T) * (head_dim // 2)
    begin(OVERLAP)
    both = _products(
        words + tile[:, None].to(tl.int64) * long, scales + row[None, :], numbers, norm, magic, rows, dim, ahead, eps,
        GROUP, ONE, ONE, FROM_ONE, WHOLE, M, T, W, STAGES, False,
    )  # fmt: skip
    a, b = _halves(both, T, M)
    member, low = tl.arange(0, M), place + tl.arange(0, 4 * T)
    if HAS_BIAS:
        a += tl.load(bias + head * head_dim + low).to(tl.float32)[:, None]
        b += tl.load(bias + head * head_dim + low + head_dim // 2).to(tl.float32)[:, None]
    inside = (member < rows)[None, :]
    if TURNS and entry < q_heads + kv_heads:
        at = member[None, :] * head_dim + low[:, None]
        a, b = turned(a, b, cosines, sines, at, head_dim // 2, inside)
    at = (member[None, :] * heads + head) * head_dim + low[:, None]
    tl.store(out + at, a.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + head_dim // 2, b.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "magic"])
def _gated_kernel(
    numbers, norm, gate, up, gate_scales, up_scales, gate_bias, up_bias, out,
    magic, rows, dim, long, ahead, inner, eps,
    GROUP: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr, FROM_ONE: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per T / 2 tiles of silu(gate) * up."""
    tile, row = tl.arange(0, T), tl.arange(0, 8 * T)
    at = (tl.program_id(0) * (T // 2) + tile % (T // 2))[:, None].to(tl.int64) * long
    words = tl.where((tile < T // 2)[:, None], gate + at, up + at)
    place = tl.program_id(0) * (4 * T) + row % (4 * T)
    scales = tl.where(row < 4 * T, gate_scales + place, up_scales + place)[None, :]
    begin(OVERLAP)
    both = _products(
        words, scales, numbers, norm, magic, rows, dim, ahead, eps, GROUP, ONE, ONE, FROM_ONE, WHOLE, M, T, W, STAGES,
        False,
    )  # fmt: skip
    a, b = _halves(both, T, M)
    member, place = tl.arange(0, M), tl.program_id(0) * (4 * T) + tl.arange(0, 4 * T)
    if HAS_GATE_BIAS:
        a += tl.load(gate_bias + place).to(tl.float32)[:, None]
    if HAS_UP_BIAS:
        b += tl.load(up_bias + place).to(tl.float32)[:, None]
    a = a / (1 + tl.exp(-a)) * b
    tl.store(out + member[None, :] * inner + place[:, None], a.to(out.dtype.element_ty), mask=(member < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "magic"])
def _add_kernel(
    residual, numbers, words, scales, bias, out, magic, rows, dim, long, ahead, width,
    GROUP: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    OVERLAP: tl.constexpr, M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per T tiles of the product with M rows; ADDS: plus a residual."""
    tile, first = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * M
    place, member = tl.program_id(0) * (8 * T) + tl.arange(0, 8 * T), tl.arange(0, M)
    begin(OVERLAP)
    a = _products(
        words + tile[:, None].to(tl.int64) * long, scales + place[None, :], numbers + first.to(tl.int64) * dim, numbers,
        magic, rows - first, dim, ahead, 0.0, GROUP, ONE, False, False, WHOLE, M, T, W, STAGES, False,
    )  # fmt: skip
    if HAS_BIAS:
        a += tl.load(bias + place).to(tl.float32)[:, None]
    inside = (first + member < rows)[None, :]
    at = (first + member)[None, :].to(tl.int64) * width + place[:, None]
    if ADDS:
        a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, a.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pairs", "magic"])
def _experts_kernel(
    numbers, chosen, words, scales, table, counts, bias, out, magic, pairs, each, dim, long, ahead, width,
    tile_scales, behind,
    GROUP: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, FLOATS: tl.constexpr,
    PAIRS: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program per T tiles of an expert's matrix and per pair of a token and an expert.

    UNIT: words that addresses in `table` count, from `words` on; 0: experts follow each other. SCALE_UNIT: the same in
    scales, which begin `behind` an expert's address, tile_scales for each tile. COUNTED: add pairs to `counts`.

    All pairs of an expert are multiplied by the program of the first of them (of the first of each M), so that weights
    are read once; programs of the other pairs end at once. Which pairs these are is found from the router's numbers
    here: nothing is sorted before, and no number on the host depends on them. ONE: each pair has its own expert.
    """
    pair, place = tl.program_id(1), tl.program_id(0) * (8 * T) + tl.arange(0, 8 * T)
    begin(OVERLAP)
    number = tl.load(chosen + pair)
    expert = number.to(tl.int64)
    if UNIT:
        base, tile = tl.load(table + expert), tl.program_id(0) * T + tl.arange(0, T)
        own_words = words + base * UNIT + tile[:, None] * long
        own_scales = scales + behind + base * SCALE_UNIT + (place // 8 * tile_scales + place % 8)[None, :]
    else:
        tile = expert * (width // 8) + tl.program_id(0) * T + tl.arange(0, T)
        own_words, own_scales = words + tile[:, None] * long, scales + (expert * width + place)[None, :]
    if COUNTED:
        tl.atomic_add(counts + expert, 1, mask=tl.program_id(0) == 0)
    slot = tl.arange(0, M)
    if ONE:
        a = _products(
            own_words, own_scales, numbers + (pair // each).to(tl.int64) * dim, numbers, magic, 1, dim, ahead, 0.0,
            GROUP, True, False, False, WHOLE, M, T, W, STAGES, FLOATS,
        )  # fmt: skip
        if HAS_BIAS:
            a += tl.load(bias + expert * width + place).to(tl.float32)[:, None]
        at = (pair + slot * 0).to(tl.int64)[None, :] * width + place[:, None]
        tl.store(out + at, a.to(out.dtype.element_ty), mask=(slot == 0)[None, :])
    else:
        every = tl.arange(0, PAIRS)
        same = (tl.load(chosen + every, mask=every < pairs, other=-1) == number).to(tl.int32)
        rank = tl.sum(tl.where(every < pair, same, 0), axis=0)
        if rank % M == 0:
            counted = tl.cumsum(same, axis=0)
            hit = ((counted[None, :] == (rank + slot + 1)[:, None]) & (same > 0)[None, :]).to(tl.int32)
            inside = tl.sum(hit, axis=1) > 0
            # slots without a pair multiply the program's own: that needs no mask, and is not stored
            member = tl.where(inside, tl.sum(hit * every[None, :], axis=1), pair).to(tl.int64)
            # rows of their own addresses: with 1 as the number of rows the addresses are used as they are
            rows = numbers + (member // each * dim)[None, :, None]
            a = _products(
                own_words, own_scales, rows, numbers, magic, 1, dim, ahead, 0.0,
                GROUP, False, False, False, WHOLE, M, T, W, STAGES, FLOATS,
            )  # fmt: skip
            if HAS_BIAS:
                a += tl.load(bias + expert * width + place).to(tl.float32)[:, None]
            tl.store(out + member[None, :] * width + place[:, None], a.to(out.dtype.element_ty), mask=inside[None, :])


FEWEST_PAIRS = 64
"""Pairs in a kernel for several tokens: each power of two from here on is a kernel of its own."""


def project(hidden: Tensor, into: Attending, rotation: Rotation) -> Projected:
    """See `products.project`."""
    return projected(hidden, into, rotation, _launch_project)


def two_products(hidden: Tensor, norm: Norm, first: PackedWeights, second: PackedWeights) -> tuple[Tensor, Tensor]:
    """See `products.two_products`."""
    return pair(hidden, norm, first, second, _launch_project)


def _launch_project(
    hidden: Tensor, norm: Norm, weights: Sequence[Any], heads: Sequence[int], head_dim: int, *rest: Any, **options: Any
) -> None:
    options |= _options(len(hidden), hidden, weights[0], head_dim, PROJECT)
    _project_kernel[(sum(heads) * (head_dim // 8 // options["T"]),)](
        hidden, norm.weight, *(one.words for one in weights), *(one.scales.view(torch.int32) for one in weights), *rest,
        MAGIC, *hidden.shape, weights[0].strips * STRIP, *(one.scales.stride(0) // 2 for one in weights), norm.eps,
        heads[0], heads[1], head_dim, FROM_ONE=norm.from_one, **options,
    )  # fmt: skip


def gated(hidden: Tensor, into: Gated) -> Tensor:
    """See `products.gated`."""
    hidden = normed(hidden, into.norm)
    gate: Any = into.gate
    up: Any = into.up
    (rows, dim), inner, ahead = hidden.shape, gate.shape[0], gate.scales.stride(0)
    assert up.scales.stride(0) == ahead, f"scales lie {ahead} and {up.scales.stride(0)} apart"
    out = hidden.new_empty(rows, inner)
    options = _options(rows, hidden, gate, 2 * inner, GATED)
    _gated_kernel[(inner // 4 // options["T"],)](
        hidden, into.norm.weight, gate.words, up.words, gate.scales.view(torch.int32), up.scales.view(torch.int32),
        hidden if gate.bias is None else gate.bias, hidden if up.bias is None else up.bias, out,
        MAGIC, rows, dim, gate.strips * STRIP, ahead // 2, inner, into.norm.eps, FROM_ONE=into.norm.from_one,
        HAS_GATE_BIAS=gate.bias is not None, HAS_UP_BIAS=up.bias is not None, **options,
    )  # fmt: skip
    return out


def add_product(residual: Tensor | None, numbers: Tensor, weights: PackedWeights) -> Tensor:
    """See `products.add_product`. residual: None for the product alone, of any number of rows."""
    numbers = numbers.contiguous()
    (rows, dim), width = numbers.shape, weights.shape[0]
    out = numbers.new_empty(rows, width)
    options = _options(rows, numbers, weights, width, ADD)
    _add_kernel[(width // 8 // options["T"], triton.cdiv(rows, options["M"]))](
        numbers if residual is None else residual.contiguous(), numbers,
        weights.words, weights.scales.view(torch.int32), numbers if weights.bias is None else weights.bias, out,
        MAGIC, rows, dim, weights.strips * STRIP, weights.scales.stride(0) // 2, width,
        HAS_BIAS=weights.bias is not None, ADDS=residual is not None, **options,
    )  # fmt: skip
    return out


def expert_products(numbers: Tensor, chosen: Tensor, experts: PackedExperts, bias: Tensor | None) -> Tensor:
    """See `PackedExperts.products`."""
    words, scales = experts.weights.words, experts.weights.scales.view(torch.int32)
    stored = _Stored(words, scales, words, words, experts.weights.scales.stride(0) // 2)
    return _launch_experts(numbers, chosen, experts, bias, stored)


def placed_products(
    numbers: Tensor, chosen: Tensor, experts: PlacedExperts, bias: Tensor | None, *, counted: bool
) -> Tensor:
    """See `PlacedExperts.products`."""
    layout, table, size = experts.weights.layout, experts.weights.table, experts.weights.layout.scale_dtype.itemsize
    stored = _Stored(
        table.view(torch.int32), table.view(layout.scale_dtype), table, experts.weights.counts, 8, 8 * layout.groups,
        layout.word_bytes // size, ADDRESS_UNIT // 4, ADDRESS_UNIT // size, counted,
    )  # fmt: skip
    return _launch_experts(numbers, chosen, experts, bias, stored)


class _Stored(NamedTuple):
    """Arguments of `_experts_kernel` that say where experts are."""

    words: Tensor
    scales: Tensor
    table: Tensor
    counts: Tensor
    ahead: int
    tile_scales: int = 0
    behind: int = 0
    unit: int = 0
    scale_unit: int = 0
    counted: bool = False


def _launch_experts(
    numbers: Tensor, chosen: Tensor, experts: PackedExperts | PlacedExperts, bias: Tensor | None, stored: _Stored
) -> Tensor:
    numbers = numbers.contiguous()
    weights = experts.weights if isinstance(experts, PackedExperts) else experts.weights.layout
    (_, width, dim), tokens, pairs = experts.shape, len(chosen), chosen.numel()
    out = numbers.new_empty(pairs, width)
    if not pairs:
        return out
    options = _options(tokens, numbers, weights, width, ADD)
    _experts_kernel[(width // 8 // options["T"], pairs)](
        numbers, chosen.contiguous(), stored.words, stored.scales, stored.table, stored.counts,
        numbers if bias is None else bias, out, MAGIC, pairs, pairs // len(numbers), dim, weights.strips * STRIP,
        stored.ahead, width, stored.tile_scales, stored.behind, HAS_BIAS=bias is not None, FLOATS=weights.floats,
        PAIRS=1 if tokens == 1 else max(FEWEST_PAIRS, triton.next_power_of_2(pairs)), UNIT=stored.unit,
        SCALE_UNIT=stored.scale_unit, COUNTED=stored.counted, **options,
    )  # fmt: skip
    return out


class Tiling(NamedTuple):
    """How a product is cut, at most: tiles of rows and strips (warps) of a program, turns that are loaded ahead."""

    tiles: int
    strips: int
    stages: int


PROJECT = Tiling(4, 4, 6), Tiling(8, 4, 3), Tiling(8, 4, 3)
GATED = Tiling(4, 4, 4), Tiling(8, 2, 3), Tiling(8, 2, 3)
ADD = Tiling(2, 8, 3), Tiling(2, 8, 3), Tiling(4, 8, 3)
"""For one row, for up to 8 and for more: the fastest of 24 on an H100 for 1, 4 and 16, with Llama-3-8B's weights."""
SMALL_STRIPS = 4
"""Strips of more than 8 rows at most, on a GPU with less shared memory than an H100: 8 take 100 KiB."""


def _options(
    rows: int, numbers: Tensor, weights: PackedWeights | BlockLayout, width: int, cuts: tuple[Tiling, Tiling, Tiling]
) -> dict[str, Any]:
    """How a product of at most `rows` of numbers (n, dim) is cut: tiles and strips that divide both sizes.

    width: rows of weights of which a program takes some.
    """
    dim = numbers.shape[1]
    cut = cuts[(rows > 1) + (rows > 8)]
    small = rows > 8 and shared_bytes(numbers.device) < DEEP_TILE_BYTES
    most_strips = min(cut.strips, SMALL_STRIPS) if small else cut.strips
    tiles, strips = largest(width // 8, cut.tiles), largest(weights.strips, most_strips)
    return {
        "GROUP": weights.group, "ONE": rows == 1, "WHOLE": dim % (strips * STRIP) == 0,
        "M": MAX_ROWS if rows > 8 else 8, "T": tiles, "W": strips, "STAGES": cut.stages, "num_warps": strips,
    } | overlap(numbers.device)  # fmt: skip


TILES = 4
"""Tiles of rows that a program unpacks of a strip."""


@triton.jit
def _unpack_kernel(
    words, scales, out, tiles, strips, columns, ahead, tile_scales, GROUP: tl.constexpr, FLOATS: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """One program per strip of T tiles: a word's thread has one row and eight columns in two of each eight."""
    tile = tl.program_id(0) * T + tl.arange(0, T)
    at, which = tl.arange(0, 128), tl.arange(0, 8)
    inside = (tile < tiles)[:, None]
    word = tl.load(
        words + (tile[:, None].to(tl.int64) * strips + tl.program_id(1)) * 128 + at[None, :], mask=inside, other=0
    )
    row = tile[:, None] * 8 + (at // 16)[None, :]
    first = tl.program_id(1) * 128 + at % 4 * 32 + at // 4 % 4 * 2  # of a word's columns
    own = tile[:, None].to(tl.int64) * tile_scales + (at // 16)[None, :]
    both = tl.load(scales + (first // GROUP * ahead)[None, :] + own, mask=inside, other=0)
    scale, zero = _scale_and_zero(both)
    bits = which // 2 * 4 + which % 2 * 16  # of columns 0, 1, 8, 9, 16, 17, 24, 25
    numbers = _numbers((word[:, :, None] >> bits[None, None, :]) & 15, FLOATS) & 31
    weights = (numbers - 8).to(tl.float32) * scale[:, :, None] + zero[:, :, None]
    column = first[:, None] + (which // 2 * 8 + which % 2)[None, :]
    place = out + row[:, :, None].to(tl.int64) * columns + column[None, :, :]
    tl.store(place, weights.to(tl.bfloat16), mask=inside[:, :, None] & (column < columns)[None, :, :])


def matrix(weights: PackedWeights) -> Tensor:
    """See `PackedWeights.matrix`."""
    out = weights.words.new_empty(*weights.shape, dtype=torch.bfloat16)
    scales = weights.scales.view(torch.int32)
    _unpack(weights, weights.words, scales, out, weights.scales.stride(0) // 2, TILE_ROWS)
    return out


def widen_block(layout: BlockLayout, block: Tensor, out: Tensor) -> None:
    """Write the matrix in a block to `out`, bfloat16 (out, in)."""
    words, scales = layout.parts(block)
    _unpack(layout, words, scales, out, TILE_ROWS, TILE_ROWS * layout.groups)


def _unpack(
    form: PackedWeights | BlockLayout, words: Tensor, scales: Tensor, out: Tensor, ahead: int, tile_scales: int
) -> None:
    _unpack_kernel[(triton.cdiv(len(words), TILES), form.strips)](
        words, scales, out, len(words), form.strips, out.shape[1], ahead, tile_scales, GROUP=form.group,
        FLOATS=form.floats, T=TILES, num_warps=4,
    )  # fmt: skip
