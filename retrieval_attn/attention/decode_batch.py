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

from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.paged_prefix import PrefixPlans
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.source import count_cost
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import HostPartial, attend_path, plan_paths
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.step.plan import LayerStep, StepCost
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.cpu.windows import WindowRow, attend_stretches, put_last
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge, sink_logit_partial
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.staging import host_format, to_queries

log = logging.getLogger(__name__)

KEPT_STEPS = 4
"""Plans of one layer that are kept: rows that attend to different numbers of keys have one each."""


class DecodeTokens(NamedTuple):
    """One new token of each row: query (rows, q_heads, 1, head_dim), key and value (rows, kv_heads, 1, dim), on the
    CPU. spec: the mask, but for where a row's tokens begin.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    spec: MaskSpec


class RowAsks(NamedTuple):
    """A row's part of a step: row, its layer, what that holds, and what it is to attend to on the host."""

    row: int
    layer: RetrievalLayer
    held: LayerKV
    host: SequenceKV
    span: tuple[int, int]
    top_k: int | HeadBudgets | None

    @property
    def batch_key(self) -> Hashable:
        """Rows that agree in it may be searched in one step, each as alone; None: alone."""
        if self.top_k is None:
            return None
        numbers = "by heads" if isinstance(self.top_k, HeadBudgets) else self.top_k
        host = self.host
        shape = host.num_kv_heads, host.head_dim, host.value_dim, host.fmt
        return numbers, shape, host.threads, id(host.pool), host.layer


class StepPlans:
    """Steps over the paths of several caches, kept from token to token. A path that is gone is dropped.

    exact: the same of prefixes in pages. host_seconds: that rows' keys were searched and attended to, since the start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[Hashable, _KeptStep] = {}
        self.exact = PrefixPlans()
        self.host_seconds = 0.0

    def ask(self, key: Hashable, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> _Found | None:
        """Return the results of the rows from one step; None if no step supports them. Raises the error of any row.

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


class _Found(NamedTuple):
    """Results of the rows of a step, one row each: out (rows, q_heads, 1, value_dim), lse and the estimated share.

    costs: of each row.
    """

    out: np.ndarray
    lse: np.ndarray
    rest: np.ndarray
    costs: list[StepCost]


