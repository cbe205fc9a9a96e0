"""Endpoints of saved contexts: texts that are prefilled once and then used by name, by any process."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Path, UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from retrieval_attn.engine.background_saves import ContextState
from retrieval_attn.engine.ids import int32_row
from retrieval_attn.server.admission import QueuedPrompt
from retrieval_attn.server.answer_bodies import ERRORS, ContextList, ContextRecord, Deleted
from retrieval_attn.server.failure import ApiError, document_from
from retrieval_attn.server.permissions import AdminRoute
from retrieval_attn.server.protocol import NAME_PATTERN, ForkBody, KeepBody, Message, MoreBody
from retrieval_attn.server.service import Service, caller_of, service_of

router = APIRouter(prefix="/v1/contexts", tags=["contexts"], route_class=AdminRoute)

Name = Annotated[str, Path(pattern=NAME_PATTERN)]
RECORD: dict[int | str, dict[str, Any]] = ERRORS | {200: {"model": ContextRecord}}


@router.get("", response_model=None, responses=ERRORS | {200: {"model": ContextList}})
async def listed(request: HttpRequest) -> Response:
    """List the contexts that the model can continue."""
    service = service_of(request)
    found = [_record(service, one) for one in await service.contexts.listed()]
    return JSONResponse({"object": "list", "data": found})


@router.post("", response_model=None, responses=RECORD)
async def make(body: KeepBody, request: HttpRequest) -> Response:
    """Prefill a text or a conversation and begin to save it under a name; replace an existing context of that name."""
    prompts = service_of(request).prompts
    text, messages = body.text, body.messages
    with document_from("text" if messages is None else "messages"):
        if messages is not None:
            ids = await asyncio.to_thread(prompts.of_conversation, _turns(messages))
        else:
            ids = await asyncio.to_thread(prompts.of_document, text or "")
        return await _made(request, body.name, ids, None)


@router.post("/files", response_model=None, responses=RECORD)
async def upload(
    request: HttpRequest, name: Annotated[str, Form(pattern=NAME_PATTERN)], file: Annotated[UploadFile, File()]
) -> Response:
    """Prefill a text file in UTF-8 and begin to save it under a name; replace an existing context of that name."""
    data = await file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"A file must be text in UTF-8, got byte {data[error.start]:#04x} at {error.start}; convert it.",
            param="file",
        ) from error  # fmt: skip
    with document_from("file"):
        ids = await asyncio.to_thread(service_of(request).prompts.of_document, text)
        return await _made(request, name, ids, None)


@router.get("/{name}", response_model=None, responses=RECORD)
async def one(name: Name, request: HttpRequest) -> Response:
    """Describe a context."""
    service = service_of(request)
    return JSONResponse(_record(service, await service.contexts.named(name)))


@router.delete("/{name}", response_model=None, responses=ERRORS | {200: {"model": Deleted}})
async def remove(name: Name, request: HttpRequest) -> Response:
    """Delete a context and cancel its write; running requests keep using it."""
    await service_of(request).contexts.remove(name)
    return JSONResponse({"id": name, "object": "context", "deleted": True})


@router.post("/{name}/save", response_model=None, responses=RECORD)
async def more(name: Name, body: MoreBody, request: HttpRequest) -> Response:
    """Extend a saved context and save the result under a name; only the new text is prefilled and written."""
    prompts = service_of(request).prompts
    with document_from("text" if body.messages is None else "messages"):
        if body.messages is not None:
            ids = await asyncio.to_thread(prompts.of_answered, _turns(body.messages))
        else:
            ids = await asyncio.to_thread(prompts.of_more, body.text or "")
        return await _made(request, body.name, ids, name)


@router.post("/{name}/fork", response_model=None, responses=RECORD)
async def fork(name: Name, body: ForkBody, request: HttpRequest) -> Response:
    """Give a context a second, independent name; nothing is copied."""
    service = service_of(request)
    return JSONResponse(_record(service, await service.contexts.fork(name, body.name)))


async def _made(request: HttpRequest, name: str, ids: tuple[int, ...], context: str | None) -> Response:
    service = service_of(request)
    namespace = caller_of(request).namespace
    (waiting,) = service.admission.enter(QueuedPrompt(int32_row(ids), (namespace, context)))
    try:
        made = await service.contexts.make(name, ids, context, namespace)
        waiting.leave(served=True)
    finally:
        waiting.leave()
    return JSONResponse(_record(service, made))


def _turns(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.turn for message in messages]


def _record(service: Service, context: ContextState) -> dict[str, Any]:
    error = {} if context.error is None else {"error": context.error}
    return {
        "id": context.name,
        "object": "context",
        "model": f"{service.settings.name}@{context.name}",
        "tokens": context.tokens,
        "bytes": context.nbytes,
        "created": int(context.created),
        "durable": context.durable,
        **error,
    }
