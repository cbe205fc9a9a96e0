"""One row of the report: a method with a budget on one or several texts of a kind and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrieval_attn_eval.bench.fidelity.feed import Budget, Fed
from retrieval_attn_eval.bench.fidelity.scores import (
    Floats,
    divergence,
    entropy,
    log_probabilities,
    mean_with_interval,
    same_likeliest,
)
from retrieval_attn_eval.bench.fidelity.texts import FedText

__all__ = ["Measured", "Row", "judged", "row_of"]


@dataclass(frozen=True)
class Measured:
    """A method with a budget on one text. entropy: full attention's, mean in nats. kl: (tokens,) float64; None where
    the method was refused. head_errors: (layers, q_heads) float64, mean over tokens, or empty. Others as in `Row`.
    """

    text: FedText
    method: str
    budget: Budget | None
    entropy: float
    kl: Floats | None = None
    same: float = 0.0
    attended: float | None = None
    captured: float | None = None
    estimated: float | None = None
    head_errors: Sequence[Floats] = ()
    refused: str = ""


def judged(text: FedText, label: str, fed: Fed, reference: Floats) -> Measured:
    """What a method's logits are worth beside full attention's log probabilities (tokens, vocabulary) in float64."""
    sure = float(entropy(reference).mean())
    if fed.refused:
        return Measured(text, label, fed.budget, sure, refused=fed.refused)
    own = log_probabilities(fed.logits)
    return Measured(
        text,
        label,
        fed.budget,
        sure,
        divergence(reference, own),
        same_likeliest(reference, own),
        fed.attended,
        fed.captured,
        fed.estimated,
        tuple(layer.double().mean(dim=1).numpy() for layer in fed.head_errors),
    )


@dataclass(frozen=True)
class Row:
    """text, length: as asked for; texts: how many of them; context, tokens: read and fed of each, context the mean.
    method: with its options; budget: keys that a head retrieves: a number, "all", "auto"; None: it has none.

    What follows are means over all texts. kl: KL(full || method) in nats, low and high its 95 % interval, kl_p99 its
    99th percentile over tokens; entropy: full attention's in nats. same: share of tokens with the same likeliest one.
    attended: tokens per query; captured: share of exact attention's weight that was attended to; estimated: share of
    the run's own weight that was estimated.
    head_error: relative error of a head's output over layers, heads and tokens; head_errors: per layer and head.
    kl_per_token: in order, text after text. refused: why nothing was measured.
    """

    text: str
    length: int
    texts: int
    context: int
    tokens: int
    method: str
    budget: int | float | str | None
    entropy: float
    kl: float | None = None
    low: float | None = None
    high: float | None = None
    kl_p99: float | None = None
    same: float | None = None
    attended: float | None = None
    captured: float | None = None
    estimated: float | None = None
    head_error: float | None = None
    head_errors: Sequence[Sequence[float]] = field(default_factory=tuple)
    refused: str = ""
    kl_per_token: Sequence[float] = field(default_factory=tuple)


def row_of(measured: Sequence[Measured], seed: int) -> Row:
    """The row of one method with one budget on several texts, each of which counts alike; at least one."""
    first = measured[0]
    about: dict[str, Any] = {
        "text": first.text.name,
        "length": first.text.length,
        "texts": len(measured),
        "context": round(sum(one.text.context for one in measured) / len(measured)),
        "tokens": len(first.text.forced),
        "method": first.method,
        "budget": first.budget,
        "entropy": sum(one.entropy for one in measured) / len(measured),
    }
    refused = [one.refused for one in measured if one.refused]
    if refused:
        return Row(**about, refused=refused[0])
    each = np.stack([one.kl for one in measured if one.kl is not None])
    mean = mean_with_interval(each, seed)
    heads = [sum(layer) / len(measured) for layer in zip(*(one.head_errors for one in measured), strict=True)]
    return Row(
        **about,
        kl=mean.value,
        low=mean.low,
        high=mean.high,
        kl_p99=float(np.quantile(each, 0.99)),
        same=sum(one.same for one in measured) / len(measured),
        attended=_mean([one.attended for one in measured]),
        captured=_mean([one.captured for one in measured]),
        estimated=_mean([one.estimated for one in measured]),
        head_error=float(np.concatenate(heads).mean()) if heads else None,
        head_errors=tuple(tuple(layer.tolist()) for layer in heads),
        kl_per_token=tuple(each.ravel().tolist()),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
