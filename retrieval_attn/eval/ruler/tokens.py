"""Counting tokens with the real tokenizer, many texts at a time."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from retrieval_attn.eval.plans import NOISE_LINE, uuid4

__all__ = ["TokenCounter"]

_ANCHOR = "a"
_PIECE = 1 << 15  # characters
_WINDOW = 96  # characters on each side of a cut that decide how the two sides join
_CUT = re.compile(r"(?<=\S)[ \n](?=[A-Za-z0-9])")


class TokenCounter:
    """Token counts of one tokenizer, without special tokens.  A fast tokenizer counts on all cores.

    A long text is counted in pieces, which is faster and runs on several cores; what the cuts change is counted
    beside them.  That needs a tokenizer whose tokens depend on nearby text only: this is checked once, on a text of
    all kinds, and a tokenizer that fails gets every text in one piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._batch = getattr(backend, "encode_batch_fast", None) or getattr(backend, "encode_batch", None)
        self._inside: dict[str, int] = {}
        self._anchor = self.counts([_ANCHOR])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text on its own."""
        if self._batch is None or all(len(text) < 2 * _PIECE for text in texts) or not self._local:
            return self._whole(texts)
        return self._in_pieces(texts)

    def inside(self, pieces: Sequence[str]) -> list[int]:
        """Tokens that each piece adds behind other text; kept, so ask for pieces that come back."""
        new = list(dict.fromkeys(piece for piece in pieces if piece not in self._inside))
        if new:
            counted = self._whole([_ANCHOR + piece for piece in new])
            self._inside.update((p, n - self._anchor) for p, n in zip(new, counted, strict=True))
        return [self._inside[piece] for piece in pieces]

    def _whole(self, texts: Sequence[str]) -> list[int]:
        if self._batch is None:
            return [len(self._ids(text)) for text in texts]
        self._ids(_ANCHOR)  # an ordinary call clears truncation and padding that the backend may have been left with
        return [len(encoding) for encoding in self._batch(list(texts), add_special_tokens=False)]

    def _in_pieces(self, texts: Sequence[str], size: int = _PIECE) -> list[int]:
        parts: list[str] = []
        signs: list[tuple[int, int]] = []  # text, +1 or -1
        for i, text in enumerate(texts):
            start = 0
            while cut := _CUT.search(text, start + size):
                at = cut.start()
                left, right = text[at - _WINDOW : at], text[at : at + _WINDOW]
                parts += [text[start:at], left + right, left, right]
                signs += [(i, 1), (i, 1), (i, -1), (i, -1)]
                start = at
            parts.append(text[start:])
            signs.append((i, 1))
        counts = [0] * len(texts)
        for (i, sign), tokens in zip(signs, self._whole(parts), strict=True):
            counts[i] += sign * tokens
        return counts

    @cached_property
    def _local(self) -> bool:
        """Whether counting in pieces gives what counting at once gives."""
        from retrieval_attn.eval.haystack import shipped_prose

        rng = random.Random("ruler/check")
        lines = [f"One of the special magic uuids for {uuid4(rng)} is: {uuid4(rng)}." for _ in range(200)]
        words = shipped_prose(20_000, 0).split(" ")
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
        coded = " ".join(rng.choice(("...", f"{rng.getrandbits(28):07x}")) for _ in range(4000))
        texts = ["\n".join([NOISE_LINE] * 200), "\n".join(lines), " ".join(words), listed, coded]
        texts.append("\n\n".join(f"Document {i}:\n{' '.join(words[i : i + 40])}" for i in range(100)))
        return self._in_pieces(texts, 2000) == self._whole(texts)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
