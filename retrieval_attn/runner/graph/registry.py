"""The decoders that each model keeps for its next cache, and what their graphs run on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers
from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.cuda import cuda_runtime
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.model.placement import input_device
from retrieval_attn.runner.graph.binding import Binding, expected_kind
from retrieval_attn.runner.graph.decoder import GraphDecoder
from retrieval_attn.runner.graph.launch import Launcher
from retrieval_attn.runner.graph.pages import NO_KERNELS, is_recordable, prefix_of
from retrieval_attn.runner.graph.signature import look_at, signature
from retrieval_attn.runner.graph.support import cache_refusal

KEPT_DECODERS = 2
"""Decoders that a model keeps for later caches, each with its window buffers and graphs; the oldest goes."""
LARGE_BYTES = 1 << 30
"""Bytes of window buffers, as index "full" has them, from which only the newest decoder is kept."""

_decoders: weakref.WeakKeyDictionary[PreTrainedModel, list[GraphDecoder]] = weakref.WeakKeyDictionary()
_failed: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_replacements: list[Callable[[], Runtime]] = []
"""Of the process, not of a thread: a thread that decodes for the caller uses the same runtime."""


@contextmanager
def replaced_runtime(runtime_of: Callable[[], Runtime]) -> Iterator[None]:
    """Capture the graphs of all models with `runtime_of()` in this context, on any device, unless `graph` is False."""
    _replacements.append(runtime_of)
    try:
        yield
    finally:
        _replacements.remove(runtime_of)


def runtime_for(model: PreTrainedModel) -> Runtime | None:
    """The runtime of the model's device, or None for a device without graphs. Raises BackendError if it cannot work."""
    if _replacements:
        return _replacements[-1]()
    device = input_device(model)
    if device.type != "cuda":
        return None
    return cuda_runtime(device.index if device.index is not None else torch.cuda.current_device(), CallTable)


def has_captured(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> bool:
    """Whether a decoder waits whose graphs have the step that comes next in `cache`, as far as is known before `bind`.

    Raises CaptureError for a cache without tokens.
    """
    needed = signature(model, cache, runtime)
    with _lock:
        graphs = [kind for one in _decoders.get(model, ()) if one.signature == needed for kind in one.graphs]
    return bool(graphs) and expected_kind(cache) in graphs


def bind(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> Launcher:
    """Bind `cache` to a decoder that waits, or to a new one. End it by `unbind`.

    Raises CaptureError with the reason where the step cannot be recorded.
    """
    reason = cache_refusal(cache) or look_at(model).reason
    prefix = prefix_of(cache)
    if reason is None and prefix is not None and not is_recordable(prefix):
        reason = NO_KERNELS
    if reason is not None:
        raise CaptureError(reason)
    needed = signature(model, cache, runtime)
    with _lock:
        reason = _failed.setdefault(model, {}).get(needed)
        if reason is not None:
            raise CaptureError(reason)
        waiting = _decoders.setdefault(model, [])
        decoder = next((one for one in waiting if one.signature == needed), None)
        if decoder is not None:
            waiting.remove(decoder)
    if decoder is None:
        decoder = GraphDecoder(model, cache, runtime)
    return Launcher(Binding(decoder, model, cache))


def unbind(model: PreTrainedModel, launcher: Launcher) -> None:
    """Let the cache go, and keep its decoder for the next one; or remember why it could not capture."""
    launcher.close()
    decoder = launcher.decoder
    with _lock:
        if decoder.capture_failure is not None:
            _failed.setdefault(model, {})[decoder.signature] = decoder.capture_failure
            return
        if decoder.pages is not None and decoder.pages.layers.retired:
            return
        waiting = _decoders.setdefault(model, [])
        if _is_large(decoder):
            waiting[:] = [one for one in waiting if not _is_large(one)]
        waiting.append(decoder)
        del waiting[:-KEPT_DECODERS]


def retire(model: PreTrainedModel, layers: PagedLayers) -> None:
    """No decoder over these pages is kept any more."""
    with _lock:
        layers.retired = True
        waiting = _decoders.get(model, [])
        waiting[:] = [one for one in waiting if one.pages is None or one.pages.layers is not layers]


def _is_large(decoder: GraphDecoder) -> bool:
    return sum(slot.key.nbytes + slot.value.nbytes for slot in decoder.slots) >= LARGE_BYTES


def forget(model: PreTrainedModel) -> None:
    """Drop the decoders that wait for this model's next cache, with their buffers and graphs, and why others failed."""
    with _lock:
        _decoders.pop(model, None)
        _failed.pop(model, None)
