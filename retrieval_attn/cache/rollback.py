"""Rollback: puts a cache back to where it was before a forward that failed or was interrupted."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.layer import CacheLayer
from retrieval_attn.cache.retrieval import RetrievalLayer

log = logging.getLogger(__name__)


class Rollback:
    """Where a cache stands now. Costs a copy of its sinks and windows; keys on the host are marked, not copied.

    A fork would do too, but what is appended to a fork begins a new segment, outside the index of the one before.
    """

    def __init__(self, cache: RetrievalCache) -> None:
        """Of a cache that no captured graph decodes. Waits for its last indexes, and raises what went wrong there."""
        self._cache = cache
        self._token_ids = cache.token_ids
        self._layers = [(layer, _state(layer)) for layer in cache.layers if isinstance(layer, CacheLayer)]
        hosts = [host for layer, _ in self._layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]
        self._hosts = [(host, len(host)) for host in {id(host): host for host in hosts}.values()]

    def undo(self) -> bool:
        """Forget what came after; threads that still copy or index it have ended then.

        False where that cannot be done: for layers that keep another state than keys (linear attention).
        """
        for layer, _ in self._layers:
            layer.abandon()
        for layer, state in self._layers:
            try:
                layer.finish_index()
            except Exception as error:  # what failed is forgotten
                log.debug("an extension that is undone had failed: %s", error)
            vars(layer).clear()
            vars(layer).update(state)
        for host, length in self._hosts:
            host.truncate(length)
        self._cache.token_ids = self._token_ids
        self._cache.on_layer = None
        return len(self._layers) == len(self._cache.layers)


def _state(layer: CacheLayer) -> dict[str, Any]:
    """The layer's attributes; those that it changes in place are copied."""
    layer.finish_index()
    layer.leave_graph()
    state = {name: list(value) if isinstance(value, list) else value for name, value in vars(layer).items()}
    window = layer.window
    return {**state, "window": None if window is None else window.clone(), "stats": replace(layer.stats)}
