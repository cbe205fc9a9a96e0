"""A dense extraction to feed: records of parcels in prose, and some of them as JSON.

A dense extraction in the manner of Text2JSON (arXiv 2604.08426): needle tests ask for one place of a text, here the
answer needs many, each for a few tokens. Everything is made up; nothing of the paper's data is used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.suite.fit import Draft, fit
from retrieval_attn_eval.text.tokens import TokenCounter
from retrieval_attn_eval.text.words import ADJECTIVES, CITIES, MATERIALS, NOUNS

__all__ = ["RECORDS", "Extraction", "Parcel", "make_extraction"]

RECORDS = 16
"""Records that a question asks for."""

INSTRUCTION = (
    "The following text tells of parcels. Memorize every one of them. I will ask for many of them afterwards.\n"
)
QUESTION = (
    "\nQuestion: What does the text say about the parcels {names}? Give a JSON array with one object for each of them, "
    "in this order, with the fields parcel, city, date, content and seal.\nAnswer:"
)
PREFIX = " ["

_TELLING = (
    "Parcel {parcel} left {city} on {date} with {content} on board. Its seal reads {seal}.",
    "On {date} a clerk in {city} sent off parcel {parcel}, which held {content}, under the seal {seal}.",
    "Seal {seal} closes parcel {parcel}. It came from {city}, is dated {date} and contains {content}.",
)
_SAMPLE = 128
_SPARE_TOKENS = 16


@dataclass(frozen=True)
class Parcel:
    """One record; every field is text and stands in the prose as it is."""

    parcel: str
    city: str
    date: str
    content: str
    seal: str

    @classmethod
    def draw(cls, drawn: random.Random) -> Parcel:
        return cls(
            f"{drawn.choice(ADJECTIVES)}-{drawn.choice(NOUNS)}",
            drawn.choice(CITIES),
            f"{drawn.randrange(1900, 2030)}-{drawn.randrange(1, 13):02}-{drawn.randrange(1, 29):02}",
            f"{drawn.randrange(2, 100)} crates of {drawn.choice(MATERIALS)}",
            str(drawn.randrange(100_000, 1_000_000)),
        )

    def told(self, form: int) -> str:
        """The record in prose, in one of some forms."""
        return _TELLING[form % len(_TELLING)].format(**asdict(self))

    def to_json(self) -> str:
        """The object that an answer has."""
        return json.dumps(asdict(self))


class Extraction(Draft):
    """Unit: a line with a record. Those that are asked for stand at random places; names differ.

    answers: JSON objects in the order of the question.
    """

    exact = False

    def __init__(self, asked: int, drawn: random.Random, counter: TokenCounter) -> None:
        """asked: records that the question names, at least 1. drawn: decides everything."""
        self._drawn, self._names = drawn, set[str]()
        self._asked = [self._new() for _ in range(asked)]
        self._others: list[Parcel] = []
        self._places = drawn.getrandbits(64)
        self.lowest = asked
        order = drawn.sample(self._asked, asked)
        self.answers = tuple(one.to_json() for one in order)
        self.question = QUESTION.format(names=", ".join(one.parcel for one in order))
        self.prefix = PREFIX
        lines = [one.told(form) for form, one in enumerate(self._first(max(asked, _SAMPLE)))]
        self._fixed = counter.count(INSTRUCTION)
        self._per_line = counter.count("\n".join(lines)) / len(lines)

    @property
    def completion(self) -> str:
        """The whole true answer, as it follows the prefix."""
        return ", ".join(self.answers) + "]"

    def _new(self) -> Parcel:
        while (one := Parcel.draw(self._drawn)).parcel in self._names:
            pass
        self._names.add(one.parcel)
        return one

    def _first(self, count: int) -> Sequence[Parcel]:
        """`count` records with those that are asked for first."""
        while len(self._asked) + len(self._others) < count:
            self._others.append(self._new())
        return [*self._asked, *self._others[: count - len(self._asked)]]

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_line

    def context(self, n: int) -> str:
        records, shuffled = list(self._first(n)), random.Random(self._places)
        shuffled.shuffle(records)
        return INSTRUCTION + "\n".join(one.told(shuffled.randrange(len(_TELLING))) for one in records)


def make_extraction(length: int, tokenizer: Any, seed: int) -> tuple[str, str]:
    """Make a prompt and its whole true answer, together at most `length` tokens. Raises ConfigError if too short."""
    counter, form = TokenCounter(tokenizer), PromptFormat.of(tokenizer, "never")
    task = f"extract_{RECORDS}"
    draft = Extraction(RECORDS, random.Random(f"extract/1/{task}/{length}/{seed}/0"), counter)
    answer = counter.count(draft.completion) + _SPARE_TOKENS
    around = len(form.head) + answer + counter.count(draft.question + form.tail + draft.prefix)
    (sized,) = fit([draft], counter, length, [around], task)
    return sized.context + draft.question + draft.prefix, draft.completion
