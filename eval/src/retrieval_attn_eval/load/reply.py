"""Reply: what became of one request of a replay, with the times at which its text came."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from retrieval_attn.testing import Usage

__all__ = ["Bounds", "Reply"]


@dataclass(frozen=True)
class Bounds:
    """Of a good answer. first_seconds: to the first token; token_seconds: from token to token on average."""

    first_seconds: float
    token_seconds: float


@dataclass(frozen=True)
class Reply:
    """due, sent, end, times: seconds from the replay's beginning. due: when the trace wants it; times: when each piece
    of text was there. wanted: tokens that the trace asks for; usage: as the server counts, None if it does not say.
    status: "ok"; else the server's HTTP status, or "timeout", "connection", "broken" (a stream that did not end as
    streams do), with what was said as problem.
    """

    due: float
    sent: float
    end: float
    times: tuple[float, ...]
    wanted: int
    usage: Usage | None
    status: str = "ok"
    problem: str = ""

    @property
    def first_seconds(self) -> float | None:
        """From when it was due to its first text; to its end, if an answer had none. None for what failed."""
        if self.status != "ok":
            return None
        return (self.times[0] if self.times else self.end) - self.due

    @property
    def tokens(self) -> int:
        """Of the answer: as the server counts, or the pieces of its text."""
        return len(self.times) if self.usage is None else self.usage.answer_tokens

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece of text to the next one."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def is_good(self, bounds: Bounds) -> bool:
        """Whether it was answered, and the first token and the others on average came within the bounds."""
        first = self.first_seconds
        if first is None or first > bounds.first_seconds:
            return False
        return self.tokens < 2 or self.end - self.due - first <= bounds.token_seconds * (self.tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the times of pieces count from when it was due, in milliseconds."""
        plain = asdict(self)
        plain["usage"] = None if self.usage is None else self.usage._asdict()
        del plain["times"]
        pieces = [round((time - self.due) * 1000, 1) for time in self.times]
        return {
            **{name: round(value, 4) if isinstance(value, float) else value for name, value in plain.items()},
            "piece_ms": pieces,
        }
