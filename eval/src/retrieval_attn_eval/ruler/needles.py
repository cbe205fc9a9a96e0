"""RULER's eight needle tasks: magic numbers or UUIDs for keys, hidden in noise, in prose or among look-alikes."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

from retrieval_attn_eval.plans import DRAW, NOISE_LINE, distinct, listing, word_key
from retrieval_attn_eval.ruler import specs
from retrieval_attn_eval.ruler.essay import Essay
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.suite.fitted import TaskSpec
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["EssayNeedles", "LineNeedles", "cut_line", "make_needles"]

_DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the sentences
_SAMPLE_LINES = 256
_PIECES = re.compile(r"[^\s-]+-?\s*")


def _halves(key: str) -> tuple[str, str]:
    adjective, _, noun = key.partition("-")
    return " " + adjective, "-" + noun


def cut_line(line: str, room: int, counter: TokenCounter, *, keep: str) -> str:
    """Longest beginning (keep="start") or end (keep="end") of a line that adds at most `room` tokens; maybe "".

    The line is cut between words and behind hyphens.
    """
    pieces = _PIECES.findall(line)
    if keep == "start":
        cuts = ["".join(pieces[:k]).rstrip(" -") for k in range(1, len(pieces))]
    else:
        cuts = ["".join(pieces[-k:]) for k in range(1, len(pieces))]
    costs = counter.inside(["\n" + cut for cut in cuts])
    fitting = [(cost, cut) for cost, cut in zip(costs, cuts, strict=True) if cost <= room]
    return max(fitting)[1] if fitting else ""


class _Needles(Draft):
    """Keys, values and the question; subclasses have the haystack."""

    def __init__(self, spec: TaskSpec, rng: random.Random) -> None:
        options = spec.options
        key, self.values = str(options["key"]), str(options["value"])
        queries, per_key = int(options["queries"]), int(options["values"])
        self._draw_key = DRAW[key]
        names = distinct(lambda: self._draw_key(rng), int(options["keys"]))
        drawn = distinct(lambda: DRAW[self.values](rng), len(names) * per_key)
        self.table = {name: drawn[i * per_key : (i + 1) * per_key] for i, name in enumerate(names)}
        self.needles = [self.needle(name, value) for name in names for value in self.table[name]]
        rng.shuffle(self.needles)
        asked = rng.sample(names, queries)
        self.answers = tuple(value for name in asked for value in self.table[name])
        self._asked = [self.needle(name, value) for name in asked for value in self.table[name]]
        many = queries * per_key > 1
        words = {
            "noun": self.values if many else self.values[:-1],
            "some": "Some" if many else "A",
            "verb": "are" if many else "is",
            "what": "What are all" if many else "What is",
            "query": listing(asked),
        }
        self.instruction = specs.NIAH_INSTRUCTION.format(**words)
        self.question = specs.NIAH_QUESTION.format(**words)
        self.prefix = specs.NIAH_PREFIX.format(**words)

    def needle(self, key: str, value: str) -> str:
        return specs.NEEDLE.format(values=self.values, key=key, value=value)

    def meta(self, n: int, context: str) -> dict[str, Any]:
        start = len(self.instruction)
        places = [context.index(needle) - start for needle in self._asked]
        return {"depths": [round(100 * place / (len(context) - start), 2) for place in places]}


class EssayNeedles(_Needles):
    """Unit: a word of the text.  Needles stand between sentences, at different ones of 40 even depths."""

    lowest = 32

    def __init__(self, spec: TaskSpec, rng: random.Random, essay: Essay, counter: TokenCounter) -> None:
        super().__init__(spec, rng)
        self._essay = essay
        self._places = sorted(rng.sample(_DEPTHS, len(self.needles)))
        self._fixed = sum(counter.inside([self.instruction, *[" " + needle for needle in self.needles]]))
        self.highest = len(essay)

    def estimate(self, n: int) -> float:
        return self._fixed + self._essay.tokens(n)

    def context(self, n: int) -> str:
        stop, ends = self._essay.cut(n)
        parts, done = [], 0
        for needle, depth in zip(self.needles, self._places, strict=True):
            sentence = int(len(ends) * (depth / 100))
            place = int(ends[sentence - 1]) if sentence else 0
            parts += [self._essay.text[done:place].strip(), needle]
            done = place
        parts.append(self._essay.text[done:stop].strip())
        return self.instruction + " ".join(part for part in parts if part)


class LineNeedles(_Needles):
    """Unit: a line, of noise or another needle.  Needles stand at different random lines, never last."""

    def __init__(self, spec: TaskSpec, rng: random.Random, lines: random.Random, counter: TokenCounter) -> None:
        super().__init__(spec, rng)
        self._counter, self._lines_rng = counter, lines
        self._places = rng.getrandbits(64)
        self._noise = spec.options["haystack"] == "noise"
        self._lines: list[str] = []
        self._drawn: list[str] = []  # their keys
        self._extra = ""
        self.lowest = len(self.needles)
        self.exact = self._noise
        self._fixed = sum(counter.inside([self.instruction, *["\n" + needle for needle in self.needles]]))
        if self._noise:
            self._per_line = float(counter.inside(["\n" + NOISE_LINE])[0])
        else:
            sample = self._take(_SAMPLE_LINES)
            self._key_costs = [0.0]  # of the first n lines' keys
            self._per_line = (counter.counts(["\n".join(sample)])[0] - self._keys(len(sample))) / len(sample)

    def _keys(self, n: int) -> float:
        """About the tokens of the keys of the first n lines, where keys differ in tokens by their words."""
        if self._noise or self._draw_key is not word_key:
            return 0.0
        if n >= len(self._key_costs):
            self._take(n)
            parts = [part for key in self._drawn for part in _halves(key)]
            costs = self._counter.inside(parts)
            self._key_costs = [0.0, *itertools.accumulate(a + b for a, b in zip(costs[::2], costs[1::2], strict=True))]
        return self._key_costs[n]

    def _take(self, count: int) -> list[str]:
        if self._noise:
            return [NOISE_LINE] * count
        rng, value = self._lines_rng, DRAW[self.values]
        while len(self._lines) < count:
            key = self._draw_key(rng)
            if key not in self.table:  # another value for an asked key would make the answer ambiguous
                self._drawn.append(key)
                self._lines.append(self.needle(key, value(rng)))
        return self._lines[:count]

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_line + self._keys(n)

    def context(self, n: int) -> str:
        lines = self._take(n)
        places = sorted(random.Random(self._places).sample(range(n), len(self.needles)), reverse=True)
        for place, needle in zip(places, self.needles, strict=True):
            lines.insert(place, needle)
        if self._extra and self._noise:
            lines.append(self._extra)
        elif self._extra:
            lines.insert(0, self._extra)
        return self.instruction + "\n".join(lines)

    def tune(self, n: int, room: int) -> bool:
        """A part of one more line: the beginning of a noise line at the end, the end of a needle at the start."""
        line = self._take(n + 1)[n]
        self._extra = cut_line(line, room, self._counter, keep="start" if self._noise else "end")
        return bool(self._extra)

    def untune(self) -> None:
        self._extra = ""


def make_needles(
    spec: TaskSpec, rng: random.Random, lines: random.Random, counter: TokenCounter, essay: Callable[[], Essay]
) -> _Needles:
    """Draft of a needle task; `essay` is called for the essay tasks only."""
    if spec.options["haystack"] == "essay":
        return EssayNeedles(spec, rng, essay(), counter)
    return LineNeedles(spec, rng, lines, counter)
