"""OOLONG-synth's form: many labelled items with a date and a user, and a question about their distribution.

After "Oolong: Evaluating Long Context Reasoning and Aggregation Capabilities" (arXiv 2511.02817): every item has a
date and a user id, 80 % of the items belong to 20 % of the users, the distribution of labels is drawn per context; a
label is right or wrong, and a number scores 0.75 to the power of its error. Deviations: each item comes with its label,
as in the paper's ablation with gold labels, because its classification data sets cannot be shipped; items are built-in
prose.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.text.prose import endless_sentences
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["LabelledItems"]

LABELS = ("business", "sport", "science", "travel")
INSTRUCTION = (
    "Below is a list of items. Each has a date, a user and a label: business, sport, science or travel. Memorize them. "
    "I will ask about all of them afterwards.\n"
)
QUESTIONS = {
    "count": "\n\nQuestion: How many of the items above have the label {label}? Give a number.",
    "user": "\n\nQuestion: How many of the items above are from user {user}? Give a number.",
    "most": "\n\nQuestion: Which label is the most common among the items above?",
}
PREFIXES = {"count": "\nAnswer:", "user": "\nAnswer:", "most": "\nLabel:"}
_USERS = 10
_FEW_USERS = 2
_SHARE_OF_FEW = 0.8
_SAMPLE = 128


class LabelledItems(Draft):
    """Unit: an item. The answer depends on the number of items; for `most`, labels with equal counts are all right."""

    exact = False

    def __init__(self, about: str, drawn: random.Random, counter: TokenCounter) -> None:
        """about: count, user or most, see QUESTIONS. drawn: decides everything."""
        self._about, self._drawn = about, drawn
        self._texts = endless_sentences(drawn.getrandbits(24))
        self._weights = [drawn.random() ** 2 + 0.05 for _ in LABELS]
        self._users = [str(number) for number in drawn.sample(range(10_000, 100_000), _USERS)]
        self._label, self._user = drawn.choice(LABELS), drawn.choice(self._users)
        self._items: list[tuple[str, str, str]] = []  # line, label, user
        self.question = QUESTIONS[about].format(label=self._label, user=self._user)
        self.prefix = PREFIXES[about]
        self._fixed = counter.count(INSTRUCTION)
        self._per_item = counter.count("\n".join(line for line, _, _ in self._first(_SAMPLE))) / _SAMPLE

    def _first(self, count: int) -> list[tuple[str, str, str]]:
        drawn = self._drawn
        while len(self._items) < count:
            label = drawn.choices(LABELS, self._weights)[0]
            few = drawn.random() < _SHARE_OF_FEW
            user = drawn.choice(self._users[:_FEW_USERS] if few else self._users[_FEW_USERS:])
            date = f"{drawn.randrange(2020, 2026)}-{drawn.randrange(1, 13):02}-{drawn.randrange(1, 29):02}"
            text = " ".join(next(self._texts).split())
            self._items.append((f"Date: {date} || User: {user} || Item: {text} || Label: {label}", label, user))
        return self._items[:count]

    def references(self, n: int) -> tuple[str, ...]:
        """The count, or all most common labels."""
        labels = Counter(label for _, label, _ in self._first(n))
        if self._about == "most":
            most = max(labels.values())
            return tuple(label for label in LABELS if labels[label] == most)
        if self._about == "count":
            return (str(labels[self._label]),)
        return (str(sum(user == self._user for _, _, user in self._first(n))),)

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_item

    def context(self, n: int) -> str:
        return INSTRUCTION + "\n".join(line for line, _, _ in self._first(n))

    def meta(self, n: int, context: str) -> dict[str, Any]:
        return {"items": n}
