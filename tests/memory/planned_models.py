"""Shapes of published models as in their config.json, for plans. Qwen3-8B, 14B and 32B have YaRN enabled."""

from __future__ import annotations

from typing import Any


def _llama(**shape: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        **shape,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, yarn: bool = True) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 163840 if yarn else 262144,
        "tie_word_embeddings": not yarn,
        "rope_theta": 1000000,
        **({"rope_scaling": scaling} if yarn else {}),
    }


def _gemma3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "image_size": 896,
        "patch_size": 14,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "Qwen3-4B-2507": _qwen3(2560, 9728, 36, 32, yarn=False),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B-2507": {
        **_qwen3(2048, 6144, 48, 32, yarn=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "Gemma-3-4B": _gemma3(2560, 10240, 34, 8, 4, 256),
    "Gemma-3-12B": _gemma3(3840, 15360, 48, 16, 8, 256),
    "Gemma-3-27B": _gemma3(5376, 21504, 62, 32, 16, 128),
}
