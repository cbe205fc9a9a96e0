"""One token of several caches in one layer on a CPU: their windows in one job, their searches in one step.

What a row gets is what its layer would give it alone. Rows that cannot be searched together, or whose search together
failed, are searched alone, so that an error is told of the row that it belongs to.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.cache.held import HeldTokens
from retrieval_attn.cache.host_part import retrieved_keys
from retrieval_attn.cache.prefix import PrefixPlans
from retrieval_attn.cache.retrieval import RetrievalLayer, begin_token
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import HostPartial, attend_path, plan_paths
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.step.plan import LayerStep, row_costs
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.cpu.windows import Stretch, attend_stretches
from retrieval_attn.gpu.attention.merge import Partial, merge, sink_logit_partial
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.transfer import host_format, to_queries

log = logging.getLogger(__name__)

KEPT_STEPS = 4
"""Plans of one layer that are kept: rows that attend to different numbers of keys have one each."""


class RowAsks(NamedTuple):
    """A row's part of a step: row, its layer, what that holds, and what it is to attend to on the host."""

    row: int
    layer: RetrievalLayer
    held: HeldTokens
    host: SequenceKV
    span: tuple[int, int]
    top_k: int | HeadBudgets | None

    @property
    def likeness(self) -> Hashable:
        """Rows that agree in it may be searched in one step, each as alone; None: alone."""
        if self.top_k is None:
            return None
        numbers = "by heads" if isinstance(self.top_k, HeadBudgets) else self.top_k
        host = self.host
        shape = host.num_kv_heads, host.head_dim, host.value_dim, host.fmt
        return numbers, shape, host.threads, id(host.pool), host.layer


