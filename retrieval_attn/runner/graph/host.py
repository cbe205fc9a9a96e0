"""The host's part of a captured layer's attention, for some rows of the batch: its memory, its call, its plan.

A batch whose keys are searched by codes on the device has two of them: while the host works on the first rows, the
device searches the codes of the others. Nothing here is bound to a cache but by `plan`, until `forget`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import CodedPieces, coded_pieces, new_mass, take_apart
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import NamedPieces, plan_named
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.cpu.step.tables import StepBuffers
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.capture.exchange import HostCall, Runtime
from retrieval_attn.gpu.clusters.mass import TailPartial
from retrieval_attn.gpu.codes.host_row_gather import HostRowGather, RowShape
from retrieval_attn.gpu.codes.search import (
    CodeSearch,
    CodeShape,
    EstimatedLogits,
    SearchScratch,
    shared_scratch,
    size_class,
)
from retrieval_attn.gpu.codes.streamer import CodeStreamer, CodeTurns
from retrieval_attn.gpu.codes.table import BoundEntries, SharedTables
from retrieval_attn.gpu.decode.kernels import HostResult, stage_queries
from retrieval_attn.runner.graph.host_row_gather import Reads, clear_costs, device_reads, gather_entries, uncoded_only

MAX_MICROBATCHES = 2
"""Parts of a batch that the host and the device work on at the same time."""


@dataclass(frozen=True)
class HostResources:
    """Resources that the host's parts of one decoder share. scratch: for searches of codes, which run one after the
    other. tables: of codes and clusters, to be uploaded once the parts are planned. turns: for codes that are copied
    from the host.
    """

    runtime: Runtime
    pool: Pool
    scratch: dict[Any, SearchScratch] = field(default_factory=dict)
    tables: SharedTables = field(default_factory=SharedTables)
    turns: CodeTurns = field(default_factory=CodeTurns)
    stage: CodeStreamer = field(init=False)
    """Of one decoder's step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", CodeStreamer(self.turns, self.tables))

    def for_step(self) -> HostResources:
        """The same, with a stage of its own."""
        return replace(self)

    def upload(self) -> None:
        """Have the device see what planned host parts named: codes and clusters of all layers, by one copy."""
        self.stage.settle()
        self.tables.upload()


Retrieve = int | HeadBudgets | tuple[HeadBudgets, ...]
"""Keys of a query: a number, one for each query head, or these for each row."""


class HostRow(NamedTuple):
    """State of a row on the host: a path, and the tokens of it that retrieval covers now."""

    path: SequenceKV
    span: tuple[int, int]


