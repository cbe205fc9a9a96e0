"""Whether the hidden states of a model may lie on the host while it reads, between its embedding and its output."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from retrieval_attn.model.layers import decoder_parts, unknown_beside_layers
from retrieval_attn.model.multimodal import is_multimodal
from retrieval_attn.model.placement import is_spread

_SPLIT_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv")
"""Layers that read a prompt in chunks: those with keys, and those whose state goes from chunk to chunk."""


def why_not_on_host(model: Any) -> str | None:
    """Why the hidden states of `model` must stay on its device, None if they need not."""
    if is_spread(model):
        return "it runs on several devices, or its weights move"
    return why_never_on_host(model)


def why_never_on_host(model: Any) -> str | None:
    """As `why_not_on_host`, wherever the model is placed: a model without storage will do."""
    if not isinstance(model, PreTrainedModel) or not isinstance(model.get_output_embeddings(), nn.Linear):
        return "it has no linear output"
    if is_multimodal(model):
        return "it embeds images and text before its text decoder begins"
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or not decoder_parts(model).rotaries:
        return "it has no token embedding, or no rotary embedding beside its layers"
    if unknown := unknown_beside_layers(model, embedding):
        return f"{', '.join(unknown)} beside its layers may look at them"
    types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if others := sorted(set(types) - set(_SPLIT_TYPES)):
        return f"its layers of type {', '.join(others)} are not known to read a prompt in chunks"
    return None
