"""The status page at `/`, and `GET /status`, which it polls: texts held, requests, memory, counts.

The page is one file without external resources. It is public and has no data; `/status` needs a key. An admin sees
everything; other callers see their own requests and texts, and the names of saved contexts.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

import retrieval_attn
from retrieval_attn.engine.background_saves import ContextState
from retrieval_attn.server.access import Caller
from retrieval_attn.server.answer_bodies import ERRORS, StatusRecord
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.permissions import OpenRoute, UserRoute
from retrieval_attn.server.service import Service, caller_of, service_of

page_router = APIRouter(tags=["server"], route_class=OpenRoute)
status_router = APIRouter(tags=["server"], route_class=UserRoute)

SHOWN = 100
"""Saved contexts in a status, the last saved first."""
HEAD_TOKENS = 40
HEAD_CHARACTERS = 160
"""Of the start of each text."""


def _policy(page: str) -> str:
    """Return the Content-Security-Policy that allows the page's own script and style, and requests to its server."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in found)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
HEADERS = {
    "content-security-policy": _policy(PAGE),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of the page."""


def page_response() -> Response:
    """Return the page, also while the model loads."""
    return Response(PAGE, headers=HEADERS, media_type="text/html; charset=utf-8")


@page_router.get(
    "/", response_model=None, response_class=Response,
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def page() -> Response:
    """Return the status page for a browser."""
    return page_response()


RESPONSES: dict[int | str, dict[str, Any]] = {401: ERRORS[401], 503: ERRORS[503], 200: {"model": StatusRecord}}


@status_router.get("/status", response_model=None, responses=RESPONSES)
async def status(request: HttpRequest) -> Response:
    """Return texts, requests, memory and counts; without an admin's key only the caller's texts and requests."""
    service, caller = service_of(request), caller_of(request)
    if service.client.lost is not None:
        raise ApiError(503, f"The engine is down: {service.client.lost}", code="engine_lost", retry_after=5)
    held = await service.client.status(None if caller.admin else caller.namespace)
    listed = sorted(await service.contexts.listed(), key=lambda one: -one.created)
    heads = await service.contexts.heads(listed[:SHOWN], HEAD_TOKENS) if caller.admin else []
    if caller.admin:
        held["memory"]["disk"] = {**await service.contexts.disk(), "cache": None, "cache_limit": None}
    found = await asyncio.to_thread(_status, service, caller, held, listed, heads)
    return JSONResponse(found, headers={"cache-control": "no-store"})


def _status(
    service: Service, caller: Caller, held: dict[str, Any], listed: Sequence[ContextState], heads: list[list[int]]
) -> dict[str, Any]:
    texts = held["texts"]
    for one in texts:
        one["text"] = _words(service, one.pop("head"))
        namespace = one.pop("namespace")
        one["key"] = namespace.removeprefix("key:") if caller.admin and namespace else None
    contexts: list[dict[str, Any]] = [
        {"name": one.name, "created": int(one.created), "text": None, "tokens": None, "disk_bytes": None}
        for one in listed[:SHOWN]
    ]
    for record, one, head in zip(contexts, listed, heads, strict=False):
        record |= {"text": _words(service, head), "tokens": one.tokens, "disk_bytes": one.nbytes}
    return {
        "model": service.settings.name,
        "version": retrieval_attn.__version__,
        "warming": None if (warming := service.client.warming) is None else str(warming),
        "max_model_len": service.prompts.positions,
        "caller": caller.name,
        "admin": caller.admin,
        "requests": held["requests"],
        "prefills": held["prefills"],
        "texts": texts,
        "contexts": contexts,
        "contexts_total": len(listed),
        "memory": held.get("memory"),
        "counts": held.get("counts"),
    }


def _words(service: Service, ids: Sequence[int]) -> str:
    """Return the text of ids in one line, cut at HEAD_CHARACTERS."""
    text = service.texts.tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return " ".join(text.split())[:HEAD_CHARACTERS]
