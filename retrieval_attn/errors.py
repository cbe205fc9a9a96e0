"""Every exception this package raises on purpose. A leaf module: it imports nothing of the package.

    RetrievalAttentionError
    ├── ConfigError            an option is unknown, of the wrong type or out of range      (also ValueError)
    ├── ShapeError             arrays whose shape, dtype or layout a kernel cannot take      (also ValueError)
    │   └── NotFiniteError     arrays with NaN or infinity where an index needs numbers
    ├── UnsupportedModelError  a model this package cannot run exactly, with its reason
    ├── UnsupportedMaskError   an attention mask that is not causal plus padding
    ├── ContextLengthError     more tokens than the model has positions for                  (also ValueError)
    ├── CacheMismatchError     a cache used with another model, batch or token sequence
    ├── CaptureError           a decode step that cannot be recorded as one graph, with its reason
    ├── BackendError           no attention backend can serve a shape, dtype or device
    │   └── RowsFailedError    some rows of a step for several failed; the others' logits are right
    ├── MemoryPlanError        a plan that does not fit the memory it was given
    ├── OutOfPagesError        more pages than are free
    ├── ReleasedError          a page or a node that was given back, used as if it were still held
    ├── InputDataError         a user's file or text that is missing, empty or malformed     (also ValueError)
    ├── RunFolderError         a results folder that belongs to another configuration
    ├── AdmissionError         a request that can never be admitted, with the arithmetic    (also ValueError)
    ├── EngineFullError        as many requests wait as may wait, or the engine is draining
    └── StoreError             saved contexts that cannot be written or read, with the file
        ├── UnknownContextError    a name or a node that the store does not have
        ├── ContextNameError       a name that no saved context can have
        ├── StoreDamagedError      a saved context whose bytes are not those that were written
        ├── StoreMismatchError     a context of another model, tokenizer or version of the store
        ├── StoreFullError         no room on the disk, or in the bytes that the store may have
        └── StoreBusyError         another process kept the store locked

Messages say three things: what was needed, what was given, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RetrievalAttentionError(Exception):
    """Base of every exception this package raises on purpose."""


class ConfigError(RetrievalAttentionError, ValueError):
    """An option is unknown, of the wrong type or out of range."""


class ShapeError(RetrievalAttentionError, ValueError):
    """Arrays whose shape, dtype or memory layout the called kernel cannot take."""


class NotFiniteError(ShapeError):
    """Keys or queries with NaN or infinity, for an index that cannot order those."""


class UnsupportedModelError(RetrievalAttentionError):
    """A model that this package cannot run exactly; the message carries the reason."""


class UnsupportedMaskError(RetrievalAttentionError):
    """An attention mask that is not "causal plus per-row padding"."""


class _TooManyTokensError(RetrievalAttentionError, ValueError):
    """limit: tokens that a request may have. tokens: those that it has, at least. None: not counted in tokens."""

    def __init__(self, message: str, *, limit: int | None = None, tokens: int | None = None) -> None:
        super().__init__(message)
        self.limit, self.tokens = limit, tokens


class ContextLengthError(_TooManyTokensError):
    """More tokens than the model has positions for."""


class CacheMismatchError(RetrievalAttentionError):
    """A cache used with another model, another batch size or tokens it has not seen."""


class CaptureError(RetrievalAttentionError):
    """A decode step that cannot be recorded as one graph; the message carries the reason."""


class BackendError(RetrievalAttentionError):
    """No attention backend can serve the given shape, dtype or device."""


class RowsFailedError(BackendError):
    """Some rows of a step for several rows failed; the others have their token.

    errors: what went wrong, by the row's number. logits: (rows, vocabulary) float32, those of failed rows without
    meaning.
    """

    def __init__(self, errors: Mapping[int, Exception], logits: Any) -> None:
        self.errors, self.logits = dict(errors), logits
        told = "; ".join(f"row {row}: {type(error).__name__}: {error}" for row, error in self.errors.items())
        super().__init__(f"{told}. Their caches cannot be used any more; the other rows have their token.")


class MemoryPlanError(RetrievalAttentionError):
    """A plan that does not fit into the memory it was given."""


class OutOfPagesError(RetrievalAttentionError):
    """More pages than are free; the message has the numbers."""


class ReleasedError(RetrievalAttentionError):
    """A page or a node that nobody holds any more: it was freed or evicted, or was never taken."""


class InputDataError(RetrievalAttentionError, ValueError):
    """A file or text from the user that is missing, empty or malformed."""


class RunFolderError(RetrievalAttentionError):
    """A results folder that belongs to another configuration."""


class AdmissionError(_TooManyTokensError):
    """A request that could never be admitted, or whose name is taken; the message carries the arithmetic."""


class EngineFullError(RetrievalAttentionError):
    """As many requests wait as may wait, or the engine takes no new ones; a later try may succeed."""


class StoreError(RetrievalAttentionError):
    """Saved contexts that cannot be written or read; the message names the file and what to do."""


class UnknownContextError(StoreError):
    """A name, or a node of a chain, that the store does not have. context: the name; None: a node's."""

    def __init__(self, message: str, *, context: str | None = None) -> None:
        super().__init__(message)
        self.context = context


class ContextNameError(StoreError):
    """A name that no saved context can have."""


class StoreDamagedError(StoreError):
    """A saved context whose bytes are not those that were written; nothing of it may be used.

    blocks: that are known to be damaged, at least.
    """

    blocks = 1


class StoreMismatchError(StoreError):
    """A saved context of another model, tokenizer, format or version; the message says what differs."""


class StoreFullError(StoreError):
    """No room for a context: the disk is full, or a quota, or the bytes that the store may have."""


class StoreBusyError(StoreError):
    """Another process kept the store locked for longer than is waited."""
