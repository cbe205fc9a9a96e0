"""What a question returns: the text, its tokens and what it cost."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from retrieval_attn.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p and top_k apply to sampling only.

    stop: strings that end an answer when they appear in it. seed: None leaves torch's global generator.
    Raises ConfigError for a value of the wrong type or out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer >= 1, got {self.max_new_tokens!r}.")
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a number >= 0 (0 is greedy), got {self.temperature!r}.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be a number in (0, 1], got {self.top_p!r}; 1 keeps every token.")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise ConfigError(f"sampling top_k must be an integer >= 1 or None, got {self.top_k!r}.")
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed must be an integer of 64 bits, or None for no seed, got {self.seed!r}.")
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got the string {self.stop!r}; write ({self.stop!r},).")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(
                f"stop must be a tuple of non-empty strings, got {self.stop!r}; write () for no stop strings."
            )
        object.__setattr__(self, "stop", tuple(self.stop))

    @classmethod
    def of(cls, sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
        """`sampling`, or one made of keyword `options`. Raises ConfigError for both at once and for unknown names."""
        if sampling is None:
            known = [one.name for one in fields(cls)]
            unknown = sorted(set(options) - set(known))
            if unknown:
                raise ConfigError(f"Unknown sampling option {', '.join(unknown)}; the options are {', '.join(known)}.")
            return cls(**options)
        if not isinstance(sampling, Sampling):
            raise ConfigError(
                f"sampling must be a retrieval_attn.Sampling, got {sampling!r}; give one, or its fields as keywords "
                "such as max_new_tokens=64."
            )
        if options:
            raise ConfigError(
                f"A Sampling and the keyword {', '.join(sorted(options))} were given; put all of them into one or the "
                "other."
            )
        return sampling


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class HeadShare:
    """A query head of a layer, and its share of something, 0 .. 1."""

    layer: int
    head: int
    share: float


@dataclass(frozen=True)
class Audit:
    """Relative error of heads' outputs, sinks and window merged, against exact attention. One above 1 counts as 1.

    samples: heads that were compared, drawn evenly for every eager step's tokens. mean_error: theirs. upper_bound: what
    the mean over all heads of all layers and tokens exceeds with a probability of 5 % at most.
    """

    samples: int
    mean_error: float
    upper_bound: float


@dataclass(frozen=True)
class Stats:
    """Cost of one answer, summed over layers. Seconds are wall clock.

    context_tokens: tokens the question could attend to. prefill_seconds: reading the question.
    keys_scanned, host_bytes_read, host_seconds: work of the host's search and attention; search_seconds and
    attend_seconds are its two phases.
    host_bytes, device_bytes: memory held by the cache.
    captured_mass: share of exact attention's weight that took part (sinks, window and retrieved keys), mean over the
    heads and tokens measured; None unless `cache.instruments.measure_mass` asked for it.
    tail_share: share of attention's weight over keys that was estimated from clusters (`Config.tail`), mean over heads,
    layers and tokens, those of a question among them that went through retrieval; 1 - tail_share estimates
    `captured_mass`. Captured steps that went ahead and were taken back count, too. None where nothing is estimated.
    tail_share_most: the head whose mean is largest.
    audit: error of heads' outputs against exact attention; None unless `cache.instruments.audit` asked for it.
    indexes: kinds of the indexes that were searched, and how many heads have each; {} where all keys were beside the
    model. `Context.index_notes` says why a head has its index. all_keys: the dtype that all keys were there in, "int8"
    among them (`Config.all_keys`); None where they were retrieved.
    decoded: "graph" where every token after the first was a replay of a captured step, "eager", or "eager: " and why
    nothing was captured.
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
    tail_share: float | None = None
    tail_share_most: HeadShare | None = None
    audit: Audit | None = None
    indexes: Mapping[str, int] = field(default_factory=dict)
    all_keys: str | None = None
    decoded: str = "eager"

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
