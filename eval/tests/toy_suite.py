"""A small suite for tests of the runner: RULER-style rows from the bundled generator, two questions per context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from retrieval_attn_eval.suite import Row
from retrieval_attn_eval.tasks import make_sample


class ToySuite:
    """Tasks of `retrieval_attn_eval.tasks`; rows 2i and 2i+1 ask the same context, the second after an extra line."""

    name = "toy"
    titles = {"niah_single_1": "S1", "niah_single_3": "S3"}
    notes = ("built-in prose",)

    def __init__(self, tasks: tuple[str, ...] = ("niah_single_1", "niah_single_3"), rows: int | None = None) -> None:
        self._tasks, self._rows = tasks, rows
        self.made: list[tuple[str, int | None, int]] = []

    def tasks(self) -> tuple[str, ...]:
        return self._tasks

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        for index in indices:
            self.made.append((task, length, index))
            target = length if length is not None else 700
            sample = make_sample(task, target - 4, 1000 * seed + index // 2, tokenizer)
            yield Row(
                id=f"toy/{task}/{length}/{seed}/{index}",
                task=task,
                context=sample.context,
                question="\n" * (index % 2) + sample.question,
                answer_prefix="",
                answers=sample.answers,
                max_new_tokens=sample.max_new_tokens,
                target_tokens=length,
                meta={"generator": "toy/1"},
            )

    def score(self, row: Row, text: str) -> float:
        return sum(answer.casefold() in text.casefold() for answer in row.answers) / len(row.answers)

    def fingerprint(self) -> dict[str, Any]:
        return {"generator": "toy/1"}

    def count(self, task: str) -> int | None:
        return self._rows
