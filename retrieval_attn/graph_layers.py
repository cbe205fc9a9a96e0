"""One cache layer's place in a captured decode step: buffers that stay put, and what is recorded for its attention.

The buffers belong to the decoder (`graph_decode.py`), not to a cache: caches take turns in them, so that a captured
graph outlives the context, fork or question that it was captured for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.engine import LayerStep, StepBuffers
from retrieval_attn.cpu.host_attend import plan_paths
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.store import HostPath
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.code_search import Aim, CodeSearch, Scratch, class_of, shared_scratch
from retrieval_attn.gpu.decode_kernels import (
    HostPart,
    WindowBuffers,
    merge_parts,
    split_count,
    stage_queries,
    window_partials,
)
from retrieval_attn.gpu.exchange import HostCall
from retrieval_attn.gpu.graph import Runtime
from retrieval_attn.gpu.window import WindowCache
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.layers import RetrievalLayer
from retrieval_attn.sliding import SlidingLayer

SLIDING_ROOM = 256
"""Tokens that a sliding layer's buffer takes beyond what it keeps, before what no query sees any more is dropped."""


class Owner(Protocol):
    """What a layer asks of its decoder. scratch: for searches of codes, which layers take turns with."""

    runtime: Runtime
    pool: Pool
    recording: bool
    retrieves: bool
    padded: bool
    scratch: dict[Any, Scratch]

    @property
    def most_coded(self) -> int:
        """The largest of all layers, see `GraphLayer`."""

    def settle(self) -> None: ...

    def leave(self) -> None: ...


@dataclass
class _Host:
    """The host's part of a layer: its step, the call of it, and the shapes it was made for."""

    step: LayerStep
    call: HostCall
    staged: Tensor  # (batch * q_heads, head_dim) view of the call's queries, as the device writes them
    part: HostPart  # views of its results
    search: CodeSearch | None  # of codes on the device, and where it names candidates
    ids: Tensor | None
    q_heads: int
    scale: float
    softcap: float | None


