"""What stands around a context and a question: a chat template, or a plain question and answer line.

Everything is token ids.  The prompt is head + context + question, with exactly one BOS if the tokenizer uses one,
and special tokens only from the tokenizer's own rules and its chat template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError

__all__ = ["Prompt", "PromptFormat"]

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

    def question_text(self, question: str) -> str:
        """Everything after the context, up to where the answer begins."""
        return (f"\n\n{question}" if self.chat else _PLAIN_QUESTION.format(question=question)) + self.tail

    def question_ids(self, question: str) -> list[int]:
        """Ids of the question's text, tokenized on its own as `Context.ask` does, so that all methods get the same."""
        text = self.question_text(question)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt(self, context: NDArray[np.int64], question: str) -> Prompt:
        """The prompt of a context (ids without the head) and a question."""
        head = np.asarray(self.head, dtype=np.int64)
        ids = np.asarray(self.question_ids(question), dtype=np.int64)
        return Prompt(np.concatenate([head, context]), ids, self.question_text(question))


def _leading_special(tokenizer: Any) -> list[int]:
    """Ids the tokenizer puts before a text on its own (BOS or nothing); what it puts behind is not for prompts."""
    bare = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    dressed = list(tokenizer("a", verbose=False)["input_ids"])
    for lead in range(len(dressed) - len(bare) + 1):
        if dressed[lead : lead + len(bare)] == bare:
            return dressed[:lead]
    return []
