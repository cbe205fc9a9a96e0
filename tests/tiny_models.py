"""Random-weight models of the supported types, small enough to run every feature in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import retrieval_attn as ra
from retrieval_attn.runner.prefill import first_decoder_layer

VOCABULARY = 97
LAYERS = 2

# What the bundled model is asked about, its tokenizer with it.
Loaded = tuple[Any, PreTrainedTokenizerBase]
NEEDLE = "The special magic Bergen number is: 7391846."
QUESTION = "What is the special magic Bergen number?"

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * step for step in range(8)],
    "short_factor": [1.0 + 0.05 * step for step in range(8)],
    "original_max_position_embeddings": 64,
}

_GEMMA4 = {  # as 31B: fewer, wider heads that attend to everything, and values made of their keys
    "sliding_window": 24,
    "layer_types": _ALTERNATING,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
}

# name -> (model_type, changes to BASE). Yi is of type llama with another rope base and no llama-3 scaling.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama31": ("llama", {"rope_parameters": _LLAMA31_ROPE}),
    "yi": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_sliding": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "phi3": (
        "phi3",
        {
            "hidden_size": 96,  # Phi-3 has no head_dim of its own: 96 / 6 heads = 16
            "sliding_window": None,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma2": (
        "gemma2",
        {"sliding_window": 24, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4_moe": (  # as 26B-A4B
        "gemma4_text",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 24,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


_shared: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
"""Cached models by name, each with the config of its text decoder and the attributes of its first decoder layer."""


def shared_by_tests(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """Cache the models that `make` returns by their names. A test that leaves one with another attention fails."""

    @cache
    @wraps(make)
    def found(name: str) -> Any:
        model = make(name)
        layer = first_decoder_layer(model)
        assert layer is not None
        name = f"{make.__module__}.{make.__name__}({name!r})"
        _shared[name] = model, model.config.get_text_config(decoder=True), layer.__dict__
        return model

    return found


def changed_models() -> dict[str, Any]:
    """Return cached models whose attention is not eager or whose layers have another forward. Takes microseconds."""
    return {
        name: model
        for name, (model, config, layer) in _shared.items()
        if config._attn_implementation != "eager" or "forward" in layer
    }


def restore_model(model: Any) -> None:
    """Give a cached model its eager attention again."""
    ra.disable(model)
    model.set_attn_implementation("eager")


@shared_by_tests
def tiny_model(name: str) -> Any:
    """A float32 model of `name` with seeded weights, eager attention, eval mode. Shared: leave it as it was."""
    return build_model(name)


def handed_out(found: Any) -> Iterator[Any]:
    """What a fixture yields from: the shared model `found`, afterwards with its eager attention again."""
    yield found
    ra.disable(found)
    left = [name for name, one in found.named_modules() if "forward" in one.__dict__]
    assert not left, (
        f"{left}: a test left forwards of its own; patch them with monkeypatch.setitem(module.__dict__, ...)"
    )
    found.set_attn_implementation("eager")


def build_model(name: str, **changes: Any) -> Any:
    """A model like `tiny_model(name)` of one's own, with `changes` to its config."""
    model_type, own = CONFIGS[name]
    config = config_of(model_type, **{**BASE, **own, **changes})
    torch.manual_seed(len(name))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    # Random weights give nearly uniform attention, in which a lost key would hardly show: make scores vary.
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj", "k_proj", "qkv_proj")) and parameter.ndim == 2:
                parameter.mul_(6.0)
            if parameter_name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
    return model


def config_of(model_type: str, **options: Any) -> Any:
    """A transformers config of `model_type`."""
    factory: Any = CONFIG_MAPPING[model_type]
    return factory(**options)


def needle_text(characters: int) -> str:
    """Prose with the needle in the middle."""
    from retrieval_attn_eval.text.prose import prose

    filler = prose(characters, seed=5)
    middle = filler.index(". ", len(filler) // 2) + 2
    return f"{filler[:middle]}{NEEDLE} {filler[middle:]}"


def random_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """(batch, tokens) ids that avoid the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)
