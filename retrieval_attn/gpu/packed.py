"""Weights of 4 bits as torch's own matrix product holds them, read where they lie.

`torch.ops.aten._convert_weight_to_int4pack` on CUDA packs a matrix in tiles of 8 rows and 16 columns, as a warp's
threads hold the right side of a matrix instruction: thread t has row t // 4 and columns 2 * (t % 4) + {0, 1, 8, 9}. A
word has two tiles that follow each other, first the even columns, then the odd ones; four words of a thread are a strip
of 128 columns. (aten/src/ATen/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout.)

A weight is (q - 8) * scale + zero, rounded to bfloat16 once, with q of 0 to 15. Weights of floating-point numbers
(E2M1 of MXFP4) have FLOAT_NUMBERS[q] in place of q, and a zero that makes up for their middle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.gpu.decode.kernels import kernels_for

TILE_ROWS = 8
"""Rows of a tile."""
STRIP = 128
"""Columns of which a thread holds four words."""
GROUPS = 32, 64, 128, 256
"""How many columns of a row may share a scale and a zero."""
FLOAT_MIDDLE = 16
FLOAT_NUMBERS = tuple(FLOAT_MIDDLE + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12))
"""Twice the value of E2M1 by its four bits (Open Compute Project, "Microscaling Formats", 5.3.3), moved to above 0."""
_LARGEST_FLOAT = 12


class PackedWeights(NamedTuple):
    """words int32 (out / 8, strips, 32, 4), its rows contiguous, scales bfloat16 (groups, out, 2): scale and zero.

    columns: of the matrix; strips and groups may reach further, where what is multiplied counts as 0. bias (out,),
    bfloat16, or None. floats: numbers are those of FLOAT_NUMBERS.
    """

    words: Tensor
    scales: Tensor
    columns: int
    bias: Tensor | None = None
    floats: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return len(self.words) * TILE_ROWS, self.columns

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the inputs and of the product."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.words.device

    @property
    def kernels(self) -> str:
        """The module of `gpu` that multiplies them."""
        return "packed_triton"

    @property
    def strips(self) -> int:
        """Strips of a tile of rows."""
        return self.words.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.strips * STRIP // len(self.scales)

    @property
    def is_whole(self) -> bool:
        """Whether they are what is written above, and whole pairs of tiles."""
        words, scales, bias = self.words, self.scales, self.bias
        if words.dtype != torch.int32 or words.ndim != 4 or words.shape[2:] != (32, 4) or not words.is_contiguous():
            return False
        if scales.dtype != torch.bfloat16 or scales.ndim != 3 or scales.stride()[1:] != (2, 1) or not len(scales):
            return False
        out, wide = len(words) * TILE_ROWS, self.strips * STRIP
        whole = out % (2 * TILE_ROWS) == 0 and self.columns % 16 == 0 and self.columns <= wide
        grouped = scales.shape[1:] == (out, 2) and wide % len(scales) == 0 and self.group in GROUPS
        return whole and grouped and (bias is None or bias.dtype == torch.bfloat16)

    @property
    def has_kernels(self) -> bool:
        """Whether `product` runs in a Triton kernel."""
        return kernels_for(self.words, "packed_triton") is not None

    def product(self, numbers: Tensor) -> Tensor:
        """Multiply numbers bfloat16 (rows, in) with the weights; plus the bias, (rows, out).

        One Triton kernel on a GPU, which unpacks the weights once for each 16 rows. Else a product with `matrix`.
        """
        kernels = kernels_for(self.words, "packed_triton")
        if kernels is not None:
            found: Tensor = kernels.add_product(None, numbers, self)
            return found
        return functional.linear(numbers, self.matrix.to(numbers.dtype), self.bias)

    @property
    def matrix(self) -> Tensor:
        """All weights, bfloat16 (out, in), a new tensor."""
        kernels = kernels_for(self.words, "packed_triton")
        if kernels is not None:
            found: Tensor = kernels.matrix(self)
            return found
        scale, zero = self.scales.float().unbind(-1)  # (groups, out) each
        numbers = unpacked(self.words)
        if self.floats:
            numbers = torch.tensor(FLOAT_NUMBERS, dtype=torch.int32, device=self.device)[numbers]
        numbers = (numbers - 8).view(len(self.words) * TILE_ROWS, -1, self.group)
        weights = numbers * scale.t()[..., None] + zero.t()[..., None]
        return weights.to(torch.bfloat16).flatten(1)[:, : self.columns].contiguous()

    def split(self, sizes: list[int]) -> list[PackedWeights]:
        """Split into weights of `sizes` rows each, whole tiles, without a copy."""
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        words = self.words.split([size // TILE_ROWS for size in sizes])
        return [
            PackedWeights(own, scales, self.columns, bias, self.floats)
            for own, scales, bias in zip(words, self.scales.split(sizes, dim=1), biases, strict=True)
        ]


def unpacked(words: Tensor) -> Tensor:
    """q, int32 (out, strips * 128), of words int32 (out / 8, strips, 32, 4)."""
    bits = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> bits) & 15
    tiles, strips = words.shape[:2]
    # tile, strip, row, pair of four, word, number of a pair, which eight of 32 columns
    numbers = numbers.view(tiles, strips, TILE_ROWS, 4, 4, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
    return numbers.reshape(tiles * TILE_ROWS, strips * STRIP)


def packed_words(numbers: Tensor) -> Tensor:
    """Return words int32 (out / 8, strips, 32, 4) of numbers (out, strips * 128), 0 to 15; inverse of `unpacked`."""
    bits = torch.arange(0, 32, 4, dtype=torch.int32, device=numbers.device)
    rows, columns = numbers.shape
    parts = numbers.to(torch.int32).view(rows // TILE_ROWS, TILE_ROWS, columns // STRIP, 4, 4, 4, 2)
    parts = parts.permute(0, 2, 1, 5, 3, 6, 4).reshape(rows // TILE_ROWS, columns // STRIP, 32, 4, 8)
    return (parts << bits).sum(-1, dtype=torch.int32)


def float_codes(numbers: Tensor) -> Tensor:
    """Return the four bits of numbers int8, twice the values of E2M1, as uint8."""
    codes = torch.zeros(2 * _LARGEST_FLOAT + 1, dtype=torch.uint8)
    for code, number in enumerate(FLOAT_NUMBERS):
        if code != 8:  # minus zero
            codes[number - FLOAT_MIDDLE + _LARGEST_FLOAT] = code
    return codes.to(numbers.device)[numbers.int() + _LARGEST_FLOAT]
