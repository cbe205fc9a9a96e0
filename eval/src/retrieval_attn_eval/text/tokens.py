"""Counting tokens with the real tokenizer, many texts at a time."""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from retrieval_attn_eval.plans import NOISE_LINE, uuid4

__all__ = ["TokenCounter"]

_ANCHOR = "a"
_PIECE = 1 << 13  # characters
_LONG = 1 << 16
_WINDOW = 96  # characters on each side of a cut that decide how the two sides join
_SENTENCE = re.compile(r"(?<=\.)[ \n](?=[A-Z])")
_LINE = re.compile(r"(?<=\S)\n(?=[A-Za-z0-9])")
_WORD = re.compile(r"(?<=\S) (?=[A-Za-z0-9])")
_ONE_OF = 128  # sentences


class TokenCounter:
    """Token counts of one tokenizer, without special tokens.  A fast tokenizer counts on all cores.

    A long text is counted in pieces, on several cores; what the cuts change is counted beside them.  Cuts are chosen
    by the text around them, so that texts which share most of their haystack share most of their pieces, and a piece
    is counted once.  That needs a tokenizer whose tokens depend on nearby text only: this is checked once, on a text of
    all kinds, and a tokenizer that fails gets every text in one piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._batch = getattr(backend, "encode_batch_fast", None) or getattr(backend, "encode_batch", None)
        self._inside: dict[tuple[str, str], int] = {}
        self._known: dict[bytes, int] = {}  # digest of a piece -> its tokens

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text on its own."""
        if self._batch is None or all(len(text) < _LONG for text in texts) or not self._local:
            return self._whole(texts)
        return self._in_pieces(texts)

    def count(self, text: str) -> int:
        """Tokens of a text, counted in one piece."""
        return self._whole([text])[0]

    def inside(self, pieces: Sequence[str], anchor: str = _ANCHOR, *, keep: bool = True) -> list[int]:
        """Tokens that each piece adds behind `anchor`.  keep: remember them, for pieces that come back."""
        known = self._inside if keep else {}
        new = list(dict.fromkeys(piece for piece in pieces if (anchor, piece) not in known))
        if new:
            base, *counted = self._whole([anchor, *(anchor + piece for piece in new)])
            known.update(((anchor, piece), n - base) for piece, n in zip(new, counted, strict=True))
        return [known[anchor, piece] for piece in pieces]

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
            for at in _cuts(text, size):
                left, right = text[max(at - _WINDOW, 0) : at], text[at : at + _WINDOW]
                parts += [text[start:at], left + right, left, right]
                signs += [(i, 1), (i, 1), (i, -1), (i, -1)]
                start = at
            parts.append(text[start:])
            signs.append((i, 1))
        keys = [hashlib.blake2b(part.encode(), digest_size=16).digest() for part in parts]
        new = {key: part for key, part in zip(keys, parts, strict=True) if key not in self._known}
        self._known.update(zip(new, self._whole(list(new.values())), strict=True))
        counts = [0] * len(texts)
        for (i, sign), key in zip(signs, keys, strict=True):
            counts[i] += sign * self._known[key]
        return counts

    @cached_property
    def _local(self) -> bool:
        """Whether counting in pieces gives what counting at once gives."""
        from retrieval_attn_eval.text.haystack import shipped_prose

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


def _cuts(text: str, size: int) -> list[int]:
    """Where to cut a text: at some sentences, chosen by their first letters, and where those are far apart at lines.

    Without lines either, at words.  No two of the latter kinds are less than `size` characters apart.
    """
    chosen = [
        match.start()
        for match in _SENTENCE.finditer(text)
        if zlib.crc32(text[match.start() : match.start() + 16].encode()) % _ONE_OF == 0
    ]
    cuts, start = [], 0
    for stop in [*chosen, len(text)]:
        while stop - start > 2 * size:
            match = _LINE.search(text, start + size, start + 2 * size) or _WORD.search(text, start + size, stop)
            if match is None:
                break
            start = match.start()
            cuts.append(start)
        if stop < len(text):
            cuts.append(stop)
        start = stop
    return cuts
