"""What a decoder's buffers and graphs depend on, as values that can be compared."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.runner.graph.host import code_shape
from retrieval_attn.runner.graph.host_row_gather import device_reads
from retrieval_attn.runner.graph.pages import prefix_of
from retrieval_attn.runner.graph.slot import window_of
from retrieval_attn.runner.graph.watch import look_at


def signature(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> tuple[Any, ...]:
    """Shapes, where weights and pages lie, and the pool of threads. Raises CaptureError for a cache without tokens."""
    prefix = prefix_of(cache)
    pages = None if prefix is None else id(prefix.layers)
    return id(runtime), id(default_pool()), *look_at(model).signature, pages, cache_batch_key(cache)


def cache_batch_key(cache: RetrievalCache) -> tuple[Any, ...]:
    """What of it lies with the cache. Raises CaptureError for a cache without tokens."""
    layers: list[tuple[Any, ...]] = []
    cached: list[Any] = list(cache.layers)
    for layer in cached:
        if isinstance(layer, StateLayer):
            states = ((key, state.shape, state.dtype, state.device) for key, state in layer.states())
            layers.append((type(layer), *states))
            continue
        key, value = window_of(layer).buffers
        slots = layer.sliding_window if isinstance(layer, SlidingLayer) else key.shape[2]
        fmt = codes = reads = None
        if isinstance(layer, RetrievalLayer):
            fmt = None if layer.held is None else layer.held.fmt
            codes, reads = code_shape(layer, key.shape[3]), (device_reads(layer), layer.index.spec.host_reads)
        sizes = key.shape[:2], slots, key.shape[3], value.shape[3]
        layers.append((type(layer), *sizes, key.dtype, key.device, fmt, codes, reads))
    return tuple(layers)
