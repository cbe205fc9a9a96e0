"""Endpoints of OpenAI's Responses API over the chat endpoint: conversations that continue by the id of a response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from retrieval_attn.engine.request import Request
from retrieval_attn.server.answer_bodies import ERRORS, DeletedResponse, ResponseAnswer
from retrieval_attn.server.answer_parts import AnswerReader
from retrieval_attn.server.answering import EVENTS, answer_chat
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.formatting import Form
from retrieval_attn.server.permissions import UserRoute
from retrieval_attn.server.protocol import ChatBody
from retrieval_attn.server.response_bodies import ResponsesBody, ResponsesForm
from retrieval_attn.server.service import Service, caller_of, service_of
from retrieval_attn.server.stored_responses import StoredResponse

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=UserRoute)
Id = Annotated[str, Path(max_length=256)]


@router.post("", response_model=None, responses=ERRORS | {200: {"model": ResponseAnswer, "content": EVENTS}})
async def respond(body: ResponsesBody, request: HttpRequest) -> Response:
    """Answer a conversation in the form of the Responses API; store the answer unless `store` is false."""
    service, namespace = service_of(request), caller_of(request).namespace
    stored, previous = service.responses, body.previous_response_id
    earlier = None if previous is None else stored.previous(namespace, previous)

    def read() -> tuple[list[dict[str, Any]], ChatBody]:
        before = [turn for said in ([] if earlier is None else earlier.conversation) for turn in json.loads(said)]
        turns = body.turns(before)
        return turns, body.chat([*before, *turns])

    with service.bodies.reserve(0 if earlier is None else earlier.conversation_bytes):
        turns, chat = await asyncio.to_thread(read)

        def form(requests: Sequence[Request], make_reader: Callable[[], AnswerReader]) -> Form:
            def keep(response: dict[str, Any]) -> None:
                if body.store is not False:
                    stored.keep(namespace, response, turns, earlier)

            packs = "reasoning.encrypted_content" in (body.include or ())
            head, tokenizer = body.head(requests[0]), service.prompts.tokenizer
            return ResponsesForm(head, make_reader, tokenizer, keep, body.namespaces, packs_reasoning=packs)

        return await answer_chat(chat, request, form)


@router.get("/{response_id}", response_model=None, responses=ERRORS | {200: {"model": ResponseAnswer}})
async def retrieve(response_id: Id, request: HttpRequest, stream: bool = False) -> Response:
    """Return a stored response, which only its caller's keys can read."""
    if stream:
        raise ApiError(400, "A stored response is not streamed again; leave stream out.", param="stream")
    service = service_of(request)
    return Response(_stored(service, request, response_id).body, media_type="application/json")


@router.delete("/{response_id}", response_model=None, responses=ERRORS | {200: {"model": DeletedResponse}})
async def delete(response_id: Id, request: HttpRequest) -> Response:
    """Delete a stored response. Responses that continue it keep its messages."""
    service = service_of(request)
    _stored(service, request, response_id)
    service.responses.remove(caller_of(request).namespace, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _stored(service: Service, request: HttpRequest, response_id: str) -> StoredResponse:
    found = service.responses.get(caller_of(request).namespace, response_id)
    if found is None:
        raise ApiError(404, f"Response with id {response_id[:80]!r} not found.", code="response_not_found")
    return found
