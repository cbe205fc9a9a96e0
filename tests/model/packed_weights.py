"""Weights of 4 bits for tests: packed by a copy of what torch's kernel does thread by thread, and as torchao's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.gpu.packed import PackedWeights


def pack(q: Tensor) -> Tensor:
    """q (out, in), 0 to 15, as `torch.ops.aten._convert_weight_to_int4pack` packs it on CUDA with 8 inner tiles.

    Follows matrix_to_m16n8k16_Bint4_layout in aten/src/ATen/native/cuda/int4mm.cu, for bytes of two numbers each, the
    first one in the upper half. out % 8 == 0, in % 128 == 0. Returns int32 (out / 8, in / 128, 32, 4).
    """
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).numpy().astype(np.uint32)
    out = np.zeros((q.shape[0] // 8, q.shape[1] // 128, 32, 4), np.uint32)
    for strip in range(out.shape[1]):
        for thread in range(32):
            for inner in range(0, 8, 2):
                base = (strip * 8 + inner) * 8
                places = base + thread % 4, base + thread % 4 + 4, base + 8 + thread % 4, base + 12 + thread % 4
                v = [pairs[thread // 4 :: 8, place] for place in places]
                low = [(one & 0xF) << (16 + 4 * number) for number, one in enumerate(v)]
                high = [(one & 0xF0) >> 4 << 4 * number for number, one in enumerate(v)]
                out[:, strip, thread, inner // 2] = np.bitwise_or.reduce([*low, *high])
    return torch.from_numpy(out.view(np.int32))


def random_weights(
    out: int, dim: int, generator: torch.Generator, *, group: int = 64, bias: bool = False
) -> tuple[PackedWeights, Tensor]:
    """Packed weights with rows filled up to 1,024 columns, and what they are exactly, float64 (out, dim)."""
    wide = -(-dim // 1024) * 1024
    q = torch.randint(0, 16, (out, wide), generator=generator, dtype=torch.int32)
    size = (dim**-0.5 / 4) * (0.5 + torch.rand(wide // group, out, generator=generator))
    zero = torch.randn(wide // group, out, generator=generator) * size
    scales = torch.stack([size, zero], dim=-1).to(torch.bfloat16)
    scale, zero = scales.double().unbind(-1)
    exact = (q - 8).view(out, -1, group) * scale.t()[..., None] + zero.t()[..., None]
    offsets = torch.randn(out, generator=generator).mul(0.3).to(torch.bfloat16) if bias else None
    return PackedWeights(pack(q), scales, dim, offsets), exact.flatten(1)[:, :dim]


def packed_matrix(weight: Tensor, *, group: int = 64) -> PackedWeights:
    """A matrix (out, in), quantised as torchao does for torch's kernel, rows filled up with zeros to 1,024 columns."""
    filled = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % 1024)).view(len(weight), -1, group)
    low, high = filled.amin(-1), filled.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.bfloat16)
    zero = (low + 8 * scale.float()).to(torch.bfloat16)
    q = ((filled - zero.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15).int()
    return PackedWeights(pack(q.flatten(1)), torch.stack([scale.t(), zero.t()], dim=-1), weight.shape[1])


def torchao_weight(weights: PackedWeights) -> Any:
    """The same as the weight of a linear module that torchao has quantised."""
    from torchao.quantization import Int4TilePackedTo4dTensor

    return Int4TilePackedTo4dTensor(weights.words, weights.scales, [1, weights.group], torch.Size(weights.shape))


def quantise(linear: nn.Linear) -> None:
    """Have a module hold its weight in 4 bits, as torchao would on a GPU."""
    linear.weight = nn.Parameter(torchao_weight(packed_matrix(linear.weight.detach())), requires_grad=False)


def multiplied(numbers: Tensor, words: Tensor, group: int, scales: Tensor) -> Tensor:
    """As `torch.ops.aten._weight_int4pack_mm` on CUDA, which the CPU has for another layout only."""
    weights = PackedWeights(words, scales, numbers.shape[1])
    assert weights.group == group and numbers.dtype == torch.bfloat16
    return torch.nn.functional.linear(numbers, weights.matrix)
