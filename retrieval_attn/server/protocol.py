"""Bodies of requests of the HTTP API, as pydantic models."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from retrieval_attn.sampling.grammar import GrammarKind, GrammarSpec
from retrieval_attn.sampling.sampling_params import (
    BIAS_LIMIT,
    MAX_LOGPROBS,
    PENALTY_RANGE,
    REPETITION_RANGE,
    SamplingParams,
)
from retrieval_attn.server.tool_formats import json_object

SESSION_HEADERS = ("x-session-id", "session-id", "session_id", "x-claude-code-session-id", "x-session-affinity")
"""Headers with the name of a session, as agents send them; the first one counts."""
ANSWERED = ("assistant", "tool")
"""Roles of messages that only a conversation with an earlier answer has."""
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_MESSAGES, MAX_PROMPTS = 4096, 128
BYTE_ORDER_MARK = "\ufeff"
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Words = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
ContextName = Annotated[str, Field(pattern=NAME_PATTERN)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Penalty = Annotated[float, Field(ge=PENALTY_RANGE[0], le=PENALTY_RANGE[1], allow_inf_nan=False)]
TokenBias = Annotated[float, Field(ge=-BIAS_LIMIT, le=BIAS_LIMIT, allow_inf_nan=False)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]


class Body(BaseModel):
    """A JSON request. Null and unknown fields are ignored: clients send back whole answers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @field_validator("content", "text", "prompt", check_fields=False)
    @classmethod
    def _without_byte_order_mark(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [cls._without_byte_order_mark(one) for one in value]
        return value.removeprefix(BYTE_ORDER_MARK) if isinstance(value, str) else value


class TextPart(Body):
    """A text of a message; sound is not served."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """A data URL with an image's file. detail has no effect."""

    url: str
    detail: str | None = Field(None, max_length=64)


class ImagePart(Body):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


MessagePart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Body):
    """One of a conversation. Tool calls and reasoning go to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Nothing | None = None

    @field_validator("tool_calls")
    @classmethod
    def _arguments_as_mappings(cls, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_with_arguments(call) for call in calls]

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the {self.role} needs content, a string or a list of parts")
        if self.role != "user" and isinstance(self.content, list) and any(map(_is_image, self.content)):
            raise ValueError("images belong to messages of the user")
        return self

    @property
    def text(self) -> str:
        """The texts of the content, each part on lines of its own."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        return self.content or ""

    @property
    def _said(self) -> str | list[dict[str, str]]:
        """The content: its text, or a list of parts if there are images."""
        if not isinstance(self.content, list) or not any(map(_is_image, self.content)):
            return self.text
        parts: list[dict[str, str]] = []
        for part in self.content:
            if isinstance(part, ImagePart):
                parts.append({"type": "image", "url": part.image_url.url})
            elif parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += f"\n{part.text}"
            else:
                parts.append({"type": "text", "text": part.text})
        return parts

    @property
    def turn(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        role = "system" if self.role == "developer" else self.role
        names = ("name", "tool_calls", "tool_call_id", "reasoning_content")
        more = {name: getattr(self, name) for name in names}
        return {"role": role, "content": self._said, **{name: value for name, value in more.items() if value}}


def _is_image(part: TextPart | ImagePart) -> bool:
    return isinstance(part, ImagePart)


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, JSON's text from OpenAI's clients, are a mapping, as chat templates want."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    if (values := json_object(arguments or "{}")) is None:
        raise ValueError("arguments of a tool call must be the text of a JSON object")
    return {**call, "function": {**function, "arguments": values}}


TEMPLATE_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


def _for_template(options: dict[str, Any]) -> dict[str, Any]:
    if taken := TEMPLATE_ARGUMENTS & options.keys():
        raise ValueError(f"chat_template_kwargs cannot have {', '.join(sorted(taken))}")
    return options


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=256, fail_fast=True)]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(_for_template)]


ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_CHOICES = 4096


