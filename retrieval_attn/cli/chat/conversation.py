"""Conversation: what was said so far, wherever the model runs."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval_attn.cli.chat.backend import Message

__all__ = ["Conversation"]


class Conversation:
    """Questions with their answers: the part of a `Talk` that needs no model."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._messages: list[Message] = []

    def forget(self, turns: int | None) -> int:
        """See `Talk`."""
        before = len(self._messages)
        self._messages = [] if turns is None else self._messages[: max(0, before - 2 * turns)]
        return (before - len(self._messages)) // 2

    def _asked(self, question: str) -> list[Message]:
        """All that was said, and a question."""
        return [*self._messages, {"role": "user", "content": question}]

    def _keep(self, asked: Sequence[Message], pieces: Sequence[str]) -> None:
        """What came of an answer to the last of them; what was asked without an answer is as if it were not."""
        if text := "".join(pieces).strip():
            self._messages = [*asked, {"role": "assistant", "content": text}]

    def _turns(self) -> str:
        turns = len(self._messages) // 2
        return f"{turns} question{'' if turns == 1 else 's'} answered"
