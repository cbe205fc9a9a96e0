"""Rotary embeddings whose factors depend on the length of the text (LongRoPE, dynamic NTK), and YaRN of a config.

transformers computes their frequencies again in every forward, from its longest position. Keys of one text must all be
turned with the factors of one length, also if the text is read in several forwards. `counting_as` makes a forward take
the factors of a longer text, and `counted_length` returns the length that the thread's last forward was counted as.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from retrieval_attn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


Factors = tuple[int, ...]
"""Equal for lengths of text that have equal rotary factors."""
MIXED: Factors = (-1,)
"""Of keys that were generated with dynamic NTK beyond its switch: each has the factors of another length."""


@dataclass(frozen=True)
class LengthRope:
    """The rotary embeddings of one model that depend on the length of the text.

    switches: tokens up to which each of them has its first factors. grows: for each, whether every length beyond has
    factors of its own (dynamic NTK), or all have the same (LongRoPE).
    """

    kind: str
    switches: tuple[int, ...]
    grows: tuple[bool, ...]

    def factors(self, length: int) -> Factors:
        """Which factors the keys of a text of `length` tokens have."""
        pairs = zip(self.switches, self.grows, strict=True)
        return tuple(0 if length <= switch else length if grows else 1 for switch, grows in pairs)

    @property
    def each_length(self) -> bool:
        """Whether every length beyond a switch has factors of its own."""
        return any(self.grows)

    def may_change(self, length: int) -> bool:
        """Whether a text of up to `length` tokens may pass a switch."""
        return length > min(self.switches)

    def decodes_on(self, held: Factors | None, length: int) -> bool:
        """Whether one more token may attend to keys with `held` factors, in a text of `length` tokens.

        With dynamic NTK every generated token has other factors, and attends to earlier keys as they are: so does
        transformers with its own cache.
        """
        return self.each_length or held == self.factors(length)

    def after_token(self, held: Factors | None, length: int) -> Factors:
        """Return the factors of keys with `held` factors after one more token, in a text of `length` tokens."""
        found = self.factors(length)
        return found if held == found else MIXED


_ropes: weakref.WeakKeyDictionary[nn.Module, LengthRope | None] = weakref.WeakKeyDictionary()


def length_rope(model: Any) -> LengthRope | None:
    """How the factors of a model's rotary embedding depend on the length of the text; None: they do not.

    Its rotary embeddings obey `counting_as` from then on.
    """
    if model not in _ropes:
        _ropes[model] = found = _rope_of(model.config.get_text_config(decoder=True))
        if found is not None:
            for module in model.modules():
                known = module._forward_pre_hooks.values()
                if hasattr(module, "rope_type") and hasattr(module, "config") and _count not in known:
                    module.register_forward_pre_hook(_count, with_kwargs=True)
                    module.register_forward_hook(_cut, with_kwargs=True)
    return _ropes[model]


def max_positions(text: Any) -> int | None:
    """Tokens that a model has positions for, by its text config; None: any number, as with dynamic NTK."""
    found = _rope_of(text)
    if found is not None and found.each_length:
        return None
    return getattr(text, "max_position_embeddings", None)


class ContextLimit(NamedTuple):
    """Maximum tokens of a text with its answers. reason: why it is less than the model's positions; "" if it is not.
    cure: steps that raise the limit, for the end of an error message.
    """

    tokens: int | None
    reason: str
    cure: str


def limit_context(model: PreTrainedModel, limit: ContextLimit) -> None:
    """Refuse longer texts in caches that are made for the model from now on."""
    setattr(model, _LIMIT, limit)


def context_limit(model: PreTrainedModel) -> ContextLimit:
    """Return the model's limit: its positions, or fewer after `limit_context`."""
    positions = max_positions(model.config.get_text_config(decoder=True))
    given: ContextLimit | None = getattr(model, _LIMIT, None)
    if given is not None and given.tokens is not None and (positions is None or given.tokens < positions):
        return given
    factors = "LLM(..., yarn=FACTOR), --yarn FACTOR, or a config whose rope scaling covers it"
    return ContextLimit(positions, "", f"load the model with more of them: {factors}")


