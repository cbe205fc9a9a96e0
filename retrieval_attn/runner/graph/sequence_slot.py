"""One cache that decodes as a CUDA graph: its windows and states are rows of shared buffers.

All facts of a sequence are data in memory: window positions, lengths, host search. Attaching and detaching copy its
windows and need no capture. A cache of several sequences has a row for each.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.window import TensorCopies, WindowCache
from retrieval_attn.index.task import tasks as words
from retrieval_attn.offload.build import event_now
from retrieval_attn.offload.int8_rows import AwaitedRows
from retrieval_attn.offload.staging import bringing
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.runner.graph.decoder import attending
from retrieval_attn.runner.graph.host import code_shape, held_by
from retrieval_attn.runner.graph.pages import prefix_of
from retrieval_attn.runner.graph.slot import Buffers, LayerSlot, fits_buffers, slot_buffers, window_of
from retrieval_attn.runner.graph.states import SlotStates, StateBuffers, Views

log = logging.getLogger(__name__)


class WindowsGrownError(CaptureError):
    """The windows of a cache are longer than the buffers of its slot now; longer buffers can go on."""


class GroupBuffers(NamedTuple):
    """Buffers of all slots. windows: of each attention layer. states: of layers with a state."""

    windows: Sequence[Buffers]
    states: StateBuffers

    @property
    def windows_nbytes(self) -> int:
        """Bytes of the window buffers."""
        return sum(key.nbytes + value.nbytes for key, value in self.windows)

    def rows(self, start: int, stop: int) -> GroupBuffers:
        """Return views of slots [start, stop)."""
        windows = [(key[start:stop], value[start:stop]) for key, value in self.windows]
        return GroupBuffers(windows, self.states.rows(start, stop))


def new_buffers(like: RetrievalCache, most: int, undo_steps: int) -> GroupBuffers:
    """Allocate window and state buffers of `most` slots for caches like this one. Raises torch.OutOfMemoryError.

    undo_steps: launched steps whose states can be undone.
    """
    windows = [slot_buffers(layer, most) for _, layer in attending(like)]
    return GroupBuffers(windows, StateBuffers.of(like, most, undo_steps))


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


def note_host_work(stats: LayerStats, work: Sequence[float], nanoseconds: float) -> None:
    """Add what the host's part of a layer's steps cost. work: METER_WORDS numbers."""
    search, attend = work[words.SEARCH_TIME], work[words.ATTEND_TIME]
    seconds, share = nanoseconds / 1e9, search / max(1, search + attend)
    stats.host_seconds += seconds
    stats.search_seconds += seconds * share
    stats.attend_seconds += seconds * (1 - share)
    stats.keys_scanned += round(work[words.SCANNED])
    stats.bytes_read += round(work[words.BYTES])


class StepClock:
    """Measures parts of a step for the thread that runs it.

    Attributes:
        host: seconds in which the host searched and attended.
        device: seconds of forwards and graph replays, `host` included. A device computes its part of a layer while
            the host works, so `host` is an upper bound of the time that the device waited.
    """

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def take(self) -> tuple[float, float]:
        """Return `host` and `device`, and reset both to 0."""
        shown = self.host, self.device
        self.host = self.device = 0.0
        return shown


class GraphSlot:
    """Slot of one cache in the graphs. Implements `GraphHook` of `attention/layer.py`; the cache is a weak reference.

    Attributes:
        width: number of sequences of the cache.
        place: first row of the buffers; -1 before `attach`.
        room: tokens until some window is full.
        stale: whether the cache was changed elsewhere, so that `attach` must precede the next step.
        retrieves: whether there are keys between sinks and window.
        padded: whether a window has padding.
        coded_keys: largest number of keys that the device searches by codes in a layer.
        awaited: int8 rows that threads make for it.
        behind: layers whose evicted block is not on the host yet, see `copy_ahead`.
    """

    def __init__(
        self,
        cache: RetrievalCache,
        costs: StepCosts,
        confirmed: Callable[[int, range], Views],
        gone: Callable[[Any], None] | None,
    ) -> None:
        """Args:
        costs: host work of the steps.
        confirmed: returns the states of a layer in some rows of the buffers, see `DecodeGraph.confirmed_states`.
        gone: called from any thread once the cache is collected.
        """
        self._cache, self.width, self._confirmed = weakref.ref(cache, gone), len(cache.batch.sequences), confirmed
        self._costs, self._paid = costs, (costs.work.copy(), costs.nanoseconds.copy())
        self._slots: dict[int, Sequence[LayerSlot]] = {}  # in use, by the tokens of a step
        self._views: Sequence[Buffers] = []
        self._states = SlotStates()
        self._spans = np.zeros((len(attending(cache)), 2), np.int32)
        self._unsynced = 0
        self.behind: list[int] = []
        self.awaited = AwaitedRows()
        self._moved: torch.cuda.Event | None = None  # windows are where they are since
        self.place, self.room, self.stale, self.coded_keys = -1, 0, True, 0
        self.retrieves = self.padded = False

    @property
    def cache(self) -> RetrievalCache | None:
        """The cache of the sequence; None once it is collected."""
        return self._cache()

    @property
    def places(self) -> range:
        """Rows of the buffers, one for each sequence."""
        return range(self.place, self.place + self.width)

    @property
    def block_room(self) -> int:
        """New tokens that one step may append now: up to the window's and the model's end. 0 before `attach`."""
        cache = self._cache()
        if cache is None or self.stale:
            return 0
        positions = cache.max_positions
        if positions is None:
            return self.room
        return min(self.room, positions - cache.get_seq_length() + cache.batch.forgotten.tokens)

    @property
    def layers(self) -> list[Any]:
        """Attention layers of the cache."""
        cache = self._cache()
        return [] if cache is None else [layer for _, layer in attending(cache)]

    @property
    def prefix(self) -> PagedPrefix | None:
        """KV of each sequence in shared pages; None: none."""
        cache = self._cache()
        return None if cache is None else prefix_of(cache)

    @property
    def paths(self) -> list[SequenceKV]:
        """Paths of the sequences in all layers that retrieve."""
        return [host for layer in self.layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]

    @property
    def windows(self) -> list[WindowCache]:
        """Window of each attention layer."""
        return [window_of(layer) for layer in self.layers]

    @property
    def spans(self) -> np.ndarray[Any, Any]:
        """Used positions of the windows, int32 (layers, 2)."""
        spans = self._spans.copy()
        spans[:, 1] += self._unsynced
        return spans

    def attach(self, buffers: GroupBuffers, place: int) -> None:
        """Move windows, with room for one token, and states to rows of the buffers from `place` on.

        Raises CaptureError, also if a source of a layer's keys cannot be captured (`AttentionSource.capturable`).
        """
        for layer in self.layers:
            layer.require_capturable()
        cache = self._cache()
        if self.place >= 0:
            self.sync()
        moved = place != self.place
        if moved:
            self.add_tail()
            self._views = buffers.rows(place, place + self.width).windows
            self.place, self._slots = place, {}  # what others left at the new place is not of this row
        if cache is not None:
            places = self.places
            self._states.attach(
                cache, buffers.states, places, lambda number: self._confirmed(number, places), moved=moved
            )
        later = TensorCopies()
        try:
            for layer, view in zip(self.layers, self._views, strict=True):
                layer.finish_index()
                layer.graph = self
                if window_of(layer).span[1] >= view[0].shape[2]:
                    layer.spill()
                self._bind_window(layer, view, later)
                if window_of(layer).room == 0:
                    later.run()
                    layer.spill()
                    self._bind_window(layer, view, later)
        finally:
            later.run()
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

    def use(self, slots: Sequence[LayerSlot], tokens: int = 1) -> None:
        """Let the host steps of these layer slots estimate the tail of this sequence in steps of `tokens` tokens."""
        before = self._slots.get(tokens)
        if before is slots:
            return
        if before is not None:
            self.add_tail()
        self._slots[tokens] = slots
        if tallies := [tally for _, tally in self._tallies(tokens)]:
            torch._foreach_zero_(tallies)

    def commit(self, count: int = 1) -> None:
        """Count tokens of a completed step."""
        cache = self._cache()
        if cache is not None:
            cache.batch.commit(count)
        self.room -= count
        self._unsynced += count

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
        self.place, self._views, self._slots, self.behind = -1, [], {}, []

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

    def add_tail(self) -> None:
        """Add the tail mass estimated by replays to the layers' `tail`. Waits for the device."""
        tallies = self._tallies()
        if not tallies:
            return
        found = torch.cat([tally.flatten() for _, tally in tallies]).cpu()
        torch._foreach_zero_([tally for _, tally in tallies])
        parts = found.split([tally.numel() for _, tally in tallies])
        for (layer, tally), own in zip(tallies, parts, strict=True):
            retrieved = any(stop > start for start, stop in held_by(layer).ranges)
            if retrieved and all(host.clusters is not None for host in layer.hosts):
                sums = own.view(tally.shape).sum(dim=0)
                layer.tail.add_sums(sums[:, 0], round(float(sums[0, 1])))

    def _tallies(self, tokens: int | None = None) -> list[tuple[RetrievalLayer, Tensor]]:
        """Return the estimate buffers of each sequence with their layers. tokens: of their steps; None: of any."""
        return [
            (layer, host.tally_of(places))
            for count, slots in self._slots.items()
            if tokens in (None, count)
            for slot, layer in zip(slots, self.layers, strict=False)
            if layer.window is not None
            for host in slot.hosts
            if (places := host.places_in(self.place * count, self.places.stop * count))
        ]

    def _bind_window(self, layer: Any, view: Buffers, later: TensorCopies | None = None) -> None:
        """Move a layer's window to `view`. Raises WindowsGrownError if it needs longer buffers.

        later: see `WindowCache.use`.
        """
        window = window_of(layer)
        if window.buffers[0] is view[0]:
            return
        grown = isinstance(layer, RetrievalLayer) and window.slots > view[0].shape[2]
        needed = window.slots if grown else window.span[1]
        if needed > view[0].shape[2]:
            raise WindowsGrownError(
                f"a window of {needed} tokens needs a row of as many, got a row of {view[0].shape[2]} tokens"
            )
        window.use(*view, later=later)

    def _spill(self, *, flush: bool = True) -> None:
        """Evict the oldest block of each full window to the host. flush: see `LayerKV.spill`."""
        full = [layer for layer in self.layers if layer.window is not None and layer.window.room == 0]
        if full:
            self.add_tail()  # what was estimated until now is of a row that may not have retrieved
        for layer in full:
            if isinstance(layer, RetrievalLayer):
                layer.spill(flush=flush)
            else:
                layer.spill()

    def _look(self) -> None:
        """Store the positions of the windows."""
        layers = self.layers
        self._spans = np.array([layer.window.span for layer in layers], np.int32).reshape(len(layers), 2)
        self.room = min((layer.window.room for layer in layers), default=0)
        held = [(layer, held_by(layer)) for layer in layers if isinstance(layer, RetrievalLayer)]
        self.retrieves = any(one.retrieves for _, one in held)
        self.padded = any(layer.window.valid is not None for layer in layers)
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
