"""Words for the common-words task: real ones first, then pseudo-words, as many as the longest context needs.

RULER's own list has 8,166 words, which ends near 131,072 tokens; this one has no end.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from pathlib import Path

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.text.words import ADJECTIVES, NOUNS

__all__ = ["Lexicon", "pseudo_words"]

_ONSETS = (
    *("b", "bl", "br", "c", "cl", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "pl", "pr"),
    *("qu", "r", "s", "sh", "sk", "sl", "st", "t", "th", "tr", "v", "w", "z"),
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x")


@lru_cache(maxsize=4)
def pseudo_words(count: int) -> tuple[str, ...]:
    """`count` different made-up words of two or three syllables; a shorter list is the beginning of a longer one."""
    rng = random.Random("ruler/pseudo-words")
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
        found["".join(syllables) + rng.choice(_CODAS)] = None
    return tuple(found)


class Lexicon:
    """Different words, one list for every length.

    Built in: English words, followed by pseudo-words where more are needed.  With a file: its words, then the same
    pseudo-words.
    """

    def __init__(self, words: tuple[str, ...] | None = None) -> None:
        self.built_in = words is None
        self.real = tuple(sorted({*ADJECTIVES, *NOUNS})) if words is None else words

    @classmethod
    def read(cls, path: Path) -> Lexicon:
        """Words of a UTF-8 file, one per line; blank lines and repeated words are dropped.

        Raises InputDataError, with the line, for white space inside a word, or if the file gives fewer than 100.
        """
        try:
            lines = path.expanduser().read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise InputDataError(
                f"{path}: needed a file with one word per line ({error.strerror}); check the path"
            ) from None
        except UnicodeDecodeError as error:
            raise InputDataError(f"{path}: needed UTF-8 text, byte {error.start} is not; convert the file") from None
        words: dict[str, None] = {}
        for number, line in enumerate(lines, start=1):
            word = line.strip()
            if len(word.split()) > 1:
                raise InputDataError(f"{path}, line {number}: needed one word, found {word[:40]!r}; split the line")
            if word:
                words[word] = None
        if len(words) < 100:
            raise InputDataError(f"{path}: needed at least 100 different words, found {len(words)}; give a longer list")
        return cls(tuple(words))

    def first(self, count: int) -> tuple[str, ...]:
        """At least `count` words; all the real ones are always among them."""
        if count <= len(self.real):
            return self.real
        known = set(self.real)
        spare = pseudo_words(count - len(self.real) + len(known))
        return (*self.real, *[word for word in spare if word not in known][: count - len(self.real)])

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.real).encode()).hexdigest()
