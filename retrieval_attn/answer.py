"""What a question returns: the text, its tokens and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from retrieval_attn.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p and top_k apply to sampling only.

    stop: strings that end an answer when they appear in it. seed: None leaves torch's global generator.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer >= 1, got {self.max_new_tokens!r}.")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be >= 0 (0 is greedy), got {self.temperature!r}.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p!r}; 1 keeps every token.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"sampling top_k must be >= 1 or None, got {self.top_k!r}.")
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got the string {self.stop!r}; write ({self.stop!r},).")


@dataclass(frozen=True)
class Stats:
    """Cost of one answer, summed over layers. Seconds are wall clock.

    context_tokens: tokens the question could attend to. prefill_seconds: reading the question.
    keys_scanned, host_bytes_read, host_seconds: work of the host's search and attention; search_seconds and
    attend_seconds are its two phases.
    host_bytes, device_bytes: memory held by the cache.
    captured_mass: share of exact attention's weight that took part (sinks, window and retrieved keys), mean over the
    heads and tokens measured; None unless `RetrievalCache.measure_mass` asked for it.
    indexes: kinds of the indexes that were searched, and how many heads have each; `Context.index_notes` says why.
    """

    context_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    index_seconds: float
    host_seconds: float
    keys_scanned: int
    host_bytes_read: int
    host_bytes: int
    device_bytes: int
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
    captured_mass: float | None = None
    indexes: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        """Decoding seconds per token after the first, which comes from the prefill; 0.0 for a single token."""
        return self.decode_seconds / (self.new_tokens - 1) if self.new_tokens > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "seconds_per_token": self.seconds_per_token}


@dataclass(frozen=True)
class Answer:
    """One answer. tokens: generated ids without the end-of-sequence token."""

    text: str
    tokens: list[int] = field(repr=False)
    finish_reason: Literal["stop", "length"]
    stats: Stats = field(repr=False)

    def __str__(self) -> str:
        return self.text
