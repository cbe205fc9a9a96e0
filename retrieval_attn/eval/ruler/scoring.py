"""RULER's scoring rule: which references occur in a prediction (RULER repository, scripts/eval)."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["clean", "is_null", "match_all", "match_part"]

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
