"""How far two right answers may lie apart: what rounding alone does to the logits of a model.

It grows with the number of layers, more so with random weights, so no constant fits every model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from retrieval_attn.eval.speed_decode import TOLERANCE

__all__ = ["allowed", "rounding_noise"]


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
