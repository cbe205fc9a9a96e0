"""Reply: an answer that ends with its client: who goes away, ends the work for it, in a stream or before the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.server.failure import ApiError, failure_of

__all__ = ["FailureReply", "Reply", "StreamReply", "WholeReply"]

log = logging.getLogger(__name__)

End = Callable[[Scope], Awaitable[None]]

SLACK_SECONDS = 1.0
"""Behind the deadline, for the error that says so to be read."""

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


class FailureReply(Response):
    """An error in OpenAI's form."""

    media_type = JSON

    def __init__(self, failure: ApiError) -> None:
        """failure: what went wrong."""
        super().__init__(failure.encoded, failure.status, failure.headers)


class Reply(Response):
    """Runs `_answer` until it ends or the client has gone, which cancels it."""

    def __init__(self, end: End, seconds: float) -> None:
        """end: called once, whatever happens, to give back what was taken for the answer. seconds: to the request's
        deadline; a client that has not read its answer SLACK_SECONDS later is disconnected.
        """
        super().__init__()
        self._end, self._seconds = end, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI app."""
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            timeout = max(self._seconds, 0) + SLACK_SECONDS
            done, _ = await asyncio.wait({answering, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                scope.setdefault("fields", {})["disconnected"] = True
            if not done:
                log.warning("a client did not read its answer until the deadline: its connection is closed")
                if abort := scope.get("state", {}).get("abort"):  # of `LimitedProtocol`; closing would wait for it
                    abort()
        finally:
            gone.cancel()
            answering.cancel()
            # its `finally` blocks give back what it holds, before the request counts as over
            (result, _) = await asyncio.gather(answering, gone, return_exceptions=True)
            await self._end(scope)
        if isinstance(result, OSError):  # the client went while it was written to
            scope.setdefault("fields", {})["disconnected"] = True
        elif isinstance(result, Exception):
            raise result

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(Reply):
    """JSON that is made when it is asked for."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], end: End, seconds: float) -> None:
        """make: raises what `failure_of` takes."""
        super().__init__(end, seconds)
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = Response(await self._make(), media_type=JSON)
        except Exception as error:
            reply = FailureReply(noted(error))
        await reply(scope, receive, send)


class StreamReply(Reply):
    """Server-sent events. What fails behind the first is an event of its own, and the stream ends."""

    def __init__(self, chunks: AsyncIterator[bytes], end: End, seconds: float) -> None:
        """chunks: one or more events each; the last one is for them to tell."""
        super().__init__(end, seconds)
        self._chunks = chunks

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError:  # the client has gone
            raise
        except Exception as error:
            failed = noted(error)
            scope.setdefault("fields", {})["failed"] = failed.code or failed.status
            event = b"data: " + failed.encoded + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def noted(error: Exception) -> ApiError:
    """What the client is told; what is not its fault is logged, and words that it is not told."""
    failure = failure_of(error)
    if failure.status >= 500 and failure.status not in (503, 504):
        log.error("a request failed", exc_info=error)
    elif isinstance(cause := error.__cause__ or error, RetrievalAttentionError) and str(cause) != failure.message:
        log.info("a request was refused: %s: %s", type(cause).__name__, cause)
    return failure


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
