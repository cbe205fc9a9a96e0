"""What measures in the layers of a cache, and what benchmarks and recorders put in their place."""

from __future__ import annotations

from typing import Any

from retrieval_attn.attention.audit import AuditResult, HeadAudit, audited
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import distinct
from retrieval_attn.attention.tail_mass import TailMass


def measure_mass(cache: RetrievalCache, heads: int) -> None:
    """From now on every eager decode step measures what share of exact attention's weight took part, for so many query
    heads of each layer in turn (`Stats.captured_mass`). Slow: each reads all keys of its head. 0 measures nothing.
    """
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer):
            layer.mass_heads = heads


def audit(cache: RetrievalCache, heads: int = 1) -> None:
    """From now on every eager decode step compares the outputs of so many query heads of each layer, drawn for each
    token, with exact attention (`Stats.audit`). Slow: each reads all keys and values of its head. 0 compares none.
    """
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer):
            layer.audit = HeadAudit(heads) if heads else None


def audits(cache: RetrievalCache) -> AuditResult | None:
    """What audits have found since the cache (or its fork) was made; None if no head was compared."""
    return audited(layer.audit for layer in cache.layers if isinstance(layer, RetrievalLayer))


def tail_shares(cache: RetrievalCache) -> dict[int, TailMass]:
    """By number of the layer, what was estimated in those that retrieve since the cache (or its fork) was made."""
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    for layer in layers:
        if layer.graph is not None:
            layer.graph.add_tail()
    return {layer.number: layer.tail for layer in layers}


def replace_layer(cache: RetrievalCache, number: int, layer: CacheLayer) -> None:
    """Put `layer` in the place of layer `number`: it gets the cache's rows."""
    layers: list[Any] = cache.layers
    layer.batch, layer.commits = cache.batch, layers[number].commits
    layers[number] = layer


def share_layer(cache: RetrievalCache, number: int, source: int) -> None:
    """Make layer `number` share the host keys and indexes of layer `source`, so that a benchmark decodes with fewer
    distinct layers than the model has. It belongs to the module that uses it first.
    """
    layers: list[Any] = cache.layers
    layer: RetrievalLayer = layers[source]
    copies = {id(host): host.fork() for host in distinct(layer.hosts)}
    for sequence in cache.batch.sequences:
        sequence.kv[number] = copies[id(sequence.kv[source])]
    other = layer.fork(cache.batch)
    other.number, other._owner = number, None
    if other.held is not None:
        other.held = other.held.fork(cache.batch, other.stats, number)
    replace_layer(cache, number, other)
