"""One sequence of a batch that decodes as a CUDA graph: its windows and states are rows of shared buffers.

All facts of a sequence are data in memory: window positions, lengths, host search. Attaching and detaching copy its
windows and need no capture.
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
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.index.task import descriptor as words
from retrieval_attn.offload.build import event_now
from retrieval_attn.offload.int8_rows import AwaitedRows
from retrieval_attn.offload.staging import bringing
from retrieval_attn.runner.graph.binding import note_host_work
from retrieval_attn.runner.graph.decoder import attending, keeping_state
from retrieval_attn.runner.graph.host import code_shape, held_by
from retrieval_attn.runner.graph.memory import ordinary_tensors
from retrieval_attn.runner.graph.pages import prefix_of
from retrieval_attn.runner.graph.slot import Buffers, LayerSlot, fits_buffers, slot_buffers, window_of
from retrieval_attn.runner.graph.states import GraphState, Views

__all__ = ["BatchStates", "GraphSlot", "GroupBuffers", "RowStates", "StateBuffers", "StepCosts", "copy_ahead_share"]

log = logging.getLogger(__name__)


class StateBuffers(NamedTuple):
    """Linear-attention and convolution states of all slots, layer by layer, each (slots, ...).

    current: after the last replay. kept: before it, so that one step can be undone.
    """

    current: Items[Views]
    kept: Items[Views]

    @classmethod
    def of(cls, like: RetrievalCache, places: int) -> StateBuffers:
        """Allocate zeros shaped like the states of a cache of one sequence. Raises torch.OutOfMemoryError."""
        layers = [dict(layer.states()) for _, layer in keeping_state(like)]
        current, kept = (
            [{key: state.new_zeros(places, *state.shape[1:]) for key, state in one.items()} for one in layers]
            for _ in range(2)
        )
        return cls(current, kept)

    def fits(self, like: RetrievalCache) -> bool:
        """Return whether the states of a cache have the shapes of rows of these buffers."""
        return [{key: _row_shape(one) for key, one in layer.items()} for layer in self.current] == [
            {key: _row_shape(one) for key, one in layer.states()} for _, layer in keeping_state(like)
        ]

    def rows(self, start: int, stop: int) -> StateBuffers:
        """Return views of slots [start, stop)."""
        current, kept = (
            [{key: buffer[start:stop] for key, buffer in one.items()} for one in both]
            for both in (self.current, self.kept)
        )
        return StateBuffers(current, kept)


def _row_shape(state: torch.Tensor) -> tuple[Any, ...]:
    return state.shape[1:], state.dtype, state.device


class BatchStates:
    """States that the graphs of one batch size advance in place. Implements `StepStates` of `runner/graph/states.py`.

    layers: states of each layer, views of the buffers. confirmed: committed steps. One step can be undone, by the copy
    that a replay makes first.
    """

    def __init__(self, buffers: StateBuffers, device: torch.device, runtime: Runtime) -> None:
        """buffers: states of the slots of this batch size."""
        self.layers, self.confirmed, self._runtime = buffers.current, 0, runtime
        self._launched = torch.zeros(1, dtype=torch.int64, device=device)
        self._current, self._kept = ([one for layer in both for one in layer.values()] for both in buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of their copy."""
        return sum(one.numel() * one.element_size() for one in (*self._current, *self._kept))

    def begin_step(self) -> None:
        """Record: copy the states before the step and count it."""
        if self._current:
            torch._foreach_copy_(self._kept, self._current)
            self._launched.add_(1)

    def undo(self, keep: int = 0) -> None:
        """Restore the states before a step that is not committed, if there is one. keep: 0. Waits for the device."""
        assert keep == 0, "a batch has one step under way"
        if self._is_ahead():
            torch._foreach_copy_(self._current, self._kept)
            self._launched.fill_(self.confirmed)

    def confirmed_views(self, number: int) -> Views:
        """Return the states of a layer after the last committed step. `undo` precedes every call."""
        return self.layers[number]

    def bind(self, like: RetrievalCache) -> list[GraphState]:
        """Make layers like the state layers of `like` over these buffers."""
        return [
            GraphState(self, number, row, _layer_over(layer, self.layers[row]))
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
    """States of one slot. The cache's layers use views of them until `detach`."""

    def __init__(self) -> None:
        self._views: Items[Views] = ()

    def attach(self, cache: RetrievalCache, buffers: StateBuffers, place: int, *, moved: bool) -> None:
        """Copy the states of a cache to a slot. moved: the slot differs from the last one."""
        if moved:
            self._views = buffers.rows(place, place + 1).current
        for (_, layer), views in zip(keeping_state(cache), self._views, strict=True):
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is not view:
                    view.copy_(states[number])
                    states[number] = view

    @ordinary_tensors
    def detach(self, cache: RetrievalCache) -> None:
        """Give the cache copies of its states."""
        for (_, layer), views in zip(keeping_state(cache), self._views, strict=False):
            for (name, number), view in views.items():
                states = getattr(layer, name)
                if states[number] is view:
                    states[number] = view.clone()
        self._views = ()


def _layer_over(like: StateLayer, views: Views) -> StateLayer:
    """Make a layer like `like` with these states."""
    layer = StateLayer(like.number_of_states)
    plain = {name: value for name, value in vars(like).items() if name not in ("graph", "number_of_states")}
    vars(layer).update({name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()})
    for (name, number), view in views.items():
        getattr(layer, name)[number] = view
    return layer


class GroupBuffers(NamedTuple):
    """Buffers of all slots. windows: of each attention layer. states: of layers with a state."""

    windows: Sequence[Buffers]
    states: StateBuffers

    def rows(self, start: int, stop: int) -> GroupBuffers:
        """Return views of slots [start, stop)."""
        windows = [(key[start:stop], value[start:stop]) for key, value in self.windows]
        return GroupBuffers(windows, self.states.rows(start, stop))


def new_buffers(like: RetrievalCache, most: int) -> GroupBuffers:
    """Allocate window and state buffers of `most` slots for caches like this one. Raises torch.OutOfMemoryError."""
    windows = [slot_buffers(layer, most) for _, layer in attending(like)]
    return GroupBuffers(windows, StateBuffers.of(like, most))


def fit_buffers(like: RetrievalCache, buffers: GroupBuffers) -> bool:
    """Return whether caches like this one have the shapes of these buffers."""
    layers = attending(like)
    return (
        len(layers) == len(buffers.windows)
        and all(fits_buffers(layer, own) for (_, layer), own in zip(layers, buffers.windows, strict=True))
        and buffers.states.fits(like)
    )


class StepCosts:
    """Host work and nanoseconds by layer, float64, of a sequence that took part in all steps.

    The work of a step counts in equal shares for the sequences that retrieve.
    """

    def __init__(self, layers: int) -> None:
        self.work, self.nanoseconds = np.zeros((layers, words.METER_WORDS)), np.zeros(layers)

    def add(self, work: np.ndarray[Any, Any], nanoseconds: np.ndarray[Any, Any], rows: int) -> None:
        """Add a step. work, nanoseconds: of `StepMemory.host_meters`. rows: sequences that retrieved."""
        self.work += work / rows
        self.nanoseconds += nanoseconds / rows


class GraphSlot:
    """Slot of one sequence in the batch graphs. Implements `GraphHook` of `attention/layer.py`; the cache is a weak
    reference.

    Attributes:
        place: row of the buffers; -1 before `attach`.
        room: tokens until some window is full.
        stale: whether the cache was changed elsewhere, so that `attach` must precede the next step.
        retrieves: whether there are keys between sinks and window.
        coded_keys: largest number of keys that the device searches by codes in a layer.
        awaited: int8 rows that threads make for it.
        behind: layers whose evicted block is not on the host yet, see `copy_ahead`.
    """

    recording = False

    def __init__(self, cache: RetrievalCache, costs: StepCosts, gone: Callable[[Any], None]) -> None:
        """costs: host work of the steps. gone: called from any thread once the cache is collected."""
        self._cache = weakref.ref(cache, gone)
        self._costs, self._paid = costs, (costs.work.copy(), costs.nanoseconds.copy())
        self._slots: Sequence[LayerSlot] = ()
        self._views: Sequence[Buffers] = []
        self._states = RowStates()
        self._spans = np.zeros((len(attending(cache)), 2), np.int32)
        self._unsynced = 0
        self.behind: list[int] = []
        self.awaited = AwaitedRows()
        self._moved: torch.cuda.Event | None = None  # windows are where they are since
        self.place, self.room, self.stale, self.retrieves, self.coded_keys = -1, 0, True, False, 0

    @property
    def cache(self) -> RetrievalCache | None:
        """The cache of the sequence; None once it is collected."""
        return self._cache()

    @property
    def layers(self) -> list[Any]:
        """Attention layers of the cache."""
        cache = self._cache()
        return [] if cache is None else [layer for _, layer in attending(cache)]

    @property
    def prefix(self) -> PagedPrefix | None:
        """KV of the sequence in shared pages; None: none."""
        cache = self._cache()
        return None if cache is None else prefix_of(cache)

    @property
    def paths(self) -> list[SequenceKV]:
        """Paths of the sequence in all layers that retrieve."""
        return [host for layer in self.layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]

    @property
    def spans(self) -> np.ndarray[Any, Any]:
        """Used positions of the windows, int32 (layers, 2)."""
        spans = self._spans.copy()
        spans[:, 1] += self._unsynced
        return spans

    def attach(self, buffers: GroupBuffers, place: int) -> None:
        """Move windows, with room for one token, and states to a row of the buffers. Raises CaptureError."""
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
            self._bind_window(layer, view)
            if window_of(layer).room == 0:
                layer.spill()
                self._bind_window(layer, view)
        self._look()
        self.stale = False

    def evict_block(self) -> None:
        """Evict the oldest block of each full window, as eager decoding does.

        Tokens that are not on the host yet are copied now; those of the next block by `copy_ahead`.
        """
        self.sync()
        self._spill(flush=False)
        layers = self.layers
        for layer, view in zip(layers, self._views, strict=True):
            self._bind_window(layer, view)
        self._look()
        self.behind = [number for number, layer in enumerate(layers) if isinstance(layer, RetrievalLayer)]
        self._moved = event_now(self._views[0][0].device)

    def copy_ahead(self, layers: int) -> None:
        """Copy tokens of the next block to the host in `layers` further layers, while a step replays.

        Errors are logged and raised when the tokens are needed.
        """
        own = self.layers
        some, self.behind = self.behind[:layers], self.behind[layers:]
        try:
            with bringing(self._views[0][0].device, self._moved):
                for number in some if own else ():
                    held_by(own[number]).prepare_spill()
        except Exception as error:
            log.debug("tokens were not copied ahead of time: %s", error)
            self.behind = []

    def use(self, slots: Sequence[LayerSlot]) -> None:
        """Let the host steps of these layer slots estimate the tail of this sequence from now on."""
        if slots is not self._slots:
            self.add_tail()
            self._slots = slots
            self._forget_tail()

    def commit(self) -> None:
        """Count the token of a completed step."""
        cache = self._cache()
        if cache is not None:
            cache.batch.commit(1)
        self.room -= 1
        self._unsynced += 1

    def detach(self) -> None:
        """Give the cache its committed tokens and windows of its own."""
        self.sync()
        self.add_tail()
        self._spill()
        for layer, view in zip(self.layers, self._views, strict=False):
            layer.graph = None
            if layer.window is not None and layer.window.buffers[0] is view[0]:
                layer.window.own()
        cache = self._cache()
        if cache is not None:
            self._states.detach(cache)
        self.place, self._views, self._slots, self.behind = -1, [], (), []

    # -- GraphHook -----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Add the tokens of replays to the cache's windows, and the host's work to its layers."""
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
        """Note that the cache is changed elsewhere: `sync` now and `attach` before the next step."""
        self.sync()
        if not self.stale:
            self.stale = True
            self._spill()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Raise CaptureError: the layers of the batch are recorded (`runner/decode_graph.py`), not those of a cache."""
        raise CaptureError("the layers of a batch are captured together, not the layer of one row")

    def add_tail(self) -> None:
        """Add the tail mass estimated by replays to the layers' `tail`. Waits for the device."""
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
        """Return the estimate buffers of this sequence with their layers."""
        return [
            (layer, host.tally_of(self.place))
            for slot, layer in zip(self._slots, self.layers, strict=False)
            for host in slot.hosts
            if host.rows.start <= self.place < host.rows.stop
        ]

    def _bind_window(self, layer: Any, view: Buffers) -> None:
        """Move a layer's window to `view`. Raises CaptureError if it does not fit."""
        window = window_of(layer)
        if window.buffers[0] is view[0]:
            return
        if window.span[1] > view[0].shape[2]:
            raise CaptureError(
                f"a window of {window.span[1]} tokens needs a row of as many, got a row of {view[0].shape[2]} tokens"
            )
        window.use(*view)

    def _spill(self, *, flush: bool = True) -> None:
        """Evict the oldest block of each full window to the host. flush: see `LayerKV.spill`."""
        if any(layer.window.room == 0 for layer in self.layers):
            self.add_tail()  # what was estimated until now is of a row that may not have retrieved
            for layer in self.layers:
                if layer.window.room == 0 and isinstance(layer, RetrievalLayer):
                    layer.spill(flush=flush)
                elif layer.window.room == 0:
                    layer.spill()

    def _look(self) -> None:
        """Store the positions of the windows."""
        layers = self.layers
        self._spans = np.array([layer.window.span for layer in layers], np.int32).reshape(len(layers), 2)
        self.room = min((layer.window.room for layer in layers), default=0)
        held = [(layer, held_by(layer)) for layer in layers if isinstance(layer, RetrievalLayer)]
        self.retrieves = any(one.retrieves for _, one in held)
        coded = [one for layer, one in held if code_shape(layer, one.window.buffers[0].shape[3]) is not None]
        self.coded_keys = max((stop - start for one in coded for start, stop in one.ranges), default=0)


def copy_ahead_share(rows: Iterable[GraphSlot]) -> None:
    """Copy a share of the next blocks to the host, so that all of it is there before the next window is full."""
    some = sorted((row for row in rows if row.behind), key=lambda row: row.room)
    left = -(-sum(len(row.behind) for row in some) // max(1, some[0].room)) if some else 0
    for row in some:
        count = min(left, len(row.behind))
        row.copy_ahead(count)
        left -= count
