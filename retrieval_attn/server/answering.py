"""Chat and text completion endpoints."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from retrieval_attn.engine.ids import int32_row
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.errors import InputDataError
from retrieval_attn.model.images import Image
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.server.admission import Admission, QueuedPrompt, QueuedRequest
from retrieval_attn.server.answer_bodies import ERRORS, ChatAnswer, TextAnswer
from retrieval_attn.server.answer_parts import AnswerFormat, AnswerReader
from retrieval_attn.server.client import EngineClient, Item, Submitted
from retrieval_attn.server.failure import ApiError, failure_of, text_from
from retrieval_attn.server.formatting import ChatForm, EchoedPrompt, EchoForm, Form, TextForm, usage_of
from retrieval_attn.server.permissions import UserRoute
from retrieval_attn.server.prompts import Extras, Parts, forked
from retrieval_attn.server.protocol import ChatBody, CompletionBody, NamedTool, SampledBody, session_of
from retrieval_attn.server.service import Service, caller_of, service_of
from retrieval_attn.server.streaming import StreamReply, WholeReply

MAX_UNREAD = 8192
"""Maximum tokens of a request that its client has not read, besides those in the socket's buffer."""


class Choices:
    """The running choices of one HTTP request, cancelled at the end of the `async with` block.

    Iterating yields lists of (number of the choice, event or end) until all choices have ended. An error of one choice
    is raised as ApiError and ends the others.
    """

    def __init__(self, client: EngineClient, admission: Admission, deadline_seconds: float, field: str) -> None:
        """deadline_seconds: from now. field: field of the body with the prompt."""
        self._client, self._admission = client, admission
        self._began = time.perf_counter()
        self._deadline_seconds = deadline_seconds
        self._queue: asyncio.Queue[tuple[int, Item] | ApiError] = asyncio.Queue()
        self._field = field
        self._requests: Sequence[Request] = ()
        self._submitted: list[Submitted] = []
        self._waiting: list[QueuedRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._overflowed = False
        self.ends: dict[int, Finished] = {}
        self.first_seconds: float | None = None

    async def submit(self, requests: Sequence[Request]) -> None:
        """Submit all choices. Raises ApiError if one of them is refused; then none is answered."""
        self._timer = asyncio.get_running_loop().call_later(self._deadline_seconds, self._late)
        self._waiting = self._admission.enter(*map(_queued, requests))
        self._requests = requests
        for number, request in enumerate(requests):
            limit = asyncio.timeout(max(self.seconds_left, 0))
            try:
                async with limit:
                    submitted = await self._client.submit(request, functools.partial(self._put, number))
            except Exception as error:
                raise self._too_late() if limit.expired() else self._failure(number, error) from error
            self._submitted.append(submitted)

    @property
    def ids(self) -> list[str]:
        """The engine's request ids, for logs."""
        return [one.id for one in self._submitted]

    @property
    def complete(self) -> bool:
        """Whether all choices ended without an error or a cancellation."""
        return bool(self.ends) and len(self.ends) == len(self._submitted)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline_seconds - self.seconds

    @property
    def seconds(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._began

    def cancel(self) -> None:
        """Cancel all choices."""
        for one in self._submitted:
            one.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.cancel()
        for waiting in self._waiting:
            waiting.leave()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Item]]]:
        """Yield all queued items, at least one."""
        while len(self.ends) < len(self._submitted):
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            found: list[tuple[int, Item]] = []
            for item in items:
                if isinstance(item, ApiError):
                    raise item
                number, what = item
                if isinstance(what, Finished):
                    self._require_answered(number, what)
                    self.ends[number] = what
                found.append((number, what))
            yield found

    def _put(self, number: int, item: Item) -> None:
        served = not isinstance(item, Finished) or (item.error is None and item.reason != "cancelled")
        if self._waiting[number].leave(served=served) and self.first_seconds is None:
            self.first_seconds = self.seconds
        if self._queue.qsize() < MAX_UNREAD:
            self._queue.put_nowait((number, item))
        elif not self._overflowed:
            self._overflowed = True
            self.cancel()
            message = f"The client did not read {MAX_UNREAD:,} tokens of its answer; read the stream while it comes."
            self._queue.put_nowait(ApiError(503, message, code="client_too_slow"))

    def _late(self) -> None:
        self.cancel()  # at once: the client itself may be the slow part
        self._queue.put_nowait(self._too_late())

    def _too_late(self) -> ApiError:
        message = f"The request was not answered within {self._deadline_seconds:g} s; ask for less, or come again."
        return ApiError(504, message, code="deadline")

    def _require_answered(self, number: int, end: Finished) -> None:
        if end.error is not None:
            raise self._failure(number, end.error) from end.error
        if end.reason == "cancelled":
            raise ApiError(
                503,
                "The server shut down before the answer was finished; send this again.",
                code="cancelled",
                retry_after=1,
            )

    def _failure(self, number: int, error: BaseException) -> ApiError:
        return failure_of(error, field=self._field, answer_tokens=self._requests[number].max_tokens)


