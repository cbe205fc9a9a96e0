"""One cache layer's place in a decoder: buffers that keep their addresses, and the host's parts of its attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.cache.sliding import SlidingLayer
from retrieval_attn.engine.graph.host import HeadShape, HostResources, HostRows, split_microbatches
from retrieval_attn.engine.graph.memory import StepMemory
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.decode.kernels import split_count

SLIDING_ROOM = 256
"""Tokens that a sliding layer's buffer takes beyond what it keeps, before what no query sees any more is dropped."""


class SlotPlace(NamedTuple):
    """number: the layer's in the model. row: its row in the tables of the step's memory, layers that attend counted."""

    number: int
    row: int


class LayerSlot:
    """See the module.

    key (batch, kv_heads, slots, head_dim), value (batch, kv_heads, slots, value_dim): the window's; valid: (batch,
    slots) bool; span: int32 (2,) on the device, a row of the decoder's table; splits: parts that a window's attention
    is cut into; reach: how far a sliding layer's query sees. hosts: the host's parts, made when the layer attends for
    the first time.
    """

    def __init__(
        self, place: SlotPlace, layer: RetrievalLayer | SlidingLayer, resources: HostResources, memory: StepMemory
    ) -> None:
        """Buffers like those of `layer`, which holds tokens already."""
        self.number, self._row = place
        self.span = memory.spans[self._row]
        self._resources, self._memory = resources, memory
        self.reach = layer.sliding_window if isinstance(layer, SlidingLayer) else None
        self.hosts: list[HostRows] = []
        key, value = window_of(layer).buffers
        slots = layer.keep + SLIDING_ROOM if isinstance(layer, SlidingLayer) else key.shape[2]
        self.key = key.new_zeros(*key.shape[:2], slots, key.shape[3])
        self.value = value.new_zeros(*value.shape[:2], slots, value.shape[3])
        self.valid = torch.ones(key.shape[0], slots, dtype=torch.bool, device=key.device)
        self.splits = split_count(key.shape[0], key.shape[1], slots, resources.runtime.processors)

    @property
    def max_coded_keys(self) -> int:
        """Keys that a search of codes on the device is recorded for; 0: none is searched."""
        return max((host.max_coded_keys for host in self.hosts), default=0)

    def make_hosts(self, layer: RetrievalLayer, query: Tensor, value_dim: int, scoring: Scoring) -> None:
        """Make the host's parts for query (batch, q_heads, 1, head_dim) and the layers that will be bound here."""
        batch, q_heads, _, dim = query.shape
        shape = HeadShape(q_heads, self.key.shape[1], dim, value_dim)
        meters, descriptors = self._memory.meters[self._row], self._memory.descriptors[self._row]
        self.hosts = [
            HostRows(
                self._resources, self.number, layer, rows, shape, scoring, (meters[i], descriptors[i]), query.device
            )
            for i, rows in enumerate(split_microbatches(layer, batch, dim))
        ]

    def forget(self) -> None:
        """Drop what the host's parts hold of a cache."""
        for host in self.hosts:
            host.forget()


def window_of(layer: RetrievalLayer | SlidingLayer) -> WindowCache:
    """The layer's window. Raises CaptureError where there is none yet."""
    if layer.window is None:
        raise CaptureError("the cache holds no tokens yet")
    return layer.window