def _schema_text(text: str) -> str:
    if json_object(text) is None:
        raise ValueError("a JSON schema must be a JSON object, or the text of one")
    return text


def _plain_schema(schema: str | dict[str, Any] | None) -> str | None:
    """Return the text of a schema, with the keys in their order: objects are written in that order."""
    return json.dumps(schema) if isinstance(schema, dict) else schema


class StreamOptions(Body):
    """include_usage: a last chunk tells the tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """A named schema of OpenAI's API. name, description and strict have no effect: the schema is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(ANY_OBJECT, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema belongs to the type "json_schema", and is needed there')
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Schema of the answer; None: it is text."""
        if self.type == "text":
            return None
        return ANY_OBJECT if self.json_schema is None else self.json_schema.schema_


Choices = Annotated[list[Words], Field(min_length=1, max_length=MAX_CHOICES)]
Schema = dict[str, Any] | Annotated[str, AfterValidator(_schema_text)]


class StructuredOutputs(Body):
    """Grammar of an answer, as vLLM has it since version 0.11: exactly one of its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Words | None = None
    choice: Choices | None = None
    grammar: Words | None = None

    @property
    def specs(self) -> list[GrammarSpec]:
        """Grammars of all given fields."""
        found: list[tuple[GrammarKind, str | None]] = [
            ("json_schema", _plain_schema(self.json_)),
            ("json_schema", json.dumps(ANY_OBJECT) if self.json_object else None),
            ("regex", self.regex),
            ("choice", None if self.choice is None else json.dumps(self.choice)),
            ("grammar", self.grammar),
        ]
        return [GrammarSpec(kind, text) for kind, text in found if text is not None]


