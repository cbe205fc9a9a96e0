"""DeviceCodeSource: retrieved attention over keys that have codes on the device, for any number of new tokens.

The device selects candidates by codes (`index/device.py`). Then one of two gathers them, scores them exactly and
attends: the host (`HostGather`), in chunks of queries, so that the device searches the next chunk meanwhile; or for a
long question the device (`DeviceGather`), to which the keys and values of the layer are uploaded once, some heads at a
time. Both attend to the same keys.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import CodedPieces, new_mass, take_apart
from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.sequence import LayerUploads, stacked
from retrieval_attn.attention.source import AttentionRequest, AttentionSource, RangeResult, SourceResult, TokenRange
from retrieval_attn.cpu.pool import Pool, default_pool
from retrieval_attn.cpu.step.plan import LayerStep, Rest, StepBuffers, StepCost, total_cost
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.clusters.mass import TailPartial, name_with_mass
from retrieval_attn.gpu.codes.candidates import (
    MAX_SLOTS,
    Candidates,
    LateClusters,
    StoredRows,
    attend_candidates,
    attend_late,
    slots_for,
)
from retrieval_attn.gpu.codes.search import CodeRange, CodeShape, QuestionSearch
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.task.tasks import METER_WORDS, WORDS
from retrieval_attn.offload.staging import pinned
from retrieval_attn.offload.upload import UploadSpan

MOST_QUERIES = 512
"""Maximum queries of one key-value head in a chunk."""
LEAST_QUERIES = 128
"""Maximum of a chunk that is not split: planning a step takes as long as answering these."""
MOST_CANDIDATES = 16 << 20
"""Maximum candidates in a chunk."""


GATHERED_PER_UPLOADED = 1.0
"""Bytes that the host would gather for a question, for each byte of the layer's keys and values, from which on these
come to the device. Both ways move as many bytes in a second: on one H100 with 16 cores the threads gathered 54 GB/s,
and 55 GB/s crossed the bus from page-locked memory."""
MAX_SCANNED = 4096
"""Newest tokens without codes, all of which are scored, at most: with more, their scores are what takes the time."""


@dataclass(slots=True, eq=False)
class CodedRange(TokenRange):
    """Tokens of which one piece has codes on the device.

    parts: the tokens as a step of the host takes them. shape: sizes of the code search. k: keys that each query
    attends to; if `estimated`, in addition to all candidates.
    """

    parts: CodedPieces
    shape: CodeShape
    k: int
    estimated: bool

    @classmethod
    def of(cls, tokens: TokenRange, k: int, spec: IndexSpec, estimated: bool = False) -> CodedRange | None:
        """Return tokens with their codes. Returns None if a search for the best k cannot use any, or for codes of
        several segments.

        spec: of the indexes. estimated: whether keys without attention are estimated.
        """
        shape = spec.code_shape(tokens.host.head_dim, k, estimated)
        if shape is None:
            return None
        parts = take_apart(tokens.host, tokens.start, tokens.stop, k)
        if not any(parts.codes):
            return None
        return cls(tokens.host, tokens.rows, tokens.start, tokens.stop, parts, CodeShape(*shape), k, estimated)

    @property
    def pieces(self) -> list[SearchRange]:
        """Pieces of the path, as a step takes them."""
        return self.parts.pieces

    @property
    def codes(self) -> list[CodeRange | None]:
        """Codes of each key-value head."""
        return self.parts.codes

    @property
    def scanned_from(self) -> int:
        """The first token of the path without codes, if these come first."""
        return self.pieces[0].first + self.pieces[0].high

    def least_positions(self, q_heads: int) -> int:
        """Return the tokens of a question from which on the device gathers: the host would read more bytes."""
        path, named = self.host, self.shape.named
        row_bytes = path.fmt.row_bytes(path.head_dim), path.fmt.row_bytes(path.value_dim)
        gathered = q_heads * (named * row_bytes[0] + (named if self.estimated else self.k) * row_bytes[1])
        return max(1, -int(-GATHERED_PER_UPLOADED * self.stop * path.token_bytes // gathered))

    def device_gathers(self, queries: Tensor, uploads: LayerUploads) -> bool:
        """Return whether keys come to the device for queries (q_heads, positions, head_dim): worth it, simple, and with
        room.

        Simple: one index with codes of every head covers all but the newest tokens, which are few.
        """
        q_heads, positions, _ = queries.shape
        return (
            queries.is_cuda
            and positions >= self.least_positions(q_heads)
            and all(self.codes)
            and self.pieces[0].indexes is not None  # codes come first
            and not any(piece.indexes for piece in self.pieces[1:])
            and self.stop - self.scanned_from <= MAX_SCANNED
            and slots_for(self.shape.room, self.shape.room if self.estimated else self.k) <= MAX_SLOTS
            and uploads.reserve(UploadSpan.by_heads(self.host, self.stop))
        )


class DeviceCodeSource(AttentionSource[CodedRange]):
    """Tokens whose keys have codes on the device, which searches before it attends to the window."""

    retrieves = capturable = uploads = True

    def __init__(self, request: AttentionRequest, ranges: list[CodedRange]) -> None:
        super().__init__(request, ranges)
        self._gathers: list[QuestionGather] = []

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> CodedRange | None:
        if request.exact or request.held.batch.attends_to_all or not request.spec.keeps_device_keys:
            return None
        k = retrieved_keys(request.config, tokens.host, tokens.stop - tokens.start)
        return CodedRange.of(tokens, k, request.spec, request.config.estimates) if isinstance(k, int) else None

    def begin(self, query: Tensor, scoring: Scoring, *, last: bool = True) -> None:
        super().begin(query, scoring, last=last)
        self._gathers = [self._gather(one) for one in self.ranges]
        if not any(isinstance(one, DeviceGather) for one in self._gathers):
            self.request.held.uploads.clear()  # the layer before may have sent keys ahead
        self._gathers[0].begin()

    def _gather(self, over: CodedRange) -> QuestionGather:
        # one copy for both: dtype, and the order of rows
        queries = stacked(self.query, over.rows).to(torch.float32, memory_format=torch.contiguous_format).contiguous()
        uploads = self.request.held.uploads
        # rows over several contexts stay on the host: each would wait for the keys of all the others
        if len(self.ranges) == 1 and over.device_gathers(queries, uploads):
            return DeviceGather(over, queries, uploads, self.scoring)
        return HostGather(over, queries, self.scoring)

    def finish(self) -> SourceResult:
        """Attend to one range after the other, while the device searches the next."""
        found, costs = [], []
        for number, (over, gather) in enumerate(zip(self.ranges, self._gathers, strict=True)):
            for after in self._gathers[number + 1 : number + 2]:
                after.begin()
            partial, cost = gather.finish()
            found.append(RangeResult(over, partial, gather.rest))
            costs.append(cost)
        return self.assembled(found, self.ranges[0].host.value_dim, costs[0] if len(costs) == 1 else total_cost(costs))


class QuestionShape(NamedTuple):
    """The sizes that the memory of a question's chunks is allocated for."""

    device: torch.device
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    fmt: Format
    codes: CodeShape

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.q_heads // self.kv_heads

    @property
    def most(self) -> int:
        """Maximum positions of a chunk."""
        by_candidates = MOST_CANDIDATES // (self.q_heads * self.codes.room)
        return max(1, min(MOST_QUERIES // self.group, by_candidates))

    def chunk(self, positions: int) -> int:
        """Return the positions of a chunk: half of all, so that host and device overlap, if that is enough work."""
        least = max(1, LEAST_QUERIES // self.group)
        chunks = max(-(-positions // self.most), min(2, positions // least), 1)
        return max(1, -(-positions // chunks))


class QuestionGather(ABC):
    """Attention of queries (q_heads, positions, head_dim) on a device to a `CodedRange`, in chunks of positions.

    rest: after `finish`, the estimated share of the weights, (q_heads, positions) float32 on the device; None if it is
    not summed.
    """

    rest: Tensor | None = None

    def __init__(self, over: CodedRange, queries: Tensor, scoring: Scoring, size: int) -> None:
        """size: positions of a chunk."""
        self._over, self._queries, self._scoring = over, queries.float().contiguous(), scoring
        positions = queries.shape[1]
        self._chunks = [slice(at, min(at + size, positions)) for at in range(0, positions, size)]

    @abstractmethod
    def begin(self) -> None:
        """Launch the search of the first chunk; at most once, before `finish`."""

    @abstractmethod
    def finish(self) -> tuple[Partial, StepCost]:
        """Return out (q_heads, positions, value_dim) and lse (q_heads, positions), float32 on the device, and the cost.

        Raises BackendError, with the layer and head named, if a search failed.
        """


class HostGather(QuestionGather):
    """The host gathers, scores and attends. rest: None without clusters."""

    def __init__(self, over: CodedRange, queries: Tensor, scoring: Scoring) -> None:
        path = over.host
        heads = queries.shape[0], path.num_kv_heads, path.head_dim, path.value_dim
        shape = QuestionShape(queries.device, *heads, path.fmt, over.shape)
        super().__init__(over, queries, scoring, shape.chunk(queries.shape[1]))
        self._pool = default_pool() if path.pool is None else path.pool
        self._shape = shape
        self._rests: list[TailPartial] = []  # of the chunks so far
        self._desk: _ChunkBuffers | None = None

    def begin(self) -> None:
        if self._desk is None and self._chunks:
            self._desk = _ChunkBuffers.take(self._shape, self._pool)
            self._desk.search.bind(self._over)
            self._send(0)

    def finish(self) -> tuple[Partial, StepCost]:
        self.begin()
        shape, device = self._queries.shape[:2], self._queries.device
        out = torch.empty(*shape, self._shape.value_dim, dtype=torch.float32, device=device)
        lse, rest = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        self.rest = rest if self._over.estimated else None
        if self._desk is None:
            return Partial(out, lse), total_cost([])
        costs, desk = [], self._desk
        for number, part in enumerate(self._chunks):
            if number + 1 < len(self._chunks):
                self._send(number + 1)
            slot = desk.slots[number % 2]
            costs.append(self._run(slot, part.stop - part.start))
            slot.results(out[:, part], lse[:, part], rest[:, part])
        self._desk = None
        desk.give_back()  # not after an error: the device may still read or write there
        found = Partial(out, lse)
        if self._rests:
            others = joined(self._rests, len(out))
            found = merged(Partial(out, lse), others)
            # a share of the host's result is estimated, and all of the device's
            rest.mul_(torch.exp(lse - found.lse)).add_(torch.exp(others.lse - found.lse)).nan_to_num_()
        return found, total_cost(costs)

    def _send(self, number: int) -> None:
        """Launch the search of a chunk and the copies of its queries and candidates to the host."""
        assert self._desk is not None
        queries = self._queries[:, self._chunks[number]].contiguous()
        with on_device(queries.device):
            ids, rest = self._desk.search.name(queries.flatten(0, 1), self._scoring)
            self._desk.slots[number % 2].receive(queries, ids)
        if rest is not None:
            self._rests.append(rest)

    def _run(self, slot: _Slot, positions: int) -> StepCost:
        """Run the host's step of a chunk whose queries and candidates are being copied to `slot`."""
        over, step = self._over, slot.step
        step.layer = over.host.layer
        options: dict[str, Any] = {**self._scoring._asdict(), "threads": over.host.threads}
        options["rest"] = Rest([over.parts.table], over.shape.named if over.estimated else 0)
        if not step.plan([over.pieces], self._shape.q_heads, positions, over.k, **options):
            raise BackendError(
                f"layer {over.host.layer}: the codes cannot be searched: an index of keys without codes has no "
                "compiled search, or its candidates need too much memory; retrieve fewer keys"
            )
        slot.wait()
        return step.run()


class DeviceGather(QuestionGather):
    """The device gathers out of uploaded keys and values: the bus moves as many bytes a second as the host gathers.

    Only if `CodedRange.device_gathers`. A question with a query that is not finite takes the host's way, which looks at
    all keys, and has its `rest`.
    """

    def __init__(self, over: CodedRange, queries: Tensor, uploads: LayerUploads, scoring: Scoring) -> None:
        q_heads, positions, _ = queries.shape
        at_once = max(1, MOST_CANDIDATES // (q_heads * over.shape.room))
        chunks = -(-positions // at_once)
        super().__init__(over, queries, scoring, max(1, -(-positions // max(1, chunks))))
        self._uploads = uploads
        self._rest: TailPartial | None = None  # of the chunk whose keys were named
        self._ids: Tensor | None = None

    def begin(self) -> None:
        if self._ids is None and self._chunks:
            self._ids = self._name(self._chunks[0])  # it needs no keys for that

    def finish(self) -> tuple[Partial, StepCost]:
        """See `QuestionGather`. Kernels may be in flight still; the cost's seconds end with the last launch."""
        q_heads, positions, _ = self._queries.shape
        out = self._queries.new_empty(q_heads, positions, self._over.host.value_dim)
        lse = self._queries.new_empty(q_heads, positions)
        self.begin()
        costs = []
        for number, part in enumerate(self._chunks):
            began = time.perf_counter()
            ids = self._name(part) if self._ids is None else self._ids
            self._ids = None
            # waits for the names while keys cross; what comes behind is launched without waiting
            lost, named = torch.stack([(ids[:, self._needed - 1] < 0).sum(), (ids >= 0).sum()]).tolist()
            if lost:
                self._uploads.clear()
                part_of_host = HostGather(self._over, self._queries, self._scoring)
                found = part_of_host.finish()
                self.rest = part_of_host.rest
                return found
            searched = time.perf_counter()
            with on_device(ids.device):
                self._attend(part, ids, number == len(self._chunks) - 1, Partial(out, lse))
            scanned = q_heads * (part.stop - part.start) * (self._over.stop - self._over.scanned_from)
            seconds = searched - began, time.perf_counter() - searched
            costs.append(StepCost(*seconds, int(named) + scanned, self._over.stop * self._over.host.token_bytes))
        return Partial(out, lse), total_cost(costs)

    @property
    def _needed(self) -> int:
        """Keys that are named for every query that is finite."""
        codes = self._over.pieces[0]
        return min(self._over.shape.named, codes.high - codes.index_first)

    def _name(self, part: slice) -> Tensor:
        """Ids (q_heads * positions, room) int32 for queries of some positions."""
        queries, path = self._queries[:, part].flatten(0, 1), self._over.host
        heads, value_dim = path.num_kv_heads, path.value_dim
        search = _CandidateSearch(heads, len(queries) // heads, value_dim, self._over.shape, queries.device)
        with on_device(queries.device):
            search.bind(self._over)
            ids, self._rest = search.name(queries, self._scoring)
        return ids

    def _attend(self, part: slice, ids: Tensor, last: bool, into: Partial) -> None:
        """Queries of some positions over all heads, as these come."""
        path, stop = self._over.host, self._over.stop
        group = len(self._queries) // path.num_kv_heads
        queries = self._queries[:, part].contiguous()
        positions = queries.shape[1]
        members = group * positions
        ids = ids.view(path.num_kv_heads, members, -1)
        rest = None if self._rest is None else joined([self._rest], len(self._queries))

        def cut(host: SequenceKV) -> UploadSpan:
            return UploadSpan.by_heads(host, min(stop, len(host)))

        first = 0
        for _, key, value in self._uploads.walk([cut(path)], None, last=last, cut=cut):
            heads = slice(first, first + key.shape[1])
            of = slice(group * heads.start, group * heads.stop)
            asked = queries[of].view(key.shape[1], members, -1)
            parts = self._answer(asked, StoredRows(key[0], value[0]), ids[heads].flatten(0, 1), heads)
            own = [Partial(one.out.view(-1, positions, path.value_dim), one.lse.view(-1, positions)) for one in parts]
            if rest is not None:
                own.append(Partial(rest.out[of], rest.lse[of]))
            found = merged(*own)
            into.out[of, part], into.lse[of, part] = found.out, found.lse
            first = heads.stop

    def _answer(self, asked: Tensor, rows: StoredRows, ids: Tensor, heads: slice) -> list[Partial]:
        """Partials of asked (heads, members, head_dim) over rows of these heads: (heads, members, ...) each."""
        over, codes = self._over, self._over.pieces[0]
        first, scanned_from = codes.first + codes.index_first, over.scanned_from
        if not over.estimated:
            return [attend_candidates(asked, rows, Candidates(ids, first, scanned_from, over.k), *self._scoring)]
        # all that were named, and of those without codes the best, as the host does it
        named = attend_candidates(asked, rows, Candidates(ids, first, rows.keys.shape[1], ids.shape[1]), *self._scoring)
        late = StoredRows(rows.keys[:, scanned_from:], rows.values[:, scanned_from:])
        if not late.keys.shape[1]:
            return [named]
        return [named, attend_late(asked, late, over.k, self._late_clusters(heads), self._scoring)]

    def _late_clusters(self, heads: slice) -> LateClusters | None:
        """The clusters of the tokens without codes, of these heads; None where these are left out."""
        table, pieces = self._over.parts.table, self._over.pieces[1:]
        if table is None:
            return None
        members = [piece.members[heads, piece.low : piece.high] for piece in pieces if piece.members is not None]
        device = self._queries.device
        numbers = torch.from_numpy(np.concatenate(members, axis=1).astype(np.int64)).to(device)
        return LateClusters(numbers, torch.from_numpy(table.means[heads]).to(device))


class _Slot:
    """Host memory of a chunk, page-locked with CUDA, and its step."""

    def __init__(self, shape: QuestionShape, pool: Pool) -> None:
        self._shape = shape
        count = shape.q_heads * shape.most
        cuda = shape.device.type == "cuda"
        self._queries, self._out, self._lse, self._rest = (
            _numbers(size, cuda).view(torch.float32)
            for size in (count * shape.head_dim, count * shape.value_dim, count, count)
        )
        self._ids = _numbers(count * shape.codes.room, cuda).view(torch.int32).view(count, shape.codes.room)
        meters, descriptor = np.zeros(pool.workers * METER_WORDS, np.int64), np.zeros(WORDS, np.int64)
        results = self._out.numpy(), self._lse.numpy(), meters, descriptor
        named = self._ids.numpy(), self._rest.numpy()
        self.step = LayerStep(pool, shape.fmt, buffers=StepBuffers(self._queries.numpy(), *results, *named))
        self._sent = torch.cuda.Event() if cuda else None
        self._taken = torch.cuda.Event() if cuda else None

    def receive(self, queries: Tensor, ids: Tensor) -> None:
        """Copy a chunk's queries (q_heads, positions, head_dim) and candidates here, without blocking."""
        self._queries[: queries.numel()].view(queries.shape).copy_(queries, non_blocking=True)
        self._ids[: len(ids)].copy_(ids, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Block until the copies to the host are done, and those of earlier results to the device."""
        for event in (self._sent, self._taken):
            if event is not None:
                event.synchronize()

    def results(self, out: Tensor, lse: Tensor, rest: Tensor) -> None:
        """Copy the step's results to out (q_heads, positions, value_dim), lse and rest, without blocking."""
        with on_device(out.device):
            out.copy_(self._out[: out.numel()].view(out.shape), non_blocking=True)
            lse.copy_(self._lse[: lse.numel()].view(lse.shape), non_blocking=True)
            rest.copy_(self._rest[: rest.numel()].view(rest.shape), non_blocking=True)
            if self._taken is not None:
                self._taken.record()


def _numbers(count: int, cuda: bool) -> Tensor:
    """Allocate host memory for `count` numbers of 4 bytes, uint8."""
    return pinned(4 * count) if cuda else torch.empty(4 * count, dtype=torch.uint8)


class _ChunkBuffers:
    """Buffers of two chunks of a question and of its search on the device, reused by later layers and questions.

    One question uses them at a time: two concurrent questions take two.
    """

    _idle: dict[tuple[QuestionShape, int], list[_ChunkBuffers]] = {}
    _lock = threading.Lock()

    def __init__(self, shape: QuestionShape, pool: Pool) -> None:
        self._key, self._shape = (shape, id(pool)), shape
        self._pool = pool  # kept, so that its id stays taken
        with torch.inference_mode(False), torch.no_grad():  # the next question may come outside inference mode
            self.slots = [_Slot(shape, pool) for _ in range(2)]
            sizes = shape.kv_heads, shape.group * shape.most, shape.value_dim
            self.search = _CandidateSearch(*sizes, shape.codes, shape.device)

    @classmethod
    def take(cls, shape: QuestionShape, pool: Pool) -> _ChunkBuffers:
        """Return idle buffers, or new ones."""
        with cls._lock:
            for key in [key for key, desks in cls._idle.items() if not desks or desks[0]._pool.closed]:
                del cls._idle[key]
            idle = cls._idle.get((shape, id(pool)))
            if idle:
                return idle.pop()
        return cls(shape, pool)

    def give_back(self) -> None:
        """Release keys, codes and clusters; the next question may take the buffers."""
        self.search.forget()
        for slot in self.slots:
            slot.step.forget()
        with self._lock:
            self._idle.setdefault(self._key, []).append(self)


class _CandidateSearch:
    """Search of a range's codes on the device for `members` queries of each key-value head."""

    def __init__(self, kv_heads: int, members: int, value_dim: int, shape: CodeShape, device: torch.device) -> None:
        self._search: QuestionSearch = QuestionSearch(kv_heads, members, shape, device)
        self._mass = new_mass(kv_heads, value_dim, device, waits=False)

    def bind(self, over: CodedRange) -> None:
        """Bind the codes and the clusters of a range."""
        self._search.bind(over.codes)
        if over.parts.entries is not None:
            self._mass.bind(over.parts.entries)

    def forget(self) -> None:
        """Release codes and clusters."""
        self._search.forget()
        self._mass.forget()

    def name(self, queries: Tensor, scoring: Scoring) -> tuple[Tensor, TailPartial | None]:
        """Select candidates (m, room) int32 of queries (m, head_dim). Estimate other keys; None without clusters."""
        ids = torch.empty(len(queries), self._search.shape.room, dtype=torch.int32, device=queries.device)
        if not any(self._mass.entries):
            self._search.name(queries, ids)
            return ids, None
        return ids, name_with_mass(self._search, self._mass, queries, ids, scoring)


def joined(rests: list[TailPartial], q_heads: int) -> Partial:
    """Concatenate the estimates of chunks, each (q_heads * its positions), to (q_heads, positions)."""
    outs = [rest.out.view(q_heads, -1, rest.out.shape[1]) for rest in rests]
    lses = [rest.lse.view(q_heads, -1) for rest in rests]
    return Partial(torch.cat(outs, dim=1), torch.cat(lses, dim=1))


def merged(*parts: Partial) -> Partial:
    """Merge partials (q_heads, positions, ...) of disjoint keys."""
    whole = merge([Partial(one.out[None], one.lse[None]) for one in parts])
    return Partial(whole.out[0], whole.lse[0])


def on_device(device: torch.device) -> Any:
    """Return a context in which kernels are launched on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
