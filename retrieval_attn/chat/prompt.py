"""ChatPrompt: token ids of a conversation, which grow at their end from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from retrieval_attn.chat.talk import Message
from retrieval_attn.template import PromptTemplate, rendered

__all__ = ["ChatPrompt", "agreeing"]

NEXT_WORDS = "NEXT-WORDS-GO-HERE"
"""Stands for what the user will say, to learn where that begins."""


class ChatPrompt:
    """Conversations as the tokenizer's chat template puts them; "Question: ... Answer:" without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InputDataError for a chat template that does not work."""
        self._template = PromptTemplate.of(tokenizer)

    def asked(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Ids up to where the answer to the last message starts. behind: they follow a context, which stands at the
        start of the first message; else they are all there is.
        """
        text = self._text(messages, behind=behind)
        return self._ids(text, behind=behind)

    def kept(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Ids up to where the user's next words begin: whatever they are, these come before them."""
        text = self._text([*messages, {"role": "user", "content": NEXT_WORDS}], behind=behind)
        before = text.partition(NEXT_WORDS)[0]
        if not self._template.tokenizer.chat_template:
            before = before.removesuffix(self._template.middle)  # the next question brings its own
        return self._ids(before, behind=behind)

    def _text(self, messages: Sequence[Message], *, behind: bool) -> str:
        tokenizer = self._template.tokenizer
        if not behind and tokenizer.chat_template:
            return rendered(tokenizer, list(messages))
        text = self._template.question_text(messages)
        return text if behind else text.lstrip()

    def _ids(self, text: str, *, behind: bool) -> list[int]:
        template = self._template
        if behind or template.tokenizer.chat_template:  # a chat template writes the special tokens of a start itself
            return template.plain_ids(text)
        return template.context_ids(text)


def agreeing(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids the two begin with alike."""
    return next(
        (place for place, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other),
        min(len(ids), len(others)),
    )
