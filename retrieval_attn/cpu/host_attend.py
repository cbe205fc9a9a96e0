"""Attention of queries over host sequences: one compiled step for all heads and rows, or one kernel after the other.

The step needs a compiled search of every index. Without it `rest_partial` estimates the keys that are not retrieved by
NumPy, as `step/estimate.py` does inside a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import Partial, attend_ids_heads, attend_range_heads, check_score_options, merge_partials
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.segment import Hits, Segment
from retrieval_attn.cpu.step.estimate import PRIOR, STEEPNESS
from retrieval_attn.cpu.step.plan import LayerStep, Rest, total_cost
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV, cluster_table
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.flat import order_codes
from retrieval_attn.index.formats import Format, check_queries, to_float32
from retrieval_attn.index.threads import check_threads, kernel_threads


class Attended(NamedTuple):
    """Attended keys of a segment.

    values: (kv_heads, tokens, value_dim) in storage format. members: (kv_heads, tokens) uint8, cluster of each token.
    ids: (kv_heads, n, k) int32, -1 for none.
    """

    values: npt.NDArray[Any]
    members: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.int32]


def rest_partial(
    queries: npt.NDArray[np.float32],
    table: ClusterTable,
    attended: Iterable[Attended],
    fmt: Format,
    scoring: tuple[float, float | None],
    least: npt.NDArray[np.float32],
) -> Partial:
    """Estimate attention of queries (kv_heads, n, head_dim) to the table's keys without the attended ones.

    scoring: scale and soft cap. least: (kv_heads, n), lowest attended inner product, inf for none. Returns out
    (kv_heads, n, value_dim) and lse (kv_heads, n), float32; 0 and -inf if no key is left.
    """
    heads, n, _ = queries.shape
    left = np.repeat(table.counts[:, None], n, axis=1).astype(np.float64)
    sums = np.repeat(table.value_sums[:, None], n, axis=1).astype(np.float64)
    for values, members, ids in attended:
        for head, query in np.ndindex(heads, n):
            own = ids[head, query][ids[head, query] >= 0]
            owners = members[head, own]
            np.subtract.at(left[head, query], owners, 1)
            np.subtract.at(sums[head, query], owners, to_float32(values[head, own], fmt))
    scores = _logits(queries @ table.means, scoring)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # NaN gives NaN, as full attention does
        top = np.where(left > 0, scores, -np.inf).max(axis=2, keepdims=True)
        if table.samples is not None:
            sampled = _logits(queries @ table.samples.to_float32(), scoring).reshape(*scores.shape, table.sampled)
            lowest = np.where(np.isinf(least), np.inf, _logits(np.where(np.isinf(least), 0, least), scoring))
            inside = np.clip((lowest[:, :, None, None] - sampled) * STEEPNESS, 0, 1)
            sampled = np.where(inside > 0, sampled, -np.inf)
            top = np.maximum(top, np.where(left > 0, sampled.max(axis=3), -np.inf).max(axis=2, keepdims=True))
        shift = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(scores - shift)
        if table.samples is not None:
            found = inside * np.exp(sampled - shift[..., None])
            weights = (PRIOR * weights + found.sum(axis=3)) / (PRIOR + inside.sum(axis=3))
        weights = np.where(left > 0, weights, 0.0)
        total = (weights * left).sum(axis=2, keepdims=True)
        out = (weights[:, :, None] @ sums)[:, :, 0] / np.where(total == 0, 1.0, total)
        lse = (shift + np.log(total))[:, :, 0]
    return out.astype(np.float32), lse.astype(np.float32)


def _logits(products: npt.NDArray[np.float32], scoring: tuple[float, float | None]) -> npt.NDArray[np.float64]:
    scale, softcap = scoring
    logits = products.astype(np.float64) * scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


MAX_STEP_QUERIES = 64
"""Queries of one key-value head that a step through the worker threads serves at once; more take several steps."""


class HostPartial(NamedTuple):
    """Attention over host tokens: a partial and what it cost.

    out (q_heads, n, value_dim) and lse (q_heads, n), float32. keys_scanned: (query, key) scores the search
    computed, or all of them without a search. bytes_read: bytes of keys and values read from the store; a key that is
    scanned for several queries at once counts once. search_seconds, attend_seconds: wall clock by phase. rest
    (q_heads, n) float32: the share of the weights that stands for keys which were not attended to; None where those are
    left out.
    """

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    keys_scanned: int
    bytes_read: int
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
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
    threads: int | None = None,
) -> HostPartial:
    """Attention of queries (q_heads, n, head_dim) float32 over tokens [start, stop) of a path.

    Query head h belongs to key-value head h // (q_heads // kv_heads). top_k: each query attends to its top_k best keys
    of the whole range (the same for equal scores: the earlier token), by head with budgets; or None for all tokens.
    Tokens not yet in the index of their segment are scanned, or inserted if they are many. Scores are scale * q.k,
    soft-capped if softcap is given. threads: overrides the path's. An empty range gives out 0 and lse -inf. Raises
    ShapeError, ConfigError.
    """
    return attend_paths([path], [queries], [(start, stop)], top_k, scale=scale, softcap=softcap, threads=threads)[0]


def attend_paths(
    paths: Sequence[SequenceKV],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int | HeadBudgets | None,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> list[HostPartial]:
    """`attend_path` of several sequences at once: path i, queries[i] (q_heads, n, head_dim), tokens ranges[i].

    All heads of all paths are tasks of one step through the pool of worker threads, if their indexes have a compiled
    search and queries are all of one shape; many queries take several steps. Else one path after the other, with
    Numba's threads. The paths must be of equal heads, dims and format. Costs of a shared step are split evenly. Raises
    ShapeError, ConfigError.
    """
    if not isinstance(top_k, HeadBudgets | None) and (
        isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1
    ):
        raise ConfigError(f"top_k={top_k!r} must be a whole number >= 1, or None for all tokens")
    if not len(paths) == len(queries) == len(ranges) or not paths:
        raise ShapeError(f"as many queries and ranges as paths are needed, at least one, got {len(paths)} paths")
    check_score_options(scale, softcap)
    threads = paths[0].threads if threads is None else threads
    check_threads(threads)
    for path, own in zip(paths, queries, strict=True):
        _grouped(path, own)
    top_k = top_k if isinstance(top_k, HeadBudgets | None) else int(top_k)
    done = None if top_k is None else _step_paths(paths, queries, ranges, top_k, scale, softcap, threads)
    if done is not None:
        return done
    if isinstance(top_k, HeadBudgets):
        raise ConfigError(
            f"keys per head need an index with a compiled search and queries of one shape, got "
            f"{paths[0].spec.cls.kind!r}; give one number of keys for all heads, or index='auto'"
        )
    return [
        attend_apart(path, own, start, stop, top_k, scale, softcap, threads)
        for path, own, (start, stop) in zip(paths, queries, ranges, strict=True)
    ]


def _step_paths(
    paths: Sequence[SequenceKV],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int | HeadBudgets,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> list[HostPartial] | None:
    """Steps for all paths, each for as many queries as it serves, or None where that cannot be done."""
    q_heads, n, _ = queries[0].shape
    if any(own.shape != queries[0].shape for own in queries):
        return None
    first = paths[0]
    step, at_once = _step_of(first, len(paths)), MAX_STEP_QUERIES // max(1, q_heads // first.num_kv_heads)
    if not n or not at_once:
        return None
    out = np.empty((len(paths), q_heads, n, first.value_dim), np.float32)
    lse, rest = (np.empty((len(paths), q_heads, n), np.float32) for _ in range(2))
    costs = []
    for start in range(0, n, at_once):
        part = slice(start, min(start + at_once, n))
        shape = q_heads, part.stop - part.start
        if not plan_paths(step, paths, ranges, shape, top_k, scale=scale, softcap=softcap, threads=threads):
            return None
        for row, own in enumerate(queries):
            step.queries[row] = own[:, part]
        costs.append(step.run())
        out[:, :, part], lse[:, :, part], rest[:, :, part] = step.out, step.lse, step.rest
    share, cost = len(paths), total_cost(costs)
    work = cost.keys_scanned // share, cost.bytes_read // share
    seconds = cost.search_seconds / share, cost.attend_seconds / share
    return [
        HostPartial(out[row], lse[row], *work, *seconds, None if path.clusters is None else rest[row])
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
    threads: int | None = None,
) -> bool:
    """Plan `step` for `queries` (q_heads, n) of each path over its tokens ranges[i], a row each; see `LayerStep.plan`.

    Returns False, without a plan, if a step cannot do it: an index without a compiled search, paths of different
    shapes, too many queries, no token at all. Raises ConfigError for a range outside a path.
    """
    spans = list(zip(paths, ranges, strict=True))
    named = [NamedPieces(step_pieces(path, *span), cluster_table(path, *span), 0) for path, span in spans]
    threads = paths[0].threads if threads is None else threads
    return plan_named(step, paths, named, queries, top_k, scale=scale, softcap=softcap, threads=threads)


def plan_named(
    step: LayerStep,
    paths: Sequence[SequenceKV],
    named: Sequence[NamedPieces],
    queries: tuple[int, int],
    top_k: int | HeadBudgets | tuple[HeadBudgets, ...],
    *,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> bool:
    """`plan_paths` of pieces of each path, for some of which a device may name keys."""
    (q_heads, n), first = queries, paths[0]
    shapes = {(path.num_kv_heads, path.head_dim, path.value_dim, path.fmt) for path in paths}
    if len(shapes) > 1 or not 0 < q_heads // first.num_kv_heads * n <= MAX_STEP_QUERIES:
        return False
    rows, rest = [one.pieces for one in named], Rest([one.table for one in named], max(one.least for one in named))
    return any(rows) and step.plan(rows, q_heads, n, top_k, scale=scale, softcap=softcap, threads=threads, rest=rest)


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


def _step_of(path: SequenceKV, rows: int) -> LayerStep:
    """The step for a path and rows - 1 others, on the pool it was given or the one that everything shares."""
    pool = default_pool() if path.pool is None else path.pool
    step = path.steps.get(rows)
    if step is None or step.pool is not pool:
        step = path.steps[rows] = LayerStep(pool, path.fmt, layer=path.layer)
    return step


def _grouped(path: SequenceKV, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(q_heads, n, head_dim) -> (kv_heads, group * n, head_dim), a view if queries is contiguous."""
    queries = check_queries("queries", queries, 3)
    q_heads, n, dim = queries.shape
    heads = path.num_kv_heads
    if dim != path.head_dim or q_heads < 1 or q_heads % heads:
        raise ShapeError(f"queries must be (a multiple of {heads} heads, n, {path.head_dim}), got {queries.shape}")
    return queries.reshape(heads, q_heads // heads * n, dim)


def attend_apart(
    path: SequenceKV,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    top_k: int | None,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> HostPartial:
    """`attend_path` by one parallel kernel after the other: for what a step cannot do. Arguments are checked."""
    grouped = _grouped(path, queries)
    parts = path.parts(start, stop)
    shape = queries.shape[:2]
    if not parts or not grouped.size:
        out = np.zeros((*shape, path.value_dim), np.float32)
        return HostPartial(out, np.full(shape, -np.inf, np.float32), 0, 0, rest=np.zeros(shape, np.float32))
    began = time.perf_counter()
    searched = began
    with kernel_threads(path.threads if threads is None else threads):
        if top_k is None:
            # whole arrays, not slices: kernels are compiled once per memory layout
            partial = merge_partials(
                [
                    attend_range_heads(grouped, segment.keys, segment.values, low, high, path.fmt, scale, softcap)
                    for segment, low, high, _ in parts
                ]
            )
            rest: npt.NDArray[np.float32] | None = np.zeros(shape, np.float32)
            scanned = (stop - start) * shape[0] * shape[1]
            bytes_read = (stop - start) * path.token_bytes
        else:
            found = [
                (segment, hit) for segment, low, high, _ in parts for hit in segment.search(grouped, top_k, low, high)
            ]
            searched = time.perf_counter()
            table = cluster_table(path, start, stop)
            partial, rest, scanned, bytes_read = _attend_best(path, grouped, found, top_k, table, (scale, softcap))
    out, lse = partial
    out, lse, rest = (
        out.reshape(*shape, path.value_dim),
        lse.reshape(shape),
        None if rest is None else rest.reshape(shape),
    )
    return HostPartial(out, lse, scanned, bytes_read, searched - began, time.perf_counter() - searched, rest)


def _attend_best(
    path: SequenceKV,
    queries: npt.NDArray[np.float32],
    found: list[tuple[Segment, Hits]],
    top_k: int,
    table: ClusterTable | None,
    scoring: tuple[float, float | None],
) -> tuple[Partial, npt.NDArray[np.float32] | None, int, int]:
    """Keep the top_k best of what was found, attend to them piece by piece; estimate the others by `table`.

    Returns the partial, the share of its weights that is estimated (None without a table), keys scanned, bytes read.
    """
    fmt, (scale, softcap) = path.fmt, scoring
    chosen = _best_of_all([hit.ids for _, hit in found], [hit.scores for _, hit in found], top_k)
    parts = []
    gathered = 0
    for (segment, _), ids in zip(found, chosen, strict=True):
        keys, values = segment.keys, segment.values
        parts.append(attend_ids_heads(queries, keys, values, ids, fmt, scale, softcap))
        gathered += int(np.count_nonzero(ids >= 0))
    if table is not None and path.clusters is not None:
        shared = path.clusters.shared
        attended = [
            Attended(segment.values, shared.known(segment), ids)
            for (segment, _), ids in zip(found, chosen, strict=True)
        ]
        lowest = [
            np.where(ids < 0, np.float32(np.inf), hit.scores).min(axis=2, initial=np.inf)
            for (_, hit), ids in zip(found, chosen, strict=True)
        ]
        least = np.min(lowest, axis=0)
        parts.append(rest_partial(queries, table, attended, fmt, (scale, softcap), least))
    partial = merge_partials(parts)
    rest = None if table is None else _share(parts[-1][1], partial[1])
    row_bytes = sum(array.shape[2] for array in (found[0][0].keys, found[0][0].values)) * fmt.bytes
    bytes_read = sum(hit.bytes_read for _, hit in found) + gathered * row_bytes
    return partial, rest, sum(hit.keys_scanned for _, hit in found), bytes_read


def _share(lse: npt.NDArray[np.float32], of: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The share that a part with `lse` has of the weights of all parts; 0 where there are none."""
    return np.exp(lse - np.where(np.isneginf(of), np.float32(0), of), dtype=np.float32)


def _best_of_all(
    ids: list[npt.NDArray[np.int32]], scores: list[npt.NDArray[np.float32]], top_k: int
) -> list[npt.NDArray[np.int32]]:
    """Results of several pieces (..., k each, best first) with everything but the best top_k overall set to
    -1.
    """
    if len(ids) == 1:
        return ids
    together = np.concatenate(ids, axis=-1)
    codes = order_codes(np.concatenate(scores, axis=-1), together)
    order = np.argsort(-codes, axis=-1, kind="stable")  # equal scores: the earlier piece, then the lower id
    np.put_along_axis(together, order[..., top_k:], np.int32(-1), axis=-1)
    return np.split(together, np.cumsum([one.shape[-1] for one in ids])[:-1], axis=-1)


def exact_lse(
    path: SequenceKV,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    heads: Sequence[int] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> npt.NDArray[np.float32]:
    """Log-sum-exp of all scores over tokens [start, stop): (heads, n) float32, of the query heads named, None: all.

    queries (q_heads, n, head_dim) float32. Reads every key of those heads. With the lse of `attend_path`,
    exp(lse - exact_lse) is the share of full attention's weight that the retrieved keys captured. An empty range gives
    -inf. Raises ShapeError, ConfigError.
    """
    check_score_options(scale, softcap)
    group = len(_grouped(path, queries)) and queries.shape[0] // path.num_kv_heads
    heads = range(queries.shape[0]) if heads is None else heads
    if wrong := [head for head in heads if not 0 <= head < queries.shape[0]]:
        raise ConfigError(f"heads {wrong} must lie in 0 .. {queries.shape[0] - 1}")
    parts, found = path.parts(start, stop), np.full((len(heads), queries.shape[1]), -np.inf, np.float32)
    with kernel_threads(path.threads):
        for row, head in enumerate(heads if parts else ()):
            own, keys_of = np.ascontiguousarray(queries[head : head + 1]), slice(head // group, head // group + 1)
            partials = [
                # keys in place of values, which do not change the lse
                attend_range_heads(own, s.keys[keys_of], s.keys[keys_of], low, high, path.fmt, scale, softcap)
                for s, low, high, _ in parts
            ]
            found[row] = merge_partials(partials)[1][0]
    return found
