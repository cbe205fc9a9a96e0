"""Admission control: bounds on queued requests and tokens, and on the expected time to first token."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from retrieval_attn.engine.ids import Ids, common
from retrieval_attn.server.failure import ApiError

REMEMBERED = 64
"""First tokens. Fewer, and what is read together makes the pace jump; more, and it is that of another load."""

UNPACED = 16
"""Requests that may wait while the pace is not known at all: as many as an engine answers at once by default."""


class Pace:
    """Rate at which one queue is served, measured while it is not empty. Used in one event loop.

    tokens: of the queued requests.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """now: seconds of a clock that does not go back."""
        self._now = now
        self.token_seconds: float | None = None  # see `Admission.expect`
        self._requests = self.tokens = 0  # that wait
        self._busy, self._since = 0.0, 0.0  # seconds in which a request waited, up to a time
        self._served: deque[tuple[float, int]] = deque([(0.0, 0)], REMEMBERED + 1)  # busy seconds then, tokens
        self._served_tokens = 0  # of all in `_served` but the first, which only begins the time

    def enter(self, tokens: int) -> None:
        """Another one waits. tokens: of its prompt."""
        self._pass()
        self._requests += 1
        self.tokens += tokens

    def add_tokens(self, tokens: int) -> None:
        """One of them has more tokens to be read than before."""
        self.tokens += tokens

    def leave(self, tokens: int, *, served: bool) -> None:
        """One of them waits no more. served: it has its first token."""
        self._pass()
        self._requests -= 1
        self.tokens -= tokens
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
        if not served and self.token_seconds is None:
            return self._busy if self._requests < UNPACED else math.inf
        if not served:
            return max(self._busy, self.tokens * (self.token_seconds or 0.0))
        spent = self._busy - self._served[0][0]
        by_requests = spent * self._requests / served
        if not self._served_tokens:
            return by_requests
        return min(by_requests, spent * self.tokens / self._served_tokens)

    def _pass(self) -> None:
        now = self._now()
        self._busy += (now - self._since) if self._requests else 0.0
        self._since = now


MAX_RETRY_SECONDS = 60
SHORT_TOKENS = 2048
"""Longer prompts have their own queue: the engine prefills them one at a time, and shorter ones overtake them."""


SHARED_TOKENS = 64
"""First tokens that prompts must share for one prefill to serve both, as in `RadixCache`."""


class QueuedPrompt(NamedTuple):
    """Prompt of a queued request.

    Attributes:
        ids: int32 (tokens,).
        scope: requests of one scope share prefills, such as those of one API key; None: this one shares none.
    """

    ids: Ids
    scope: Hashable | None

    @property
    def key(self) -> Hashable:
        """Return a key that is the same for all prompts that may share a prefill with this one."""
        return self.scope, self.ids[:SHARED_TOKENS].tobytes()


