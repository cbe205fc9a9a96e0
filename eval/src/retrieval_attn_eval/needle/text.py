"""What is hidden and asked in a needle test: sentences with holes, and how a cell's draw fills them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.parsed import parsed

__all__ = ["ANSWER_TOKENS", "MORE_ANSWER_TOKENS", "Drawn", "NeedleText", "depths_of"]

NEEDLE = "The special magic {city} number is: {number}."
QUESTION = "What is the special magic {city} number?"
SEVERAL = "One of the special magic numbers for {city} is: {number}."
SEVERAL_QUESTION = (  # with the beginning of the answer, as RULER's multi-value task has it
    "What are all the special magic numbers for {city} mentioned in the provided text?"
    " The special magic numbers for {city} mentioned in the provided text are"
)
ANSWER_TOKENS, MORE_ANSWER_TOKENS = 32, 16
"""Room for the answer to one needle, and for every further one."""
_HOLES = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True)
class Drawn:
    """What one cell hides (needles, in the order of the text), asks, and expects to find in the answer."""

    needles: tuple[str, ...]
    question: str
    expected: tuple[str, ...]


@dataclass(frozen=True)
class NeedleText:
    """Templates.  needles: one per needle of a context, {city} shared and {number} its own; answers: an answer with
    {number} is expected once per needle.
    """

    needles: tuple[str, ...]
    question: str
    answers: tuple[str, ...]

    @classmethod
    def of(
        cls, sentences: Sequence[str] | None, count: str | None, question: str | None, answers: Sequence[str] | None
    ) -> NeedleText:
        """From the flags --needle, --needles, --question and --answer; None: not given.

        count: a number, or a JSON list of sentences as other needle tests have it.  Fewer sentences than needles
        are used in turn.  Raises ConfigError.
        """
        listed = _listed(count)
        if listed is not None and sentences:
            raise ConfigError("--needles with a list of sentences and --needle exclude each other; give one of them")
        given = listed if listed is not None else list(sentences or ())
        wanted = max(len(given), 1) if count is None or listed is not None else _count(count)
        if wanted < len(given):
            raise ConfigError(f"--needles {wanted} is less than the {len(given)} sentences given; leave it out")
        several = wanted > 1
        given = [text.replace("\\n", "\n") for text in given] or [SEVERAL if several else NEEDLE]
        if not all(text.strip() for text in given):
            raise ConfigError("--needle must hold a sentence, got an empty one; leave the flag out for the default")
        needles = tuple(given[i % len(given)] for i in range(wanted))
        if any("{number}" not in text and needles.count(text) > 1 for text in needles):
            raise ConfigError(
                "--needles would hide the same sentence twice; put {number} into --needle, or give --needle more often"
            )
        asked = question if question is not None else SEVERAL_QUESTION if several else QUESTION
        if not asked.strip():
            raise ConfigError("--question must hold a question, got an empty one; leave the flag out for the default")
        expected = tuple(answers or (("{number}",) if all("{number}" in text for text in needles) else ()))
        if not expected or not all(a.strip() for a in expected):
            raise ConfigError("--needle without {number} needs --answer TEXT, the string expected in the answer")
        for text in (*needles, asked, *expected):
            unknown = [hole for hole in _HOLES.findall(text) if hole not in ("city", "number")]
            if unknown:
                raise ConfigError(f"{text!r}: unknown hole {{{unknown[0]}}}; the holes are {{city}} and {{number}}")
        return cls(needles, asked, expected)

    @property
    def answer_tokens(self) -> int:
        """Room that the answer gets if nothing else is said."""
        return ANSWER_TOKENS + MORE_ANSWER_TOKENS * (len(self.needles) - 1)

    def draw(self, rng: random.Random) -> Drawn:
        """Fill the holes.  The first needle does not depend on how many follow."""
        from retrieval_attn_eval.text.words import CITIES

        city = rng.choice(CITIES)
        numbers: list[str] = []
        while len(numbers) < len(self.needles):
            number = str(rng.randint(1_000_000, 9_999_999))
            if number not in numbers:
                numbers.append(number)

        def fill(text: str, number: str) -> str:
            holes = {"city": city, "number": number}
            return _HOLES.sub(lambda m: holes[m.group(1)], text)

        needles = tuple(fill(text, number) for text, number in zip(self.needles, numbers, strict=True))
        expected = dict.fromkeys(
            fill(text, number) for text in self.answers for number in (numbers if "{number}" in text else numbers[:1])
        )
        return Drawn(needles, fill(self.question, numbers[0]), tuple(expected))


def depths_of(depth: float, count: int) -> tuple[float, ...]:
    """Depths of `count` needles in percent: the first at `depth`, the others evenly between it and the end."""
    return tuple(depth + i * (100.0 - depth) / count for i in range(count))


def _listed(text: str | None) -> list[str] | None:
    """The sentences of a JSON list, None for anything else."""
    if text is None or not text.lstrip().startswith("["):
        return None
    try:
        found = parsed(text)
    except ValueError as error:
        raise ConfigError(f"--needles {text!r}: needed a number or a JSON list of sentences ({error})") from None
    if not found or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"--needles {text!r}: needed a JSON list of at least one sentence")
    return list(found)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < 1:
        raise ConfigError(f"--needles {text!r}: needed a number from 1, or a JSON list of sentences")
    return int(text)
