"""Buffers that keep their addresses: of a step, and of a layer with the host's parts of its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.decode.kernels import Parts, WindowBuffers, advance, merge_parts, split_count, window_partials
from retrieval_attn.index.task import tasks as words
from retrieval_attn.runner.graph.host import MAX_MICROBATCHES, HostResources, HostStep, LayerHeads, split_microbatches

_Function = TypeVar("_Function", bound=Callable[..., Any])


def ordinary_tensors(function: _Function) -> _Function:
    """Buffers made inside `torch.inference_mode` could not be written to outside it, where the next cache may come."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast("_Function", called)


class StepMemory:
    """Memory of a captured decode step that keeps its addresses: inputs, outputs, and the host's reports.

    layers: those that attend; the states of others are in `states.py`. On the device: token and position int64
    (batch * tokens, 1), the step's inputs, which a step of one token replaces by those of the next one; chosen int64
    (batch * tokens,), the likeliest token after each; spans int32 (layers, batch, 2), the used slots of every layer's
    windows; stored int32 (batch,), by how much a step makes a row longer: 1, or 0 for a free row. On the host, int64, a
    row for each layer and microbatch: meters (layers, MAX_MICROBATCHES, workers * METER_WORDS) and descriptors (layers,
    MAX_MICROBATCHES, WORDS), as in `StepBuffers`.
    """

    def __init__(self, layers: int, batch: int, workers: int, device: torch.device, tokens: int = 1) -> None:
        """tokens: new tokens of each row. The caller counts those of a block of several."""
        self._counts = tokens == 1
        self.token = torch.zeros(batch * tokens, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros_like(self.token)
        self.chosen = torch.zeros_like(self.token[:, 0])
        # rows begin on multiples of 16 bytes: Triton compiles a kernel for aligned addresses, and one for others
        self.spans = torch.zeros(layers, batch, 4, dtype=torch.int32, device=device)[..., :2]
        self.stored = torch.ones(batch, dtype=torch.int32, device=device)
        self.meters = np.zeros((layers, MAX_MICROBATCHES, workers * words.METER_WORDS), np.int64)
        self.descriptors = np.zeros((layers, MAX_MICROBATCHES, words.WORDS), np.int64)

    def place(self, token: Tensor, position: Tensor) -> None:
        """Write the inputs of the next step, token and position (batch * tokens,)."""
        self.token.copy_(token[:, None])
        self.position.copy_(position[:, None])

    def upload_rows(self, spans: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> None:
        """Write the used slots of each row, int32 (layers, batch, 2), and which rows there are, int32 (batch,)."""
        self.spans.copy_(torch.from_numpy(spans))
        self.stored.copy_(torch.from_numpy(stored))

    def finish_step(self, logits: Tensor | None) -> None:
        """Record: choose from logits (batch, vocabulary), and leave the inputs of the step after this one; without them
        all but its tokens. After a block of several tokens only choose.
        """
        if logits is not None:
            self.chosen.copy_(logits.argmax(dim=-1))
        if not self._counts:
            return
        if logits is not None:
            self.token.copy_(self.chosen[:, None])
        self.position.add_(1)
        advance(self.spans, self.stored)

    @property
    def host_failed(self) -> bool:
        """Whether a host step of the last replay left an error."""
        return bool(self.descriptors[..., words.STATUS].any())

    def host_meters(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return meters of the last replay, int64: (layers, METER_WORDS) work, (layers,) nanoseconds of host steps."""
        work = self.meters.reshape(len(self.meters), -1, words.METER_WORDS).sum(axis=1)
        return work, self.descriptors[..., words.NANOSECONDS].sum(axis=1)


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
