"""Products of tokens with the 4-bit weights of the experts that a router chose for each, without a look at its choice.

The matrices of a layer's experts are one matrix of `packed.py`: the rows of an expert follow those of the one before. A
captured step multiplies a few tokens by one kernel for all experts, which reads the router's numbers on the GPU.
A prefill chunk is multiplied one expert at a time, with bfloat16 copies of a few matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.packed import FLOAT_MIDDLE, GROUPS, STRIP, TILE_ROWS, PackedWeights, packed_words

COPIED_WEIGHTS = 1 << 25
"""Most weights that a copy in bfloat16 has: 64 MiB, or one expert."""
MIDDLE = 8
"""Number that is subtracted from a number of 4 bits before it is multiplied by its scale."""


class ExpertShape(NamedTuple):
    """Matrices (out, columns) of a number of experts."""

    experts: int
    out: int
    columns: int

    @property
    def copied(self) -> int:
        """Return the number of experts that a prefill chunk copies at once."""
        return min(self.experts, max(1, COPIED_WEIGHTS // (self.out * self.columns)))


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """Matrices (experts, out, in): `weights` has experts * out rows and no bias."""

    weights: Any
    experts: int

    @property
    def shape(self) -> ExpertShape:
        """Sizes of the matrices."""
        rows, columns = self.weights.shape
        return ExpertShape(self.experts, rows // self.experts, columns)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        device: torch.device = self.weights.device
        return device


class PackedExperts(ExpertMatrices):
    """Matrices of 4 bits in the layout of `packed.py`."""

    weights: PackedWeights

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold the numbers, by name."""
        return {"words": self.weights.words, "scales": self.weights.scales}

    def to(self, device: torch.device) -> PackedExperts:
        """Return the experts on a device."""
        words, scales = self.weights.words.to(device), self.weights.scales.to(device)
        return PackedExperts(self.weights._replace(words=words, scales=scales), self.experts)

    @property
    def has_kernel(self) -> bool:
        """Return True if `products` runs in a Triton kernel."""
        return kernels_for(self.weights.words, "packed_triton") is not None

    def products(self, numbers: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply tokens by their experts: (tokens * visited, out), in the dtype of numbers.

        numbers: (tokens, in), or (tokens * visited, in) with a row for each expert of a token. chosen: experts, int64
        (tokens, visited), a token's all different, on the same device, not read by the host. bias: (experts, out).
        """
        kernels = kernels_for(self.weights.words, "packed_triton")
        if kernels is not None:
            found: Tensor = kernels.expert_products(numbers, chosen, self, bias)
            return found
        return self.gathered_products(numbers, chosen, bias)

    def gathered_products(self, numbers: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as `products` by copies of the chosen matrices, for each pair of token and expert its own."""
        (_, out, columns), chosen = self.shape, chosen.reshape(-1)
        each = len(chosen) // max(1, len(numbers))
        step = max(1, COPIED_WEIGHTS // (out * columns))
        own = numbers.repeat_interleave(each, dim=0) if each > 1 else numbers
        parts = []
        for first in range(0, len(chosen), step):
            picked = chosen[first : first + step]
            matrices = self._chosen(picked).to(numbers.dtype)
            found = torch.bmm(matrices, own[first : first + step, :, None]).squeeze(-1)
            parts.append(found if bias is None else found + bias[picked])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chosen(self, chosen: Tensor) -> Tensor:
        """Return copies of matrices by number, bfloat16 (n, out, in)."""
        experts, out, columns = self.shape
        words, scales = self.weights.words, self.weights.scales
        words = words.view(experts, out // TILE_ROWS, *words.shape[1:])[chosen]
        scales = scales.view(len(scales), experts, out, 2)[:, chosen]
        found = self.weights._replace(words=words.flatten(0, 1), scales=scales.flatten(1, 2))
        return found.matrix.view(len(chosen), out, columns)

    def matrices(self, first: int, count: int) -> Tensor:
        """Return a copy of the matrices of experts [first, first + count), bfloat16 (count, out, in)."""
        _, out, columns = self.shape
        return self.weights_of(first, count).matrix.view(count, out, columns)

    def weights_of(self, first: int, count: int) -> PackedWeights:
        """Return the weights of experts [first, first + count), without a copy."""
        out = self.shape.out
        words = self.weights.words[first * out // TILE_ROWS : (first + count) * out // TILE_ROWS]
        return self.weights._replace(words=words, scales=self.weights.scales[:, first * out : (first + count) * out])


def packed_shapes(shape: ExpertShape, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of words (int32) and scales (bfloat16) of experts."""
    rows, strips = shape.experts * shape.out, -(-shape.columns // STRIP)
    return (rows // TILE_ROWS, strips, 32, 4), (-(-strips * STRIP // group), rows, 2)


def packed_bytes(shape: ExpertShape, group: int) -> int:
    """Return the bytes of packed experts."""
    words, scales = packed_shapes(shape, group)
    return math.prod(words) * torch.int32.itemsize + math.prod(scales) * torch.bfloat16.itemsize


def can_pack(out: int, columns: int, group: int) -> bool:
    """Return True if kernels multiply experts whose matrices are (out, columns)."""
    return out % (2 * TILE_ROWS) == 0 and columns % 16 == 0 and columns > 0 and group in GROUPS and group <= STRIP


def pack_experts(
    matrices: Iterable[Sequence[Tensor]], shape: ExpertShape, group: int, device: torch.device, *, floats: bool
) -> PackedExperts:
    """Return experts of their numbers uint8 (out, in), 0 to 15, scales and offsets (out, groups), one expert at a time.

    A weight is number * scale + offset; floats: numbers are E2M1, a weight is twice the value * scale. The last
    group may be part of one.
    """
    experts, out, columns = shape
    word_shape, scale_shape = packed_shapes(shape, group)
    words = torch.empty(word_shape, dtype=torch.int32, device=device)
    scales = torch.zeros(scale_shape, dtype=torch.bfloat16, device=device)
    tiles, wide = out // TILE_ROWS, word_shape[1] * STRIP
    for number, (numbers, scale, offset) in enumerate(matrices):
        filled = torch.nn.functional.pad(numbers, (0, wide - columns))
        words[number * tiles : (number + 1) * tiles] = packed_words(filled)
        own = scales[: scale.shape[1], number * out : (number + 1) * out]
        zero = (MIDDLE - FLOAT_MIDDLE) * scale if floats else offset + MIDDLE * scale
        own[..., 0], own[..., 1] = scale.t(), zero.t()
    return PackedExperts(PackedWeights(words, scales, columns, floats=floats), experts)
