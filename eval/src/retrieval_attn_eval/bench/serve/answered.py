"""Answered: what became of one request, with the times at which its tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Answered"]


@dataclass(frozen=True)
class Answered:
    """arrival, times: seconds of one clock; times: when each token was there. prompt_tokens, of which cached_tokens
    were not read for this request. problem: what went wrong, or "".
    """

    arrival: float
    times: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    problem: str = ""

    @property
    def first_seconds(self) -> float | None:
        """From its arrival to its first token; None if there is none."""
        return self.times[0] - self.arrival if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next one."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def is_good(self, first_seconds: float, token_seconds: float) -> bool:
        """Whether the first token, and the others on average, came within these bounds."""
        if self.problem or self.first_seconds is None or self.first_seconds > first_seconds:
            return False
        gaps = self.gaps
        return not gaps or sum(gaps) / len(gaps) <= token_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; times count from the arrival, in milliseconds."""
        return {
            "arrival": round(self.arrival, 4),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "token_ms": [round((time - self.arrival) * 1000, 1) for time in self.times],
            "problem": self.problem,
        }
