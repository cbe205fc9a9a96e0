"""Retrieved attention of a long question: the layer's keys and values come to the device for it, some heads at a time.

The host's gathers grow with the question: every query wants its own few hundred rows. From some length on they cost
more than bringing all rows over the bus once, where the device gathers thirty times faster. The same keys are named by
the same codes as in `device_codes.py`, get the same exact scores, and the same best ones are attended to
(`gpu/codes/candidates.py`).
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import new_mass
from retrieval_attn.attention.device_codes import (
    MOST_CANDIDATES,
    CodedRange,
    DeviceCodeSource,
    joined,
    merged,
    name_and_estimate,
    on_device,
)
from retrieval_attn.attention.layer_uploads import LayerUploads
from retrieval_attn.cpu.step.plan import StepCost, total_cost
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.clusters.mass import TailPartial
from retrieval_attn.gpu.codes.candidates import MAX_SLOTS, Candidates, StoredRows, attend_candidates, slots_for
from retrieval_attn.gpu.codes.late import LateClusters, attend_late
from retrieval_attn.gpu.codes.search import QuestionSearch
from retrieval_attn.offload.upload import UploadSpan

GATHERED_PER_UPLOADED = 1.0
"""Bytes that the host would gather for a question, for each byte of the layer's keys and values, from which on these
come to the device. Both ways move as many bytes in a second: on one H100 with 16 cores the threads gathered 54 GB/s,
and 55 GB/s crossed the bus from page-locked memory."""
MAX_SCANNED = 4096
"""Newest tokens without codes, all of which are scored, at most: with more, their scores are what takes the time."""


def least_positions(over: CodedRange, q_heads: int) -> int:
    """Tokens of a question from which on it is answered here."""
    path = over.path
    row_bytes, named = (path.fmt.row_bytes(path.head_dim), path.fmt.row_bytes(path.value_dim)), over.shape.named
    gathered = q_heads * (named * row_bytes[0] + (named if over.estimated else over.k) * row_bytes[1])
    return max(1, -int(-GATHERED_PER_UPLOADED * _stop(over) * path.token_bytes // gathered))


def serves(over: CodedRange, queries: Tensor, uploads: LayerUploads) -> bool:
    """Whether keys come to the device for queries (q_heads, positions, head_dim): worth it, simple, and with room.

    Simple: one index with codes of every head covers all but the newest tokens, which are few.
    """
    q_heads, positions, _ = queries.shape
    return (
        queries.is_cuda
        and positions >= least_positions(over, q_heads)
        and all(over.codes)
        and over.pieces[0].indexes is not None  # codes come first
        and not any(piece.indexes for piece in over.pieces[1:])
        and _stop(over) - _scanned_from(over) <= MAX_SCANNED
        and slots_for(over.shape.room, over.shape.room if over.estimated else over.k) <= MAX_SLOTS
        and uploads.reserve(UploadSpan.by_heads(over.path, _stop(over)))
    )


def _stop(over: CodedRange) -> int:
    last = over.pieces[-1]
    return last.first + last.high


def _scanned_from(over: CodedRange) -> int:
    """The first token of the path without codes."""
    return over.pieces[0].first + over.pieces[0].high


class UploadSource:
    """Attend with queries (q_heads, positions, head_dim) over a `CodedRange` like `DeviceCodeSource`: `begin`, then
    `finish`.

    For what `serves` says. A question with a query that is not finite takes the host's way, which looks at all keys.
    rest: None, for which share is estimated is not summed here; on the host's way as there.
    """

    rest: Tensor | None = None

    def __init__(
        self, over: CodedRange, queries: Tensor, uploads: LayerUploads, *, scale: float, softcap: float | None
    ) -> None:
        self._over, self._queries, self._uploads = over, queries.float().contiguous(), uploads
        self._scoring = Scoring(scale, softcap)
        self._rest: TailPartial | None = None  # of the turn whose keys were named
        q_heads, positions, _ = queries.shape
        at_once = max(1, MOST_CANDIDATES // (q_heads * over.shape.room))
        turns = -(-positions // at_once)
        size = max(1, -(-positions // max(1, turns)))
        self._turns = [slice(at, min(at + size, positions)) for at in range(0, positions, size)]
        self._ids: Tensor | None = None

    def begin(self) -> None:
        """Let the device name keys for the first queries: it needs no keys for that."""
        if self._ids is None and self._turns:
            self._ids = self._name(self._turns[0])

    def finish(self) -> tuple[Partial, StepCost]:
        """out (q_heads, positions, value_dim) and lse (q_heads, positions), float32 on the device, and the cost.

        Works of the device may be under way still; its seconds are those until the last was launched.
        """
        q_heads, positions, _ = self._queries.shape
        out = self._queries.new_empty(q_heads, positions, self._over.path.value_dim)
        lse = self._queries.new_empty(q_heads, positions)
        self.begin()
        costs = []
        for number, part in enumerate(self._turns):
            began = time.perf_counter()
            ids = self._name(part) if self._ids is None else self._ids
            self._ids = None
            # waits for the names while keys cross; what comes behind is launched without waiting
            lost, named = torch.stack([(ids[:, self._needed - 1] < 0).sum(), (ids >= 0).sum()]).tolist()
            if lost:
                self._uploads.clear()
                part_of_host = DeviceCodeSource(self._over, self._queries, **self._scoring._asdict())
                found = part_of_host.finish()
                self.rest = part_of_host.rest
                return found
            searched = time.perf_counter()
            with on_device(ids.device):
                self._attend(part, ids, number == len(self._turns) - 1, Partial(out, lse))
            scanned = q_heads * (part.stop - part.start) * (_stop(self._over) - _scanned_from(self._over))
            seconds = searched - began, time.perf_counter() - searched
            costs.append(StepCost(*seconds, int(named) + scanned, _stop(self._over) * self._over.path.token_bytes))
        return Partial(out, lse), total_cost(costs)

    @property
    def _needed(self) -> int:
        """Keys that are named for every query that is finite."""
        codes = self._over.pieces[0]
        return min(self._over.shape.named, codes.high - codes.index_first)

    def _name(self, part: slice) -> Tensor:
        """Ids (q_heads * positions, room) int32 for queries of some positions."""
        queries, path = self._queries[:, part].flatten(0, 1), self._over.path
        search = QuestionSearch(path.num_kv_heads, len(queries) // path.num_kv_heads, self._over.shape, queries.device)
        mass = new_mass(path.num_kv_heads, path.value_dim, queries.device, waits=False)
        with on_device(queries.device):
            search.bind(self._over.codes)
            if self._over.parts.entries is not None:
                mass.bind(self._over.parts.entries)
            ids, self._rest = name_and_estimate(search, mass, queries, self._scoring)
        return ids

    def _attend(self, part: slice, ids: Tensor, last: bool, into: Partial) -> None:
        """Queries of some positions over all heads, as these come."""
        path, stop = self._over.path, _stop(self._over)
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
        first, scanned_from = codes.first + codes.index_first, _scanned_from(over)
        if not over.estimated:
            return [attend_candidates(asked, rows, Candidates(ids, first, scanned_from, over.k), *self._scoring)]
        # all that were named, and of those without codes the best, as the host does it
        named = attend_candidates(asked, rows, Candidates(ids, first, rows.keys.shape[1], ids.shape[1]), *self._scoring)
        late = StoredRows(rows.keys[:, scanned_from:], rows.values[:, scanned_from:])
        if not late.keys.shape[1]:
            return [named]
        return [named, attend_late(asked, late, over.k, self._late_clusters(heads), *self._scoring)]

    def _late_clusters(self, heads: slice) -> LateClusters | None:
        """The clusters of the tokens without codes, of these heads; None where these are left out."""
        table, pieces = self._over.parts.table, self._over.pieces[1:]
        if table is None:
            return None
        members = [piece.members[heads, piece.low : piece.high] for piece in pieces if piece.members is not None]
        device = self._queries.device
        numbers = torch.from_numpy(np.concatenate(members, axis=1).astype(np.int64)).to(device)
        return LateClusters(numbers, torch.from_numpy(table.means[heads]).to(device))