class GraphLayer:
    """See the module. Implements `cache_layer.GraphHook`."""

    def __init__(
        self,
        owner: Owner,
        number: int,
        layer: RetrievalLayer | SlidingLayer,
        span: Tensor,
        meters: np.ndarray[Any, Any],
        descriptor: np.ndarray[Any, Any],
    ) -> None:
        """Buffers like those of `layer`, which holds tokens already. number: of the layer in the model.

        span: int32 (2,) on the device, a row of the decoder's table. meters, descriptor: as in StepBuffers.
        """
        self._owner, self._number, self._span = owner, number, span
        self._meters, self._descriptor = meters, descriptor
        self._reach = layer.sliding_window if isinstance(layer, SlidingLayer) else None
        self._host: _Host | None = None
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
        if self._host is not None:
            self._host.step.forget()
        if layer is None:
            return
        layer.graph = None
        if layer.window is not None and layer.window.buffers[0] is self._key:
            layer.window.own()

    def plan(self) -> None:
        """Plan the host step for what the bound layer retrieves now, if it ever attended. Raises CaptureError."""
        layer, host = self.layer, self._host
        if host is None or not isinstance(layer, RetrievalLayer):
            return
        wanted = {layer.config.top_k_of(stop - start) for start, stop in layer.ranges if stop > start}
        if len(wanted) > 1 or None in wanted:
            raise CaptureError(f"the rows retrieve different numbers of keys ({wanted}), or all of them")
        top_k = next((number for number in wanted if number is not None), None)
        if top_k is None:
            return
        for rows_of in _layouts(layer.hosts):
            paths, n = [layer.hosts[rows[0]] for rows in rows_of], len(rows_of[0])
            ranges = [layer.ranges[rows[0]] for rows in rows_of]
            options: dict[str, Any] = {"scale": host.scale, "softcap": host.softcap}
            if plan_paths(host.step, paths, ranges, host.q_heads, n, top_k, **options):
                if host.part.rows is not None:
                    host.part.rows.copy_(_places(rows_of, host.q_heads))
                if host.search is not None:
                    host.search.aim(_aims(host.step, rows_of, top_k))
                return
        raise CaptureError(
            f"layer {self._number}: its index has no compiled search, or the step would need too much memory"
        )

    @property
    def most_coded(self) -> int:
        """Keys that a search of codes on the device is recorded for; 0: none is searched."""
        search = None if self._host is None else self._host.search
        return class_of(search.most) if search is not None and search.most else 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Record: store the new token, attend to window and host, merge. (batch, q_heads, 1, value_dim), query's dtype.

        Raises CaptureError for more than one token per row.
        """
        if query.shape[2] != 1:
            raise CaptureError(f"a decode step has one new token per row, the model brought {query.shape[2]}")
        owner, part, begun = self._owner, None, None
        if owner.retrieves and isinstance(self.layer, RetrievalLayer):
            host = self._host_for(query, value.shape[3], scale, softcap)
            stage_queries(query, host.staged, host.part.rows)
            if host.search is not None and host.ids is not None and owner.most_coded:
                sizes = query.shape[0] * host.q_heads, owner.most_coded, host.search.shape.room, query.device
                scratch = shared_scratch(owner.scratch, *sizes)
                host.search.run(query, host.ids, host.part.rows, scratch, owner.runtime.opaque)
            begun, part = owner.runtime.begin(host.call), host.part
        window = WindowBuffers(self._key, self._value, self._span, self._valid if owner.padded else None)
        options: dict[str, Any] = {"softcap": softcap, "reach": self._reach, "splits": self._splits}
        parts = window_partials(query, key, value, window, scale=scale, **options)
        if begun is not None:
            owner.runtime.join(begun)
        return merge_parts(parts, part, sinks, query.dtype)

    def raise_error(self) -> None:
        """Raise what the last replay left as the host step's status; BackendError names the layer."""
        if self._host is not None:
            self._host.step.raise_error()

    def _host_for(self, query: Tensor, value_dim: int, scale: float, softcap: float | None) -> _Host:
        """The host's part, made and planned when the layer attends for the first time."""
        host = self._host
        if host is None:
            host = self._host = self._make_host(query, value_dim, scale, softcap)
            self.plan()
        elif (host.scale, host.softcap) != (scale, softcap):
            raise CaptureError(f"layer {self._number} changes its scale or soft-cap from step to step")
        return host

    def _make_host(self, query: Tensor, value_dim: int, scale: float, softcap: float | None) -> _Host:
        batch, q_heads, _, dim = query.shape
        count, runtime = batch * q_heads, self._owner.runtime
        lse_at = -(-count * value_dim // 16) * 16  # on a cache line
        assert isinstance(self.layer, RetrievalLayer)
        shape = self.layer.code_shape(dim)
        named = 0 if shape is None else count * shape.room
        queries, results = runtime.queries(count * dim + named), runtime.results(lse_at + count)
        rows = None if batch == 1 else torch.arange(count, device=query.device)
        part = HostPart(results.device[: count * value_dim].view(count, value_dim), results.device[lse_at:], rows)
        out, lse = results.host[: count * value_dim].numpy(), results.host[lse_at:].numpy()
        given = queries.host.numpy()
        candidates = None if shape is None else given[count * dim :].view(np.int32).reshape(count, shape.room)
        buffers = StepBuffers(given[: count * dim], out, lse, self._meters, self._descriptor, candidates)
        search = ids = None
        if shape is not None:
            search = CodeSearch(batch, q_heads, self._key.shape[1], shape, query.device)
            ids = queries.device[count * dim :].view(torch.int32).view(count, shape.room)
        step = LayerStep(self._owner.pool, self.layer.fmt, layer=self._number, buffers=buffers)
        call = HostCall(queries, results, step.callback, step.address, f"layer {self._number}")
        staged = queries.device[: count * dim].view(count, dim)
        return _Host(step, call, staged, part, search, ids, q_heads, scale, softcap)


def _window_of(layer: RetrievalLayer | SlidingLayer) -> WindowCache:
    if layer.window is None:
        raise CaptureError("the cache holds no tokens yet")
    return layer.window


def _layouts(hosts: list[HostPath]) -> list[list[list[int]]]:
    """Ways to put a batch's rows into a step, best first: rows that share a path together, then each on its own.

    Each is a list of the step's rows, which are lists of the batch's rows, all equally long.
    """
    shared: dict[int, list[int]] = {}
    for row, host in enumerate(hosts):
        shared.setdefault(id(host), []).append(row)
    together = list(shared.values())
    apart = [[row] for row in range(len(hosts))]
    equal = len({len(rows) for rows in together}) == 1
    return [together, apart] if equal and len(together) < len(hosts) else [apart]


def _aims(step: LayerStep, rows_of: list[list[int]], top_k: int) -> list[Aim | None]:
    """The codes behind a planned step, for each key-value head of each row of the batch. Raises CaptureError."""
    heads = len(step.rows[0][0].keys)
    aims: list[Aim | None] = [None] * (heads * sum(map(len, rows_of)))
    for members, pieces in zip(rows_of, step.rows, strict=True):
        coded = [piece for piece in pieces if piece.indexes and isinstance(piece.indexes[0], DeviceIndex)]
        if len(coded) > 1:
            raise CaptureError("a sequence has codes of several segments on the device")
        for piece in coded:
            stop = piece.high - piece.index_first
            for head, index in enumerate(piece.indexes or ()):
                if isinstance(index, DeviceIndex) and index.serves(top_k, stop) and piece.low == piece.index_first:
                    for row in members:
                        aims[row * heads + head] = index.codes.device, stop  # type: ignore[attr-defined]
    return aims


def _places(rows_of: list[list[int]], q_heads: int) -> Tensor:
    """int64 (batch * q_heads,): where a step (rows, q_heads, n) has the query head h of the batch's row b."""
    n = len(rows_of[0])
    places = torch.empty(len(rows_of) * n, q_heads, dtype=torch.int64)
    heads = torch.arange(q_heads)
    for row, members in enumerate(rows_of):
        for i, member in enumerate(members):
            places[member] = (row * q_heads + heads) * n + i
    return places.flatten()
