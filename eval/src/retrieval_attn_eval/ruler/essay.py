"""Running text for the essay tasks: its first N words, its sentences, and what N words cost in tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from retrieval_attn_eval.text.haystack import sentence_ends
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["Essay", "EssaySource"]

_CHARS_PER_TOKEN = 7


class EssaySource:
    """Where the text comes from.  read(chars) gives at least that many characters, or all there are.

    A longer text must begin with the shorter one.
    """

    def __init__(self, read: Callable[[int], str], label: str, digest: str) -> None:
        self.read, self.label, self.digest = read, label, digest

    @classmethod
    def of_text(cls, text: str, label: str) -> EssaySource:
        return cls(lambda chars: text, label, hashlib.sha256(text.encode()).hexdigest())

    @classmethod
    def shipped(cls, seed: int) -> EssaySource:
        """The built-in prose of a seed."""
        from retrieval_attn_eval.text.haystack import shipped_prose

        return cls(lambda chars: shipped_prose(max(chars, 4000), seed), "built-in prose", "built-in prose")


class Essay:
    """The first words of a text, enough for `tokens` tokens; white space is normalised to single spaces.

    A text that is too short starts again from its beginning.  passes: how often it was used, 1 if once.
    """

    def __init__(self, source: EssaySource, counter: TokenCounter, tokens: int) -> None:
        chars, self.passes = tokens * _CHARS_PER_TOKEN + 2000, 1
        while True:
            given = source.read(chars)
            words = given[: chars + 1].split()
            if len(given) > chars and words:
                words.pop()  # the last one may be cut
            costs = self._costs(words, counter)
            if costs.sum() >= tokens or len(given) <= chars:
                break
            chars *= 2
        total = int(costs.sum())
        if total < tokens:
            self.passes = -(-tokens // max(total, 1))
            words, costs = words * self.passes, np.tile(costs, self.passes)
        self.text = " ".join(words)
        self._tokens = np.concatenate([[0], np.cumsum(costs)])
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        self._ends = np.cumsum(lengths + 1) - 1  # character behind word i
        self._sentences: NDArray[np.int64] = sentence_ends(self.text)[:, 0]

    @staticmethod
    def _costs(words: list[str], counter: TokenCounter) -> NDArray[np.int64]:
        unique = list(dict.fromkeys(words))
        table = dict(zip(unique, counter.inside([" " + word for word in unique]), strict=True))
        return np.fromiter((table[word] for word in words), dtype=np.int64, count=len(words))

    def __len__(self) -> int:
        return len(self._ends)

    def tokens(self, words: int) -> int:
        """About the tokens of the first `words` words."""
        return int(self._tokens[words])

    def cut(self, words: int) -> tuple[int, NDArray[np.int64]]:
        """Characters of the first `words` words, and where their sentences end (the last end is the text's)."""
        stop = int(self._ends[words - 1])
        inner = self._sentences[: np.searchsorted(self._sentences, stop, side="left")]
        return stop, np.append(inner, stop)
