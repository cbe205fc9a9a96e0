"""A cache bound to a decoder: its windows and states lie in the decoder's buffers, where graphs change them.

The windows learn of appended tokens late: `commit` counts a token, `sync` tells the layers of all that were counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache, retrieves
from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.gpu.codes.search import size_class
from retrieval_attn.index.task import descriptor as words
from retrieval_attn.offload.int8_rows import AwaitedRows
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.runner.graph.decoder import GraphDecoder, StepKind, attending, keeping_state
from retrieval_attn.runner.graph.host import HostRow, code_shape, held_by
from retrieval_attn.runner.graph.memory import ordinary_tensors
from retrieval_attn.runner.graph.pages import levels_for, prefix_of
from retrieval_attn.runner.graph.signature import signature
from retrieval_attn.runner.graph.slot import LayerSlot, window_of
from retrieval_attn.runner.graph.states import GraphState


class WindowsGrownError(CaptureError):
    """The windows of a graph are larger than its memory now: another graph can go on."""


class Binding:
    """See the module.

    layers, states: the bound layers that attend, and those that keep a state. room: tokens that every window still
    takes. stale: something else changed the cache, so `refresh` comes before the next step. recording: a step is being
    recorded. kind: what a graph is captured for now. awaited: int8 rows that threads make for the cache.
    """

    chooses = True

    @ordinary_tensors
    def __init__(self, decoder: GraphDecoder, model: PreTrainedModel, cache: RetrievalCache) -> None:
        """Bind `cache`. Raises CaptureError; the cache then is as it was."""
        self.decoder, self.model, self.cache = decoder, model, cache
        self.layers: list[GraphLayer] = []
        self.states: list[GraphState] = []
        self.recording, self.stale, self.by_host = False, True, False
        self.room = self._unsynced = 0
        self._work = np.zeros((len(decoder.slots), words.METER_WORDS), np.int64)
        self._nanoseconds = np.zeros(len(decoder.slots), np.int64)
        self.kind, self.awaited = StepKind(False, False, 0), AwaitedRows()
        try:
            self.refresh()
        except BaseException:
            self.unbind()
            raise

    @property
    def runtime(self) -> Runtime:
        """Where steps are recorded and replayed."""
        return self.decoder.runtime

    @property
    def max_coded_keys(self) -> int:
        """The largest of all layers, see `StepKind`."""
        return max(slot.max_coded_keys for slot in self.decoder.slots)

    @property
    def _paths(self) -> list[SequenceKV]:
        """Paths of all layers that retrieve."""
        layers = [bound.layer for bound in self.layers]
        return [host for layer in layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]

    def refresh(self) -> None:
        """Bind the cache's layers as they are now. Raises CaptureError."""
        cached: list[Any] = list(self.cache.layers)
        for layer in cached:
            if isinstance(layer, RetrievalLayer):
                layer.finish_index()
        if signature(self.model, self.cache, self.runtime) != self.decoder.signature:
            raise CaptureError("the shapes of the cache or the weights of the model changed after the capture")
        for row, (slot, (_, layer)) in enumerate(zip(self.decoder.slots, attending(self.cache), strict=True)):
            bound = GraphLayer(self, slot, layer)
            self.layers[row : row + 1] = [bound]  # before it changes anything: `unbind` undoes what is listed
            bound.attach()
        for row, (number, layer) in enumerate(keeping_state(self.cache)):
            state = GraphState(self.decoder.states, number, row, layer)
            self.states[row : row + 1] = [state]
            state.attach()
        self._replan(self.layers)
        self.stale = False

    def evict_blocks(self) -> None:
        """Some window is full: move its oldest tokens to the host, as eager decoding does. Raises WindowsGrownError
        where windows grew instead, and lie elsewhere.
        """
        self.sync()
        full = [layer for layer in self.layers if layer.window.room == 0]
        for layer in full:
            layer.layer.spill()
        if any(layer.window.buffers[0] is not layer.slot.key for layer in full):
            raise WindowsGrownError("windows are longer than the buffers that the graph was captured with")
        self._replan(full)

    def use_rows(self) -> None:
        """Plan again if int8 rows that threads made for the cache are complete now."""
        if self.awaited.are_complete:
            self.sync()
            self._replan(self.layers)

    def upload_spans(self) -> None:
        """Tell the device where the windows' tokens lie."""
        self.decoder.memory.upload_spans([layer.window.span for layer in self.layers])

    def update_kind(self) -> None:
        """Note the keys that are searched now: it is known once the host's parts are planned. Watch the rows that the
        plan asked for.
        """
        if self.kind.retrieves:
            self.awaited.watch_asked(self._paths)
        keys, reads = (self.max_coded_keys, self.decoder.reads) if self.kind.retrieves else (0, ())
        self.kind = self.kind._replace(max_coded_keys=keys, host_access=reads)

    def commit(self, work: np.ndarray[Any, Any], nanoseconds: np.ndarray[Any, Any]) -> None:
        """Count the token of a step that is over. work, nanoseconds: as `StepMemory.host_meters` gives them."""
        self._work += work
        self._nanoseconds += nanoseconds
        self.cache.batch.commit(1)
        self.decoder.states.confirmed += 1
        self.room -= 1
        self._unsynced += 1

    def sync(self) -> None:
        """Tell the layers of the tokens that were committed since the last time, and of the host's work for them."""
        count, self._unsynced = self._unsynced, 0
        if not count:
            return
        for bound, work, nanoseconds in zip(self.layers, self._work.tolist(), self._nanoseconds.tolist(), strict=True):
            bound.window.note_appended(count)
            note_host_work(bound.layer.stats, work, nanoseconds)
        self._work[:] = 0
        self._nanoseconds[:] = 0

    def invalidate(self) -> None:
        """Something else changes the cache, or the device counts otherwise: `sync`, and `refresh` before a step."""
        self.sync()
        self.stale = True

    def unbind(self) -> None:
        """Let the cache go, with all committed tokens in it and windows and states of its own."""
        self.decoder.states.undo()
        self.sync()
        for slot in self.decoder.slots:
            slot.forget()
        for layer in self.layers:
            layer.unbind()
        for state in self.states:
            state.unbind()
        # they know this object: a circle would keep the cache's windows until Python collects it
        self.layers, self.states = [], []

    def _replan(self, changed: list[GraphLayer]) -> None:
        """Windows have moved: upload where they are, and plan what the host searches now."""
        self.room = min(bound.window.room for bound in self.layers)
        padded = any(bound.window.valid is not None for bound in self.layers)
        prefixes = [prefix_of(self.cache)] * len(self.cache.batch.sequences)  # rows of a cache are over the same
        levels = levels_for(prefixes)
        if levels:
            self.decoder.write_pages(prefixes, self.cache.layers, levels)
        self.kind = StepKind(retrieves(self.cache), padded, 0, levels)
        for bound in changed if padded else ():
            bound.refresh()
        if self.kind.retrieves:
            self._plan(changed)
        self.decoder.upload_tables()
        self.update_kind()
        self.upload_spans()

    def _plan(self, changed: list[GraphLayer]) -> None:
        """Plan the host steps of these layers; of all, if the device reads rows of some layers and cannot of others."""
        before = self.by_host
        self.awaited.watch(self._paths)
        self.by_host = self.awaited.are_pending
        for bound in changed if self.by_host == before else self.layers:
            bound.plan()
        if self.decoder.reads_differ:
            self.by_host = True
            for bound in self.layers:
                bound.plan()


