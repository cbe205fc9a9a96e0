"""Whether a model is still as it was when it was looked at closely, told in a fraction of the time."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.model.adapters import adapter_state
from retrieval_attn.model.quantization import plain_tensors
from retrieval_attn.runner.graph.host import code_shape
from retrieval_attn.runner.graph.host_row_gather import device_reads
from retrieval_attn.runner.graph.pages import NO_KERNELS, is_recordable, prefix_of
from retrieval_attn.runner.graph.slot import window_of
from retrieval_attn.runner.graph.support import cache_refusal, hooks_of, model_refusal

_TABLES = "_modules", "_forward_hooks", "_forward_pre_hooks"
_KNOWN = "_retrieval_attn_known"


class ModelWatch:
    """State that a graph of a model depends on, and whether steps can be recorded, as addresses and ids.

    Modules, hooks, weights and where they lie, adapters, and added attributes. Everything that is looked
    at stays alive, so that ids stay taken.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        modules = list(model.modules())
        self._attributes = [vars(module) for module in modules]
        self._tables = [own[name] for own in self._attributes for name in _TABLES]
        self._parameters = [own["_parameters"] for own in self._attributes]
        weights = [one for one in self._weights() if one is not None]
        self._plain = [one for one in weights if type(one) in (Tensor, torch.nn.Parameter)]
        self._composed = [one for one in weights if type(one) not in (Tensor, torch.nn.Parameter)]
        self._adapted = bool(adapter_state(model))  # adapters come as modules
        self._kept = [*chain.from_iterable(map(dict.values, self._tables)), *weights]
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Whether it is."""
        return self._look() == self._seen

    def _weights(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._parameters)))

    def _look(self) -> tuple[Any, ...]:
        composed = [one.data_ptr() for one in plain_tensors(self._composed)]
        return (
            [*map(id, chain.from_iterable(map(dict.values, self._tables)))],
            [*map(len, self._tables)],
            [*map(len, self._attributes)],
            [*map(id, self._weights())],
            [*map(Tensor.data_ptr, self._plain), *composed],
            adapter_state(self._model) if self._adapted else (),
        )


class Look(NamedTuple):
    """Result of a check: why steps of the model are not recorded, or None, and the state that graphs depend on."""

    reason: str | None
    signature: tuple[Any, ...]


class KnownModel:
    """A model that is looked at often, and closely only where it changed. It lies in the model, and dies with it: hooks
    that are looked at may know the model. A copy of the model is looked at again.
    """

    def __init__(self) -> None:
        self._watch: ModelWatch | None = None
        self._look = Look(None, ())

    def look(self, model: PreTrainedModel) -> Look:
        """Return the current state of the model."""
        if self._watch is None or not self._watch.unchanged():
            self._watch = ModelWatch(model)
            self._look = Look(model_refusal(model), model_signature(model))
        return self._look

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownModel, ()


def look_at(model: PreTrainedModel) -> Look:
    """The model as it is now. The first look takes some milliseconds, later ones a fraction of one."""
    known = model.__dict__.get(_KNOWN)
    if known is None:
        known = model.__dict__[_KNOWN] = KnownModel()
    return known.look(model)


def refusal_of(model: PreTrainedModel, cache: RetrievalCache) -> str | None:
    """Return why no step of the model can be recorded with this cache, as far as is known without trying; or None."""
    reason = cache_refusal(cache) or look_at(model).reason
    prefix = prefix_of(cache)
    if reason is None and prefix is not None and not is_recordable(prefix):
        return NO_KERNELS
    return reason


def model_signature(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return the part of the signature that depends on the model."""
    weights = hash(tuple(tensor.data_ptr() for tensor in plain_tensors(model.parameters())))
    hooks = hash(tuple(id(hook) for module in model.modules() for hook in hooks_of(module)))
    return weights, hooks, adapter_state(model)


def signature(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> tuple[Any, ...]:
    """Shapes, where weights and pages lie, and the pool of threads. Raises CaptureError for a cache without tokens."""
    prefix = prefix_of(cache)
    pages = None if prefix is None else id(prefix.layers)
    return id(runtime), id(default_pool()), *look_at(model).signature, pages, cache_batch_key(cache)


def cache_batch_key(cache: RetrievalCache) -> tuple[Any, ...]:
    """Return the part of the signature that depends on the cache. Raises CaptureError for a cache without tokens."""
    layers: list[tuple[Any, ...]] = []
    cached: list[Any] = list(cache.layers)
    for layer in cached:
        if isinstance(layer, StateLayer):
            states = ((key, state.shape, state.dtype, state.device) for key, state in layer.states())
            layers.append((type(layer), *states))
            continue
        window = window_of(layer)
        key, value = window.buffers
        slots = layer.sliding_window if isinstance(layer, SlidingLayer) else window.slots
        fmt = codes = reads = None
        if isinstance(layer, RetrievalLayer):
            fmt = None if layer.held is None else layer.held.fmt
            codes, reads = code_shape(layer, key.shape[3]), (device_reads(layer), layer.index.spec.host_reads)
        sizes = key.shape[:2], slots, key.shape[3], value.shape[3]
        layers.append((type(layer), *sizes, key.dtype, key.device, fmt, codes, reads))
    return tuple(layers)
