"""Routes with a permission: each states in its class who may use it, and its handler checks that first.

The route that runs and the permission that is checked cannot differ, however a path is written.
"""

from __future__ import annotations

import email.message
import enum
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import params
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Scope

from retrieval_attn.prompt.encode import NAMESPACE
from retrieval_attn.server.access import Keys
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.service import service_of


class Permission(enum.Enum):
    """Key that a route needs."""

    OPEN = enum.auto()
    USER = enum.auto()
    ADMIN = enum.auto()


def authorize(keys: Keys, scope: Scope, permission: Permission) -> None:
    """Put the caller into the scope of a request. Raises ApiError 401, 403."""
    if permission is Permission.OPEN:
        return
    given = {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")}
    if b"authorization" not in given and b"x-api-key" in given:  # Anthropic's clients
        given[b"authorization"] = b"Bearer " + given[b"x-api-key"]
    authorization = given.get(b"authorization")
    caller = keys.caller(None if authorization is None else authorization.decode("latin-1"))
    if caller is None:
        raise ApiError(
            401, "This server needs a key: Authorization: Bearer KEY, or x-api-key: KEY.", code="invalid_api_key"
        )
    scope["caller"] = caller
    NAMESPACE.set(caller.namespace)
    if permission is Permission.ADMIN and not caller.admin:
        raise ApiError(403, "This path needs an admin's key.", code="admin_key_needed")


class GuardedRoute(APIRoute):
    """A route that needs a permission, and reads its body by `Bodies`."""

    permission: ClassVar[Permission]

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()
        info: Any = None if self.body_field is None else self.body_field.field_info

        async def guarded(request: HttpRequest) -> Response:
            service = service_of(request)
            authorize(service.keys, request.scope, self.permission)
            if info is None:
                return await handle(request)
            async with service.bodies.read(request) as body:
                if body is None:
                    return Response(status_code=499)  # the client disconnected
                if isinstance(info, params.Form):
                    return await handle(HttpRequest(request.scope, _received(body)))
                _require_json(request)
                return await handle(ParsedRequest(request, await service.bodies.parse(body, info.annotation)))

        return guarded


class OpenRoute(GuardedRoute):
    """A route without a key."""

    permission = Permission.OPEN


class UserRoute(GuardedRoute):
    """A route for callers with any key."""

    permission = Permission.USER


class AdminRoute(GuardedRoute):
    """A route for admins."""

    permission = Permission.ADMIN


class ParsedRequest(HttpRequest):
    """A request whose body FastAPI finds parsed and validated."""

    def __init__(self, request: HttpRequest, parsed: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        """Not empty."""
        return b"{}"

    async def json(self) -> Any:
        """The instance, which FastAPI's validation takes as it is."""
        return self._parsed


def _require_json(request: HttpRequest) -> None:
    message = email.message.Message()
    message["content-type"] = given = request.headers.get("content-type", "")
    kind = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (kind == "json" or kind.endswith("+json")):
        raise ApiError(400, f"The body must be JSON: send content-type: application/json, got {given[:80]!r}.")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(400, f"A body with content-encoding {encoding[:80]!r} is not read; send it uncompressed.")


def _received(body: bytes) -> Callable[[], Coroutine[Any, Any, Message]]:
    message: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return message.pop() if message else {"type": "http.disconnect"}

    return receive
