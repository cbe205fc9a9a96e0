"""What a method does on one layer: which tokens a query attends to once the context has been read."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from retrieval_attn.testing import Partial, attend, merge
from retrieval_attn_eval.baselines.tokens import TokenBuffer, pick


@dataclass
class Meter:
    """Tokens attended in one layer.  attended: sum over queries of the tokens a query saw (mean over heads).

    read: the same of distinct tokens per key-value head, whose query heads may choose differently.
    """

    queries: int = 0
    attended: float = 0.0
    read: float = 0.0

    def add(self, queries: int, attended: float, read: float | None = None) -> None:
        """attended, read: per query; read is attended where all query heads of a group see the same."""
        self.queries += queries
        self.attended += queries * attended
        self.read += queries * (attended if read is None else read)


class Policy:
    """One method on one layer.

    While the context is read with full attention, `observe` sees every query.  `start` is told that the context is
    complete.  After that each new token comes through `append`, then `attend`.  A policy whose options say `reads` is
    asked for the context's tokens too: `attend` instead of `observe`, their keys already in `tokens`.
    `fork` is a copy whose further life leaves this one as it was.
    """

    one_by_one: ClassVar[bool] = True
    """Whether `attend` takes one query at a time (not while reading)."""

    def __init__(self, options: Any, layer: int, layers: int) -> None:
        self.options, self.layer, self.layers = options, layer, layers
        self.meter = Meter()
        self.tokens: TokenBuffer = TokenBuffer()

    def bind(self, module: nn.Module) -> None:
        """Told the attention module of the layer before its first query."""

    def observe(self, query: Tensor, start: int, scale: float) -> None:
        """Queries (1, q_heads, new, head_dim) of context tokens from `start` on, read with full attention.

        Their keys are in `tokens` already.
        """

    def start(self) -> None:
        """The context is complete: `tokens` holds it."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """New tokens, (1, kv_heads, new, dim)."""
        self.tokens.append(key, value)

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        """Attention of query (1, q_heads, new, head_dim), whose tokens were appended last.

        position: of the first of them in the sequence; row: its place in this forward.
        """
        raise NotImplementedError

    def fork(self) -> Self:
        """A copy for one answer; shares the context's tokens."""
        other = copy.copy(self)
        other.meter = Meter()
        return other


def attend_all(query: Tensor, tokens: TokenBuffer, scale: float) -> Partial:
    """Exact causal attention of query (1, q_heads, new, head_dim), the last `new` tokens, over all tokens."""
    past = tokens.length - query.shape[2]
    own = slice(past, tokens.length)
    key, value = tokens.key, tokens.value
    if query.shape[2] == 1:
        return attend(query, key, value, scale=scale)
    part = attend(query, key[:, :, own], value[:, :, own], scale=scale, causal=True)
    if not past:
        return part
    return merge([part, attend(query, key[:, :, :past], value[:, :, :past], scale=scale)])


def attend_picked(query: Tensor, tokens: TokenBuffer, ids: Tensor, scale: float) -> Partial:
    """Attention of one query (1, q_heads, 1, head_dim) over tokens ids (heads, k) int64 of each head.

    heads: key-value heads, or query heads where each chooses for itself.
    """
    return attend(query, pick(tokens.key, ids), pick(tokens.value, ids), scale=scale)


def distinct(ids: Tensor, kv_heads: int, total: int) -> float:
    """Mean over key-value heads of the distinct numbers in ids (q_heads, k), each below total."""
    seen = torch.zeros(kv_heads, total, dtype=torch.bool, device=ids.device)
    seen.scatter_(1, ids.reshape(kv_heads, -1), True)
    return float(seen.sum()) / kv_heads


class Dense(Policy):
    """Full attention: for layers that a method leaves alone."""

    one_by_one = False

    def attend(self, query: Tensor, position: int, row: int, scale: float) -> Partial:
        self.meter.add(query.shape[2], self.tokens.length - (query.shape[2] - 1) / 2)
        return attend_all(query, self.tokens, scale)
