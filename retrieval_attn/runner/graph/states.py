"""States of a captured decode step: linear-attention and convolution layers advance them in place, at every replay.

Steps are launched before it is known whether they count. So a replay begins with a copy of all states, into one of two
places in turn: the newest two steps can be undone, the one that is awaited and the one that went ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.runner.graph.memory import ordinary_tensors

KEPT_STEPS = 2
"""Steps that can be undone: as many as are launched and not confirmed."""
_ALIGNED = 64  # elements; fused kernels load several at once

Key = tuple[str, int]
"""Which state of a layer: the name of transformers' attribute, and the number in it."""
Views = dict[Key, Tensor]


class StepStates(Protocol):
    """The states that a decoder's graphs advance. confirmed: steps that count."""

    confirmed: int

    @property
    def layers(self) -> Items[Views]:
        """For each layer that keeps a state its states, in the memory that graphs read and write."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of the copies by which steps are undone."""

    def begin_step(self) -> None:
        """Record: keep the states as they are before this step, and count it."""

    def undo(self, keep: int = 0) -> None:
        """Be as before all steps that are not confirmed, but for the first `keep` of them. Waits for the device."""

    def confirmed_views(self, number: int) -> Views:
        """States of layer `number` of `layers` as the last confirmed step left them. Waits for the device."""


class StateMemory:
    """See the module.

    layers: for each layer its states, views of one buffer per dtype. launched: int64 (1,) on the device, steps that
    replays have begun. confirmed: steps that count.
    """

    def __init__(self, layers: Items[StateLayer], device: torch.device, runtime: Runtime) -> None:
        """Buffers for states like those of `layers`, which hold tokens."""
        self.confirmed, self._runtime = 0, runtime
        self.launched = torch.zeros(1, dtype=torch.int64, device=device)
        sizes: dict[torch.dtype, int] = {}
        places: list[list[tuple[Key, Tensor, int]]] = []
        for layer in layers:
            places.append([])
            for key, state in layer.states():
                begin = sizes.get(state.dtype, 0)
                places[-1].append((key, state, begin))
                sizes[state.dtype] = begin + -(-state.numel() // _ALIGNED) * _ALIGNED
        self._current = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self._kept = {dtype: torch.zeros(KEPT_STEPS, size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.layers = [_views(self._current, place) for place in places]
        self._kept_layers = [
            [_views({dtype: kept[step] for dtype, kept in self._kept.items()}, place) for place in places]
            for step in range(KEPT_STEPS)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(one.numel() * one.element_size() for held in (self._current, self._kept) for one in held.values())

    def begin_step(self) -> None:
        """Record: keep the states as they are before this step, and count it."""
        if not self._current:
            return
        place = self.launched % KEPT_STEPS
        for dtype, current in self._current.items():
            self._kept[dtype].index_copy_(0, place, current[None])
        self.launched.add_(1)

    def undo(self, keep: int = 0) -> None:
        """Be as before all steps that are not confirmed, but for the first `keep` of them. Waits for the device."""
        count = self.confirmed + keep
        if not self._ahead(keep):
            return
        for dtype, current in self._current.items():
            current.copy_(self._kept[dtype][count % KEPT_STEPS])
        self.launched.fill_(count)

    def confirmed_views(self, number: int) -> Views:
        """States of layer `number` of `layers` as the last confirmed step left them. Waits for the device."""
        return self._kept_layers[self.confirmed % KEPT_STEPS][number] if self._ahead(0) else self.layers[number]

    def _ahead(self, keep: int) -> int:
        """Steps that the device has begun beyond the confirmed ones and `keep` more."""
        if not self._current:
            return 0
        self._runtime.synchronize()
        ahead = int(self.launched) - self.confirmed - keep
        assert ahead <= KEPT_STEPS - keep, f"{ahead} steps are not confirmed, {KEPT_STEPS} can be undone"
        return max(0, ahead)


class GraphState:
    """A bound cache layer whose states lie in the decoder's buffers. Implements `StateHook` of `attention/state.py`."""

    def __init__(self, memory: StepStates, number: int, row: int, layer: StateLayer) -> None:
        """number: of the layer in the model. row: its number in `memory.layers`."""
        self._memory, self.layer = memory, layer
        self._number, self._row = number, row

    def attach(self) -> None:
        """Copy the layer's states into the buffers, which are the layer's from now on."""
        self.layer.graph = self
        for (name, number), buffer in self._buffers.items():
            states = getattr(self.layer, name)
            if states[number] is not buffer:
                buffer.copy_(states[number])
                states[number] = buffer

    def confirmed(self) -> Views:
        """The layer's states as the last token that counts left them."""
        views = self._memory.confirmed_views(self._row)
        held = dict(self.layer.states())
        # a layer that something else changed since has tensors of its own
        return {key: views[key] if state is self._buffers.get(key) else state for key, state in held.items()}

    def require_in_place(self) -> None:
        """After a recorded forward: raise CaptureError where the model put other tensors in the buffers' place."""
        replaced = [key for key, buffer in self._buffers.items() if getattr(self.layer, key[0])[key[1]] is not buffer]
        for name, which in replaced:
            getattr(self.layer, name)[which] = self._buffers[name, which]
        if replaced:
            raise CaptureError(
                f"layer {self._number} allocates a new tensor for its {replaced[0][0]} in every step; a graph needs "
                "one address"
            )

    @ordinary_tensors
    def unbind(self) -> None:
        """Let the layer go, with states of its own."""
        self.layer.graph = None
        for (name, number), buffer in self._buffers.items():
            states = getattr(self.layer, name)
            if states[number] is buffer:
                states[number] = buffer.clone()

    @property
    def _buffers(self) -> Views:
        return self._memory.layers[self._row]


def _views(buffers: dict[torch.dtype, Tensor], place: list[tuple[Key, Tensor, int]]) -> Views:
    """The parts of buffers (elements,) at which `place` says that states like these begin."""
    return {key: buffers[state.dtype][begin : begin + state.numel()].view(state.shape) for key, state, begin in place}
