"""How far two right answers may lie apart: what rounding alone does to the logits of a model.

It grows with the number of layers, more so with random weights, so no constant fits every model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "allowed", "rounding_noise"]

# Largest difference of logits allowed, relative to the largest logit: accumulation order in float32, and the
# rounding of PyTorch's own output in 16 bits, which retrieval keeps in float32 until its parts are merged.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def rounding_noise(model: Any, answer: Callable[[], Sequence[Tensor]]) -> float:
    """Largest difference of logits between two attentions of transformers' own, relative to the largest logit.

    answer: gives logits with the attention that the model is set to; it is called with "sdpa" and with "eager".
    """
    before = model.config._attn_implementation
    found = []
    try:
        for name in ("sdpa", "eager"):
            model.set_attn_implementation(name)
            found.append([logits.float() for logits in answer()])
    finally:
        model.set_attn_implementation(before)
    return max(float((one - two).abs().max() / one.abs().max()) for one, two in zip(*found, strict=True))


def allowed(dtype: Any, noise: float) -> float:
    """Largest relative error of logits that is rounding: that of the dtype, or twice the noise where that is more."""
    return max(TOLERANCE[dtype], 2 * noise)
