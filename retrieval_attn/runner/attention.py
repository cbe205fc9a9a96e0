"""Which attention a model runs: switched for good, or for the duration of a block."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.model import hooks
from retrieval_attn.model.multimodal import for_text, text_attention
from retrieval_attn.runner.prefill import chunks_of, unwrap_layers, wrap_layers, wrapped_chunk


@dataclass
class _Use:
    """State of a model before its first use, and the number of its users now."""

    attention: str
    wrapped: bool
    count: int = 0


_uses: weakref.WeakKeyDictionary[PreTrainedModel, _Use] = weakref.WeakKeyDictionary()
_uses_lock = threading.Lock()


@contextmanager
def using_retrieval(model: PreTrainedModel, chunk: int) -> Iterator[None]:
    """Retrieval attention and layer-major prefill in chunks of `chunk` for the duration, then what the model had.

    Several threads may use a model at once, each with chunks of its own: the last one to leave gives it back.
    """
    with _uses_lock:
        attention, layers = text_attention(model), wrapped_chunk(model)
        if attention != hooks.NAME:
            set_attention(model, hooks.NAME)
        if layers is None:
            wrap_layers(model, chunk)
        use = _uses.setdefault(model, _Use(attention, layers is not None))
        use.count += 1
    try:
        with chunks_of(model, chunk):
            yield
    finally:
        with _uses_lock:
            use.count -= 1
            if use.count == 0:
                _uses.pop(model, None)
                if use.attention != hooks.NAME:
                    set_attention(model, use.attention)
                if not use.wrapped:
                    unwrap_layers(model)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """model.set_attn_implementation, of its text decoder alone, with an error that says what to do."""
    hooks.register()
    try:
        model.set_attn_implementation(for_text(model, name))
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take attn_implementation={name!r}: {error}. Its attention is written "
            "into the model; use a model class with transformers' attention interface."
        ) from error
    if text_attention(model) != name:
        raise UnsupportedModelError(
            f"{type(model).__name__} must take attn_implementation={name!r}, but it kept {text_attention(model)!r}; "
            "use a model class with transformers' attention interface."
        )
