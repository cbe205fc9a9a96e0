"""Layer-major prefill: each decoder layer walks the prompt in chunks, one layer after the other.

One ordinary forward of an unmodified model then needs one layer's keys and one chunk's activations on the
device, and layer l is complete (and can be indexed) after l/L of the work. Exact: a chunk attends to the
layer's past and to itself. transformers' own `prefill_chunk_size` is chunk-major and, in 5.17, wrong with a
non-empty cache; it is not used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.errors import ConfigError
from retrieval_attn.hooks import MaskSpec

_ORIGINAL = "_retrieval_attn_original_forward"


class LayerProgress:
    """Called after each decoder layer of a prefill with (layers done, layers in all, seconds so far)."""

    def __init__(self, report: Callable[[int, int, float], None], layers: int) -> None:
        self._report = report
        self._layers = layers
        self._done = 0
        self._started = time.perf_counter()

    def __call__(self) -> None:
        self._done += 1
        self._report(self._done, self._layers, time.perf_counter() - self._started)


def decoder_layers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The model's decoder layers with their cache layer index, in order.

    A decoder layer is a member of a ModuleList that has a direct child with an integer `layer_idx`.
    """
    found = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for member in module:
            index = _layer_index(member)
            if index is not None:
                found.append((member, index))
    return found


def _layer_index(layer: nn.Module) -> int | None:
    for child in layer.children():
        index = getattr(child, "layer_idx", None)
        if isinstance(index, int) and not isinstance(index, bool):
            return index
    return None


def wrap_layers(model: nn.Module, chunk: int) -> None:
    """Make every decoder layer walk long inputs in chunks of `chunk` tokens. Undone by `unwrap_layers`.

    Raises ConfigError for a chunk below 1. Layers that are wrapped already get the new chunk size.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ConfigError(f"chunk must be an integer >= 1 token, got {chunk!r}; 8192 is a good start.")
    unwrap_layers(model)
    for layer, index in decoder_layers(model):
        original = layer.forward
        setattr(layer, _ORIGINAL, original)
        layer.forward = functools.wraps(original)(_ChunkedForward(original, index, chunk))


def unwrap_layers(model: nn.Module) -> None:
    """Give the decoder layers their own forward back. Nothing happens when they are not wrapped."""
    for layer, _ in decoder_layers(model):
        if _ORIGINAL in layer.__dict__:
            delattr(layer, _ORIGINAL)
            del layer.forward  # the instance attribute; the class's forward shows again


@contextmanager
def prefill_by_layer(model: PreTrainedModel, chunk: int = 8192) -> Iterator[PreTrainedModel]:
    """Within this context, forwards with a RetrievalCache go layer by layer in chunks of `chunk` tokens."""
    before = wrapped_chunk(model)
    wrap_layers(model, chunk)
    try:
        yield model
    finally:
        unwrap_layers(model)
        if before is not None:
            wrap_layers(model, before)


def wrapped_chunk(model: nn.Module) -> int | None:
    """The chunk size the decoder layers are wrapped with, or None."""
    for layer, _ in decoder_layers(model):
        forward = layer.__dict__.get("forward")
        if forward is not None and _ORIGINAL in layer.__dict__:
            return forward.chunk
    return None


class _ChunkedForward:
    """A decoder layer's forward that splits the token axis when a retrieval cache is in use."""

    def __init__(self, original: Callable[..., Any], index: int, chunk: int) -> None:
        self._original = original
        self._index = index
        self.chunk = chunk

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        from retrieval_attn.cache import RetrievalCache
        from retrieval_attn.layers import CacheLayer

        cache = next((item for item in (*args, *kwargs.values()) if isinstance(item, RetrievalCache)), None)
        if cache is None:
            return self._original(hidden_states, *args, **kwargs)
        layer = cache.layers[self._index] if self._index < len(cache.layers) else None
        tokens = hidden_states.shape[1]
        # Linear-attention layers carry state from token to token in their own way: never split those.
        if tokens <= self.chunk or not isinstance(layer, CacheLayer):
            return self._done(cache, self._original(hidden_states, *args, **kwargs))
        layer.begin_pass(tokens)
        result: Any = None
        for start in range(0, tokens, self.chunk):
            stop = min(start + self.chunk, tokens)
            part = self._original(
                hidden_states[:, start:stop],
                *(_cut(item, start, stop, tokens) for item in args),
                **{name: _cut(item, start, stop, tokens) for name, item in kwargs.items()},
            )
            out = part[0] if isinstance(part, tuple) else part
            if result is None:
                # Without gradients the input is dead after its chunk: write the output over it.
                in_place = not torch.is_grad_enabled() and out.shape == hidden_states[:, start:stop].shape
                result = hidden_states if in_place and out.dtype == hidden_states.dtype else None
                if result is None:
                    result = out.new_empty(out.shape[0], tokens, *out.shape[2:])
            result[:, start:stop] = out
            rest = part[1:] if isinstance(part, tuple) else None
        layer.end_pass()
        return self._done(cache, result if rest is None else (result, *rest))

    @staticmethod
    def _done(cache: Any, result: Any) -> Any:
        if cache.on_layer is not None:
            cache.on_layer()
        return result


def _cut(item: Any, start: int, stop: int, tokens: int) -> Any:
    """The part of a layer argument that belongs to tokens [start, stop); things without a token axis pass."""
    if isinstance(item, MaskSpec):
        return item.part(start, stop)
    if isinstance(item, Tensor) and item.ndim >= 2 and item.shape[1] == tokens:
        return item[:, start:stop]
    if isinstance(item, tuple):
        return tuple(_cut(member, start, stop, tokens) for member in item)
    return item
