"""TaskSuite: what a benchmark must offer to be run, scored and reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from retrieval_attn_eval.suite.sample import Row

__all__ = ["TaskSuite"]


class TaskSuite(Protocol):
    """A benchmark's tasks, samples and scoring.  Implementations import neither torch nor transformers.

    What a suite may have besides, read where it is there:
    titles: task -> column name of the published table.  notes: sentences that belong beside every number, such as
    "built-in prose instead of the essays".  form: set by the runner, so that rows can count the template's tokens.
    max_positions: set by the runner to what the model has.  max_tokens: what no row exceeds, answer included.
    frame(tokenizer, chat) -> PromptFormat: the profile's own messages around a row.
    scores(row, text) -> {name: score}: further scorers, kept beside `score`.
    nulls(text) -> bool: whether an answer counts as empty.
    about(row) -> what a dry run shows of a row besides its tokens.
    view(folder, summary, rows, plot) -> text for the terminal instead of summary.md; draws its own plots.
    summary(scores) -> markdown lines for one method, from {length: {task: mean score 0..1}}.
    """

    name: str

    def tasks(self) -> tuple[str, ...]:
        """Task names in the order of the published table."""
        ...

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """The rows with these indices.  Row i depends on (task, length, seed, i, tokenizer, options) alone."""
        ...

    def score(self, row: Row, text: str) -> float:
        """0 to 1 by the benchmark's own rule; `row` may come without its context."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that decide what a row means: generator version, profile, hashes of the files."""
        ...

    def count(self, task: str) -> int | None:
        """Rows of a file; None: endless."""
        ...
