"""A context for the benchmarks of whole models: what every source of keys and values offers, and spans of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, ContextLengthError
from retrieval_attn.testing import decoder_layers

__all__ = ["BLOCK", "Source", "Span", "attentions", "blocks", "kv_shape", "tokens_of"]

BLOCK = 8192
"""Tokens that are put into a cache at once."""

Span = tuple[int, int]
"""Tokens [start, stop) of a context."""


def blocks(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans, cut at multiples of BLOCK."""
    for start, stop in spans:
        while start < stop:
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            yield start, end
            start = end


def tokens_of(spans: Sequence[Span]) -> int:
    """Tokens in all spans together."""
    return sum(stop - start for start, stop in spans)


def attentions(model: nn.Module) -> list[Any]:
    """The attention module of every decoder layer, in order."""
    return [child for layer, _ in decoder_layers(model) for child in layer.children() if hasattr(child, "layer_idx")]


def kv_shape(model: Any) -> tuple[int, int, int, int]:
    """Layers, key-value heads, query heads per key-value head, head_dim of a model whose layers all attend to all.

    Raises ConfigError for sliding or other layers: their caches cannot be filled from here.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise ConfigError(
            f"the decode benchmark fills caches layer by layer; {config.model_type} has {', '.join(sorted(kinds))} "
            "layers. Use a model whose layers all attend to the whole context."
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, kv_heads, heads // kv_heads, dim


class Source(ABC):
    """A context of `tokens` tokens for `batch` sequences, and caches that hold it."""

    def __init__(self, model: Any, tokens: int, batch: int) -> None:
        limit = model.config.get_text_config(decoder=True).max_position_embeddings
        if tokens >= limit:
            raise ContextLengthError(f"{tokens} tokens of context and decoding need more than {limit} positions")
        self.model, self.tokens, self.batch = model, tokens, batch
        self.num_layers, self.kv_heads, self.group, self.head_dim = kv_shape(model)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token of one sequence, in the model's dtype, all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.model.dtype.itemsize

    @property
    @abstractmethod
    def about(self) -> str:
        """Where keys come from, for the report."""

    @abstractmethod
    def block(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens [start, stop): (batch, kv_heads, stop - start, dim) on the model's device."""

    @abstractmethod
    def retrieval(self, config: Config) -> RetrievalCache:
        """A RetrievalCache that holds the context, its indexes ready."""

    @abstractmethod
    def read_into(self, cache: Any) -> None:
        """Give an empty cache of the evaluation's baselines (one sequence) the context, with the queries they watch."""

    def queries(self, layer: int, start: int, stop: int) -> Tensor:
        """Queries at tokens [start, stop) for indexes to train on: (batch, q_heads, stop - start, dim)."""
        shape = (self.batch, self.kv_heads * self.group, stop - start, self.head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    @property
    def distinct(self) -> int:
        """Layers with keys of their own; layer l holds the keys of layer l modulo this."""
        return self.num_layers

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """While the model decodes on this context."""
        yield
