"""CUDA graphs of decode steps for one batch size, over slots that may be empty.

One graph serves any sequences: lengths, code addresses and host searches are read from memory. An empty slot attends to
its own token, and its result is not read.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import has_position
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.capture.exchange import Replay, Runtime
from retrieval_attn.offload.threads import foreground
from retrieval_attn.runner.graph.capture import RecordedCache, RecordedLayer, capture
from retrieval_attn.runner.graph.decoder import CapturedStep, GraphDecoder, StepKind
from retrieval_attn.runner.graph.host import HostResources, HostRow, HostStep, Retrieve, held_by
from retrieval_attn.runner.graph.sequence_slot import GraphSlot, GroupBuffers, copy_ahead_share
from retrieval_attn.runner.graph.slot import Buffers, StepMemory
from retrieval_attn.runner.graph.states import RecordedState, StepStates, Views
from retrieval_attn.sampling.sampler import Chosen, DrawMode, SampledToken, Sampler
from retrieval_attn.sampling.sampling_params import MAX_LOGPROBS, SamplingParams

log = logging.getLogger(__name__)


Inputs = Mapping[int, tuple[int, int]]
"""Token and position of rows, by place."""


class StepTokens(NamedTuple):
    """Token and position of all places, int64 (size,)."""

    token: Tensor
    position: Tensor


Meters = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""See `StepMemory.host_meters`."""
LOGPROBS = (5, MAX_LOGPROBS)
"""Numbers of likeliest tokens that graphs return: rows get the first of these."""


@dataclass(frozen=True)
class StepOptions:
    """How the steps of a batch are captured and launched.

    Attributes:
        greedy: the step writes the likeliest token as the input of the next step. False: a sampler's graph follows it.
        undo_steps: launched steps that can be undone. 2: a step is launched before the step in front of it is
            confirmed, also with recurrent states and with work of the host.
        keep_search_size: record a search for the longest sequence so far, so that shorter ones need no capture. False:
            for the longest sequence of the batch.
    """

    greedy: bool = False
    undo_steps: int = 1
    keep_search_size: bool = True


BATCHED = StepOptions()
"""Sequences that come and go, sampled on the device."""
ALONE = StepOptions(greedy=True, undo_steps=2, keep_search_size=False)
"""One cache, whose caller chooses tokens from logits or takes the likeliest ones."""


class GraphSampling(NamedTuple):
    """A sampling graph, and its result in host memory."""

    replay: Replay
    chosen: Chosen


