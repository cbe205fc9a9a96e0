"""ChatPrompt: token ids of a conversation, which grow at their end from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from retrieval_attn.cli.chat.backend import Message
from retrieval_attn.prompt.encode import Escapes, stand_in
from retrieval_attn.prompt.render import cut_at, render
from retrieval_attn.template import PromptTemplate

__all__ = ["ChatPrompt", "agreeing"]


class ChatPrompt:
    """Conversations as the tokenizer's chat template puts them; "Question: ... Answer:" without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InputDataError for a chat template that does not work."""
        self._template = PromptTemplate.of(tokenizer)

    def asked(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Ids up to where the answer to the last message starts. behind: they follow a context, which stands at the
        start of the first message; else they are all there is.
        """
        escapes = self._template.encoder.escapes(messages)
        return self._ids(self._text(escapes.apply(messages), behind=behind), escapes, behind=behind)

    def kept(self, messages: Sequence[Message], *, behind: bool) -> list[int]:
        """Ids up to where the user's next words begin: whatever they are, these come before them."""
        escapes, next_words = self._template.encoder.escapes(messages), stand_in(messages)
        said = [*escapes.apply(messages), {"role": "user", "content": next_words}]
        before, _ = cut_at(self._text(said, behind=behind), next_words)
        if not self._template.tokenizer.chat_template:
            before = before.removesuffix(self._template.middle)  # the next question brings its own
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
    """How many ids the two begin with alike."""
    return next(
        (place for place, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other),
        min(len(ids), len(others)),
    )
