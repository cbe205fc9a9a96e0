"""Sizes of a vision tower that decide its memory: read from a model's config and its processor's. Arithmetic only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.model.bundled import model_path

USUAL_TOKENS = 16384
"""Tokens of the largest image of Qwen's published checkpoints, for a config without its processor's file."""
PIXEL_BYTES = 4
"""Bytes of a number of the processor's output."""
FRAGMENTED = 0.5
"""Fragmentation as a share of activations. Up to 0.4 were measured with chunks of 16K to 128K tokens on an H100."""


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower. An image is embedded alone, in one forward.

    patches: of the largest image. merged: patches of one token. patch_bytes: bytes of a patch at the peak, in a layer.
    pair_bytes: bytes of each pair of patches, of a mask and its aligned copy. parameters: of tower and projector.
    """

    patches: int
    merged: int
    patch_bytes: int
    pair_bytes: int
    parameters: int

    def image_bytes(self, tokens: int) -> int:
        """Return the bytes of activations of an image of `tokens` tokens, or of the largest one if that has fewer."""
        patches = min(self.patches, tokens * self.merged)
        return int((1 + FRAGMENTED) * patches * self.patch_bytes) + patches * patches * self.pair_bytes


def tower_shape(config: Any, source: Any, width: int, parameters: int) -> TowerShape | None:
    """Return the sizes of the tower of a model whose images are served; None for other models.

    config: of the model. source: name or folder of the checkpoint, whose processor limits images. width: bytes of a
    number of weights. parameters: of tower and projector.
    """
    found = _PEAKS.get(config.model_type)
    if found is None:
        return None
    vision = config.vision_config
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    inner = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
    side = vision.patch_size
    merged = int(getattr(vision, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None) or 1)
    tokens_of = merged * merged
    if config.model_type == "gemma3":
        patches = (vision.image_size // side) ** 2
        tokens_of = -(-patches // config.mm_tokens_per_image)
    elif config.model_type == "mistral3":
        cell = side * merged
        patches = (-(-_processor(source).get("longest_edge", vision.image_size) // cell) * merged) ** 2
    else:
        pixels = _processor(source).get("longest_edge", 0)
        patches = pixels // side**2 if pixels else USUAL_TOKENS * tokens_of
    numbers = vision.num_channels if hasattr(vision, "num_channels") else vision.in_channels
    numbers *= side * side * getattr(vision, "temporal_patch_size", 1)
    mlp = width * (found.mlp * inner + hidden)
    attention = width * 4 * hidden + (PIXEL_BYTES if found.rotates_floats else width) * found.rotated * hidden
    kept = width * hidden * (2 + (vision.num_hidden_layers if found.keeps_layers else 0))
    patch_bytes = numbers * (PIXEL_BYTES + width) + kept + max(mlp, attention)
    return TowerShape(patches, tokens_of, patch_bytes, found.masks * width, parameters)


@dataclass(frozen=True)
class _Peak:
    """Tensors at the peak of a layer, as transformers computes it.

    mlp: activations of the MLP's inner size. rotated: hidden states while queries and keys are rotated, in float32 if
    rotates_floats. keeps_layers: the outputs of all layers are kept. masks: copies of a mask of all pairs.
    """

    mlp: int
    rotated: int = 0
    rotates_floats: bool = False
    keeps_layers: bool = False
    masks: int = 0


_PEAKS = {
    "gemma3": _Peak(mlp=2),
    "mistral3": _Peak(mlp=3, rotated=4, keeps_layers=True, masks=2),
    "qwen2_vl": _Peak(mlp=4, rotated=6, rotates_floats=True),
    "qwen2_5_vl": _Peak(mlp=3, rotated=6, rotates_floats=True),
    "qwen3_vl": _Peak(mlp=2, rotated=6, rotates_floats=True),
}


def _processor(source: Any) -> dict[str, int]:
    """Return the sizes in the preprocessor_config.json of a folder; empty without one."""
    if not isinstance(source, str | Path) or not str(source):
        return {}
    try:
        given = json.loads((Path(model_path(source)) / "preprocessor_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    size = given.get("size") if isinstance(given, dict) else None
    found = dict(size) if isinstance(size, dict) else {}
    if isinstance(given, dict) and "max_pixels" in given:  # of older files
        found["longest_edge"] = given["max_pixels"]
    return {name: value for name, value in found.items() if isinstance(value, int)}
