"""What a question returns: the text, its tokens and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from retrieval_attn.errors import ConfigError
from retrieval_attn.sampling.sampling_params import (
    LEAST_TEMPERATURE,
    GivenBias,
    bias_pairs,
    check,
    is_encodable,
    is_int,
)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen, and when it ends. The options are the server's.

    What is not given is neutral: greedy, without penalties. The sampling values of the model's generation config are
    not used; `retrieval_attn.server` uses them. max_new_tokens: most tokens of the answer. temperature: 0, or less than
    1e-5, is greedy, and so is top_p=0. top_p: [0, 1]. top_k: at least 1, or None for every token. min_p: [0, 1], share
    of the likeliest token's probability below which a token is left out. These four apply to sampling only. seed: None
    leaves torch's global generator. stop: strings that end an answer when they appear in it.
    repetition_penalty: [0.01, 100], of tokens of prompt and answer. presence_penalty, frequency_penalty: [-2, 2], of
    tokens of the answer. logit_bias: a mapping from token ids to [-100, 100]. They change scores before a temperature
    does, of greedy answers too. min_tokens: tokens before which neither an end token nor a stop string ends the answer.
    ignore_eos: no end token ends it. Raises ConfigError for a value of the wrong type or out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: GivenBias = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check(self)
        if not is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer >= 1, got {self.max_new_tokens!r}.")
        if self.top_k is not None and (not is_int(self.top_k) or self.top_k < 1):
            raise ConfigError(f"sampling top_k must be an integer >= 1 or None, got {self.top_k!r}.")
        if self.seed is not None and (not is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed must be an integer of 64 bits, or None for no seed, got {self.seed!r}.")
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got the string {self.stop!r}; write ({self.stop!r},).")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(
                f"stop must be a tuple of non-empty strings, got {self.stop!r}; write () for no stop strings."
            )
        if not all(map(is_encodable, self.stop)):
            raise ConfigError(f"stop must have valid Unicode, got a lone surrogate in {self.stop!r}.")
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_tokens must be an integer in [0, max_new_tokens={self.max_new_tokens}], got {self.min_tokens!r}."
            )
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0

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


@dataclass(frozen=True)
class HeadShare:
    """A query head of a layer, and its share of something, 0 .. 1."""

    layer: int
    head: int
    share: float


@dataclass(frozen=True)
class Stats:
    """Cost of one answer, summed over layers. Seconds are wall clock.

    context_tokens: tokens the question could attend to. prefill_seconds: reading the question.
    keys_scanned, host_bytes_read, host_seconds: work of the host's search and attention; search_seconds and
    attend_seconds are its two phases.
    host_bytes, device_bytes: memory held by the cache.
    tail_share: share of attention's weight over keys that was estimated from clusters (`Config.tail`), mean over heads,
    layers and tokens, those of a question among them that went through retrieval. Captured steps that ran ahead and
    were discarded count, too. None if nothing is estimated.
    tail_share_most: the head whose mean is largest.
    indexes: kinds of the indexes that were searched, and how many heads have each; {} if all keys were on the device of
    the model. `Context.index_notes` says why a head has its index. all_keys: the dtype that all keys were there in,
    "int8" among them (`Config.full_attention`); None where they were retrieved.
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
    tail_share: float | None = None
    tail_share_most: HeadShare | None = None
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
