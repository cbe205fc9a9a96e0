"""Counts of an engine since its start: decode steps, prefix-cache hits, damaged blocks. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

__all__ = ["Counts", "TierTokens"]


class TierTokens(NamedTuple):
    """Prompt tokens with cached KV, by tier: in an engine's pages, in host memory, or in the files of a store."""

    device: int = 0
    memory: int = 0
    disk: int = 0


@dataclass
class Counts:
    """Counts of one engine.

    Any thread may read them and call `note_damage`, `note_content_hit` and `note_disk_load`; the engine's thread calls
    the rest.

    Attributes:
        steps: decode steps.
        rows: running sequences of all steps together.
        drafted_tokens, accepted_tokens: drafts that steps verified, and those that were the sampled tokens.
        window_evictions: evictions of a full window's oldest block, one per sequence and step.
        damaged_blocks: blocks of saved contexts with a wrong checksum.
        step_seconds: duration of all steps.
        host_seconds: seconds of steps in which the host searched and attended.
        host_stall_seconds: upper bound of the seconds of steps in which the device was idle: `host_seconds`, and the
            time outside forwards and graph replays.
        hits, hit_tokens: requests with a cached prefix, and its tokens, by tier.
        disk_loads, disk_loaded_bytes: opened texts that the prefix cache saved, and their keys and values in files.
        content_hits, content_hit_tokens: requests that continue a saved context without naming it, and the tokens that
            they share with it.
    """

    steps: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    host_stall_seconds: float = 0.0
    window_evictions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    hits: TierTokens = TierTokens()
    hit_tokens: TierTokens = TierTokens()
    damaged_blocks: int = 0
    disk_loads: int = 0
    disk_loaded_bytes: int = 0
    content_hits: int = 0
    content_hit_tokens: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add_step(self, rows: int, window_evictions: int, seconds: float, host: float, device: float) -> None:
        """Count one decode step.

        Args:
            rows: sequences in the step.
            window_evictions: sequences with a full window whose oldest block was evicted.
            seconds: duration of the step.
            host: seconds of it in which the host searched and attended.
            device: seconds of it in forwards and graph replays, `host` included.
        """
        self.steps += 1
        self.rows += rows
        self.window_evictions += window_evictions
        self.step_seconds += seconds
        self.host_seconds += host
        self.host_stall_seconds += host + max(0.0, seconds - device)

    def add_drafts(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one sequence in one step."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def add_request(self, cached: TierTokens) -> None:
        """Count a request whose prompt is prefilled; `cached`: its prompt tokens with cached KV."""
        self.hits = TierTokens(*_sums(self.hits, [int(count > 0) for count in cached]))
        self.hit_tokens = TierTokens(*_sums(self.hit_tokens, cached))

    def note_damage(self, blocks: int) -> None:
        """Count damaged blocks of a saved context."""
        with self._lock:
            self.damaged_blocks += blocks

    def note_content_hit(self, tokens: int) -> None:
        """Count a request whose first `tokens` tokens are those of a saved context that it does not name."""
        with self._lock:
            self.content_hits += 1
            self.content_hit_tokens += tokens

    def note_disk_load(self, nbytes: int) -> None:
        """Count an opened text of `nbytes` that the prefix cache saved."""
        with self._lock:
            self.disk_loads += 1
            self.disk_loaded_bytes += nbytes

    @property
    def plain(self) -> dict[str, Any]:
        """Counts as JSON values. host_seconds are part of host_stall_seconds, and these of step_seconds."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "rows"}
        return {name: one._asdict() if isinstance(one, TierTokens) else one for name, one in values.items()}


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]
