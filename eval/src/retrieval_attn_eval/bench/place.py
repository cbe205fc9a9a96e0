"""Fill caches with given keys and values, as a prefill would leave them, without computing attention over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from retrieval_attn import RetrievalCache
from retrieval_attn.testing import ExactPass, MaskSpec, Partial, distinct, empty_partial, finish_prefill
from retrieval_attn_eval.bench.source import Source, Span, attentions, blocks, tokens_of


@torch.no_grad()
def place(model: Any, cache: RetrievalCache, source: Source, spans: Sequence[Span]) -> RetrievalCache:
    """Give the empty `cache` the spans of `source` as one prefill, layer by layer; its indexes are ready then.

    What the layers do with keys, values and queries is their own code: only exact attention over them is left out,
    which no cache needs.
    """
    total = tokens_of(spans)
    modules = attentions(model)
    with _without_attention():
        for number, module in enumerate(modules[: source.distinct]):
            layer: Any = cache.layers[number]
            scale = float(getattr(module, "scaling", source.head_dim**-0.5))
            layer.begin_pass(total)
            filled = 0
            for start, stop in blocks(spans):
                layer.update(*source.block(number, start, stop))
                query = source.queries(number, start, stop)
                spec = MaskSpec(q_offset=filled, q_length=stop - start)
                layer.attend(module, query, spec, scale=scale, softcap=None, sink_logits=None)
                filled += stop - start
            layer.end_pass()
    finish_prefill(cache)
    for number in range(source.distinct, len(modules)):
        _share_layer(cache, number, number % source.distinct)
    if source.distinct < len(modules):
        cache.batch.commit(total)
    return cache


def _share_layer(cache: RetrievalCache, number: int, source: int) -> None:
    """Make layer `number` share the host keys and indexes of layer `source`.

    A benchmark then decodes with fewer distinct layers than the model has. The layer belongs to the module that uses it
    first.
    """
    layers: list[Any] = cache.layers
    layer = layers[source]
    copies = {id(host): host.fork() for host in distinct(layer.hosts)}
    for sequence in cache.batch.sequences:
        sequence.kv[number] = copies[id(sequence.kv[source])]
    other = layer.fork(cache.batch)
    other.number, other._owner = number, None
    if other.held is not None:
        other.held = other.held.fork(cache.batch, other.stats, number)
    other.commits = layers[number].commits
    layers[number] = other


@torch.no_grad()
def fill_watching(cache: Any, source: Source) -> None:
    """Give the empty cache of a baseline the whole of `source`, its policies watching the queries."""
    for number, module in enumerate(attentions(source.model)):
        layer = cache.layers[number]
        scale = float(getattr(module, "scaling", source.head_dim**-0.5))
        layer.begin_pass(source.tokens)
        for start, stop in blocks([(0, source.tokens)]):
            layer.update(*source.block(number, start, stop))
            query = source.queries(number, start, stop)
            spec = MaskSpec(q_offset=start, q_length=stop - start)
            layer.attend(module, query, spec, scale=scale, softcap=None, sink_logits=None)
        layer.end_pass()


@contextmanager
def _without_attention() -> Iterator[None]:
    """Exact passes store what they are given and answer nothing."""

    def nothing(self: ExactPass, query: Tensor, *rest: Any, **more: Any) -> Partial:
        return empty_partial(query, self.new[1].shape[3])

    answer = ExactPass.answer
    ExactPass.answer = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        ExactPass.answer = answer  # type: ignore[method-assign]


@torch.no_grad()
def fill(cache: Any, source: Source, spans: Sequence[Span]) -> Any:
    """Give transformers' own cache (dynamic, offloaded or quantized) the spans of `source`."""
    for number in range(source.num_layers):
        parts = [source.block(number, start, stop) for start, stop in blocks(spans)]
        keys, values = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        del parts
        cache.update(keys, values, number)
    return cache


@torch.no_grad()
def fill_static(cache: StaticCache, source: Source, spans: Sequence[Span]) -> StaticCache:
    """Give transformers' StaticCache the spans of `source`, in place."""
    total = tokens_of(spans)
    for number in range(source.num_layers):
        layer: Any = cache.layers[number]
        filled = 0
        for start, stop in blocks(spans):
            keys, values = source.block(number, start, stop)
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys[:, :, filled : filled + stop - start] = keys
            layer.values[:, :, filled : filled + stop - start] = values
            filled += stop - start
        layer.cumulative_length.fill_(total)
    return cache
