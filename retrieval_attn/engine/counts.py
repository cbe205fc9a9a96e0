"""Counts: what an engine's steps took and what its requests found, since its start. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Counts", "TierTokens"]


class TierTokens(NamedTuple):
    """Tokens of a prompt that were there, by where: in an engine's pages, in memory, or in a store's files."""

    device: int = 0
    memory: int = 0
    disk: int = 0


class Counts:
    """steps, filled: how many there were, and rows in all. seconds: of steps. host: of these, the host searched and
    attended. waiting: these, and those in which no forward and no replay ran. spills: rows whose full window moved
    tokens to the host, in a step each. hits, hit_tokens: requests that found something in a tier, and what. damaged:
    blocks of saved contexts.

    Any thread may read and call `note_damage`; all else belongs to the engine's.
    """

    def __init__(self) -> None:
        self.steps = self.filled = self.spills = self.damaged = 0
        self.seconds = self.host = self.waiting = 0.0
        self.hits, self.hit_tokens = TierTokens(), TierTokens()
        self._lock = threading.Lock()

    def add_step(self, rows: int, spills: int, seconds: float, host: float, device: float) -> None:
        """Count one decode step.

        Args:
            rows: sequences in the step.
            spills: sequences with a full window whose oldest block was evicted.
            seconds: duration of the step.
            host: seconds of it in which the host searched and attended.
            device: seconds of it in forwards and graph replays, `host` included.
        """
        self.steps += 1
        self.filled += rows
        self.spills += spills
        self.seconds += seconds
        self.host += host
        self.waiting += host + max(0.0, seconds - device)

    def found(self, tokens: TierTokens) -> None:
        """A request has its prompt, of which so many tokens were there."""
        self.hits = TierTokens(*_sums(self.hits, [int(count > 0) for count in tokens]))
        self.hit_tokens = TierTokens(*_sums(self.hit_tokens, tokens))

    def note_damage(self, blocks: int) -> None:
        """So many blocks of a saved context do not have their checksums."""
        with self._lock:
            self.damaged += blocks

    @property
    def plain(self) -> dict[str, Any]:
        """Numbers alone; host_seconds is part of waiting_seconds, and that of step_seconds."""
        return {
            "steps": self.steps,
            "step_seconds": self.seconds,
            "host_seconds": self.host,
            "waiting_seconds": self.waiting,
            "spills": self.spills,
            "hits": self.hits._asdict(),
            "hit_tokens": self.hit_tokens._asdict(),
            "damaged_blocks": self.damaged,
        }


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
