"""Pace: how fast requests get their first tokens of late, and so how long those that wait will wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

__all__ = ["Pace"]

REMEMBERED = 64
"""First tokens. Fewer, and what is read together makes the pace jump; more, and it is that of another load."""

UNPACED = 16
"""Requests that may wait while the pace is not known at all: as many as an engine answers at once by default."""


class Pace:
    """Of one line. Counts only time in which somebody waits: an idle server is not slow. Used in one event loop."""

    def __init__(self, now: Callable[[], float], token_seconds: float | None = None) -> None:
        """now: seconds of a clock that does not go back. token_seconds: to read one token of a prompt, used until a
        request was served; None: not known.
        """
        self._now, self._token_seconds = now, token_seconds
        self._requests = self._tokens = 0  # that wait
        self._busy, self._since = 0.0, 0.0  # seconds in which somebody waited, up to a time
        self._served: deque[tuple[float, int]] = deque([(0.0, 0)], REMEMBERED + 1)  # busy seconds then, tokens
        self._served_tokens = 0  # of all in `_served` but the first, which only begins the time

    def enter(self, tokens: int) -> None:
        """Another one waits. tokens: of its prompt."""
        self._pass()
        self._requests += 1
        self._tokens += tokens

    def leave(self, tokens: int, *, served: bool) -> None:
        """One of them waits no more. served: it has its first token."""
        self._pass()
        self._requests -= 1
        self._tokens -= tokens
        if served:
            if len(self._served) > REMEMBERED:
                self._served_tokens -= self._served[1][1]
            self._served.append((self._busy, tokens))
            self._served_tokens += tokens

    def seconds(self) -> float:
        """Until all that wait are served.

        While none was served, this is an estimate from the time to read a token; without one, it is the time that they
        have waited so far, and infinite for more than UNPACED requests: nothing then shows that they will be served.

        By requests or by tokens, whichever is sooner: rows may be what is short, or reading, and a few long prompts
        must not make short ones look slow.
        """
        self._pass()
        served = len(self._served) - 1
        if not self._requests:
            return 0.0
        if not served and self._token_seconds is None:
            return self._busy if self._requests < UNPACED else math.inf
        if not served:
            return max(self._busy, self._tokens * (self._token_seconds or 0.0))
        spent = self._busy - self._served[0][0]
        by_requests = spent * self._requests / served
        if not self._served_tokens:
            return by_requests
        return min(by_requests, spent * self._tokens / self._served_tokens)

    def _pass(self) -> None:
        now = self._now()
        self._busy += (now - self._since) if self._requests else 0.0
        self._since = now
