"""PromptEncoder: token ids of prompts in which special tokens come from the chat template alone, never from a text."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError

T = TypeVar("T")

DIGITS = 6
"""Of a stand-in's number."""
NAMESPACE: ContextVar[str] = ContextVar("namespace", default="")
"""Token ids of a text are reused within one namespace, so that response times reveal nothing about other keys."""
LONG_TEXT = 4096
"""Characters from which on the token ids of a text are kept, and of a common prefix from which on they are reused."""
KEPT_BYTES = 64 << 20
"""Maximum bytes of kept texts with their token ids."""
MARGIN = 256
"""Characters of known text on each side of a cut whose tokens must be equal in both texts; longer than added tokens."""
LEAST_EQUAL = 8
"""Tokens that must be equal on each side of a cut."""
CUT_TRIES = 64
LOCAL_NORMALIZERS = frozenset({
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
    "Replace", "Sequence", "Strip", "StripAccents",
})  # fmt: skip
LOCAL_PRE_TOKENIZERS = frozenset({
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Sequence", "Split",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
})  # fmt: skip
"""Steps of a tokenizer whose result at one place does not depend on text that is a word or more away."""
WORD_SPLITS = frozenset({"BertPreTokenizer", "Metaspace", "Whitespace", "WhitespaceSplit"})
"""Steps that part a text at each space."""


def stand_in(*values: object) -> str:
    """Return a random word that occurs in none of the values: strings, or lists and mappings with strings.

    Raises InputDataError for a value that is nested too deeply.
    """
    try:
        texts = [value if isinstance(value, str) else repr(value) for value in values]
    except RecursionError:
        raise _too_deep() from None
    while True:
        word = f"w{secrets.token_hex(12)}"
        if not any(word in text for text in texts):
            return word


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each its first character in the text; None without a fast tokenizer."""

    ids: list[int]
    starts: np.ndarray | None


@dataclass(frozen=True)
class Escapes:
    """Stand-ins for the special tokens' words in the texts of one prompt, while a chat template is rendered.

    mark: begins every stand-in and occurs in none of the texts.
    """

    words: _Words
    mark: str

    def apply(self, value: T) -> T:
        """Return the value with a stand-in for every word of a special token, in all strings and keys it contains.

        Raises InputDataError for a value that is nested too deeply.
        """
        try:
            return self._mapped(value, self.escape)
        except RecursionError:
            raise _too_deep() from None

    def escape(self, text: str) -> str:
        """Return `apply` of one string."""
        return self.words.replace(text, lambda word: f"{self.mark}{self.words.order[word]:0{DIGITS}d}")

    def restore(self, text: str) -> str:
        """Return the text with the words in place of their stand-ins."""
        if self.mark not in text:
            return text
        return re.sub(rf"{self.mark}(\d{{{DIGITS}}})", lambda found: self.words.listed[int(found[1])], text)

    def _mapped(self, value: Any, change: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {self._mapped(key, change): self._mapped(item, change) for key, item in value.items()}
        return [self._mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


class _Words:
    """The words of a tokenizer's special tokens."""

    def __init__(self, tokens: dict[str, AddedToken]) -> None:
        """tokens: by word."""
        self.tokens, self.listed = tokens, sorted(tokens)
        self.order = {word: number for number, word in enumerate(self.listed)}
        self._pattern = re.compile(_pattern_of(self.listed)) if tokens else None

    def replace(self, text: str, change: Callable[[str], str]) -> str:
        """Return the text with `change` of each word in place of it; the longest word counts where several begin."""
        return text if self._pattern is None else self._pattern.sub(lambda found: change(found[0]), text)

    def split(self, text: str) -> list[str]:
        """Return text, word, text, word, ..., text."""
        if self._pattern is None:
            return [text]
        pieces, start = [], 0
        for found in self._pattern.finditer(text):
            pieces += [text[start : found.start()], found[0]]
            start = found.end()
        return [*pieces, text[start:]]


