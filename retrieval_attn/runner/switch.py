"""enable / disable: switch a loaded model to retrieval attention and back."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from transformers import PreTrainedModel
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from retrieval_attn.attention.cache import RetrievalCache, unchecked_cache
from retrieval_attn.config import Config, resolve
from retrieval_attn.errors import ConfigError, UnsupportedModelError
from retrieval_attn.model import hooks
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.multimodal import text_attention
from retrieval_attn.runner.attention import set_attention
from retrieval_attn.runner.prefill import unwrap_layers, wrap_layers
from retrieval_attn.runner.support import Report, compare, mark_verified, require_supported

_STATE = "_retrieval_attn_state"


def enable(model: PreTrainedModel, config: Config | None = None, **overrides: Any) -> PreTrainedModel:
    """Switch `model` to retrieval attention with layer-major prefill, in place; returns the model.

    model: a transformers model, or a `PeftModel` around one: its adapters go on acting.
    Afterwards `model.generate(...)` without `past_key_values` makes a RetrievalCache by itself; with one it
    uses that. The second forward of `guidance_scale` gets one, too. Calling enable again replaces the options.
    `disable` restores the model as it was.
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
        for name, hook in _GENERATE_HOOKS.items():
            setattr(model, name, functools.partial(hook, model, getattr(model, name)))
    return given


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`: the attention implementation, the layers and generate() are the model's own again."""
    given, model = model, unwrapped(model)
    state = getattr(model, _STATE, None)
    if state is None:
        return given
    delattr(model, _STATE)
    for name in _GENERATE_HOOKS:
        delattr(model, name)
    unwrap_layers(model)
    set_attention(model, state["attn_implementation"])
    return given


def enabled_config(model: PreTrainedModel) -> Config | None:
    """The options `enable` was called with, or None when the model is not enabled."""
    state = getattr(unwrapped(model), _STATE, None)
    return state["config"] if state else None


def _prepare_cache(model: PreTrainedModel, original: Any, generation_config: Any, model_kwargs: Any, *args: Any) -> Any:
    """transformers makes a DynamicCache for a generate() call without past_key_values; make ours instead."""
    if generation_config.use_cache is not False:
        named = generation_config.cache_implementation
        if named is not None and named != getattr(model.generation_config, "cache_implementation", None):
            raise ConfigError(
                f"generate(cache_implementation={named!r}) makes a cache of transformers' own, with which this model "
                "cannot run while retrieval attention is enabled. Leave it out for a RetrievalCache, or call "
                "retrieval_attn.disable(model) first."
            )
        generation_config.cache_implementation = None  # the checkpoint's own choice, for full attention
        if model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = RetrievalCache(model, enabled_config(model))
    return original(generation_config, model_kwargs, *args)


def _prepare_processors(model: PreTrainedModel, original: Any, *args: Any, **options: Any) -> Any:
    """The processor of guidance_scale calls the model outside of generate(), with a cache of its own: give it ours."""
    processors = original(*args, **options)
    cache = (options.get("model_kwargs") or {}).get("past_key_values")
    if not isinstance(cache, RetrievalCache):
        return processors
    for one in processors:
        guides = isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor)
        if guides and one.unconditional_context["use_cache"]:
            one.unconditional_context["past_key_values"] = RetrievalCache(model, cache.config)
    return processors


def _refuse_batching(model: PreTrainedModel, original: Any, *args: Any, **options: Any) -> NoReturn:
    raise UnsupportedModelError(
        "transformers' continuous batching (generate_batch, init_continuous_batching) has a paged cache of its own, "
        "with which this model cannot run while retrieval attention is enabled. Use retrieval_attn.LLM.generate or "
        "retrieval_attn.Engine for many prompts, or call retrieval_attn.disable(model) first."
    )


_GENERATE_HOOKS = {
    "_prepare_cache_for_generation": _prepare_cache,
    "_get_logits_processor": _prepare_processors,
    "init_continuous_batching": _refuse_batching,
}
"""Methods of transformers' generate() that are replaced while a model is enabled, and what calls them instead."""


def verify(model: PreTrainedModel, tokens: int = 64, decode_steps: int = 2) -> Report:
    """Compare eager full attention with retrieval over all keys on `tokens` random tokens; see `compare`.

    A model that passes is not verified again when a cache is made for it.
    """
    model = unwrapped(model)
    report = compare(model, unchecked_cache, tokens, decode_steps)
    mark_verified(model, report)
    return report
