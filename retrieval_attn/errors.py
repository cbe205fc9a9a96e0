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
    ├── MemoryPlanError        a plan that does not fit the memory it was given
    ├── InputDataError         a user's file or text that is missing, empty or malformed     (also ValueError)
    └── RunFolderError         a results folder that belongs to another configuration

Messages say three things: what was needed, what was given, what to do.
"""

from __future__ import annotations


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


class ContextLengthError(RetrievalAttentionError, ValueError):
    """More tokens than the model has positions for."""


class CacheMismatchError(RetrievalAttentionError):
    """A cache used with another model, another batch size or tokens it has not seen."""


class CaptureError(RetrievalAttentionError):
    """A decode step that cannot be recorded as one graph; the message carries the reason."""


class BackendError(RetrievalAttentionError):
    """No attention backend can serve the given shape, dtype or device."""


class MemoryPlanError(RetrievalAttentionError):
    """A plan that does not fit into the memory it was given."""


class InputDataError(RetrievalAttentionError, ValueError):
    """A file or text from the user that is missing, empty or malformed."""


class RunFolderError(RetrievalAttentionError):
    """A results folder that belongs to another configuration."""