def note_host_work(stats: LayerStats, work: Sequence[float], nanoseconds: float) -> None:
    """Add what the host's part of a layer's steps cost. work: METER_WORDS numbers."""
    search, attend = work[words.SEARCH_TIME], work[words.ATTEND_TIME]
    seconds, share = nanoseconds / 1e9, search / max(1, search + attend)
    stats.host_seconds += seconds
    stats.search_seconds += seconds * share
    stats.attend_seconds += seconds * (1 - share)
    stats.keys_scanned += round(work[words.SCANNED])
    stats.bytes_read += round(work[words.BYTES])


def expected_kind(cache: RetrievalCache) -> StepKind:
    """Return the expected `Binding.kind`, if the codes of a layer cover all tokens that it retrieves from."""
    layers = [layer for _, layer in attending(cache)]
    held = [
        (layer, layer.held)
        for layer in layers
        if isinstance(layer, RetrievalLayer) and layer.held is not None and layer.held.retrieves
    ]
    coded = [
        stop - start
        for layer, one in held
        if code_shape(layer, one.window.buffers[0].shape[3]) is not None
        for start, stop in one.ranges
    ]
    padded = any(window_of(layer).valid is not None for layer in layers)
    keys = size_class(max(coded)) if max(coded, default=0) else 0
    return StepKind(bool(held), padded, keys, levels_for([prefix_of(cache)]))


