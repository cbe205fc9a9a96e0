"""Options that choose tokens: `SamplingParams` of a row, `Sampling` of an answer. Imports no torch."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from retrieval_attn.config import FullAttention, require_full_attention
from retrieval_attn.errors import ConfigError

LEAST_TEMPERATURE = 1e-5
"""A lower temperature counts as 0: scores divided by it could exceed the range of float32."""
REPETITION_RANGE = (0.01, 100.0)
PENALTY_RANGE = (-2.0, 2.0)
BIAS_LIMIT = 100.0
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 20
_RANGES = {
    "top_p": (0.0, 1.0, "1 keeps every token, 0 the likeliest alone"),
    "min_p": (0.0, 1.0, "0 keeps every token"),
    "repetition_penalty": (*REPETITION_RANGE, "1 changes nothing"),
    "presence_penalty": (*PENALTY_RANGE, "0 changes nothing"),
    "frequency_penalty": (*PENALTY_RANGE, "0 changes nothing"),
}
"""Least and greatest value of an option, and a note about its neutral value."""

Bias = tuple[tuple[int, float], ...]
GivenBias = Mapping[int, float] | Mapping[str, float] | Bias
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class ChoiceOptions:
    """Options that choose tokens, of `SamplingParams` and `Sampling`.

    temperature: 0, or less than 1e-5, selects the likeliest token (greedy), and so does top_p=0; top_k, top_p and min_p
    have no effect then. top_k: 0 keeps every token. top_p: [0, 1], 1 keeps every token. min_p: [0, 1], share of the
    likeliest token's probability below which a token is excluded; 0 keeps every token. repetition_penalty: [0.01, 100],
    of tokens of prompt and answer; presence_penalty, frequency_penalty: [-2, 2], of the answer's tokens, see
    `penalized`. logit_bias: a mapping from token ids to [-100, 100], added to their scores; stored as sorted pairs.
    Penalties and bias act first, on greedy rows too, then filters in the order temperature, top-k, top-p, min-p, as in
    transformers. Tokens with equal scores stay or go together. Raises ConfigError for a value of the wrong type or out
    of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: GivenBias = ()

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a number >= 0 (0 is greedy), got {self.temperature!r}.")
        for name, limits in _RANGES.items():
            _require(name, getattr(self, name), *limits)
        if not is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k must be an integer >= 0 (0 keeps every token), got {self.top_k!r}.")
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is selected."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def biases(self) -> Bias:
        """`logit_bias` as pairs of token id and bias, sorted by id."""
        return self.logit_bias  # type: ignore[return-value]  # since it was checked

    @property
    def adjusts(self) -> bool:
        """Whether a penalty or a bias changes scores; see `sampler.py`."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias)


@dataclass(frozen=True)
class SamplingParams(ChoiceOptions):
    """How one row of a batch chooses its tokens.

    seed: 64 bits. logprobs: number of likeliest tokens returned with their log-probabilities, in addition to the chosen
    one's, 0 to 20; 0: none, not even the chosen one's.
    """

    seed: int = 0
    logprobs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_seed(self.seed)
        if not is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}.")


@dataclass(frozen=True)
class Sampling(ChoiceOptions):
    """How the tokens of an answer are chosen, and when it ends. The options are the server's; give them by keyword.

    The defaults are neutral: greedy, without penalties. The sampling values of the model's generation config are not
    used; `retrieval_attn.server` uses them. max_new_tokens: most tokens of the answer. seed: the same seed gives a
    question the same answer, alone and in any batch; None: one for each answer from torch's global generator. stop:
    strings that end an answer when they appear in it. min_tokens: tokens before which neither an end token nor a stop
    string ends the answer. ignore_eos: no end token ends it. full_attention: of this answer, see
    `Config.full_attention`; None: as the context's options say.
    """

    max_new_tokens: int = 128
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    full_attention: FullAttention | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be an integer >= 1, got {self.max_new_tokens!r}.")
        if self.seed is not None:
            _require_seed(self.seed)
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings, got the string {self.stop!r}; write ({self.stop!r},).")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(f"stop must be a tuple of non-empty strings, got {self.stop!r}; write () for none.")
        if not all(map(is_encodable, self.stop)):
            raise ConfigError(f"stop must have valid Unicode, got a lone surrogate in {self.stop!r}.")
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_tokens must be an integer in [0, max_new_tokens={self.max_new_tokens}], got {self.min_tokens!r}."
            )
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        if self.full_attention is not None:
            require_full_attention(self.full_attention)
        object.__setattr__(self, "stop", tuple(self.stop))

    @classmethod
    def of(cls, sampling: Sampling | None, options: Mapping[str, Any]) -> Sampling:
        """Return `sampling`, or one of keyword `options`. Raises ConfigError for both at once and unknown names."""
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

    def params(self, seed: int) -> SamplingParams:
        """Return the parameters of a row with this seed."""
        return SamplingParams(**{one.name: getattr(self, one.name) for one in fields(ChoiceOptions)}, seed=seed)


def bias_pairs(given: object) -> Bias:
    """Return `logit_bias` as pairs of token id and bias, sorted by id.

    given: a mapping from token ids, integers or their decimal strings, to numbers in [-100, 100], such pairs, or None.
    Raises ConfigError for anything else, and for an id that is given twice.
    """
    items: Iterable[Any] = given.items() if isinstance(given, Mapping) else given if isinstance(given, Iterable) else ()
    if given is not None and (not isinstance(given, Mapping | tuple | list)):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {given!r}.")
    found: dict[int, float] = {}
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(f"logit_bias must have pairs of a token id and a number, got {item!r}.")
        key, value = item
        token = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        if not is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
            raise ConfigError(f"logit_bias has the key {key!r}; keys are token ids, such as 42 or '42'.")
        if token in found:
            raise ConfigError(f"logit_bias has the token {token} twice; give one bias for each token.")
        _require(f"the logit_bias of token {token}", value, -BIAS_LIMIT, BIAS_LIMIT, "0 changes nothing")
        found[token] = float(value)
    return tuple(sorted(found.items()))


def is_encodable(text: str) -> bool:
    """Return whether `text` is valid Unicode, without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_int(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is a real number and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _require_seed(seed: object) -> None:
    if not is_int(seed) or not -(2**63) <= seed < 2**64:  # type: ignore[operator]  # an integer
        raise ConfigError(f"seed must be an integer of 64 bits, got {seed!r}.")


def _require(name: str, value: Any, low: float, high: float, note: str) -> None:
    if not is_number(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}; {note}.")