class GraphSampler:
    """Captures a `Sampler` of one batch size: `prepare`, replay of the step, `launch`, and `choices` after both.

    A separate graph lets sampling parameters change without capturing the step again. It writes tokens to the inputs of
    the next step and to page-locked memory; the next step may be launched before `choices` is read.
    """

    def __init__(self, runtime: Runtime, memory: StepMemory) -> None:
        """memory: step memory of the batch's decoder."""
        self._runtime, self._memory = runtime, memory
        self._sampler = Sampler(len(memory.token), memory.token.device)
        self._params: Mapping[int, SamplingParams] = {}
        self._graphs: dict[tuple[int, DrawMode], list[GraphSampling]] = {}  # take turns
        self._drawing: GraphSampling | None = None

    def prepare(self, params: Mapping[int, SamplingParams], logits: Tensor) -> bool:
        """Set the sampling parameters of the next step by place; other places sample greedily.

        logits: float32 (rows, vocabulary), written by the step. Returns False if a graph was captured, which overwrites
        the inputs of the next step. Raises CaptureError.
        """
        self._sampler.assign(params)
        self._sampler.prepare_masks(logits)
        self._params, mode = params, self._sampler.mode
        if mode.logprobs is not None:
            wanted = min(count for count in LOGPROBS if count >= mode.logprobs)
            mode = mode._replace(logprobs=min(wanted, logits.shape[1]))
        key = logits.data_ptr(), mode
        there = key in self._graphs
        if not there:
            self._graphs[key] = [self._captured(logits, mode) for _ in range(2)]
        drawings = self._graphs[key]
        drawings.reverse()
        self._drawing = drawings[0]
        return there

    def launch(self, early: bool = False) -> GraphSampling | None:
        """Sample after the step of `prepare`. Returns the memory of the result.

        Masks of grammars are copied to the device while the step runs. early: the tokens before are not known; None if
        there are masks, which depend on them.
        """
        assert self._drawing is not None
        if early and self._sampler.mode.masked:
            return None
        self._sampler.upload_masks()
        self._drawing.replay()
        return self._drawing

    def resume(self, step: LaunchedStep, launched: Callable[[], None] | None) -> None:
        """Sample after a step that was launched early, unless that was done. launched: called before."""
        if launched is not None:
            launched()
        if step.drawing is None:
            step.drawing, step.over = self.launch(), self._runtime.mark()

    def choices(self, drawing: GraphSampling, places: Sequence[int]) -> list[SampledToken | None]:
        """Return the sampled token of each place; None if its logits hold NaN or infinity."""
        return drawing.chosen.tokens({place: self._params[place] for place in places})

    def _captured(self, logits: Tensor, mode: DrawMode) -> GraphSampling:
        rows, pinned, count = len(logits), logits.device.type == "cuda", mode.logprobs
        kinds: list[tuple[tuple[int, ...], torch.dtype]] = [((rows,), torch.int64), ((rows,), torch.bool)]
        if count is not None:
            kinds += [((rows,), torch.float32), ((rows, count), torch.int64), ((rows, count), torch.float32)]
        host = Chosen(*(torch.zeros(shape, dtype=dtype, pin_memory=pinned) for shape, dtype in kinds))

        def record() -> None:
            chosen = self._sampler.choose(logits, self._memory.position[:, 0], mode=mode)
            self._memory.token.copy_(chosen.ids[:, None])
            for copy, part in zip(host, chosen, strict=True):
                if copy is not None and part is not None:
                    copy.copy_(part, non_blocking=True)

        self._runtime.warm_up(record)
        return GraphSampling(self._runtime.capture(record), host)


@dataclass
class LaunchedStep:
    """A step that was launched, possibly before it was requested, and is not confirmed.

    Attributes:
        inputs: token and position by place; empty if the device has them.
        draws: sampling parameters by place.
        kind: kind of the graph.
        graph: the launched graph.
        drawing: memory of the sampled tokens; None while nothing samples them.
        over: marks the end of all launches, see `Runtime.mark`; None if nothing waits for it.
        generation: number of the replay.
        meters: `StepMemory.host_meters` of the step; None without host work.
        error: error of the host's work.
    """

    inputs: Inputs
    draws: Mapping[int, SamplingParams] | None
    kind: StepKind
    graph: CapturedStep
    drawing: GraphSampling | None = None
    over: object = None
    generation: int = 0
    meters: Meters | None = None
    error: BackendError | None = None

    def serves(self, inputs: Inputs, draws: Mapping[int, SamplingParams] | None, kind: StepKind) -> bool:
        """Return whether this is the requested step, or one of more sequences, whose other results are dropped."""
        if draws is None or self.draws is None or kind != self.kind:
            return False
        return all(
            self.inputs.get(place) == own and self.draws.get(place) == draws.get(place) for place, own in inputs.items()
        )


def can_overlap(row: GraphSlot, under_way: int = 0) -> bool:
    """Return whether a sequence's next step needs only the token sampled by its last one.

    under_way: steps that are not over before it.
    """
    cache, tokens = row.cache, under_way + 1
    if cache is None or row.stale or row.room < tokens or row.awaited.are_complete:
        return False
    return has_position(cache.batch, cache.max_positions, tokens)


def columns_of(inputs: Inputs, size: int) -> Tensor:
    """Return tokens and positions, int64 (2, size), zeros for empty places."""
    found = torch.zeros(2, size, dtype=torch.int64)
    found[:, list(inputs)] = torch.tensor(list(inputs.values()), dtype=torch.int64).T
    return found


