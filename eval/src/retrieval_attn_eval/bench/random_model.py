"""Models with random weights, of a published or a small shape: for times, which do not depend on the weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import expand_segments
from retrieval_attn_eval.bench.random_experts import draw_experts, experts_on_meta

__all__ = ["RANDOM_SHAPES", "has_float_experts", "layers_text", "model_config", "random_config", "random_model"]

RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # As many key-value heads as heads. Published with 4,096 positions; random weights read longer texts as well.
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 1 << 21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # Two layers of Llama-3-8B: a layer's cost at full width. Multiply by 16 for the whole model.
    "llama3-8b-slice": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # Experts in 4 bits, as `quantization="int4"` makes them, and attention in the model's dtype.
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    },
    # Experts in MXFP4. Published with 131,072 positions; random weights read longer texts as well.
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 262144,
    },
    "tiny-experts": {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1 << 16,
    },
}


def random_config(shape: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> PreTrainedConfig:
    """The configuration of one of RANDOM_SHAPES. layers: only its first ones; None: all. Raises ConfigError."""
    if shape not in RANDOM_SHAPES:
        raise ConfigError(f"--shape {shape} is not known; use one of {', '.join(RANDOM_SHAPES)}.")
    own = RANDOM_SHAPES[shape]["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= own:
        raise ConfigError(f"--layers must be 1 to the {own} layers of --shape {shape}, got {layers}.")
    fields = {**RANDOM_SHAPES[shape], "num_hidden_layers": layers or own}
    kind: Any = CONFIG_MAPPING[fields.pop("model_type", "llama")]
    # tokens of a random model mean nothing: no end of sequence to stop at
    made: PreTrainedConfig = kind(**fields, eos_token_id=None, bos_token_id=None, dtype=dtype)
    return made


def has_float_experts(shape: str) -> bool:
    """Whether experts of a shape are in MXFP4."""
    return RANDOM_SHAPES[shape].get("model_type") == "gpt_oss"


def layers_text(shape: str, layers: int | None = None) -> str:
    """How many layers a model of the shape has, "8 of 32 layers" or "32 layers". Raises ConfigError."""
    own, made = random_config(shape).num_hidden_layers, random_config(shape, layers=layers).num_hidden_layers
    return f"{own} layers" if made == own else f"{made} of {own} layers"


def random_model(
    shape: str,
    dtype: torch.dtype,
    seed: int,
    device: str | torch.device = "cpu",
    layers: int | None = None,
    host_experts: int = 0,
) -> Any:
    """A model of one of RANDOM_SHAPES with random weights, in evaluation mode, made on `device`.

    layers: as in `random_config`. host_experts: of each layer, in host memory. Raises ConfigError.
    """
    config = random_config(shape, dtype, layers)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    # numbers drawn in float32 and rounded are the same on every dtype; a large model has no room for them
    direct = torch.device(device).type == "cuda"
    expand_segments(torch.device(device))
    torch.set_default_dtype(dtype if direct else before)
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        with torch.device(device), experts_on_meta(made):
            model: Any = made(config)
    finally:
        torch.set_default_dtype(before)
    for weight in model.parameters():  # not model.to: rotary frequencies in 16 bits are wrong far from the start
        weight.data = weight.data.to(dtype)
    draw_experts(model, torch.device(device), dtype, floats=has_float_experts(shape), on_host=host_experts)
    return model.eval()


def model_config(model: str, shape: str | None, layers: int | None = None, yarn: float | None = None) -> Any:
    """Return the configuration of a named model or of a shape of random weights, without loading weights.

    layers: number of layers of the shape. Defaults to all of them.
    Raises InputDataError for a missing model, ConfigError for an unknown shape and for layers without a shape.
    """
    if shape is None and layers is not None:
        raise ConfigError(f"--layers {layers} needs random weights: give --shape, or drop it")
    if shape is not None:
        return random_config(shape, layers=layers)
    from retrieval_attn_eval.models import load_description, model_path

    return load_description(model_path(model), yarn)[0]
