"""A job: one request as the scheduler sees it, numbers of tokens and whose it is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from retrieval_attn.errors import ConfigError

__all__ = ["PRIORITIES", "RequestNeeds", "Priority", "State"]

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")


class State(StrEnum):
    """Where a job is: waiting -> reading -> ready -> decoding <-> parked -> gone; from each of them it may be gone.

    waiting: holds nothing. reading: its prompt is read between steps; host bytes are reserved. ready: read, without a
    slot. decoding: has a slot, and gets a token in every step. parked: read, gave its slot to another job. gone: it
    holds nothing and is forgotten; so is a job that was never submitted.
    """

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    DECODING = "decoding"
    PREEMPTED = "parked"
    GONE = "gone"


_BELOW_PROMPT = ("cached_tokens", "opened_tokens", "known_tokens")


@dataclass(frozen=True)
class RequestNeeds:
    """What one request needs.

    prompt_tokens: all of the prompt, at least 1. max_tokens: most tokens to generate, at least 1. cached_tokens: of the
    prompt, from its start, that the tree holds: at most prompt_tokens - 1, for the last token is the first step's
    input. opened_tokens: of a saved context that the prompt begins with: they take memory, and no time to read.
    known_tokens: that the tree has now and may have given up by the time of reading: they decide whose turn it is, and
    reserve nothing. owner: with whom the engine's time is shared evenly. Raises ConfigError for anything else.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    opened_tokens: int = 0
    known_tokens: int = 0
    owner: str = ""
    priority: Priority = "interactive"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_tokens", *_BELOW_PROMPT):
            value, least = getattr(self, name), 0 if name in _BELOW_PROMPT else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} of job {self.id!r} must be an integer >= {least}, got {value!r}.")
        for name in _BELOW_PROMPT:
            if (value := getattr(self, name)) >= self.prompt_tokens:
                raise ConfigError(
                    f"{name} of job {self.id!r} must be below its {self.prompt_tokens:,} prompt_tokens, got "
                    f"{value:,}: the last token of a prompt is computed in any case."
                )
        if self.priority not in PRIORITIES:
            raise ConfigError(f"priority must be one of {', '.join(PRIORITIES)}; got {self.priority!r}.")

    @property
    def unread_tokens(self) -> int:
        """Tokens to read before the first step: what is not there, known or opened, nor the last, the step's input."""
        return self.prompt_tokens - max(self.cached_tokens, self.opened_tokens, self.known_tokens) - 1

    @property
    def is_there(self) -> bool:
        """Whether nothing is to be read, whatever the tree gives up."""
        return max(self.cached_tokens, self.opened_tokens) == self.prompt_tokens - 1

    @property
    def new_tokens(self) -> int:
        """Most tokens whose keys and values the job adds; cached ones belong to the tree and are not counted twice."""
        return self.prompt_tokens - self.cached_tokens + self.max_tokens
