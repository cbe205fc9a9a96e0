"""The app: routes behind the edge, and every error in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import retrieval_attn
from retrieval_attn.server import answering, context_routes, routes
from retrieval_attn.server.edge import Edge
from retrieval_attn.server.failure import ApiError, failure_of
from retrieval_attn.server.reply import FailureReply, noted
from retrieval_attn.server.service import Service

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
    app = App(title="retrieval-attn", version=retrieval_attn.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for one in (answering.router, context_routes.router, routes.router):
        app.include_router(one)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    for kind in (ApiError, retrieval_attn.RetrievalAttentionError):
        app.add_exception_handler(kind, _failed)
    app.add_middleware(Edge, service=service)
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """OpenAI's status for a body that is not as it should be is 400."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    where = [str(part) for part in found[0]["loc"] if part != "body"] if found else []
    said = "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in found[:5])
    return FailureReply(
        ApiError(400, f"The request is not as it should be: {said}"[:2000], param=".".join(where) or None)
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = FailureReply(ApiError(error.status_code, str(error.detail)))
    for name, value in (error.headers or {}).items():
        reply.headers[name] = value
    return reply


async def _failed(request: Request, error: Exception) -> Response:
    return FailureReply(noted(error) if isinstance(error, Exception) else failure_of(error))
