"""What is recorded, and over what.  Loads neither torch nor a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrieval_attn.errors import ConfigError

__all__ = ["CHUNK", "RecordOptions", "TextSource"]

CHUNK = 2048
"""Tokens per step of a layer: the largest temporary arrays are one chunk's."""


@dataclass(frozen=True)
class RecordOptions:
    """What `record` keeps.  Raises ConfigError.

    layers, kv_heads: None keeps every full-attention layer, every head.  train: training queries kept per query head,
    half of them from the last eighth of the context; all heads share the positions.  storage: number format of keys
    and values.  span: the training queries are also moved, by the model's own rotary embedding, to positions drawn
    from the `span` ones that follow the context, where decoding happens (1: all to the first of them; None: as
    decoding does); a model without rotary embedding gets None.  seed: of these draws.
    """

    layers: Sequence[int] | None = None
    kv_heads: Sequence[int] | None = None
    train: int = 8192
    storage: str = "bfloat16"
    span: int | None = None
    seed: int = 0
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if self.train < 0 or self.chunk < 1 or (self.span is not None and self.span < 1):
            raise ConfigError(f"train={self.train} must be >= 0, chunk={self.chunk} and span={self.span} >= 1")


@dataclass(frozen=True)
class TextSource:
    """A context of about `tokens` tokens: of a task, or of a text file or folder."""

    tokens: int
    task: str = "niah_multikey_1"
    text: str | None = None
