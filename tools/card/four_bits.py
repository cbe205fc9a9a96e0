"""Models with random weights in 4 bits, quantised by torchao one layer at a time: none is ever whole in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrieval_attn.gpu.memory import expand_segments
from retrieval_attn.model.layers import decoder_layers
from retrieval_attn.model.quantization import int4_config
from retrieval_attn_eval.bench.random_model import RANDOM_SHAPES

__all__ = ["SHAPES", "made", "scale_residual"]

LONG = {"max_position_embeddings": 1 << 21, "eos_token_id": None, "bos_token_id": None}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": ("llama", RANDOM_SHAPES["llama-3-8b"]),
    "qwen3-32b": (
        "qwen3",
        {
            "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
    ),
    # of four layers one attends; the others keep a state
    "qwen3.5-27b": (
        "qwen3_5_text",
        {
            "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
            "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
    ),
    "tiny": ("llama", RANDOM_SHAPES["tiny"]),
    "tiny-hybrid": (
        "qwen3_5_text",
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip
"""Model types and sizes, as published but for the positions: random weights read longer texts as well."""
DEVIATION = 0.02


def made(shape: str, device: torch.device, seed: int = 0, layers: int | None = None, residual: float = 1.0) -> Any:
    """A model of one of SHAPES with random weights, in evaluation mode: linear modules of its layers in 4 bits.

    layers: only its first ones; None: all. residual: factor of the weights behind attention and MLP. bfloat16 on a GPU,
    float32 on a CPU. Raises KeyError for another shape.
    """
    model_type, sizes = SHAPES[shape]
    fields = {**LONG, **sizes, "num_hidden_layers": layers or sizes["num_hidden_layers"]}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    expand_segments(device)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _linears_without_weights():
            factory: Any = CONFIG_MAPPING[model_type]
            model: Any = AutoModelForCausalLM.from_config(factory(**fields), dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    for layer, _ in decoder_layers(model):
        _draw(layer, device, dtype)
        if residual != 1.0:
            scale_residual(layer, residual)
        _quantise(layer, device)
    _draw(model, device, dtype)  # the output
    return model.eval()


def scale_residual(model: nn.Module, factor: float) -> None:
    """Multiply the weights behind attention and MLP, which are not packed, by a factor."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
            module.weight.data.mul_(factor)


@contextmanager
def _linears_without_weights() -> Iterator[None]:
    """Within, linear modules are made on the meta device."""
    own = nn.Linear.__init__

    def made_on_meta(module: nn.Linear, *args: Any, **options: Any) -> None:
        own(module, *args, **{**options, "device": "meta"})

    with mock.patch.object(nn.Linear, "__init__", made_on_meta):
        yield


def _draw(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give linear modules that have none weights."""
    for one in module.modules():
        if isinstance(one, nn.Linear) and one.weight.is_meta:
            one.to_empty(device=device)
            one.weight.data = torch.randn(one.weight.shape, device=device, dtype=dtype) * DEVIATION
            if one.bias is not None:
                one.bias.data = torch.zeros(one.bias.shape, device=device, dtype=dtype)


def _quantise(layer: nn.Module, device: torch.device) -> None:
    """All but matrices of a few rows (how fast states fade), which published checkpoints leave as they are."""
    from torchao.quantization import quantize_

    quantize_(layer, int4_config(device), filter_fn=lambda one, _: type(one) is nn.Linear and one.out_features >= 64)
    if device.type == "cuda":
        torch.cuda.empty_cache()
