"""Routes about the server itself: models, health, version, tokens, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import retrieval_attn
from retrieval_attn.server.failure import ApiError, text_from
from retrieval_attn.server.permissions import AdminRoute, OpenRoute, UserRoute
from retrieval_attn.server.prompts import Extras
from retrieval_attn.server.request_bodies import TokenizeBody
from retrieval_attn.server.response_bodies import ERRORS, ErrorAnswer, Health, ModelList, ModelRecord, Tokens, Version
from retrieval_attn.server.service import Service, service_of

__all__ = ["admin_router", "open_router", "router"]

router = APIRouter(tags=["server"], route_class=UserRoute)
open_router = APIRouter(tags=["server"], route_class=OpenRoute)
admin_router = APIRouter(tags=["server"], route_class=AdminRoute)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models", response_model=None, responses=ERRORS | {200: {"model": ModelList}})
async def models(request: HttpRequest) -> Response:
    """The model, and every saved context of it as a model of its own: MODEL@NAME."""
    service = service_of(request)
    found = [_record(service, service.settings.name, service.created)]
    for one in await service.contexts.listed():
        found.append(_record(service, f"{service.settings.name}@{one.name}", int(one.saved_at)))
    return JSONResponse({"object": "list", "data": found})


@router.get("/v1/models/{name:path}", response_model=None, responses=ERRORS | {200: {"model": ModelRecord}})
async def model(name: str, request: HttpRequest) -> Response:
    """One of them."""
    service = service_of(request)
    context = service.context_of(name, None)
    created = service.created if context is None else int((await service.contexts.named(context)).saved_at)
    return JSONResponse(_record(service, name, created))


def _record(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "retrieval-attn",
        "max_model_len": service.prompts.positions,
    }


@open_router.get("/", response_model=None, responses={200: {"model": Version}})
async def root() -> Response:
    """What this is; clients look here whether somebody listens."""
    return JSONResponse({"version": retrieval_attn.__version__})


@router.get("/openapi.json", include_in_schema=False, response_model=None)
async def schema(request: HttpRequest) -> Response:
    """The API's description."""
    return JSONResponse(request.app.openapi())


@open_router.get("/health", response_model=None, responses={200: {"model": Health}, 503: {"model": ErrorAnswer}})
async def health(request: HttpRequest) -> Response:
    """200 while the engine answers, 503 while it is lost."""
    lost = service_of(request).client.lost
    if lost is not None:
        raise ApiError(503, f"The engine is lost: {lost}", code="engine_lost", retry_after=5)
    return JSONResponse({"status": "ok"})


@open_router.get("/version", response_model=None, responses={200: {"model": Version}})
async def version() -> Response:
    """Of this package."""
    return JSONResponse({"version": retrieval_attn.__version__})


@router.post("/tokenize", response_model=None, responses=ERRORS | {200: {"model": Tokens}})
async def tokenize(body: TokenizeBody, request: HttpRequest) -> Response:
    """Token ids of a text or a conversation, as the model would read them."""
    service = service_of(request)
    if body.model is not None:
        service.context_of(body.model, None)
    prompts = service.prompts

    def parts() -> Any:
        if body.messages is None:
            return prompts.of_text(body.prompt or "", begins=body.add_special_tokens is not False)
        extras = Extras(
            body.tools or [],
            body.chat_template_kwargs or {},
            answering=body.add_generation_prompt is not False,
            specials=body.add_special_tokens,
        )
        return prompts.of_messages([message.turn for message in body.messages], extras)

    with text_from("prompt" if body.messages is None else "messages"):
        ids = [token for part in await asyncio.to_thread(parts) for token in part]
    return JSONResponse({"count": len(ids), "max_model_len": prompts.positions, "tokens": ids})


@admin_router.get(
    "/metrics",
    response_model=None,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 401: ERRORS[401], 403: ERRORS[403]},
    response_class=Response,
)
async def metrics(request: HttpRequest) -> Response:
    """In Prometheus' form."""
    service = service_of(request)
    stats = None if service.client.lost is not None else await service.client.stats()
    return Response(service.metrics.text(stats, service.admission.requests), media_type=METRICS_TYPE)
