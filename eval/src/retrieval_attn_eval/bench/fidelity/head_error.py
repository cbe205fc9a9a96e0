"""How far a head's attention output is from exact attention with the same query over the same keys.

The reference is not full attention's run: its queries differ, as every layer passes on what it got wrong. Here each
layer's own query attends exactly to all keys and values that the same run has stored, so that an error counts where
it is made. Every method can be asked so, for all of them attend through `CacheLayer.attend` and keep every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from retrieval_attn import RetrievalCache
from retrieval_attn.testing import (
    AttentionRecord,
    CacheLayer,
    RetrievalLayer,
    attend,
    merge,
    sink_logit_partial,
    to_device,
)
from retrieval_attn_eval.baselines.cache import ContextLayer

__all__ = ["HeadErrors", "observe"]

BLOCK_TOKENS = 16_384
"""Tokens whose keys and values are widened to float32 at once."""

Block = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]
"""(first, stop, like) -> keys and values (1, kv_heads, stop - first, dim) on the device of `like`."""


def observe(layer: CacheLayer, callback: Callable[[AttentionRecord], None]) -> None:
    """Call `callback` after each attention of a layer, after the callbacks that it has."""
    before = layer.on_attention

    def call_both(record: AttentionRecord) -> None:
        if before is not None:
            before(record)
        callback(record)

    layer.on_attention = call_both


class HeadErrors:
    """Relative errors of every head of every full-attention layer, in the order of the tokens.

    Exact attention is computed in float32, block by block, over what the method has stored: rows of a smaller
    `host_dtype` as they were rounded, tokens of the window as the model gave them.
    """

    def __init__(self) -> None:
        self._errors: list[list[Tensor]] = []

    @contextmanager
    def watching(self, cache: RetrievalCache, context: int) -> Iterator[None]:
        """Watch every full-attention layer of a cache of one sequence that holds `context` tokens. What is fed in here
        comes one token at a time.
        """
        layers: list[Any] = cache.layers
        with ExitStack() as undo:
            for layer in layers:
                if not isinstance(layer, RetrievalLayer | ContextLayer):
                    continue
                self._errors.append([])
                undo.callback(setattr, layer, "on_attention", layer.on_attention)
                observe(layer, _LayerErrors(layer, context, self._errors[-1]))
            yield

    def result(self) -> tuple[Tensor, ...]:
        """|out - exact| / |exact| per layer, (q_heads, tokens) float32 on the CPU; empty if none was watched."""
        return tuple(torch.stack(own, dim=1) for own in self._errors if own)


class _LayerErrors:
    """One layer's errors, which go to `errors` as (q_heads,) per token."""

    def __init__(self, layer: CacheLayer, context: int, errors: list[Tensor]) -> None:
        self._read, self._context, self._errors = _reader(layer), context, errors
        self._fed: list[tuple[Tensor, Tensor]] = []

    def __call__(self, record: AttentionRecord) -> None:
        query, out, sink_logits = record.query, record.out, record.sink_logits
        assert query.shape[0] == 1 and query.shape[2] == 1, query.shape
        self._fed.append((record.key, record.value))
        query = query.float()
        blocks = [(first, min(first + BLOCK_TOKENS, self._context)) for first in range(0, self._context, BLOCK_TOKENS)]
        parts = []
        for block in [*blocks, None]:
            if block is None:  # tokens that were fed: the query's own is the last of them
                key, value = (torch.cat(own, dim=2) for own in zip(*self._fed, strict=True))
            else:
                key, value = self._read(*block, query)
            parts.append(attend(query, key.float(), value.float(), scale=record.scale, softcap=record.softcap))
        if sink_logits is not None:
            parts.append(sink_logit_partial(sink_logits, query, out.shape[3]))
        exact = merge(parts).out[0, :, 0]
        lost = (out[0, :, 0].float() - exact).norm(dim=-1)
        self._errors.append((lost / exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)).cpu())


def _reader(layer: CacheLayer) -> Block:
    """What reads the context's tokens of a layer."""
    if isinstance(layer, ContextLayer):
        tokens = layer.tokens
        return lambda first, stop, like: (tokens.key[:, :, first:stop], tokens.value[:, :, first:stop])
    assert isinstance(layer, RetrievalLayer) and layer.held is not None
    held = layer.held

    def read(first: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key, value = held.hosts[0].read(first, stop)
        return to_device(key, held.fmt, like)[None], to_device(value, held.fmt, like)[None]

    return read
