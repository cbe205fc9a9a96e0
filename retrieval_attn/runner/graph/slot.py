"""One cache layer's place in a decoder: buffers that keep their addresses, and the host's parts of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.decode.kernels import Parts, WindowBuffers, merge_parts, split_count, window_partials
from retrieval_attn.runner.graph.host import HostResources, HostStep, LayerHeads, split_microbatches
from retrieval_attn.runner.graph.memory import StepMemory

SLIDING_ROOM = 256
"""Tokens that a sliding layer's buffer takes beyond what it keeps, before what no query sees any more is dropped."""


Buffers = tuple[Tensor, Tensor]
"""Keys (batch, kv_heads, slots, head_dim) and values (batch, kv_heads, slots, value_dim)."""


class SlotPlace(NamedTuple):
    """number: the layer's in the model. row: its row in the tables of the step's memory, layers that attend counted."""

    number: int
    row: int


class LayerSlot:
    """See the module.

    key (batch, kv_heads, slots, head_dim), value (batch, kv_heads, slots, value_dim): the window's; valid: (batch,
    slots) bool; span: int32 (batch, 2) on the device, of the decoder's table; splits: parts that a window's attention
    is cut into; reach: how far a sliding layer's query sees. hosts: the host's parts, made when the layer attends for
    the first time.
    """

    def __init__(
        self,
        place: SlotPlace,
        layer: RetrievalLayer | SlidingLayer,
        resources: HostResources,
        memory: StepMemory,
        buffers: Buffers | None = None,
    ) -> None:
        """For layers like `layer`, which holds tokens already. buffers: key and value; None: new ones, for its rows."""
        self.number, self._row = place
        self.span = memory.spans[self._row]
        self._resources, self._memory = resources, memory
        self.reach = layer.sliding_window if isinstance(layer, SlidingLayer) else None
        self.hosts: list[HostStep] = []
        self.key, self.value = slot_buffers(layer) if buffers is None else buffers
        batch, kv_heads, slots, _ = self.key.shape
        self.valid = torch.ones(batch, slots, dtype=torch.bool, device=self.key.device)
        self.splits = split_count(batch, kv_heads, slots, resources.runtime.processors)

    @property
    def max_coded_keys(self) -> int:
        """Keys that a search of codes on the device is recorded for; 0: none is searched."""
        return max((host.max_coded_keys for host in self.hosts), default=0)

    @property
    def reads(self) -> tuple[int, ...]:
        """Reader of host memory in each of the host's parts, see `StepKind`."""
        return tuple(int(host.reads) for host in self.hosts)

    def make_hosts(self, layer: RetrievalLayer, query: Tensor, value_dim: int, scoring: Scoring) -> None:
        """Make the host's parts for query (batch, q_heads, 1, head_dim) and the layers that will be bound here."""
        batch, q_heads, _, dim = query.shape
        shape = LayerHeads(q_heads, self.key.shape[1], dim, value_dim)
        meters, descriptors = self._memory.meters[self._row], self._memory.descriptors[self._row]
        self.hosts = [
            HostStep(
                self._resources, self.number, layer, rows, shape, scoring, (meters[i], descriptors[i]), query.device
            )
            for i, rows in enumerate(split_microbatches(layer, batch, dim))
        ]

    def record(
        self,
        query: Tensor,
        new: Buffers,
        scoring: Scoring,
        sinks: Tensor | None,
        *,
        max_coded_keys: int | None,
        padded: bool,
        paged: Callable[[], Partial] | None = None,
    ) -> Tensor:
        """Record: store the new tokens of each row, attend to window and host, merge.

        query (batch, q_heads, 1, head_dim) and new, keys and values (batch, kv_heads, 1, dim): of the new tokens, one
        row's after the other's. sinks: learned logits. max_coded_keys: see `StepKind`; None: nothing is on the host.
        padded: `valid` says what is padding. paged: records what the rows attend to in pages; None: nothing is. Returns
        (batch, q_heads, 1, value_dim) in the query's dtype.
        """
        begun = [] if max_coded_keys is None else [(host, host.begin(query, max_coded_keys)) for host in self.hosts]
        window = WindowBuffers(self.key, self.value, self.span, self.valid if padded else None)
        options: dict[str, Any] = {"softcap": scoring.softcap, "reach": self.reach, "splits": self.splits}
        parts = window_partials(query, *new, window, scale=scoring.scale, **options)
        exact = None if paged is None else paged()  # while the host works
        if not begun:
            return merge_parts(parts, None, sinks, query.dtype, paged=exact)
        merged = []
        for host, call in begun:
            part, beside = host.join(call)
            own = Parts(parts.out[host.rows], parts.lse[host.rows])
            own_exact = None if exact is None else Partial(exact.out[host.rows], exact.lse[host.rows])
            if beside is not None:
                own_exact = beside if own_exact is None else merge([own_exact, _like(beside, own_exact)])
            merged.append(merge_parts(own, part, sinks, query.dtype, host.rest, own_exact))
        return merged[0] if len(merged) == 1 else torch.cat(merged)

    def forget(self) -> None:
        """Drop what the host's parts hold of a cache."""
        for host in self.hosts:
            host.forget()


def _like(partial: Partial, other: Partial) -> Partial:
    """The same, in the shapes of another."""
    return Partial(partial.out.reshape(other.out.shape), partial.lse.reshape(other.lse.shape))


def slot_buffers(layer: RetrievalLayer | SlidingLayer, rows: int | None = None) -> Buffers:
    """Zeros for windows like the layer's: `rows` of them, None: as many as it has."""
    key, value = window_of(layer).buffers
    batch, slots = key.shape[0] if rows is None else rows, _slots(layer)
    return tuple(one.new_zeros(batch, one.shape[1], slots, one.shape[3]) for one in (key, value))  # type: ignore[return-value]


def fits_buffers(layer: RetrievalLayer | SlidingLayer, buffers: Buffers) -> bool:
    """Return whether windows like the layer's have the shape of rows of these buffers."""
    slots = _slots(layer)
    return all(
        there.shape[1:] == (own.shape[1], slots, own.shape[3])
        and (there.dtype, there.device) == (own.dtype, own.device)
        for own, there in zip(window_of(layer).buffers, buffers, strict=True)
    )


def _slots(layer: RetrievalLayer | SlidingLayer) -> int:
    return layer.keep + SLIDING_ROOM if isinstance(layer, SlidingLayer) else window_of(layer).slots


def window_of(layer: RetrievalLayer | SlidingLayer) -> WindowCache:
    """The layer's window. Raises CaptureError where there is none yet."""
    if layer.window is None:
        raise CaptureError("the cache is empty; a graph is captured after the first tokens were read")
    return layer.window
