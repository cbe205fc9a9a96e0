"""Row: one sample of a task suite, in the shape most evaluation code understands.

The prompt is context + question + answer_prefix; a chat template goes around the first two, and the answer prefix
begins the assistant's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrieval_attn.errors import InputDataError

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One sample.

    id: "suite/task/length/seed/i", unique and the same in every run.  context: everything before the question.
    question: starts with its own separator, ends before the answer prefix.  answers: references; numbers and labels
    as text.  target_tokens: requested length, None for rows of a file.
    meta: what is worth keeping with the prediction (generator version, depth, truncated, ...); prompt_tokens in it is
    the exact count of the whole prompt, template included.  context_ids: ids to use for the context as they are,
    where a text cannot give them back (cut in the middle of tokens).
    """

    id: str
    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    target_tokens: int | None
    options: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    context_ids: Sequence[int] | None = field(default=None, repr=False)

    @property
    def prompt(self) -> str:
        """The whole prompt as text, without a chat template."""
        return self.context + self.question + self.answer_prefix

    def to_dict(self, *, context: bool = True) -> dict[str, Any]:
        """JSON values.  context=False leaves the long text out, as predictions do."""
        values: dict[str, Any] = {
            "id": self.id,
            "task": self.task,
            "context": self.context,
            "question": self.question,
            "answer_prefix": self.answer_prefix,
            "answers": list(self.answers),
            "max_new_tokens": self.max_new_tokens,
            "target_tokens": self.target_tokens,
            "options": list(self.options),
            "meta": dict(self.meta),
        }
        if not context:
            del values["context"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Row of `to_dict`'s values; a left-out context is empty.  Raises InputDataError for a missing field."""
        try:
            return cls(
                id=values["id"],
                task=values["task"],
                context=values.get("context", ""),
                question=values["question"],
                answer_prefix=values["answer_prefix"],
                answers=tuple(values["answers"]),
                max_new_tokens=int(values["max_new_tokens"]),
                target_tokens=values["target_tokens"],
                options=tuple(values.get("options", ())),
                meta=dict(values.get("meta", {})),
            )
        except KeyError as missing:
            raise InputDataError(
                f"row {values.get('id', '?')!r}: needed the field {missing}, found {', '.join(values)};"
                " write the row again"
            ) from None