class SampledBody(Body):
    """Common fields of requests for an answer.

    Besides OpenAI's: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, guided_json, guided_regex,
    guided_choice, guided_grammar and structured_outputs as in vLLM, and context, the name of a saved context that the
    prompt continues (also as model MODEL@NAME). user, session_id and prompt_cache_key name a session (`session_of`).
    Fields from `metadata` on are accepted without effect: other options of vLLM with their neutral value.
    """

    prompt_field: ClassVar[str] = "prompt"
    """Name of the field with the prompt, for errors."""

    model: str = Field(max_length=512)
    context: ContextName | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, ge=REPETITION_RANGE[0], le=REPETITION_RANGE[1], allow_inf_nan=False)
    logit_bias: dict[TokenKey, TokenBias] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: Words | None = None
    guided_choice: Choices | None = None
    guided_grammar: Words | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    use_beam_search: Literal[False] | None = None
    early_stopping: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    length_penalty: Literal[1] | None = None
    typical_p: Literal[1] | None = None
    no_repeat_ngram_size: Literal[0] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=0)] | None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None

    @field_validator("length_penalty", "typical_p", "no_repeat_ngram_size", mode="before")
    @classmethod
    def _whole_number(cls, value: object) -> object:
        return int(value) if isinstance(value, float) and value in (0, 1) else value  # clients send 1.0 as well

    @model_validator(mode="after")
    def _one_grammar(self) -> SampledBody:
        if len(self._grammars) > 1:
            raise ValueError(
                "an answer has one grammar: give one of response_format, guided_json, guided_regex, guided_choice, "
                "guided_grammar and structured_outputs"
            )
        if self._grammars and self.min_tokens:
            raise ValueError("min_tokens must be 0 for an answer with a grammar, which ends when it is complete")
        return self

    @property
    def _grammars(self) -> list[GrammarSpec]:
        schema = None if self.response_format is None else self.response_format.schema_of_answer
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        given = [StructuredOutputs(json=schema), guided, self.structured_outputs]
        return [spec for one in given if one is not None for spec in one.specs]

    @property
    def grammar(self) -> GrammarSpec | None:
        """Grammar of the answer; None: any text."""
        return next(iter(self._grammars), None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings at which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def draw(self, seed: int, logprobs: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """How tokens are chosen. seed: of this choice. logprobs: see `SamplingParams`. defaults: for what the body
        does not say.
        """
        said = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
        }
        given = {name: value for name, value in said.items() if value is not None}
        return SamplingParams(**{"temperature": 1.0, **defaults, **given, "seed": seed, "logprobs": logprobs})


class FunctionName(Body):
    """A function that must be called."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")


class NamedTool(Body):
    """A tool_choice that forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(SampledBody):
    """POST /v1/chat/completions.

    Tools go to the chat template, and so do reasoning_effort and enable_thinking if it has such variables.
    """

    prompt_field: ClassVar[str] = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    enable_thinking: bool | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> ChatBody:
        choice = self.tool_choice
        if (choice == "required" or isinstance(choice, NamedTool)) and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, NamedTool):
            names = [tool.get("function", {}).get("name") for tool in self.tools or ()]
            if choice.function.name not in names:
                raise ValueError(f"tool_choice names {choice.function.name!r}, which is none of the tools")
        return self

    @property
    def most_calls(self) -> int | None:
        """Maximum tool calls of an answer, None for any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @property
    def read_tools(self) -> list[dict[str, Any]]:
        """That the model reads."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of the answer, None if the request does not set it."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SampledBody):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
        ]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=128)

    @field_validator("suffix")
    @classmethod
    def _without_suffix(cls, value: str) -> str:
        if value:
            raise ValueError("text cannot be inserted before a suffix; leave suffix out")
        return value

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be n: all answers that are made are returned")
        return self

    @model_validator(mode="after")
    def _echoes_whole(self) -> CompletionBody:
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens=0 needs echo=true, and no stream")
        if self.scores and (self.stream or self.context or "@" in self.model):
            raise ValueError("echo with logprobs needs stream=false, and a prompt without a saved context")
        return self

    @property
    def scores(self) -> bool:
        """Whether the tokens of the prompt get log-probabilities."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


def session_of(body: SampledBody, headers: Mapping[str, str]) -> str:
    """Return the session of a request; "" if it is a single question.

    A client names it in a header, or as `session_id` or `prompt_cache_key`. Such names are shared by side requests,
    such as titles of a conversation, so that the messages up to the user's first one count, too. These alone are the
    name of a conversation with an earlier answer whose client sends no name.
    """
    name = next((headers[header] for header in SESSION_HEADERS if headers.get(header)), None)
    name = name or body.session_id or body.prompt_cache_key or ""
    messages = body.messages if isinstance(body, ChatBody) else []
    if not name and not any(message.role in ANSWERED for message in messages):
        return ""
    first = next((number for number, message in enumerate(messages) if message.role == "user"), len(messages))
    beginning = [(message.role, message.text) for message in messages[: first + 1]]
    return hashlib.sha256(json.dumps([name, body.user, beginning]).encode()).hexdigest()[:32]


class TokenizeBody(Body):
    """POST /tokenize: one of prompt and messages, and vLLM's other fields.

    return_token_strs: return the tokenizer's words of the tokens, too.
    add_special_tokens: those that the model expects at a start; by default, unless a chat template writes them.
    """

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs prompt or messages, and not both")
        if self.messages is None and (self.tools or self.chat_template_kwargs or self.add_generation_prompt):
            raise ValueError("tools, chat_template_kwargs and add_generation_prompt need messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize: token ids of the tokenizer, as in vLLM."""

    model: str | None = Field(None, max_length=512)
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class MoreBody(Body):
    """POST /v1/contexts/{name}/save: a saved context with more behind it, under another name or its own.

    text: continues it as it stands. messages: questions and answers about it, the last one from the assistant.
    """

    name: ContextName
    text: str | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> MoreBody:
        if (self.text is None) == (self.messages is None):
            raise ValueError("needs text or messages, and not both")
        return self


class KeepBody(MoreBody):
    """POST /v1/contexts: a text that is read once. text: what questions will follow. messages: a conversation."""


class ForkBody(Body):
    """POST /v1/contexts/{name}/fork: another name for what is saved under the first; nothing is copied."""

    name: ContextName
