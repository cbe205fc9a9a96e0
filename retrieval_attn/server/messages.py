"""Anthropic's Messages API over the chat endpoint: bodies, answers and events in its form."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, ValidationError, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerBase

from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.server.answer_bodies import AnswerBody, MessagesErrorAnswer
from retrieval_attn.server.answer_parts import AnswerPart, AnswerReader, arguments_object
from retrieval_attn.server.answering import EVENTS, answer_chat, chat_prompt
from retrieval_attn.server.failure import ApiError, invalid, text_from
from retrieval_attn.server.formatting import BlockForm, Form, encoded
from retrieval_attn.server.logs import REQUEST_ID
from retrieval_attn.server.permissions import UserRoute
from retrieval_attn.server.protocol import MAX_MESSAGES, MAX_STOPS, Body, ChatBody, Stop
from retrieval_attn.server.service import service_of

BILLING = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code. It differs in each request, so that no prefix would be shared, and is not
meant for the model: it is left out.
"""
Value = dict[str, Any]
Ignored = Annotated[dict[str, Any], Field(max_length=64)]


class Block(Body):
    """A part of a message. cache_control has no effect: every prompt is cached."""

    cache_control: Ignored | None = None


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ImageSource(Body):
    """An image's file in base64. URLs are not fetched."""

    type: Literal["base64", "url"]
    media_type: str | None = Field(None, max_length=64)
    data: str | None = None
    url: str | None = None

    @property
    def data_url(self) -> str:
        """The image as OpenAI's API has it."""
        return (
            self.url or "" if self.type == "url" else f"data:{self.media_type or 'image/png'};base64,{self.data or ''}"
        )


class ImageBlock(Block):
    """An image."""

    type: Literal["image"]
    source: ImageSource


SeenBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ThinkingBlock(Block):
    """Thinking of an earlier answer. The signature has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored | None = None


class ToolResultBlock(Block):
    """The result of a tool call. is_error has no effect: the text says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[SeenBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None

    @property
    def blocks(self) -> list[TextBlock | ImageBlock]:
        """The content as a list."""
        given = self.content or []
        return [TextBlock(type="text", text=given)] if isinstance(given, str) else given


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(Body):
    """A message of the user: texts, images and results of tools. Documents are not served.

    Chat templates take texts of tools alone: images of results stand at the start of what the user says.
    """

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(fail_fast=True)]

    @property
    def turns(self) -> list[Value]:
        """The messages in OpenAI's form: results first."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [
            {
                "role": "tool",
                "tool_call_id": one.tool_use_id,
                "content": _text([block for block in one.blocks if isinstance(block, TextBlock)]),
            }
            for one in self.content
            if isinstance(one, ToolResultBlock)
        ]
        returned = [block for one in self.content if isinstance(one, ToolResultBlock) for block in one.blocks]
        said = [
            *(block for block in returned if isinstance(block, ImageBlock)),
            *(one for one in self.content if not isinstance(one, ToolResultBlock)),
        ]
        parts = [
            {"type": "text", "text": one.text}
            if isinstance(one, TextBlock)
            else {"type": "image_url", "image_url": {"url": one.source.data_url}}
            for one in said
        ]
        return results + ([{"role": "user", "content": parts}] if parts or not results else [])


class AssistantTurn(Body):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]

    @property
    def turns(self) -> list[Value]:
        """The message in OpenAI's form."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.input)}}
            for one in self.content
            if isinstance(one, ToolUseBlock)
        ]
        thoughts = [one.thinking for one in self.content if isinstance(one, ThinkingBlock) and one.thinking]
        texts = [one for one in self.content if isinstance(one, TextBlock)]
        message = {"role": "assistant", "content": _text(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return [message | ({"tool_calls": calls} if calls else {})]


class SystemTurn(Body):
    """A message of the system."""

    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]

    @property
    def turns(self) -> list[Value]:
        """The message in OpenAI's form."""
        return [{"role": "system", "content": _text(self.content)}]


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class Tool(Block):
    """A function of the client. Tools that Anthropic's servers run are not served."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"this server runs no tools itself, and has none of the type {kind[:80]!r}")
        return given

    @property
    def function(self) -> Value:
        """The tool in OpenAI's form."""
        described = {} if self.description is None else {"description": self.description}
        strict = {} if self.strict is None else {"strict": self.strict}
        function = {"name": self.name, **described, **strict, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class Choice(Body):
    """Whether tools are called: at the model's choice, at least one, none, or one by name."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Choice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError('name belongs to the type "tool", and is needed there')
        return self


class ThinkingChoice(Body):
    """Whether the model thinks. budget_tokens and display have no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = None


class OutputConfig(Body):
    """effort: see `ChatBody`. Output formats are not served."""

    effort: str | None = Field(None, max_length=64)


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str = Field(max_length=512)
    messages: Annotated[
        list[Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    ]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored | None = None
    context_management: Ignored | None = None

    @model_validator(mode="after")
    def _last_is_not_an_answer(self) -> CountBody:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message must be the user's: a beginning of the answer cannot be given")
        return self

    @property
    def chat(self) -> ChatBody:
        """The request in OpenAI's form. Raises ApiError 400."""
        choice = self.tool_choice or Choice(type="auto")
        named = {"type": "function", "function": {"name": choice.name}}
        choices: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        system = self.system if isinstance(self.system, list) else [TextBlock(type="text", text=self.system or "")]
        said = [block for block in system if block.text and not block.text.startswith(BILLING)]
        messages = [{"role": "system", "content": _text(said)}] if said else []
        given = {
            "model": self.model,
            "messages": messages + [turn for message in self.messages for turn in message.turns],
            "tools": [tool.function for tool in self.tools or ()] or None,
            "tool_choice": choices[choice.type] if self.tools or choice.type in ("any", "tool") else None,
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "enable_thinking": None if self.thinking is None else self.thinking.type != "disabled",
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            **self._sampling,
        }
        try:
            return ChatBody.model_validate(given)
        except ValidationError as error:
            raise invalid(error.errors(include_url=False, include_context=False, include_input=False)) from error

    @property
    def _sampling(self) -> Value:
        return {}


class MessagesBody(CountBody):
    """POST /v1/messages. user_id in metadata names a session, as coding agents send it."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    metadata: Ignored | None = None
    service_tier: str | None = None
    speed: Literal["standard"] | None = None

    @property
    def _sampling(self) -> Value:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        user = (self.metadata or {}).get("user_id")
        session = user if isinstance(user, str) else None
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences, "session_id": session}


class MessagesUsage(AnswerBody):
    """input_tokens: prompt tokens that were prefilled. cache_read_input_tokens: those found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: Literal[0]


class MessageAnswer(AnswerBody):
    """Response of POST /v1/messages without stream. content: blocks of the types text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(AnswerBody):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesForm(BlockForm):
    """A `Form` of POST /v1/messages."""

    def __init__(self, requests: Sequence[Request], make_reader: Callable[[], AnswerReader], model: str,
                 tokenizer: PreTrainedTokenizerBase) -> None:  # fmt: skip
        """requests: one of the engine. model: name in the request."""
        super().__init__(make_reader())
        self.id = f"msg_{uuid.uuid4().hex}"
        (self._request,), self._model, self._tokenizer = requests, model, tokenizer
        self._called = False

    def opening(self, index: int) -> bytes:
        message = self._finished({"prompt_tokens": self._request.prompt_tokens, "completion_tokens": 0})
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def ending(self, usage: Value, *, wanted: bool) -> bytes:
        """See `Form`. The usage is always sent."""
        delta = {"type": "message_delta", "delta": self._reason(), "usage": self._usage(usage)}
        return _event(delta) + _event({"type": "message_stop"})

    def failure(self, failure: ApiError) -> bytes:
        return _event(failure.messages_body(REQUEST_ID.get()))

    def _finished(self, usage: Value) -> Value:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": self._blocks, **self._reason(), "usage": self._usage(usage)}

    def _begin(self, part: AnswerPart) -> bytes:
        block: Value = {"type": "text", "text": ""}
        if part.kind == "call":
            self._called = True
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._blocks.append(block)
        return self._event("start", content_block=block)

    def _delta(self, part: AnswerPart) -> bytes:
        kind, name = _DELTAS[part.kind]
        return self._event("delta", delta={"type": kind, name: part.text})

    def _close(self, *, whole: bool) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open[0], "".join(self._pieces)
        self._blocks[-1][_FIELDS[kind]] = arguments_object(text) if kind == "call" else text
        self._open = None
        return self._event("stop")

    def _event(self, what: str, **fields: Value) -> bytes:
        """Return an event of the last block."""
        return _event({"type": f"content_block_{what}", "index": len(self._blocks) - 1, **fields})

    def _reason(self) -> Value:
        reason, sequence = None, None
        if self._end is not None and self._end.reason == "length":
            reason = "max_tokens"
        elif self._end is not None:
            sequence = self._stop_string(self._end)
            reason = "stop_sequence" if sequence is not None else "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _stop_string(self, end: Finished) -> str | None:
        """Return the stop string that ended the answer, None if a token did."""
        if not self._request.stop:
            return None
        stream = TextStream(self._tokenizer, visible=self._request.visible)
        rest = ("".join(map(stream.add, end.tokens)) + stream.end())[len(end.text) :]
        return next((one for one in self._request.stop if rest.startswith(one)), None)

    def _usage(self, usage: Value) -> Value:
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


_FIELDS = {"content": "text", "reasoning": "thinking", "call": "input"}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _event(value: Value) -> bytes:
    return f"event: {value['type']}\ndata: {encoded(value)}\n\n".encode("ascii")


router = APIRouter(tags=["messages"], route_class=UserRoute)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorAnswer, "description": text}
    for status, text in {
        400: "Bad request", 401: "No key, or an unknown one", 403: "Another host or origin", 404: "Unknown model",
        409: "A context of another model", 413: "Too large a body", 503: "Overloaded", 504: "Deadline",
    }.items()
}  # fmt: skip


@router.post("/v1/messages", response_model=None, responses=ERRORS | {200: {"model": MessageAnswer, "content": EVENTS}})
async def messages(body: MessagesBody, request: HttpRequest) -> Response:
    """Answer a conversation in Anthropic's form."""
    tokenizer = service_of(request).prompts.tokenizer

    def form(requests: Sequence[Request], make_reader: Callable[[], AnswerReader]) -> Form:
        return MessagesForm(requests, make_reader, body.model, tokenizer)

    return await answer_chat(body.chat, request, form)


@router.post("/v1/messages/count_tokens", response_model=None, responses=ERRORS | {200: {"model": TokenCount}})
async def count_tokens(body: CountBody, request: HttpRequest) -> Response:
    """Return the number of prompt tokens of a conversation."""
    service = service_of(request)
    context = service.context_of(body.model, None)
    before = 0 if context is None else (await service.contexts.named(context)).tokens
    with text_from("messages"):
        make, _ = await chat_prompt(service, body.chat, context)
        parts = await asyncio.to_thread(make)
    return JSONResponse({"input_tokens": before + sum(map(len, parts))})
