"""CUDA graphs of decode steps for caches of one shape: one cache, or a batch whose sequences come and go.

There is a graph for 1, 2, 4, ... sequences; a step uses the smallest one with enough slots. All graphs share the window
buffers. A slot has constant size and holds everything that a sequence has on the device except codes of its keys, so
admission by slots is exact. Attaching and detaching copy windows, and need no capture: a captured graph outlives the
context, fork or request that it was captured for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.gpu.codes.search import size_class
from retrieval_attn.model.placement import input_device
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.drafts import BlockPlans
from retrieval_attn.runner.graph.decode_graph import ALONE, BATCHED, DecodeGraph, StepOptions
from retrieval_attn.runner.graph.decoder import StepKind, attending
from retrieval_attn.runner.graph.host import HostResources, code_shape
from retrieval_attn.runner.graph.pages import levels_for, prefix_of
from retrieval_attn.runner.graph.sequence_slot import GraphSlot, GroupBuffers, StepClock, StepCosts, new_buffers
from retrieval_attn.runner.graph.signature import refusal_of, signature
from retrieval_attn.runner.graph.slot import ordinary_tensors, window_of
from retrieval_attn.runner.graph.states import Views
from retrieval_attn.sampling.sampler import SampledToken
from retrieval_attn.sampling.sampling_params import SamplingParams

log = logging.getLogger(__name__)

SHRINK_AFTER = 32
"""Steps for which a smaller graph must suffice before it is used, because batch sizes fluctuate."""


def exhaust(layers: Iterator[None]) -> None:
    """Plan all layers at once, see `DecodeGraph.take`."""
    for _ in layers:
        pass


class BlockGraphs(BlockPlans):
    """Graphs of one cache whose steps have several new tokens.

    graphs: by the number of tokens. launched: the last one that was launched; None: a step of one token was. refused:
    whether one could not be captured or lacked memory, so that none is launched until the pool is cleared; after a
    failed capture none is launched then either. kind: that the sequence needs. captures: whether drafts may wait for a
    capture, about a second each; else only those that were captured ahead are ready. delay: seconds in which steps
    waited for plans, since `take_delay`.
    """

    def __init__(self) -> None:
        self.kind, self.captures = StepKind(False, False, 0), True
        self.graphs: dict[int, DecodeGraph] = {}
        self.launched: DecodeGraph | None = None
        self.refused, self.delay = False, 0.0
        self._unplanned: set[int] = set()  # numbers of tokens
        self._wanted: tuple[int, float] | None = None  # tokens of the step that is planned while others run, seconds
        self._layers: Iterator[None] | None = None  # of that step, from the next one to be planned on

    def is_ready(self, tokens: int) -> bool:
        """See `BlockPlans`. With `captures`, a step that is not captured yet is planned as it is captured."""
        if tokens in self._unplanned:
            return False
        return self.captures or (tokens in self.graphs and self.graphs[tokens].is_captured)

    def plan_later(self, tokens: int, seconds: float) -> None:
        """See `BlockPlans`, by `plan`. A plan that was begun is completed first; what has no graph is not planned."""
        if self._wanted is not None and self._layers is not None:
            tokens = self._wanted[0]
        if tokens in self._unplanned:
            self._wanted = tokens, seconds

    @ordinary_tensors
    def plan(self, rows: Sequence[GraphSlot], is_over: bool) -> None:
        """Plan some layers of the wanted step, after the launch of another step of these sequences.

        is_over: whether the launched step needed the host and has ended, so that the plan delays the next step.
        """
        if self._wanted is None or len(rows) != 1:
            return
        (count, seconds), began = self._wanted, time.perf_counter()
        try:
            if self._layers is None:
                self._layers = self.graphs[count].take(rows, self.kind, range(count))
            for _ in self._layers:
                if time.perf_counter() >= began + seconds:
                    return
            self._unplanned.discard(count)
            self._wanted = self._layers = None
        except Exception as error:  # the step itself did not fail
            self.refuse(count, error)
        except BaseException:
            self._wanted = self._layers = None
            raise
        finally:
            self.delay += (time.perf_counter() - began) * is_over

    def take_delay(self) -> float:
        """Return `delay`, which begins at 0 again."""
        delay, self.delay = self.delay, 0.0
        return delay

    def refuse(self, tokens: int, error: Exception) -> None:
        """Launch no more blocks, because one of `tokens` tokens failed."""
        log.warning("no more drafts: steps of %d tokens cannot be captured: %s", tokens, error)
        self.refused, self._wanted, self._layers = True, None, None

    def invalidate(self) -> None:
        """Plan each again before its next launch: the sequence changed."""
        self._unplanned = set(self.graphs)
        self._wanted = self._layers = None

    def launch(self, make: Callable[[], DecodeGraph], row: GraphSlot, tokens: Tensor, positions: Tensor) -> Tensor:
        """Launch a step, as `DecodeGraph.launch`. make: makes the graph of that many tokens, without a plan."""
        count = len(tokens)
        if count not in self.graphs:
            self.graphs[count] = make()
            self._unplanned.add(count)
        graph = self.graphs[count]
        if count in self._unplanned:
            exhaust(graph.take([row], self.kind, range(count)))
            self._unplanned.discard(count)
        graph.undo()  # its windows grew without it
        self.launched = graph
        logits = graph.launch(tokens, positions)
        self.plan([row], graph.kind.needs_host)
        return logits

    @property
    def capture_failed(self) -> bool:
        """Whether a graph cannot be captured, whatever memory there is."""
        return any(graph.decoder.capture_failure is not None for graph in self.graphs.values())

    def is_captured(self, count: int) -> bool:
        """Return whether the graph of `count` tokens is planned and captured."""
        return count in self.graphs and count not in self._unplanned and self.graphs[count].is_captured

    def have_captured(self, kind: StepKind) -> bool:
        """Return whether there are graphs, all of them captured for steps of this kind."""
        return bool(self.graphs) and all(kind in graph.decoder.graphs for graph in self.graphs.values())

    def forget(self) -> None:
        """Drop the host search plans."""
        for graph in self.graphs.values():
            graph.forget()
        self.invalidate()
        self.launched = None


class GraphPool:
    """Graphs of all batch sizes for caches of one shape, and their slots. The model is a weak reference.

    An engine's batch runs by `arrange` and `replay`, one step at a time or overlapped. One cache runs by `launch`,
    `launch_ahead` and `confirm`, up to two steps in flight, or by `launch_block`, `confirm` and `commit_drafts`.

    Attributes:
        key: what all caches have in common.
        buffers: window and state buffers of all slots.
        graphs: graphs by batch size.
        blocks: graphs of steps of several tokens, see `launch_block`.
        rows: slots by the id of the cache.
        pages: memory of paged prefixes; None: no sequence has had any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: RetrievalCache,
        runtime: Runtime,
        most: int,
        buffers: GroupBuffers,
        *,
        key: Hashable = (),
        options: StepOptions = BATCHED,
    ) -> None:
        """Args:
        like: a cache with the shape.
        most: largest batch size.
        buffers: of `new_buffers`.
        key: what all caches have in common.
        options: how steps are captured and launched.
        """
        self._model, self._prefill_chunk, self._runtime = weakref.ref(model), like.config.prefill_chunk, runtime
        self.key, self._options = key, options
        self.buffers = buffers
        self.graphs: dict[int, DecodeGraph] = {}
        self.blocks = BlockGraphs()
        self.blocks.captures = like.config.drafts is True
        self.rows: dict[int, GraphSlot] = {}
        self._most, self._resources = most, HostResources(runtime, default_pool())
        self._costs = StepCosts(len(attending(like)))
        self._graph: DecodeGraph | None = None
        self._changed: set[int] = set()
        self._smaller = 0  # steps in a row that a smaller graph would have served
        self._max_coded_keys, self._levels = 0, 0
        self.pages: PagedLayers | None = None

    def arrange(
        self, caches: Sequence[RetrievalCache], gone: Callable[[int], Callable[[Any], None] | None], tokens: int = 0
    ) -> dict[int, Exception]:
        """Assign caches to graph slots; detach absent ones and evict full windows.

        Args:
            caches: all sequences of the next step.
            gone: makes the callback for a cache, by its id, that runs once it is collected.
            tokens: length of the longest expected sequence.

        Returns the errors of caches without a slot, by their number. Raises CaptureError if they cannot share a graph.
        """
        self.detach_absent(caches)
        problems: dict[int, Exception] = {}
        joining: list[tuple[int, RetrievalCache]] = []
        for number, cache in enumerate(caches):
            row = self.rows.get(id(cache))
            if row is None:
                joining.append((number, cache))
            elif row.room == 0 and not row.stale:
                self._changed.update(row.places)
                self._try(number, id(cache), row.evict_block, problems)
        room = self._most - self._width
        problems.update(
            (number, CaptureError(f"all {self._most} slots of the graph are in use")) for number, _ in joining[room:]
        )
        joining = joining[:room]
        coming = [GraphSlot(cache, self._costs, self._confirmed, gone(id(cache))) for _, cache in joining]
        graph = self._select_graph(self._width + sum(row.width for row in coming), caches[0])
        for (number, cache), row in zip(joining, coming, strict=True):
            self.rows[id(cache)] = row
            place = self._free_place(graph.size, row.width)
            self._try(number, id(cache), functools.partial(row.attach, self.buffers, place), problems)
            self._changed.update(range(place, place + row.width))
        for number, cache in enumerate(caches):
            row = self.rows.get(id(cache))
            if row is not None and row.stale:
                self._changed.update(row.places)
                self._try(number, id(cache), functools.partial(row.attach, self.buffers, row.place), problems)
        for row in self.rows.values():
            if row.awaited.are_complete:
                self._changed.update(row.places)
        self._plan(graph, tokens)
        return problems

    def misfits(
        self, caches: Sequence[RetrievalCache], gone: Callable[[int], Callable[[Any], None]]
    ) -> dict[int, Exception]:
        """Return the errors of caches, by their number, that fit no graph even alone."""
        found: dict[int, Exception] = {}
        for number, cache in enumerate(caches):
            try:
                found.update((number, problem) for problem in self.arrange([cache], gone).values())
            except CaptureError as error:
                found[number] = error
        return found

    def replay(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None = None,
        launched: Callable[[], None] | None = None,
        clock: StepClock | None = None,
        *,
        overlap: bool = False,
    ) -> tuple[dict[int, SampledToken | None], Tensor | None]:
        """Append one token to each cache, all of which `arrange` accepted.

        Args:
            caches: all sequences.
            inputs: token and position of each.
            draws: sampling parameters of each; None for a sequence, or for all: not sampled.
            launched: callback, see `Replay`.
            clock: gets the seconds of the step.
            overlap: launch the next step early, because the same sequences likely follow; only if all are sampled.

        Returns the sampled tokens by number (None: logits are not finite), and logits (rows, vocabulary) float32 of
        sequences that were not sampled, in order; None if there are none.

        Raises:
            CaptureError: no graph can be captured.
            BackendError: host or exchange failed. No token was appended.
        """
        graph, self.blocks.launched = self._graph, None
        assert graph is not None
        places = [self.rows[id(cache)].place for cache in caches]
        asked = [None] * len(places) if draws is None else draws
        drawn = {number: draw for number, draw in enumerate(asked) if draw is not None}
        apart = [place for number, place in enumerate(places) if number not in drawn]
        by_place, overlap = {places[number]: draw for number, draw in drawn.items()}, overlap and not apart
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if not graph.is_captured:  # the model itself runs
                stack.enter_context(using_retrieval(self.model, self._prefill_chunk))
            try:
                logits = graph.step(dict(zip(places, inputs, strict=True)), by_place or None, launched, overlap=overlap)
                choices = graph.choices(list(by_place)) if by_place else []
                found = logits[torch.tensor(apart, device=logits.device)] if apart else None
            except BaseException:
                graph.undo()
                raise
        host_seconds = self.confirm()  # at last: what raises before did not happen
        if clock is not None:
            clock.device += time.perf_counter() - began
            clock.host += host_seconds
        if overlap and None not in choices:
            graph.launch_next(by_place)
        return dict(zip(drawn, choices, strict=True)), found

    @ordinary_tensors
    def launch(self, cache: RetrievalCache, token: Tensor, position: Tensor) -> Tensor:
        """Launch the step of one cache, and attach it first if needed. Nothing waits for the device.

        Before the next launch the caller reads something computed from the logits and calls `confirm`.

        Args:
            cache: a cache of the pool's shape. It is attached until `clear`.
            token: token of each sequence, (batch,) int64.
            position: position of each token, (batch,) int64.

        Returns logits (batch, vocabulary) float32, the same memory in every step of a kind.

        Raises:
            CaptureError: the step cannot run as a graph. The cache holds what was confirmed.
            WindowsGrownError: the windows outgrew the buffers: another pool can go on.
            ContextLengthError: the position is beyond the model's last one.
            BackendError: device and host lost each other. The token is not counted.
        """
        cache.require_room(1)
        row = self.rows.get(id(cache))
        if row is not None and row.stale:
            self._require_shape(cache)
        return self._arrange_alone(cache).launch(token, position)

    @ordinary_tensors
    def launch_block(self, cache: RetrievalCache, tokens: Sequence[int], position: int | Tensor) -> Tensor | None:
        """Launch a step of several new tokens of one cache of one sequence. Nothing waits for the device.

        `confirm` counts the first token, `commit_drafts` the accepted drafts, before the next launch.

        Args:
            cache: has `block_room` for the tokens, and no step in flight.
            tokens: the newest token and its drafts.
            position: of the newest token; a tensor is (1,) int64 on the model's device.

        Returns logits (n, vocabulary) float32, the same memory in every block of n tokens; None if it cannot be
        captured or lacks memory, after which there is no room for blocks. Raises as `launch`, but for these two.
        """
        device = input_device(self.model)
        places = position + torch.arange(len(tokens), device=device)
        try:
            cache.require_room(len(tokens))
            self._arrange_alone(cache).undo()  # its windows grow without it
            make = functools.partial(self._new_graph, cache, 1, len(tokens))
            given = torch.tensor(tokens, device=device)
            is_captured = self.blocks.is_captured(len(tokens))  # a capture runs the model itself
            with contextlib.nullcontext() if is_captured else using_retrieval(self.model, self._prefill_chunk):
                return self.blocks.launch(make, self.rows[id(cache)], given, places)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self.blocks.refuse(len(tokens), error)
            return None

    def block_room(self, cache: RetrievalCache) -> int:
        """Return the new tokens that a block of a cache may have now; 0 before its first step in the first slot, and
        if a block could not be captured.
        """
        row = self.rows.get(id(cache))
        return 0 if row is None or row.place or self.blocks.refused else row.block_room

    def commit_drafts(self, cache: RetrievalCache, count: int) -> None:
        """Count `count` drafts of the block that is confirmed."""
        self.rows[id(cache)].commit(count)

    @ordinary_tensors
    def launch_ahead(self) -> bool:
        """Launch the step after the one in flight, see `DecodeGraph.launch_ahead`."""
        return self._graph is not None and self._graph.launch_ahead()

    @property
    def is_ahead(self) -> bool:
        """Whether a step was launched that is not confirmed."""
        return self._graph is not None and bool(self._graph.in_flight)

    @property
    def chosen(self) -> Tensor:
        """Likeliest token (batch,), or of a block (tokens,), after the last step, the same memory at every step."""
        launched = self.blocks.launched or self._graph
        assert launched is not None
        return launched.decoder.memory.chosen

    def confirm(self) -> float:
        """Count the tokens of the oldest step in flight. Returns the seconds of the host's work in it.

        Raises BackendError, with the layer named, if a host search failed or came too late; later steps are lost, too.
        """
        launched = self.blocks.launched or self._graph
        work = None if launched is None else launched.confirm()
        retrieving = 0 if work is None else sum(row.retrieves for row in self.rows.values())
        if work is None or not retrieving:
            return 0.0
        self._costs.add(*work, retrieving)
        return float(work[1].sum()) / 1e9

    def undo(self) -> None:
        """Undo the launched steps that are not confirmed."""
        for graph in (self._graph, self.blocks.launched):
            if graph is not None:
                graph.undo()

    def has_captured(self, cache: RetrievalCache, blocks: bool = False) -> bool:
        """Whether a graph waits for the next step of a cache, if codes cover all tokens that it retrieves from.

        blocks: one for each number of tokens, too.
        """
        expected = _expected_kind(cache)
        served = not blocks or self.blocks.have_captured(expected)
        return served and any(expected in graph.decoder.graphs for graph in self.graphs.values())

    @property
    def capture_failure(self) -> str | None:
        """Why no graph can be captured, once a capture has failed."""
        failures = (graph.decoder.capture_failure for graph in self.graphs.values())
        return next((one for one in failures if one), None)

    @property
    def captures(self) -> int:
        """Number of captures so far."""
        return sum(graph.decoder.captures for graph in (*self.graphs.values(), *self.blocks.graphs.values()))

    def detach_absent(self, caches: Sequence[RetrievalCache]) -> None:
        """Detach all sequences but these."""
        for key in self.rows.keys() - set(map(id, caches)):
            self.detach(key)

    def detach(self, key: int) -> None:
        """Detach a sequence, by the id of its cache."""
        row = self.rows.pop(key)
        if row.place >= 0:
            self._changed.update(row.places)
        row.detach()
        self.blocks.forget()

    def drop_slot(self, key: int) -> None:
        """Drop the slot and search plans of a collected cache."""
        row = self.rows.pop(key, None)
        if row is not None and row.place >= 0 and self._graph is not None:
            self.blocks.forget()
            for place in row.places:
                self._graph.forget(place)
            self._changed.update(row.places)

    def clear(self) -> None:
        """Detach all sequences, with their confirmed tokens; the next step uses the smallest graph that suffices."""
        try:
            self.undo()
        finally:  # also after a second interrupt
            for key in list(self.rows):
                self.detach(key)
            for graph in self.graphs.values():
                graph.forget()
            self._graph, self._smaller = None, 0
            self.blocks.refused = self.blocks.capture_failed  # what lacked memory may have some for the next text

    def _arrange_alone(self, cache: RetrievalCache) -> DecodeGraph:
        """Arrange one cache and return its graph of single tokens, which runs next. Raises as `launch`."""
        problems = self.arrange([cache], lambda _: None)
        if problems:
            raise problems[0]
        assert self._graph is not None
        self.blocks.launched = None
        return self._graph

    def _try(self, number: int, key: int, do: Callable[[], None], problems: dict[int, Exception]) -> None:
        """Call `do` for a sequence and detach it on an error."""
        try:
            do()
        except Exception as error:
            problems[number] = error
            self.detach(key)

    def _select_graph(self, rows: int, like: RetrievalCache) -> DecodeGraph:
        """Return the graph of the next step. Sequences beyond its last slot move."""
        needed = min(self._most, 1 << max(0, rows - 1).bit_length())
        size = 0 if self._graph is None else self._graph.size
        self._smaller = self._smaller + 1 if needed < size else 0
        if size < needed or self._smaller > SHRINK_AFTER:
            size, self._smaller = needed, 0
            if self._graph is not None:
                self._graph.add_tail()
                self._graph.forget()
            for row in self.rows.values():
                if row.place >= size:
                    row.attach(self.buffers, self._free_place(size, row.width))
            if size not in self.graphs:
                self.graphs[size] = self._new_graph(like, size)
            self._graph = self.graphs[size]
            self._changed = set(range(size))
        assert self._graph is not None
        return self._graph

    def _new_graph(self, like: RetrievalCache, size: int, tokens: int = 1) -> DecodeGraph:
        own = self.buffers.rows(0, size)
        alone = () if tokens > 1 else (self.blocks.plan,)
        return DecodeGraph(self.model, like, self._runtime, own, self._resources, self._options, tokens, *alone)

    def _free_place(self, size: int, width: int = 1) -> int:
        """Return free slots, in the half with fewer sequences: host and device work on one half each."""
        taken = {place for row in self.rows.values() if row.place >= 0 for place in row.places}
        free = [place for place in range(size - width + 1) if taken.isdisjoint(range(place, place + width))]
        return max(([place for place in free if (place < size // 2) == first] for first in (True, False)), key=len)[0]

    def _plan(self, graph: DecodeGraph, tokens: int) -> None:
        """Update the sequences of a graph if something changed."""
        rows = list(self.rows.values())
        if not self._changed or not rows:
            return
        retrieves = any(row.retrieves for row in rows)  # short rows alone do not pay for a search
        # never less than before: what a search is recorded for may decide which keys a few more are
        coded = max(row.coded_keys for row in rows)
        self._max_coded_keys = max(self._max_coded_keys, size_class(max(coded, tokens)) if coded else 0)
        levels = levels_for([row.prefix for row in rows])  # steps of rows without pages do not pay for any
        self._levels = max(self._levels, levels)
        padded = any(row.padded for row in rows)
        kind = StepKind(retrieves, padded, self._max_coded_keys if retrieves else 0, self._levels if levels else 0)
        changed, self._changed = {place for place in self._changed if place < graph.size}, set(range(graph.size))
        exhaust(graph.take(rows, kind, changed))
        self._changed = set()
        self.blocks.invalidate()
        self.blocks.kind = kind

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model = self._model()
        assert model is not None, "a step of a model that was collected"
        return model

    @property
    def _width(self) -> int:
        """Occupied slots."""
        return sum(row.width for row in self.rows.values())

    def _confirmed(self, number: int, places: range) -> Views:
        """See `DecodeGraph.confirmed_states`."""
        states = self.buffers.states.rows(places.start, places.stop).current[number]
        return states if self._graph is None else self._graph.confirmed_states(number, places)

    def _require_shape(self, cache: RetrievalCache) -> None:
        """Raise CaptureError if a cache that was changed elsewhere has another shape, or the model other weights."""
        if self.key != signature(self.model, cache, self._runtime):
            raise CaptureError("the shapes of the cache or the weights of the model changed after the capture")


def _expected_kind(cache: RetrievalCache) -> StepKind:
    """Return the expected kind of a cache's next step, if codes cover all tokens that it retrieves from."""
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


KEPT_ALONE = 2
"""Pools that a model keeps for its next cache, each with its window buffers and graphs; the oldest goes."""
LARGE_BYTES = 1 << 30
"""Bytes of window buffers, as index "full" has them, from which only the newest pool is kept."""

_idle: weakref.WeakKeyDictionary[PreTrainedModel, list[GraphPool]] = weakref.WeakKeyDictionary()
_failed: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def waits_for(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime, blocks: bool = False) -> bool:
    """Whether an idle pool has the graph of a cache's next step, as far as is known before it is attached.

    blocks: those of several tokens, too. Raises CaptureError for a cache without tokens.
    """
    key = signature(model, cache, runtime)
    with _lock:
        return any(one.has_captured(cache, blocks) for one in _idle.get(model, ()) if one.key == key)


@ordinary_tensors
def acquire(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> GraphPool:
    """Return an idle pool for one cache, or a new one. End its use by `release`.

    Raises CaptureError with the reason if the cache's step cannot be recorded.
    """
    reason = refusal_of(model, cache)
    if reason is not None:
        raise CaptureError(reason)
    key = signature(model, cache, runtime)
    with _lock:
        reason = _failed.setdefault(model, {}).get(key)
        if reason is not None:
            raise CaptureError(reason)
        idle = _idle.setdefault(model, [])
        pool = next((one for one in idle if one.key == key), None)
        if pool is not None:
            idle.remove(pool)
            pool.blocks.captures = cache.config.drafts is True
            return pool
    rows = len(cache.batch.sequences)
    buffers = new_buffers(cache, rows, ALONE.undo_steps)
    pool = GraphPool(model, cache, runtime, rows, buffers, key=key, options=ALONE)
    prefix = prefix_of(cache)
    pool.pages = None if prefix is None else prefix.layers
    return pool


@ordinary_tensors
def release(model: PreTrainedModel, pool: GraphPool) -> None:
    """Detach the cache of a pool, and keep the pool for the next one; or remember why it could not capture."""
    pool.clear()
    with _lock:
        if pool.capture_failure is not None:
            _failed.setdefault(model, {})[pool.key] = pool.capture_failure
            return
        if pool.pages is not None and pool.pages.retired:
            return
        idle = _idle.setdefault(model, [])
        if pool.buffers.windows_nbytes >= LARGE_BYTES:
            idle[:] = [one for one in idle if one.buffers.windows_nbytes < LARGE_BYTES]
        idle.append(pool)
        del idle[:-KEPT_ALONE]


def retire(model: PreTrainedModel, layers: PagedLayers) -> None:
    """Keep no pool over these pages any more."""
    with _lock:
        layers.retired = True
        idle = _idle.get(model, [])
        idle[:] = [one for one in idle if one.pages is not layers]


def forget(model: PreTrainedModel) -> None:
    """Drop the idle pools of a model, with their buffers and graphs, and the reasons of failed captures."""
    with _lock:
        _idle.pop(model, None)
        _failed.pop(model, None)
