"""Generators of the six tasks whose recipe is public, as drafts: units of text that can be taken in any number.

A draft is the sample i of a seed before its length is known.  Its units never change once drawn, so that a sample of n
units begins like one of n + 1, and its answer is worked out for the number of units taken.  Ranges, wording and the
order of the parts follow the benchmark's data/construct_synthetic_dataset.py.  Two things differ: places and kinds run
through their values evenly from sample to sample, so that the first n samples are as good a test as all, and everything
depends on (seed, i) only.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from retrieval_attn_eval.infinitebench.record import Record
from retrieval_attn_eval.plans import NOISE_LINE, uuid4

__all__ = ["DRAFTS", "Draft"]

_PLACES, _STEP = 59, 37  # of the published sweep; a step without a common factor visits them evenly
_PAIRS, _PAIR_STEP = 500, 191
_LOW, _HIGH = 0, 99
_ANSWER_WITH_ONE = "You should answer with only one number, no other words. The {kind} of the list is: "


class Draft(ABC):
    """Sample i of a seed, its length still open.

    opening, closing: text around the units.  anchor: text that units are counted behind.  least: fewest units that
    make a sample.  distinct: hardly any unit occurs twice, so that there is no use in remembering their token counts.
    """

    opening = ""
    closing = ""
    anchor = "."
    least = 1
    distinct = False

    def __init__(self, task: str, seed: int, i: int) -> None:
        self.task, self.i = task, i
        self.rng = random.Random(f"infinitebench/{task}/{seed}/{i}")
        self._units: list[str] = []

    def units(self, count: int) -> list[str]:
        """The first `count` units."""
        if count > len(self._units):
            self._units += self.more(count - len(self._units))
        return self._units[:count]

    @abstractmethod
    def more(self, count: int) -> list[str]:
        """Draw the next `count` units."""

    def record(self, count: int) -> Record:
        """The sample with `count` units, at least `least`."""
        self.units(count)
        return self.build(count)

    @abstractmethod
    def build(self, count: int) -> Record:
        """The sample with `count` units, all of them drawn."""

    def extra(self) -> str:
        """Text that comes in beside the units, for counting."""
        return ""

    def finish(self, context: str, question: str, answers: tuple[str, ...], **meta: Any) -> Record:
        return Record(self.task, context, question, answers, (), f"generated {self.task} {self.i}", meta)


class HiddenNumber(Draft):
    """passkey and number_string: one line with the number somewhere among lines of noise."""

    anchor = NOISE_LINE + "\n"
    what = "pass key"

    def __init__(self, task: str, seed: int, i: int) -> None:
        super().__init__(task, seed, i)
        digits = [self.rng.choice("0123456789") for _ in range(5)]
        if task == "number_string":
            self.what = "sequence of digits"
            for length in range(5, 10):  # five times some digit is doubled, which makes the number hard to copy
                at = self.rng.randrange(length)
                digits.insert(at, digits[at])
        self.key = "".join(digits)

    def more(self, count: int) -> list[str]:
        return [NOISE_LINE + "\n"] * count

    def extra(self) -> str:
        return f"The {self.what} is {self.key}. Remember it. {self.key} is the {self.what}.\n"

    def build(self, count: int) -> Record:
        place = self.i * _STEP % _PLACES
        before = round(count * place / (_PLACES - 1))
        noise = NOISE_LINE + "\n"
        context = noise * before + self.extra() + noise * (count - before)
        depth = 100.0 * before / count
        return self.finish(context, f"What is the {self.what}?", (self.key,), depth=round(depth, 3))


class KeyValue(Draft):
    """kv_retrieval: a JSON object of UUID pairs, one of whose keys is asked for."""

    opening = "JSON data:\n{"
    closing = "}"
    anchor = '"'
    least = 2
    distinct = True

    def __init__(self, task: str, seed: int, i: int) -> None:
        super().__init__(task, seed, i)
        self.pairs: list[tuple[str, str]] = []
        self._seen: set[str] = set()

    def more(self, count: int) -> list[str]:
        first = len(self.pairs)
        while len(self.pairs) < first + count:
            pair = (uuid4(self.rng), uuid4(self.rng))
            if self._seen.isdisjoint(pair) and pair[0] != pair[1]:
                self._seen.update(pair)
                self.pairs.append(pair)
        # the first unit starts the list; its two characters less are part of the opening when tokens are counted
        return [f', "{key}": "{value}"' for key, value in self.pairs[first:]]

    def build(self, count: int) -> Record:
        gold = count * (self.i * _PAIR_STEP % _PAIRS) // _PAIRS
        key, value = self.pairs[gold]
        context = self.opening + "".join(self.units(count))[2:] + self.closing
        question = f'\nKey: "{key}"\nThe value associated with the specified key is: '
        return self.finish(context, question, (value,), depth=round(100.0 * gold / count, 3), pairs=count)


def _distinct_sorted(numbers: list[int]) -> list[int]:
    return sorted(set(numbers))


def _median(numbers: list[int]) -> int | float:
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(numbers) % 2 else (ordered[half] + ordered[half - 1]) / 2


_FIND: dict[str, Callable[[list[int]], int | float]] = {
    "largest number": lambda numbers: max(numbers),
    "second largest number": lambda numbers: _distinct_sorted(numbers)[-2],
    "third largest number": lambda numbers: _distinct_sorted(numbers)[-3],
    "smallest number": lambda numbers: min(numbers),
    "second smallest number": lambda numbers: _distinct_sorted(numbers)[1],
    "third smallest number": lambda numbers: _distinct_sorted(numbers)[2],
    "median number": _median,
}


class FindNumber(Draft):
    """math_find: a list of integers from 0 to 99, and which of them is the largest, second largest, ..., the median."""

    opening = "["
    closing = "]"
    anchor = "[7"
    least = 16

    def __init__(self, task: str, seed: int, i: int) -> None:
        super().__init__(task, seed, i)
        self.kind = tuple(_FIND)[i % len(_FIND)]
        low, high = _LOW, _HIGH
        from_below = self.kind.endswith("smallest number") or (self.kind == "median number" and self.rng.random() > 0.5)
        if from_below:  # one end is moved at random, otherwise every list would have the same answer
            low = self.rng.randint(_LOW, int(_HIGH * 0.2))
        else:
            high = self.rng.randint(int(_HIGH * 0.8), _HIGH)
        self.range = range(low, high + 1)
        self.numbers: list[int] = []

    def more(self, count: int) -> list[str]:
        # one draw per number: `choices` would give other numbers if they were drawn in other portions
        drawn = [self.range[int(self.rng.random() * len(self.range))] for _ in range(count)]
        self.numbers += drawn
        return [f", {number}" for number in drawn]

    def build(self, count: int) -> Record:
        numbers = self.numbers[:count]
        question = _ANSWER_WITH_ONE.format(kind=self.kind)
        return self.finish(str(numbers), question, (str(_FIND[self.kind](numbers)),), kind=self.kind, numbers=count)


class RunningValue(Draft):
    """math_calc: a sum of many terms whose running value stays from 0 to 99; every intermediate value is asked for."""

    anchor = "7"
    least = 2

    def __init__(self, task: str, seed: int, i: int) -> None:
        super().__init__(task, seed, i)
        self.start = self.rng.randint(_LOW, _HIGH)
        self.opening = str(self.start)
        self.values: list[int] = []

    def more(self, count: int) -> list[str]:
        value = self.values[-1] if self.values else self.start
        terms = []
        for _ in range(count):
            term = self.rng.randint(_LOW, _HIGH)
            if self.rng.random() > 0.5:
                if value + term > _HIGH:
                    term = self.rng.randint(_LOW, _HIGH - value)
                value += term
                terms.append(f" + {term}")
            else:
                if value - term < 0:
                    term = self.rng.randint(_LOW, value)
                value -= term
                terms.append(f" - {term}")
            self.values.append(value)
        return terms

    def build(self, count: int) -> Record:
        answers = tuple(str(value) for value in self.values[:count])
        context = self.opening + "".join(self.units(count))
        return self.finish(context, "The value of the numerical expression is: ", answers, terms=count + 1)


DRAFTS: dict[str, type[Draft]] = {
    "passkey": HiddenNumber,
    "number_string": HiddenNumber,
    "kv_retrieval": KeyValue,
    "math_find": FindNumber,
    "math_calc": RunningValue,
}
