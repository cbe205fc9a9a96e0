"""From a row to token ids: template, context, question and answer prefix, tokenized once and never again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.eval.prompts import Prompt, PromptFormat
from retrieval_attn.eval.suite.sample import Row
from retrieval_attn.eval.suite.suite import TaskSuite

__all__ = ["Prompts", "frame"]


def frame(suite: TaskSuite, tokenizer: Any, chat: str) -> PromptFormat:
    """What stands around the suite's rows: its own messages if it has some, else the tokenizer's template.

    The suite is told, so that its rows leave room for it.
    """
    own = getattr(suite, "frame", None)
    form: PromptFormat = own(tokenizer, chat) if own is not None else PromptFormat.of(tokenizer, chat)
    if hasattr(suite, "form"):
        suite.form = form
    return form


class Prompts:
    """Prompts of rows.  The ids of the last context are kept: neighbours that share it are tokenized once.

    The answer prefix follows the template's end, as the beginning of the model's own turn.  The context and what
    follows it are tokenized apart, so that every method and both question positions get the same ids.
    """

    def __init__(self, form: PromptFormat) -> None:
        self.form = form
        self._text: str | None = None
        self._context = np.zeros(0, dtype=np.int64)

    def of(self, row: Row) -> Prompt:
        text = row.question + self.form.tail + row.answer_prefix
        return Prompt(self._context_ids(row), _ids(self.form.tokenizer, text), text)

    def _context_ids(self, row: Row) -> NDArray[np.int64]:
        head = np.asarray(self.form.head, dtype=np.int64)
        if row.context_ids is not None:
            return np.concatenate([head, np.asarray(row.context_ids, dtype=np.int64)])
        if row.context != self._text:
            self._context = np.concatenate([head, _ids(self.form.tokenizer, row.context)])
            self._text = row.context
        return self._context


def _ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return np.asarray(found, dtype=np.int64)
