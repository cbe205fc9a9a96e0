"""LayeredCache: a cache that layer-major prefill can fill, one layer after the other."""

from __future__ import annotations

from collections.abc import Callable

from transformers.cache_utils import Cache

from retrieval_attn.config import Config


class LayeredCache(Cache):
    """What prefill asks of a `RetrievalCache`. on_layer: called after each decoder layer of a forward, or None."""

    config: Config
    on_layer: Callable[[], object] | None = None
