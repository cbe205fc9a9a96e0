"""Failure: an error as OpenAI's clients expect it, with the HTTP status that it has; which error of ours is which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from retrieval_attn.errors import (
    AdmissionError,
    EngineFullError,
    RetrievalAttentionError,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreMismatchError,
    UnknownContextError,
)

__all__ = ["ApiError", "EngineLostError", "ended_error", "failure_of", "invalid"]

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


_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownContextError, 404, "context_not_found"),
    (StoreMismatchError, 409, "context_of_another_model"),
    (StoreDamagedError, 500, "context_damaged"),
    (StoreFullError, 507, "store_full"),
    (StoreBusyError, 503, "store_busy"),
    (StoreError, 400, "invalid_context"),
    (EngineFullError, 503, "queue_full"),
    (EngineLostError, 503, "engine_lost"),
    (AdmissionError, 400, "too_large"),
)
"""The first that fits; what else is wrong with a request is a ValueError (InputDataError, ConfigError, ...)."""

RETRY_SECONDS = 5


def failure_of(error: BaseException) -> ApiError:
    """What a client is told of an error. Errors that are not ours keep their message to the log."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, retry_after=RETRY_SECONDS if status == 503 else None)
    if isinstance(error, RetrievalAttentionError) and isinstance(error, ValueError):
        return ApiError(400, str(error))
    if isinstance(error, RetrievalAttentionError):
        return ApiError(500, str(error))
    return ApiError(500, f"The server failed ({type(error).__name__}); its log says more.")


MAX_TOLD = 5


def invalid(errors: Sequence[Any]) -> ApiError:
    """400 for a request whose fields are not as they should be. errors: pydantic's; the first five are told."""
    where = [str(part)[:100] for part in errors[0]["loc"] if part != "body"] if errors else []
    told = "; ".join(
        f"{'.'.join(str(part)[:100] for part in one['loc'] if part != 'body')}: {one['msg'][:300]}"
        for one in errors[:MAX_TOLD]
    )
    return ApiError(400, f"The request is not as it should be: {told}"[:2000], param=".".join(where)[:200] or None)
