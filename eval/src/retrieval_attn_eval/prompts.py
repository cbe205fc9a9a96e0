"""From a row to token ids: what stands around a context and a question, tokenized once and never again.

Everything is token ids.  The prompt is head + context + question, with exactly one BOS if the tokenizer uses one,
and special tokens only from the tokenizer's own rules and its chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.suite.suite import TaskSuite

__all__ = ["Prompt", "PromptFormat", "Prompts", "frame"]

_MARK = "CONTEXTGOESHERE"
_PLAIN_QUESTION = "\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Prompt:
    """A context and the question about it: int64 ids each; the whole prompt is one after the other.

    question_text: what question_ids are the tokens of, template included.
    """

    context_ids: NDArray[np.int64]
    question_ids: NDArray[np.int64]
    question_text: str

    @property
    def ids(self) -> NDArray[np.int64]:
        return np.concatenate([self.context_ids, self.question_ids])

    def __len__(self) -> int:
        return len(self.context_ids) + len(self.question_ids)


@dataclass(frozen=True)
class PromptFormat:
    """head: ids before the context (BOS, opening of the user's turn).  tail: text after the question.

    chat: True if a chat template made them.
    """

    head: tuple[int, ...]
    tail: str
    chat: bool
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any, chat: str = "auto") -> PromptFormat:
        """Format of a tokenizer.  chat: "auto" uses the chat template if there is one, "never" does not.

        Raises ConfigError if the template does not keep the user's text in one piece.
        """
        bos = _leading_special(tokenizer)
        if chat == "never" or not getattr(tokenizer, "chat_template", None):
            return cls(tuple(bos), "", False, tokenizer)
        turn = [{"role": "user", "content": _MARK}]
        rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        if rendered.count(_MARK) != 1:
            raise ConfigError(
                f"needed a chat template that shows the user's text once, it shows it {rendered.count(_MARK)} times;"
                " use --chat-template never"
            )
        before, after = rendered.split(_MARK)
        head = list(tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"])
        if bos and head[: len(bos)] != bos:  # this template leaves BOS to the tokenizer
            head = bos + head
        return cls(tuple(head), after, True, tokenizer)

    def asked(self, question: str) -> str:
        """The question as it follows a context, up to the template's end."""
        return f"\n\n{question}" if self.chat else _PLAIN_QUESTION.format(question=question)


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


def _leading_special(tokenizer: Any) -> list[int]:
    """Ids the tokenizer puts before a text on its own (BOS or nothing); what it puts behind is not for prompts."""
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    dressed = list(tokenizer("a", verbose=False)["input_ids"])
    for lead in range(len(dressed) - len(bare) + 1):
        if dressed[lead : lead + len(bare)] == bare:
            return dressed[:lead]
    return []


def _ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return np.asarray(found, dtype=np.int64)