class DecodeGraph:
    """Graphs of one batch size. Implements `Recordable` of `runner/graph/capture.py`.

    Attributes:
        tokens: new tokens of each sequence. The caller commits a block of several; `undo` precedes its launch.
        size: number of slots, times tokens: each token of a step has a place.
        rows: sequences by place; None: empty. A cache of several sequences has several places.
        kind: kind of graph that the present sequences need.
        draw: sampler of the batch.
        in_flight: steps that were launched and are not confirmed, in order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: RetrievalCache,
        runtime: Runtime,
        buffers: GroupBuffers,
        resources: HostResources,
        options: StepOptions = BATCHED,
        tokens: int = 1,
        meanwhile: Callable[[Sequence[GraphSlot], bool], None] = lambda *_: None,
    ) -> None:
        """The model is a weak reference.

        Args:
            like: cache with the shape of all sequences.
            buffers: buffers of the slots.
            resources: host resources shared by all batch sizes.
            options: how steps are captured and launched.
            meanwhile: called after each launch with its sequences, and whether the step needed the host and has ended.
        """
        key = buffers.windows[0][0]
        self.size, self.tokens = len(key) * tokens, tokens
        self._model, self._meanwhile = weakref.ref(model), meanwhile
        self._options, self.greedy = options, options.greedy
        states = StepStates(buffers.states, key.device, runtime)
        self.decoder = GraphDecoder(model, like, runtime, buffers.windows, resources, states, tokens)
        self.states: Sequence[RecordedState] = states.bind(like)
        self.cache = RecordedCache(self, like, [state.layer for state in self.states])
        self.draw = GraphSampler(runtime, self.decoder.memory)
        self.rows: list[GraphSlot | None] = [None] * self.size
        self.kind = StepKind(False, False, 0)
        self._asks: list[list[_Ask | None]] = [[None] * self.size for _ in buffers.windows]  # of each layer, by place
        self._by_host = False  # the host reads all keys: int8 rows of some sequence are not complete
        self._uploaded = False  # the device knows the positions of the windows' tokens, launched steps included
        self._moved: set[int] = set()  # places that changed since a step was launched
        self._next: Inputs = {}  # what the device has as the inputs of the next step
        self.in_flight: list[LaunchedStep] = []
        self._drawing: GraphSampling | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        model = self._model()
        assert model is not None, "a step of a model that was collected"
        return model

    @property
    def is_captured(self) -> bool:
        """Whether a graph of the present kind exists."""
        return self.kind in self.decoder.graphs

    @property
    def sequences(self) -> list[GraphSlot]:
        """Slots of the batch, each once."""
        return list({id(row): row for row in self.rows if row is not None}.values())

    def take(self, rows: Sequence[GraphSlot], kind: StepKind, changed: Collection[int]) -> Iterator[None]:
        """Set the sequences of the next steps, layer by layer: the iterator must be exhausted before the next launch.

        rows: all sequences. kind: of graph that they need. changed: places with another sequence, or another range of
        retrieved keys, than before. Raises CaptureError if their host searches cannot be planned together.
        """
        self.rows = [None] * self.size
        for row in rows:
            self.rows[row.place * self.tokens : row.places.stop * self.tokens] = [row] * (row.width * self.tokens)
            row.use(self.decoder.slots, self.tokens)
        places = range(self.size) if kind.retrieves and not self.kind.retrieves else changed
        padded = range(self.size) if kind.padded and not self.kind.padded else changed
        self.kind, self._uploaded = kind, False
        self._moved.update(changed)
        if kind.padded:
            self._upload_padding(padded)
        if kind.retrieves:
            for row in rows:
                row.awaited.watch(row.paths)
            self._by_host = any(row.awaited.are_pending for row in rows)
            yield from self._plan_hosts(places)
            if self.decoder.reads_differ:
                self._by_host = True
                yield from self._plan_hosts(places)
            self.decoder.upload_tables()
            self._update_kind()
        if kind.prefix_depth:
            prefixes = [None if row is None else row.prefix for row in self.rows]
            paged = next(row.layers for row, one in zip(self.rows, prefixes, strict=True) if row and one)
            self.decoder.write_pages(prefixes, paged, kind.prefix_depth)
        self.cache.batch.columns = max((row.cache.batch.columns for row in rows if row.cache is not None), default=0)

    def _plan_hosts(self, places: Collection[int]) -> Iterator[None]:
        """Plan the host's part of each layer for the sequences at these places. Raises CaptureError."""
        members = _members(self.rows, places, self.tokens)
        for number, slot in enumerate(self.decoder.slots):
            yield
            _plan(number, slot.hosts, self._asks[number], members, by_host=self._by_host)

    def _upload_padding(self, places: Collection[int]) -> None:
        """Copy to the device which tokens of the windows at these places are padding."""
        for slot in self.decoder.slots:
            slot.valid[sorted(places)] = True
        for row in self.sequences:
            for slot, window in zip(self.decoder.slots, row.windows, strict=True):
                if row.place in places and window.valid is not None:
                    slot.valid[row.places.start : row.places.stop, slice(*window.span)] = window.valid

    def step(
        self,
        inputs: Inputs,
        draws: Mapping[int, SamplingParams] | None = None,
        launched: Callable[[], None] | None = None,
        *,
        overlap: bool = False,
    ) -> Tensor:
        """Run a step and wait for it. Returns logits (size, vocabulary) float32; `confirm` counts the step.

        The next step overwrites the logits.

        Args:
            inputs: token and position of each sequence, by place.
            draws: sampling parameters by place. None: no sampling. `choices` returns the sampled tokens.
            launched: callback, see `Replay`.
            overlap: launch the next step before this one is over if it needs only its tokens; it is undone if another
                step is requested.

        Raises:
            CaptureError: no graph can be captured.
            BackendError: the host failed, or device and host disagree. The step is not counted.
        """
        foreground.note()
        step = self.in_flight[0] if self.in_flight else None
        if step is None or self._moved.intersection(inputs) or not step.serves(inputs, draws, self.kind):
            if step is not None:
                self.undo()
            step = self._launch(inputs, draws, launched)
        else:
            self.draw.resume(step, launched)
        behind = self._launch_overlapped(inputs, draws) if overlap and draws is not None else None
        decoder = self.decoder
        decoder.replays += 1
        decoder.runtime.wait(step.over)
        _raise_failure(step)
        self._drawing = step.drawing
        if step.drawing is not None:
            tokens = step.drawing.chosen.ids.tolist()
            self._next = {place: (tokens[place], position + 1) for place, (_, position) in inputs.items()}
        if behind is not None:
            behind.inputs, self._next = self._next, {}
        return step.graph.logits

    def launch(self, token: Tensor, position: Tensor) -> Tensor:
        """Launch a step and do not wait for it. Returns logits (size, vocabulary) float32; `confirm` counts the step.

        Args:
            token: token of each sequence, (size,) int64.
            position: position of each token, (size,) int64.

        Raises as `step`. The logits are the same memory in all steps of a kind.
        """
        found = self._launch(StepTokens(token, position)).graph.logits
        self.decoder.replays += 1
        return found

    def launch_ahead(self) -> bool:
        """Launch the step after the one in flight, with the tokens that it chooses, before it is confirmed.

        Returns False, and does nothing, if the step has to wait: a full window, an error, other changes. Raises
        BackendError as `step`; the step in front of it stays in flight.
        """
        if not self._options.greedy or len(self.in_flight) != 1 or self.in_flight[0].error is not None:
            return False
        if not self._uploaded or self._moved or not self._can_overlap(range(self.size), 1):
            return False
        self._launch(None)
        self.decoder.replays += 1
        return True

    def choices(self, places: Sequence[int]) -> list[SampledToken | None]:
        """Return the tokens sampled by the last step, see `GraphSampler.choices`."""
        assert self._drawing is not None
        return self.draw.choices(self._drawing, places)

    def launch_next(self, draws: Mapping[int, SamplingParams]) -> None:
        """Launch the next step after `confirm` with the sampled tokens, if it needs nothing else.

        It is undone if another step is requested.
        """
        if self.in_flight or not self._can_overlap(self._next):
            return
        try:
            self._launch(dict(self._next), draws, early=True)
        except Exception as error:  # the caller's next step raises it
            log.debug("the next step was not launched early: %s", error)
            self.undo()

    def _can_overlap(self, places: Collection[int], under_way: int = 0) -> bool:
        """Return whether a step of exactly the sequences at these places can be launched early."""
        if self._options.undo_steps < 2 and (self.kind.needs_host or self.states):
            return False
        if sum(row is not None for row in self.rows) != len(places):
            return False
        return all(can_overlap(row, under_way) for row in self.sequences)

    def _launch_overlapped(self, inputs: Inputs, draws: Mapping[int, SamplingParams]) -> LaunchedStep | None:
        """Launch the step after the one with these inputs. Returns None if it must wait for its end."""
        if self._moved or not self._can_overlap(inputs, 1):
            return None
        try:
            return self._launch(None, draws, early=True)
        except Exception as error:  # the caller's next step raises it
            log.debug("a step was not launched behind another: %s", error)
            # the device may have counted its tokens: it is unused, and undone
            del self.in_flight[1:]
            self.in_flight.append(LaunchedStep({}, None, self.kind, self.decoder.graphs[self.kind]))
            return self.in_flight[-1]

    def _launch(
        self,
        given: Inputs | StepTokens | None,
        draws: Mapping[int, SamplingParams] | None = None,
        launched: Callable[[], None] | None = None,
        early: bool = False,
    ) -> LaunchedStep:
        """Launch a step behind those in flight.

        given: token and position by place, or of all places; None: the tokens that the step in flight chooses. draws,
        launched: see `step`. early: the step was not requested yet, see `GraphSampler.launch`.
        """
        decoder, inputs = self.decoder, {} if given is None or isinstance(given, StepTokens) else given
        if given is not None and not self._uploaded:
            self.upload_spans()
        placed = not isinstance(given, StepTokens) and {place: self._next.get(place) for place in inputs} == inputs
        if not self.is_captured:
            placed = False
            try:
                captured = capture(self, *_columns(given, self.size))
            except CaptureError as error:
                decoder.capture_failure = str(error)
                raise
            decoder.captures += 1
            self._update_kind()  # the host's parts were made: only now it is known who reads
            decoder.graphs[self.kind] = captured
        graph, self._next = decoder.graphs[self.kind], {}
        if draws is not None:
            placed = self.draw.prepare(draws, graph.logits) and placed
        if not placed:
            if given is None:
                raise CaptureError("what rows choose is drawn in another way than in the step under way")
            decoder.memory.place(*_columns(given, self.size))
        self._moved.clear()
        try:
            graph.replay(launched)
        except BackendError:
            with contextlib.suppress(RuntimeError):  # the error is reported already
                decoder.runtime.synchronize()
                self.decoder.states.undo(len(self.in_flight))
            self._uploaded = False  # the device may have counted the token
            raise
        step = LaunchedStep(inputs, draws, self.kind, graph, generation=graph.replay.generation)
        self.in_flight.append(step)
        step.drawing = None if draws is None else self.draw.launch(early)
        step.over = None if self.greedy else decoder.runtime.mark()
        self._read_host(step)
        copy_ahead_share(self.sequences)
        self._meanwhile(self.sequences, self.kind.needs_host)
        return step

    def _read_host(self, step: LaunchedStep) -> None:
        """Keep the host's report of the last replay: the next one overwrites it."""
        if not self.kind.needs_host:
            return
        try:
            self.decoder.raise_host_error()
        except BackendError as error:
            step.error = error
        step.meters = self.decoder.memory.host_meters()

    def confirm(self) -> Meters | None:
        """Count the tokens of the oldest step in flight, once something computed by it was read.

        Returns the step's `StepMemory.host_meters`, None without host work or without a step in flight. Raises
        BackendError, with the layer named, if a host search failed or came too late; later steps are lost, too.
        """
        if not self.in_flight:
            return None
        step = self.in_flight[0]
        try:
            _raise_failure(step)
        except BackendError:
            self.undo()
            raise
        del self.in_flight[0]
        self.decoder.states.confirmed += 1
        for row in self.sequences:
            row.commit()
        return step.meters

    def undo(self) -> None:
        """Undo the launched steps that are not confirmed."""
        asked_host = any(step.meters is not None for step in self.in_flight)
        self.in_flight.clear()
        self._uploaded, self._next = False, {}
        if asked_host:
            self.decoder.runtime.synchronize()  # the device may still read the host's results
        self.decoder.states.undo()

    def confirmed_states(self, number: int, places: range) -> Views:
        """Return the states of layer `number`, of those with a state, after the last confirmed step."""
        states = self.decoder.states
        views = states.confirmed_views(number) if self.in_flight else states.layers[number]
        return {key: one[places.start : places.stop] for key, one in views.items()}

    def forget(self, place: int | None = None) -> None:
        """Drop the host search plans of a place, None: of all places."""
        if place is None:
            if self.in_flight:
                self.undo()
            self.rows = [None] * self.size
        for asks in self._asks:
            own = slice(None) if place is None else slice(place, place + 1)
            asks[own] = [None] * len(asks[own])
        for slot in self.decoder.slots:
            for host in slot.hosts:
                if place is None or host.rows.start <= place < host.rows.stop:
                    host.forget(place)

    def attend(
        self, number: int, query: Tensor, new: Buffers, scoring: Scoring, sinks: Tensor | None, *, retrieving: bool
    ) -> Tensor:
        """Record the attention of layer `number` of the attention layers. retrieving: the layer retrieves."""
        if query.shape[2] != 1:
            raise CaptureError(f"a captured decode step takes one new token per row, got {query.shape[2]}")
        slot, max_coded_keys = self.decoder.slots[number], None
        if self.kind.retrieves and retrieving:
            if not slot.hosts:
                like = next(row.layers[number] for row in self.rows if row is not None)
                slot.make_hosts(like, query, new[1].shape[3], scoring)
                members = _members(self.rows, range(self.size), self.tokens)
                _plan(number, slot.hosts, self._asks[number], members, by_host=self._by_host)
                self.decoder.upload_tables()
            if slot.hosts[0].scoring != scoring:
                raise CaptureError(
                    f"layer {slot.number} must keep its scale and soft-cap, but they differ between two steps"
                )
            max_coded_keys = self._max_coded_keys
        paged = self.decoder.paged(slot.number, query, scoring) if self.kind.prefix_depth and retrieving else None
        padded = self.kind.padded
        return slot.record(query, new, scoring, sinks, max_coded_keys=max_coded_keys, padded=padded, paged=paged)

    @property
    def _max_coded_keys(self) -> int:
        """Number of keys that a search of codes is recorded for."""
        return self.kind.max_coded_keys if self._options.keep_search_size else self.decoder.max_coded_keys

    # -- Recordable ----------------------------------------------------------------------------------

    def upload_spans(self) -> None:
        """Copy window positions and occupied slots to the device."""
        rows = self.rows[:: self.tokens]
        spans, stored = np.zeros((len(self.decoder.slots), len(rows), 2), np.int32), np.zeros(len(rows), np.int32)
        for place, row in enumerate(rows):
            if row is not None:
                spans[:, place], stored[place] = row.spans, 1
        self.decoder.memory.upload_rows(spans, stored)
        self._uploaded = True

    def drop_pending(self) -> None:
        """Drop keys and values noted by a forward that was recorded or failed."""
        for layer in self.cache.layers:
            if isinstance(layer, RecordedLayer):
                layer.discard_pending()

    def add_tail(self) -> None:
        """Add the tail mass estimated by replays to the sequences' layers."""
        for row in self.sequences:
            row.add_tail()

    def drop_tail(self) -> None:
        """Drop the tail mass estimated since `add_tail`."""
        for host in (host for slot in self.decoder.slots for host in slot.hosts):
            host.take_tail()

    def _update_kind(self) -> None:
        """Note which host memory the device reads, once that is planned, and the rows that the plan asked for."""
        if not self.kind.retrieves:
            return
        for row in self.sequences:
            row.awaited.watch_asked(row.paths)
        self.kind = self.kind._replace(host_access=self.decoder.reads, max_coded_keys=self._max_coded_keys)


