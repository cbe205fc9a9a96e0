"""HostAttention: attention of an eager step's queries over the tokens between sinks and window, for every row.

Queries use `DeviceCodeSource` if the device has codes of the keys, and a long question `UploadSource`. A captured step
computes the same in `runner/graph/host.py`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.attention import upload as uploaded_part
from retrieval_attn.attention.device_codes import CodedRange, DeviceCodeSource, coded_range
from retrieval_attn.attention.layer import PathRows
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.layer_uploads import LayerUploads
from retrieval_attn.attention.sequence import rows_by_path, stacked, unstacked
from retrieval_attn.attention.upload import UploadSource
from retrieval_attn.config import Config
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import HostPartial, attend_paths
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.staging import to_queries
from retrieval_attn.offload.traffic import LayerStats

log = logging.getLogger(__name__)


def retrieved_keys(config: Config, host: SequenceKV, num_keys: int) -> int | HeadBudgets | None:
    """Keys to retrieve out of `num_keys` of a path, which may be a number for each head; None means all of them."""
    count = config.retrieve_count(num_keys)
    if config.retrieve != "auto":
        return count
    if host.budgets is None:
        _warn_no_budgets(count)
    return count if host.budgets is None else host.budgets


@functools.cache
def _warn_no_budgets(count: int | None) -> None:
    """Once: answers are right, with one number for all heads."""
    log.warning(
        "retrieve='auto': every head gets %s keys of a text that was no longer than sinks and window when it was read, "
        "or was read with another number: nothing was measured for it",
        count,
    )


class HostAttention:
    """Retrieved attention of query (batch, q_heads, new, head_dim) over the middle of every row: `begin`, `attend`.

    rest: the share of its weights that is estimated, (batch, q_heads, new) float32 on the query's device, 0 for a row
    with no middle; None before `attend`, and where a row's keys that are not retrieved are left out.
    """

    rest: Tensor | None = None

    def __init__(self, held: LayerKV, query: Tensor, scoring: Scoring, spec: IndexSpec, uploads: LayerUploads) -> None:
        """spec: of the indexes. uploads: of the layer."""
        self._uploads = uploads
        self._scoring, self._spec, self._query, self._device = scoring, spec, query, query.device
        batch, self._q_heads, self._new, _ = query.shape
        self._shape = batch, self._q_heads, self._new
        self.paths = _shared_paths(held)
        self._coded: list[tuple[PathRows, DeviceCodeSource | UploadSource]] = []
        self._apart: dict[int | HeadBudgets | None, list[PathRows]] = {}

    def begin(self, config: Config) -> None:
        """Let the device search where it has codes: what follows until `attend` runs at the same time."""
        for one in self.paths:
            k = retrieved_keys(config, one.host, one.stop - one.start)
            span = one.start, one.stop
            over = coded_range(one.host, *span, k, self._spec, config.estimates) if isinstance(k, int) else None
            if over is None:
                # of one number, or of numbers by heads: one call for each
                self._apart.setdefault(k, []).append(one)
            else:
                # one copy for both: dtype, and the order of rows
                queries = stacked(self._query, one.rows).to(torch.float32, memory_format=torch.contiguous_format)
                self._coded.append((one, self._coded_part(over, queries.contiguous())))
        if not any(isinstance(part, UploadSource) for _, part in self._coded):
            self._uploads.clear()  # the layer before may have sent keys ahead
        if self._coded:
            self._coded[0][1].begin()

    def _coded_part(self, over: CodedRange, queries: Tensor) -> DeviceCodeSource | UploadSource:
        # rows over several contexts stay on the host: each would wait for the keys of all the others
        if len(self.paths) == 1 and uploaded_part.serves(over, queries, self._uploads):
            return UploadSource(over, queries, self._uploads, **self._scoring._asdict())
        return DeviceCodeSource(over, queries, **self._scoring._asdict())

    def attend(self, config: Config, value_dim: int, stats: LayerStats) -> Partial:
        """The partial on the query's device: rows that share a path ask it together, all of them in one call.

        A row with nothing between sinks and window gives out 0, lse -inf. Adds to `stats`.
        """
        began = time.perf_counter()
        if not self._coded and not self._apart:
            self.begin(config)
        if len(self._coded) == 1 and len(self._coded[0][0].rows) == self._shape[0]:  # nothing to put together
            part = self._coded[0][1]
            found = self._finish(part, stats)
            self.rest = None if part.rest is None else unstacked(part.rest, self._shape[0])
            stats.host_seconds += time.perf_counter() - began
            return Partial(*(unstacked(one, self._shape[0]) for one in found))
        if len(self.paths) == 1 and len(self.paths[0].rows) == self._shape[0]:  # nor here
            ((k, group),) = self._apart.items()
            (answer,) = self._ask(k, group, stats)
            self.rest = None if answer.rest is None else self._by_row(answer.rest)
            out, lse = self._by_row(answer.out), self._by_row(answer.lse)
            stats.host_seconds += time.perf_counter() - began
            return Partial(out, lse)
        out = torch.zeros(*self._shape, value_dim, dtype=torch.float32, device=self._device)
        lse = torch.full(self._shape, -torch.inf, dtype=torch.float32, device=self._device)
        self.rest = torch.zeros_like(lse)
        for number, (one, part) in enumerate(self._coded):
            for _, after in self._coded[number + 1 : number + 2]:
                after.begin()
            self._place(one, self._finish(part, stats), (out, lse))
            self._place_rest(one, part.rest)
        for k, group in self._apart.items():
            for one, answer in zip(group, self._ask(k, group, stats), strict=True):
                self._place(one, Partial(*map(torch.from_numpy, (answer.out, answer.lse))), (out, lse))
                self._place_rest(one, None if answer.rest is None else torch.from_numpy(answer.rest))
        stats.host_seconds += time.perf_counter() - began
        return Partial(out, lse)

    def _ask(self, k: int | HeadBudgets | None, group: list[PathRows], stats: LayerStats) -> list[HostPartial]:
        """Attend on the host for several paths, k keys per query. Adds the counts to `stats`, but not the time."""
        answers = attend_paths(
            [one.host for one in group],
            [self._host_queries(one) for one in group],
            [(one.start, one.stop) for one in group],
            k,
            scale=self._scoring.scale,
            softcap=self._scoring.softcap,
        )
        for answer in answers:
            stats.keys_scanned += answer.keys_scanned
            stats.bytes_read += answer.bytes_read
            stats.search_seconds += answer.search_seconds
            stats.attend_seconds += answer.attend_seconds
        return answers

    def _finish(self, part: DeviceCodeSource | UploadSource, stats: LayerStats) -> Partial:
        found, cost = part.finish()
        stats.keys_scanned += cost.keys_scanned
        stats.bytes_read += cost.bytes_read
        stats.search_seconds += cost.search_seconds
        stats.attend_seconds += cost.attend_seconds
        return found

    @cached_property
    def _host_query(self) -> Tensor:
        return torch.from_numpy(to_queries(self._query))

    def _host_queries(self, one: PathRows) -> np.ndarray:
        """The queries of the rows that share a path, float32: (q_heads, rows * new, head_dim)."""
        return stacked(self._host_query, one.rows).contiguous().numpy()

    def _by_row(self, part: np.ndarray) -> Tensor:
        """(q_heads, batch * new, ...) that all rows got together, (batch, q_heads, new, ...) on the query's device."""
        return unstacked(torch.from_numpy(part), self._shape[0]).to(self._device)

    def _place_rest(self, one: PathRows, rest: Tensor | None) -> None:
        if rest is None or self.rest is None:
            self.rest = None
        else:
            self._place(one, (rest,), (self.rest,))

    def _place(self, one: PathRows, found: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Write answers (q_heads, rows * new, ...) to the rows that they belong to."""
        for part, target in zip(found, into, strict=True):
            rows = unstacked(part, len(one.rows)).to(target.device)
            if len(rows) == len(target):
                target.copy_(rows)  # indices would have to cross to the device
            else:
                target[one.rows] = rows


def _shared_paths(held: LayerKV) -> list[PathRows]:
    """The rows by path; those with nothing to retrieve are left out."""
    hosts, ranges = held.hosts, held.ranges
    shared = []
    for host, rows in rows_by_path(hosts):
        start, stop = ranges[rows[0]]
        if stop > start:
            shared.append(PathRows(host, rows, start, stop))
    return shared
