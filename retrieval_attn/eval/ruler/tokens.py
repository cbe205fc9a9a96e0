"""Counting tokens with the real tokenizer, many texts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TokenCounter"]

_ANCHOR = "a"


class TokenCounter:
    """Token counts of one tokenizer, without special tokens.  A fast tokenizer counts a batch on all cores."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._batch = getattr(backend, "encode_batch_fast", None) or getattr(backend, "encode_batch", None)
        self._inside: dict[str, int] = {}
        self._anchor = self.counts([_ANCHOR])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text on its own."""
        if self._batch is None:
            return [len(self._ids(text)) for text in texts]
        self._ids(_ANCHOR)  # an ordinary call clears truncation and padding that the backend may have been left with
        return [len(encoding.ids) for encoding in self._batch(list(texts), add_special_tokens=False)]

    def inside(self, pieces: Sequence[str]) -> list[int]:
        """Tokens that each piece adds behind other text; kept, so ask for pieces that come back."""
        new = list(dict.fromkeys(piece for piece in pieces if piece not in self._inside))
        if new:
            counted = self.counts([_ANCHOR + piece for piece in new])
            self._inside.update((p, n - self._anchor) for p, n in zip(new, counted, strict=True))
        return [self._inside[piece] for piece in pieces]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