def _columns(given: Inputs | StepTokens | None, size: int) -> StepTokens:
    """Return tokens and positions of all places, zeros without given ones."""
    return given if isinstance(given, StepTokens) else StepTokens(*columns_of(given or {}, size))


def _raise_failure(step: LaunchedStep) -> None:
    """Raise BackendError if the host failed in a step that is over."""
    if step.error is not None:
        raise step.error
    failure = step.graph.replay.failure(step.generation) if step.kind.needs_host else None
    if failure is not None:
        raise BackendError(failure)


Member = tuple[Sequence[Any], int]
"""Attention layers of a cache, none for an empty place, and the number of the sequence in the cache."""
_Ask = tuple[HostRow, int | HeadBudgets | None]
"""Retrieved range of a sequence in a layer, and the number of keys."""


def _members(rows: Sequence[GraphSlot | None], places: Collection[int], tokens: int) -> dict[int, Member]:
    """Return the sequences at these places. rows: sequences by place. tokens: places of each."""
    layers = {id(row): row.layers for row in rows if row is not None}
    return {
        place: ([], 0) if (row := rows[place]) is None else (layers[id(row)], place // tokens - row.place)
        for place in places
    }


def _ask(member: Member, number: int) -> _Ask | None:
    """Return the retrieved range of a sequence in a layer and the number of keys; None: it does not retrieve."""
    layers, index = member
    if not layers or not isinstance(layers[number], RetrievalLayer):
        return None
    layer = layers[number]
    (start, stop), path = held_by(layer).ranges[index], layer.hosts[index]
    if stop <= start:
        return None
    return HostRow(path, (start, stop)), retrieved_keys(layer.config, path, stop - start)


def _plan(
    number: int, hosts: Iterable[HostStep], asks: list[_Ask | None], changed: Mapping[int, Member], *, by_host: bool
) -> None:
    """Plan the host steps of a layer that cover changed places.

    asks: the last plan of all places, updated here. changed: sequences by place. by_host: see `HostStep.plan`.
    """
    for place, member in changed.items():
        asks[place] = _ask(member, number)
    for host in hosts:
        first, stop = host.rows.start, host.rows.stop
        own = {place - first for place in changed if first <= place < stop}
        if own:
            some = asks[host.rows]
            host.plan([None if ask is None else ask[0] for ask in some], _together(some), own, by_host=by_host)


def _together(counts: Sequence[_Ask | None]) -> Retrieve:
    """Return the keys per query of sequences that are planned together. Raises CaptureError if they differ."""
    given = [one[1] for one in counts if one is not None]
    if not given:
        return 1
    budgets = [one for one in given if isinstance(one, HeadBudgets)]
    numbers = {one for one in given if isinstance(one, int)}
    if budgets and None not in given:
        heads = len(budgets[0].counts)  # a row for which nothing was measured has one number for all of them
        rows = [budgets[0] if one is None else one[1] for one in counts]
        return tuple(HeadBudgets((one,) * heads) if isinstance(one, int) else one for one in rows if one is not None)
    if len(numbers) == 1 and None not in given:
        return numbers.pop()
    raise CaptureError("all rows of a graph must retrieve the same number of keys, got different numbers or all keys")
