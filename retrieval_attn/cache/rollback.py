"""Rollback: puts a cache back to where it was before a forward that failed or was interrupted."""

from __future__ import annotations

import logging

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.layer import CacheLayer
from retrieval_attn.cache.sequence import distinct

log = logging.getLogger(__name__)


class Rollback:
    """Where a cache stands now. Costs a copy of its sinks and windows; keys on the host are marked, not copied.

    A fork would do too, but what is appended to a fork begins a new segment, outside the index of the one before. A
    crop would not do: a sliding layer has forgotten what was in its window, the host may have rounded what was in the
    others, and an interrupted layer does not know how far it came.
    """

    def __init__(self, cache: RetrievalCache) -> None:
        """Of a cache that no captured graph decodes. Waits for its last indexes, and raises what went wrong there."""
        self._cache = cache
        self._columns = cache.batch.columns
        self._layers = [(layer, self._copy(layer)) for layer in cache.layers if isinstance(layer, CacheLayer)]
        self._hosts = [dict(sequence.kv) for sequence in cache.batch.sequences]
        paths = distinct(host for hosts in self._hosts for host in hosts.values())
        self._lengths = [(host, len(host)) for host in paths]

    def undo(self) -> bool:
        """Forget what came after; threads that still copy or index it have ended then.

        False where that cannot be done: for layers that keep another state than keys (linear attention).
        """
        for layer, _ in self._layers:
            layer.abandon()
        for layer, copy in self._layers:
            try:
                layer.finish_index()
            except Exception as error:  # what failed is forgotten
                log.debug("an extension that is undone had failed: %s", error)
            vars(layer).clear()
            vars(layer).update(vars(copy))
        batch = self._cache.batch
        for sequence, hosts in zip(batch.sequences, self._hosts, strict=True):
            sequence.kv = hosts
        for host, length in self._lengths:
            host.truncate(length)
        batch.crop(self._columns)
        self._cache.on_layer = None
        return len(self._layers) == len(self._cache.layers)

    def _copy(self, layer: CacheLayer) -> CacheLayer:
        layer.leave_graph()
        layer.finish_index()
        copy = layer.fork(self._cache.batch)
        copy.stats.add(layer.stats)
        return copy
