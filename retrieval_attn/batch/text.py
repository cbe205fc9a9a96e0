"""TextStream: the text of one row, piece by piece as its tokens come, cut at stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4
"""Tokens before the new ones that are decoded with them: what a token reads depends on whether one is before it, and a
character of four bytes may have begun in the last three."""
MAX_TOKENS = 16
"""Tokens that are decoded together before the older ones are let go."""
MAX_BYTE_RUN = 64
"""Tokens of one byte each in a row whose text is held back, see `TextStream`."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What transformers' `clean_up_tokenization` shortens."""


class TextStream:
    """Text of token ids that come one after the other, special tokens left out.

    All pieces joined are what the tokenizer decodes from all ids at once, up to the first stop string. Held back until
    later tokens decide: what may become a stop string, a character whose bytes are not complete, and bytes that a
    tokenizer with byte tokens (`<0x0A>`) shows as replacement characters if one of their run fits nowhere (a run of
    more than 64 is shown up to there). A token costs the same however many came before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        """stop: non-empty strings at which the text ends; they are not part of it."""
        self._stop = tuple(stop)
        self._decode, self._word, self._skipped = _decoding(tokenizer)
        self._cleaned = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else ()
        self._ids: list[int] = []  # the last ones, which are decoded together
        self._final = 0  # characters of their text that later tokens do not change
        self._byte_run = 0
        self._held = ""  # final text that may be the begin of a stop string
        self._open = ""  # text after it that later tokens may change
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain with one more token, "" while nothing is. After a stop string: ""."""
        if self.stopped or token in self._skipped:
            return ""
        word = self._word(token)
        if word is None:  # an id that the model has and the tokenizer has not
            return ""
        self._byte_run = self._byte_run + 1 if _BYTE_TOKEN.fullmatch(word) else 0
        self._ids.append(token)
        text = self._decode(self._ids)
        final = max(self._certain(text), self._final)
        self._held += text[self._final : final]
        self._open = text[final:]
        self._final = final
        self._let_go(text)
        return self._take()

    def end(self) -> str:
        """What was held back, once no token follows. After a stop string, and a second time: ""."""
        if self.stopped:
            return ""
        text, self._held, self._open = self._held + self._open, "", ""
        cut = _before(text, self._stop)
        self.stopped = len(cut) < len(text)
        return cut

    def _certain(self, text: str) -> int:
        """Characters at the front of the decoded text that no later token changes."""
        if 0 < self._byte_run < MAX_BYTE_RUN:
            return self._final
        held = max((n for one in self._cleaned for n in range(1, len(one)) if text.endswith(one[:n])), default=0)
        return len(text) - max(held, text.endswith(REPLACEMENT))

    def _let_go(self, text: str) -> None:
        """Forget the oldest ids, now and then, without those of text that is open."""
        if len(self._ids) < MAX_TOKENS or 0 < self._byte_run < MAX_BYTE_RUN:
            return
        kept = self._ids[-CONTEXT:]
        shorter = self._decode(kept)
        opened = len(text) - self._final
        if opened <= len(shorter) and shorter.endswith(self._open):
            self._ids, self._final = kept, len(shorter) - opened

    def _take(self) -> str:
        """Out of what is held: all that cannot be the begin of a stop string."""
        known = self._held + self._open.partition(REPLACEMENT)[0]
        cut = _before(known, self._stop)
        if len(cut) < len(known):
            self.stopped, self._held, self._open = True, "", ""
            return cut
        begun = max((n for one in self._stop for n in range(1, len(one)) if self._held.endswith(one[:n])), default=0)
        ready = len(self._held) - begun
        text, self._held = self._held[:ready], self._held[ready:]
        return text


def _before(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the first of the strings in `stop`."""
    for one in stop:
        text = text.split(one, 1)[0]
    return text


Decode = Callable[[list[int]], str]
Word = Callable[[int], str | None]


def _decoding(tokenizer: PreTrainedTokenizerBase) -> tuple[Decode, Word, set[int]]:
    """How ids become text, what token an id is, and the ids that are left out.

    The tokenizers library is called directly where transformers adds nothing to what it answers.
    """
    plain = isinstance(tokenizer, TokenizersBackend) and _adds_nothing(tokenizer)
    if not plain:
        return (
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            lambda token: _known(tokenizer.convert_ids_to_tokens(token)),
            set(tokenizer.all_special_ids),
        )
    backend: Any = tokenizer.backend_tokenizer
    skipped = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    return backend.decode, backend.id_to_token, skipped


def _adds_nothing(tokenizer: TokenizersBackend) -> bool:
    kind = type(tokenizer)
    own = kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not TokenizersBackend._decode
    return not own and not tokenizer.clean_up_tokenization_spaces


def _known(word: object) -> str | None:
    return word if isinstance(word, str) else None
