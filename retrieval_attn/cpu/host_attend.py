"""Attention of queries over host sequences: compiled steps for all heads and rows, or kernels over all tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import attend_range_heads, check_score_options, merge_partials
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.step.plan import MAX_LISTS_BYTES, LayerStep, Rest, StepCost, total_cost
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV, cluster_table
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import check_queries
from retrieval_attn.index.threads import kernel_threads

MAX_STEP_QUERIES = 64
"""Queries of one key-value head that a step through the worker threads serves at once; more take several steps."""


class HostPartial(NamedTuple):
    """Attention over host tokens: a partial and what it cost.

    out (q_heads, n, value_dim) and lse (q_heads, n), float32. rest (q_heads, n) float32: the share of the weights that
    stands for keys which were not attended to; None where those are left out.
    """

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    cost: StepCost
    rest: npt.NDArray[np.float32] | None = None


def attend_path(
    path: SequenceKV,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    top_k: int | HeadBudgets | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> HostPartial:
    """Attention of queries (q_heads, n, head_dim) float32 over tokens [start, stop) of a path.

    Query head h belongs to key-value head h // (q_heads // kv_heads). top_k: each query attends to its top_k best keys
    of the whole range (the same for equal scores: the earlier token), by head with budgets; or None for all tokens.
    Tokens not yet in the index of their segment are scanned, or inserted if they are many. Scores are scale * q.k,
    soft-capped if softcap is given. An empty range gives out 0 and lse -inf. Raises ShapeError, ConfigError.
    """
    return attend_paths([path], [queries], [(start, stop)], top_k, scale=scale, softcap=softcap)[0]


def attend_paths(
    paths: Sequence[SequenceKV],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int | HeadBudgets | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> list[HostPartial]:
    """`attend_path` of several sequences at once: path i, queries[i] (q_heads, n, head_dim), tokens ranges[i].

    All heads of all paths are tasks of one step through the pool of worker threads, if queries are all of one shape;
    many queries take several steps. The paths must be of equal heads, dims and format. Costs of a shared step are split
    evenly. Raises ShapeError, ConfigError.
    """
    if not isinstance(top_k, HeadBudgets | None) and (
        isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1
    ):
        raise ConfigError(f"top_k={top_k!r} must be a whole number >= 1, or None for all tokens")
    if not len(paths) == len(queries) == len(ranges) or not paths:
        raise ShapeError(f"as many queries and ranges as paths are needed, at least one, got {len(paths)} paths")
    check_score_options(scale, softcap)
    for path, own in zip(paths, queries, strict=True):
        _grouped(path, own)
    if top_k is None:
        apart = zip(paths, queries, ranges, strict=True)
        return [attend_all(path, own, *span, scale, softcap) for path, own, span in apart]
    top_k = top_k if isinstance(top_k, HeadBudgets) else int(top_k)
    if any(own.shape != queries[0].shape for own in queries):
        apart = zip(paths, queries, ranges, strict=True)
        return [_step_paths([path], [own], [span], top_k, scale, softcap)[0] for path, own, span in apart]
    return _step_paths(paths, queries, ranges, top_k, scale, softcap)


def _step_paths(
    paths: Sequence[SequenceKV],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int | HeadBudgets,
    scale: float,
    softcap: float | None,
) -> list[HostPartial]:
    """Run steps for all paths, each for as many positions as fit. Raises ConfigError if one position does not fit."""
    q_heads, n, _ = queries[0].shape
    first = paths[0]
    out = np.zeros((len(paths), q_heads, n, first.value_dim), np.float32)
    lse, rest = np.full(out.shape[:3], -np.inf, np.float32), np.zeros(out.shape[:3], np.float32)
    costs: list[StepCost] = []
    if any([path.parts(*span) for path, span in zip(paths, ranges, strict=True)]) and n:
        at_once, start = max(1, MAX_STEP_QUERIES // (q_heads // first.num_kv_heads)), 0
        while start < n:
            part = slice(start, min(start + at_once, n))
            shape = q_heads, part.stop - part.start
            step = _step_of(first, len(paths), shape[1])
            if not plan_paths(step, paths, ranges, shape, top_k, scale=scale, softcap=softcap):
                if at_once == 1:
                    raise ConfigError(
                        f"candidates of {top_k} keys for each of {q_heads} query heads and {len(paths)} sequences need "
                        f"more than the {MAX_LISTS_BYTES >> 20} MiB that a step has for them; retrieve fewer keys"
                    )
                at_once //= 2
                continue
            for row, own in enumerate(queries):
                step.queries[row] = own[:, part]
            costs.append(step.run())
            out[:, :, part], lse[:, :, part], rest[:, :, part] = step.out, step.lse, step.rest
            start = part.stop
    share, (search, attend, scanned, nbytes) = len(paths), total_cost(costs)
    cost = StepCost(search / share, attend / share, scanned // share, nbytes // share)
    return [
        HostPartial(out[row], lse[row], cost, None if path.clusters is None else rest[row])
        for row, path in enumerate(paths)
    ]


class NamedPieces(NamedTuple):
    """Tokens of a path as a step takes them, `least` keys of which at least a device names for each query.

    table: the clusters by which the host estimates what neither it nor the device attends to, or None.
    """

    pieces: list[SearchRange]
    table: ClusterTable | None
    least: int


def plan_paths(
    step: LayerStep,
    paths: Sequence[SequenceKV],
    ranges: Sequence[tuple[int, int]],
    queries: tuple[int, int],
    top_k: int | HeadBudgets | tuple[HeadBudgets, ...],
    *,
    scale: float,
    softcap: float | None = None,
) -> bool:
    """Plan `step` for `queries` (q_heads, n) of each path over its tokens ranges[i], a row each; see `LayerStep.plan`.

    Returns False, without a plan, if a step cannot do it: an index without a compiled search, paths of different
    shapes, too many queries, no token at all. Raises ConfigError for a range outside a path.
    """
    spans = list(zip(paths, ranges, strict=True))
    named = [NamedPieces(step_pieces(path, *span), cluster_table(path, *span), 0) for path, span in spans]
    return plan_named(step, paths, named, queries, top_k, scale=scale, softcap=softcap)


def plan_named(
    step: LayerStep,
    paths: Sequence[SequenceKV],
    named: Sequence[NamedPieces],
    queries: tuple[int, int],
    top_k: int | HeadBudgets | tuple[HeadBudgets, ...],
    *,
    scale: float,
    softcap: float | None,
) -> bool:
    """`plan_paths` of pieces of each path, for some of which a device may name keys."""
    (q_heads, n), first = queries, paths[0]
    shapes = {(path.num_kv_heads, path.head_dim, path.value_dim, path.fmt) for path in paths}
    if len(shapes) > 1 or not n or q_heads // first.num_kv_heads * n > MAX_STEP_QUERIES and n > 1:
        return False
    rows, rest = [one.pieces for one in named], Rest([one.table for one in named], max(one.least for one in named))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "threads": first.threads, "rest": rest}
    return any(rows) and step.plan(rows, q_heads, n, top_k, **options)


def step_pieces(path: SequenceKV, start: int, stop: int, *, clustered: bool = True) -> list[SearchRange]:
    """Tokens [start, stop) of a path as a step takes them. Raises ConfigError if outside the path.

    clustered: with the clusters that they belong to, where the path has any; tokens without one join then.
    """
    found = []
    for segment, low, high, first in path.parts(start, stop):
        pieces = segment.pieces(low, high, first, path.tail_tokens)
        if clustered and path.clusters is not None:
            members = path.clusters.shared.members(segment, low, high, path.fmt)
            pieces = [piece._replace(members=members) for piece in pieces]
        found += pieces
    return found


KEPT_STEPS = 6
"""Steps of a path that are kept: blocks with drafts have 2, 4, 8 or 16 tokens."""


def _step_of(path: SequenceKV, rows: int, queries: int) -> LayerStep:
    """The step for `queries` of a path and rows - 1 others, on the pool it was given or the one that everything
    shares. Steps of other numbers keep their plans.
    """
    pool = default_pool() if path.pool is None else path.pool
    step = path.steps.pop((rows, queries), None)
    if step is None or step.pool is not pool:
        step = LayerStep(pool, path.fmt, layer=path.layer)
    path.steps[rows, queries] = step  # the newest last
    if len(path.steps) > KEPT_STEPS:
        del path.steps[next(iter(path.steps))]
    return step


def _grouped(path: SequenceKV, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(q_heads, n, head_dim) -> (kv_heads, group * n, head_dim), a view if queries is contiguous."""
    queries = check_queries("queries", queries, 3)
    q_heads, n, dim = queries.shape
    heads = path.num_kv_heads
    if dim != path.head_dim or q_heads < 1 or q_heads % heads:
        raise ShapeError(f"queries must be (a multiple of {heads} heads, n, {path.head_dim}), got {queries.shape}")
    return queries.reshape(heads, q_heads // heads * n, dim)


def attend_all(
    path: SequenceKV, queries: npt.NDArray[np.float32], start: int, stop: int, scale: float, softcap: float | None
) -> HostPartial:
    """Attend to all tokens [start, stop) by parallel kernels. The caller checks the arguments."""
    grouped, parts, shape = _grouped(path, queries), path.parts(start, stop), queries.shape[:2]
    if not parts or not grouped.size:
        out = np.zeros((*shape, path.value_dim), np.float32)
        return HostPartial(out, np.full(shape, -np.inf, np.float32), total_cost(()), np.zeros(shape, np.float32))
    began = time.perf_counter()
    with kernel_threads(path.threads):
        # whole arrays, not slices: kernels are compiled once per memory layout
        out, lse = merge_partials(
            [
                attend_range_heads(grouped, segment.keys, segment.values, low, high, path.fmt, scale, softcap)
                for segment, low, high, _ in parts
            ]
        )
    out, lse, scanned = out.reshape(*shape, path.value_dim), lse.reshape(shape), (stop - start) * shape[0] * shape[1]
    cost = StepCost(0.0, time.perf_counter() - began, scanned, (stop - start) * path.token_bytes)
    return HostPartial(out, lse, cost, np.zeros(shape, np.float32))
