"""MRCR's form: a conversation with several identical requests, of which one answer is asked for by its number.

After the card of the data set openai/mrcr (2, 4 or 8 identical requests for a kind of text about a topic; needles and
other turns come from one distribution; the answer begins with a random string) and the Michelangelo paper
(arXiv 2409.12640), which introduced the task. Deviations: pieces are 3 sentences of the built-in prose instead of a
model's writing, and the random string begins the answer for the model instead of being its first task.
"""

from __future__ import annotations

import random
import string
from typing import Any

from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.text.prose import endless_sentences
from retrieval_attn_eval.text.tokens import TokenCounter
from retrieval_attn_eval.text.words import NOUNS

__all__ = ["Conversation"]

KINDS = ("poem", "blog post", "short essay", "social media post", "riddle", "news article", "letter", "speech")
INSTRUCTION = (
    "The following is a conversation between a user and an assistant. Some requests of the user are identical. "
    "Afterwards I will ask for one of the assistant's pieces by its number.\n\n"
)
QUESTION = (
    "\n\nUser: Prepend {mark} to the {place} (1 indexed) {kind} about {topic}. Do not include any other text in your "
    "response."
)
PREFIX = "\nAssistant: {mark}"
_SENTENCES = 3
_SAMPLE = 64
_MARK_LETTERS = 10


class Conversation(Draft):
    """Unit: a request with its answer, besides the `needles` identical requests.

    Other requests share the kind or the topic of the identical ones, or neither. answers: the piece that is asked for,
    as it stands in the text.
    """

    exact = False

    def __init__(self, needles: int, drawn: random.Random, counter: TokenCounter) -> None:
        """needles: number of identical requests. drawn: decides everything."""
        self._drawn, self._pieces = drawn, endless_sentences(drawn.getrandbits(24))
        self._kind, self._topic = drawn.choice(KINDS), drawn.choice(NOUNS)
        self._needles = [self._turn(self._kind, self._topic) for _ in range(needles)]
        self._others: list[str] = []
        self._places = drawn.getrandbits(64)
        asked = drawn.randrange(needles)
        mark = "".join(drawn.choices(string.ascii_letters + string.digits, k=_MARK_LETTERS))
        request = {"mark": mark, "place": _ordinal(asked + 1), "kind": self._kind, "topic": f"{self._topic}s"}
        self.question, self.prefix = QUESTION.format(**request), PREFIX.format(mark=mark)
        self.answers = (self._needles[asked].partition("\nAssistant: ")[2],)
        self._asked = asked
        self._fixed = counter.count(INSTRUCTION + "\n\n".join(self._needles))
        self._per_turn = counter.count("\n\n".join(self._first(_SAMPLE))) / _SAMPLE

    def _turn(self, kind: str, topic: str) -> str:
        piece = " ".join(next(self._pieces) for _ in range(_SENTENCES)).strip()
        return f"User: Write a {kind} about {topic}s.\nAssistant: {' '.join(piece.split())}"

    def _first(self, count: int) -> list[str]:
        """Return `count` turns besides the identical ones."""
        while len(self._others) < count:
            kind, topic = self._drawn.choice(KINDS), self._drawn.choice(NOUNS)
            shares = self._drawn.random()
            kind, topic = (self._kind if shares < 0.2 else kind), (self._topic if shares > 0.8 else topic)
            if (kind, topic) != (self._kind, self._topic):
                self._others.append(self._turn(kind, topic))
        return self._others[:count]

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_turn

    def context(self, n: int) -> str:
        turns = list(self._first(n))
        drawn = random.Random(self._places)
        places = sorted(drawn.random() for _ in self._needles)
        shown = self._turns_with(turns, places)
        return INSTRUCTION + "\n\n".join(shown)

    def _turns_with(self, turns: list[str], places: list[float]) -> list[str]:
        """Insert the needles, in their order, at shares of the turns."""
        shown, done = [], 0
        for place, needle in zip(places, self._needles, strict=True):
            stop = round(place * len(turns))
            shown += [*turns[done:stop], needle]
            done = stop
        return [*shown, *turns[done:]]

    def meta(self, n: int, context: str) -> dict[str, Any]:
        start = context.index(self._needles[self._asked])
        return {"place": self._asked + 1, "depth": round(100 * start / len(context), 2)}


def _ordinal(number: int) -> str:
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number, 'th')}"
