"""BucketRow: a cache of one sequence in a batch that decodes as a graph: its windows lie in one row of shared buffers.

What belongs to the row is data: where its windows lie, how long they are, what the host searches for it. To join and
to leave are copies of its windows, and no capture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer_kv import prepare_spill
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.index.task import descriptor as words
from retrieval_attn.offload.build import event_now
from retrieval_attn.offload.staging import bringing
from retrieval_attn.runner.graph.binding import note_host_work
from retrieval_attn.runner.graph.decoder import attending, keeping_state
from retrieval_attn.runner.graph.host import code_shape, held_by
from retrieval_attn.runner.graph.memory import ordinary_tensors
from retrieval_attn.runner.graph.pages import prefix_of
from retrieval_attn.runner.graph.slot import Buffers, LayerSlot, window_of
from retrieval_attn.runner.graph.states import GraphState, Views

__all__ = ["BucketStates", "GraphSlot", "GroupBuffers", "RowStates", "StateBuffers", "StepCosts", "copy_ahead_share"]

log = logging.getLogger(__name__)


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


class GroupBuffers(NamedTuple):
    """What rows of graphs lie in. windows: of each layer that attends. states: of the layers that keep one."""

    windows: Sequence[Buffers]
    states: StateBuffers

    def rows(self, start: int, stop: int) -> GroupBuffers:
        """Views of the places [start, stop)."""
        windows = [(key[start:stop], value[start:stop]) for key, value in self.windows]
        return GroupBuffers(windows, self.states.rows(start, stop))


class StepCosts:
    """What the host's part of all steps so far cost a row that was in each: work and nanoseconds by layer, float64.

    A step is one for all rows, and counts in equal shares for those that retrieve.
    """

    def __init__(self, layers: int) -> None:
        self.work, self.nanoseconds = np.zeros((layers, words.METER_WORDS)), np.zeros(layers)

    def add(self, work: np.ndarray[Any, Any], nanoseconds: np.ndarray[Any, Any], rows: int) -> None:
        """One step more. work, nanoseconds: as `StepMemory.host_meters` gives them. rows: that retrieved."""
        self.work += work / rows
        self.nanoseconds += nanoseconds / rows


class GraphSlot:
    """See the module. Implements `GraphHook` of `attention/layer.py`. The cache is not kept alive.

    place: its row of the buffers; -1: none yet. room: tokens that each of its windows still takes. stale: something
    else changed the cache, so `attach` comes before the next step. retrieves: it has keys between sinks and window.
    coded_keys: most that a device searches by codes, in any layer. behind: layers that `bring` has something to do for.
    """

    recording = False

    def __init__(self, cache: RetrievalCache, costs: StepCosts, gone: Callable[[Any], None]) -> None:
        """costs: of the steps it will be in. gone: called once the cache is, at any time, from any thread."""
        self._cache = weakref.ref(cache, gone)
        self._costs, self._paid = costs, (costs.work.copy(), costs.nanoseconds.copy())
        self._slots: Sequence[LayerSlot] = ()
        self._views: Sequence[Buffers] = []
        self._states = RowStates()
        self._spans = np.zeros((len(attending(cache)), 2), np.int32)
        self._unsynced = 0
        self.behind: list[int] = []
        self._moved: torch.cuda.Event | None = None  # windows are where they are since
        self.place, self.room, self.stale, self.retrieves, self.coded_keys = -1, 0, True, False, 0

    @property
    def cache(self) -> RetrievalCache | None:
        """Whose row it is; None: nobody has it any more."""
        return self._cache()

    @property
    def layers(self) -> list[Any]:
        """The cache's layers that attend."""
        cache = self._cache()
        return [] if cache is None else [layer for _, layer in attending(cache)]

    @property
    def prefix(self) -> PagedPrefix | None:
        """What it has in pages; None: nothing."""
        cache = self._cache()
        return None if cache is None else prefix_of(cache)

    @property
    def spans(self) -> np.ndarray[Any, Any]:
        """The used slots of its windows, int32 (layers, 2)."""
        spans = self._spans.copy()
        spans[:, 1] += self._unsynced
        return spans

    def attach(self, buffers: GroupBuffers, place: int) -> None:
        """Have windows, with room for a token, and states in this row of the buffers. Raises CaptureError."""
        cache = self._cache()
        if self.place >= 0:
            self.sync()
        moved = place != self.place
        if moved:
            self.add_tail()
            self._views = buffers.rows(place, place + 1).windows
            self.place, self._slots = place, ()  # what others left at the new place is not of this row
        if cache is not None:
            self._states.attach(cache, buffers.states, place, moved=moved)
        for layer, view in zip(self.layers, self._views, strict=True):
            layer.finish_index()
            layer.graph = self
            if window_of(layer).span[1] >= view[0].shape[2]:
                layer.spill()
            self._settle(layer, view)
            if window_of(layer).room == 0:
                layer.spill()
                self._settle(layer, view)
        self._look()
        self.stale = False

    def make_room(self) -> None:
        """Some window is full: its oldest tokens are searched from now on, as in eager decoding.

        The host has them, or gets them now. What else the windows hold it gets by `bring`.
        """
        self.sync()
        self._spill(flush=False)
        layers = self.layers
        for layer, view in zip(layers, self._views, strict=True):
            self._settle(layer, view)
        self._look()
        self.behind = [number for number, layer in enumerate(layers) if isinstance(layer, RetrievalLayer)]
        self._moved = event_now(self._views[0][0].device)

    def bring(self, layers: int) -> None:
        """Prepare the next time that windows are full, in so many layers more; while a step replays.

        What they held when they were full last is copied to the host. What goes wrong is told when it is needed there.
        """
        own = self.layers
        some, self.behind = self.behind[:layers], self.behind[layers:]
        try:
            with bringing(self._views[0][0].device, self._moved):
                for number in some if own else ():
                    prepare_spill(held_by(own[number]))
        except Exception as error:
            log.debug("tokens were not copied ahead of time: %s", error)
            self.behind = []

    def use(self, slots: Sequence[LayerSlot]) -> None:
        """From now on these slots' host parts estimate for it."""
        if slots is not self._slots:
            self.add_tail()
            self._slots = slots
            self._forget_tail()

    def commit(self) -> None:
        """Count the token of a step that is over."""
        cache = self._cache()
        if cache is not None:
            cache.batch.commit(1)
        self.room -= 1
        self._unsynced += 1

    def leave(self) -> None:
        """Let the cache go, with all tokens that count in it and windows of its own."""
        self.sync()
        self.add_tail()
        self._spill()
        for layer, view in zip(self.layers, self._views, strict=False):
            layer.graph = None
            if layer.window is not None and layer.window.buffers[0] is view[0]:
                layer.window.own()
        cache = self._cache()
        if cache is not None:
            self._states.leave(cache)
        self.place, self._views, self._slots, self.behind = -1, [], (), []

    # -- GraphHook -----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Tell the cache's windows of the tokens that replays have appended, and its layers of the host's work."""
        count, self._unsynced = self._unsynced, 0
        paid, self._paid = self._paid, (self._costs.work.copy(), self._costs.nanoseconds.copy())
        if not count:
            return
        self._spans[:, 1] += count
        work, nanoseconds = self._paid[0] - paid[0], self._paid[1] - paid[1]
        for number, layer in enumerate(self.layers):
            layer.window.note_appended(count)
            if self.retrieves:
                note_host_work(layer.stats, work[number], float(nanoseconds[number]))

    def invalidate(self) -> None:
        """Something else changes the cache: `sync`, and look at it anew before the next step."""
        self.sync()
        if not self.stale:
            self.stale = True
            self._spill()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Never: the batch's own layers are recorded (`bucket_graph.py`), not this cache's."""
        raise CaptureError("a row of a batch is not recorded by itself")

    def add_tail(self) -> None:
        """Add to the layers' `tail` what was estimated in replays since the last call. Waits for the device."""
        tallies = self._tallies()
        if not tallies:
            return
        found = torch.cat([tally.flatten() for _, tally in tallies]).cpu()
        torch._foreach_zero_([tally for _, tally in tallies])
        for (layer, _), own in zip(tallies, found.split([tally.numel() for _, tally in tallies]), strict=True):
            (start, stop), host = held_by(layer).ranges[0], layer.hosts[0]
            if stop > start and host.clusters is not None:
                layer.tail.add_sums(own.view(-1, 2)[:, 0], round(float(own[1])))

    def _forget_tail(self) -> None:
        tallies = [tally for _, tally in self._tallies()]
        if tallies:
            torch._foreach_zero_(tallies)

    def _tallies(self) -> list[tuple[RetrievalLayer, Tensor]]:
        """What is estimated for the row, with the layer that it is for."""
        return [
            (layer, host.tally_of(self.place))
            for slot, layer in zip(self._slots, self.layers, strict=False)
            for host in slot.hosts
            if host.rows.start <= self.place < host.rows.stop
        ]

    def _settle(self, layer: Any, view: Buffers) -> None:
        """The layer's window is in `view`, wherever it was. Raises CaptureError where it does not fit."""
        window = window_of(layer)
        if window.buffers[0] is view[0]:
            return
        if window.span[1] > view[0].shape[2]:
            raise CaptureError(f"a window of {window.span[1]} slots was given a row of {view[0].shape[2]}")
        window.use(*view)

    def _spill(self, *, flush: bool = True) -> None:
        """Windows that are full move their oldest tokens to the host, as eager decoding does at once. flush: see
        `HeldTokens.spill`.
        """
        if any(layer.window.room == 0 for layer in self.layers):
            self.add_tail()  # what was estimated until now is of a row that may not have retrieved
            for layer in self.layers:
                if layer.window.room == 0 and isinstance(layer, RetrievalLayer):
                    layer.spill(flush=flush)
                elif layer.window.room == 0:
                    layer.spill()

    def _look(self) -> None:
        """Note where the windows' tokens lie now."""
        layers = self.layers
        self._spans = np.array([layer.window.span for layer in layers], np.int32).reshape(len(layers), 2)
        self.room = min((layer.window.room for layer in layers), default=0)
        held = [(layer, held_by(layer)) for layer in layers if isinstance(layer, RetrievalLayer)]
        self.retrieves = any(one.retrieves for _, one in held)
        coded = [one for layer, one in held if code_shape(layer, one.window.buffers[0].shape[3]) is not None]
        self.coded_keys = max((stop - start for one in coded for start, stop in one.ranges), default=0)


def copy_ahead_share(rows: Iterable[GraphSlot]) -> None:
    """While the device computes: a share of what the windows that moved last have and the host has not, so that it has
    all of it before the next ones move.
    """
    some = sorted((row for row in rows if row.behind), key=lambda row: row.room)
    left = -(-sum(len(row.behind) for row in some) // max(1, some[0].room)) if some else 0
    for row in some:
        count = min(left, len(row.behind))
        row.bring(count)
        left -= count