class LayerHeads(NamedTuple):
    """Heads of a layer and their dimensions."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def code_shape(layer: RetrievalLayer, head_dim: int) -> CodeShape | None:
    """Return the sizes of a captured step's search of codes on the device; None if the layer's index has none there."""
    k = layer.config.retrieve_count(1)
    shape = None if k is None else layer.index.spec.code_shape(head_dim, k, layer.config.estimates)
    return None if shape is None else CodeShape(*shape)


def split_microbatches(layer: RetrievalLayer, batch: int, head_dim: int) -> list[slice]:
    """The rows of each part, in order: one part, or two where the device has codes to search while the host works."""
    if batch < MAX_MICROBATCHES or code_shape(layer, head_dim) is None or device_reads(layer):
        return [slice(0, batch)]
    return [slice(0, batch // 2), slice(batch // 2, batch)]


class HostStep:
    """See the module. part: the results as the device reads them, after the call that `begin` began has joined.

    rest: what `begin` had the device estimate. reads: who reads host memory, as planned.
    """

    def __init__(
        self,
        resources: HostResources,
        number: int,
        layer: RetrievalLayer,
        rows: slice,
        shape: LayerHeads,
        scoring: Scoring,
        memory: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
        device: torch.device,
    ) -> None:
        """For rows `rows` of layer `number`, and layers like `layer`. memory: meters and descriptor as in StepBuffers.

        device: where queries come from.
        """
        self._resources, self._number, self.rows, self.scoring = resources, number, rows, scoring
        self._q_heads, kv_heads, dim, value_dim = shape
        batch, runtime = rows.stop - rows.start, resources.runtime
        count = batch * self._q_heads
        lse_at = -(-count * value_dim // 16) * 16  # on a cache line
        rest_at = lse_at + -(-count // 16) * 16
        codes = code_shape(layer, dim)
        room = 0 if codes is None else codes.room
        queries, results = runtime.queries(count * (dim + room)), runtime.results(rest_at + count)
        places = None if batch == 1 else torch.arange(count, device=device)
        own = results.device
        self._tally = torch.zeros(count, 2, device=device)
        self._placed = [[row] for row in range(batch)]  # what `places` was written for
        self._apart: dict[int, tuple[HostRow, int, CodedPieces]] = {}  # as planned last, of rows and keys per query
        self._unbound: set[int] | None = None  # rows whose codes and clusters are not in the tables; None: all
        self.part = HostResult(
            own[: count * value_dim].view(count, value_dim),
            own[lse_at : lse_at + count],
            places,
            (own[rest_at:], self._tally),
        )
        spans = slice(count * value_dim), slice(lse_at, lse_at + count), slice(rest_at, None)
        out, lse, rest = (results.host[span].numpy() for span in spans)
        staged = queries.host.numpy()
        candidates = None if codes is None else staged[count * dim :].view(np.int32).reshape(count, room)
        self._buffers = StepBuffers(staged[: count * dim], out, lse, *memory, candidates, rest)
        self._rest = rest
        self._staged = queries.device[: count * dim].view(count, dim)
        heads, tables = (batch, self._q_heads, kv_heads), resources.tables
        self._search = None if codes is None else CodeSearch(*heads, codes, device, tables=tables)
        brought = self._search if layer.index.spec.host_reads.codes else None
        self._turn = None if brought is None else resources.stage.add(brought, batch * kv_heads, device)
        estimated = codes is not None and layer.config.estimates
        self._mass = new_mass(batch * kv_heads, value_dim, device, tables=tables) if estimated else None
        self.rest: TailPartial | None = None
        self.reads, self._has_late = Reads.HOST, False
        self._beside: object = None
        self._gather: HostRowGather | None = None
        self._gathered: Partial | None = None  # recorded result of `_gather`
        if codes is not None and device_reads(layer):
            self._gather = HostRowGather(batch * kv_heads, RowShape(dim, value_dim), device, tables)
            self._gather_ids = torch.full((count, room), -1, dtype=torch.int32, device=device)
            self._told = EstimatedLogits.of(count, codes, layer.index.spec.host_reads.key_share, device)
            self._nothing = torch.zeros_like(self._tally[:, 0])
        bound: list[BoundEntries[Any] | None] = [self._search, self._mass, self._gather]
        self._bound = [one for one in bound if one is not None]
        self._ids = queries.device[count * dim :].view(torch.int32).view(count, room)
        self._step = LayerStep(resources.pool, held_by(layer).fmt, layer=number, buffers=self._buffers)
        self._call = HostCall(queries, results, self._step.callback, self._step.address, f"layer {number}")

    @property
    def may_read(self) -> bool:
        """Whether the device may read what it names, once its rows are complete."""
        return self._gather is not None

    @property
    def _named(self) -> int:
        """Keys that the device names at least where all of them are attended to."""
        return 0 if self._search is None or self._mass is None else self._search.shape.named

    @property
    def max_coded_keys(self) -> int:
        """Keys that a search of codes on the device is recorded for; 0: none is searched."""
        return size_class(self._search.max_keys) if self._search is not None and self._search.max_keys else 0

    def plan(
        self,
        rows: Sequence[HostRow | None],
        retrieve: Retrieve,
        changed: Collection[int] | None = None,
        *,
        by_host: bool = False,
    ) -> None:
        """Plan for what its rows retrieve now, which may be nothing; None: the row is free. Raises CaptureError.

        changed: those that are not as they were planned last, as far as the caller knows; None: all. by_host: have the
        host read all, even if the device could.
        """
        scale, softcap = self.scoring.scale, self.scoring.softcap
        if not any(row is not None and row.span[1] > row.span[0] for row in rows):
            self._answer_nothing()
            return
        for rows_of in _layouts(rows):
            asked = tuple(retrieve[one[0]] for one in rows_of) if isinstance(retrieve, tuple) else retrieve
            mosts = [_most_of(asked, number) for number in range(len(rows_of))]
            own, n = [rows[members[0]] for members in rows_of], len(rows_of[0])
            paths = [row.path for row in own if row is not None]
            known = self._apart if changed is not None and n == 1 else {}
            apart = [
                self._take_apart(row, mosts[number], None if number in (changed or ()) else known.get(number))
                for number, row in enumerate(own)
            ]
            self._apart = {i: (row, mosts[i], apart[i]) for i, row in enumerate(own) if row is not None and n == 1}
            named = [NamedPieces(one.pieces, one.table, self._named) for one in apart]
            if self._reads_named([None if row is None else row.path for row in own], apart, rows_of, by_host):
                named = uncoded_only(apart)
            if (self.reads is not Reads.HOST and not self._has_late) or plan_named(
                self._step, paths, named, (self._q_heads, n), asked, scale=scale, softcap=softcap
            ):
                if self.part.rows is not None and rows_of != self._placed:
                    self.part.rows.copy_(_places(rows_of, self._q_heads))
                    self._placed = rows_of
                if self._search is not None and isinstance(retrieve, int):
                    self._bind(apart, rows_of, changed)
                return
        raise CaptureError(
            f"layer {self._number}: the index kind has no compiled search, or its memory for a captured step exceeds "
            "the limit"
        )

    def _bind(self, apart: list[CodedPieces], rows_of: list[list[int]], changed: Collection[int] | None) -> None:
        """Write the codes and clusters behind a planned step, of the rows that are not as they were bound last. Raises
        CaptureError.
        """
        assert self._search is not None
        if any(len(coded_pieces(one.pieces)) > 1 for one in apart):
            raise CaptureError("a sequence has codes of several segments on the device")
        alone, unbound = len(rows_of[0]) == 1, self._unbound
        these = None if changed is None or unbound is None or not alone else unbound.union(changed)
        self._unbound = None
        heads = self._search.kv_heads
        for members, one in zip(rows_of, apart, strict=True):
            codes: Sequence[Any] = one.codes or [None] * heads
            entries: Sequence[Any] = one.entries or [None] * heads
            for row, count in _runs(members if these is None else [row for row in members if row in these]):
                self._search.bind([*codes] * count, row * heads, tiled=False)
                if self._mass is not None:
                    self._mass.bind([*entries] * count, row * heads)
        self._search.write_tiles()
        self._resources.stage.moved(self._turn)
        self._unbound = set() if alone else None

    def _reads_named(
        self, paths: list[SequenceKV | None], apart: list[CodedPieces], rows_of: list[list[int]], by_host: bool
    ) -> bool:
        """Note who reads what these rows have on the host; whether the device reads what it names."""
        self.reads = Reads.HOST
        if self._gather is None or self._search is None:
            return False
        entries = None if by_host else gather_entries(paths, apart, rows_of, self._search.kv_heads, self._named)
        if entries is None:
            self._gather.forget()
            return False
        self._gather.bind(entries)
        self._has_late = any(one.pieces for one in uncoded_only(apart))
        self.reads = Reads.BOTH if self._has_late else Reads.DEVICE
        if not self._has_late:
            self._host_finds_nothing()
            clear_costs(self._buffers)
        return True

    def _host_finds_nothing(self) -> None:
        """Return an empty result from the host until the next plan."""
        self._step.forget()
        self._buffers.out[:], self._buffers.lse[:] = 0, -np.inf
        self._rest[:] = 0

    @staticmethod
    def _take_apart(row: HostRow | None, most: int, known: tuple[HostRow, int, CodedPieces] | None) -> CodedPieces:
        if row is None:
            return _NOTHING
        if known is not None and known[0].path is row.path and (known[0].span, known[1]) == (row.span, most):
            return known[2]
        return take_apart(row.path, *row.span, most)

    def _answer_nothing(self) -> None:
        self._host_finds_nothing()
        self._apart, self._unbound = {}, None
        for one in self._bound:
            one.bind_nothing()
        self._resources.stage.moved(self._turn)
        if self._gather is not None:
            clear_costs(self._buffers)
            self.reads = Reads.DEVICE

    def begin(self, query: Tensor, max_coded_keys: int) -> Any:
        """Record: stage these rows of query (batch, q_heads, 1, head_dim), search their codes, begin the call.

        max_coded_keys: of all layers, see `StepKind`. Returns what `join` takes. While the host works,
        the device estimates what was not named: `rest`.
        """
        resources, own, begun = self._resources, query[self.rows], None
        gather = None if self.reads is Reads.HOST else self._gather
        ids, places = (self._ids, self.part.rows) if gather is None else (self._gather_ids, None)
        told = None if gather is None else self._told
        if self.reads is not Reads.DEVICE:
            stage_queries(own, self._staged, self.part.rows)
        if self._search is not None and max_coded_keys:
            sizes = len(own) * self._q_heads, max_coded_keys, self._search.shape.picked_room, query.device
            scratch = shared_scratch(resources.scratch, *sizes)
            resources.stage.wait(self._turn, resources.runtime)
            self._search.told = told
            self._search.run(own, ids, places, scratch, resources.runtime.opaque, scale=self.scoring.scale)
        if self.reads is not Reads.DEVICE:
            begun = resources.runtime.begin(self._call)
        self.rest = None
        if gather is not None:
            products = None if told is None else told.products
            run = functools.partial(self._run_gather, gather, own, products)
            self._beside = resources.runtime.parallel(run)  # it waits for the bus, what follows computes
        if max_coded_keys:
            resources.stage.follow(self._turn, resources.runtime)  # behind what is named: that is waited for first
        if self._search is not None and self._mass is not None and max_coded_keys:
            given = self._search, own, ids, places, scratch, self.scoring
            self.rest = self._mass.run(*given, resources.runtime.opaque)
        return begun

    def _run_gather(self, gather: HostRowGather, query: Tensor, products: Tensor | None) -> None:
        opaque = self._resources.runtime.opaque
        self._gathered = gather.run(query, self._gather_ids, self.scoring, opaque, products)

    def join(self, begun: Any) -> tuple[HostResult, Partial | None]:
        """Record: wait for the call. What the host found, or the device in its place, and what the device found in
        addition to the host, out (batch * q_heads, value_dim) and lse (batch * q_heads,).
        """
        runtime = self._resources.runtime
        gathered = None if self.reads is Reads.HOST else self._gathered
        if gathered is not None:
            runtime.after(self._beside)
        if begun is not None:
            runtime.join(begun)
        if gathered is None or begun is not None:
            return self.part, gathered
        return HostResult(gathered.out, gathered.lse, None, (self._nothing, self._tally)), None

    def raise_error(self) -> None:
        """Raise what the last replay left as the step's status; BackendError names the layer."""
        self._step.raise_error()

    def take_tail(self) -> tuple[Tensor, int]:
        """Return the estimates of all replays since the last call: of each query head the sum of its shares, float32
        (q_heads,), and rows times tokens. Blocks until the device is done.
        """
        self._resources.runtime.synchronize()
        sums = self._tally.view(-1, self._q_heads, 2).sum(dim=0)
        self._tally.zero_()
        return sums[:, 0], round(float(sums[0, 1]))

    def places_in(self, start: int, stop: int) -> range:
        """Return the rows of the batch from `start` to `stop` that it has."""
        return range(max(start, self.rows.start), min(stop, self.rows.stop))

    def tally_of(self, rows: range) -> Tensor:
        """Return the estimates of rows of the batch, (rows, q_heads, 2), a view: see `HostResult`."""
        first = rows.start - self.rows.start
        return self._tally.view(-1, self._q_heads, 2)[first : first + len(rows)]

    def forget(self, row: int | None = None) -> None:
        """Drop what the step and the search hold of a cache, or of what one of these rows has, until the next plan."""
        place = None if row is None else row - self.rows.start
        self._step.forget(place)
        self._apart = {number: one for number, one in self._apart.items() if place not in (None, number)}
        own = slice(None)
        if place is None:
            self._unbound = None
        elif self._search is not None:
            own = slice(place * self._search.kv_heads, (place + 1) * self._search.kv_heads)
            if self._unbound is not None:
                self._unbound.add(place)
        for one in self._bound:
            one.forget(own)


