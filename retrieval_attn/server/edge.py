"""Edge: what every request passes before a route: an id, the key, the size of its body; behind it, log and counts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.keys import Caller
from retrieval_attn.server.logs import REQUEST_ID
from retrieval_attn.server.reply import FailureReply, noted
from retrieval_attn.server.service import Service

__all__ = ["Edge"]

log = logging.getLogger(__name__)

OPEN = ("/health", "/version")
"""Paths that need no key."""
ADMIN = ("/metrics", "/v1/contexts")
"""Paths that need an admin's, with all below them."""
BODY_SECONDS = 60.0
_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)


class Edge:
    """An ASGI app around another. The scope of a request gets `caller`, and `fields` for the line in the log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """app: answers what passes."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.perf_counter(), {name: value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        scope["fields"], status = {}, 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            try:
                scope["caller"] = self._caller(scope["path"], headers.get(b"authorization"))
                receiving = await self._with_body(scope, headers, receive)
                if receiving is not None:
                    await self._app(scope, receiving, sending)
            except Exception as error:
                if status:
                    raise
                await FailureReply(noted(error))(scope, receive, sending)
        finally:
            self._note(scope, status, time.perf_counter() - began)
            REQUEST_ID.reset(token)

    def _caller(self, path: str, authorization: bytes | None) -> Caller | None:
        if path in OPEN:
            return None
        caller = self._service.keys.caller(None if authorization is None else authorization.decode("latin-1"))
        if caller is None:
            raise ApiError(401, "This server needs a key: Authorization: Bearer KEY.", code="invalid_api_key")
        if not caller.admin and any(path == one or path.startswith(f"{one}/") for one in ADMIN):
            raise ApiError(403, "This path needs an admin's key.", code="admin_key_needed")
        return caller

    async def _with_body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive | None:
        """The whole body first, which is then received at once; None: the client has gone. Raises ApiError."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
            return receive
        most = self._service.settings.body_bytes
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > most:
            raise _too_large(most)
        pieces: list[bytes] = []
        total = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    total += len(pieces[-1])
                    more = message.get("more_body", False)
                    if total > most:
                        raise _too_large(most)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {BODY_SECONDS:g} s; send it again.") from None
        body: list[Message] = [{"type": "http.request", "body": b"".join(pieces), "more_body": False}]

        async def received() -> Message:
            return body.pop() if body else await receive()

        return received

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._service.metrics.http(scope["method"] if route != "none" else "any", route, status)
        fields = {
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 6),
        }
        caller = scope.get("caller")
        if caller is not None:
            fields["key"] = caller.name
        level = logging.DEBUG if route in ("/health", "/metrics") and status == 200 else logging.INFO
        log.log(
            level, "%s %s %s", scope["method"], scope["path"][:200], status, extra={"fields": fields | scope["fields"]}
        )


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"A body may have {most:,} bytes; send a shorter one, or save the text as a context in parts.")
