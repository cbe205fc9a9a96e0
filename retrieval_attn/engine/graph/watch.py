"""Whether a model is still as it was when it was looked at closely, told in a fraction of the time."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.engine.graph.decoder import model_signature
from retrieval_attn.engine.graph.support import model_refusal
from retrieval_attn.model.adapters import adapter_state
from retrieval_attn.model.quantization import plain_tensors

_TABLES = "_modules", "_forward_hooks", "_forward_pre_hooks"


class ModelWatch:
    """What decides whether a model's step can be recorded, and what a graph of it depends on, as addresses and ids.

    Modules, hooks, weights and where they lie, adapters, and attributes that somebody added. Everything that is looked
    at stays alive, so that ids stay taken.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        modules = list(model.modules())
        self._attributes = [vars(module) for module in modules]
        self._tables = [own[name] for own in self._attributes for name in _TABLES]
        self._parameters = [own["_parameters"] for own in self._attributes]
        weights = [one for one in self._weights() if one is not None]
        self._plain = [one for one in weights if type(one) in (Tensor, torch.nn.Parameter)]
        self._composed = [one for one in weights if type(one) not in (Tensor, torch.nn.Parameter)]
        self._adapted = bool(adapter_state(model))  # adapters come as modules
        self._kept = [*chain.from_iterable(map(dict.values, self._tables)), *weights]
        self._seen = self._look()

    def unchanged(self) -> bool:
        """Whether it is."""
        return self._look() == self._seen

    def _weights(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._parameters)))

    def _look(self) -> tuple[Any, ...]:
        composed = [one.data_ptr() for one in plain_tensors(self._composed)]
        return (
            [*map(id, chain.from_iterable(map(dict.values, self._tables)))],
            [*map(len, self._tables)],
            [*map(len, self._attributes)],
            [*map(id, self._weights())],
            [*map(Tensor.data_ptr, self._plain), *composed],
            adapter_state(self._model) if self._adapted else (),
        )


class Look(NamedTuple):
    """What was found: why steps of the model are not recorded, or None, and what graphs of it depend on."""

    reason: str | None
    signature: tuple[Any, ...]


class KnownModel:
    """A model that is looked at often, and closely only where it changed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._watch: ModelWatch | None = None
        self._look = Look(None, ())

    def look(self) -> Look:
        """As it is now."""
        if self._watch is None or not self._watch.unchanged():
            self._watch = ModelWatch(self._model)
            self._look = Look(model_refusal(self._model), model_signature(self._model))
        return self._look
