"""ChatPrompt: token ids of a conversation, a prefix of the next turn's ids."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from retrieval_attn.cli.chat.backend import Message
from retrieval_attn.prompt.encode import Escapes, stand_in
from retrieval_attn.prompt.render import cut_at, render
from retrieval_attn.template import PromptTemplate

__all__ = ["ChatPrompt", "agreeing"]


class ChatPrompt:
    """Render conversations with the tokenizer's chat template, or as "Question: ... Answer:" without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InputDataError if the chat template cannot be rendered."""
        self._template = PromptTemplate.of(tokenizer)

    def asked(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Return ids up to the start of the answer to the last message.

        behind: the ids follow a context, which is the start of the first message. Otherwise they are the whole prompt.
        """
        escapes = self._template.encoder.escapes(messages)
        return self._ids(self._text(escapes.apply(messages), behind=behind), escapes, behind=behind)

    def kept(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Return ids up to the user's next question, the same for any question."""
        escapes, next_words = self._template.encoder.escapes(messages), stand_in(messages)
        said = [*escapes.apply(messages), {"role": "user", "content": next_words}]
        before, _ = cut_at(self._text(said, behind=behind), next_words)
        if not self._template.tokenizer.chat_template:
            before = before.removesuffix(self._template.middle)  # part of the next question
        return self._ids(before, escapes, behind=behind)

    def _text(self, messages: Sequence[Message], *, behind: bool) -> str:
        tokenizer = self._template.tokenizer
        if not behind and tokenizer.chat_template:
            return render(tokenizer, messages)
        text = self._template.question_text(messages)
        return text if behind else text.lstrip()

    def _ids(self, text: str, escapes: Escapes, *, behind: bool) -> list[int]:
        return (self._template.plain_ids if behind else self._template.start_ids)(text, escapes)


def agreeing(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return next(
        (place for place, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other),
        min(len(ids), len(others)),
    )
