"""`full`: no index. All keys stay on the device, in a window that grows, and every query attends to all of them.

The baseline that retrieval is judged by, and the faster choice if the keys are few and fit the device. What
the host has of them is for saved contexts; should it be searched, it is scanned exactly.
"""

from __future__ import annotations

from typing import ClassVar

from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.spec import register

__all__ = ["FullIndex", "kept_tokens"]

FULL_ROOM = 512
"""Tokens that a window has room for behind those that it holds, at least."""
STEPS = 8
"""Sizes of windows between a power of two and the next: graphs are captured for each, and an eighth is empty at most
but for the room."""


@register
class FullIndex(FlatIndex):
    """See the module. Options as those of `flat`."""

    kind: ClassVar[str] = "full"


def kept_tokens(tokens: int) -> int:
    """Tokens that a window which keeps them all has room for, if it holds `tokens`."""
    least = tokens + FULL_ROOM
    step = max(FULL_ROOM, (1 << (least.bit_length() - 1)) // STEPS)
    return -(-least // step) * step
