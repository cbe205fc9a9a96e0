"""Published files of LongBench v2, HELMET and NoLiMa.

LongBench v2 (arXiv 2412.15204): one JSON list or JSON lines with context, question, choice_A to choice_D and answer.
HELMET (arXiv 2410.02694), recall and RAG: JSON lines with question, answers and ctxs (title and text), or context.
NoLiMa (arXiv 2502.05167): a list of needles with {CHAR}, questions, tests with input arguments, and a character set;
the haystack is a file or folder of its own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.parsed import parsed
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.tasks import split_sentences
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["FILES", "Asked", "HiddenFact", "Needle", "read_records"]

FILES = {"longbench_v2": "longbench_v2.json", "helmet": "helmet.jsonl", "nolima": "nolima_needles.json"}
"""Task -> name of its file in the data folder."""

_CHOICES = (
    "\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nAnswer with "The correct answer is (letter)".'
)
_SNIPPET = "Answer a question about the following book snippet.\n\n"
_HIDDEN = "\n\nGive a short answer that the snippet states or implies, without an explanation.\n\nQuestion: {question}"


@dataclass(frozen=True)
class Asked:
    """A question about a text of a file. before, context: the context is cut in its middle if it is too long."""

    before: str
    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Needle:
    """A fact of NoLiMa with {CHAR} in the place of a name, and the question whose answer is the name."""

    text: str
    question: str
    names: tuple[str, ...]


def read_records(task: str, path: Path) -> tuple[list[Asked] | list[Needle], str]:
    """Return the records of a task's file and the file's SHA-256.

    Raises InputDataError, with the place in the file, for a file that is not as published.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputDataError(f"{path}: needed the file of {task} ({error.strerror}); check the path") from None
    make: Any = {"longbench_v2": _choices, "helmet": _documents, "nolima": _needles}[task]
    records: list[Any] = []
    for number, item in enumerate(_items(data, path), 1):
        try:
            found = make(item)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputDataError(
                f"{path}, record {number}: needed the published fields of {task} ({type(error).__name__}: {error}); "
                "give the published file"
            ) from None
        records.extend(found if isinstance(found, list) else [found])
    if not records:
        raise InputDataError(f"{path}: needed at least one record, found none; give the published file of {task}")
    return records, hashlib.sha256(data).hexdigest()


def _items(data: bytes, path: Path) -> Sequence[Any]:
    try:
        if data.lstrip().startswith(b"["):
            tree: Sequence[Any] = parsed(data)
            return tree
        return [parsed(line) for line in data.splitlines() if line.strip()]
    except ValueError as error:
        raise InputDataError(f"{path}: needed a JSON list or JSON lines ({error}); give the published file") from None


def _choices(item: Mapping[str, Any]) -> Asked:
    fields = {name: item[name].strip() for name in ("question", "choice_A", "choice_B", "choice_C", "choice_D")}
    before = "Read the following text and answer the question after it.\n\n"
    return Asked(before, item["context"], _CHOICES.format(**fields), "\nThe correct answer is (", (item["answer"],))


def _documents(item: Mapping[str, Any]) -> Asked:
    answers = item["answers"] if "answers" in item else item["answer"]
    if "ctxs" in item:
        context = "\n\n".join(f"Document (Title: {one['title']}): {one['text']}" for one in item["ctxs"])
    else:
        context = item["context"]
    before = "Use the given documents to write a short answer to the question.\n\n"
    accepted = (answers,) if isinstance(answers, str) else tuple(answers)
    return Asked(before, context, f"\n\nQuestion: {item['question']}", "\nAnswer:", accepted)


def _needles(item: Mapping[str, Any]) -> list[Needle]:
    """Return one needle per test and question, with the test's arguments filled in."""
    found, names = [], tuple(item["character_set"])
    for test in item["tests"].values():
        filled = {str(number): argument for number, argument in enumerate(test["input_args"], 1)}
        text = _fill(item["needle"], filled)
        found += [Needle(text, _fill(question, filled), names) for question in item["questions"].values()]
    return found


def _fill(text: str, arguments: Mapping[str, str]) -> str:
    for name, value in arguments.items():
        text = text.replace(f"{{{name}}}", value)
    return text


class HiddenFact(Draft):
    """NoLiMa: unit: a sentence of the haystack, with the fact between two of them. answers: the name."""

    def __init__(self, needle: Needle, haystack: str, drawn: random.Random, counter: TokenCounter) -> None:
        """haystack: repeated if it is too short. drawn: decides the name and the place."""
        self._sentences, self._counter = split_sentences(haystack), counter
        name = drawn.choice(needle.names)
        self._fact, self._depth = " " + needle.text.replace("{CHAR}", name), drawn.random()
        self.answers = (name,)
        self.question, self.prefix = _HIDDEN.format(question=needle.question), "\nAnswer:"
        self._costs = counter.inside(self._sentences)
        self._sums = [0]
        self._fixed = counter.count(_SNIPPET) + counter.inside([self._fact])[0]

    def estimate(self, n: int) -> float:
        while len(self._sums) <= n:
            self._sums.append(self._sums[-1] + self._costs[(len(self._sums) - 1) % len(self._costs)])
        return self._fixed + self._sums[n]

    def context(self, n: int) -> str:
        sentences = [self._sentences[place % len(self._sentences)] for place in range(n)]
        place = round(self._depth * n)
        return _SNIPPET + "".join([*sentences[:place], self._fact, *sentences[place:]]).lstrip()

    def meta(self, n: int, context: str) -> dict[str, Any]:
        return {"depth": round(100 * self._depth, 2), "repeats": n > len(self._sentences)}
