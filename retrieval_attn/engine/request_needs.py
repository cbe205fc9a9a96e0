"""Needs of a request, as numbers of tokens for the scheduler. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from retrieval_attn.errors import ConfigError

__all__ = ["PRIORITIES", "RequestNeeds", "Priority", "State"]

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")


class State(StrEnum):
    """State of a request: waiting -> reading -> ready -> decoding <-> preempted -> gone; every state may end in gone.

    waiting: holds nothing. reading: is prefilled between steps, host bytes are reserved. ready: prefilled, without a
    slot. decoding: has a slot and gets a token in every step. preempted: prefilled, lost its slot to another request.
    gone: holds nothing; also the state of unknown requests.
    """

    WAITING = "waiting"
    READING = "reading"
    READY = "ready"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    GONE = "gone"


_BELOW_PROMPT = ("cached_tokens", "opened_tokens", "known_tokens")


@dataclass(frozen=True)
class RequestNeeds:
    """Needs of one request. Raises ConfigError for values out of range.

    Attributes:
        prompt_tokens: length of the prompt, at least 1.
        max_tokens: largest number of generated tokens, at least 1.
        cached_tokens: leading prompt tokens in the prefix cache, at most prompt_tokens - 1: the last one is computed.
        opened_tokens: tokens of a saved context, which take memory and no prefill.
        known_tokens: tokens that are cached now and may be evicted; they affect the order, and a request is admitted
            without memory for them.
        owner: account of fair queueing.
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
        """Tokens to prefill before the first step, without the prompt's last one, which is the step's input."""
        return self.prompt_tokens - max(self.cached_tokens, self.opened_tokens, self.known_tokens) - 1

    @property
    def is_there(self) -> bool:
        """Whether there is nothing to prefill, whatever is evicted."""
        return max(self.cached_tokens, self.opened_tokens) == self.prompt_tokens - 1

    @property
    def new_tokens(self) -> int:
        """Largest number of tokens whose KV the request adds; cached ones belong to the prefix cache."""
        return self.prompt_tokens - self.cached_tokens + self.max_tokens
