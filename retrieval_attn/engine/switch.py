"""enable / disable: switch a loaded model to retrieval attention and back."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.config import Config, resolve
from retrieval_attn.engine.prefill import unwrap_layers, wrap_layers, wrapped_chunk
from retrieval_attn.engine.support import require_supported
from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.model import hooks

_STATE = "_retrieval_attn_state"
_GENERATE_HOOK = "_prepare_cache_for_generation"


def enable(model: PreTrainedModel, config: Config | None = None, **overrides: Any) -> PreTrainedModel:
    """Switch `model` to retrieval attention with layer-major prefill, in place; returns the model.

    Afterwards `model.generate(...)` without `past_key_values` makes a RetrievalCache by itself; with one it
    uses that. Calling enable again replaces the options. `disable` restores the model as it was.
    Raises UnsupportedModelError (with the reason) or ConfigError; the model is then unchanged.
    """
    options = resolve(config, overrides)
    require_supported(model)
    before = getattr(model, _STATE, None)
    original = before["attn_implementation"] if before else model.config._attn_implementation
    set_attention(model, hooks.NAME)
    wrap_layers(model, options.prefill_chunk)
    setattr(model, _STATE, {"attn_implementation": original, "config": options})
    if before is None:
        # transformers makes a DynamicCache for a generate() call without past_key_values; make ours instead.
        setattr(model, _GENERATE_HOOK, functools.partial(_prepare_cache, model, getattr(model, _GENERATE_HOOK)))
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`: the attention implementation, the layers and generate() are the model's own again."""
    state = getattr(model, _STATE, None)
    if state is None:
        return model
    delattr(model, _STATE)
    delattr(model, _GENERATE_HOOK)
    unwrap_layers(model)
    set_attention(model, state["attn_implementation"])
    return model


def enabled_config(model: PreTrainedModel) -> Config | None:
    """The options `enable` was called with, or None when the model is not enabled."""
    state = getattr(model, _STATE, None)
    return state["config"] if state else None


@dataclass
class _Use:
    """What a model had before it was first used, and by how many it is used now."""

    attention: str
    chunk: int | None
    count: int = 0


_uses: weakref.WeakKeyDictionary[PreTrainedModel, _Use] = weakref.WeakKeyDictionary()
_uses_lock = threading.Lock()


@contextmanager
def using_retrieval(model: PreTrainedModel, chunk: int) -> Iterator[None]:
    """Retrieval attention and layer-major prefill for the duration, then whatever the model had before.

    Several threads may use a model at once: the last one to leave gives it back.
    """
    with _uses_lock:
        attention, layers = model.config._attn_implementation, wrapped_chunk(model)
        if attention != hooks.NAME:
            set_attention(model, hooks.NAME)
        use = _uses.setdefault(model, _Use(attention, layers))
        use.count += 1
        if layers != chunk:
            wrap_layers(model, chunk)
    try:
        yield
    finally:
        with _uses_lock:
            use.count -= 1
            if use.count == 0:
                _uses.pop(model, None)
                layers = use.chunk
                if use.attention != hooks.NAME:
                    set_attention(model, use.attention)
            if layers is not None and layers != wrapped_chunk(model):
                wrap_layers(model, layers)
            elif layers is None and use.count == 0:
                unwrap_layers(model)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """model.set_attn_implementation with an error that says what to do."""
    hooks.register()
    try:
        model.set_attn_implementation(name)
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take attn_implementation={name!r}: {error}. Its attention is written "
            "into the model; use a model class with transformers' attention interface."
        ) from error
    if model.config._attn_implementation != name:
        raise UnsupportedModelError(
            f"{type(model).__name__} kept attn_implementation={model.config._attn_implementation!r} when asked for "
            f"{name!r}; its attention cannot be replaced."
        )


def _prepare_cache(model: PreTrainedModel, original: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
    wanted = generation_config.use_cache is not False and generation_config.cache_implementation is None
    if wanted and model_kwargs.get("past_key_values") is None:
        model_kwargs["past_key_values"] = RetrievalCache(model, enabled_config(model))
    return original(generation_config, model_kwargs, *args)