def _queued(request: Request) -> QueuedPrompt:
    """Return a request's prompt for the queue. One whose prompt is scored prefills all of it."""
    scope = None if request.prompt_logprobs is not None else (request.namespace, request.context)
    return QueuedPrompt(np.concatenate([int32_row(part) for part in request.parts]), scope)


router = APIRouter(tags=["answers"], route_class=UserRoute)

COMPLETION_TOKENS = 16
"""Default length of a text completion, as in OpenAI's API."""
MAX_SCORES = 1 << 20
"""Log-probabilities of the tokens of a request's prompts: 512K tokens with `logprobs: 1`."""
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": EVENT}}


@router.post(
    "/v1/chat/completions", response_model=None, responses=ERRORS | {200: {"model": ChatAnswer, "content": EVENTS}}
)
async def chat(body: ChatBody, request: HttpRequest) -> Response:
    """Answer a conversation, or questions about a saved context."""
    service, top = service_of(request), body.top_logprobs or 0

    def form(requests: Sequence[Request], make_reader: Callable[[], AnswerReader]) -> Form:
        return ChatForm(body.model, service.texts, top, make_reader, requests[0].visible)

    return await answer_chat(body, request, form)


async def answer_chat(
    body: ChatBody, request: HttpRequest, make_form: Callable[[Sequence[Request], Callable[[], AnswerReader]], Form]
) -> Response:
    """Answer a chat request. make_form: return its form for the engine's requests and a maker of parsers."""
    service = service_of(request)
    context = service.context_of(body.model, body.context)
    prompts, answer_format = service.prompts, service.answer_format
    prompt, images = await chat_prompt(service, body, context)
    opening = ""
    if body.tool_choice == "required":
        opening = answer_format.opening(None)
    elif isinstance(body.tool_choice, NamedTool):
        opening = answer_format.opening(body.tool_choice.function.name)

    def make() -> Parts:
        parts = prompt()
        if not opening:
            return parts
        return prompts.continued(parts, answer_format.thinking_end(prompts.end_of(parts)) + opening)

    stops = () if body.ignore_eos else prompts.stops
    logprobs = max(body.top_logprobs or 0, 1) if body.logprobs else 0
    requests = await _requests(
        service, request, body, [make], context=context, most=body.most_tokens, logprobs=logprobs, stops=stops,
        images=images,
    )  # fmt: skip
    end = prompts.end_of(requests[0].parts)
    grammar = _chat_grammar(body, answer_format, opening, end)
    requests = [replace(one, visible=answer_format.visible, grammar=grammar) for one in requests]
    make_reader = partial(answer_format.reader, body.read_tools, end, opening, body.most_calls)
    return await _answer(service, request, body, requests, make_form(requests, make_reader))


def _chat_grammar(body: ChatBody, answer_format: AnswerFormat, opening: str, prompt_end: str) -> GrammarSpec | None:
    """Return the grammar of a chat answer: of its calls if tools are strict, else of its text; None: neither.

    opening: text of a forced call. prompt_end: text of the prompt's last tokens. Raises ApiError for both at once, and
    InputDataError.
    """
    tools = body.read_tools
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.get("function", {}).get("name") == name]
    calls = answer_format.grammar_of_calls(tools, opening, many=body.most_calls is None)
    if opening or body.grammar is None:  # a forced call has no text
        return calls
    if tools:
        raise ApiError(
            400, 'A grammar of the text excludes calls of tools: give tool_choice "none", "required" or a function, '
            "or leave the grammar out.", param="tools",
        )  # fmt: skip
    return answer_format.constrained(body.grammar, prompt_end)


