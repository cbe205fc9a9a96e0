"""enable / disable: switch a loaded model to retrieval attention and back."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache, unchecked_cache
from retrieval_attn.config import Config, resolve
from retrieval_attn.engine.attention import set_attention
from retrieval_attn.engine.prefill import unwrap_layers, wrap_layers
from retrieval_attn.engine.support import require_supported
from retrieval_attn.model import hooks
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.multimodal import text_attention

_STATE = "_retrieval_attn_state"
_GENERATE_HOOK = "_prepare_cache_for_generation"


def enable(model: PreTrainedModel, config: Config | None = None, **overrides: Any) -> PreTrainedModel:
    """Switch `model` to retrieval attention with layer-major prefill, in place; returns the model.

    model: a transformers model, or a `PeftModel` around one: its adapters go on acting.
    Afterwards `model.generate(...)` without `past_key_values` makes a RetrievalCache by itself; with one it
    uses that. Calling enable again replaces the options. `disable` restores the model as it was.
    Raises UnsupportedModelError (with the reason) or ConfigError; the model is then unchanged.
    """
    options = resolve(config, overrides)
    given, model = model, unwrapped(model)
    require_supported(model, unchecked_cache)
    before = getattr(model, _STATE, None)
    original = before["attn_implementation"] if before else text_attention(model)
    set_attention(model, hooks.NAME)
    wrap_layers(model, options.prefill_chunk)
    setattr(model, _STATE, {"attn_implementation": original, "config": options})
    if before is None:
        # transformers makes a DynamicCache for a generate() call without past_key_values; make ours instead.
        setattr(model, _GENERATE_HOOK, functools.partial(_prepare_cache, model, getattr(model, _GENERATE_HOOK)))
    return given


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`: the attention implementation, the layers and generate() are the model's own again."""
    given, model = model, unwrapped(model)
    state = getattr(model, _STATE, None)
    if state is None:
        return given
    delattr(model, _STATE)
    delattr(model, _GENERATE_HOOK)
    unwrap_layers(model)
    set_attention(model, state["attn_implementation"])
    return given


def enabled_config(model: PreTrainedModel) -> Config | None:
    """The options `enable` was called with, or None when the model is not enabled."""
    state = getattr(unwrapped(model), _STATE, None)
    return state["config"] if state else None


def _prepare_cache(model: PreTrainedModel, original: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
    wanted = generation_config.use_cache is not False and generation_config.cache_implementation is None
    if wanted and model_kwargs.get("past_key_values") is None:
        model_kwargs["past_key_values"] = RetrievalCache(model, enabled_config(model))
    return original(generation_config, model_kwargs, *args)
