"""Checkpoints that are more than a text model: where their text decoder is, and which tokens stand for images.

Retrieval attention runs the text decoder. Towers for images keep the attention that they were loaded with.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def text_decoder(model: Any) -> nn.Module:
    """The part of `model` that is its text decoder; the model itself if it is nothing else."""
    decoder: nn.Module = model.get_decoder() if is_multimodal(model) else model
    return decoder


def is_multimodal(model: Any) -> bool:
    """Whether the model's config has another config for its text."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text is not None and text(decoder=True) is not config and not getattr(config, "is_encoder_decoder", False)


def text_attention(model: Any) -> str:
    """The attention implementation of the text decoder."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def for_text(model: Any, name: str) -> str | dict[str, str]:
    """Return the argument of `set_attn_implementation` that gives only the text decoder the implementation `name`."""
    if not is_multimodal(model):
        return name
    text = model.config.get_text_config(decoder=True)
    return {key: name for key in model.config.sub_configs if getattr(model.config, key, None) is text}


def model_class(config: Any) -> Any:
    """The class of transformers that loads a checkpoint with this config: for text, or for text and images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with_images = type(config) in AutoModelForImageTextToText._model_mapping
    only_there = with_images and type(config) not in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if only_there else AutoModelForCausalLM


def placeholders(model: Any) -> dict[int, str]:
    """Token ids that stand for parts of an image, a video or a sound, with the name that the config gives them."""
    if not is_multimodal(model):
        return {}
    found = {}
    for kind in ("image", "video", "audio"):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            number = getattr(model.config, name, None)
            if isinstance(number, int):
                found[number] = kind
    return found