async def chat_prompt(
    service: Service, body: ChatBody, context: str | None
) -> tuple[Callable[[], Parts], tuple[Image, ...]]:
    """Return a function that makes the prompt of a chat request, and the prompt's images.

    context: saved context that it continues. Raises ApiError for images that cannot be read.
    """
    prompts, turns = service.prompts, [message.turn for message in body.messages]
    options = prompts.thinking_options(body.reasoning_effort, body.enable_thinking) | (body.chat_template_kwargs or {})
    extras = Extras(body.read_tools, options)
    if context is not None:
        return partial(prompts.of_question, turns, extras), ()
    if all(isinstance(turn["content"], str) for turn in turns):
        return partial(prompts.of_messages, turns, extras), ()
    try:
        images = await asyncio.to_thread(prompts.images_of, turns)
    except InputDataError as error:
        raise ApiError(400, str(error), param=body.prompt_field, code="invalid_image") from error
    return partial(prompts.of_messages, turns, extras, images), images


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
    requests = await _requests(service, request, body, makes, context=context, most=most, logprobs=logprobs)
    if body.scores:  # with one token, an end token is returned too
        _require_few_scores(sum(one.prompt_tokens for one in requests) * ((body.logprobs or 0) + 1))
        ends = frozenset() if most == 1 else requests[0].stop_ids
        requests = [replace(one, prompt_logprobs=body.logprobs, stop_ids=ends) for one in requests]
    if not body.echo:
        return await _answer(service, request, body, requests, TextForm(body.model, service.texts, body.logprobs or 0))
    given = [prompt for prompt in body.prompts for _ in range(body.n or 1)]
    echoed = [
        EchoedPrompt(prompt if isinstance(prompt, str) else str(service.prompts.tokenizer.decode(prompt)), one.ids)
        for prompt, one in zip(given, requests, strict=True)
    ]
    form = EchoForm(body.model, service.texts, body.logprobs or 0, echoed, answers=body.max_tokens != 0)
    return await _answer(service, request, body, requests, form)


def _require_few_scores(count: int) -> None:
    """Raise ApiError for too many numbers: encoding them delays other requests."""
    if count > MAX_SCORES:
        raise ApiError(
            400, f"echo with logprobs would return {count:,} log-probabilities, at most {MAX_SCORES:,} are; ask for "
            "fewer prompts, answers or logprobs.", param="logprobs",
        )  # fmt: skip


async def _requests(
    service: Service, http: HttpRequest, body: SampledBody, makes: Sequence[Callable[[], Parts]], *,
    context: str | None, most: int | None, logprobs: int, stops: Sequence[str] = (), images: tuple[Image, ...] = (),
) -> list[Request]:  # fmt: skip
    """Make a request of the engine for each choice of each prompt.

    makes: return the parts of a prompt. context: saved context that the prompts continue. most: maximum tokens of an
    answer; None: the server's default. stops: further stop strings. images: of the one prompt.

    Raises ApiError, and exceptions of `makes`.
    """
    answers = body.n or 1
    if len(makes) * answers > service.settings.choices:
        raise ApiError(
            400, f"{len(makes)} prompts with n={answers} make {len(makes) * answers} answers; a request may have "
            f"{service.settings.choices}.", param="n",
        )  # fmt: skip
    before = 0
    if most is None and context is not None:
        before = (await service.contexts.named(context)).tokens
    caller, session = caller_of(http), session_of(body, http.headers)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    requests = []
    with text_from(body.prompt_field):
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
                    (*body.stops, *stops),
                    frozenset() if body.ignore_eos else None,
                    caller.namespace,
                    caller.name,
                    context=context,
                    min_tokens=body.min_tokens or 0,
                    session=session,
                    grammar=body.grammar,
                    images=images,
                )  # fmt: skip
            )
    return requests


async def _answer(
    service: Service, http: HttpRequest, body: SampledBody, requests: Sequence[Request], form: Form
) -> Response:
    choices = Choices(service.client, service.admission, service.settings.deadline_seconds, body.prompt_field)

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
        chunks = _chunks(choices, form, len(requests), body.n or 1, logprobs=wanted, usage=usage)
        return StreamReply(chunks, form.failure, end, choices.seconds_left)
    return WholeReply(lambda: _whole(choices, form, body.n or 1, logprobs=wanted), end, choices.seconds_left)


async def _chunks(
    choices: Choices, form: Form, count: int, answers: int, *, logprobs: bool, usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. count: number of choices. answers: choices per prompt."""
    if opening := b"".join(form.opening(index) for index in range(count)):
        yield opening
    async for items in choices:
        chunks = []
        for index, item in items:
            if not isinstance(item, Event):
                chunks.append(form.closing(index, item))
                continue
            told = (item,) if logprobs and item.token >= 0 else ()
            if item.text or told:
                chunks.append(form.chunk(index, item.text, told))
        if any(chunks):
            yield b"".join(chunks)
    yield form.ending(usage_of(_ordered(choices), answers), wanted=usage)


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
    """Add the counts of an answer to the log line and the metrics; no text."""
    fields = scope["fields"]
    fields |= {"answer": form.id, "engine_requests": choices.ids}
    if choices.first_seconds is not None:
        fields["first_token_seconds"] = round(choices.first_seconds, 6)
    if fields.get("disconnected"):
        service.metrics.disconnected()
    if not choices.complete:
        return
    usage = usage_of(_ordered(choices), answers)
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    fields |= {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": generated}
    fields["engine_seconds"] = [round(seconds, 6) for seconds in _ordered(choices)[0].seconds]
    service.metrics.answered(
        choices.first_seconds, choices.seconds, prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated
    )
    for end in choices.ends.values():
        service.metrics.finished(end.reason)
