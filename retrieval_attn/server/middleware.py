"""Middleware of all requests: request id, check of the host, access log, metrics."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieval_attn.server.failure import ApiError, has_messages_form
from retrieval_attn.server.logs import REQUEST_ID
from retrieval_attn.server.service import Service
from retrieval_attn.server.streaming import FailureReply, noted

log = logging.getLogger(__name__)

PROBES = ("/", "/health")
"""Paths that monitors request under any host name; they reveal and change nothing."""
_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)


class Edge:
    """ASGI middleware. `fields` of a request's scope are added to its log line."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        """app: the next ASGI app."""
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, answer and log one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server sends no body where its own scope has HEAD
        scope["fields"] = {}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id") if has_messages_form(scope["path"]) else (b"x-request-id",)
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            try:
                self._check_host(scope)
                await self._app(scope, receive, sending)
            except Exception as error:
                if status:
                    raise
                await FailureReply(noted(error))(scope, receive, sending)
        finally:
            self._note(scope, status, time.perf_counter() - began)
            REQUEST_ID.reset(token)

    def _check_host(self, scope: Scope) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise ApiError(400, f"A request must have one Host header (RFC 9112, section 3.2), got {len(hosts)}.")
        if scope["path"] not in PROBES and self._service.hosts is not None:
            origins = [value for name, value in scope["headers"] if name == b"origin"]
            self._service.hosts.check(hosts[0] if hosts else b"", origins)

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
        level = logging.DEBUG if route in ("/", "/health", "/metrics", "/status") and status == 200 else logging.INFO
        log.log(
            level, "%s %s %s", scope["method"], scope["path"][:200], status, extra={"fields": fields | scope["fields"]}
        )
