"""Runtimes of captured steps, and models and caches whose step cannot be recorded, found before anything is tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.gpu.capture.cuda import cuda_runtime
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.model.hooks import is_capturable
from retrieval_attn.model.layers import modules_of
from retrieval_attn.model.placement import devices, input_device, is_hooked, tensor_ranks
from retrieval_attn.model.rotation import rope_types


def cache_refusal(cache: RetrievalCache) -> str | None:
    """Why no step can be recorded with this cache, as far as can be told without trying; or None."""
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            if layer.record_past:
                return f"layer {number} records its past for assisted decoding"
            continue
        if type(layer) not in (RetrievalLayer, SlidingLayer):
            return f"layer {number} is a {type(layer).__name__}, whose state lives outside the step's buffers"
        if layer.window is None:  # type: ignore[union-attr]
            return "the cache holds no tokens yet"
        if isinstance(layer, SlidingLayer) and layer.record_past:
            return "a sliding layer records its past for assisted decoding"
    if not any(isinstance(layer, RetrievalLayer | SlidingLayer) for layer in cache.layers):
        return "the cache has no layers that attend"
    if cache.config.retrieve == "all":
        return 'retrieve="all" attends to every key on the host, the reference mode'
    if any(isinstance(layer, CacheLayer) and layer.on_attention is not None for layer in cache.layers):
        return "a layer has an on_attention callback, which a captured step cannot call"
    return None


def model_refusal(model: PreTrainedModel) -> str | None:
    """Why no step of this model can be recorded, whatever the cache; or None."""
    places = devices(model)
    if len(places) > 1:
        return f"the model's layers run on {', '.join(map(str, places))}"
    if is_hooked(model):
        return "accelerate moves tensors or weights while the model runs (device_map)"
    if tensor_ranks(model) > 1:
        return "the model's heads are split over several processes"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids: it counts tokens on the CPU"
    text = model.config.get_text_config(decoder=True)
    changing = sorted(rope_types(text.to_dict()) & {"dynamic", "longrope"})
    if changing:
        return f"rotary embedding of type {changing[0]} looks at the position on the CPU"
    return _looks_at_values(model) or _hooked(model)


def _looks_at_values(model: PreTrainedModel) -> str | None:
    for module in modules_of(model):
        if type(module).__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0) > 0:
            return f"{_name_of(module, model)} is bitsandbytes' 8-bit layer, which looks for outliers on the CPU"
    return None


def _name_of(module: torch.nn.Module, model: torch.nn.Module) -> str:
    return next(name for name, other in model.named_modules() if other is module)


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """The module's own forward hooks, which a replay does not call."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def watchers_of(module: torch.nn.Module) -> list[Any]:
    """Those of `hooks_of` that see anything in a step: transformers' own stay in place after a call that asked for
    hidden states, and do nothing otherwise.
    """
    return [hook for hook in hooks_of(module) if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _hooked(model: PreTrainedModel) -> str | None:
    for module in modules_of(model):
        for hook in watchers_of(module):
            if not is_capturable(hook):
                name = _name_of(module, model) or "the model"
                return f"{name} has a forward hook, which replays would not call (model.capturable)"
    return None


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
