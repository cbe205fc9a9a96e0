"""One cache layer's place in a captured decode step: buffers that stay put, and what is recorded for its attention.

The buffers belong to the decoder (`engine/graph.py`), not to a cache: caches take turns in them, so that a captured
graph outlives the context, fork or question that it was captured for.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.cache.sliding import SlidingLayer
from retrieval_attn.engine.graph_host import HostRows, turns_of
from retrieval_attn.engine.graph_host import Owner as HostOwner
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.decode.kernels import Parts, WindowBuffers, merge_parts, split_count, window_partials

SLIDING_ROOM = 256
"""Tokens that a sliding layer's buffer takes beyond what it keeps, before what no query sees any more is dropped."""


class Owner(HostOwner, Protocol):
    """What a layer asks of its decoder."""

    recording: bool
    retrieves: bool
    padded: bool

    def settle(self) -> None: ...

    def leave(self) -> None: ...


class GraphLayer:
    """See the module. Implements `cache_layer.GraphHook`."""

    def __init__(
        self,
        owner: Owner,
        number: int,
        layer: RetrievalLayer | SlidingLayer,
        span: Tensor,
        meters: np.ndarray[Any, Any],
        descriptors: np.ndarray[Any, Any],
    ) -> None:
        """Buffers like those of `layer`, which holds tokens already. number: of the layer in the model.

        span: int32 (2,) on the device, a row of the decoder's table. meters, descriptors: (MOST_TURNS, ...), of each
        part of the batch as in StepBuffers.
        """
        self._owner, self._number, self._span = owner, number, span
        self._meters, self._descriptors = meters, descriptors
        self._reach = layer.sliding_window if isinstance(layer, SlidingLayer) else None
        self._hosts: list[HostRows] = []
        self._scoring: tuple[float, float | None] | None = None
        self._layer: RetrievalLayer | SlidingLayer | None = None
        window = _window_of(layer)
        key, value = window.buffers
        slots = layer.keep + SLIDING_ROOM if isinstance(layer, SlidingLayer) else key.shape[2]
        self._key = key.new_zeros(*key.shape[:2], slots, key.shape[3])
        self._value = value.new_zeros(*value.shape[:2], slots, value.shape[3])
        self._valid = torch.ones(key.shape[0], slots, dtype=torch.bool, device=key.device)
        self._splits = split_count(key.shape[0], key.shape[1], slots, owner.runtime.processors)

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded: attention then goes through `attend`."""
        return self._owner.recording

    @property
    def layer(self) -> RetrievalLayer | SlidingLayer:
        """The cache layer that is bound."""
        assert self._layer is not None
        return self._layer

    @property
    def window(self) -> WindowCache:
        """The bound layer's window."""
        return _window_of(self.layer)

    def settle(self) -> None:
        """See `GraphHook`."""
        self._owner.settle()

    def leave(self) -> None:
        """See `GraphHook`."""
        self._owner.leave()

    def take(self, layer: RetrievalLayer | SlidingLayer) -> None:
        """Bind `layer`: its window moves into the buffers, with room for at least one token."""
        self._layer, layer.graph = layer, self
        window = _window_of(layer)
        if window.buffers[0] is not self._key:
            if window.span[1] >= self._key.shape[2]:
                layer.spill()
            window.use(self._key, self._value)
        if window.room == 0:
            layer.spill()

    def refresh(self) -> None:
        """The window's contents have changed but for appended tokens: take over which of them are padding."""
        low, high = self.window.span
        self._valid.fill_(True)
        if self.window.valid is not None:
            self._valid[:, low:high] = self.window.valid

    def give_back(self) -> None:
        """Let the bound layer go, with a window of its own; drop what the host step holds of it."""
        layer, self._layer = self._layer, None
        for host in self._hosts:
            host.forget()
        if layer is None:
            return
        layer.graph = None
        if layer.window is not None and layer.window.buffers[0] is self._key:
            layer.window.own()

    def plan(self) -> None:
        """Plan the host steps for what the bound layer retrieves now, if it ever attended. Raises CaptureError."""
        layer = self.layer
        if self._scoring is None or not isinstance(layer, RetrievalLayer):
            return
        wanted = {layer.config.retrieve_count(stop - start) for start, stop in layer.ranges if stop > start}
        if len(wanted) > 1 or None in wanted:
            raise CaptureError(f"the rows retrieve different numbers of keys ({wanted}), or all of them")
        retrieve = next((number for number in wanted if number is not None), None)
        if retrieve is not None:
            for host in self._hosts:
                host.plan(layer, retrieve, *self._scoring)

    @property
    def most_coded(self) -> int:
        """Keys that a search of codes on the device is recorded for; 0: none is searched."""
        return max((host.most_coded for host in self._hosts), default=0)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Record: store the new token, attend to window and host, merge. (batch, q_heads, 1, value_dim), query's dtype.

        Raises CaptureError for more than one token per row.
        """
        if query.shape[2] != 1:
            raise CaptureError(f"a decode step has one new token per row, the model brought {query.shape[2]}")
        owner, begun = self._owner, []
        if owner.retrieves and isinstance(self.layer, RetrievalLayer):
            begun = [(host, host.ask(query)) for host in self._hosts_for(query, value.shape[3], scale, softcap)]
        window = WindowBuffers(self._key, self._value, self._span, self._valid if owner.padded else None)
        options: dict[str, Any] = {"softcap": softcap, "reach": self._reach, "splits": self._splits}
        parts = window_partials(query, key, value, window, scale=scale, **options)
        if not begun:
            return merge_parts(parts, None, sinks, query.dtype)
        merged = []
        for host, call in begun:
            owner.runtime.join(call)
            own = Parts(parts.out[host.rows], parts.lse[host.rows])
            merged.append(merge_parts(own, host.part, sinks, query.dtype))
        return merged[0] if len(merged) == 1 else torch.cat(merged)

    def raise_error(self) -> None:
        """Raise what the last replay left as a host step's status; BackendError names the layer."""
        for host in self._hosts:
            host.raise_error()

    def _hosts_for(self, query: Tensor, value_dim: int, scale: float, softcap: float | None) -> list[HostRows]:
        """The host's parts, made and planned when the layer attends for the first time."""
        if self._scoring is None:
            assert isinstance(self.layer, RetrievalLayer)
            batch, q_heads, _, dim = query.shape
            sizes = q_heads, self._key.shape[1], dim, value_dim
            self._hosts = [
                HostRows(
                    self._owner,
                    self._number,
                    self.layer,
                    rows,
                    sizes,
                    (self._meters[turn], self._descriptors[turn]),
                    query.device,
                )
                for turn, rows in enumerate(turns_of(self.layer, batch, dim))
            ]
            self._scoring = scale, softcap
            self.plan()
        elif self._scoring != (scale, softcap):
            raise CaptureError(f"layer {self._number} changes its scale or soft-cap from step to step")
        return self._hosts


def _window_of(layer: RetrievalLayer | SlidingLayer) -> WindowCache:
    if layer.window is None:
        raise CaptureError("the cache holds no tokens yet")
    return layer.window
