"""Retrieved attention over a sequence whose keys have codes on the device, for any number of new tokens.

The device selects candidates by codes, the host rescores them and attends (`index/device.py`). Queries are processed
in chunks: while the host works on one, the device searches the next. A chunk has all heads of a layer, and no kernel
is compiled for a number of queries.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import CodedPieces, new_mass, take_apart
from retrieval_attn.cpu.pool import Pool, default_pool
from retrieval_attn.cpu.step.plan import LayerStep, Rest, StepBuffers, StepCost, total_cost
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.clusters.mass import ClusterMass, TailPartial, name_with_mass
from retrieval_attn.gpu.codes.search import CodeRange, CodeShape, QuestionSearch
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.task.descriptor import METER_WORDS, WORDS
from retrieval_attn.offload.staging import pinned

MOST_QUERIES = 512
"""Maximum queries of one key-value head in a chunk."""
LEAST_QUERIES = 128
"""Maximum of a chunk that is not split: planning a step takes as long as answering these."""
MOST_CANDIDATES = 16 << 20
"""Maximum candidates in a chunk."""


@dataclass(frozen=True)
class CodedRange:
    """Tokens [start, stop) of a sequence's KV cache, with codes of one piece of them on the device.

    shape: sizes of the code search. k: keys that each query attends to; if `estimated`, in addition to all
    candidates.
    """

    path: SequenceKV
    parts: CodedPieces
    shape: CodeShape
    k: int
    estimated: bool

    @property
    def pieces(self) -> list[SearchRange]:
        """Pieces of the path, as a step takes them."""
        return self.parts.pieces

    @property
    def codes(self) -> list[CodeRange | None]:
        """Codes of each key-value head."""
        return self.parts.codes


def coded_range(
    path: SequenceKV, start: int, stop: int, k: int, spec: IndexSpec, estimated: bool = False
) -> CodedRange | None:
    """Return tokens [start, stop) with their codes on the device; None if no search for the best k can use these.

    None for codes of several segments, too. spec: of the indexes. estimated: whether keys without attention are
    estimated.
    """
    shape = spec.code_shape(path.head_dim, k, estimated)
    if shape is None:
        return None
    parts = take_apart(path, start, stop, k)
    return CodedRange(path, parts, CodeShape(*shape), k, estimated) if any(parts.codes) else None


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


class DeviceCodeSource:
    """Attention of queries (q_heads, positions, head_dim) on a device over a `CodedRange`: `begin`, then `finish`.

    rest: after `finish`, the estimated share of the weights, (q_heads, positions) float32 on the device; None
    without clusters.
    """

    rest: Tensor | None = None

    def __init__(self, over: CodedRange, queries: Tensor, *, scale: float, softcap: float | None) -> None:
        path = over.path
        heads = queries.shape[0], path.num_kv_heads, path.head_dim, path.value_dim
        shape = QuestionShape(queries.device, *heads, path.fmt, over.shape)
        self._over, self._queries, self._scoring = over, queries.float(), Scoring(scale, softcap)
        self._pool = default_pool() if path.pool is None else path.pool
        self._shape = shape
        self._rests: list[TailPartial] = []  # of the chunks so far
        self._desk: _ChunkBuffers | None = None
        size = shape.chunk(queries.shape[1])
        self._chunks = [slice(at, min(at + size, queries.shape[1])) for at in range(0, queries.shape[1], size)]

    def begin(self) -> None:
        """Launch the search of the first chunk; at most once, before `finish`."""
        if self._desk is None and self._chunks:
            self._desk = _ChunkBuffers.take(self._shape, self._pool)
            self._desk.bind(self._over)
            self._send(0)

    def finish(self) -> tuple[Partial, StepCost]:
        """out (q_heads, positions, value_dim) and lse (q_heads, positions), float32 on the device, and the cost.

        Raises BackendError, with the layer and head named, if a search failed.
        """
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
            ids, rest = self._desk.name(queries, self._scoring)
            self._desk.slots[number % 2].receive(queries, ids)
        if rest is not None:
            self._rests.append(rest)

    def _run(self, slot: _Slot, positions: int) -> StepCost:
        """Run the host's step of a chunk whose queries and candidates are being copied to `slot`."""
        over, step = self._over, slot.step
        step.layer = over.path.layer
        options: dict[str, Any] = {**self._scoring._asdict(), "threads": over.path.threads}
        options["rest"] = Rest([over.parts.table], over.shape.named if over.estimated else 0)
        if not step.plan([over.pieces], self._shape.q_heads, positions, over.k, **options):
            raise BackendError(
                f"layer {over.path.layer}: the codes cannot be searched: an index of keys without codes has no "
                "compiled search, or its candidates need too much memory; retrieve fewer keys"
            )
        slot.wait()
        return step.run()


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
            members = shape.group * shape.most
            self.search: QuestionSearch = QuestionSearch(shape.kv_heads, members, shape.codes, shape.device)
            self.mass = new_mass(shape.kv_heads, shape.value_dim, shape.device, waits=False)

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

    def bind(self, over: CodedRange) -> None:
        """Bind the search to the codes of a range, and the estimate to its clusters."""
        self.search.bind(over.codes)
        if over.parts.entries is not None:
            self.mass.bind(over.parts.entries)

    def give_back(self) -> None:
        """Release keys, codes and clusters; the next question may take the buffers."""
        self.search.forget()
        self.mass.forget()
        for slot in self.slots:
            slot.step.forget()
        with self._lock:
            self._idle.setdefault(self._key, []).append(self)

    def name(self, queries: Tensor, scoring: Scoring) -> tuple[Tensor, TailPartial | None]:
        """Select candidates of queries (q_heads, positions, head_dim) on the device: (q_heads * positions, room) int32.

        Return the estimate of all other keys, too, if clusters are bound.
        """
        return name_and_estimate(self.search, self.mass, queries.flatten(0, 1), scoring)


def name_and_estimate(
    search: QuestionSearch, mass: ClusterMass, queries: Tensor, scoring: Scoring
) -> tuple[Tensor, TailPartial | None]:
    """Select candidates (m, room) int32 of queries (m, head_dim), and estimate other keys; None without clusters."""
    ids = torch.empty(len(queries), search.shape.room, dtype=torch.int32, device=queries.device)
    if not any(mass.entries):
        search.name(queries, ids)
        return ids, None
    return ids, name_with_mass(search, mass, queries, ids, scoring)


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
