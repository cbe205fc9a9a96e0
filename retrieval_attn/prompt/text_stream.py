"""TextStream: the text of one row, piece by piece as its tokens come, cut at stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4
"""Tokens before the new ones that are decoded with them: what a token reads depends on whether one is before it, and a
character of four bytes may have begun in the last three."""
CLEANED_CONTEXT = 10
"""The same where spaces are cleaned up: marks are joined with what is before them, and these with what is before."""
MAX_TOKENS = 16
"""Tokens that are decoded together before the older ones are dropped."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHORTENED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What transformers' `clean_up_tokenization` shortens."""
_CLEANED = (*_SHORTENED, *(one.replace("'", " ' ") for one in _SHORTENED if one != " ' "))
"""Also what becomes one of these by another."""


class TextStream:
    """Text of token ids that come one after the other, special tokens left out.

    All pieces joined are what the tokenizer decodes from all ids at once, up to the first stop string. Held back until
    later tokens decide: what may become a stop string, a character whose bytes are not complete, and a run of byte
    tokens (`<0x0A>`) until it ends, for a tokenizer that has these shows the whole run as replacement characters if
    one byte of it fits nowhere. A token costs the same however many came before.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), min_tokens: int = 0,
        visible: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """stop: non-empty strings at which the text ends; they are not part of it. min_tokens: with `min_tokens` tokens
        or less, no string ends it. visible: special tokens that the text keeps.
        """
        self._stop, self._ignored = tuple(stop), min_tokens
        self._decode, self._word, self._skipped = decoding(tokenizer, visible)
        self._cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else ()
        self._ids: list[int] = []  # the last ones, which are decoded together
        self._final = 0  # characters of their text that later tokens do not change
        self._held = ""  # final text that may be the begin of a stop string
        self._bytes: _ByteRun | None = None  # the run of byte tokens that the ids end with
        self.stopped = self.is_open = False

    @property
    def has_stops(self) -> bool:
        """Whether a string may end the text."""
        return bool(self._stop)

    def add(self, token: int) -> str:
        """The text that is certain with one more token, "" while nothing is. After a stop string: ""."""
        self._ignored -= 1
        if self.stopped or token in self._skipped:
            return ""
        word = self._word(token)
        if word is None:  # an id that the model has and the tokenizer has not
            return ""
        self._ids.append(token)
        self.is_open = True
        if (byte := byte_of(word)) is not None:
            self._bytes = self._bytes or _ByteRun()
            read = self._held + self._bytes.add(byte)
            return self._cut(self._known()) or "" if any(one in read for one in self._stop) else ""
        self._bytes = None
        text = self._decode(self._ids)
        begin, self._final = self._final, max(self._certain(text), self._final)
        self._held += text[begin : self._final]
        open_text = text[self._final :]
        if len(self._ids) >= MAX_TOKENS:
            self._let_go(text, open_text)
        return self._take(open_text)

    def end(self) -> str:
        """Return the text that was held back, after the last token. After a stop string, and a second time: ""."""
        if self.stopped:
            return ""
        text = self._known()
        self._ids, self._held, self._final = [], "", 0
        cut = self._cut(text)
        return text if cut is None else cut

    def _known(self) -> str:
        """All that was not returned yet, as the ids so far read."""
        return self._held + self._decode(self._ids)[self._final :]

    def _cut(self, text: str) -> str | None:
        """`text` up to a stop string, with which the stream has stopped; None where there is none."""
        cut = text if self._ignored >= 0 else before_stop(text, self._stop)
        self.stopped = len(cut) < len(text)
        return cut if self.stopped else None

    def _certain(self, text: str) -> int:
        """Characters at the front of the decoded text that no later token changes."""
        return len(text) - max(_begun(text, self._cleaned), text.endswith(REPLACEMENT))

    def _let_go(self, text: str, open_text: str) -> None:
        """Forget the oldest ids, without those of the text that is open, where the rest reads the same without them."""
        kept = self._ids[-CLEANED_CONTEXT if self._cleaned else -CONTEXT :]
        shorter = self._decode(kept)
        if shorter.endswith(open_text) and (not self._cleaned or text.endswith(shorter)):
            self._ids, self._final = kept, len(shorter) - len(open_text)

    def _take(self, open_text: str) -> str:
        """Out of what is held: all that cannot be the begin of a stop string."""
        cut = self._cut(self._held + open_text.partition(REPLACEMENT)[0])
        if cut is not None:
            return cut
        ready = len(self._held) - _begun(self._held, self._stop)
        text, self._held = self._held[:ready], self._held[ready:]
        self.is_open = bool(self._held or open_text)
        return text


class _ByteRun:
    """Text of consecutive byte tokens so far."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._valid = "", True

    def add(self, byte: int) -> str:
        """Complete characters of the run with one more byte; "" for good once one fits nowhere."""
        try:
            self._text += self._decoder.decode(bytes([byte])) if self._valid else ""
        except UnicodeDecodeError:
            self._text, self._valid = "", False
        return self._text


def byte_of(word: str) -> int | None:
    """Return the byte for which a token `<0x0A>` stands; None for another token."""
    found = _BYTE_TOKEN.fullmatch(word)
    return None if found is None else int(found[1], 16)


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the first of the strings in `stop`."""
    for one in stop:
        text = text.split(one, 1)[0]
    return text


def _begun(text: str, strings: tuple[str, ...]) -> int:
    """Characters at the end of `text` with which one of `strings` may begin."""
    length = len(text)
    return max((n for one in strings for n in range(1, min(len(one), length + 1)) if text.endswith(one[:n])), default=0)


Decode = Callable[[list[int]], str]
Word = Callable[[int], str | None]


def decoding(
    tokenizer: PreTrainedTokenizerBase, visible: frozenset[int] = frozenset()
) -> tuple[Decode, Word, set[int]]:
    """How ids become text, what token an id is, and the ids that are left out: special tokens except `visible` ones.

    The tokenizers library is called directly where transformers adds nothing to what it answers.
    """
    plain = isinstance(tokenizer, TokenizersBackend) and _adds_nothing(tokenizer)
    skips = not visible  # the callers leave out the other special tokens
    if not plain:
        return (
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skips)),
            lambda token: _known(tokenizer.convert_ids_to_tokens(token)),
            set(tokenizer.all_special_ids) - visible,
        )
    backend: Any = tokenizer.backend_tokenizer
    skipped = {token for token, added in backend.get_added_tokens_decoder().items() if added.special} - visible
    return partial(backend.decode, skip_special_tokens=skips), backend.id_to_token, skipped


def _adds_nothing(tokenizer: TokenizersBackend) -> bool:
    kind = type(tokenizer)
    own = kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not TokenizersBackend._decode
    return not own and not tokenizer.clean_up_tokenization_spaces


def _known(word: object) -> str | None:
    return word if isinstance(word, str) else None
