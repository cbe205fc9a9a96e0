"""Bodies of responses of the HTTP API, as pydantic models of the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class AnswerBody(BaseModel):
    """Nothing is in an answer that is not named here."""

    model_config = ConfigDict(extra="forbid")


class ErrorWords(AnswerBody):
    """message: what was needed, what was given, what to do. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerBody):
    """Body of an error response."""

    error: ErrorWords


class MessagesErrorWords(AnswerBody):
    """type: Anthropic's."""

    type: str
    message: str


class MessagesErrorAnswer(AnswerBody):
    """Body of an error response of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorWords
    request_id: str | None


class CachedTokens(AnswerBody):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class UsageBody(AnswerBody):
    """Tokens of the prompt, with those of a saved context, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(AnswerBody):
    """bytes: of the token alone, also of a part of a character; None if the tokenizer does not tell them."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerBody):
    """Log-probabilities of the tokens of the answer."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(AnswerBody):
    """arguments: JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCallRecord(AnswerBody):
    """A tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(AnswerBody):
    """The message of an answer. content: null if there are tool calls and no text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCallRecord] = []


class ChatChoice(AnswerBody):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(AnswerBody):
    """Response of POST /v1/chat/completions without stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextLogprobs(AnswerBody):
    """Log-probabilities of the tokens of the answer, and with `echo` of the prompt (null for its first token)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(AnswerBody):
    """One of `n` answers to one of the prompts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextAnswer(AnswerBody):
    """Response of POST /v1/completions without stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class ModelRecord(AnswerBody):
    """The model, or a saved context as a model, MODEL@NAME."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(AnswerBody):
    """Response of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelRecord]


class ContextRecord(AnswerBody):
    """A saved context.

    bytes: size of its files, shared ones included; until it is durable, bytes written so far. created: seconds since
    1970. durable: its files are synced to the disk and its name is committed. error: reason why its write failed.
    """

    id: str
    object: Literal["context"]
    model: str
    tokens: int
    bytes: int
    created: int
    durable: bool
    error: str | None = None


class ContextList(AnswerBody):
    """Response of GET /v1/contexts."""

    object: Literal["list"]
    data: list[ContextRecord]


class RequestCounts(AnswerBody):
    """Requests by state: queued, in prefill, prefilled without a slot, in the running batch, without their slot."""

    waiting: int
    reading: int
    ready: int
    decoding: int
    preempted: int


class PrefillRecord(AnswerBody):
    """A prefill in progress: tokens of the prompt, completed share, saved context that the prompt continues."""

    tokens: int
    done: float
    context: str | None


class CachedTextRecord(AnswerBody):
    """An entry of the prefix cache.

    text: first words after `start` tokens. tokens: tokens of the whole text. key: name of the API key; None: no key, or
    shared. context: saved context that it is or continues. Bytes shared with the entry that it continues are not
    counted.
    """

    number: int
    text: str
    start: int
    tokens: int
    key: str | None
    context: str | None
    gpu_bytes: int
    host_bytes: int
    in_use: bool
    idle_seconds: float


class SavedTextRecord(AnswerBody):
    """A saved context. Without an admin's key only name and time are given."""

    name: str
    created: int
    text: str | None
    tokens: int | None
    disk_bytes: int | None


class TierMemory(AnswerBody):
    """Bytes in use and their limit, and those of the prefix cache; None: no limit, or no prefix cache there."""

    used: int
    limit: int
    cache: int | None
    cache_limit: int | None


class MemoryRecord(AnswerBody):
    """Memory by tier. gpu: missing for a model on the CPU."""

    gpu: TierMemory | None = None
    host: TierMemory
    disk: TierMemory


class StatusRecord(AnswerBody):
    """Response of GET /status. warming: see `Health`; null: all are. memory, counts: null without an admin's key."""

    model: str
    version: str
    warming: str | None
    max_model_len: int
    caller: str
    admin: bool
    requests: RequestCounts
    prefills: list[PrefillRecord]
    texts: list[CachedTextRecord]
    contexts: list[SavedTextRecord]
    contexts_total: int
    memory: MemoryRecord | None
    counts: dict[str, Any] | None


class Deleted(AnswerBody):
    """Response of DELETE /v1/contexts/{name}."""

    id: str
    object: Literal["context"]
    deleted: Literal[True]


class ResponseAnswer(AnswerBody):
    """Response of POST /v1/responses without stream. output: items of the types message, reasoning, function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    usage: dict[str, Any]
    user: str | None


class DeletedResponse(AnswerBody):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Tokens(AnswerBody):
    """Response of POST /tokenize. token_strs: if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Detokenized(AnswerBody):
    """Response of POST /detokenize."""

    prompt: str


class GenerationFacts(AnswerBody):
    """n_ctx: maximum tokens of a prompt with its answer. params: sampling values of requests that give none."""

    n_ctx: int
    params: dict[str, float]


class Modalities(AnswerBody):
    """Inputs besides text."""

    vision: bool
    audio: Literal[False]


class Props(AnswerBody):
    """Response of GET /props, as llama.cpp's. tool_format: of parsed tool calls; null: calls are returned as text."""

    model_alias: str
    default_generation_settings: GenerationFacts
    chat_template: str
    bos_token: str | None
    eos_token: str | None
    modalities: Modalities
    tool_format: str | None
    build_info: str


class MessagesModel(AnswerBody):
    """The model in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int


class MessagesModelList(AnswerBody):
    """Response of GET /v1/models to a request with the header anthropic-version."""

    data: list[MessagesModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Health(AnswerBody):
    """Response of GET /health. warming: graphs that are captured so far, such as "4 of 15 graphs"; absent: all are."""

    status: Literal["ok"]
    warming: str = ""


class Version(AnswerBody):
    """Response of GET /version."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "Bad request",
        401: "No key, or an unknown one",
        403: "The key is not an admin's",
        404: "Unknown model or context",
        409: "A context of another model, or a name that is taken",
        413: "Too large a body",
        503: "Too many wait, or the engine is lost; Retry-After says when to come again",
        504: "Not answered within the deadline",
    }.items()
}
"""What every request may be told."""