class _KeptStep:
    """A step, used by one thread at a time, that lets go of memory when a path of its rows is gone."""

    def __init__(self, step: LayerStep) -> None:
        self.step = step
        self._lock = threading.Lock()
        self._paths: list[weakref.ref[SequenceKV]] = []
        self._planned: tuple[object, ...] | None = None
        self._gone = False

    def run(self, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> _Found | None:
        """See `StepPlans.ask`."""
        with self._lock:
            if [one() for one in self._paths] != [one.host for one in asks]:
                self._paths = [weakref.ref(one.host, self._path_gone) for one in asks]
                self._planned = None
            try:
                return self._run(asks, queries, scoring)
            finally:
                if self._gone:
                    self._forget()

    def _run(self, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> _Found | None:
        step = self.step
        wanted = _wanted(asks, queries, scoring)
        if wanted != self._planned:  # between two spills it is the same for every token
            self._planned = None
            if not self._plan(asks, queries, scoring):
                return None
            self._planned = _wanted(asks, queries, scoring)
        step.queries[:, :, 0] = queries
        costs = step.row_costs(step.run())
        return _Found(step.out.copy(), step.lse.copy(), step.rest.copy(), costs)

    def _plan(self, asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> bool:
        first = asks[0].top_k
        budgets = tuple(one.top_k for one in asks if isinstance(one.top_k, HeadBudgets))
        assert isinstance(first, int) or len(budgets) == len(asks)
        return plan_paths(
            self.step,
            [one.host for one in asks],
            [one.span for one in asks],
            (queries.shape[1], 1),
            first if isinstance(first, int) else budgets,
            **scoring._asdict(),
        )

    def forget(self) -> None:
        """Nothing of any row is held from now on."""
        self._gone = True
        if self._lock.acquire(blocking=False):  # else who runs it does
            try:
                self._forget()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        self._gone, self._paths, self._planned = False, [], None
        self.step.forget()

    def _path_gone(self, path: object, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # when Python ends, modules are gone before paths are
            self.forget()


def _wanted(asks: Items[RowAsks], queries: np.ndarray, scoring: Scoring) -> tuple[object, ...]:
    """Return the values that the plan of a step of these paths depends on."""
    rows = [(one.span, one.top_k, one.host.plan_stamp()) for one in asks]
    return rows, queries.shape, scoring, asks[0].host.threads


def decode_batch(
    plans: StepPlans,
    layers: Items[tuple[int, RetrievalLayer]],
    module: nn.Module,
    new: DecodeTokens,
    scoring: Scoring,
    sink_logits: Tensor | None,
    exact: Partial | None = None,
) -> tuple[Tensor, dict[int, Exception]]:
    """Each layer, with the row of `new` that it is for: it stores its token. What the tokens attend to.

    exact: of all rows, what they attend to in pages. Returns (rows, q_heads, 1, value_dim) float32, 0 in rows that are
    not asked for, and what went wrong with a row.
    """
    query, value_dim = new.query, new.value.shape[3]
    errors: dict[int, Exception] = {}
    asks: list[RowAsks] = []
    for row, layer in layers:
        try:
            asks.append(_begin(row, layer, module, query.shape[1], new.spec))
        except Exception as error:
            errors[row] = error
    result = torch.zeros(*query.shape[:3], value_dim, dtype=torch.float32)
    if not asks:
        return result, errors
    rows = [one.row for one in asks]
    if len(rows) < len(query):
        new = DecodeTokens(query, new.key[rows], new.value[rows], new.spec)
    queries = to_queries(query)[:, :, 0]
    own = np.ascontiguousarray(queries if len(rows) == len(query) else queries[rows])
    own_query = torch.from_numpy(own).unsqueeze(2)
    static = _windows(asks, own, new, scoring)
    retrieved, rests = _retrieved(plans, asks, own, scoring, value_dim, errors)
    parts = [static, retrieved] if any(stop > start for start, stop in (one.span for one in asks)) else [static]
    if exact is not None:
        parts.append(exact if len(rows) == len(query) else Partial(exact.out[rows], exact.lse[rows]))
    found = merge(parts)
    for one, rest, host_lse, lse in zip(asks, rests, retrieved.lse.split(1), found.lse.split(1), strict=True):
        if one.row not in errors:
            try:
                if one.held.window.room == 0:
                    one.layer.spill()
            except Exception as error:
                errors[one.row] = error
                continue
            if rest is not None:
                one.layer.tail.add(rest, host_lse, lse)
    if sink_logits is not None:
        found = merge([found, sink_logit_partial(sink_logits, own_query, value_dim)])
    if len(rows) == len(query):
        return found.out, errors
    result[rows] = found.out
    return result, errors


def _begin(row: int, layer: RetrievalLayer, module: nn.Module, q_heads: int, spec: MaskSpec) -> RowAsks:
    held = layer.begin_token(module, q_heads, spec)
    host, span = held.first_row()
    keys = None if layer.batch.attends_to_all else retrieved_keys(layer.config, host, span[1] - span[0])
    return RowAsks(row, layer, held, host, span, keys)


def _windows(asks: Items[RowAsks], queries: np.ndarray, new: DecodeTokens, scoring: Scoring) -> Partial:
    """Attention of each row to its sinks and its window, (rows, q_heads, 1, ...), whose last tokens are `new` ones."""
    stretches = np.array([_stretch(one.held.window, new.key.dtype) for one in asks], np.int64)
    put_last(stretches, *[part[:, :, 0].contiguous().view(torch.uint8).numpy() for part in (new.key, new.value)])
    host, fmt = asks[0].host, host_format("auto", new.key.dtype)
    dims = host.num_kv_heads, new.value.shape[3]
    threads = host.threads
    out, lse = attend_stretches(default_pool(), fmt, queries, stretches, dims, threads=threads, **scoring._asdict())
    return Partial(torch.from_numpy(out).unsqueeze(2), torch.from_numpy(lse).unsqueeze(2))


def _stretch(window: WindowCache, dtype: torch.dtype) -> WindowRow:
    """Where a row's sinks and tail lie, of one dtype."""
    places, (low, high) = window.places(), window.span
    assert places.dtype == dtype, (places.dtype, dtype)
    keys_at, values_at = places.keys_at + low * places.key_slot, places.values_at + low * places.value_slot
    return WindowRow(keys_at, values_at, places.key_head, places.value_head, high - low)


def _retrieved(
    plans: StepPlans,
    asks: Items[RowAsks],
    queries: np.ndarray,
    scoring: Scoring,
    value_dim: int,
    errors: dict[int, Exception],
) -> tuple[Partial, list[Tensor | None]]:
    """Attention of each row to its host's part, (rows, q_heads, 1, ...), and the share that is estimated, by row."""
    shape = (len(asks), queries.shape[1], 1)
    out, lse = np.zeros((*shape, value_dim), np.float32), np.full(shape, -np.inf, np.float32)
    rests: list[Tensor | None] = [None] * len(asks)
    groups: dict[Hashable, list[int]] = {}
    for i, one in enumerate(asks):
        if one.span[1] > one.span[0]:
            batch_key = one.batch_key
            groups.setdefault(("alone", i) if batch_key is None else batch_key, []).append(i)
    for key, group in groups.items():
        began = time.perf_counter()
        own = queries if len(group) == len(asks) else queries[group]
        found, answers = _answers(plans, key, [asks[i] for i in group], own, scoring, errors)
        seconds = time.perf_counter() - began
        plans.host_seconds += seconds
        seconds /= len(group)
        if found is not None:
            out[group], lse[group] = found.out, found.lse
            for i, cost, rest in zip(group, found.costs, torch.from_numpy(found.rest).split(1), strict=True):
                count_cost(asks[i].layer.stats, cost, seconds)
                rests[i] = None if asks[i].host.clusters is None else rest
        for i, answer in zip(group, answers, strict=False):
            if answer is None:
                continue
            out[i], lse[i] = answer.out, answer.lse
            if answer.rest is not None:
                rests[i] = torch.from_numpy(answer.rest).unsqueeze(0)
            count_cost(asks[i].layer.stats, answer.cost, seconds)
    return Partial(torch.from_numpy(out), torch.from_numpy(lse)), rests


def _answers(
    plans: StepPlans,
    key: Hashable,
    asks: Items[RowAsks],
    queries: np.ndarray,
    scoring: Scoring,
    errors: dict[int, Exception],
) -> tuple[_Found | None, list[HostPartial | None]]:
    """Compute the hosts' parts of all rows in one step, or of each row if that returns None; None for a failed row."""
    problem: Exception | None = None
    if len(asks) > 1:
        try:
            together = plans.ask(key, asks, queries, scoring)
            if together is not None:
                return together, []
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
    return None, answers
