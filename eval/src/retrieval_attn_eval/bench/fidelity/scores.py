"""What two sequences of logits have in common: divergence, likeliest tokens, and how sure a mean is. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Mean", "divergence", "entropy", "log_probabilities", "mean_with_interval", "same_likeliest"]

Floats = NDArray[np.float64]
RESAMPLES = 10_000
CONFIDENCE = 0.95
_DRAWN_AT_ONCE = 500


@dataclass(frozen=True)
class Mean:
    """A mean and its percentile bootstrap interval; low and high are None for fewer than two tokens."""

    value: float
    low: float | None
    high: float | None


def log_probabilities(logits: ArrayLike) -> Floats:
    """Natural logarithms of softmax over the last axis, in float64. logits: (tokens, vocabulary), any float dtype."""
    scores = np.asarray(logits, dtype=np.float64)
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergence(reference: Floats, method: Floats) -> Floats:
    """KL(reference || method) in nats per token, (tokens,), of log probabilities (tokens, vocabulary).

    Tokens that the reference gives no probability add nothing. What rounding takes below zero is zero.
    """
    if reference.shape != method.shape:
        raise ValueError(f"needed log probabilities of one shape, got {reference.shape} and {method.shape}")
    weight = np.exp(reference)
    with np.errstate(invalid="ignore"):
        terms = np.where(weight > 0, weight * (reference - method), 0.0)
    result: Floats = np.maximum(terms.sum(axis=-1), 0.0)
    return result


def entropy(reference: Floats) -> Floats:
    """Entropy in nats per token, (tokens,), of log probabilities (tokens, vocabulary)."""
    weight = np.exp(reference)
    with np.errstate(invalid="ignore"):
        terms = np.where(weight > 0, weight * reference, 0.0)
    result: Floats = -terms.sum(axis=-1)
    return result


def same_likeliest(reference: Floats, method: Floats) -> float:
    """Share of tokens after which both have the same likeliest one."""
    return float((reference.argmax(axis=-1) == method.argmax(axis=-1)).mean())


def mean_with_interval(values: ArrayLike, seed: int = 0) -> Mean:
    """Mean of values (tokens,) or (texts, tokens) and a 95 % interval. Drawn again are texts, then tokens of each, for
    tokens of one text are not independent. Of a single text only tokens can be drawn.
    """
    numbers = np.atleast_2d(np.asarray(values, dtype=np.float64))
    texts, tokens = numbers.shape
    if numbers.size < 2:
        return Mean(float(numbers.mean()), None, None)
    random = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for at in range(0, RESAMPLES, _DRAWN_AT_ONCE):
        count = len(means[at : at + _DRAWN_AT_ONCE])
        text = random.integers(0, texts, (count, texts, 1)) if texts > 1 else np.zeros((count, 1, 1), np.int64)
        drawn = numbers[text, random.integers(0, tokens, (count, texts, tokens))]
        means[at : at + count] = drawn.mean(axis=(1, 2))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [outside, 1 - outside])
    return Mean(float(numbers.mean()), float(low), float(high))
