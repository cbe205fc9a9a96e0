"""A bound cache layer: its window lies in the decoder's buffers, and its attention is recorded over them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from retrieval_attn.cache.host_part import Scoring
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.cache.sliding import SlidingLayer
from retrieval_attn.engine.graph.decoder import StepKind
from retrieval_attn.engine.graph.host import held_by
from retrieval_attn.engine.graph.slot import LayerSlot, window_of
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.gpu.decode.kernels import Parts, WindowBuffers, merge_parts, window_partials


class Owner(Protocol):
    """What a bound layer asks of the binding (`graph_binding.py`)."""

    recording: bool
    kind: StepKind

    @property
    def runtime(self) -> Runtime: ...

    @property
    def max_coded_keys(self) -> int: ...

    def sync(self) -> None: ...

    def invalidate(self) -> None: ...


class GraphLayer:
    """See the module. Implements `GraphHook` of `cache/layer.py`."""

    def __init__(self, owner: Owner, slot: LayerSlot, layer: RetrievalLayer | SlidingLayer) -> None:
        """`move_in` binds the layer, `unbind` lets it go."""
        self._owner, self.slot, self.layer = owner, slot, layer

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded: attention then goes through `attend`."""
        return self._owner.recording

    @property
    def window(self) -> WindowCache:
        """The layer's window."""
        return window_of(self.layer)

    def sync(self) -> None:
        """See `GraphHook`."""
        self._owner.sync()

    def invalidate(self) -> None:
        """See `GraphHook`."""
        self._owner.invalidate()

    def move_in(self) -> None:
        """Move the window into the slot's buffers, with room for at least one token."""
        self.layer.graph = self
        window = self.window
        if window.buffers[0] is not self.slot.key:
            if window.span[1] >= self.slot.key.shape[2]:
                self.layer.spill()
            window.use(self.slot.key, self.slot.value)
        if window.room == 0:
            self.layer.spill()

    def refresh(self) -> None:
        """The window's contents have changed but for appended tokens: take over which of them are padding."""
        low, high = self.window.span
        self.slot.valid.fill_(True)
        if self.window.valid is not None:
            self.slot.valid[:, low:high] = self.window.valid

    def plan(self) -> None:
        """Plan the host steps for what the layer retrieves now, if it ever attended. Raises CaptureError."""
        layer = self.layer
        if not self.slot.hosts or not isinstance(layer, RetrievalLayer):
            return
        counts = {layer.config.retrieve_count(stop - start) for start, stop in held_by(layer).ranges if stop > start}
        if len(counts) > 1 or None in counts:
            raise CaptureError(f"the rows retrieve different numbers of keys ({counts}), or all of them")
        retrieve = next((number for number in counts if number is not None), None)
        if retrieve is not None:
            for host in self.slot.hosts:
                host.plan(layer, retrieve)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Record: store the new token, attend to window and host, merge. (batch, q_heads, 1, value_dim), query's dtype.

        Raises CaptureError for more than one token per row.
        """
        if query.shape[2] != 1:
            raise CaptureError(f"a decode step has one new token per row, the model brought {query.shape[2]}")
        owner, slot, begun = self._owner, self.slot, []
        if owner.kind.retrieves and isinstance(self.layer, RetrievalLayer):
            scoring = Scoring(scale, softcap)
            if not slot.hosts:
                slot.make_hosts(self.layer, query, value.shape[3], scoring)
                self.plan()
            if slot.hosts[0].scoring != scoring:
                raise CaptureError(f"layer {slot.number} changes its scale or soft-cap from step to step")
            begun = [(host, host.begin(query, owner.max_coded_keys)) for host in slot.hosts]
        window = WindowBuffers(slot.key, slot.value, slot.span, slot.valid if owner.kind.padded else None)
        options: dict[str, Any] = {"softcap": softcap, "reach": slot.reach, "splits": slot.splits}
        parts = window_partials(query, key, value, window, scale=scale, **options)
        if not begun:
            return merge_parts(parts, None, sinks, query.dtype)
        merged = []
        for host, call in begun:
            owner.runtime.join(call)
            own = Parts(parts.out[host.rows], parts.lse[host.rows])
            merged.append(merge_parts(own, host.part, sinks, query.dtype))
        return merged[0] if len(merged) == 1 else torch.cat(merged)

    def unbind(self) -> None:
        """Let the layer go, with a window of its own."""
        self.layer.graph = None
        if self.layer.window is not None and self.layer.window.buffers[0] is self.slot.key:
            self.layer.window.own()
