"""Products of a few rows with a layer's weights, each in one kernel with what stands before and after it.

A decoder layer of one token is some 20 small kernels around its matrix products: on an H100 a step of Llama-3-8B takes
2 ms of 8 longer with them. Three kernels hold all of them but attention: `project` (norm, query, key, value, rotary
embedding), `gated` (norm, gate, up, SiLU) and `add_product` (output or down projection, residual).

Each has a Triton kernel (`products_triton.py`), which rounds once, at the end, and the same in plain PyTorch, which
rounds where transformers' modules do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.norm import rms_norm

MAX_ROWS = 16
"""Rows of one call: those of one tile of a matrix instruction."""


class Weights(NamedTuple):
    """weight (out, in), its rows contiguous, and bias (out,) or None, of one dtype."""

    weight: Tensor
    bias: Tensor | None = None


class Norm(NamedTuple):
    """An RMS norm: weight (dim,), see `norm.rms_norm`."""

    weight: Tensor
    eps: float


class Attending(NamedTuple):
    """What stands before attention.

    query (q_heads * head_dim, in), key and value (kv_heads * head_dim, in). query_norm, key_norm: of each head's
    numbers, before they are turned (Qwen3); None: there is none.
    """

    norm: Norm
    query: Weights
    key: Weights
    value: Weights
    head_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class Gated(NamedTuple):
    """The first half of a gated feed-forward layer: silu(gate(x)) * up(x) of the normed x. Both (inner, in)."""

    norm: Norm
    gate: Weights
    up: Weights


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (rows, head_dim): of a rotary embedding that turns number j with number j + head_dim / 2."""


def fits(weights: Weights, rows: int) -> bool:
    """Whether `rows` rows can be multiplied: the sizes are whole tiles."""
    weight, bias = weights
    whole = weight.shape[0] % 8 == 0 and weight.shape[1] % 16 == 0 and weight.stride() == (weight.shape[1], 1)
    alike = weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and (
        bias is None or bias.dtype == weight.dtype
    )
    return whole and alike and rows <= MAX_ROWS


def project(hidden: Tensor, into: Attending, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Query (rows, q_heads, head_dim), key and value (rows, kv_heads, head_dim) of hidden (rows, in), after RoPE."""
    kernels = kernels_for(hidden, "products_triton")
    if kernels is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.project(hidden, into, rotation)
        return found
    normal = rms_norm(hidden, *into.norm)
    query, key, value = (
        functional.linear(normal, *one).view(len(hidden), -1, into.head_dim)
        for one in (into.query, into.key, into.value)
    )
    query = query if into.query_norm is None else rms_norm(query, *into.query_norm)
    key = key if into.key_norm is None else rms_norm(key, *into.key_norm)
    return _turned(query, rotation), _turned(key, rotation), value


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = (one[:, None] for one in rotation)
    low, high = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-high, low), dim=-1) * sines


def gated(hidden: Tensor, into: Gated) -> Tensor:
    """silu(gate(x)) * up(x), (rows, inner), of the normed x of hidden (rows, in)."""
    kernels = kernels_for(hidden, "products_triton")
    if kernels is not None:
        found: Tensor = kernels.gated(hidden, into)
        return found
    normal = rms_norm(hidden, *into.norm)
    return functional.silu(functional.linear(normal, *into.gate)) * functional.linear(normal, *into.up)


def add_product(residual: Tensor, numbers: Tensor, weights: Weights) -> Tensor:
    """residual (rows, out) + numbers (rows, in) times the weights (out, in), a new tensor."""
    kernels = kernels_for(numbers, "products_triton")
    if kernels is not None:
        found: Tensor = kernels.add_product(residual, numbers, weights)
        return found
    return residual + functional.linear(numbers, *weights)
