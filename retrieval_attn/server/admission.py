"""Admission control: bounds on queued requests and tokens, and on the expected time to first token."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from retrieval_attn.server.failure import ApiError

__all__ = ["Admission", "Pace", "QueuedRequest"]

REMEMBERED = 64
"""First tokens. Fewer, and what is read together makes the pace jump; more, and it is that of another load."""

UNPACED = 16
"""Requests that may wait while the pace is not known at all: as many as an engine answers at once by default."""


class Pace:
    """Rate at which one queue is served, measured while it is not empty. Used in one event loop."""

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


MAX_RETRY_SECONDS = 60
SHORT_TOKENS = 2048
"""Longer prompts have their own queue: the engine prefills them one at a time, and shorter ones overtake them."""


class Admission:
    """Bounds of the request queue. Used in one event loop."""

    def __init__(
        self, requests: int, tokens: int, seconds: float = math.inf, now: Callable[[], float] = time.monotonic,
        token_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """requests, tokens: maximum queued. seconds: maximum expected time to first token, estimated by `Pace`.

        An empty queue accepts one request of any length. now: clock in seconds. token_seconds: see `Pace`.
        """
        self._most_requests, self._most_tokens, self._most_seconds = requests, tokens, seconds
        self.requests = self.tokens = 0
        self._paces = {is_long: Pace(now, token_seconds) for is_long in (False, True)}

    def expected_seconds(self, tokens: int) -> float:
        """Return the seconds until all queued requests of this length class have their first token."""
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
                f"{self.requests} requests with {self.tokens:,} tokens are queued, of at most {self._most_requests} "
                f"and {self._most_tokens:,}; another would wait about {seconds:.1f} s for its first token, of at most "
                f"{self._most_seconds:g} s. Send it again in {retry} s.",
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
        """Remove one request from the counts."""
        self.requests -= 1
        self.tokens -= tokens


class QueuedRequest:
    """One queued request."""

    def __init__(self, admission: Admission, pace: Pace, tokens: int) -> None:
        """Made by `Admission.enter`."""
        self._admission: Admission | None = admission
        self._pace, self._tokens = pace, tokens

    def leave(self, *, served: bool = False) -> bool:
        """Leave the queue. Return False if it had left. served: it has its first token; otherwise it was cancelled."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.left(self._tokens)
            self._pace.leave(self._tokens, served=served)
        return admission is not None
