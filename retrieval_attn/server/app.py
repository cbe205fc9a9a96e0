"""The app: all routes behind the middleware, endpoints about the server itself, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase

import retrieval_attn
from retrieval_attn.server import answering, context_routes, messages, responses
from retrieval_attn.server.answer_bodies import (
    ERRORS,
    Detokenized,
    ErrorAnswer,
    Health,
    MessagesModelList,
    ModelList,
    ModelRecord,
    Props,
    Tokens,
    Version,
)
from retrieval_attn.server.answer_parts import template_text
from retrieval_attn.server.failure import ApiError, failure_of, invalid, text_from
from retrieval_attn.server.middleware import Edge
from retrieval_attn.server.page import page_router, status_router
from retrieval_attn.server.permissions import AdminRoute, OpenRoute, Permission, UserRoute, authorize
from retrieval_attn.server.prompts import Extras
from retrieval_attn.server.protocol import DetokenizeBody, TokenizeBody
from retrieval_attn.server.service import Service, service_of
from retrieval_attn.server.streaming import FailureReply, noted

router = APIRouter(tags=["server"], route_class=UserRoute)
open_router = APIRouter(tags=["server"], route_class=OpenRoute)
admin_router = APIRouter(tags=["server"], route_class=AdminRoute)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models", response_model=None, responses=ERRORS | {200: {"model": ModelList | MessagesModelList}})
async def models(request: Request) -> Response:
    """List the model by all its names, and every saved context as a model MODEL@NAME."""
    service = service_of(request)
    found = [_record(service, name, service.created) for name in service.settings.names]
    for one in await service.contexts.listed():
        found.append(_record(service, f"{service.settings.name}@{one.name}", int(one.created)))
    if "anthropic-version" in request.headers:
        listed = [_messages_record(one) for one in found]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return JSONResponse({"data": listed, "has_more": False, **ends})
    return JSONResponse({"object": "list", "data": found})


def _messages_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a model's record in Anthropic's form."""
    created = datetime.datetime.fromtimestamp(record["created"], datetime.UTC).isoformat()
    name, most = record["id"], record["max_model_len"]
    return {"type": "model", "id": name, "display_name": name, "created_at": created, "max_input_tokens": most}


@router.get("/v1/models/{name:path}", response_model=None, responses=ERRORS | {200: {"model": ModelRecord}})
async def model(name: str, request: Request) -> Response:
    """Describe a model."""
    service = service_of(request)
    context = service.context_of(name, None)
    created = service.created if context is None else int((await service.contexts.named(context)).created)
    return JSONResponse(_record(service, name, created))


def _record(service: Service, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "retrieval-attn",
        "max_model_len": service.prompts.positions,
    }


@router.get("/openapi.json", include_in_schema=False, response_model=None)
async def schema(request: Request) -> Response:
    """Return the OpenAPI description."""
    return JSONResponse(request.app.openapi())


@open_router.get("/health", response_model=None, responses={200: {"model": Health}, 503: {"model": ErrorAnswer}})
async def health(request: Request) -> Response:
    """Return 200 while the engine answers, with what it still captures, and 503 while it is down."""
    client = service_of(request).client
    if client.lost is not None:
        raise ApiError(503, f"The engine is down: {client.lost}", code="engine_lost", retry_after=5)
    warming = client.warming
    return JSONResponse({"status": "ok"} | ({} if warming is None else {"warming": str(warming)}))


@open_router.get("/version", response_model=None, responses={200: {"model": Version}})
async def version() -> Response:
    """Return the version of this package."""
    return JSONResponse({"version": retrieval_attn.__version__})


@router.post("/tokenize", response_model=None, responses=ERRORS | {200: {"model": Tokens}})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
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
        turns = [message.turn for message in body.messages]
        return prompts.of_messages(turns, extras, prompts.images_of(turns))

    with text_from("prompt" if body.messages is None else "messages"):
        ids = prompts.plain([token for part in await asyncio.to_thread(parts) for token in part])
    answer = {"count": len(ids), "max_model_len": prompts.positions, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [_word(prompts.tokenizer, token) for token in ids]
    return JSONResponse(answer)


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    word = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    return word if isinstance(word, str) else ""


@router.post("/detokenize", response_model=None, responses=ERRORS | {200: {"model": Detokenized}})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    service = service_of(request)
    if body.model is not None:
        service.context_of(body.model, None)
    tokenizer = service.prompts.tokenizer
    if (most := max(body.tokens, default=0)) >= len(tokenizer):
        raise ApiError(400, f"The tokenizer has {len(tokenizer)} tokens, got the id {most}.", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


@router.get("/props", response_model=None, responses=ERRORS | {200: {"model": Props}})
async def props(request: Request) -> Response:
    """Return facts of the model, as llama.cpp's server does."""
    service = service_of(request)
    tokenizer, calls = service.prompts.tokenizer, service.answer_format.calls
    return JSONResponse(
        {
            "model_alias": service.settings.name,
            "default_generation_settings": {"n_ctx": service.prompts.positions, "params": dict(service.sampling)},
            "chat_template": template_text(tokenizer),
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "modalities": {"vision": service.prompts.reads_images, "audio": False},
            "tool_format": None if calls is None else calls.name,
            "build_info": f"retrieval-attn {retrieval_attn.__version__}",
        }
    )


@admin_router.get(
    "/metrics",
    response_model=None,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 401: ERRORS[401], 403: ERRORS[403]},
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    service = service_of(request)
    stats = None if service.client.lost is not None else await service.client.stats()
    return Response(service.metrics.text(stats, service.admission.requests), media_type=METRICS_TYPE)


METHODS = ("get", "post", "delete")


class App(FastAPI):
    """A FastAPI app whose schema has this server's error responses."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema, made once."""
        if not self.openapi_schema:
            schema: dict[str, Any] = super().openapi()
            for path in schema["paths"].values():
                for method in METHODS:
                    path.get(method, {}).get("responses", {}).pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
        return self.openapi_schema or {}


def make_app(service: Service) -> FastAPI:
    """Make the app of a service, which it does not close."""
    app = App(
        title="retrieval-attn", version=retrieval_attn.__version__, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.state.service = service
    routers = (
        answering.router, messages.router, responses.router, context_routes.router, page_router, status_router, router,
        open_router, admin_router,
    )  # fmt: skip
    for one in routers:
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
    """Answer an invalid body with 400, as OpenAI does."""
    assert isinstance(error, RequestValidationError)
    return FailureReply(invalid(error.errors()))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if "caller" not in request.scope:  # no route matched: callers without a key learn nothing about paths
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
