"""Attention of queries over host paths: all heads of all rows in one step through the worker threads where every index
has a compiled search, else one parallel kernel after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import (
    Partial,
    attend_ids_heads,
    attend_range_heads,
    check_score_options,
    merge_partials,
)
from retrieval_attn.cpu.segment import Hits, Segment
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.flat import order_codes
from retrieval_attn.index.formats import Format
from retrieval_attn.index.threads import check_threads, kernel_threads

if TYPE_CHECKING:
    from retrieval_attn.cpu.step.plan import LayerStep
    from retrieval_attn.cpu.store import HostPath

MOST_STEP_QUERIES = 64
"""Queries of one key-value head up to which a step through the worker threads serves them."""


class HostPartial(NamedTuple):
    """Attention over host tokens: a partial and what it cost.

    out (q_heads, n, value_dim) and lse (q_heads, n), float32. keys_scanned: (query, key) scores the search
    computed, or all of them without a search. bytes_read: bytes of keys and values read from the store; a key that is
    scanned for several queries at once counts once. search_seconds, attend_seconds: wall clock by phase.
    """

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    keys_scanned: int
    bytes_read: int
    search_seconds: float = 0.0
    attend_seconds: float = 0.0


def attend_paths(
    paths: Sequence[HostPath],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int | None,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> list[HostPartial]:
    """`HostPath.attend` of several sequences at once: path i, queries[i] (q_heads, n, head_dim), tokens ranges[i].

    All heads of all paths are tasks of one step through the pool of worker threads, if their indexes have a compiled
    search, queries are all of one shape, and few; else one path after the other, with Numba's threads. The paths must
    be of equal heads, dims and format. Costs of a shared step are split evenly. Raises ShapeError, ConfigError.
    """
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1):
        raise ConfigError(f"top_k={top_k!r} must be a whole number >= 1, or None for all tokens")
    if not len(paths) == len(queries) == len(ranges) or not paths:
        raise ShapeError(f"as many queries and ranges as paths are needed, at least one, got {len(paths)} paths")
    check_score_options(scale, softcap)
    threads = paths[0]._threads if threads is None else threads
    check_threads(threads)
    for path, own in zip(paths, queries, strict=True):
        path._grouped(own)
    top_k = None if top_k is None else int(top_k)
    done = None if top_k is None else _step_paths(paths, queries, ranges, top_k, scale, softcap, threads)
    if done is not None:
        return done
    return [
        attend_apart(path, own, start, stop, top_k, scale, softcap, threads)
        for path, own, (start, stop) in zip(paths, queries, ranges, strict=True)
    ]


def _step_paths(
    paths: Sequence[HostPath],
    queries: Sequence[npt.NDArray[np.float32]],
    ranges: Sequence[tuple[int, int]],
    top_k: int,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> list[HostPartial] | None:
    """One step for all paths, or None where that cannot be done."""
    q_heads, n, _ = queries[0].shape
    if any(own.shape != queries[0].shape for own in queries):
        return None
    step = paths[0]._step_of(len(paths))
    if not plan_paths(step, paths, ranges, q_heads, n, top_k, scale=scale, softcap=softcap, threads=threads):
        return None
    for row, own in enumerate(queries):
        step.queries[row] = own
    cost = step.run()
    share = len(paths)
    costs = cost.keys_scanned // share, cost.bytes_read // share
    seconds = cost.search_seconds / share, cost.attend_seconds / share
    return [HostPartial(step.out[row].copy(), step.lse[row].copy(), *costs, *seconds) for row in range(share)]


def plan_paths(
    step: LayerStep,
    paths: Sequence[HostPath],
    ranges: Sequence[tuple[int, int]],
    q_heads: int,
    n: int,
    top_k: int,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
) -> bool:
    """Plan `step` for (q_heads, n) queries per path over its tokens ranges[i], one row each; see `LayerStep.plan`.

    Returns False, without a plan, if a step cannot do it: an index without a compiled search, paths of different
    shapes, too many queries, no token at all. Raises ConfigError for a range outside a path.
    """
    first = paths[0]
    kind = first._heads, first._head_dim, first._value_dim, first._fmt
    alike = all((path._heads, path._head_dim, path._value_dim, path._fmt) == kind for path in paths)
    if not alike or not 0 < q_heads // first._heads * n <= MOST_STEP_QUERIES:
        return False
    rows = []
    for path, (start, stop) in zip(paths, ranges, strict=True):
        path._check_range(start, stop)
        rows.append(path._step_pieces(start, stop))
    threads = first._threads if threads is None else threads
    return any(rows) and step.plan(rows, q_heads, n, top_k, scale=scale, softcap=softcap, threads=threads)


def attend_apart(
    path: HostPath,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    top_k: int | None,
    scale: float,
    softcap: float | None,
    threads: int | None,
) -> HostPartial:
    """`HostPath.attend` by one parallel kernel after the other: for what a step cannot do. Arguments are checked."""
    grouped = path._grouped(queries)
    pieces = path._pieces(start, stop)
    shape = queries.shape[:2]
    if not pieces or not grouped.size:
        out = np.zeros((*shape, path._value_dim), np.float32)
        return HostPartial(out, np.full(shape, -np.inf, np.float32), 0, 0)
    began = time.perf_counter()
    searched = began
    with kernel_threads(path._threads if threads is None else threads):
        if top_k is None:
            partial = _attend_all(path._fmt, grouped, pieces, scale, softcap)
            scanned = (stop - start) * shape[0] * shape[1]
            bytes_read = (stop - start) * path._token_bytes
        else:
            found = [
                (segment, hit) for segment, low, high in pieces for hit in segment.search(grouped, top_k, low, high)
            ]
            searched = time.perf_counter()
            partial, scanned, bytes_read = _attend_best(path._fmt, grouped, found, top_k, scale, softcap)
    out, lse = partial
    out, lse = out.reshape(*shape, path._value_dim), lse.reshape(shape)
    return HostPartial(out, lse, scanned, bytes_read, searched - began, time.perf_counter() - searched)


def _attend_all(
    fmt: Format,
    queries: npt.NDArray[np.float32],
    pieces: list[tuple[Segment, int, int]],
    scale: float,
    softcap: float | None,
) -> Partial:
    parts = []
    for segment, low, high in pieces:
        # whole arrays, not slices: kernels are compiled once per memory layout
        keys, values = segment.keys, segment.values
        parts.append(attend_range_heads(queries, keys, values, low, high, fmt, scale, softcap))
    return merge_partials(parts)


def _attend_best(
    fmt: Format,
    queries: npt.NDArray[np.float32],
    found: list[tuple[Segment, Hits]],
    top_k: int,
    scale: float,
    softcap: float | None,
) -> tuple[Partial, int, int]:
    """Keep the top_k best of what was found, attend to them piece by piece."""
    chosen = _best_of_all([hit.ids for _, hit in found], [hit.scores for _, hit in found], top_k)
    parts = []
    gathered = 0
    for (segment, _), ids in zip(found, chosen, strict=True):
        keys, values = segment.keys, segment.values
        parts.append(attend_ids_heads(queries, keys, values, ids, fmt, scale, softcap))
        gathered += int(np.count_nonzero(ids >= 0))
    row_bytes = sum(array.shape[2] for array in (found[0][0].keys, found[0][0].values)) * fmt.bytes
    bytes_read = sum(hit.bytes_read for _, hit in found) + gathered * row_bytes
    return merge_partials(parts), sum(hit.keys_scanned for _, hit in found), bytes_read


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
