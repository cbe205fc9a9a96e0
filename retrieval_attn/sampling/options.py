"""Ranges of the options that choose a token, shared by `Sampling` and `SamplingParams`. Imports no torch."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from retrieval_attn.errors import ConfigError

__all__ = [
    "LEAST_TEMPERATURE",
    "PENALTY_RANGE",
    "REPETITION_RANGE",
    "Bias",
    "ChoiceOptions",
    "GivenBias",
    "bias_pairs",
    "check",
]

LEAST_TEMPERATURE = 1e-5
"""A lower temperature counts as 0: scores divided by it could exceed the range of float32."""
REPETITION_RANGE = (0.01, 100.0)
PENALTY_RANGE = (-2.0, 2.0)
BIAS_LIMIT = 100.0
MAX_TOKEN_ID = 2**31 - 1
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
