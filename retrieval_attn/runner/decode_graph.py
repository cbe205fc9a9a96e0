"""CUDA graphs of decode steps for one batch size, over slots that may be empty.

One graph serves any sequences: lengths, code addresses and host searches are read from memory. An empty slot attends to
its own token, and its result is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import has_position
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.errors import BackendError, CacheMismatchError, CaptureError, UnsupportedModelError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.model.hooks import AttendingLayer, KVView, MaskSpec
from retrieval_attn.offload.threads import foreground
from retrieval_attn.runner.graph.capture import capture
from retrieval_attn.runner.graph.decoder import CapturedStep, GraphDecoder, StepKind, attending
from retrieval_attn.runner.graph.host import HostResources, HostRow, HostStep, Retrieve, held_by
from retrieval_attn.runner.graph.slot import Buffers
from retrieval_attn.runner.graph.states import GraphState
from retrieval_attn.runner.graph_sampling import GraphSampler, GraphSampling
from retrieval_attn.runner.graph_slot import BatchStates, GraphSlot, GroupBuffers, copy_ahead_share
from retrieval_attn.sampling.sampler import SampledToken
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["DecodeGraph", "Inputs", "OverlappedStep", "can_overlap", "columns_of"]

log = logging.getLogger(__name__)


Inputs = Mapping[int, tuple[int, int]]
"""Token and position of rows, by place."""


class OverlappedStep(NamedTuple):
    """A step that was launched, possibly before it was requested.

    Attributes:
        inputs: token and position by place.
        draws: sampling parameters by place.
        kind: kind of the graph.
        graph: the launched graph.
        drawing: memory of the sampled tokens; None without sampling.
        over: marks the end of all launches, see `Runtime.mark`.
    """

    inputs: Inputs
    draws: Mapping[int, SamplingParams] | None
    kind: StepKind
    graph: CapturedStep
    drawing: GraphSampling | None
    over: object

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
    if cache is None or row.stale or row.room < tokens:
        return False
    return has_position(cache.batch, cache.max_positions, tokens)


def columns_of(inputs: Inputs, size: int) -> Tensor:
    """Return tokens and positions, int64 (2, size), zeros for empty places."""
    found = torch.zeros(2, size, dtype=torch.int64)
    found[:, list(inputs)] = torch.tensor(list(inputs.values()), dtype=torch.int64).T
    return found


class DecodeGraph:
    """Graphs of one batch size. Implements `Recordable` and `RecordedLayer` of `runner/graph/capture.py`.

    Attributes:
        size: number of slots.
        rows: sequences by place; None: empty.
        kind: kind of graph that the present sequences need.
        draw: sampler of the batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        like: RetrievalCache,
        runtime: Runtime,
        buffers: GroupBuffers,
        resources: HostResources,
    ) -> None:
        """Args:
        like: cache with the shape of all sequences.
        buffers: buffers of the slots.
        resources: host resources shared by all batch sizes.
        """
        key = buffers.windows[0][0]
        self.size = len(key)
        self.model = model
        states = BatchStates(buffers.states, key.device, runtime)
        self.decoder = GraphDecoder(model, like, runtime, buffers.windows, resources, states)
        self.states: Sequence[GraphState] = states.bind(like)
        self.cache = _GraphCache(self, like)
        self.draw = GraphSampler(runtime, self.decoder.memory)
        self.rows: list[GraphSlot | None] = [None] * self.size
        self.kind = StepKind(False, False, 0)
        self.recording = self.chooses = False
        self._asks: list[list[_Ask | None]] = [[None] * self.size for _ in buffers.windows]  # of each layer, by place
        self._by_host = False  # the host reads all keys: int8 rows of some sequence are not complete
        self._uploaded = False  # the device knows where windows' tokens lie
        self._moved: set[int] = set()  # places that changed since a step was launched
        self._next: Inputs = {}  # what the device has as the inputs of the next step
        self._overlapped: OverlappedStep | None = None
        self._drawing: GraphSampling | None = None

    @property
    def layers(self) -> Sequence[DecodeGraph]:
        """All layers as one, see `Recordable`."""
        return (self,)

    @property
    def is_captured(self) -> bool:
        """Whether a graph of the present kind exists."""
        return self.kind in self.decoder.graphs

    def take(self, rows: Sequence[GraphSlot], kind: StepKind, changed: Collection[int]) -> None:
        """Set the sequences of the next steps.

        Args:
            rows: all sequences.
            kind: kind of graph that they need.
            changed: places with another sequence, or another range of retrieved keys, than before.

        Raises CaptureError if their host searches cannot be planned together.
        """
        self.rows = [None] * self.size
        for row in rows:
            self.rows[row.place] = row
            row.use(self.decoder.slots)
        places = range(self.size) if kind.retrieves and not self.kind.retrieves else changed
        self.kind, self._uploaded = kind, False
        self._moved.update(changed)
        if kind.retrieves:
            for row in rows:
                row.awaited.watch(row.paths)
            self._by_host = any(row.awaited.are_pending for row in rows)
            self._plan_hosts(places)
            if self.decoder.reads_differ:
                self._by_host = True
                self._plan_hosts(places)
            self.decoder.upload_tables()
            self._update_kind()
        if kind.prefix_depth:
            prefixes = [None if row is None else row.prefix for row in self.rows]
            paged = next(row.layers for row, one in zip(self.rows, prefixes, strict=True) if row and one)
            self.decoder.write_pages(prefixes, paged, kind.prefix_depth)
        self.cache.batch.columns = max((row.cache.batch.columns for row in rows if row.cache is not None), default=0)

    def _plan_hosts(self, places: Collection[int]) -> None:
        """Plan the host's part of all layers for the sequences at these places. Raises CaptureError."""
        layers = _layers(self.rows, places)
        for number, slot in enumerate(self.decoder.slots):
            _plan(number, slot.hosts, self._asks[number], layers, by_host=self._by_host)

    def step(
        self,
        inputs: Inputs,
        draws: Mapping[int, SamplingParams] | None = None,
        launched: Callable[[], None] | None = None,
        *,
        overlap: bool = False,
    ) -> Tensor:
        """Run a step. Returns logits (size, vocabulary) float32; `commit` counts the step.

        The next step overwrites the logits.

        Args:
            inputs: token and position of each sequence, by place.
            draws: sampling parameters by place. None: no sampling. `choices` returns the sampled tokens.
            launched: callback, see `Replay`.
            overlap: launch the next step before this one is over if it needs only its tokens; it is undone if another
                step is
                requested.

        Raises:
            CaptureError: no graph can be captured.
            BackendError: the host failed, or device and host disagree. The step is not counted.
        """
        foreground.note()
        under_way, self._overlapped = self._overlapped, None
        if under_way is None or self._moved.intersection(inputs) or not under_way.serves(inputs, draws, self.kind):
            if under_way is not None:
                self.undo()
            under_way = self._launch(inputs, draws, launched)
        elif launched is not None:
            launched()
        behind = self._launch_overlapped(inputs, draws) if overlap and draws is not None else None
        decoder, graph = self.decoder, under_way.graph
        decoder.replays += 1
        decoder.runtime.wait(under_way.over)
        if self.kind.needs_host:
            decoder.raise_host_error()
            failure = graph.replay.failure(graph.replay.generation)
            if failure is not None:
                raise BackendError(failure)
        self._uploaded, self._drawing = behind is None and not self._moved, under_way.drawing
        if under_way.drawing is not None:
            tokens = under_way.drawing.tokens
            self._next = {place: (tokens[place], position + 1) for place, (_, position) in inputs.items()}
        if behind is not None:
            self._overlapped, self._next = behind._replace(inputs=self._next), {}
        return graph.logits

    def choices(self, places: Sequence[int]) -> list[SampledToken | None]:
        """Return the tokens sampled by the last step, see `GraphSampler.choices`."""
        assert self._drawing is not None
        return self.draw.choices(self._drawing, places)

    def launch_next(self, draws: Mapping[int, SamplingParams]) -> None:
        """Launch the next step after `commit` with the sampled tokens, if it needs nothing else.

        It is undone if another step is requested.
        """
        if self._overlapped is not None or not self._can_overlap(self._next):
            return
        try:
            self._overlapped = self._launch(dict(self._next), draws, None)
        except Exception as error:  # who asks for the step is told
            log.debug("the next step was not launched early: %s", error)
            self.undo()

    def _can_overlap(self, places: Collection[int], under_way: int = 0) -> bool:
        """Return whether a step of exactly the sequences at these places can be launched early."""
        rows = [row for row in self.rows if row is not None]
        if self.kind.needs_host or self.states or len(rows) != len(places):
            return False
        return all(can_overlap(row, under_way) for row in rows)

    def _launch_overlapped(self, inputs: Inputs, draws: Mapping[int, SamplingParams]) -> OverlappedStep | None:
        """Launch the step after the one with these inputs. Returns None if it must wait for its end."""
        if self._moved or not self._can_overlap(inputs, 1):
            return None
        try:
            return self._launch(None, draws, None)
        except Exception as error:  # who asks for the step is told
            log.debug("a step was not launched behind another: %s", error)
            # the device may have counted its tokens: it is unused, and undone
            return OverlappedStep({}, None, self.kind, self.decoder.graphs[self.kind], None, None)

    def _launch(
        self, given: Inputs | None, draws: Mapping[int, SamplingParams] | None, launched: Callable[[], None] | None
    ) -> OverlappedStep:
        """Launch a step, see `step`. given: None for the tokens that the step in flight samples."""
        decoder, inputs = self.decoder, given or {}
        if given is not None and not self._uploaded:
            self.upload_spans()
        placed = {place: self._next.get(place) for place in inputs} == inputs
        if not self.is_captured:
            placed, captured = False, capture(self, *columns_of(inputs, self.size))
            decoder.captures += 1
            self._update_kind()  # the host's parts were made: only now it is known who reads
            decoder.graphs[self.kind] = captured
        graph, self._next = decoder.graphs[self.kind], {}
        if draws is not None:
            placed = self.draw.prepare(draws, graph.logits) and placed
        if not placed:
            if given is None:
                raise CaptureError("what rows choose is drawn in another way than in the step under way")
            decoder.memory.place(*columns_of(inputs, self.size))
        self._uploaded = False  # until it is known that the tokens count: the device counts them at once
        self._moved.clear()
        graph.replay(launched)
        drawing = None if draws is None else self.draw.launch()
        over = decoder.runtime.mark()
        copy_ahead_share([row for row in self.rows if row is not None])
        return OverlappedStep(inputs, draws, self.kind, graph, drawing, over)

    def commit(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        """Count a token of each sequence. Returns the step's `StepMemory.host_meters`, None without host work."""
        self.decoder.states.confirmed += 1
        for row in self.rows:
            if row is not None:
                row.commit()
        return self.decoder.memory.host_meters() if self.kind.needs_host else None

    def undo(self) -> None:
        """Undo a launched step that is not committed, if there is one."""
        self._overlapped = None
        self.decoder.states.undo()

    def forget(self, place: int | None = None) -> None:
        """Drop the host search plans of a place, None: of all places."""
        if place is None and self._overlapped is not None:
            self.undo()
        for asks in self._asks:
            asks[slice(None) if place is None else slice(place, place + 1)] = [None] * (
                self.size if place is None else 1
            )
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
                layers = _layers(self.rows, range(self.size))
                _plan(number, slot.hosts, self._asks[number], layers, by_host=self._by_host)
                self.decoder.upload_tables()
            if slot.hosts[0].scoring != scoring:
                raise CaptureError(
                    f"layer {slot.number} must keep its scale and soft-cap, but they differ between two steps"
                )
            max_coded_keys = self.kind.max_coded_keys
        paged = None
        if self.kind.prefix_depth and retrieving:
            paged = self.decoder.paged(slot.number, query, scoring)
        return slot.record(query, new, scoring, sinks, max_coded_keys=max_coded_keys, padded=False, paged=paged)

    # -- Recordable ----------------------------------------------------------------------------------

    def upload_spans(self) -> None:
        """Copy window positions and occupied slots to the device."""
        spans = np.zeros((len(self.decoder.slots), self.size, 2), np.int32)
        stored = np.zeros(self.size, np.int32)
        for place, row in enumerate(self.rows):
            if row is not None:
                spans[:, place], stored[place] = row.spans, 1
        self.decoder.memory.upload_rows(spans, stored)
        self._uploaded = True

    def drop_pending(self) -> None:
        """Drop keys and values noted by a forward that was recorded or failed."""
        for layer in self.cache.layers:
            if isinstance(layer, _GraphLayer):
                layer.pending = None

    def add_tail(self) -> None:
        """Add the tail mass estimated by replays to the sequences' layers."""
        for row in self.rows:
            if row is not None:
                row.add_tail()

    def drop_tail(self) -> None:
        """Drop the tail mass estimated since `add_tail`."""
        for host in (host for slot in self.decoder.slots for host in slot.hosts):
            host.take_tail()

    def _update_kind(self) -> None:
        """Note which host memory the device reads, once that is planned, and the rows that the plan asked for."""
        for row in self.rows if self.kind.retrieves else ():
            if row is not None:
                row.awaited.watch_asked(row.paths)
        self.kind = self.kind._replace(host_access=self.decoder.reads if self.kind.retrieves else ())


_Ask = tuple[HostRow, int | HeadBudgets | None]
"""Retrieved range of a sequence in a layer, and the number of keys."""


def _ask(layers: Sequence[Any], number: int) -> _Ask | None:
    """Return the retrieved range of a sequence in a layer and the number of keys; None: it does not retrieve."""
    if not layers or not isinstance(layers[number], RetrievalLayer):
        return None
    layer = layers[number]
    (start, stop), path = held_by(layer).ranges[0], layer.hosts[0]
    if stop <= start:
        return None
    return HostRow(path, (start, stop)), retrieved_keys(layer.config, path, stop - start)


def _layers(rows: Sequence[GraphSlot | None], places: Collection[int]) -> dict[int, Sequence[Any]]:
    """Return the attention layers of the sequences at these places; [] for empty ones."""
    return {place: [] if (row := rows[place]) is None else row.layers for place in places}


def _plan(
    number: int,
    hosts: Iterable[HostStep],
    asks: list[_Ask | None],
    changed: Mapping[int, Sequence[Any]],
    *,
    by_host: bool,
) -> None:
    """Plan the host steps of a layer that cover changed places. asks: the last plan of all places, updated here.

    by_host: see `HostStep.plan`.
    """
    for place, layers in changed.items():
        asks[place] = _ask(layers, number)
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
    if len(budgets) == len(given):
        # rows without keys get those of another
        own = iter(budgets)
        return tuple(budgets[0] if one is None else next(own) for one in counts)
    if len(numbers) == 1 and not budgets and None not in given:
        return numbers.pop()
    raise CaptureError("all rows of a graph must retrieve the same number of keys, got different numbers or all keys")


class _GraphCache(Cache):
    """`past_key_values` of the recorded forward. batch.columns: padded length that it reports."""

    on_layer = None

    def __init__(self, graph: DecodeGraph, like: RetrievalCache) -> None:
        numbers = {number: row for row, (number, _) in enumerate(attending(like))}
        held: list[Any] = list(like.layers)
        states = iter(graph.states)
        layers: list[Any] = [
            _GraphLayer(graph, numbers[number], isinstance(layer, RetrievalLayer), layer.is_sliding)
            if number in numbers
            else next(states).layer
            for number, layer in enumerate(held)
        ]
        super().__init__(layers=layers)
        self.batch = SimpleNamespace(columns=0)
        for layer in layers:
            if isinstance(layer, _GraphLayer):
                layer.batch = self.batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Note new keys and values (rows, kv_heads, 1, dim) and return handles."""
        if layer_idx >= len(self.layers):
            raise CacheMismatchError(
                f"The model writes keys of layer {layer_idx}, but the caches of these rows have {len(self.layers)} "
                "layers; create the caches for this model."
            )
        layer: Any = self.layers[layer_idx]
        keys, values = layer.update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the padded length of the batch."""
        return int(self.batch.columns)


class _GraphLayer(CacheLayerMixin, AttendingLayer):
    """One layer of all sequences, as transformers sees it."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, graph: DecodeGraph, number: int, retrieving: bool, sliding: bool) -> None:
        super().__init__()
        self._graph, self._number, self._retrieving, self.is_sliding = graph, number, retrieving, sliding
        self.pending: Buffers | None = None
        self.batch: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note new keys and values (rows, kv_heads, 1, dim) and return handles."""
        self.pending = (key_states, value_states)
        return KVView(self, key_states), KVView(self, value_states)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Record the attention of each sequence's new token, (rows, q_heads, 1, value_dim)."""
        if self.pending is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to another layer's keys without storing its own; models that share "
                "keys and values between layers are not supported. Use the model with its own attention and cache."
            )
        new, self.pending = self.pending, None
        scoring = Scoring(scale, softcap)
        return self._graph.attend(self._number, query, new, scoring, sink_logits, retrieving=self._retrieving)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.batch.columns)

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True
