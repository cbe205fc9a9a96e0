"""The Triton kernel that unpacks weights of 4 bits, behind `PackedWeights.matrix`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.packed import PackedWeights

TILES = 4
"""Tiles of rows that a program unpacks of a strip."""


@triton.jit
def _unpack_kernel(words, scales, out, tiles, strips, columns, ahead, GROUP: tl.constexpr, T: tl.constexpr):
    """One program per strip of T tiles: a word's thread has one row and eight columns in two of each eight."""
    tile = tl.program_id(0) * T + tl.arange(0, T)
    at, which = tl.arange(0, 128), tl.arange(0, 8)
    inside = (tile < tiles)[:, None]
    word = tl.load(
        words + (tile[:, None].to(tl.int64) * strips + tl.program_id(1)) * 128 + at[None, :], mask=inside, other=0
    )
    row = tile[:, None] * 8 + (at // 16)[None, :]
    first = tl.program_id(1) * 128 + at % 4 * 32 + at // 4 % 4 * 2  # of a word's columns
    both = tl.load(scales + (first // GROUP * ahead)[None, :] + row, mask=inside, other=0)
    scale, zero = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    bits = which // 2 * 4 + which % 2 * 16  # of columns 0, 1, 8, 9, 16, 17, 24, 25
    numbers = ((word[:, :, None] >> bits[None, None, :]) & 15) - 8
    weights = numbers.to(tl.float32) * scale[:, :, None] + zero[:, :, None]
    column = first[:, None] + (which // 2 * 8 + which % 2)[None, :]
    place = out + row[:, :, None].to(tl.int64) * columns + column[None, :, :]
    tl.store(place, weights.to(tl.bfloat16), mask=inside[:, :, None] & (column < columns)[None, :, :])


def matrix(weights: PackedWeights) -> Tensor:
    """See `PackedWeights.matrix`."""
    (rows, columns), words, scales = weights.shape, weights.words, weights.scales
    out = words.new_empty(rows, columns, dtype=torch.bfloat16)
    _unpack_kernel[(triton.cdiv(len(words), TILES), weights.strips)](
        words, scales.view(torch.int32), out, len(words), weights.strips, columns, scales.stride(0) // 2,
        GROUP=weights.group, T=TILES, num_warps=4,
    )  # fmt: skip
    return out
