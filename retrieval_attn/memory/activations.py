"""What tokens of a prompt take on their way that a config alone does not tell: cosines and sines, and what is computed
inside a layer that keeps a state.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.model.layers import decoder_parts

DELTA_BLOCK = 64
"""Tokens of a block of transformers' gated delta rule: three float32 matrices of so many columns for each head."""
_AXES = (1,), (3, 1)
"""Leading sizes of positions: one for each token, or three for text and images."""


def rotary_numbers(model: nn.Module, head_dim: int) -> int:
    """Cosines and sines per token of all tables that a forward of `model` holds: what its rotary modules return.

    A module with tables of each type of layer (Gemma-3) has them all. One that cannot be asked counts as two tables of
    head_dim.
    """
    return sum(_numbers_of(rotary, head_dim) for rotary in decoder_parts(model).rotaries)


def _numbers_of(rotary: nn.Module, head_dim: int) -> int:
    # the class's own, without what looks at positions to rescale: nothing can be looked at on the meta device
    forward = inspect.unwrap(type(rotary).forward)
    buffers = dict(rotary.named_buffers())
    typed = "layer_type" in inspect.signature(forward).parameters
    suffix = "_inv_freq"
    kinds = [name.removesuffix(suffix) for name in buffers if name.endswith(suffix) and "original" not in name]
    asked: list[dict[str, Any]] = [{"layer_type": kind} for kind in kinds] if typed else [{}]
    device = next((buffer.device for buffer in buffers.values()), torch.device("meta"))
    for leading in _AXES:
        positions = torch.zeros(*leading, 1, dtype=torch.long, device=device)
        try:
            with torch.no_grad():
                tables = [forward(rotary, torch.empty(1, 1, 1, device=device), positions, **one) for one in asked]
        except Exception:  # positions of another form, or a module of another kind
            continue
        return sum(table.numel() for pair in tables for table in pair if isinstance(table, Tensor))
    return 2 * head_dim


def state_chunk_bytes(model: nn.Module, text: Any, width: int) -> int:
    """Bytes per token of a chunk at the peak of what a layer that keeps a state computes; 0: not known.

    text: the decoder's config; width: bytes of a number in the model's dtype. Of the gated delta rule as transformers
    computes it without flash-linear-attention, which takes less. At its end, when the output of blocks is put in a row,
    there are: the layer's input and its normalised copy, what the convolution made of queries, keys and values, gates,
    queries and keys repeated for each value head. In float32: five of the values' size (values, these by beta, new
    values, the output by blocks and in a row), five of the repeated keys' (keys by beta, these with decay and solved
    for, keys with decay, queries with decay), three matrices of a block, four numbers of each head (beta, decay twice,
    its sum).
    """
    if not getattr(text, "linear_conv_kernel_dim", None):
        return 0
    heads = text.linear_num_value_heads
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values, repeated = heads * text.linear_value_head_dim, heads * text.linear_key_head_dim
    own = 2 * text.hidden_size + (2 * keys + values) + values + 3 * heads
    if heads > text.linear_num_key_heads:
        own += 2 * repeated
    if any(hasattr(module, "in_proj_qkvz") for module in model.modules()):  # Qwen3-Next keeps what it was split from
        own += 2 * keys + 2 * values + 2 * heads
    return width * own + 4 * (5 * values + 5 * repeated + 3 * heads * DELTA_BLOCK + 4 * heads)
