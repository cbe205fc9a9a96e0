"""Retrieval samples of an exact token length: RULER-style needles, pass key, city needles, UUID key-value.

make_sample fills the context from below up to the target (prompt + answer budget) and never beyond it.
Text only: no torch, no model.  The same (task, num_tokens, seed, tokenizer) always gives the same sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrieval_attn_eval.plans import NOISE_LINE, TASKS, Plan, make_plan
from retrieval_attn_eval.text.prose import prose

__all__ = ["TASKS", "Sample", "make_sample", "score", "split_sentences"]

_EVAL_PROSE_SEED = 1 << 20  # training prose uses smaller seeds, so evaluation prose is held out


@dataclass(frozen=True)
class Sample:
    """One prompt with its reference answers.

    prompt == context + question.  num_tokens: tokens of the prompt; max_new_tokens: room kept for the answer;
    num_tokens + max_new_tokens <= target.  completion: the answer as the bundled model writes it.
    """

    prompt: str
    answers: tuple[str, ...]
    task: str
    context: str
    question: str
    completion: str
    num_tokens: int
    max_new_tokens: int
    target: int
    seed: int


def split_sentences(text: str) -> list[str]:
    """Cut `text` after ". ", "! ", "? " and before line breaks; the pieces join to `text` exactly.

    A piece starts with its own separator (a space or line breaks), so that token boundaries stay put.
    """
    pieces: list[str] = []
    start, at = 0, 0
    while at < len(text):
        cut = -1
        if (
            text[at] == "\n"
            and at > start
            and text[at - 1] != "\n"
            or text[at] == " "
            and at > start
            and text[at - 1] in ".!?"
        ):
            cut = at
        if cut > start:
            pieces.append(text[start:cut])
            start = cut
        at += 1
    if start < len(text):
        pieces.append(text[start:])
    return pieces


class _Units:
    """Endless haystack units, each with its leading separator; unit i never changes once drawn."""

    def __init__(self, plan: Plan, seed: int, haystack: str | None) -> None:
        self._plan, self._seed = plan, seed
        self._items: list[str] = []
        self._given = split_sentences(haystack) if haystack else None

    def take(self, count: int) -> list[str]:
        while len(self._items) < count:
            self._items.extend(self._more(count - len(self._items)))
        return self._items[:count]

    def _more(self, missing: int) -> list[str]:
        plan = self._plan
        if self._given:
            again = self._given if not self._items else [" " + self._given[0].lstrip(), *self._given[1:]]
            return list(again)
        if plan.haystack == "noise":
            return ["\n" + NOISE_LINE] * missing
        if plan.haystack == "prose":
            # whole text anew each time it grows: prose() is a prefix-stable stream
            text = prose(90 * (len(self._items) + missing + 16), _EVAL_PROSE_SEED + self._seed)
            return split_sentences(text)[len(self._items) : -1]
        assert plan.distractor is not None, plan.haystack
        lead = ", " if plan.haystack == "kv" else "\n"
        return [lead + plan.distractor() for _ in range(missing)]


def _render(plan: Plan, units: list[str], depths: list[float]) -> str:
    """Context text: instruction, haystack with the needles inserted at `depths` (fractions of the units)."""
    before, after = plan.needle_style
    if plan.haystack == "needles":
        before, after = "\n", ""
    parts: list[str] = []
    places = sorted((round(depth * len(units)), i) for i, depth in enumerate(depths))
    done = 0
    for place, i in places:
        parts.extend(units[done:place])
        parts.append(before + plan.needles[i] + after)
        done = place
    parts.extend(units[done:])
    return plan.instruction + "".join(parts).lstrip(" ,\n") + plan.closing


def make_sample(
    task: str,
    num_tokens: int,
    seed: int,
    count_tokens: Callable[[str], int] | Any,
    *,
    haystack: str | None = None,
    depth: float | None = None,
) -> Sample:
    """A sample whose prompt plus answer budget fills `num_tokens` from below, to within max(1 %, one unit).

    count_tokens: a function text -> number of tokens, or a Hugging Face tokenizer (its special tokens
    count too).  haystack: own text instead of the generated prose (prose tasks only; repeated if too short).
    depth: 0 (start) to 1 (end) for the only needle; by default every needle gets a random depth.
    Raises ValueError if the target is too small for the task.
    """
    if callable(count_tokens) and not hasattr(count_tokens, "encode"):
        count: Callable[[str], int] = count_tokens
    else:
        tokenizer = count_tokens

        def count(text: str) -> int:
            return len(tokenizer.encode(text))

    rng = random.Random(f"{task}/{seed}")
    plan = make_plan(task, rng)
    question = plan.questions[0]
    depths = [rng.random() for _ in plan.needles]
    if plan.ordered:
        depths.sort()
    if depth is not None and len(depths) == 1:
        depths = [depth]
    units = _Units(plan, seed, haystack if plan.haystack == "prose" else None)
    budget = num_tokens - plan.answer_tokens

    probe = 32
    empty = count(_render(plan, [], depths) + question.text)
    per_unit = max((count(_render(plan, units.take(probe), depths) + question.text) - empty) / probe, 1.0)
    if empty > budget:
        raise ValueError(f"num_tokens={num_tokens} is too small for {task}; it needs {empty + plan.answer_tokens}")
    best, best_tokens, best_n, over = plan.instruction, empty, 0, 1 << 60
    n = max(int((budget - empty) / per_unit), 0)
    best = _render(plan, [], depths)
    for _ in range(24):
        text = _render(plan, units.take(n), depths)
        tokens = count(text + question.text)
        if tokens <= budget:
            if n >= best_n:
                best, best_tokens, best_n = text, tokens, n
            step = int((budget - tokens) / per_unit)
            if best_n + 1 >= over or (step == 0 and budget - tokens < 0.004 * num_tokens):
                break
            n = min(best_n + max(step, 1), over - 1)
        else:
            over = min(over, n)
            n = max(n - max(int((tokens - budget) / per_unit), 1), best_n)
            if n == best_n and best_n + 1 >= over:
                break
    return Sample(
        best + question.text,
        question.answers,
        task,
        best,
        question.text,
        question.completion,
        best_tokens,
        plan.answer_tokens,
        num_tokens,
        seed,
    )


def score(sample: Sample, text: str) -> float:
    """Fraction of the answers that are case-insensitive substrings of `text`; 1.0 is a full match."""
    folded = text.casefold()
    return sum(answer.casefold() in folded for answer in sample.answers) / len(sample.answers)
