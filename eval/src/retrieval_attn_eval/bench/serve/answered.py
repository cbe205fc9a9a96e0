"""Answered: what became of one request, with the times at which its tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Answered"]


@dataclass(frozen=True)
class Answered:
    """Outcome of one request.

    Attributes:
        arrival: seconds of one clock at which the request was due.
        times: seconds of the same clock at which each token, or each piece of a server's text, was there.
        tokens: ids of the answer; -1 for each token of a server, which tells no ids.
        prompt_tokens: tokens of the prompt.
        cached_tokens: tokens of the prompt that were found in the prefix cache.
        problem: error of the request, or "".
        refused: whether the request was refused before it was queued.
    """

    arrival: float
    times: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    problem: str = ""
    refused: bool = False

    @property
    def first_seconds(self) -> float | None:
        """From its arrival to its first token; None if there is none."""
        return self.times[0] - self.arrival if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next one."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds per token after the first. None for an answer of one token."""
        return None if len(self.tokens) < 2 or not self.times else self._decode_seconds / (len(self.tokens) - 1)

    @property
    def _decode_seconds(self) -> float:
        return self.times[-1] - self.times[0]

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
            "refused": self.refused,
        }
