"""Bodies of answers, in OpenAI's words, as the schema describes them; the answers themselves are plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["ChatAnswer", "ContextList", "ContextRecord", "ErrorAnswer", "Health", "ModelList", "ModelRecord"]


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
    """Of every status of 400 and more."""

    error: ErrorWords


class CachedTokens(AnswerBody):
    """Of the prompt, tokens that were not read for this request."""

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
    """Of each token of the answer."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(AnswerBody):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(AnswerBody):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatAnswer(AnswerBody):
    """Of POST /v1/chat/completions that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextLogprobs(AnswerBody):
    """Of each token of the answer, and with `echo` of the prompt, whose first token has none."""

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
    """Of POST /v1/completions that is not streamed."""

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
    """Of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelRecord]


class ContextRecord(AnswerBody):
    """A saved context. bytes: of all its files, those that others share too. created: seconds since 1970."""

    id: str
    object: Literal["context"]
    model: str
    tokens: int
    bytes: int
    created: int


class ContextList(AnswerBody):
    """Of GET /v1/contexts."""

    object: Literal["list"]
    data: list[ContextRecord]


class Deleted(AnswerBody):
    """Of DELETE /v1/contexts/{name}."""

    id: str
    object: Literal["context"]
    deleted: Literal[True]


class Tokens(AnswerBody):
    """Of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Health(AnswerBody):
    """Of GET /health."""

    status: Literal["ok"]


class Version(AnswerBody):
    """Of GET /version."""

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
