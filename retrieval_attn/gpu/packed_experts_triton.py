"""The Triton kernel behind `packed_experts.py`: products of tokens with the 4-bit weights of their experts.

The grid has a program for each pair of a token and an expert, and for some rows of a matrix. All pairs of an expert are
multiplied by the program of the first of them (of the first of each M, if there are more), so that weights are read
once; the programs of the other pairs end at once. Which pairs these are is found from the router's numbers in the
kernel: no sort before it, no number of the host depends on them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.packed import STRIP, TILE_ROWS
from retrieval_attn.gpu.packed_experts import PackedExperts
from retrieval_attn.gpu.packed_triton import ADD, MAGIC, _options, _products
from retrieval_attn.gpu.products_triton import begin

FEWEST_PAIRS = 64
"""Of a kernel for several tokens: each power of two from here on is a kernel of its own."""


@triton.jit(do_not_specialize=["pairs", "magic"])
def _experts_kernel(
    numbers, chosen, words, scales, bias, out, magic, pairs, each, dim, long, ahead, width,
    GROUP: tl.constexpr, ONE: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, FLOATS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """One program per T tiles of an expert's matrix and pair. ONE: each pair has an expert of its own."""
    pair, place = tl.program_id(1), tl.program_id(0) * (8 * T) + tl.arange(0, 8 * T)
    begin(OVERLAP)
    number = tl.load(chosen + pair)
    expert = number.to(tl.int64)
    tile = expert * (width // 8) + tl.program_id(0) * T + tl.arange(0, T)
    own_words, own_scales = words + tile[:, None] * long, scales + (expert * width + place)[None, :]
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


def products(numbers: Tensor, chosen: Tensor, experts: PackedExperts, bias: Tensor | None) -> Tensor:
    """See `PackedExperts.products`."""
    numbers, weights = numbers.contiguous(), experts.weights
    (_, width, dim), tokens, pairs = experts.shape, len(chosen), chosen.numel()
    out = numbers.new_empty(pairs, width)
    if not pairs:
        return out
    options = _options(numbers, weights, width, ADD, most_rows=tokens)
    _experts_kernel[(width // TILE_ROWS // options["T"], pairs)](
        numbers, chosen.contiguous(), weights.words, weights.scales.view(torch.int32),
        numbers if bias is None else bias, out, MAGIC, pairs, pairs // len(numbers), dim, weights.strips * STRIP,
        weights.scales.stride(0) // 2, width, HAS_BIAS=bias is not None, FLOATS=weights.floats,
        PAIRS=1 if tokens == 1 else max(FEWEST_PAIRS, triton.next_power_of_2(pairs)), **options,
    )  # fmt: skip
    return out