_NOTHING = CodedPieces([], [], None, None)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first row and the length of each run of neighbouring rows."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs


def _most_of(retrieve: Retrieve, row: int) -> int:
    """The largest number of keys of a query head of a row."""
    own = retrieve[row] if isinstance(retrieve, tuple) else retrieve
    return own.most if isinstance(own, HeadBudgets) else own


def _layouts(rows: Sequence[HostRow | None]) -> list[list[list[int]]]:
    """Ways to put a batch's rows into a step, best first: rows that share a path together, then each on its own.

    Each is a list of the step's rows, which are lists of the batch's rows, all equally long.
    """
    shared: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        shared.setdefault(-1 - number if row is None else id(row.path), []).append(number)
    together = list(shared.values())
    apart = [[number] for number in range(len(rows))]
    equal = len({len(members) for members in together}) == 1
    return [together, apart] if equal and len(together) < len(rows) else [apart]


def held_by(layer: RetrievalLayer) -> LayerKV:
    if layer.held is None:
        raise CaptureError("the cache is empty; a graph is captured after the first tokens were read")
    return layer.held


def _places(rows_of: list[list[int]], q_heads: int) -> Tensor:
    """int64 (batch * q_heads,): where a step (rows, q_heads, n) has the query head h of the batch's row b."""
    n = len(rows_of[0])
    places = torch.empty(len(rows_of) * n, q_heads, dtype=torch.int64)
    heads = torch.arange(q_heads)
    for row, members in enumerate(rows_of):
        for i, member in enumerate(members):
            places[member] = (row * q_heads + heads) * n + i
    return places.flatten()
