"""Random-weight models for text and images, as small as their classes allow, and prompts with one image."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.tiny_models import VOCABULARY, random_ids, shared_by_tests

IMAGE, VIDEO, OPEN, CLOSE = 90, 91, 92, 93
"""Ids of the placeholder of an image's part, of a video's, and of what stands around an image."""
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}
_CLIP: dict[str, Any] = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN: dict[str, Any] = {**_VISION, "depth": 1, "num_heads": 2}
_GEMMA = {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": OPEN,
    "vision_end_token_id": CLOSE,
}

# name -> (classes' prefix, changes to the text's config, the vision tower's config, ids)
_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {**_GEMMA, "head_dim": 16},
        _CLIP,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        {**_CLIP, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE, "tie_word_embeddings": False},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": _MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
        _QWEN_IDS,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": _MROPE},
        {**_QWEN, "out_hidden_size": 96, "fullatt_block_indexes": [0]},
        _QWEN_IDS,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": _MROPE, "head_dim": 16},
        {**_QWEN, "out_hidden_size": 96, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _QWEN_IDS,
    ),
}
NAMES = tuple(_MODELS)


def new_model(
    name: str, vocabulary: int = VOCABULARY, vision: dict[str, Any] | None = None, ids: dict[str, Any] | None = None
) -> Any:
    """A float32 model of `name` with seeded weights, eager attention, eval mode.

    vision: config of the vision tower. ids: changes to the model's config, if it has these options.
    """
    prefix, text, tower, known = _MODELS[name]
    vision = tower if vision is None else {**({"model_type": "pixtral"} if name == "mistral3" else {}), **vision}
    ids = known | {key: value for key, value in (ids or {}).items() if key in known}
    torch.manual_seed(0)
    text = {**_TEXT, **text, "vocab_size": vocabulary}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, **ids)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    if name == "gemma3":  # zeros, which hide the image
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.set_attn_implementation("eager")
    return model


@shared_by_tests
def shared_model(name: str) -> Any:
    """`new_model(name)`, one for all tests: leave it as it was."""
    return new_model(name)


def with_image(name: str, tokens: int) -> dict[str, Tensor]:
    """What a processor returns for a prompt of about `tokens` tokens with an image of 56 x 56 pixels at its tenth."""
    generator = torch.Generator().manual_seed(7)
    if name == "gemma3":
        parts, pixels = 4, {"pixel_values": torch.randn(1, 3, 28, 28, generator=generator)}
    elif name == "mistral3":
        parts, pixels = 4, {"pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}
        pixels["image_sizes"] = torch.tensor([[56, 56]])
    else:
        patches = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        parts, pixels = 4, {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    text = random_ids(1, tokens, seed=8) % (IMAGE - 4) + 3
    image = torch.tensor([[OPEN, *[IMAGE] * parts, CLOSE]])
    ids = torch.cat([text[:, :10], image, text[:, 10:]], dim=1)
    kinds = {"gemma3": "token_type_ids", "mistral3": None}.get(name, "mm_token_type_ids")
    told = {} if kinds is None else {kinds: (ids == IMAGE).long()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **told, **pixels}