class Admission:
    """Bounds of the request queue. Used in one event loop.

    A prefix that several queued prompts begin with is prefilled once, and its tokens are counted once. A long prompt is
    not refused because of the prefill that reads its prefix: it waits for that in any case.
    """

    def __init__(
        self, requests: int, tokens: int, seconds: float = math.inf, now: Callable[[], float] = time.monotonic
    ) -> None:
        """requests, tokens: maximum queued. seconds: maximum expected time to first token, estimated by `Pace`.

        An empty queue accepts one request of any length. now: clock in seconds.
        """
        self._most_requests, self._most_tokens, self._most_seconds = requests, tokens, seconds
        self.requests = self.tokens = 0
        self._paces = {is_long: Pace(now) for is_long in (False, True)}
        self._queued: dict[Hashable, list[QueuedRequest]] = {}  # by key, those that may share a prefill

    def expect(self, short: float, long: float) -> None:
        """Estimate waits by these prefill seconds per token of short and long prompts until requests were served; 0:
        accept all meanwhile.
        """
        self._paces[False].token_seconds, self._paces[True].token_seconds = short, long

    def expected_seconds(self, tokens: int, joined: int = 0) -> float:
        """Return the seconds until all queued requests of this length class have their first token.

        joined: tokens that one of them prefills, whose time is not counted.
        """
        pace = self._paces[tokens > SHORT_TOKENS]
        seconds = pace.seconds()
        return seconds if not joined or math.isinf(seconds) else seconds * (1 - joined / pace.tokens)

    def enter(self, *prompts: QueuedPrompt) -> list[QueuedRequest]:
        """Queue the prompts of a request's choices, all or none. Raises ApiError: 503, with Retry-After."""
        first = max(prompts, key=lambda prompt: len(prompt.ids))
        longest, pace = len(first.ids), self._paces[len(first.ids) > SHORT_TOKENS]
        seconds = self.expected_seconds(longest, self._joined_tokens(first, pace) if longest > SHORT_TOKENS else 0)
        counts = [self._unread_tokens(prompt, prompts[:number]) for number, prompt in enumerate(prompts)]
        many = self.requests + len(prompts) > self._most_requests
        if self.requests and (many or self.tokens + sum(counts) > self._most_tokens or seconds > self._most_seconds):
            retry = max(1, math.ceil(min(MAX_RETRY_SECONDS, seconds)))
            raise ApiError(
                503,
                f"{self.requests} requests with {self.tokens:,} tokens are queued, of at most {self._most_requests} "
                f"and {self._most_tokens:,}; another would wait about {seconds:.1f} s for its first token, of at most "
                f"{self._most_seconds:g} s. Send it again in {retry} s.",
                code="queue_full",
                retry_after=retry,
            )
        queued = [QueuedRequest(self, pace, *each) for each in zip(prompts, counts, strict=True)]
        for one in queued:
            self.requests += 1
            self.tokens += one.tokens
            pace.enter(one.tokens)
            if one.prompt.scope is not None:
                self._queued.setdefault(one.prompt.key, []).append(one)
        return queued

    def leave(self, request: QueuedRequest, *, served: bool) -> None:
        """Remove a request. If it was not served, another one reads the tokens that both begin with."""
        self.requests -= 1
        self.tokens -= request.tokens
        prompt = request.prompt
        if prompt.scope is None:
            return
        others = self._queued[prompt.key]
        others.remove(request)
        if not others:
            del self._queued[prompt.key]
        elif not served:
            shared, number = max((common(one.prompt.ids, prompt.ids), -n) for n, one in enumerate(others))
            more = shared - (len(prompt.ids) - request.tokens)
            if more > 0:
                self.tokens += more
                others[-number].add_tokens(more)

    def _joined_tokens(self, prompt: QueuedPrompt, pace: Pace) -> int:
        """Return the tokens that the queued request reads whose prompt has most in common with this one; 0: none."""
        others = [one for one in self._queued.get(prompt.key, ()) if one.pace is pace]  # none without a scope
        return max(((common(prompt.ids, one.prompt.ids), one.tokens) for one in others), default=(0, 0))[1]

    def _unread_tokens(self, prompt: QueuedPrompt, before: Iterable[QueuedPrompt]) -> int:
        """Return the tokens of a prompt that neither a queued one nor one of `before` begins with."""
        if prompt.scope is None:
            return len(prompt.ids)
        others = [one.prompt.ids for one in self._queued.get(prompt.key, ())]
        others += [one.ids for one in before if one.key == prompt.key]
        return len(prompt.ids) - max((common(prompt.ids, ids) for ids in others), default=0)


class QueuedRequest:
    """One queued request. pace: of its queue. prompt: its prompt. tokens: those of it that are prefilled for it, not
    for another one.
    """

    def __init__(self, admission: Admission, pace: Pace, prompt: QueuedPrompt, tokens: int) -> None:
        """Made by `Admission.enter`."""
        self._admission: Admission | None = admission
        self.pace, self.prompt, self.tokens = pace, prompt, tokens

    def add_tokens(self, tokens: int) -> None:
        """Count tokens that a request before it, which is gone, would have read."""
        self.tokens += tokens
        self.pace.add_tokens(tokens)

    def leave(self, *, served: bool = False) -> bool:
        """Leave the queue. Return False if it had left. served: it has its first token; otherwise it was cancelled."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.leave(self, served=served)
            self.pace.leave(self.tokens, served=served)
        return admission is not None
