"""Texts, offsets and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import codecs
import json
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from transformers import ByT5Tokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from retrieval_attn.engine.request import Event
from retrieval_attn.prompt.text_stream import REPLACEMENT, TextStream, byte_of, decoding


class TokenText(NamedTuple):
    """A token outside of a text.

    label: its text; "bytes:\\xf0" for a part of a character; the name of a special token; else "token_id:7". data: the
    token's bytes, none for a special token, which is not part of a text; None: unknown.
    """

    label: str
    data: bytes | None


class Candidate(NamedTuple):
    """A token that was or could have been sampled at one position. key: `label` of `TokenText`, or "token_id:7" if
    another candidate of the position has that label.
    """

    label: str
    key: str
    logprob: float | None
    data: bytes | None


class AnswerToken(NamedTuple):
    """A sampled token. text: the characters of the answer that it completes, which start at `offset`. first: no token
    with a text precedes it.
    """

    event: Event
    text: str
    offset: int
    data: bytes | None
    first: bool


class TokenTexts:
    """Decode single tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: the model's."""
        self.tokenizer = tokenizer
        self._decode, self._word, self._special = decoding(tokenizer)
        self._bytes_of_letters = _bytes_of_letters(tokenizer)
        self._before = next(([one] for one in range(len(tokenizer)) if self._is_word(one)), [])
        self.read = lru_cache(maxsize=65536)(self._read)

    def has_text(self, token: int) -> bool:
        """Whether the token is part of a text: neither special, nor unknown to the tokenizer."""
        return token not in self._special and self._word(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte by name, `<0xF0>`."""
        word = self._word(token)
        return word is not None and byte_of(word) is not None

    def candidates(self, token: AnswerToken, count: int) -> list[Candidate]:
        """Return the `count` likeliest tokens of a position, likeliest first, and the sampled one in any case."""
        event, found = token.event, []
        if not count:
            return []
        likeliest = event.top[:count]
        if event.token not in (one for one, _ in likeliest):
            likeliest = (*likeliest, (event.token, event.logprob if event.logprob is not None else float("-inf")))
        keys = {token.text}  # of the sampled token, whatever precedes it
        for one, logprob in likeliest:
            label, data = (token.text, token.data) if one == event.token else self.read(one, token.first)
            key = label if one == event.token or label not in keys else f"token_id:{one}"
            keys.add(key)
            found.append(Candidate(label, key, logprob, data))
        return found

    def _read(self, token: int, first: bool) -> TokenText:
        """first: no token precedes it; some tokenizers then drop a leading space."""
        word = self._word(token)
        if word is None or token in self._special:
            return TokenText(word or f"token_id:{token}", b"")
        data, text = self._bytes(word), self._text(token, first)
        if data is not None and not _is_utf8(data):
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)
        known = data is not None or REPLACEMENT not in text or REPLACEMENT in word
        return TokenText(text or f"token_id:{token}", text.encode("utf-8", "replace") if known else None)

    def _is_word(self, token: int) -> bool:
        return self.has_text(token) and not self.is_byte(token) and self._decode([token]).isalpha()

    def _text(self, token: int, first: bool) -> str:
        before = [] if first else self._before
        return self._decode([*before, token]).removeprefix(self._decode(before))

    def _bytes(self, word: str) -> bytes | None:
        """None unless the tokenizer's tokens are bytes."""
        if self._bytes_of_letters is None:
            byte = byte_of(word)
            return None if byte is None else bytes([byte])
        letters = [self._bytes_of_letters.get(letter) for letter in word]
        found = [byte for byte in letters if byte is not None]
        return bytes(found) if len(found) == len(letters) else word.encode("utf-8", "replace")


class TokenReader:
    """Split the text of one answer among its tokens.

    The texts of all tokens, joined, are the answer, and so are their bytes. A character belongs to the token that
    completes it. Of a stop string, which is not part of the answer, no token is returned.
    """

    def __init__(self, texts: TokenTexts, visible: frozenset[int]) -> None:
        """visible: special tokens that are part of the text."""
        self._texts, self._visible = texts, visible
        self._stream = TextStream(texts.tokenizer, visible=visible)
        self._run: list[tuple[Event, bool]] = []  # `<0xF0>` tokens, whose text is known when the run ends
        self._waiting: deque[AnswerToken] = deque()
        self._read = self._sent = 0  # characters
        self._first = True

    def add(self, event: Event) -> None:
        """Read the next token."""
        piece = self._stream.add(event.token)
        first, has_text = self._first, event.token in self._visible or self._texts.has_text(event.token)
        self._first = first and not has_text
        if self._texts.is_byte(event.token) or (self._run and not has_text):
            self._run.append((event, first))
        else:
            self._append(event, self._end_run(piece), first, self._texts.read(event.token, first).data)

    def take(self, characters: int) -> list[AnswerToken]:
        """Return the tokens whose text is sent with `characters` more of the answer."""
        self._sent += characters
        found = []
        while self._waiting and self._waiting[0].offset + len(self._waiting[0].text) <= self._sent:
            last = not self._run and not any(token.text for token in islice(self._waiting, 1, None))
            if last and self._stream.is_open:
                break  # its text is not complete
            found.append(self._waiting.popleft())
        return found

    def end(self) -> list[AnswerToken]:
        """Return the tokens that remain; the answer ends with what was sent."""
        rest = self._end_run(self._stream.end())
        owners = [number for number, token in enumerate(self._waiting) if self._texts.has_text(token.event.token)]
        if rest and owners:
            token = self._waiting[owners[-1]]
            self._waiting[owners[-1]] = token._replace(text=token.text + rest)
        found = []
        for token in self._waiting:
            text = token.text[: max(0, self._sent - token.offset)]
            if text == token.text and token.offset <= self._sent:
                found.append(token)
            elif text:  # a stop string begins inside it
                found.append(token._replace(text=text, data=text.encode("utf-8", "replace")))
        self._waiting.clear()
        return found

    def _end_run(self, piece: str) -> str:
        """Give the tokens of the run their texts, with which `piece` begins. Return what follows them."""
        run, self._run = self._run, []
        data = [self._texts.read(event.token, first).data or b"" for event, first in run]
        for (event, first), part in zip(run, _run_parts(data), strict=True):
            text = part.text if piece.startswith(part.text) else ""
            self._append(event, text, first, part.data)
            piece = piece[len(text) :]
        return piece

    def _append(self, event: Event, text: str, first: bool, data: bytes | None) -> None:
        self._waiting.append(AnswerToken(event, text, self._read, data, first))
        self._read += len(text)


class AnswerTokens:
    """One `TokenReader` for each choice of a request that wants log-probabilities."""

    def __init__(self, texts: TokenTexts, visible: frozenset[int] = frozenset()) -> None:
        """visible: see `TokenReader`."""
        self._texts, self._visible = texts, visible
        self._readers: dict[int, TokenReader] = {}

    def take(self, index: int, text: str, events: Sequence[Event]) -> list[AnswerToken]:
        """Return the tokens whose text is sent with `text`, of a choice that was ever given events."""
        if not events and index not in self._readers:
            return []
        reader = self._readers.setdefault(index, TokenReader(self._texts, self._visible))
        for event in events:
            reader.add(event)
        return reader.take(len(text))

    def end(self, index: int) -> list[AnswerToken]:
        """Return the tokens that remain of a choice."""
        reader = self._readers.pop(index, None)
        return [] if reader is None else reader.end()


class RunPart(NamedTuple):
    """Text and bytes of one token in a run of `<0xF0>` tokens."""

    text: str
    data: bytes


def _run_parts(pieces: Sequence[bytes]) -> list[RunPart]:
    """Decode a run. Of one that is not UTF-8, tokenizers replace every byte."""
    if not _is_utf8(b"".join(pieces)):
        texts = [REPLACEMENT * len(piece) for piece in pieces]
        return [RunPart(text, text.encode()) for text in texts]
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [RunPart(decoder.decode(piece), piece) for piece in pieces]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _bytes_of_letters(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """Bytes for which the letters of the tokenizer's words stand; None: its words are texts."""
    if isinstance(tokenizer, ByT5Tokenizer):
        return {chr(byte): byte for byte in range(256)}
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        table = getattr(tokenizer, "byte_decoder", None)
        return dict(table) if isinstance(table, dict) else None
    state = json.loads(decoder.__getstate__())
    kinds = {one["type"] for one in (state, *state.get("decoders", ()))}
    return {letter: byte for byte, letter in bytes_to_unicode().items()} if "ByteLevel" in kinds else None
