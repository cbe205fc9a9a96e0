"""Rollback: puts a cache back to where it was before a forward that failed or was interrupted anywhere."""

from __future__ import annotations

import logging

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.sequence import distinct
from retrieval_attn.attention.state import StateLayer

log = logging.getLogger(__name__)


class Rollback:
    """Where a cache stands now. Costs a copy of its sinks and windows; keys on the host are marked, not copied.

    A fork would do too, but what is appended to a fork begins a new segment, outside the index of the one before.
    """

    def __init__(self, cache: RetrievalCache) -> None:
        """Waits for the last indexes of `cache`, and raises what went wrong there."""
        cache.quiet()
        self._cache = cache
        self._layers = [
            (layer, layer.snapshot()) for layer in cache.layers if isinstance(layer, CacheLayer | StateLayer)
        ]
        self._batch = cache.batch.snapshot()
        paths = distinct(host for sequence in cache.batch.sequences for host in sequence.kv.values())
        self._hosts = [
            (host, len(host), None if host.clusters is None else host.clusters.fork(), host.budgets) for host in paths
        ]

    def undo(self) -> bool:
        """Forget what came after; threads that still copy or index it have ended then.

        False where that cannot be done: for layers of another kind than the package's.
        """
        for layer, _ in self._layers:
            if isinstance(layer, CacheLayer):
                layer.invalidate_graph()
                layer.abandon()
        for layer, state in self._layers:
            if isinstance(layer, CacheLayer):
                try:
                    layer.finish_index()
                except Exception as error:  # what failed is forgotten
                    log.debug("an extension that is undone had failed: %s", error)
            vars(layer).clear()
            vars(layer).update(state)
        self._cache.batch.restore(self._batch)
        for host, length, clusters, budgets in self._hosts:
            host.clusters, host.budgets = clusters, budgets  # what came after may have made others, of all keys
            host.truncate(length)
        self._cache.on_layer = self._cache.on_chunk = self._cache.on_end = None
        return len(self._layers) == len(self._cache.layers)
