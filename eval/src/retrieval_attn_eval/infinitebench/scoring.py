"""One answer, one score: by the benchmark's rule ("official") or by the same rule without its defects ("fixed")."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.infinitebench import fixed, official
from retrieval_attn_eval.infinitebench.catalogue import CATALOGUE, check_tasks

__all__ = ["SCORERS", "score_text"]

SCORERS = ("official", "fixed")


def score_text(
    task: str,
    text: str,
    answers: Sequence[str],
    *,
    options: Sequence[str] = (),
    scorer: str = "official",
    leading_value: bool = False,
) -> float:
    """Score of an answer, 0 to 1.

    answers: references as text, not empty; for the tasks with options the right option's text and its letter.
    options: the four option texts, which only the fixed scorer reads.  leading_value: math_calc's prompt asks for a
    list that begins with the expression's first number, which the official scorer then skips.
    Raises ConfigError for an unknown task or scorer, or if En.Sum is scored without rouge-score.
    """
    if scorer not in SCORERS:
        raise ConfigError(f"scorer {scorer!r} is unknown; choose from {', '.join(SCORERS)}")
    (task,) = check_tasks([task])
    if scorer == "fixed":
        if CATALOGUE[task].choice:
            return fixed.choice(text, answers, options)
        return fixed.RULES[task](text, answers)
    if task == "math_calc" and leading_value:
        return official.math_calc_after_first(text, answers)
    return official.RULES[task](text, answers)
