"""ChatBackend: the interface that the chat loop uses, and the message history that backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

Message = dict[str, str]
"""{"role": "user" or "assistant", "content": text}"""


class ChatBackend(ABC):
    """One conversation, with or without a document.

    Methods raise RetrievalAttentionError and then change nothing. Returned texts are lines for the user.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []

    @property
    @abstractmethod
    def about(self) -> str:
        """Describe the model and the document."""

    @abstractmethod
    def answer(self, question: str) -> Generator[str, None, None]:
        """Yield pieces of the answer. Closing the generator stops the answer and keeps its text so far."""

    def forget(self, turns: int | None) -> int:
        """Drop the last questions with their answers, all of them for None. Return their number."""
        before = len(self._messages)
        self._messages = [] if turns is None else self._messages[: max(0, before - 2 * turns)]
        return (before - len(self._messages)) // 2

    @abstractmethod
    def fork(self, name: str) -> tuple[Any, str]:
        """Mark this point of the conversation under the user's name. Return the mark for `go_back`, and a message."""

    @abstractmethod
    def go_back(self, mark: Any) -> str:
        """Continue from a mark."""

    @abstractmethod
    def save(self, name: str) -> str:
        """Save the conversation and its document as a context, on this machine or at the server."""

    @abstractmethod
    def load(self, name: str) -> str:
        """Continue from a saved context."""

    @abstractmethod
    def stats(self) -> str:
        """Describe the size of the conversation and the cost of the last answer."""

    @abstractmethod
    def close(self) -> None:
        """Release the backend's resources."""

    def _asked(self, question: str) -> list[Message]:
        """Return the history and a question."""
        return [*self._messages, {"role": "user", "content": question}]

    def _keep(self, asked: Sequence[Message], pieces: Sequence[str]) -> None:
        """Append a question and its answer to the history; nothing if the answer is empty."""
        if text := "".join(pieces).strip():
            self._messages = [*asked, {"role": "assistant", "content": text}]

    def _turns(self) -> str:
        turns = len(self._messages) // 2
        return f"{turns} question{'' if turns == 1 else 's'} answered"
