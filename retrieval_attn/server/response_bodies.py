"""Bodies of OpenAI's Responses API: requests as chat requests, the parts of an answer as output items and events."""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from retrieval_attn.engine.request import Request
from retrieval_attn.server.answer_parts import AnswerPart, AnswerReader, arguments_object
from retrieval_attn.server.failure import ApiError, invalid
from retrieval_attn.server.formatting import BlockForm, encoded
from retrieval_attn.server.protocol import MAX_MESSAGES, Body, ChatBody, TemplateOptions
from retrieval_attn.server.tool_formats import json_object

Value = dict[str, Any]
PARAGRAPH = "\n\n"
Ignored = Annotated[list[Any], Field(max_length=4096)]
Status = Literal["in_progress", "completed", "incomplete"]


# -- input ---------------------------------------------------------------------------------------


class TextContent(Body):
    """A text of a message. Files and sound are not served. annotations, logprobs: of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Ignored | None = None
    logprobs: Ignored | None = None


class ImageContent(Body):
    """An image of a message of the user. image_url: a data URL. detail has no effect."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


Content = Annotated[TextContent | ImageContent, Field(discriminator="type")]
Texts = str | Annotated[list[TextContent], Field(max_length=4096, fail_fast=True)]


class MessageItem(Body):
    """A message of the client, or of an earlier answer. id, status and phase have no effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Content], Field(max_length=4096, fail_fast=True)]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None

    @model_validator(mode="after")
    def _has_images_of_the_user(self) -> MessageItem:
        images = isinstance(self.content, list) and any(isinstance(part, ImageContent) for part in self.content)
        if images and self.role != "user":
            raise ValueError("images belong to messages of the user")
        return self

    @property
    def said(self) -> Any:
        """The content as chat messages have it."""
        if isinstance(self.content, str) or not any(isinstance(part, ImageContent) for part in self.content):
            return _text(self.content)
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextContent)
            else {"type": "image_url", "image_url": {"url": part.image_url}}
            for part in self.content
        ]


class SummaryText(Body):
    """A summary of reasoning, which this server does not write."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    """The reasoning itself."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer. encrypted_content: of this server, used if there is no content."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=4096, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=4096, fail_fast=True)] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _is_from_here(cls, value: str) -> str:
        if value:
            _unpacked(value)
        return value

    @property
    def text(self) -> str:
        """The reasoning as the chat template reads it."""
        if self.content:
            return "\n".join(part.text for part in self.content)
        if self.encrypted_content:
            return _unpacked(self.encrypted_content)
        return "\n".join(part.text for part in self.summary or ())


PACKED = "plain:"
"""Start of the encrypted_content of this server. It is not encrypted: the client gets the reasoning as text, too."""


