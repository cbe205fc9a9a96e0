"""The kernels of `gpu/products.py` in plain PyTorch, rounded where transformers' modules round."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.gpu.products import AnyWeights, Attending, Gated, Norm, Projected, Rotation, rms_norm


def project(hidden: Tensor, into: Attending, rotation: Rotation) -> Projected:
    """Compute query, key and value of a layer, normed and rotated."""
    normal, gate = rms_norm(hidden, *into.norm), None
    query, key, value = (
        _product(normal, one).view(len(hidden), -1, into.head_dim) for one in (into.query, into.key, into.value)
    )
    if into.gates:
        query, gate = query[:, ::2], query[:, 1::2]
    query = query if into.query_norm is None else rms_norm(query, *into.query_norm)
    key = key if into.key_norm is None else rms_norm(key, *into.key_norm)
    return Projected(_turned(query, rotation), _turned(key, rotation), value, gate)


def _product(numbers: Tensor, weights: AnyWeights) -> Tensor:
    return functional.linear(numbers, weights.matrix.to(numbers.dtype), weights.bias)


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = (one[:, None] for one in rotation)
    part, rest = heads.split([cosines.shape[-1], heads.shape[-1] - cosines.shape[-1]], dim=-1)
    low, high = part.chunk(2, dim=-1)
    return torch.cat((part * cosines + torch.cat((-high, low), dim=-1) * sines, rest), dim=-1)


def two_products(hidden: Tensor, norm: Norm, first: AnyWeights, second: AnyWeights) -> tuple[Tensor, Tensor]:
    """Multiply the normed rows with two weights."""
    normal = rms_norm(hidden, *norm)
    return _product(normal, first), _product(normal, second)


def gated(hidden: Tensor, into: Gated) -> Tensor:
    """Compute silu(gate(x)) * up(x)."""
    normal = rms_norm(hidden, *into.norm)
    return functional.silu(_product(normal, into.gate)) * _product(normal, into.up)


def add_product(residual: Tensor, numbers: Tensor, weights: AnyWeights) -> Tensor:
    """Add a product to the residual."""
    return residual + _product(numbers, weights)
