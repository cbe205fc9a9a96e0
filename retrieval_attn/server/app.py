"""The app: routes behind the edge, and every error in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import retrieval_attn
from retrieval_attn.server import answering, context_routes, routes
from retrieval_attn.server.failure import ApiError, failure_of, invalid
from retrieval_attn.server.middleware import Edge
from retrieval_attn.server.permissions import Permission, authorize
from retrieval_attn.server.service import Service
from retrieval_attn.server.streaming import FailureReply, noted

__all__ = ["make_app"]

METHODS = ("get", "post", "delete")


class App(FastAPI):
    """FastAPI's, with a schema that says what this server answers to a wrong body."""

    def openapi(self) -> dict[str, Any]:
        """OpenAPI, made once."""
        if not self.openapi_schema:
            schema: dict[str, Any] = super().openapi()
            for path in schema["paths"].values():
                for method in METHODS:
                    path.get(method, {}).get("responses", {}).pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
        return self.openapi_schema or {}


def make_app(service: Service) -> FastAPI:
    """An app that answers by this service; it does not end it."""
    app = App(
        title="retrieval-attn", version=retrieval_attn.__version__, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.service = service
    for one in (answering.router, context_routes.router, routes.router, routes.open_router, routes.admin_router):
        app.include_router(one)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    for kind in (ApiError, retrieval_attn.RetrievalAttentionError):
        app.add_exception_handler(kind, _failed)
    if service.settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Edge, service=service)
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """OpenAI's status for a body that is not as it should be is 400."""
    assert isinstance(error, RequestValidationError)
    return FailureReply(invalid(error.errors()))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if "caller" not in request.scope:  # no route was reached: callers without a key learn nothing of paths
        try:
            authorize(request.app.state.service.keys, request.scope, Permission.USER)
        except ApiError as refused:
            return FailureReply(refused)
    reply = FailureReply(_refusal(request, error))
    for name, value in (error.headers or {}).items():
        reply.headers[name] = value
    return reply


def _refusal(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        paths = [(one, methods) for one, methods in request.app.openapi()["paths"].items() if "{" not in one]
        served = ", ".join(f"{kind.upper()} {one}" for one, methods in paths for kind in methods)
        return ApiError(404, f"There is no {method} {path} here; this server has {served}.", code="unknown_url")
    if error.status_code == 405:
        return ApiError(405, f"{path} takes {(error.headers or {}).get('Allow')}, got {method}.")
    return ApiError(error.status_code, str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    return FailureReply(noted(error) if isinstance(error, Exception) else failure_of(error))
