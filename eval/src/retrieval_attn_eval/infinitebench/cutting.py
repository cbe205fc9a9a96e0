"""Truncation of a context that is too long: from its middle, on token ids, and nowhere else in the prompt.

The published code cuts the whole prompt, decodes the halves and tokenizes them again, and leaves no room for the
answer; here instructions and question stay whole, ids are never made twice, and what was lost is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrieval_attn.errors import ConfigError

__all__ = ["Context", "cut_context"]


@dataclass(frozen=True)
class Context:
    """A context as text and as the ids to use for it.

    dropped: tokens left out.  parts: the text that is left, in one piece or in two.
    """

    text: str
    ids: Sequence[int]
    dropped: int
    parts: tuple[str, ...]

    def holds(self, text: str) -> bool:
        """True if one part has `text` in it as a whole."""
        return any(text in part for part in self.parts)


def cut_context(tokenizer: Any, before: str, context: str, after: str, room: int | None) -> Context:
    """before + context + after in at most `room` tokens; the middle of `context` is left out if it has to be.

    room: None for no limit.  Half of what fits is kept from the beginning, half from the end.
    Raises ConfigError if before and after alone do not fit, or for a tokenizer without an offset map.
    """
    text = before + context + after
    encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids = list(encoded["input_ids"])
    if room is None or len(ids) <= room:
        return Context(text, ids, 0, (text,))
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"needed a tokenizer with an offset map (a fast tokenizer) to shorten a context of {len(ids)} tokens to"
            f" {room}, given {type(tokenizer).__name__}; use a model folder with a tokenizer.json"
        )
    encoding = encoded.encodings[0]
    offsets = encoding.offsets
    # tokens that touch the text around the context stay
    first = next((i for i, (start, stop) in enumerate(offsets) if stop > len(before)), len(ids))
    first += first < len(ids) and offsets[first][0] < len(before)
    inner = len(before) + len(context)
    last = next((i for i in range(len(ids), first, -1) if offsets[i - 1][0] < inner), first)
    last -= last > first and offsets[last - 1][1] > inner
    keep = room - first - (len(ids) - last)
    if keep < 0:
        raise ConfigError(
            f"the length leaves {room} tokens for the context and the words around it, which alone need"
            f" {first + len(ids) - last}; give a longer length"
        )
    head, tail = first + keep // 2, last - (keep - keep // 2)
    while first < head and tail > head and offsets[head][0] < offsets[head - 1][1]:
        head -= 1  # a character of several tokens is not cut in two
    while head < tail < last and offsets[tail][0] < offsets[tail - 1][1]:
        tail += 1
    beginning, end = (
        text[: offsets[head - 1][1] if head else 0],
        text[offsets[tail][0] if tail < len(ids) else len(text) :],
    )
    return Context(beginning + end, ids[:head] + ids[tail:], tail - head, (beginning, end))
