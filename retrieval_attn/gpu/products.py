"""Products of a few rows with a layer's weights, each in one kernel with what stands before and after it.

A decoder layer of one token is some 20 small kernels around its matrix products: on an H100 a step of Llama-3-8B takes
2 ms of 8 longer with them. Three kernels hold all of them but attention: `project` (norm, query, key, value, rotary
embedding), `gated` (norm, gate, up, SiLU) and `add_product` (output or down projection, residual). Layers that keep a
state begin with `two_products` (norm, two projections).

Weights are plain, or of 4 bits (`packed.py`). Each product has a Triton kernel for either kind (`products_triton.py`,
`packed_triton.py`), which rounds once, at the end. Only captured steps use them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import kernels_for, step_kernels
from retrieval_attn.gpu.packed import PackedWeights


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, from_one: bool = False) -> Tensor:
    """hidden (..., dim) / sqrt(mean of its squares + eps), rounded to its dtype, times weight (dim,) of that dtype.

    from_one: times 1 + weight, rounded once, behind that (Gemma, Qwen3.5). The mean is float32. One Triton kernel on a
    GPU, else plain PyTorch; they differ in the order of the sum. dim > 0; no rows give none. (Zhang and Sennrich, "Root
    Mean Square Layer Normalization", equation 4.)
    """
    kernels = kernels_for(hidden, "products_triton")
    if kernels is not None and hidden.numel():
        normal: Tensor = kernels.rms_norm(hidden, weight, eps, from_one)
        return normal
    numbers = hidden.float()
    scale = torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if from_one:
        return (numbers * scale * (1 + weight.float())).to(hidden.dtype)
    return weight * (numbers * scale).to(hidden.dtype)


MAX_ROWS = 16
"""Rows of one call: those of one tile of a matrix instruction."""
ROW_CLASSES = 1, 8, MAX_ROWS
"""Largest numbers of rows that the same kernels multiply."""


class LinearWeights(NamedTuple):
    """weight (out, in), its rows contiguous, and bias (out,) or None, of one dtype."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the inputs and of the product."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.weight.device

    @property
    def kernels(self) -> str:
        """The module of `gpu` that multiplies them."""
        return "products_triton"

    @property
    def is_whole(self) -> bool:
        """Whether the sizes are whole tiles."""
        weight, bias = self
        whole = weight.shape[0] % 8 == 0 and weight.shape[1] % 16 == 0 and weight.stride() == (weight.shape[1], 1)
        alike = weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and (
            bias is None or bias.dtype == weight.dtype
        )
        return whole and alike

    @property
    def matrix(self) -> Tensor:
        """All weights, (out, in)."""
        return self.weight

    def split(self, sizes: list[int]) -> list[LinearWeights]:
        """Split into weights of `sizes` rows each, without a copy."""
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        return [LinearWeights(weight, bias) for weight, bias in zip(self.weight.split(sizes), biases, strict=True)]


AnyWeights = LinearWeights | PackedWeights


class Norm(NamedTuple):
    """An RMS norm: weight (dim,), see `rms_norm`."""

    weight: Tensor
    eps: float
    from_one: bool = False


class Attending(NamedTuple):
    """Weights of a layer's projections before attention.

    query (q_heads * head_dim, in), key and value (kv_heads * head_dim, in). query_norm, key_norm: of each head's
    numbers, before they are turned (Qwen3); None: there is none. The three weights are alike, see `alike`. turned: of
    each head, the first `turned` numbers are turned (Qwen3.5); 0: all. gates: behind each head of query stands one of
    numbers that are not turned, whose sigmoids attention's output is multiplied by.
    """

    norm: Norm
    query: AnyWeights
    key: AnyWeights
    value: AnyWeights
    head_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    turned: int = 0
    gates: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many of a head's numbers are turned."""
        return self.turned or self.head_dim

    @property
    def q_heads(self) -> int:
        """Query heads, gates not counted."""
        return self.query.shape[0] // self.head_dim // (2 if self.gates else 1)


class Projected(NamedTuple):
    """query (rows, q_heads, head_dim), key and value (rows, kv_heads, head_dim), after RoPE; gate as query, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None


class Gated(NamedTuple):
    """The first half of a gated feed-forward layer: silu(gate(x)) * up(x) of the normed x. Both (inner, in), alike."""

    norm: Norm
    gate: AnyWeights
    up: AnyWeights


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (rows, rotary_dim): of a rotary embedding that turns number j with j + rotary_dim / 2."""


def fits(weights: AnyWeights, rows: int) -> bool:
    """Whether `rows` rows can be multiplied: the sizes are whole tiles."""
    return weights.is_whole and rows <= MAX_ROWS


def alike(*weights: AnyWeights) -> bool:
    """Whether one kernel can multiply with all of these: they are of one kind and as long in memory."""
    return len({_kind(one) for one in weights}) == 1


def _kind(weights: AnyWeights) -> tuple[object, ...]:
    kind = weights.kernels, weights.dtype, weights.device, weights.shape[1]
    if isinstance(weights, PackedWeights):
        return *kind, weights.strips, weights.group
    return kind


def project(hidden: Tensor, into: Attending, rotation: Rotation) -> Projected:
    """Compute query, key and value for hidden (rows, in)."""
    found: Projected = step_kernels(hidden, into.query.kernels).project(hidden, into, rotation)
    return found


def two_products(hidden: Tensor, norm: Norm, first: AnyWeights, second: AnyWeights) -> tuple[Tensor, Tensor]:
    """Products (rows, out) of the normed hidden (rows, in) with two weights, alike and both with a bias or neither."""
    found: tuple[Tensor, Tensor] = step_kernels(hidden, first.kernels).two_products(hidden, norm, first, second)
    return found


def gated(hidden: Tensor, into: Gated) -> Tensor:
    """silu(gate(x)) * up(x), (rows, inner), of the normed x of hidden (rows, in)."""
    found: Tensor = step_kernels(hidden, into.gate.kernels).gated(hidden, into)
    return found


def add_product(residual: Tensor, numbers: Tensor, weights: AnyWeights) -> Tensor:
    """residual (rows, out) + numbers (rows, in) times the weights (out, in), a new tensor."""
    found: Tensor = step_kernels(numbers, weights.kernels).add_product(residual, numbers, weights)
    return found
