"""Admission: how many requests, with how many tokens, may wait for their first token; others come again later."""

from __future__ import annotations

import math

from retrieval_attn.server.failure import ApiError

__all__ = ["Admission", "Waiting"]

MAX_RETRY_SECONDS = 60
NEWEST = 0.2
"""Share of the newest wait in the mean."""


class Admission:
    """Used in one event loop."""

    def __init__(self, requests: int, tokens: int) -> None:
        """What may wait at most; one request of any length waits if no other does."""
        self._most_requests, self._most_tokens = requests, tokens
        self.requests = self.tokens = 0
        self._mean_seconds = 1.0

    def enter(self, tokens: int) -> Waiting:
        """A request with a prompt of so many tokens waits from now on. Raises ApiError: 503, with Retry-After."""
        full = self.requests >= self._most_requests
        if full or (self.requests and self.tokens + tokens > self._most_tokens):
            raise ApiError(
                503,
                f"{self.requests} requests with {self.tokens:,} tokens wait, of {self._most_requests} and "
                f"{self._most_tokens:,} that may; come again later.",
                code="queue_full",
                retry_after=min(MAX_RETRY_SECONDS, 1 + math.ceil(self._mean_seconds)),
            )
        self.requests += 1
        self.tokens += tokens
        return Waiting(self, tokens)

    def left(self, tokens: int, seconds: float | None) -> None:
        """One waits no more. seconds: to its first token; None: it had none."""
        self.requests -= 1
        self.tokens -= tokens
        if seconds is not None:
            self._mean_seconds += NEWEST * (seconds - self._mean_seconds)


class Waiting:
    """One request that waits, or did."""

    def __init__(self, admission: Admission, tokens: int) -> None:
        """Made by `Admission.enter`."""
        self._admission: Admission | None = admission
        self._tokens = tokens

    def leave(self, seconds: float | None = None) -> bool:
        """It waits no more; whether it did until now. seconds: see `Admission.left`."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.left(self._tokens, seconds)
        return admission is not None
