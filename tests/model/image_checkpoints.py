"""Folders of random-weight models for text and images, with tokenizer, chat template and image processor."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.model.multimodal_models import new_model
from tests.prompt.test_encode import BUNDLED

WORDS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
MISTRAL_WORDS = {"image": "[IMG]", "video": "[VIDEO]", "start": "[IMG_BREAK]", "end": "[IMG_END]"}
GEMMA_WORDS = {"image": "<image_soft_token>", "video": "<v>", "start": "<start_of_image>", "end": "<end_of_image>"}
_ONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZE = 56
"""Pixels of a side of a Gemma picture, four tokens."""


def words_of(name: str) -> dict[str, str]:
    """Words of the special tokens for images."""
    return {"gemma3": GEMMA_WORDS, "mistral3": MISTRAL_WORDS}.get(name, WORDS)


def image_text(name: str, tokens: int, lines: int = 0) -> str:
    """Return the text of a rendered prompt for an image of a number of tokens, of one that the template writes.

    lines: of the image, which end with words of their own (mistral3).
    """
    words = words_of(name)
    if name == "mistral3":
        line = words["image"] * tokens if not lines else words["image"] * (tokens // lines - 1) + words["start"]
        return line if not lines else (line * lines).removesuffix(words["start"]) + words["end"]
    inside = f"{words['start']}{words['image'] * tokens}{words['end']}"
    return f"\n\n{inside}\n\n" if name == "gemma3" else inside


def tokenizer_for(name: str) -> Any:
    """The bundled tokenizer with the tokens and a chat template of a model's family."""
    words = words_of(name)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *words.values()]})
    shown = words["start"] if name == "gemma3" else image_text(name, 1)
    tokenizer.chat_template = _ONE.replace("IMAGE", shown)
    return tokenizer


def processor_for(name: str) -> Any:
    """An image processor of the model's family, for small pictures."""
    if name == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4)
    if name == "mistral3":
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        return PixtralImageProcessorPil(size={"longest_edge": 280}, patch_size={"height": 14, "width": 14})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": SIZE * SIZE, "longest_edge": 64 * SIZE * SIZE})


def save_checkpoint(name: str, folder: Path) -> Any:
    """Write a checkpoint; return its model, in float32 with eager attention."""
    tokenizer, words = tokenizer_for(name), words_of(name)
    ids = {key: tokenizer.convert_tokens_to_ids(word) for key, word in words.items()}
    model = new_model(name, len(tokenizer))
    config = model.config
    if name == "gemma3":
        config.image_token_id, config.boi_token_index, config.eoi_token_index = ids["image"], ids["start"], ids["end"]
    elif name == "mistral3":
        config.image_token_id = ids["image"]
    else:
        config.image_token_id, config.video_token_id = ids["image"], ids["video"]
        config.vision_start_token_id, config.vision_end_token_id = ids["start"], ids["end"]
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor_for(name).save_pretrained(folder)
    return model


def picture(seed: int, width: int = 84, height: int = 56, form: str = "PNG") -> bytes:
    """The file of a random picture."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def opened(data: bytes) -> Any:
    """The RGB picture in a file."""
    import PIL.Image

    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


def plain_inputs(name: str, text: str, pictures: list[bytes]) -> dict[str, Tensor]:
    """What transformers' model takes for a text with `{}` for each picture, without any code of this package."""
    tokenizer, processor = tokenizer_for(name), processor_for(name)
    images = [opened(data) for data in pictures]
    options: dict[str, Any] = {"patch_size": {"height": 28, "width": 28}} if name == "mistral3" else {}
    given = processor(images=images, return_tensors="pt", **options) if images else {}
    pixels = {key: value for key, value in given.items() if key != "num_crops"}
    grids = [] if name in ("gemma3", "mistral3") else pixels.get("image_grid_thw", ())
    counts = [4] * len(images) if name in ("gemma3", "mistral3") else [int(grid.prod()) // 4 for grid in grids]
    lines = [0] * len(counts)
    if name == "mistral3" and images:
        lines = [int(height) // 28 for height, _ in pixels["image_sizes"]]
        counts = [(int(width) // 28 + 1) * high for high, (_, width) in zip(lines, pixels["image_sizes"], strict=True)]
    text = text.format(*map(image_text, [name] * len(counts), counts, lines))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    kinds = (ids == tokenizer.convert_tokens_to_ids(words_of(name)["image"])).long()
    named = {"gemma3": "token_type_ids", "mistral3": None}.get(name, "mm_token_type_ids")
    told = {} if named is None else {named: kinds}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **told, **pixels}
