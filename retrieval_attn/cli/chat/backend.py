"""Talk: what a chat needs of whom it talks to, wherever the model runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol

__all__ = ["Message", "ChatBackend"]

Message = dict[str, str]
"""{"role": "user" or "assistant", "content": text}"""


class ChatBackend(Protocol):
    """One conversation at a time, after a document or not. Methods raise RetrievalAttentionError, and change nothing
    then. Texts that they return are lines for the user.
    """

    @property
    def about(self) -> str:
        """Who answers, and what it has read."""

    def answer(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer. Closed before its end, it stops, and what came of the answer stays."""

    def forget(self, turns: int | None) -> int:
        """Drop the last questions with their answers, all of them for None. Returns how many."""

    def fork(self, name: str) -> tuple[Any, str]:
        """A mark of where the conversation is now, for `go_back`, and what became of it. name: the user's for it."""

    def go_back(self, mark: Any) -> str:
        """Go on from there."""

    def save(self, name: str) -> str:
        """Keep the conversation, with what it is about, on the disk of whom it is with."""

    def load(self, name: str) -> str:
        """Go on from what is saved under a name."""

    def stats(self) -> str:
        """What the conversation holds, and what the last answer cost."""

    def close(self) -> None:
        """Nothing is asked any more."""