_LIMIT = "_retrieval_attn_context_limit"


def _rope_of(text: Any) -> LengthRope | None:
    found: dict[tuple[int, bool], str] = {}
    for options in _rope_options(text.to_dict()):
        kind = str(options["rope_type"])
        if kind == "dynamic":
            found[int(text.max_position_embeddings), True] = kind
        elif kind == "longrope":
            given = options.get("original_max_position_embeddings")
            given = given or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings
            found[int(given), False] = kind
    if not found:
        return None
    switches, grows = zip(*sorted(found), strict=True)
    return LengthRope(" and ".join(sorted(set(found.values()))), switches, grows)


def _rope_options(options: Any) -> list[dict[str, Any]]:
    """The dictionaries of a config that name a kind of rotary embedding."""
    if not isinstance(options, dict):
        return []
    own = [options] if "rope_type" in options else []
    return own + [found for value in options.values() for found in _rope_options(value)]


# -- forwards ---------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """asked: length that forwards count as at least. counted: that the last one counted as. added: positions put to
    those of the call under way.
    """

    asked = counted = added = 0


_thread = _Thread()


@contextmanager
def counting_as(length: int) -> Iterator[None]:
    """The thread's forwards have the factors of a text of at least `length` tokens; 0: of their own positions alone."""
    before, _thread.asked = _thread.asked, length
    try:
        yield
    finally:
        _thread.asked = before


@contextmanager
def uncounted() -> Iterator[None]:
    """Calls of a rotary embedding that belong to no forward: `counted_length` stays what it was."""
    before = _thread.counted
    try:
        with counting_as(0):
            yield
    finally:
        _thread.counted = before


def counted_length() -> int:
    """Tokens of the text whose factors the thread's last forward had; 0: none of a model with a `LengthRope` ran."""
    return _thread.counted


def _count(rotary: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a rotary embedding: add the last position of a longer text, by which transformers chooses the factors."""
    place: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    _forget_growth(rotary)
    longest = int(place.max()) + 1
    _thread.counted = length = max(longest, _thread.asked)
    _thread.added = int(length > longest)
    if not _thread.added:
        return None
    import torch

    place = torch.cat([place, place.new_full((*place.shape[:-1], 1), length - 1)], dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": place}
    return (args[0], place, *args[2:]), kwargs


def _cut(rotary: Any, args: Any, kwargs: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """After it: without the tables of that position."""
    if not _thread.added:
        return None
    cos, sin = tables
    return cos[..., :-1, :], sin[..., :-1, :]


def _forget_growth(rotary: Any) -> None:
    """Dynamic NTK of transformers keeps the factors of the longest text so far: an answer would depend on others."""
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    for name, kind in kinds.items():
        if kind is not None and "dynamic" in kind:
            prefix = f"{name}_" if name else ""
            original = getattr(rotary, f"{prefix}original_inv_freq")
            rotary.register_buffer(
                f"{prefix}inv_freq", original.to(getattr(rotary, f"{prefix}inv_freq").device), persistent=False
            )
            if hasattr(rotary, f"{prefix}max_seq_len_cached"):
                setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def with_yarn(config: Any, factor: float | None) -> Any:
    """Return a copy of a config with `factor` times as many positions by YaRN; the config itself for None.

    Raises ConfigError for a factor below 1, and unless positions are plain rotary embeddings of one kind.
    """
    if factor is None:
        return config
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise ConfigError(f"yarn must be a factor of 1 or more, such as 4, got {factor!r}.")
    found = copy.deepcopy(config)
    text = found.get_text_config(decoder=True)
    rope, known = getattr(text, "rope_parameters", None), getattr(text, "max_position_embeddings", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind != "default" or known is None:
        raise ConfigError(
            f"yarn={factor:g} was given, but YaRN stretches plain rotary embeddings (rope_type 'default'), and the "
            f"positions of this {text.model_type} are {'not of one kind' if kind is None else f'of type {kind!r}'}. "
            "Leave it out."
        )
    text.rope_parameters = {
        **dict(rope or {}),
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": known,
    }
    text.max_position_embeddings = int(known * factor)
    return found