class GraphLayer:
    """A bound cache layer: its window lies in the decoder's buffers, and its attention is recorded over them.

    Implements `GraphHook` of `attention/layer.py`. `attach` binds the layer, `unbind` lets it go.
    """

    def __init__(self, owner: Binding, slot: LayerSlot, layer: RetrievalLayer | SlidingLayer) -> None:
        self._owner, self.slot, self.layer = owner, slot, layer
        self.sync, self.invalidate = owner.sync, owner.invalidate

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded: attention then goes through `attend`."""
        return self._owner.recording

    @property
    def window(self) -> WindowCache:
        """The layer's window."""
        return window_of(self.layer)

    def attach(self) -> None:
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
        held = held_by(layer)
        counts = {
            retrieved_keys(layer.config, host, stop - start)
            for host, (start, stop) in zip(held.hosts, held.ranges, strict=True)
            if stop > start
        }
        if len(counts) > 1 or None in counts:
            raise CaptureError(
                f"all rows of a graph must retrieve the same number of keys, got {counts} (None: all keys)"
            )
        retrieve = next((number for number in counts if number is not None), None)
        if retrieve is not None:
            rows = list(itertools.starmap(HostRow, zip(held.hosts, held.ranges, strict=True)))
            for host in self.slot.hosts:
                host.plan(rows[host.rows], retrieve, by_host=self._owner.by_host)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Record: store the new token, attend to window and host, merge. (batch, q_heads, 1, value_dim), query's dtype.

        Raises CaptureError for more than one token per row.
        """
        if query.shape[2] != 1:
            raise CaptureError(f"a captured decode step takes one new token per row, got {query.shape[2]}")
        owner, slot, scoring, max_coded_keys, paged = self._owner, self.slot, Scoring(scale, softcap), None, None
        if owner.kind.prefix_depth and isinstance(self.layer, RetrievalLayer):
            paged = owner.decoder.paged(slot.number, query, scoring)
        if owner.kind.retrieves and isinstance(self.layer, RetrievalLayer):
            if not slot.hosts:
                slot.make_hosts(self.layer, query, value.shape[3], scoring)
                self.plan()
                owner.decoder.upload_tables()
            if slot.hosts[0].scoring != scoring:
                raise CaptureError(
                    f"layer {slot.number} must keep its scale and soft-cap, but they differ between two steps"
                )
            max_coded_keys = owner.max_coded_keys
        options: dict[str, Any] = {"max_coded_keys": max_coded_keys, "padded": owner.kind.padded, "paged": paged}
        return slot.record(query, (key, value), scoring, sinks, **options)

    def drop_pending(self) -> None:
        """A forward that recorded, or tried to, is over."""
        self.layer._pending = None

    def add_tail(self) -> None:
        """Add to the layer what replays have estimated since the last call, those among them that were taken back."""
        found = [host.take_tail() for host in self.slot.hosts]
        if isinstance(self.layer, RetrievalLayer) and all(host.clusters is not None for host in self.layer.hosts):
            for sums, count in found:
                self.layer.tail.add_sums(sums, count)

    def drop_tail(self) -> None:
        """Forget what was estimated since `add_tail`."""
        for host in self.slot.hosts:
            host.take_tail()

    def unbind(self) -> None:
        """Let the layer go, with a window of its own."""
        self.add_tail()
        self.layer.graph = None
        if self.layer.window is not None and self.layer.window.buffers[0] is self.slot.key:
            self.layer.window.own()
