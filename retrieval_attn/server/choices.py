"""Choices: the answers of one request under way, several where it asks for several, in one queue with one deadline."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Self

from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.server.admission import Admission, QueuedRequest
from retrieval_attn.server.client import EngineClient, Item, Submitted
from retrieval_attn.server.failure import ApiError, failure_of

__all__ = ["Choices"]

MAX_UNREAD = 8192
"""Tokens of a request that wait for its client. Sockets hold some hundred kilobytes beside them."""


class Choices:
    """Use it in an `async with` block: at its end, nobody wants what is still under way.

    Iterating gives (number of the choice, event or end) until all have ended. Raises ApiError for what fails; the
    others of the request end with it.
    """

    def __init__(self, client: EngineClient, admission: Admission, deadline_seconds: float, field: str) -> None:
        """deadline_seconds: from now. field: of the request's body, that has the prompt."""
        self._client, self._admission = client, admission
        self._began = time.perf_counter()
        self._deadline_seconds = deadline_seconds
        self._queue: asyncio.Queue[tuple[int, Item] | ApiError] = asyncio.Queue()
        self._field = field
        self._requests: Sequence[Request] = ()
        self._submitted: list[Submitted] = []
        self._waiting: list[QueuedRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._overflowed = False
        self.ends: dict[int, Finished] = {}
        self.first_seconds: float | None = None

    async def submit(self, requests: Sequence[Request]) -> None:
        """Raises ApiError where one of them is refused; then none is answered."""
        self._timer = asyncio.get_running_loop().call_later(self._deadline_seconds, self._late)
        tokens = []
        for number, request in enumerate(requests):
            again = number > 0 and request.parts == requests[number - 1].parts  # it is read once
            tokens.append(0 if again else request.prompt_tokens)
        self._waiting = self._admission.enter(*tokens)
        self._requests = requests
        for number, request in enumerate(requests):
            limit = asyncio.timeout(max(self.seconds_left, 0))
            try:
                async with limit:
                    submitted = await self._client.submit(request, functools.partial(self._put, number))
            except Exception as error:
                raise self._too_late() if limit.expired() else self._failure(number, error) from error
            self._submitted.append(submitted)

    @property
    def ids(self) -> list[str]:
        """The engine's, for logs."""
        return [one.id for one in self._submitted]

    @property
    def complete(self) -> bool:
        """Whether all have ended by themselves."""
        return bool(self.ends) and len(self.ends) == len(self._submitted)

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self._deadline_seconds - self.seconds

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._began

    def cancel(self) -> None:
        """Nobody wants the answers any more."""
        for one in self._submitted:
            one.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.cancel()
        for waiting in self._waiting:
            waiting.leave()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Item]]]:
        """All that is there at a time, at least one item."""
        while len(self.ends) < len(self._submitted):
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            found: list[tuple[int, Item]] = []
            for item in items:
                if isinstance(item, ApiError):
                    raise item
                number, what = item
                if isinstance(what, Finished):
                    self._require_answered(number, what)
                    self.ends[number] = what
                found.append((number, what))
            yield found

    def _put(self, number: int, item: Item) -> None:
        served = not isinstance(item, Finished) or (item.error is None and item.reason != "cancelled")
        if self._waiting[number].leave(served=served) and self.first_seconds is None:
            self.first_seconds = self.seconds
        if self._queue.qsize() < MAX_UNREAD:
            self._queue.put_nowait((number, item))
        elif not self._overflowed:
            self._overflowed = True
            self.cancel()
            message = f"The client did not read {MAX_UNREAD:,} tokens of its answer; read the stream while it comes."
            self._queue.put_nowait(ApiError(503, message, code="client_too_slow"))

    def _late(self) -> None:
        self.cancel()  # at once: who should read the answers may be the one who is slow
        self._queue.put_nowait(self._too_late())

    def _too_late(self) -> ApiError:
        message = f"The request was not answered within {self._deadline_seconds:g} s; ask for less, or come again."
        return ApiError(504, message, code="deadline")

    def _require_answered(self, number: int, end: Finished) -> None:
        if end.error is not None:
            raise self._failure(number, end.error) from end.error
        if end.reason == "cancelled":
            raise ApiError(503, "The server ended before the answer did; ask again.", code="cancelled", retry_after=1)

    def _failure(self, number: int, error: BaseException) -> ApiError:
        return failure_of(error, field=self._field, answer_tokens=self._requests[number].max_tokens)
