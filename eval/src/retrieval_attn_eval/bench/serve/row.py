"""Row: what one way of answering a workload's requests took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.cache_use import CacheUse

__all__ = ["Bounds", "Row", "row_of"]


@dataclass(frozen=True)
class Bounds:
    """Of a good answer. first_seconds: to the first token; token_seconds: from token to token on average."""

    first_seconds: float
    token_seconds: float


@dataclass(frozen=True)
class Row:
    """Measurements of one way to answer.

    Attributes:
        way: "one", "static", "engine", "tree-off", "transformers", or a form of `sender.FORMS` for a server.
        status: "ok", "failed" or "not run".
        note: reason of the status, or a remark.
        tokens: generated tokens of all requests.
        seconds: from the first arrival to the last token.
        first, gap: 50th and 99th percentile of the seconds to the first token, and from token to token.
        good: share of requests within the bounds.
        filled: share of slots that steps used while a request waited. None: none waited.
        cached: share of the prompt tokens that were found in the prefix cache.
        cpu_seconds: seconds of all threads of the process. None: not known.
        use: use of the prefix cache. None: not measured.
        answers: outcome of each request.
    """

    way: str
    status: str = "ok"
    note: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first: tuple[float, float] | None = None
    gap: tuple[float, float] | None = None
    good: float | None = None
    filled: float | None = None
    cached: float | None = None
    cpu_seconds: float | None = None
    use: CacheUse | None = None
    answers: tuple[Answered, ...] = ()

    @property
    def rate(self) -> float | None:
        """Generated tokens a second; None where nothing was measured."""
        return self.tokens / self.seconds if self.status == "ok" and self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        names = [field.name for field in fields(self) if field.name not in ("answers", "use")] + ["rate"]
        use, answers = None if self.use is None else self.use.to_dict(), [one.to_dict() for one in self.answers]
        return {**{name: getattr(self, name) for name in names}, "use": use, "answers": answers}


def row_of(
    way: str,
    answers: Sequence[Answered],
    bounds: Bounds,
    expected: Sequence[tuple[int, ...]] | None,
    filled: float | None = None,
) -> Row:
    """Make a row of the answers.

    It fails if a request failed, if all were refused, or if an answer is not `expected` (None: not compared).
    """
    problem = next((f"request {n}: {one.problem}" for n, one in enumerate(answers) if one.problem), "")
    refused = [one for one in answers if one.refused]
    note = f"{len(refused)} of {len(answers)} requests were refused; {problem}" if refused else problem
    failed = len(refused) == len(answers) or any(one.problem and not one.refused for one in answers)
    if not failed and expected is not None:
        differ = [
            n
            for n, (one, tokens) in enumerate(zip(answers, expected, strict=True))
            if not one.refused and one.tokens != tokens
        ]
        if differ:
            failed, note = True, f"answers {', '.join(map(str, differ))} are not those of one after the other"
    firsts = [one.first_seconds for one in answers if one.first_seconds is not None]
    gaps = [gap for one in answers for gap in one.gaps]
    ends = [one.times[-1] for one in answers if one.times]
    prompts = sum(one.prompt_tokens for one in answers)
    return Row(
        way,
        "failed" if failed else "ok",
        note,
        sum(len(one.tokens) for one in answers),
        max(ends) - min(one.arrival for one in answers) if ends else 0.0,
        _percentiles(firsts),
        _percentiles(gaps),
        sum(one.is_good(bounds.first_seconds, bounds.token_seconds) for one in answers) / len(answers),
        filled,
        sum(one.cached_tokens for one in answers) / prompts if prompts else None,
        answers=tuple(answers),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    half, most = np.percentile(values, [50, 99])
    return float(half), float(most)
