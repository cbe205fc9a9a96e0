"""Matrices of numbers in groups, as checkpoints of GPTQ, AWQ and GGUF store them, in the form that torchao multiplies.

Of GPTQ and AWQ a weight is (number - zero) * scale, with a scale and a zero for each group of weights of a row, which
is a column of a checkpoint's. Both pack eight numbers to a word of 32 bits: GPTQ (Frantar et al., 2022) those of a
column, AWQ (Lin et al., 2023) those of a row, in an order of its own. torchao's form (`model/quantization.py`) has
bfloat16 scales, and in place of a zero the offset of its group: a weight is off by a sixteenth of a step at most, most
by far less.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import InputDataError
from retrieval_attn.gpu.packed import TILE_ROWS

PER_WORD = 8
"""Numbers of a word."""
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
"""Which of eight numbers of a row each four bits of a word are, from the lowest."""
MIDDLE = 8
"""Number that torchao's form takes from each before it multiplies."""
TILES, TILE_COLUMNS = 8, 1024
"""Of torch's packed layout: tiles that lie together, and what columns are a multiple of."""


class GroupedMatrix(NamedTuple):
    """numbers (out, in) uint8 or int8, scales and offsets (out, groups) float32. Weight: number * scale + offset."""

    numbers: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    def weights(self) -> Tensor:
        """(out, in) float32."""
        grouped = self.numbers.float().view(*self.scales.shape, self.group)
        return grouped.mul_(self.scales[..., None]).add_(self.offsets[..., None]).flatten(1)

    def packed(self) -> Any:
        """torchao's tensor for torch's kernel on CUDA, on the device of the numbers, which are 0 to 15."""
        from torchao.quantization import Int4TilePackedTo4dTensor

        rows, columns = self.numbers.shape
        filled = torch.nn.functional.pad(self.numbers, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
        pairs = (filled[:, ::2] << 4 | filled[:, 1::2]).contiguous()
        words = torch.ops.aten._convert_weight_to_int4pack(pairs, TILES)
        groups = filled.shape[1] // self.group
        both = torch.stack([self.scales, MIDDLE * self.scales + self.offsets], dim=-1)
        both = torch.nn.functional.pad(both, (0, 0, 0, groups - both.shape[1], 0, -rows % TILE_ROWS))
        numbers = both.transpose(0, 1).to(torch.bfloat16).contiguous()
        return Int4TilePackedTo4dTensor(words, numbers, [1, self.group], torch.Size((rows, columns)))


def packed_bytes(rows: int, columns: int, group: int) -> int:
    """Return the bytes of `GroupedMatrix.packed` of a matrix."""
    numbers = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    return numbers // 2 + numbers // group * 2 * torch.bfloat16.itemsize


def of_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, moved: bool) -> GroupedMatrix:
    """qweight (in / 8, out) and qzeros (groups, out / 8) int32, scales (groups, out), g_idx (in,): the group of a
    column. moved: zeros are stored less 1, as "gptq" has them and "gptq_v2" has not.

    Raises InputDataError for groups that are not one behind the other, or of other shapes.
    """
    numbers = _unpacked(qweight.t()).flatten(1)
    zeros = _unpacked(qzeros).flatten(1).float() + moved
    matrix = _checked(numbers, scales.t().float(), zeros.t())
    if g_idx is not None and len(g_idx):
        own = torch.arange(len(g_idx), device=g_idx.device) // matrix.group
        if not torch.equal(g_idx.long(), own):
            raise InputDataError(
                "This GPTQ checkpoint has its columns in the order of their activations (desc_act), which only its own "
                "package computes with; `pip install gptqmodel`, or take a checkpoint without desc_act."
            )
    return matrix


def of_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedMatrix:
    """qweight (in, out / 8) and qzeros (groups, out / 8) int32, scales (groups, out): the layout "gemm".

    Raises InputDataError for other shapes.
    """
    place = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()
    numbers, zeros = (_unpacked(words)[..., place].flatten(1) for words in (qweight, qzeros))
    return _checked(numbers.t().contiguous(), scales.t().float(), zeros.t().float())


def _unpacked(words: Tensor) -> Tensor:
    """words (n, m) int32 as (n, m, 8) uint8, from the lowest four bits of a word."""
    shifts = torch.arange(0, 4 * PER_WORD, 4, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 15).to(torch.uint8)


def _checked(numbers: Tensor, scales: Tensor, zeros: Tensor) -> GroupedMatrix:
    """Return the matrix of scales and zeros (out, groups) float32, zeros in steps of the numbers."""
    (rows, columns), groups = numbers.shape, scales.shape[1]
    if scales.shape != zeros.shape or len(scales) != rows or not groups or columns % groups:
        raise InputDataError(
            f"a matrix of {rows} rows and {columns} columns in 4 bits has scales of shape {tuple(scales.shape)} "
            f"and zeros of {tuple(zeros.shape)}; the checkpoint is damaged, or in a layout of its own"
        )
    return GroupedMatrix(numbers, scales, -zeros * scales)
