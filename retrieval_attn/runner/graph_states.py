"""States of the rows of graphs: linear-attention and convolution layers advance them in place, at every replay.

A state is of constant size, so a place of the buffers has room for those of any row: the batch dimension is the place.
A replay begins with a copy of the states of all its places. A batch has one step under way, so that one copy is enough
to undo it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.runner.graph.decoder import keeping_state
from retrieval_attn.runner.graph.memory import ordinary_tensors
from retrieval_attn.runner.graph.states import GraphState, Views

__all__ = ["BucketStates", "RowStates", "StateBuffers"]


class StateBuffers(NamedTuple):
    """States of all places, layer by layer: each (places, ...), of one row otherwise.

    current: as the last replay left them. kept: as it found them.
    """

    current: Items[Views]
    kept: Items[Views]

    @classmethod
    def of(cls, like: RetrievalCache, places: int) -> StateBuffers:
        """Zeros for states as those of a cache of one sequence. Raises torch.OutOfMemoryError."""
        layers = [dict(layer.states()) for _, layer in keeping_state(like)]
        current, kept = (
            [{key: state.new_zeros(places, *state.shape[1:]) for key, state in one.items()} for one in layers]
            for _ in range(2)
        )
        return cls(current, kept)

    def rows(self, start: int, stop: int) -> StateBuffers:
        """Views of the states at places [start, stop)."""
        current, kept = (
            [{key: buffer[start:stop] for key, buffer in one.items()} for one in both]
            for both in (self.current, self.kept)
        )
        return StateBuffers(current, kept)


class BucketStates:
    """The states that a bucket's graphs advance. Implements `StepStates` of `runner/graph/states.py`.

    layers: for each layer its states, views of the buffers. confirmed: steps that count. What a step that does not
    count changed is undone before anybody else looks at the states.
    """

    def __init__(self, buffers: StateBuffers, device: torch.device, runtime: Runtime) -> None:
        """buffers: at the bucket's places."""
        self.layers, self.confirmed, self._runtime = buffers.current, 0, runtime
        self._launched = torch.zeros(1, dtype=torch.int64, device=device)
        self._current, self._kept = ([one for layer in both for one in layer.values()] for both in buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of their copy."""
        return sum(one.numel() * one.element_size() for one in (*self._current, *self._kept))

    def begin_step(self) -> None:
        """Record: keep the states as they are before this step, and count it."""
        if self._current:
            torch._foreach_copy_(self._kept, self._current)
            self._launched.add_(1)

    def undo(self, keep: int = 0) -> None:
        """Be as before the step that is not confirmed, if there is one. keep: 0. Waits for the device."""
        assert keep == 0, "a batch has one step under way"
        if self._is_ahead():
            torch._foreach_copy_(self._current, self._kept)
            self._launched.fill_(self.confirmed)

    def confirmed_views(self, number: int) -> Views:
        """States of layer `number` as the last confirmed step left them: `undo` comes before anybody asks."""
        return self.layers[number]

    def bind(self, like: RetrievalCache) -> list[GraphState]:
        """Layers as those of `like` that keep a state, over these buffers."""
        return [
            GraphState(self, (number, row), _layer_over(layer, self.layers[row]))
            for row, (number, layer) in enumerate(keeping_state(like))
        ]

    def _is_ahead(self) -> bool:
        if not self._current:
            return False
        self._runtime.synchronize()
        ahead = int(self._launched) - self.confirmed
        assert 0 <= ahead <= 1, f"{ahead} steps of a batch are not confirmed"
        return ahead == 1


class RowStates:
    """The states of one row, which lie at its place. The cache's layers have views of it until `leave`."""

    def __init__(self) -> None:
        self._views: Items[Views] = ()

    def attach(self, cache: RetrievalCache, buffers: StateBuffers, place: int, *, moved: bool) -> None:
        """Have all states at this place. moved: it is not the one of before."""
        if moved:
            self._views = buffers.rows(place, place + 1).current
        for (_, layer), views in zip(keeping_state(cache), self._views, strict=True):
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is not view:
                    view.copy_(states[number])
                    states[number] = view

    @ordinary_tensors
    def leave(self, cache: RetrievalCache) -> None:
        """Let the cache go, with states of its own."""
        for (_, layer), views in zip(keeping_state(cache), self._views, strict=False):
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is view:
                    states[number] = view.clone()
        self._views = ()


def _layer_over(like: StateLayer, views: Views) -> StateLayer:
    """A layer as `like`, whose states are these."""
    layer = StateLayer(like.number_of_states)
    plain = {name: value for name, value in vars(like).items() if name not in ("graph", "number_of_states")}
    vars(layer).update({name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()})
    for (name, number), view in views.items():
        getattr(layer, name)[number] = view
    return layer
