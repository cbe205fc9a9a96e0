"""POST /v1/chat/completions and /v1/completions: from a body to requests of the engine, from events to an answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from retrieval_attn.engine.request import Event, Request
from retrieval_attn.server.choices import Choices
from retrieval_attn.server.echo import EchoForm
from retrieval_attn.server.failure import ApiError, text_from
from retrieval_attn.server.formatting import DONE, ChatForm, Form, TextForm, usage_of
from retrieval_attn.server.permissions import UserRoute
from retrieval_attn.server.prompts import Extras, Parts, forked
from retrieval_attn.server.request_bodies import ChatBody, CompletionBody, SampledBody
from retrieval_attn.server.response_bodies import ERRORS, ChatAnswer, TextAnswer
from retrieval_attn.server.service import Service, caller_of, service_of
from retrieval_attn.server.streaming import StreamReply, WholeReply

__all__ = ["router"]

router = APIRouter(tags=["answers"], route_class=UserRoute)

COMPLETION_TOKENS = 16
"""Of a text completion that does not say, as OpenAI's."""
MAX_SCORES = 1 << 20
"""Log-probabilities of the tokens of a request's prompts: 512K tokens with `logprobs: 1`."""
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": EVENT}}


@router.post(
    "/v1/chat/completions", response_model=None, responses=ERRORS | {200: {"model": ChatAnswer, "content": EVENTS}}
)
async def chat(body: ChatBody, request: HttpRequest) -> Response:
    """Answer a conversation, or the questions about a saved context."""
    service = service_of(request)
    context = service.context_of(body.model, body.context)
    turns = [message.turn for message in body.messages]
    prompts = service.prompts
    extras = Extras(body.read_tools, body.chat_template_kwargs or {})
    of_turns = prompts.of_messages if context is None else prompts.of_question
    make: Callable[[], Parts] = partial(of_turns, turns, extras)
    top = body.top_logprobs or 0
    logprobs = max(top, 1) if body.logprobs else 0
    form = ChatForm(body.model, service.texts, top)
    requests = await _requests(service, request, body, [make], (context, body.most_tokens, logprobs))
    return await _answer(service, request, body, requests, form)


@router.post("/v1/completions", response_model=None, responses=ERRORS | {200: {"model": TextAnswer, "content": EVENTS}})
async def complete(body: CompletionBody, request: HttpRequest) -> Response:
    """Continue a text, several texts, or a saved context."""
    service = service_of(request)
    context = service.context_of(body.model, body.context)
    prompts = service.prompts

    def making(prompt: str | list[int]) -> Callable[[], Parts]:
        if not isinstance(prompt, str):
            return lambda: prompts.of_ids(prompt)
        return (lambda: prompts.of_text(prompt)) if context is None else lambda: (prompts.of_more(prompt, raw=True),)

    makes = [making(prompt) for prompt in body.prompts]
    logprobs = 0 if body.logprobs is None else max(body.logprobs, 1)
    most = COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    requests = await _requests(service, request, body, makes, (context, most, logprobs))
    if body.scores:  # a single token is told, and so is one that ends the answer
        _require_few_scores(sum(one.prompt_tokens for one in requests) * ((body.logprobs or 0) + 1))
        ends = frozenset() if most == 1 else requests[0].stop_ids
        requests = [replace(one, prompt_logprobs=body.logprobs, stop_ids=ends) for one in requests]
    if not body.echo:
        return await _answer(service, request, body, requests, TextForm(body.model, service.texts, body.logprobs or 0))
    given = [prompt for prompt in body.prompts for _ in range(body.n or 1)]
    echoed = [
        (prompt if isinstance(prompt, str) else str(service.prompts.tokenizer.decode(prompt)), one.ids)
        for prompt, one in zip(given, requests, strict=True)
    ]
    form = EchoForm(body.model, service.texts, body.logprobs or 0, echoed, answers=body.max_tokens != 0)
    return await _answer(service, request, body, requests, form)


def _require_few_scores(count: int) -> None:
    """Raise ApiError for more numbers than one answer should have: writing them holds up other requests."""
    if count > MAX_SCORES:
        raise ApiError(
            400, f"echo with logprobs would return {count:,} log-probabilities, at most {MAX_SCORES:,} are; ask for "
            "fewer prompts, answers or logprobs.", param="logprobs",
        )  # fmt: skip


