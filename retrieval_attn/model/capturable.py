"""The mark of forward hooks that a graph may record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_retrieval_attn_capturable"


def capturable(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a module's forward hook as nothing but operations on tensors, in place or not: a graph may record it.

    Other hooks keep a model from being captured, for replays would not call them. Returns the hook.
    """
    setattr(hook, _MARK, True)
    return hook


def is_capturable(hook: Callable[..., Any]) -> bool:
    """Whether `capturable` marked this hook."""
    return hasattr(hook, _MARK)
