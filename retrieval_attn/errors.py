"""Public exceptions of the package. A leaf module: it imports nothing of the package.

    RetrievalAttentionError
    ├── ConfigError            an option is unknown, of the wrong type or out of range       (also ValueError)
    ├── ShapeError             arrays with an unsupported shape, dtype or layout             (also ValueError)
    │   └── NotFiniteError     keys or queries with NaN or infinity
    ├── UnsupportedModelError  a model, or an attention mask of it, that cannot run exactly
    ├── ContextLengthError     more tokens than the model has positions                      (also ValueError)
    ├── CacheMismatchError     a cache used with another model, batch or token sequence
    ├── CaptureError           a decode step that cannot be captured as a CUDA graph
    ├── BackendError           no attention backend supports a shape, dtype or device
    ├── MemoryPlanError        a plan that does not fit the given memory
    ├── InputDataError         a file or text that is missing, empty or malformed            (also ValueError)
    ├── AdmissionError         a request that can never be admitted                          (also ValueError)
    ├── EngineFullError        the engine's queue is full, or the engine is shutting down
    └── StoreError             saved contexts that cannot be written or read
        ├── UnknownContextError    a name or node that is not in the store
        ├── StoreDamagedError      a saved context with a wrong checksum or size
        └── StoreMismatchError     a saved context of another model, tokenizer or format version

Messages state what was needed, what was given and what to do. Internal exceptions are defined in the modules that raise
them and derive from RetrievalAttentionError.
"""

from __future__ import annotations

from typing import Literal


class RetrievalAttentionError(Exception):
    """Base class of all exceptions that the package raises on purpose."""


class ConfigError(RetrievalAttentionError, ValueError):
    """An option is unknown, of the wrong type or out of range."""


class ShapeError(RetrievalAttentionError, ValueError):
    """Arrays have a shape, dtype or memory layout that the called kernel does not support."""


class NotFiniteError(ShapeError):
    """Keys or queries contain NaN or infinity."""


class UnsupportedModelError(RetrievalAttentionError):
    """A model, or an attention mask other than causal plus padding, cannot run exactly; the message has the reason."""


class _TooManyTokensError(RetrievalAttentionError, ValueError):
    """Base class of errors with token counts.

    limit: maximum tokens of a request. tokens: lower bound of the request's tokens. None: not counted in tokens.
    """

    def __init__(self, message: str, *, limit: int | None = None, tokens: int | None = None) -> None:
        super().__init__(message)
        self.limit, self.tokens = limit, tokens


class ContextLengthError(_TooManyTokensError):
    """A request has more tokens than the model serves.

    reason: why these are fewer than its positions; "" if they are not, or the message has it.
    """

    def __init__(self, message: str, *, limit: int | None = None, tokens: int | None = None, reason: str = "") -> None:
        super().__init__(message, limit=limit, tokens=tokens)
        self.reason = reason


class CacheMismatchError(RetrievalAttentionError):
    """A cache is used with another model, another batch size or tokens that it does not hold."""


class CaptureError(RetrievalAttentionError):
    """A decode step cannot be captured as a CUDA graph; the message has the reason."""


class BackendError(RetrievalAttentionError):
    """No attention backend supports the given shape, dtype or device."""


class MemoryPlanError(RetrievalAttentionError):
    """A plan does not fit the given memory."""


class InputDataError(RetrievalAttentionError, ValueError):
    """A file or text is missing, empty or malformed."""


class AdmissionError(_TooManyTokensError):
    """A request can never be admitted, or its id is in use; the message has the arithmetic."""


class EngineFullError(RetrievalAttentionError):
    """The queue is full, or the engine accepts no new requests; a retry may succeed."""


StoreReason = Literal["failed", "name", "full", "busy"]
"""Kinds of StoreError without a class of their own."""


class StoreError(RetrievalAttentionError):
    """Saved contexts cannot be written or read; the message has the file and the cure.

    reason: "name": an invalid context name. "full": no space on the disk. "busy": the store is in use by another
    process or too many requests. "failed": anything else.
    """

    def __init__(self, message: str, *, reason: StoreReason = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class UnknownContextError(StoreError):
    """A name or node is not in the store. context: the name; None for a node."""

    def __init__(self, message: str, *, context: str | None = None) -> None:
        super().__init__(message)
        self.context = context


class StoreDamagedError(StoreError):
    """A saved context has a wrong checksum or size. blocks: lower bound of its damaged blocks."""

    blocks = 1


class StoreMismatchError(StoreError):
    """A saved context has another model, tokenizer, format or version; the message names the differences."""