@dataclass(frozen=True)
class KeptText:
    """A text, its token ids without special tokens, and for each the characters [start, stop) of the text."""

    text: str
    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    namespace: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return 4 * len(self.text) + self.ids.nbytes + self.starts.nbytes + self.stops.nbytes

    @property
    def ordered(self) -> bool:
        """Whether tokens follow each other as their characters do."""
        return bool(np.all(np.diff(self.starts) >= 0) and np.all(np.diff(self.stops) >= 0))

    def token_at(self, place: int) -> int:
        """Return the number of the first token that begins at this character or later."""
        return int(np.searchsorted(self.starts, place))

    def parts_at(self, place: int) -> bool:
        """Whether no token has characters before and after this place."""
        token = self.token_at(place)
        return token > 0 and int(self.stops[token - 1]) <= place

    def cut_before(self, place: int) -> int:
        """Return the last place before this one with a space behind a word, and a token's end; 0: none is near."""
        for _ in range(CUT_TRIES):
            place = self.text.rfind(" ", 1, max(1, place))
            if place < 1:
                return 0
            if not self.text[place - 1].isspace() and self.parts_at(place):
                return place
        return 0


class RecentTexts:
    """Token ids of recent long texts: of a text that begins as one of them, only the rest is tokenized.

    The text is cut at a space behind a word, where tokens end. A tokenizer without tokens that have a word's end and a
    space after it gives both sides the ids that the whole would have, if its other steps are local: `is_local`. As a
    check, known text around the cut is tokenized again with the rest; if its tokens differ, the whole text is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._kept: list[KeptText] = []  # the last used one at the end
        self._lock = threading.Lock()
        self.tokenized = 0
        """Characters that the tokenizer has read."""

    def encode(self, text: str) -> KeptText:
        """Return the token ids of a text without special tokens, as the tokenizer gives them, and keep them."""
        namespace = NAMESPACE.get()
        with self._lock:
            kept = [one for one in self._kept if one.namespace == namespace]
        lengths = [common_prefix(one.text, text) for one in kept]
        most = max(lengths, default=0)
        best = kept[lengths.index(most)] if most >= LONG_TEXT else None
        if best is not None and most == len(best.text) == len(text):
            found = best
        else:
            found = (best and self._continued(best, text, most)) or self._tokenized(text)
        if found.ordered:
            # a document with another question takes the place of the one before
            replaced = best is not None and most >= len(best.text) * 7 // 8
            self._keep(found, best if replaced else None)
        return found

    def _keep(self, found: KeptText, replaced: KeptText | None) -> None:
        with self._lock:
            self._kept = [one for one in self._kept if one is not replaced and one is not found] + [found]
            size = sum(one.nbytes for one in self._kept)
            while size > KEPT_BYTES:
                size -= self._kept.pop(0).nbytes

    def _tokenized(self, text: str) -> KeptText:
        self.tokenized += len(text)
        found = self._tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        ids = np.array(found["input_ids"], np.int32)
        offsets = np.fromiter(chain.from_iterable(found["offset_mapping"]), np.int32, 2 * len(ids))
        return KeptText(text, ids, offsets[::2].copy(), offsets[1::2].copy(), NAMESPACE.get())

    def _continued(self, kept: KeptText, text: str, common: int) -> KeptText | None:
        """Tokenize what follows the common prefix, and some text before; None if known tokens come out otherwise."""
        cut = kept.cut_before(common - 2 * MARGIN)
        begin = kept.cut_before(cut - 2 * MARGIN)
        if not begin:
            return None
        rest = self._tokenized(text[begin:])
        if not rest.ordered or not rest.parts_at(cut - begin):
            return None
        old, new = kept.token_at(cut), rest.token_at(cut - begin)
        before = old - kept.token_at(begin + MARGIN)
        after = int(np.searchsorted(kept.stops, common - MARGIN, "right")) - old
        if min(before, after) < LEAST_EQUAL:
            return None
        known, again = slice(old - before, old + after), slice(new - before, new + after)
        for mine, theirs, shift in (
            (kept.ids, rest.ids, 0),
            (kept.starts, rest.starts, begin),
            (kept.stops, rest.stops, begin),
        ):
            if new < before or not np.array_equal(mine[known], theirs[again] + shift):
                return None
        return KeptText(
            text,
            np.concatenate((kept.ids[:old], rest.ids[new:])),
            np.concatenate((kept.starts[:old], rest.starts[new:] + begin)),
            np.concatenate((kept.stops[:old], rest.stops[new:] + begin)),
            kept.namespace,
        )


def common_prefix(first: str, second: str) -> int:
    """Return the number of equal characters at the start of both texts."""
    most, equal, size = min(len(first), len(second)), 0, 1 << 16
    while equal < most and size:
        stop = min(equal + size, most)
        if first[equal:stop] == second[equal:stop]:
            equal = stop
        else:
            size //= 2
    return equal


def is_local(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether token ids on both sides of a space behind a word do not depend on the other side, see `RecentTexts`."""
    if not tokenizer.is_fast:
        return False
    backend: Any = tokenizer.backend_tokenizer
    try:
        normalizers, pre_tokenizers = steps_of(backend.normalizer), steps_of(backend.pre_tokenizer)
    except Exception:  # steps written in Python cannot be read
        return False
    model = type(backend.model).__name__
    words = {step["type"] for step in pre_tokenizers if step.get("split", True)} & WORD_SPLITS
    if model not in ("BPE", "WordLevel", "WordPiece", "Unigram") or getattr(backend.model, "dropout", None):
        return False
    if model != "BPE" and not words:  # scores of a whole text are sums from its start on
        return False
    if not {step["type"] for step in normalizers} <= LOCAL_NORMALIZERS:
        return False
    if not {step["type"] for step in pre_tokenizers} <= LOCAL_PRE_TOKENIZERS:
        return False
    patterns = [step["pattern"] for step in normalizers if step["type"] == "Replace"]
    if not all("String" in pattern or pattern == {"Regex": " {2,}"} for pattern in patterns):
        return False
    if any(len(token.content) >= MARGIN for token in tokenizer.added_tokens_decoder.values()):
        return False
    return not crosses_spaces(backend, any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers))