def _packed(text: str) -> str:
    return PACKED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def _unpacked(packed: str) -> str:
    """Return the reasoning in an encrypted_content. Raises ValueError for that of another server."""
    head, data = packed[: len(PACKED)], packed[len(PACKED) :]
    try:
        if head == PACKED:
            return base64.b64decode(data, validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise ValueError("encrypted_content is not of this server; leave the item out, or give its content")


class FunctionCallItem(Body):
    """A function call of an earlier answer. namespace: see `NamespaceTool`."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        if json_object(value or "{}") is None:
            raise ValueError("arguments of a function call must be the text of a JSON object")
        return value


class FunctionOutputItem(Body):
    """The result of a function call. name and namespace have no effect: the call has them."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    name: str | None = None
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None


def _type_of(item: Any) -> str | None:
    """Return the type of an input item; one without a type is a message."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None and isinstance(item, dict) else kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def _text(content: str | Sequence[TextContent | ImageContent]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextContent))


def turns_of(items: Sequence[InputItem], before: Sequence[Mapping[str, Any]] = ()) -> list[Value]:
    """Return input items as chat messages. before: earlier messages of the conversation.

    Reasoning, text and calls that follow each other are one message of the assistant. Raises ApiError 400 for the
    output of a call that neither has.
    """
    called = {call["id"]: call["function"]["name"] for turn in before for call in turn.get("tool_calls", ())}
    turns: list[Value] = []
    answer: Value | None = None  # message of the assistant that the next item may continue
    said = False  # it has a text
    for number, item in enumerate(items):
        if isinstance(item, FunctionOutputItem):
            if item.call_id not in called:
                raise ApiError(
                    400, f"No tool call found for function call output with call_id {item.call_id[:80]!r}.",
                    param=f"input.{number}.call_id",
                )  # fmt: skip
            result = {"role": "tool", "tool_call_id": item.call_id, "name": called[item.call_id]}
            turns.append({**result, "content": _text(item.output)})
            answer = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turns.append({"role": item.role, "content": item.said})
            answer = None
        else:
            called_before = answer is not None and "tool_calls" in answer
            if isinstance(item, ReasoningItem):
                begins = said or called_before
            else:
                begins = isinstance(item, MessageItem) and said and not called_before
            if answer is None or begins:
                answer, said = {"role": "assistant", "content": ""}, False
                turns.append(answer)
            if isinstance(item, MessageItem):
                answer["content"] += _text(item.content)
                said = True
            elif isinstance(item, ReasoningItem):
                thought = [answer.get("reasoning_content", ""), item.text]
                answer["reasoning_content"] = "\n".join(filter(None, thought))
            else:
                called[item.call_id] = name = _full_name(item.namespace, item.name)
                function = {"name": name, "arguments": item.arguments}
                answer.setdefault("tool_calls", []).append(
                    {"id": item.call_id, "type": "function", "function": function}
                )
    return turns


def turns_of_output(output: Sequence[Value]) -> list[Value]:
    """Return the output items of an answer as chat messages. Arguments that are no JSON object become one."""
    items = []
    for item in output:
        if "arguments" in item and json_object(item["arguments"] or "{}") is None:
            item = {**item, "arguments": json.dumps(arguments_object(item["arguments"]))}
        items.append(item)
    return turns_of(_ITEMS.validate_python(items))


# -- requests -------------------------------------------------------------------------------------


FunctionWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model reads and writes it."""
    return name if namespace is None else f"{namespace}__{name}"


class FunctionTool(Body):
    """A function of the client. Tools that OpenAI's servers run are not served."""

    type: Literal["function"]
    name: FunctionWord
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None

    def function(self, namespace: str | None = None, about: str | None = None) -> Value:
        """Return the tool in the form of chat completions. about: text before its description."""
        text = PARAGRAPH.join(part for part in (about, self.description) if part)
        described = {"description": text} if text else {}
        taken = {} if self.parameters is None else {"parameters": self.parameters}
        return {"type": "function", "function": {"name": _full_name(namespace, self.name), **described, **taken}}

    @property
    def echo(self) -> Value:
        """The tool as responses have it."""
        names = ("type", "name", "description", "parameters")
        return {**{name: getattr(self, name) for name in names}, "strict": bool(self.strict)}


class NamespaceTool(Body):
    """Functions of one source, such as an MCP server. The model reads their names as NAMESPACE__NAME.

    The namespace's description precedes the one of its first function.
    """

    type: Literal["namespace"]
    name: FunctionWord
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=256, fail_fast=True)]

    @property
    def functions(self) -> list[Value]:
        """The tools in the form of chat completions."""
        texts = [self.description, *(None for _ in self.tools[1:])]
        return [tool.function(self.name, text) for tool, text in zip(self.tools, texts, strict=False)]

    @property
    def echo(self) -> Value:
        """The tool as responses have it."""
        return {
            "type": self.type, "name": self.name, "description": self.description,
            "tools": [tool.echo for tool in self.tools],
        }  # fmt: skip


class NamedFunction(Body):
    """A tool_choice that forces a call of one function."""

    type: Literal["function"]
    name: FunctionWord


class ReasoningChoice(Body):
    """effort: see `ChatBody`. The other fields have no effect: reasoning is returned whole, without a summary."""

    effort: str | None = Field(None, max_length=64)
    summary: str | None = Field(None, max_length=64)
    generate_summary: str | None = Field(None, max_length=64)


