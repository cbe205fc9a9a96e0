"""Errors in OpenAI's form, and the HTTP status of each exception of the package."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from retrieval_attn.errors import (
    AdmissionError,
    CacheMismatchError,
    ConfigError,
    ContextLengthError,
    EngineFullError,
    InputDataError,
    RetrievalAttentionError,
    StoreDamagedError,
    StoreError,
    StoreMismatchError,
    UnknownContextError,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""OpenAI's error type by status; "server_error" for any other status."""


MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error type by status; "invalid_request_error" for other errors of the client, "api_error" for others."""
MESSAGES_PATH = "/v1/messages"
"""Errors of this path and those below it have Anthropic's form."""


class EngineLostError(RetrievalAttentionError):
    """The engine or its process has ended: its requests are lost; a retry may succeed."""


def ended_error() -> EngineLostError:
    """Return the error of requests that the server's shutdown cut off."""
    return EngineLostError("The server shut down before the request was finished; send it again.")


class ApiError(Exception):
    """An error response. retry_after: value of the Retry-After header in seconds; None for no header."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        """param: name of the wrong field. code: identifier for programs, such as "model_not_found"."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The response's body as JSON values."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """Return the response's body in Anthropic's form."""
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        too_long = "prompt is too long: " if self.code == "context_length_exceeded" else ""  # clients look for it
        error = {"type": kind, "message": too_long + self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    @property
    def encoded(self) -> bytes:
        """The body in ASCII: a message may quote a lone surrogate, which UTF-8 cannot encode."""
        return json.dumps(self.body).encode("ascii")

    def encoded_for(self, path: str, request_id: str) -> bytes:
        """Return the body in the form of the API that a path belongs to."""
        return json.dumps(self.messages_body(request_id)).encode("ascii") if has_messages_form(path) else self.encoded

    @property
    def headers(self) -> dict[str, str]:
        """Headers of this error."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def has_messages_form(path: str) -> bool:
    """Return whether errors of a path have Anthropic's form."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class _Answer(NamedTuple):
    """HTTP form of an exception. text: replaces its message, which has paths and commands; None: its message."""

    kind: type[Exception]
    status: int
    code: str
    text: str | None


_ANSWERS = (
    _Answer(UnknownContextError, 404, "context_not_found", "A part of this context is gone; save its text again."),
    _Answer(StoreMismatchError, 409, "context_of_another_model",
        "This context was saved with another model, tokenizer, chat template or release; save its text again."),
    _Answer(CacheMismatchError, 409, "context_of_another_model",
        "The KV cache of this text or saved context was computed with other weights or adapters of the model. Send "
        "this again, or save the context's text again."),
    _Answer(StoreDamagedError, 500, "context_damaged",
        "This saved context is damaged. Send this again; if it fails again, save the text again under the same name."),
    _Answer(StoreError, 500, "store_failed", "Saved contexts cannot be read or written; the server's log says why."),
    _Answer(EngineFullError, 503, "queue_full",
        "The request queue is full, or the server is shutting down; send this again later."),
    _Answer(EngineLostError, 503, "engine_lost", None),
    _Answer(AdmissionError, 400, "too_large",
        "The prompt takes more memory than this server has for one request; shorten it."),
    _Answer(ConfigError, 400, "", None),
    _Answer(InputDataError, 400, "", None),
)  # fmt: skip
"""The first match counts. Other exceptions give status 500 and their class name."""

_STORE_ANSWERS = {
    "name": _Answer(StoreError, 400, "invalid_context",
        "A context's name has 1 to 64 of the letters A-Z and a-z, digits and _ . -, and is not . or .. alone."),
    "full": _Answer(StoreError, 507, "store_full",
        "There is no room for another saved context; delete some, and save this one again."),
    "busy": _Answer(StoreError, 503, "store_busy", "Another process uses the saved contexts; send this again later."),
}  # fmt: skip
"""Answers to a StoreError, by its reason."""

RETRY_SECONDS = 5


def failure_of(error: BaseException, *, field: str = "prompt", answer_tokens: int | None = None) -> ApiError:
    """Return the HTTP form of an exception; `noted` logs its own message.

    field: field of the body with the text. answer_tokens: maximum tokens of the answer; None if it is not known yet.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError | AdmissionError) and error.limit is not None and error.tokens is not None:
        return _too_long(error, error.limit, error.tokens, field, answer_tokens)
    if isinstance(error, UnknownContextError) and error.context is not None:
        return ApiError(404, f"There is no saved context {error.context[:80]!r}.", code="context_not_found")
    found = _STORE_ANSWERS.get(error.reason) if isinstance(error, StoreError) else None
    found = found or next((one for one in _ANSWERS if isinstance(error, one.kind)), None)
    if found is None:
        return ApiError(500, f"The server failed ({type(error).__name__}); its log says more.")
    retry_after = RETRY_SECONDS if found.status == 503 else None
    return ApiError(found.status, found.text or str(error), code=found.code or None, retry_after=retry_after)


@contextlib.contextmanager
def text_from(field: str) -> Iterator[None]:
    """Turn errors of a too long text inside the block into an ApiError that names the field of the body."""
    try:
        yield
    except (ContextLengthError, AdmissionError) as error:
        raise failure_of(error, field=field) from error


@contextlib.contextmanager
def document_from(field: str) -> Iterator[None]:
    """Do the same as `text_from` for the text of a saved context."""
    try:
        yield
    except (ContextLengthError, AdmissionError) as error:
        if error.limit is None or error.tokens is None:
            raise failure_of(error, field=field) from error
        holder = "the memory of this server" if isinstance(error, AdmissionError) else "a context of this server"
        raise ApiError(
            400, f"There are at least {error.tokens} tokens in the {field}, but {holder} holds "
            f"{error.limit}: shorten the {field}, or split it into several contexts.", param=field,
            code="context_length_exceeded",
        ) from error  # fmt: skip


def _too_long(error: Exception, limit: int, tokens: int, field: str, answer_tokens: int | None) -> ApiError:
    """Return the error in OpenAI's words, by which clients detect that a conversation must be shortened."""
    why = " (the limit of this server's memory)" if isinstance(error, AdmissionError) else ""
    if isinstance(error, ContextLengthError) and error.reason:
        why = f" ({error.reason})"
    begin = f"This model's maximum context length is {limit} tokens{why}. However, "
    if answer_tokens is None:
        told = f"you requested at least {tokens} tokens in the {field}. Please reduce the length of the {field}."
    else:
        told = (
            f"you requested {tokens} tokens ({tokens - answer_tokens} in the {field}, {answer_tokens} in the "
            f"completion). Please reduce the length of the {field} or completion."
        )
    return ApiError(400, begin + told, param=field, code="context_length_exceeded")


MAX_TOLD = 5
_UNION_MEMBER = re.compile(
    r"str|constrained-str|(list|nullable|literal|tagged-union|function-\w+)\[.*\]|\[key\]", re.DOTALL
)
"""Parts of pydantic's locations that are types and not fields."""


def invalid(errors: Sequence[Any]) -> ApiError:
    """Return the error for invalid fields. errors: pydantic's; the message has the first five."""
    found = [(_field_of(one), one["msg"].removeprefix("Value error, ")[:300]) for one in errors[:MAX_TOLD]]
    told = "; ".join(f"{field}: {message}" if field else message for field, message in found)
    param = found[0][0][:200] or None if found else None
    return ApiError(400, f"The request is invalid: {told}"[:2000], param=param)


def _field_of(error: Any) -> str:
    """Return the field of a pydantic error, such as `messages.0.content`; "" for the whole body."""
    parts = [str(part) for part in error["loc"] if part != "body"]
    return ".".join(part[:100] for part in parts if not _UNION_MEMBER.fullmatch(part))