def crosses_spaces(backend: Tokenizer, byte_level: bool) -> bool:
    """Whether a word of the vocabulary has a space after something else than white space.

    byte_level: its words are bytes, as letters.
    """
    space, decoder = "Ġ" if byte_level else "▁", decoders.ByteLevel()
    for word in backend.get_vocab(with_added_tokens=False):
        if space in word[1:] or " " in word[1:]:
            text = decoder.decode([word]) if byte_level else word.replace("▁", " ")
            if re.search(r"\S ", text):
                return True
    return False


def steps_of(component: Any) -> list[dict[str, Any]]:
    """Return the options of a tokenizer's normalizer or pre-tokenizer, and of all that a sequence of them has."""
    if component is None:
        return []
    found: list[dict[str, Any]] = []
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        found.append(step)
        waiting += step.get("normalizers") or step.get("pretokenizers") or []
    return found


class PromptEncoder:
    """See the module. May be used by several threads.

    A text without the words of special tokens gets the ids that the tokenizer itself gives it. Another is encoded by a
    copy of the tokenizer that reads these words as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: the model's, with all its tokens."""
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        named = {str(word): AddedToken(str(word), normalized=False) for word in tokenizer.all_special_tokens}
        self._words = _Words({word: token for word, token in (named | added).items() if word})
        to_id: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
        self._ids: dict[str, int] = {word: to_id(word) for word in self._words.listed}
        control = set(self._ids.values())
        if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            control.discard(tokenizer.unk_token_id)  # any unknown character becomes it
        self._control = frozenset(control)
        secret = secrets.token_hex(12)  # users cannot know the aliases
        self._aliases = {word: f"a{secret}{number:0{DIGITS}d}" for number, word in enumerate(self._words.listed)}

    def escapes(self, *values: object) -> Escapes:
        """Return the escapes of a prompt from these strings, lists and mappings."""
        return Escapes(self._words, stand_in(*values))

    def encode(
        self, text: str, escapes: Escapes | None = None, *, begins: bool = False, offsets: bool = False
    ) -> Encoded:
        """Encode a rendered prompt, or with `escapes=None` a text whose words are all text.

        escapes: were applied to what users said before it was rendered; other words of special tokens become control
        tokens. begins: add the special tokens that the model expects around a text. Raises InputDataError for a
        tokenizer that has no other way to write such a word.
        """
        pieces = self._words.split(text)
        literal = len(pieces) > 1 if escapes is None else escapes.mark in text
        if escapes is None:
            pieces = [text]
        wanted = sum(self._ids[word] in self._control for word in pieces[1::2]) + (self._around if begins else 0)
        if not literal:
            found = self.tokenize(text, begins=begins, offsets=offsets)
            if self._controls(found.ids) == wanted:
                return found
        encoded = self._apart(pieces, escapes, begins)
        if self._controls(encoded.ids) != wanted:
            raise InputDataError(
                "The text has the words of special tokens, and the model's tokenizer has no other tokens for them; "
                f"leave out such words: {', '.join(map(repr, self._words.listed[:8]))}."
            )
        return encoded

    def tokenize(self, text: str, *, begins: bool = False, offsets: bool = False) -> Encoded:
        """Encode a text as the tokenizer does: words of special tokens become control tokens.

        Token ids of recent long texts are reused. begins: as for `encode`.
        """
        around = self._around_texts if begins else ([], [])
        if len(text) >= LONG_TEXT and self._recent is not None and around is not None:
            kept, (before, after) = self._recent.encode(text), around
            starts = np.pad(kept.starts, (len(before), len(after))) if offsets else None
            return Encoded([*before, *kept.ids.tolist(), *after], starts)
        offsets = offsets and self._tokenizer.is_fast
        found = self._tokenizer(text, add_special_tokens=begins, verbose=False, return_offsets_mapping=offsets)
        return Encoded(found["input_ids"], starts_of(found["offset_mapping"]) if offsets else None)

    @cached_property
    def _recent(self) -> RecentTexts | None:
        return RecentTexts(self._tokenizer) if is_local(self._tokenizer) else None

    @cached_property
    def _around_texts(self) -> tuple[list[int], list[int]] | None:
        whole = self._tokenizer("a b", verbose=False, return_special_tokens_mask=True)
        ids, mask = whole["input_ids"], whole["special_tokens_mask"]
        plain = self._tokenizer("a b", add_special_tokens=False, verbose=False)["input_ids"]
        first = mask.index(0) if 0 in mask else 0
        last = first + len(plain)
        return (ids[:first], ids[last:]) if ids[first:last] == plain else None

    def _apart(self, pieces: list[str], escapes: Escapes | None, begins: bool) -> Encoded:
        """Encode pieces of text and, between them, words of special tokens that become control tokens."""
        texts = pieces if escapes is None else [escapes.restore(piece) for piece in pieces]
        if self._tokenizer.is_fast:
            texts[1::2] = [self._aliases[word] for word in texts[1::2]]
            found = self._literal.encode("".join(texts), add_special_tokens=begins)
            return Encoded([self._aliased.get(token, token) for token in found.ids], starts_of(found.offsets))
        ids: list[int] = []
        for number, text in enumerate(texts):
            if number % 2:
                ids.append(self._ids[text])
            else:
                ids += self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
                    "input_ids"
                ]
        return Encoded(self._tokenizer.build_inputs_with_special_tokens(ids) if begins else ids, None)

    def _controls(self, ids: Iterable[int]) -> int:
        return sum(map(self._control.__contains__, ids))

    @cached_property
    def _around(self) -> int:
        """Control tokens that a text gets around it."""
        return self._controls(self._tokenizer("")["input_ids"])

    @cached_property
    def _literal(self) -> Tokenizer:
        """A copy of the tokenizer: special tokens' words are text, and their aliases become control tokens."""
        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        copy.add_tokens(
            [
                AddedToken(alias, normalized=False, special=False, lstrip=token.lstrip, rstrip=token.rstrip)
                for alias, token in ((self._aliases[word], self._words.tokens[word]) for word in self._words.listed)
            ]
        )
        return copy

    @cached_property
    def _aliased(self) -> dict[int | None, int]:
        """Ids of `_literal` that are control tokens, and the tokenizer's own ids of these."""
        return {self._literal.token_to_id(alias): self._ids[word] for word, alias in self._aliases.items()}


@lru_cache(maxsize=4)
def _encoder(tokenizer: PreTrainedTokenizerBase, tokens: int) -> PromptEncoder:
    return PromptEncoder(tokenizer)


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
    """Return the tokenizer's encoder, made once for the tokens that it has now."""
    return _encoder(tokenizer, len(tokenizer))


def starts_of(offsets: Sequence[Any]) -> np.ndarray:
    """Return the first character of each token."""
    return np.fromiter((start for start, _ in offsets), np.int64, len(offsets))


def _too_deep() -> InputDataError:
    return InputDataError("Messages and tools must not be nested so deeply; send fewer levels of lists and objects.")


def _pattern_of(words: Iterable[str]) -> str:
    """Return a regular expression of the words as a prefix tree, so that a search does not try them one by one."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        more = [re.escape(character) + written(below) for character, below in sorted(node.items()) if character]
        if len(more) < 2 and "" not in node:
            return "".join(more)
        return f"(?:{'|'.join(more)}){'?' if '' in node else ''}" if more else ""

    return written(tree)
