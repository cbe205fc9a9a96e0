"""Standard errors, paired comparisons and RULER's aggregates.  numpy only.

Two methods answer the same samples, so their difference is tested sample by sample; most published gaps between
such methods are smaller than the noise of a task with 200 samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Difference",
    "effective_length",
    "mcnemar_exact",
    "mean",
    "mean_of_groups",
    "paired_difference",
    "standard_error",
    "weighted_average",
]

EFFECTIVE = 85.6  # RULER, section 4: Llama-2-7B-chat at 4K, percent
RESAMPLES = 10_000
MIN_PAIRS = 5
_BLOCK_NUMBERS = 1 << 22  # random indices drawn at once


@dataclass(frozen=True)
class Difference:
    """Second method minus first, over the same samples; scores 0..1.

    low, high: bootstrap confidence interval; None where there are too few samples to draw from.
    p_value: exact McNemar test of "counted right" (score 1), two-sided.
    wins, losses: samples where the second is right and the first is not, and the other way round.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p_value: float
    wins: int
    losses: int


def mean(scores: Sequence[float]) -> float | None:
    """Arithmetic mean; None for no scores."""
    return float(np.mean(scores)) if len(scores) else None


def standard_error(scores: Sequence[float]) -> float | None:
    """Standard error of the mean, from the sample variance (n - 1); None for fewer than two scores."""
    return float(np.std(scores, ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else None


def mean_of_groups(groups: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Unweighted mean of the groups' means and its standard error, the groups taken as fixed.

    The error is None if any group has fewer than two scores; both are None for no group or an empty one.
    """
    if not groups or any(not len(group) for group in groups):
        return None, None
    errors = [standard_error(group) for group in groups]
    known = [error for error in errors if error is not None]
    error = math.sqrt(sum(e * e for e in known)) / len(groups) if len(known) == len(errors) else None
    return float(np.mean([np.mean(group) for group in groups])), error


def paired_difference(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """Mean difference of paired scores with a percentile bootstrap interval.

    first, second: one list of scores per task, sample by sample in the same order.  The mean weighs tasks equally,
    and samples are drawn again within each task.  One sample of a task, or fewer than MIN_PAIRS in all, say nothing
    about their spread: then there is no interval.  Raises ValueError if they do not pair or there is nothing.
    """
    if [len(a) for a in first] != [len(b) for b in second] or not first or any(not len(a) for a in first):
        raise ValueError(
            f"needed the same samples of both methods, got {[len(a) for a in first]} and {[len(b) for b in second]}"
        )
    rng = np.random.default_rng(seed)
    total = np.zeros(resamples)
    value = 0.0
    for a, b in zip(first, second, strict=True):
        gaps = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
        value += float(gaps.mean())
        step = max(1, _BLOCK_NUMBERS // len(gaps))
        for at in range(0, resamples, step):
            rows = min(step, resamples - at)
            total[at : at + rows] += gaps[rng.integers(0, len(gaps), (rows, len(gaps)))].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = (float(edge) for edge in np.quantile(total / len(first), [tail, 1.0 - tail]))
    right = [(x >= 1.0, y >= 1.0) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True)]
    wins = sum(y and not x for x, y in right)
    losses = sum(x and not y for x, y in right)
    few = len(right) < MIN_PAIRS or min(len(a) for a in first) < 2
    return Difference(
        n=len(right),
        mean=value / len(first),
        low=None if few else low,
        high=None if few else high,
        p_value=mcnemar_exact(wins, losses),
        wins=wins,
        losses=losses,
    )


def mcnemar_exact(wins: int, losses: int) -> float:
    """Two-sided exact McNemar p-value: the binomial test of the discordant pairs against one half.

    1.0 when no pair disagrees.
    """
    n = wins + losses
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)  # integers of any size: the quotient is rounded once


def effective_length(percents: Mapping[int, float], threshold: float = EFFECTIVE) -> int | None:
    """Longest length whose mean (percent) reaches the threshold; None if none does.  RULER, section 4."""
    return max((length for length, percent in percents.items() if percent >= threshold), default=None)


def weighted_average(percents: Mapping[int, float], *, increasing: bool) -> float | None:
    """RULER's wAvg over lengths: weights 1, 2, ... toward the longest (inc) or the shortest (dec); None for none."""
    if not percents:
        return None
    lengths = sorted(percents, reverse=not increasing)
    weights = range(1, len(lengths) + 1)
    return sum(w * percents[n] for w, n in zip(weights, lengths, strict=True)) / sum(weights)
