"""RULER's scoring rule, which references occur in a prediction (RULER repository, scripts/eval), and its aggregates:
mean, weighted averages and effective length over tasks and lengths (RULER paper, section 4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrieval_attn_eval.suite.statistics import effective_length, weighted_average

__all__ = ["PAPER_002_THRESHOLD", "THRESHOLD", "Aggregates", "aggregate", "clean", "is_null", "match_all", "match_part"]

THRESHOLD = 85.6  # Llama-2-7B-chat at 4K; a length counts as effective from here
PAPER_002_THRESHOLD = 85.0  # what the printed table of "RetrievalAttention" is consistent with
_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """The prediction as it is scored: stripped, every control character a line break, stripped again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def is_null(prediction: str) -> bool:
    """True for a prediction that is empty once cleaned; reported as "nulls"."""
    return not clean(prediction)


def match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that are substrings of the prediction, in lower case."""
    text = clean(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """1.0 if any reference is a substring of the prediction, in lower case; else 0.0."""
    text = clean(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


@dataclass(frozen=True)
class Aggregates:
    """Percent.  means: length -> mean over tasks.  wavg_inc weighs longer lengths more (1, 2, ...), wavg_dec less.

    same_tasks: every length has the same tasks; where not, the averages compare different things.
    """

    means: dict[int, float]
    wavg_inc: float
    wavg_dec: float
    effective: int | None
    effective_paper_002: int | None
    same_tasks: bool


def aggregate(scores: Mapping[int, Mapping[str, float]]) -> Aggregates:
    """Aggregates of length -> task -> mean score (0 to 1).  Lengths without tasks are left out.

    Raises ValueError if nothing is left.
    """
    filled = {length: tasks for length, tasks in sorted(scores.items()) if tasks}
    if not filled:
        raise ValueError("needed the scores of at least one length, got none")
    means = {length: 100 * sum(tasks.values()) / len(tasks) for length, tasks in filled.items()}
    inc, dec = weighted_average(means, increasing=True), weighted_average(means, increasing=False)
    assert inc is not None and dec is not None, means
    return Aggregates(
        means,
        inc,
        dec,
        effective_length(means, THRESHOLD),
        effective_length(means, PAPER_002_THRESHOLD),
        len({frozenset(tasks) for tasks in filled.values()}) == 1,
    )
