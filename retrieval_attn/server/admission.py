"""Admission: how many requests, with how many tokens and for how long, may wait for their first token.

Who would wait longer than that is refused at once, and told when to come again: under twice the load that a server can
bear, those that it takes in are answered about as fast as ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.queue_estimate import Pace

__all__ = ["Admission", "QueuedRequest"]

MAX_RETRY_SECONDS = 60
SHORT_TOKENS = 2048
"""Longer prompts wait in a line of their own: the engine reads them one at a time, and short ones overtake."""


class Admission:
    """Used in one event loop."""

    def __init__(
        self, requests: int, tokens: int, seconds: float = math.inf, now: Callable[[], float] = time.monotonic,
        token_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """What may wait at most, and how long; one request of any length waits if no other of its line does. seconds:
        expected from the pace of late, not measured. now: seconds of a clock. token_seconds: see `Pace`.
        """
        self._most_requests, self._most_tokens, self._most_seconds = requests, tokens, seconds
        self.requests = self.tokens = 0
        self._paces = {is_long: Pace(now, token_seconds) for is_long in (False, True)}

    def expected_seconds(self, tokens: int) -> float:
        """Until all that wait now in the line of a prompt of so many tokens have their first token."""
        return self._paces[tokens > SHORT_TOKENS].seconds()

    def enter(self, *tokens: int) -> list[QueuedRequest]:
        """The choices of a request wait from now on, in one line. tokens: of the prompt of each; 0 where it is that of
        the one before. Raises ApiError: 503, with Retry-After; then none of them waits.
        """
        longest = max(tokens)
        seconds = self.expected_seconds(longest)
        many = self.requests + len(tokens) > self._most_requests
        if self.requests and (many or self.tokens + sum(tokens) > self._most_tokens or seconds > self._most_seconds):
            retry = max(1, math.ceil(min(MAX_RETRY_SECONDS, seconds)))
            raise ApiError(
                503,
                f"{self.requests} requests with {self.tokens:,} tokens wait, of {self._most_requests} and "
                f"{self._most_tokens:,} that may; another one would wait about {seconds:.1f} s for its first token, of "
                f"{self._most_seconds:g} s that it may. Come again in {retry} s.",
                code="queue_full",
                retry_after=retry,
            )
        self.requests += len(tokens)
        self.tokens += sum(tokens)
        pace = self._paces[longest > SHORT_TOKENS]
        for each in tokens:
            pace.enter(each)
        return [QueuedRequest(self, pace, each) for each in tokens]

    def left(self, tokens: int) -> None:
        """One waits no more."""
        self.requests -= 1
        self.tokens -= tokens


class QueuedRequest:
    """One request that waits, or did."""

    def __init__(self, admission: Admission, pace: Pace, tokens: int) -> None:
        """Made by `Admission.enter`."""
        self._admission: Admission | None = admission
        self._pace, self._tokens = pace, tokens

    def leave(self, *, served: bool = False) -> bool:
        """It waits no more; whether it did until now. served: it has its first token; else nobody wants it."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.left(self._tokens)
            self._pace.leave(self._tokens, served=served)
        return admission is not None
