"""One row of the report: a method with a budget on a text of a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, cat

from retrieval_attn.eval.bench.fidelity.scores import Floats, divergence, mean_with_interval, same_likeliest

__all__ = ["Row", "judged", "mean_head_errors"]


@dataclass(frozen=True)
class Row:
    """text, length: as asked for; context, tokens: read and fed. method: with its options; budget: keys that a head
    retrieves, a number, a share or "all"; None for one without.

    kl: mean KL(full || method) in nats, low and high its 95 % interval; entropy: full attention's, mean in nats.
    same: share of tokens with the same likeliest one. attended: tokens per query; captured: share of exact attention's
    weight that took part. head_error: relative error of a head's output, mean over layers, heads and tokens;
    head_errors: per layer and head, mean over tokens. kl_per_token: in order. refused: why nothing was measured.
    """

    text: str
    length: int
    context: int
    tokens: int
    method: str
    budget: int | float | str | None
    entropy: float
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    same: float | None = None
    attended: float | None = None
    captured: float | None = None
    head_error: float | None = None
    head_errors: Sequence[Sequence[float]] = field(default_factory=tuple)
    refused: str = ""
    kl_per_token: Sequence[float] = field(default_factory=tuple)


def judged(reference: Floats, method: Floats, seed: int) -> dict[str, Any]:
    """The measured fields of a row; both: log probabilities (tokens, vocabulary) in float64."""
    each = divergence(reference, method)
    mean = mean_with_interval(each, seed)
    return {
        "kl": mean.value,
        "low": mean.low,
        "high": mean.high,
        "same": same_likeliest(reference, method),
        "kl_per_token": tuple(float(value) for value in each),
    }


def mean_head_errors(errors: Sequence[Tensor]) -> dict[str, Any]:
    """The row's fields of `Fed.head_errors`; all layers and heads count alike. Empty if nothing was measured."""
    means = [layer.double().mean(dim=1) for layer in errors]
    if not means:
        return {}
    return {"head_error": float(cat(means).mean()), "head_errors": tuple(tuple(layer.tolist()) for layer in means)}
