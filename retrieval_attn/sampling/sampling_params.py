"""Ranges of the options that choose a token, shared by `Sampling` and `SamplingParams`. Imports no torch."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from retrieval_attn.errors import ConfigError

__all__ = [
    "LEAST_TEMPERATURE",
    "MAX_LOGPROBS",
    "PENALTY_RANGE",
    "REPETITION_RANGE",
    "Bias",
    "ChoiceOptions",
    "GivenBias",
    "SamplingParams",
    "bias_pairs",
    "check",
]

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


class ChoiceOptions(Protocol):
    """The options that `Sampling` and `SamplingParams` have in common."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...


@dataclass(frozen=True)
class SamplingParams:
    """How one row chooses its tokens.

    temperature: 0, or less than 1e-5, takes the likeliest token (greedy), and so does top_p=0; top_k, top_p and min_p
    are without effect then. top_k: 0 keeps every token. top_p: [0, 1], 1 keeps every token. min_p: [0, 1], share of the
    likeliest token's probability below which a token is left out; 0 keeps every token. seed: 64 bits. logprobs: how
    many of the likeliest tokens are returned with their log-probabilities, besides the chosen one, 0 to 20; 0: none,
    the chosen one's neither.
    repetition_penalty: [0.01, 100], of the tokens of prompt and answer; presence_penalty, frequency_penalty: [-2, 2],
    of the answer's tokens, see `penalized`. logit_bias: a mapping from token ids to [-100, 100], added to their scores;
    stored as sorted pairs. These act first, then filters in the order temperature, top-k, top-p, min-p, as in
    transformers. Tokens with equal scores stay or go together. Raises ConfigError for a value of the wrong type or out
    of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: GivenBias = ()

    def __post_init__(self) -> None:
        check(self)
        if not is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k must be an integer >= 0 (0 keeps every token), got {self.top_k!r}.")
        if not is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer of 64 bits, got {self.seed!r}.")
        if not is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}.")
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
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


def check(options: ChoiceOptions) -> None:
    """Raise ConfigError for an option of the wrong type or out of its range."""
    if not is_number(options.temperature) or not 0 <= options.temperature < math.inf:
        raise ConfigError(f"temperature must be a number >= 0 (0 is greedy), got {options.temperature!r}.")
    for name, limits in _RANGES.items():
        _require(name, getattr(options, name), *limits)


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


def _require(name: str, value: Any, low: float, high: float, note: str) -> None:
    if not is_number(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}; {note}.")
