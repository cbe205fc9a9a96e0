"""Failure: an error as OpenAI's clients expect it, with the HTTP status that it has; which error of ours is which."""

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

__all__ = ["ApiError", "EngineLostError", "ended_error", "failure_of", "invalid", "text_from"]

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
"""OpenAI's word for each status; others are "server_error"."""


class EngineLostError(RetrievalAttentionError):
    """The engine has ended, or its process has: what it was asked is lost, and a later try may succeed."""


def ended_error() -> EngineLostError:
    """Of what the server could not finish before its end."""
    return EngineLostError("The server ended before this was done; ask again.")


class ApiError(Exception):
    """Ends a request with this status. retry_after: seconds, told in a header; None: no word about it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        """param: the field that is wrong. code: a word for programs, such as "model_not_found"."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """As JSON values."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def encoded(self) -> bytes:
        """The body in ASCII: a message may quote a lone surrogate, which UTF-8 cannot write."""
        return json.dumps(self.body).encode("ascii")

    @property
    def headers(self) -> dict[str, str]:
        """Beside those that every answer has."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


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
        "The keys of this text or saved context do not fit the model as it is now: its weights or adapters were others "
        "when the text was read. Ask again, or save the context's text again."),
    _Answer(StoreDamagedError, 500, "context_damaged",
        "This saved context is damaged. Ask again; if that fails, too, save its text again under the same name."),
    _Answer(StoreError, 500, "store_failed", "Saved contexts cannot be read or written; the server's log says why."),
    _Answer(EngineFullError, 503, "queue_full",
        "As many requests wait as may, or the server is ending; send this again later."),
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
    """What a client is told of an error; `noted` logs the error's own words.

    field: of the request's body, that has the text. answer_tokens: most tokens of the answer; None: not known yet.
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
    """Name the field of the request's body that has the text if it is too long. Raises ApiError for it."""
    try:
        yield
    except (ContextLengthError, AdmissionError) as error:
        raise failure_of(error, field=field) from error


def _too_long(error: Exception, limit: int, tokens: int, field: str, answer_tokens: int | None) -> ApiError:
    """In OpenAI's words, by which clients know that a conversation must be shortened."""
    why = " (as many as this server's memory takes)" if isinstance(error, AdmissionError) else ""
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
_UNION_MEMBER = re.compile(r"str|constrained-str|(list|nullable|function-\w+)\[.*\]|\[key\]", re.DOTALL)
"""Parts of pydantic's locations that name no field, but a type that a field may have."""


def invalid(errors: Sequence[Any]) -> ApiError:
    """400 for a request whose fields are not as they should be. errors: pydantic's; the first five are told."""
    found = [(_field_of(one), one["msg"].removeprefix("Value error, ")[:300]) for one in errors[:MAX_TOLD]]
    told = "; ".join(f"{field}: {message}" if field else message for field, message in found)
    param = found[0][0][:200] or None if found else None
    return ApiError(400, f"The request is not as it should be: {told}"[:2000], param=param)


def _field_of(error: Any) -> str:
    """The field of one of pydantic's errors, as `messages.0.content`; "" for the whole body."""
    parts = [str(part)[:100] for part in error["loc"] if part != "body"]
    return ".".join(part for part in parts if not _UNION_MEMBER.fullmatch(part))