class StepPlans:
    """Steps over the paths of several caches, kept from token to token. A path that is gone is let go of.

    exact: the same of prefixes in pages. host_seconds: that rows' keys were searched and attended to, since the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[Hashable, _KeptStep] = {}
        self.exact = PrefixPlans()
        self.host_seconds = 0.0

    def ask(
        self, key: Hashable, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring
    ) -> list[HostPartial] | None:
        """What each row gets, in one step; None where no step serves them. Raises what went wrong with any of them.

        queries (rows, q_heads, head_dim) float32. key: of rows that may go together.
        """
        with self._lock:
            kept = self._steps.pop(key, None)
            host = asks[0].host
            pool = default_pool() if host.pool is None else host.pool
            if kept is None or kept.step.pool is not pool:
                kept = _KeptStep(LayerStep(pool, host.fmt, layer=host.layer))
            self._steps[key] = kept  # the newest last
            layer = [one for one in self._steps if isinstance(one, tuple) and one[-1] == host.layer]
            for old in layer[:-KEPT_STEPS]:
                self._steps.pop(old).forget()
        return kept.run(asks, queries, scoring)


class _KeptStep:
    """A step, used by one thread at a time, that lets go of memory when a path of its rows is gone."""

    def __init__(self, step: LayerStep) -> None:
        self.step = step
        self._lock = threading.Lock()
        self._paths: list[weakref.ref[SequenceKV]] = []
        self._gone = False

    def run(self, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> list[HostPartial] | None:
        """See `StepPlans.ask`."""
        with self._lock:
            if [one() for one in self._paths] != [one.host for one in asks]:
                self._paths = [weakref.ref(one.host, self._path_gone) for one in asks]
            try:
                return self._run(asks, queries, scoring)
            finally:
                if self._gone:
                    self._forget()

    def _run(self, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> list[HostPartial] | None:
        step, first = self.step, asks[0].top_k
        budgets = tuple(one.top_k for one in asks if isinstance(one.top_k, HeadBudgets))
        assert isinstance(first, int) or len(budgets) == len(asks)
        planned = plan_paths(
            step,
            [one.host for one in asks],
            [one.span for one in asks],
            (queries.shape[1], 1),
            first if isinstance(first, int) else budgets,
            threads=asks[0].host.threads,
            **scoring._asdict(),
        )
        if not planned:
            return None
        step.queries[:, :, 0] = queries
        costs = row_costs(step, step.run())
        out, lse, rest = step.out.copy(), step.lse.copy(), step.rest.copy()
        return [
            HostPartial(
                out[i],
                lse[i],
                costs[i].keys_scanned,
                costs[i].bytes_read,
                costs[i].search_seconds,
                costs[i].attend_seconds,
                None if one.host.clusters is None else rest[i],
            )
            for i, one in enumerate(asks)
        ]

    def forget(self) -> None:
        """Nothing of any row is held from now on."""
        self._gone = True
        if self._lock.acquire(blocking=False):  # else who runs it does
            try:
                self._forget()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        self._gone, self._paths = False, []
        self.step.forget()

    def _path_gone(self, path: object, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # when Python ends, modules are gone before paths are
            self.forget()


def decode_together(
    plans: StepPlans,
    layers: Items[tuple[int, RetrievalLayer, MaskSpec]],
    module: nn.Module,
    query: Tensor,
    scoring: Scoring,
    sink_logits: Tensor | None,
    value_dim: int,
    exact: Partial | None = None,
) -> tuple[Tensor, dict[int, Exception]]:
    """Each layer, with the row of `query` that it is for, and its mask: what its token attends to.

    query (rows, q_heads, 1, head_dim) on the CPU. exact: of all rows, what they attend to in pages. The layers have
    their new keys and values (`update`). Returns (rows, q_heads, 1, value_dim) float32, 0 in rows that are not asked
    for, and what went wrong with a row.
    """
    errors: dict[int, Exception] = {}
    asks: list[RowAsks] = []
    for row, layer, spec in layers:
        try:
            asks.append(_begin(row, layer, module, query, spec))
        except Exception as error:
            errors[row] = error
    result = torch.zeros(*query.shape[:3], value_dim, dtype=torch.float32)
    if not asks:
        return result, errors
    rows = [one.row for one in asks]
    queries = to_queries(query)[:, :, 0]
    own = np.ascontiguousarray(queries if len(rows) == len(query) else queries[rows])
    own_query = torch.from_numpy(own).unsqueeze(2)
    static = _windows(asks, own, scoring, value_dim)
    retrieved, rests = _retrieved(plans, asks, own, scoring, value_dim, errors)
    parts = [static, retrieved] if any(stop > start for start, stop in (one.span for one in asks)) else [static]
    if exact is not None:
        parts.append(exact if len(rows) == len(query) else Partial(exact.out[rows], exact.lse[rows]))
    found = merge(parts)
    for i, one in enumerate(asks):
        rest = rests.get(i)
        if one.row not in errors:
            try:
                if one.held.window.room == 0:
                    one.layer.spill()
            except Exception as error:
                errors[one.row] = error
                continue
            if rest is not None:
                one.layer.tail.add(rest, retrieved.lse[i : i + 1], found.lse[i : i + 1])
    if sink_logits is not None:
        found = merge([found, sink_logit_partial(sink_logits, own_query, value_dim)])
    if len(rows) == len(query):
        return found.out, errors
    result[rows] = found.out
    return result, errors


def _begin(row: int, layer: RetrievalLayer, module: nn.Module, query: Tensor, spec: MaskSpec) -> RowAsks:
    held = begin_token(layer, module, query[row : row + 1], spec)
    (host,), (span,) = held.hosts, held.ranges
    return RowAsks(row, layer, held, host, span, retrieved_keys(layer.config, host, span[1] - span[0]))


def _windows(asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring, value_dim: int) -> Partial:
    """Attention of each row to its sinks and its window, (rows, q_heads, 1, ...)."""
    stretches = []
    for one in asks:
        window = one.held.window
        (key, value), (low, high) = window.buffers, window.span
        size, (_, key_head, key_row, _), (_, value_head, value_row, _) = (
            key.element_size(),
            key.stride(),
            value.stride(),
        )
        keys_at, values_at = key.data_ptr() + low * key_row * size, value.data_ptr() + low * value_row * size
        stretches.append(Stretch(keys_at, values_at, key_head * size, value_head * size, high - low))
    host, key = asks[0].host, asks[0].held.window.buffers[0]
    fmt = host_format("auto", key.dtype)
    dims = host.num_kv_heads, value_dim
    threads = host.threads
    out, lse = attend_stretches(default_pool(), fmt, queries, stretches, dims, threads=threads, **scoring._asdict())
    return Partial(torch.from_numpy(out).unsqueeze(2), torch.from_numpy(lse).unsqueeze(2))


def _retrieved(
    plans: StepPlans,
    asks: Items[RowAsks],
    queries: np.ndarray,
    scoring: Scoring,
    value_dim: int,
    errors: dict[int, Exception],
) -> tuple[Partial, dict[int, Tensor]]:
    """Attention of each row to its host's part, (rows, q_heads, 1, ...), and the share that is estimated, by place."""
    shape = (len(asks), queries.shape[1], 1)
    out, lse = np.zeros((*shape, value_dim), np.float32), np.full(shape, -np.inf, np.float32)
    rests: dict[int, Tensor] = {}
    groups: dict[Hashable, list[int]] = {}
    for i, one in enumerate(asks):
        if one.span[1] > one.span[0]:
            likeness = one.likeness
            groups.setdefault(("alone", i) if likeness is None else likeness, []).append(i)
    for key, group in groups.items():
        began = time.perf_counter()
        answers = _answers(plans, key, [asks[i] for i in group], queries[group], scoring, errors)
        seconds = time.perf_counter() - began
        plans.host_seconds += seconds
        seconds /= len(group)
        for i, answer in zip(group, answers, strict=True):
            if answer is None:
                continue
            out[i], lse[i] = answer.out, answer.lse
            if answer.rest is not None:
                rests[i] = torch.from_numpy(answer.rest).unsqueeze(0)
            stats = asks[i].layer.stats
            stats.host_seconds += seconds
            stats.keys_scanned += answer.keys_scanned
            stats.bytes_read += answer.bytes_read
            stats.search_seconds += answer.search_seconds
            stats.attend_seconds += answer.attend_seconds
    return Partial(torch.from_numpy(out), torch.from_numpy(lse)), rests


def _answers(
    plans: StepPlans,
    key: Hashable,
    asks: Items[RowAsks],
    queries: np.ndarray,
    scoring: Scoring,
    errors: dict[int, Exception],
) -> list[HostPartial | None]:
    """What each row gets from its host's part; None for one that failed."""
    problem: Exception | None = None
    if len(asks) > 1:
        try:
            together = plans.ask(key, asks, queries, scoring)
            if together is not None:
                return list(together)
        except Exception as error:  # whose fault it is shows when each is asked by itself
            problem = error
    answers: list[HostPartial | None] = []
    for one, query in zip(asks, queries, strict=True):
        try:
            answers.append(attend_path(one.host, query[:, None], *one.span, one.top_k, **scoring._asdict()))
        except Exception as error:
            errors[one.row] = error
            answers.append(None)
    if problem is not None and None not in answers:
        log.warning("layer %d: rows were searched one after the other, together: %s", asks[0].host.layer, problem)
    return answers
