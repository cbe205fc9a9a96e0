"""Replies that are cancelled when their client disconnects: whole JSON answers and event streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.server.failure import ApiError, failure_of
from retrieval_attn.server.logs import REQUEST_ID

log = logging.getLogger(__name__)

End = Callable[[Scope], Awaitable[None]]

SLACK_SECONDS = 1.0
"""Time after the deadline for the client to read the error."""

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


class FailureReply(Response):
    """An error in the form of the API that the request's path belongs to."""

    media_type = JSON

    def __init__(self, failure: ApiError) -> None:
        """failure: status, headers and body."""
        super().__init__(failure.encoded, failure.status, failure.headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI app."""
        self.body = self._failure.encoded_for(scope["path"], REQUEST_ID.get())
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class Reply(Response):
    """Run `_answer` and cancel it if the client disconnects."""

    def __init__(self, end: End, seconds: float) -> None:
        """end: called once in any case, to release the request's resources. seconds: time to the request's deadline.

        A client that has not read its answer SLACK_SECONDS after the deadline is disconnected.
        """
        super().__init__()
        self._end, self._seconds = end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI app."""
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            timeout = max(self._seconds, 0) + SLACK_SECONDS
            done, _ = await asyncio.wait({answering, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                scope.setdefault("fields", {})["disconnected"] = True
            if not done:
                log.warning("client did not read its answer before the deadline; closing the connection")
                if abort := scope.get("state", {}).get("abort"):  # of `LimitedProtocol`; closing would wait for it
                    abort()
        finally:
            gone.cancel()
            answering.cancel()
            # its `finally` blocks release resources before the request ends
            (result, _) = await asyncio.gather(answering, gone, return_exceptions=True)
            await self._end(scope)
        if isinstance(result, OSError):  # the client disconnected during a write
            scope.setdefault("fields", {})["disconnected"] = True
        elif isinstance(result, Exception):
            raise result

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(Reply):
    """One JSON answer."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], end: End, seconds: float) -> None:
        """make: returns the body; its exceptions become error responses."""
        super().__init__(end, seconds)
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = Response(await self._make(), media_type=JSON)
        except Exception as error:
            reply = FailureReply(noted(error))
        await reply(scope, receive, send)


class StreamReply(Reply):
    """Server-sent events. An error after the first event is an event too and ends the stream."""

    def __init__(
        self, chunks: AsyncIterator[bytes], failure: Callable[[ApiError], bytes], end: End, seconds: float
    ) -> None:
        """chunks: one or more events each, with the final one. failure: return the events of an error."""
        super().__init__(end, seconds)
        self._chunks, self._failure = chunks, failure

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError:  # the client disconnected
            raise
        except Exception as error:
            failed = noted(error)
            scope.setdefault("fields", {})["failed"] = failed.code or failed.status
            await send({"type": "http.response.body", "body": self._failure(failed), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def noted(error: Exception) -> ApiError:
    """Return the error for the client; log server errors, and messages that the client does not get."""
    failure = failure_of(error)
    if failure.status >= 500 and failure.status not in (503, 504):
        log.error("request failed", exc_info=error)
    elif isinstance(cause := error.__cause__ or error, RetrievalAttentionError) and str(cause) != failure.message:
        log.info("request refused: %s: %s", type(cause).__name__, cause)
    return failure


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
