"""Recurrent states of captured decode steps: linear-attention and convolution layers advance them in place.

Steps are launched before it is known whether they count. So a replay begins with a copy of all states, by which
launched steps are undone: one, or two if a step is launched before the step in front of it is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.runner.graph.slot import ordinary_tensors

_ALIGNED = 64  # elements; fused kernels load several at once

Key = tuple[str, int]
"""Which state of a layer: the name of transformers' attribute, and the number in it."""
Views = dict[Key, Tensor]


class StateBuffers(NamedTuple):
    """States of all slots, and their copies.

    Attributes:
        current: states of each layer after the last replay, each (slots, ...).
        kept: the same before earlier replays, one entry for each step that can be undone.
        whole: memory of `current` (elements,) and of `kept` (steps, elements) by dtype; empty for some of the slots.
    """

    current: Items[Views]
    kept: Items[Items[Views]]
    whole: dict[torch.dtype, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, like: RetrievalCache, places: int, undo_steps: int) -> StateBuffers:
        """Allocate zeros shaped like the states of a cache. Raises torch.OutOfMemoryError.

        places: number of slots, for one sequence each. undo_steps: launched steps that can be undone.
        """
        sizes: dict[torch.dtype, int] = {}
        layers: list[list[tuple[Key, Tensor, int]]] = []
        for _, layer in keeping_state(like):
            layers.append([])
            for key, state in layer.states():
                begin = sizes.get(state.dtype, 0)
                layers[-1].append((key, state, begin))
                sizes[state.dtype] = begin + -(-places * state[0].numel() // _ALIGNED) * _ALIGNED
        device = next((state.device for layer in layers for _, state, _ in layer), None)
        whole = {
            dtype: (
                torch.zeros(size, dtype=dtype, device=device),
                torch.zeros(undo_steps, size, dtype=dtype, device=device),
            )
            for dtype, size in sizes.items()
        }
        current = {dtype: both[0] for dtype, both in whole.items()}
        kept = [{dtype: both[1][step] for dtype, both in whole.items()} for step in range(undo_steps)]
        views = [[_views(memory, layer, places) for layer in layers] for memory in (current, *kept)]
        return cls(views[0], views[1:], whole)

    def fits(self, like: RetrievalCache) -> bool:
        """Return whether the states of a cache have the shapes of rows of these buffers."""
        return [{key: _row_shape(one) for key, one in layer.items()} for layer in self.current] == [
            {key: _row_shape(one) for key, one in layer.states()} for _, layer in keeping_state(like)
        ]

    def rows(self, start: int, stop: int) -> StateBuffers:
        """Return views of slots [start, stop)."""
        sizes = {len(one) for layer in self.current for one in layer.values()}
        current, *kept = (
            [{key: one[start:stop] for key, one in layer.items()} for layer in layers]
            for layers in (self.current, *self.kept)
        )
        return StateBuffers(current, kept, self.whole if sizes <= {stop - start} else {})


class StepStates:
    """States that the graphs of one batch size advance in place, and the number of steps that count.

    Attributes:
        layers: states of each layer, views of the buffers.
        confirmed: confirmed steps.
    """

    def __init__(self, buffers: StateBuffers, device: torch.device, runtime: Runtime) -> None:
        """buffers: states of the slots of this batch size."""
        self.layers, self.confirmed, self._runtime = buffers.current, 0, runtime
        self._launched = torch.zeros(1, dtype=torch.int64, device=device)
        self._buffers = buffers
        self._current, *self._kept = ([one for layer in layers for one in layer.values()] for layers in (
            buffers.current, *buffers.kept
        ))  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of their copies."""
        return sum(one.nbytes for one in self._current) * (1 + len(self._kept))

    def begin_step(self) -> None:
        """Record: copy the states before the step and count it."""
        if not self._current:
            return
        if len(self._kept) > 1 and self._buffers.whole:
            place = self._launched % len(self._kept)
            for current, kept in self._buffers.whole.values():
                kept.index_copy_(0, place, current[None])
        elif len(self._kept) > 1:
            raise CaptureError("steps of two in flight are captured for all slots of the state buffers")
        else:
            torch._foreach_copy_(self._kept[0], self._current)
        self._launched.add_(1)

    def undo(self, keep: int = 0) -> None:
        """Restore the states before all steps that are not confirmed, except the first `keep`. Waits for the device."""
        if self._steps_ahead(keep):
            count = self.confirmed + keep
            torch._foreach_copy_(self._current, self._kept[count % len(self._kept)])
            self._launched.fill_(count)

    def confirmed_views(self, number: int) -> Views:
        """Return the states of layer `number` of `layers` after the last confirmed step. Waits for the device."""
        if not self._steps_ahead(0):
            return self.layers[number]
        return self._buffers.kept[self.confirmed % len(self._kept)][number]

    def bind(self, like: RetrievalCache) -> list[RecordedState]:
        """Make layers like the state layers of `like` over these buffers."""
        return [
            RecordedState(number, _layer_over(layer, views), views)
            for (number, layer), views in zip(keeping_state(like), self.layers, strict=True)
        ]

    def _steps_ahead(self, keep: int) -> int:
        """Return the number of steps that the device has begun beyond the confirmed ones and `keep` more."""
        if not self._current:
            return 0
        self._runtime.synchronize()
        ahead = int(self._launched) - self.confirmed - keep
        most = len(self._kept) - keep
        assert ahead <= most, f"{ahead} steps are not confirmed, {most} can be undone"
        return max(0, ahead)


class RecordedState(NamedTuple):
    """A layer of the recorded forward that keeps a state. number: of the layer in the model."""

    number: int
    layer: StateLayer
    buffers: Views

    def require_in_place(self) -> None:
        """After a recorded forward: raise CaptureError if the model put other tensors in the buffers' place."""
        replaced = [key for key, buffer in self.buffers.items() if getattr(self.layer, key[0])[key[1]] is not buffer]
        for name, which in replaced:
            getattr(self.layer, name)[which] = self.buffers[name, which]
        if replaced:
            raise CaptureError(
                f"layer {self.number} allocates a new tensor for its {replaced[0][0]} in every step; a graph needs "
                "one address"
            )


class SlotStates:
    """States of one slot. The cache's layers use views of them until `detach`."""

    def __init__(self) -> None:
        self._views: Items[Views] = ()

    def attach(
        self,
        cache: RetrievalCache,
        buffers: StateBuffers,
        places: range,
        confirmed: Callable[[int], Views],
        *,
        moved: bool,
    ) -> None:
        """Copy the states of a cache to a slot.

        Args:
            places: rows of the buffers.
            confirmed: returns the states of a layer, by its number among those with a state, after the last confirmed
                step: views of `places`.
            moved: the slot differs from the last one.
        """
        if moved:
            self._views = buffers.rows(places.start, places.stop).current
        for row, ((_, layer), views) in enumerate(zip(keeping_state(cache), self._views, strict=True)):
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is not view:
                    view.copy_(states[number])
                    states[number] = view
            layer.graph = SlotState(layer, views, row, confirmed)

    @ordinary_tensors
    def detach(self, cache: RetrievalCache) -> None:
        """Give the cache copies of its states."""
        for (_, layer), views in zip(keeping_state(cache), self._views, strict=False):
            layer.graph = None
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is view:
                    states[number] = view.clone()
        self._views = ()


class SlotState(NamedTuple):
    """A layer of a cache in a slot. Implements `StateHook` of `attention/state.py`."""

    layer: StateLayer
    views: Views
    row: int
    confirmed_views: Callable[[int], Views]

    def confirmed(self) -> Views:
        """Return the layer's states after the last confirmed step."""
        held = dict(self.layer.states())
        if not any(state is self.views.get(key) for key, state in held.items()):
            return held
        views = self.confirmed_views(self.row)
        # a layer that was changed elsewhere has tensors of its own
        return {key: views[key] if state is self.views.get(key) else state for key, state in held.items()}


def keeping_state(cache: RetrievalCache) -> list[tuple[int, StateLayer]]:
    """Return the layers with a state, each with its number."""
    return [(number, layer) for number, layer in enumerate(cache.layers) if isinstance(layer, StateLayer)]


def _layer_over(like: StateLayer, views: Views) -> StateLayer:
    """Make a layer like `like` with these states."""
    layer = StateLayer(like.number_of_states)
    plain = {name: value for name, value in vars(like).items() if name not in ("graph", "number_of_states")}
    vars(layer).update({name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()})
    for (name, number), view in views.items():
        getattr(layer, name)[number] = view
    return layer


def _row_shape(state: Tensor) -> tuple[object, ...]:
    return state.shape[1:], state.dtype, state.device


def _views(memory: dict[torch.dtype, Tensor], layer: list[tuple[Key, Tensor, int]], places: int) -> Views:
    """Return the parts of memory (elements,) at which `layer` places states like these, for `places` slots."""
    return {
        key: memory[state.dtype][begin : begin + places * state[0].numel()].view(places, *state.shape[1:])
        for key, state, begin in layer
    }
