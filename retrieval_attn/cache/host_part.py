"""The host's part of a decode step, run eagerly: every row's query over what lies between its sinks and its window.

A captured step does the same through `engine/graph/host.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cache.held import HeldTokens
from retrieval_attn.cache.sequence import distinct
from retrieval_attn.config import Config
from retrieval_attn.cpu.host_attend import attend_paths, exact_lse
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.offload.stats import LayerStats
from retrieval_attn.offload.transfer import to_queries


@dataclass(frozen=True)
class Scoring:
    """How a layer turns inner products into scores: scale * q.k, soft-capped unless softcap is None."""

    scale: float
    softcap: float | None


@dataclass(frozen=True)
class _Shared:
    """A path and the rows that share it: queries (q_heads, rows * new, head_dim) over tokens [start, stop)."""

    host: SequenceKV
    rows: list[int]
    queries: np.ndarray[Any, Any]
    start: int
    stop: int


class HostPart:
    """Retrieved attention of query (batch, q_heads, new, head_dim) over the middle of every row."""

    def __init__(self, held: HeldTokens, query: Tensor, scoring: Scoring) -> None:
        self._scoring, self._device = scoring, query.device
        batch, self._q_heads, self._new, _ = query.shape
        self._shape = batch, self._q_heads, self._new
        self._shared = _shared_paths(held, to_queries(query))

    def attend(self, config: Config, value_dim: int, stats: LayerStats) -> Partial:
        """The partial on the query's device: rows that share a path ask it together, all of them in one call.

        A row with nothing between sinks and window gives out 0, lse -inf. Adds to `stats`.
        """
        began = time.perf_counter()
        out = torch.zeros(*self._shape, value_dim, dtype=torch.float32)
        lse = torch.full(self._shape, -torch.inf, dtype=torch.float32)
        # a share of the keys is another number for another length: one call per number
        groups: dict[int | None, list[_Shared]] = {}
        for one in self._shared:
            groups.setdefault(config.retrieve_count(one.stop - one.start), []).append(one)
        for k, group in groups.items():
            found = attend_paths(
                [one.host for one in group],
                [one.queries for one in group],
                [(one.start, one.stop) for one in group],
                k,
                scale=self._scoring.scale,
                softcap=self._scoring.softcap,
            )
            for one, part in zip(group, found, strict=True):
                out[one.rows] = self._by_row(one, part.out).reshape(len(one.rows), *self._shape[1:], value_dim)
                lse[one.rows] = self._by_row(one, part.lse).reshape(len(one.rows), *self._shape[1:])
                stats.keys_scanned += part.keys_scanned
                stats.bytes_read += part.bytes_read
                stats.search_seconds += part.search_seconds
                stats.attend_seconds += part.attend_seconds
        stats.host_seconds += time.perf_counter() - began
        return Partial(out.to(self._device), lse.to(self._device))

    def measure_mass(self, heads: int, static: Tensor, retrieved: Tensor, stats: LayerStats) -> None:
        """Add the share of exact attention's weight that sinks, window and retrieved keys have, for some heads.

        heads: how many per call; they take turns. static, retrieved: lse (batch, q_heads, new).
        """
        static, retrieved = static.cpu(), retrieved.cpu()
        first = stats.mass_count
        chosen = [(first + i) % self._q_heads for i in range(min(heads, self._q_heads))]
        for one in self._shared:
            scale, softcap = self._scoring.scale, self._scoring.softcap
            exact = exact_lse(one.host, one.queries, one.start, one.stop, chosen, scale=scale, softcap=softcap)
            middle = torch.from_numpy(exact).reshape(len(chosen), len(one.rows), self._new).transpose(0, 1)
            near = static[one.rows][:, chosen]
            share = torch.logaddexp(near, retrieved[one.rows][:, chosen]) - torch.logaddexp(near, middle)
            stats.mass += float(share.exp().sum())
            stats.mass_count += share.numel()

    def _by_row(self, one: _Shared, answers: np.ndarray[Any, Any]) -> Tensor:
        """(q_heads, rows * new, ...) -> (rows, q_heads, new, ...)."""
        tensor = torch.from_numpy(answers)
        return tensor.reshape(self._q_heads, len(one.rows), self._new, *tensor.shape[2:]).transpose(0, 1)


def _shared_paths(held: HeldTokens, queries: np.ndarray[Any, Any]) -> list[_Shared]:
    """queries (batch, q_heads, new, head_dim) float32 by path; rows with nothing to retrieve are left out."""
    hosts, ranges = held.hosts, held.ranges
    shared = []
    for host in distinct(hosts):
        rows = [row for row, other in enumerate(hosts) if other is host]
        start, stop = ranges[rows[0]]
        if stop > start:
            q_heads, new = queries.shape[1:3]
            stacked = queries[rows].transpose(1, 0, 2, 3).reshape(q_heads, len(rows) * new, -1)
            shared.append(_Shared(host, rows, stacked, start, stop))
    return shared