class TextConfig(Body):
    """format: as response_format of chat completions. verbosity has no effect."""

    format: dict[str, Any] | None = None
    verbosity: str | None = Field(None, max_length=64)

    @property
    def response_format(self) -> Value | None:
        """The format in the form of chat completions."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        named = {name: value for name, value in self.format.items() if name != "type"}
        return {"type": "json_schema", "json_schema": named}


class ObfuscationChoice(Body):
    """Nothing is obfuscated."""

    include_obfuscation: bool | None = None


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""All but the first concern tools and images, which are not served."""
ResponseId = Annotated[str, Field(max_length=256)]


class InputBody(ChatBody):
    """A chat request made of a request of the Responses API."""

    prompt_field: ClassVar[str] = "input"


class ResponsesBody(Body):
    """POST /v1/responses. Besides OpenAI's fields: top_k, min_p, seed, enable_thinking, chat_template_kwargs.

    From max_tool_calls on, fields are accepted without effect.
    """

    model: str = Field(max_length=512)
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]],
            Field(max_length=256, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningChoice | None = None
    text: TextConfig | None = None
    include: Annotated[list[Included], Field(max_length=64)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    stream_options: ObfuscationChoice | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None

    def turns(self, before: Sequence[Value]) -> list[Value]:
        """Return the input as chat messages. before: messages of earlier responses. Raises ApiError 400."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return turns_of(self.input, before)

    @property
    def namespaces(self) -> dict[str, str]:
        """Namespace of each function that has one, by the name that the model reads."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        return {_full_name(space.name, tool.name): space.name for space in spaces for tool in space.tools}

    def chat(self, turns: Sequence[Value]) -> ChatBody:
        """Return the chat request for the messages of a conversation. Raises ApiError 400.

        Instructions and the first messages of the system and the developer are one message: many chat templates take
        no second one.
        """
        count = next((number for number, turn in enumerate(turns) if turn["role"] not in SYSTEM), len(turns))
        said = [self.instructions, *(turn["content"] for turn in turns[:count])]
        system = PARAGRAPH.join(text for text in said if text)
        tools: list[Value] = []
        for tool in self.tools or ():
            tools += tool.functions if isinstance(tool, NamespaceTool) else [tool.function()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        names = (
            "stream", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "enable_thinking",
            "chat_template_kwargs", "user", "prompt_cache_key",
        )  # fmt: skip
        given = {
            "model": self.model,
            "messages": [*([{"role": "system", "content": system}] if system else []), *turns[count:]],
            "tools": tools or None,
            "tool_choice": choice if tools or choice not in ("none", "auto") else None,
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": None if self.text is None else self.text.response_format,
            **{name: getattr(self, name) for name in names},
        }
        try:
            return InputBody.model_validate(given)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            raise invalid([{**one, "loc": _renamed(one["loc"])} for one in found]) from error

    def head(self, request: Request) -> Value:
        """Return the response without output, status and usage. request: the engine's."""
        choice = self.tool_choice or "auto"
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store is not False,
            "temperature": request.draw.temperature,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice,
            "tools": [tool.echo for tool in self.tools or ()],
            "top_logprobs": 0,
            "top_p": request.draw.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": self.user,
        }


SYSTEM = ("system", "developer")
_RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


def _renamed(place: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return the place of an error in a chat request as a field of the Responses API."""
    first, *rest = place or ("",)
    return (_RENAMED.get(str(first), first), *(() if first == "messages" else rest))


# -- output --------------------------------------------------------------------------------------


class ResponsesForm(BlockForm):
    """A `Form` of POST /v1/responses."""

    def __init__(
        self, head: Value, make_reader: Callable[[], AnswerReader], tokenizer: PreTrainedTokenizerBase,
        keep: Callable[[Value], None], namespaces: Mapping[str, str], *, packs_reasoning: bool,
    ) -> None:  # fmt: skip
        """head: the response without output, status and usage. keep: called with the finished response.

        namespaces: see `ResponsesBody`. packs_reasoning: give reasoning items their `encrypted_content`.
        """
        super().__init__(make_reader())
        self.id: str = head["id"]
        self._head, self._tokenizer, self._keep = head, tokenizer, keep
        self._namespaces, self._packs_reasoning = namespaces, packs_reasoning
        self._sequence = 0

    def opening(self, index: int) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ending(self, usage: Value, *, wanted: bool) -> bytes:
        """See `Form`. The usage is always sent."""
        response = self._finished(usage)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, failure: ApiError) -> bytes:
        error = {"code": "server_error", "message": failure.message}
        return self._event("response.failed", response=self._response("failed", error=error))

    def _finished(self, usage: Value) -> Value:
        assert self._end is not None
        status, more = "completed", {}
        if self._end.reason == "length":
            status, more = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        response = self._response(status, usage=self._usage(usage), **more)
        self._keep(response)
        return response

    def _response(self, status: str, **fields: Any) -> Value:
        return {**self._head, "status": status, "output": self._blocks, **fields}

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {encoded(value)}\n\n".encode("ascii")

    def _rest(self) -> Sequence[AnswerPart]:
        """See `BlockForm`. An answer has at least one item, so that a conversation can go on with it."""
        rest = super()._rest()
        return rest if rest or self._blocks else [AnswerPart("content", "")]

    def _delta(self, part: AnswerPart) -> bytes:
        return self._event(f"response.{_EVENTS[part.kind]}.delta", **self._place, delta=part.text)

    @property
    def _place(self) -> Value:
        """Fields of an event about the text of the open item."""
        assert self._open is not None
        place = {"item_id": self._blocks[-1]["id"], "output_index": len(self._blocks) - 1}
        if self._open[0] == "content":
            return place | {"content_index": 0, "logprobs": []}
        return place | ({} if self._open[0] == "call" else {"content_index": 0})

    def _begin(self, part: AnswerPart) -> bytes:
        name = uuid.uuid4().hex
        item: Value = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        if part.kind == "call":
            called = part.name or ""
            item = {"id": f"fc_{name}", "type": "function_call", "call_id": part.id, "name": called, "arguments": ""}
            if (namespace := self._namespaces.get(called)) is not None:
                item |= {"name": called.removeprefix(_full_name(namespace, "")), "namespace": namespace}
        elif part.kind == "reasoning":
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
        self._blocks.append({**item, "status": "in_progress"})
        events = self._event("response.output_item.added", output_index=len(self._blocks) - 1, item=self._blocks[-1])
        if part.kind != "call":
            events += self._content_event("added", "")
        return events

    def _content_event(self, what: str, text: str) -> bytes:
        place = {name: value for name, value in self._place.items() if name != "logprobs"}
        return self._event(f"response.content_part.{what}", **place, part=self._content(text))

    def _content(self, text: str) -> Value:
        """Return the content part of the open item."""
        if self._open is not None and self._open[0] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _close(self, *, whole: bool) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open[0], "".join(self._pieces)
        item = {**self._blocks[-1], "status": "completed" if whole else "incomplete"}
        if kind == "call":
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"]}
            events = self._event(f"response.{_EVENTS[kind]}.done", **self._place, **done)
        else:
            item["content"] = [self._content(text)]
            events = self._event(f"response.{_EVENTS[kind]}.done", **self._place, text=text)
            events += self._content_event("done", text)
        if kind == "reasoning" and self._packs_reasoning:
            item["encrypted_content"] = _packed(text)
        self._blocks[-1], self._open = item, None
        return events + self._event("response.output_item.done", output_index=len(self._blocks) - 1, item=item)

    def _usage(self, usage: Value) -> Value:
        texts = [part["text"] for item in self._blocks if item["type"] == "reasoning" for part in item["content"]]
        thought = sum(len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        made = usage["completion_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": min(thought, made)},
            "total_tokens": usage["total_tokens"],
        }


_EVENTS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
