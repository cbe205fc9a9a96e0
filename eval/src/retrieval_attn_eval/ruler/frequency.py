"""RULER's two counting tasks: the ten common words of a numbered list, the three frequent words of a coded text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieval_attn_eval.ruler import specs
from retrieval_attn_eval.ruler.lexicon import Lexicon
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.suite.fitted import TaskSpec
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["CodedText", "CommonWords", "Vocabulary"]

_ZETA_2 = math.pi**2 / 6
_DOTS = "..."


def _numbered(words: Sequence[str]) -> str:
    return " ".join([f"{i}. {word}" for i, word in enumerate(words, start=1)])


def _shuffled(words: list[str], state: int) -> list[str]:
    random.Random(state).shuffle(words)
    return words


class Vocabulary:
    """The words that cwe of one length draws from, a quarter more than fit, and what they cost in tokens.

    numbers[i]: about the tokens of " 1." to " i.".  most: more different words than fit.
    """

    def __init__(self, counter: TokenCounter, lexicon: Lexicon, length: int) -> None:
        self.often, self.seldom = (6, 1) if length < specs.SHORT else (30, 3)
        self.numbers = _number_tokens(counter, length)
        sample = lexicon.first(2000)
        mean = sum(counter.inside([" " + word for word in sample])) / len(sample)
        entries = int(np.searchsorted(self.numbers + mean * np.arange(length + 1), length))
        wanted = entries // self.seldom + 40
        self.pool = lexicon.first(wanted * 5 // 4)
        self.costs = np.array(counter.inside([" " + word for word in self.pool]), dtype=np.float64)
        self.most = min(len(self.pool), wanted * 9 // 8)


def _number_tokens(counter: TokenCounter, last: int) -> NDArray[np.float64]:
    """About the tokens of " 1." to " i." for every i from 0 to `last`, from samples of each number of digits."""
    per_number = np.zeros(last + 1)
    start = 1
    while start <= last:
        stop = min(start * 10, last + 1)
        picks = np.unique(np.linspace(start, start * 10 - 1, 64).astype(int)).tolist()
        per_number[start:stop] = sum(counter.inside([f" {i}." for i in picks])) / len(picks)
        start *= 10
    return np.cumsum(per_number)


class CommonWords(Draft):
    """Unit: a different word.  The first ten occur 30 times, every other one 3 times (6 and 1 below 4,096 tokens)."""

    exact = False

    def __init__(
        self, spec: TaskSpec, rng: random.Random, counter: TokenCounter, vocabulary: Vocabulary, length: int
    ) -> None:
        common = int(spec.options["common"])
        shown, often, seldom = (20, 3, 1) if length < specs.SHORT else (40, 10, 3)
        self._common, self._often, self._seldom = common, vocabulary.often, vocabulary.seldom
        drawn = rng.sample(range(len(vocabulary.pool)), vocabulary.most)
        self._words = [vocabulary.pool[j] for j in drawn]
        example = rng.sample(vocabulary.pool, shown)
        entries = _shuffled(example[:common] * often + example[common:] * seldom, rng.getrandbits(64))
        self.question, self.prefix = specs.CWE_QUESTION, specs.CWE_PREFIX
        worked = specs.CWE_INSTRUCTION + _numbered(entries) + self.question + self.prefix
        self.instruction = worked + " " + _numbered(example[:common]) + "\n" + specs.CWE_INSTRUCTION
        self.answers = tuple(self._words[:common])
        self.lowest, self.highest = common + 1, len(drawn)
        self._order = rng.getrandbits(64)
        self._fixed = counter.counts([self.instruction])[0]
        repeats = np.where(np.arange(len(drawn)) < common, self._often, self._seldom)
        last = np.minimum(np.cumsum(repeats), len(vocabulary.numbers) - 1)
        self._tokens = np.cumsum(vocabulary.costs[drawn] * repeats) + vocabulary.numbers[last]

    def estimate(self, n: int) -> float:
        return self._fixed + float(self._tokens[n - 1])

    def context(self, n: int) -> str:
        words = self._words[: self._common] * self._often + self._words[self._common : n] * self._seldom
        return self.instruction + _numbered(_shuffled(words, self._order))


class CodedText(Draft):
    """Units: the number that the frequencies are shares of: rank r occurs int(n r^-2 / zeta(2)) times.

    The most frequent "word" is three dots; the three after it are the answer.
    """

    lowest = 100

    def __init__(self, spec: TaskSpec, rng: random.Random, counter: TokenCounter, length: int) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        words_wanted = max((length - spec.max_new_tokens) // 50, 8)
        # n is less than length, since a word is a token or more: words of later ranks could not occur
        count = min(words_wanted, math.isqrt(int(length / _ZETA_2)) + 1)
        words: dict[str, None] = {}
        while len(words) < count:
            words["".join(rng.choices(letters, k=int(spec.options["letters"])))] = None
        self._words = [_DOTS, *list(words)[1:]]
        self.answers = tuple(self._words[1:4])
        self.instruction, self.question, self.prefix = specs.FWE_INSTRUCTION, specs.FWE_QUESTION, specs.FWE_PREFIX
        self._order = rng.getrandbits(64)
        self._shares = np.arange(1, count + 1, dtype=np.float64) ** -2.0 / _ZETA_2
        coded = " ".join(self._words[1:])
        each = counter.counts([" " + word for word in self._words[1:]])  # never asked again: not kept
        bias = (counter.counts(["a " + coded])[0] - counter.counts(["a"])[0] - sum(each)) / len(each)
        dots = (counter.counts([f"a{' ...' * 33}"])[0] - counter.counts(["a ..."])[0]) / 32
        self._costs = np.array([dots, *[cost + bias for cost in each]])
        self._fixed = counter.counts([self.instruction.rstrip()])[0]

    def _counts(self, n: int) -> NDArray[np.int64]:
        return (n * self._shares).astype(np.int64)

    def estimate(self, n: int) -> float:
        return self._fixed + float(self._counts(n) @ self._costs)

    def context(self, n: int) -> str:
        text = [word for word, times in zip(self._words, self._counts(n).tolist(), strict=True) for _ in range(times)]
        return self.instruction + " ".join(_shuffled(text, self._order))
