"""Dense extraction as a task suite: so many records of a text of any length, as JSON."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.extract.records import Extraction, recovered
from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.ruler.fit import fit
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["GENERATOR", "TASKS", "ExtractSuite"]

GENERATOR = "extract/1"  # part of every row: raise it when the same settings give other rows
TASKS = {"extract_4": 4, "extract_16": 16}
"""Records that a question asks for."""
_SPARE_TOKENS = 16


class ExtractSuite:
    """`records.py` at any length. The score is the share of fields that are right, "records" that of whole records.

    form: what stands around the prompt; set it, and its tokens are counted; None counts what the tokenizer puts before
    a text on its own (BOS), once.
    """

    name = "extract"
    notes = ("texts are generated; Text2JSON's own are not in here",)

    def __init__(self) -> None:
        self.form: PromptFormat | None = None
        self.titles = {name: f"{count} records" for name, count in TASKS.items()}

    def tasks(self) -> tuple[str, ...]:
        """One per number of records."""
        return tuple(TASKS)

    def count(self, task: str) -> int | None:
        """Endless."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows beside task, length, seed, index and tokenizer."""
        return {"generator": GENERATOR}

    def score(self, row: Row, text: str) -> float:
        """Share of the asked fields that the answer has right."""
        return recovered(row.answer_prefix + text, row.answers)[0]

    def scores(self, row: Row, text: str) -> dict[str, float]:
        """Share of records that are right as a whole."""
        return {"records": recovered(row.answer_prefix + text, row.answers)[1]}

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """Rows of at most `length` tokens, answer included. Raises ConfigError for an unknown task or one too long."""
        if task not in TASKS:
            raise ConfigError(f"task {task!r} is unknown; choose from {', '.join(TASKS)}")
        if length is None or length < 1:
            raise ConfigError(f"task {task} needs a length in tokens, got {length}; give a positive number")
        counter, form = TokenCounter(tokenizer), self.form or PromptFormat.of(tokenizer, "never")
        for index in indices:
            draft = Extraction(TASKS[task], random.Random(f"{GENERATOR}/{task}/{length}/{seed}/{index}"), counter)
            answer = counter.count(draft.completion) + _SPARE_TOKENS
            around = len(form.head) + answer + counter.count(draft.question + form.tail + draft.prefix)
            (sized,) = fit([draft], counter, length, [around], task)
            yield Row(
                id=f"extract/{task}/{length}/{seed}/{index}",
                task=task,
                context=sized.context,
                question=draft.question,
                answer_prefix=draft.prefix,
                answers=draft.answers,
                max_new_tokens=answer,
                target_tokens=length,
                meta={
                    "generator": GENERATOR,
                    "prompt_tokens": sized.tokens + around - answer,
                    "records": sized.units,
                    "completion": draft.completion,
                },
            )
