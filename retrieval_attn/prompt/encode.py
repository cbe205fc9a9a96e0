"""PromptEncoder: token ids of prompts in which special tokens come from the chat template alone, never from a text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError

__all__ = ["Encoded", "Escapes", "PromptEncoder", "encoder_of", "stand_in"]

T = TypeVar("T")

DIGITS = 6
"""Of a stand-in's number."""


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
    """Token ids, and for each the characters [start, stop) of the text; None without a fast tokenizer."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


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
            offsets = offsets and self._tokenizer.is_fast
            found = self._tokenizer(text, add_special_tokens=begins, verbose=False, return_offsets_mapping=offsets)
            if self._controls(found["input_ids"]) == wanted:
                return Encoded(found["input_ids"], found["offset_mapping"] if offsets else None)
        encoded = self._apart(pieces, escapes, begins)
        if self._controls(encoded.ids) != wanted:
            raise InputDataError(
                "The text has the words of special tokens, and the model's tokenizer has no other tokens for them; "
                f"leave out such words: {', '.join(map(repr, self._words.listed[:8]))}."
            )
        return encoded

    def _apart(self, pieces: list[str], escapes: Escapes | None, begins: bool) -> Encoded:
        """Encode pieces of text and, between them, words of special tokens that become control tokens."""
        texts = pieces if escapes is None else [escapes.restore(piece) for piece in pieces]
        if self._tokenizer.is_fast:
            texts[1::2] = [self._aliases[word] for word in texts[1::2]]
            found = self._literal.encode("".join(texts), add_special_tokens=begins)
            return Encoded([self._aliased.get(token, token) for token in found.ids], found.offsets)
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
        return sum(token in self._control for token in ids)

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