async def _requests(
    service: Service, http: HttpRequest, body: SampledBody, makes: Sequence[Callable[[], Parts]],
    rest: tuple[str | None, int | None, int],
) -> list[Request]:  # fmt: skip
    """One for each choice of each prompt. rest: context, most tokens (None: not said), logprobs. Raises ApiError and
    what making a prompt raises.
    """
    context, most, logprobs = rest
    answers = body.n or 1
    if len(makes) * answers > service.settings.choices:
        raise ApiError(
            400, f"{len(makes)} prompts with n={answers} make {len(makes) * answers} answers; a request may have "
            f"{service.settings.choices}.", param="n",
        )  # fmt: skip
    before = 0
    if most is None and context is not None:
        before = int((await service.contexts.named(context)).plain.get("tokens", 0))
    caller = caller_of(http)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    requests = []
    with text_from(_field(body)):
        prompts = await asyncio.to_thread(lambda: [make() for make in makes])
    for parts in prompts:
        asked = forked(parts) if answers > 1 else parts
        room = service.prompts.positions - before - sum(map(len, parts))
        tokens = max(1, min(service.settings.answer_tokens, room)) if most is None else most
        for choice in range(answers):
            draw = body.draw((seed + choice) % 2**64, logprobs, service.sampling)
            requests.append(
                Request(
                    asked,
                    tokens,
                    draw,
                    body.stops,
                    frozenset() if body.ignore_eos else None,
                    caller.namespace,
                    caller.name,
                    context=context,
                    min_tokens=body.min_tokens or 0,
                )  # fmt: skip
            )
    return requests


def _field(body: SampledBody) -> str:
    """The name of the field that has the prompt."""
    return "messages" if isinstance(body, ChatBody) else "prompt"


async def _answer(
    service: Service, http: HttpRequest, body: SampledBody, requests: Sequence[Request], form: Form
) -> Response:
    choices = Choices(service.client, service.admission, service.settings.deadline_seconds, _field(body))

    async def end(scope: Scope) -> None:
        await choices.__aexit__()
        _note(service, scope, choices, body.n or 1, form)

    try:
        await choices.submit(requests)
    except BaseException:
        await choices.__aexit__()
        raise
    wanted = requests[0].draw.logprobs > 0
    if body.stream:
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return StreamReply(
            _chunks(choices, form, (len(requests), body.n or 1), logprobs=wanted, usage=usage),
            end,
            choices.seconds_left,
        )
    return WholeReply(lambda: _whole(choices, form, body.n or 1, logprobs=wanted), end, choices.seconds_left)


async def _chunks(
    choices: Choices, form: Form, counts: tuple[int, int], *, logprobs: bool, usage: bool
) -> AsyncIterator[bytes]:
    """Events of a stream. counts: of choices, and of those for each prompt."""
    if opening := b"".join(form.opening(index) for index in range(counts[0])):
        yield opening
    async for items in choices:
        chunks = []
        for index, item in items:
            if not isinstance(item, Event):
                chunks.append(form.closing(index, item.reason))
                continue
            told = (item,) if logprobs and item.token >= 0 else ()
            if item.text or told:
                chunks.append(form.chunk(index, item.text, told))
        if any(chunks):
            yield b"".join(chunks)
    ending = form.usage(usage_of(_ordered(choices), counts[1])) if usage else b""
    yield ending + DONE


async def _whole(choices: Choices, form: Form, answers: int, *, logprobs: bool) -> bytes:
    told: dict[int, list[Event]] = {}
    async for items in choices:
        for index, item in items:
            if logprobs:
                events = told.setdefault(index, [])
                if isinstance(item, Event) and item.token >= 0:
                    events.append(item)
    value = form.whole(choices.ends, told, usage_of(_ordered(choices), answers))
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _ordered(choices: Choices) -> list[Any]:
    return [end for _, end in sorted(choices.ends.items())]


def _note(service: Service, scope: Scope, choices: Choices, answers: int, form: Form) -> None:
    """For the log and the metrics: numbers alone."""
    fields = scope["fields"]
    fields |= {"answer": form.id, "engine_requests": choices.ids}
    if choices.first_seconds is not None:
        fields["first_token_seconds"] = round(choices.first_seconds, 6)
    if fields.get("disconnected"):
        service.metrics.disconnected()
    if not choices.complete:
        return
    usage = usage_of(_ordered(choices), answers)
    counts = (
        usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    )  # fmt: skip
    fields |= dict(zip(("prompt_tokens", "cached_tokens", "completion_tokens"), counts, strict=True))
    fields["engine_seconds"] = [round(seconds, 6) for seconds in _ordered(choices)[0].seconds]
    service.metrics.answered(counts, choices.first_seconds, choices.seconds)
    for end in choices.ends.values():
        service.metrics.finished(end.reason)
