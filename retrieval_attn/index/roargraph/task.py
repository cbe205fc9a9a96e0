"""The search task of a graph: one query of an entry at a time."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import encode_query_rows
from retrieval_attn.index.kernels.packed import pack_score
from retrieval_attn.index.roargraph.search import SPARE, Graph, block_of, search_graph, visited_words
from retrieval_attn.index.task.atomics import at_address, bytes_of_row, rows_at
from retrieval_attn.index.task.descriptor import count_cost, floats_at, step_at, words_at
from retrieval_attn.index.task.search import CompiledSearch, ScratchLayout, SearchRequest, address_of, record
from retrieval_attn.index.task.tasks import (
    hand_in,
    lists_of,
    query_of,
    range_at,
    scan_alone,
    scratch_of,
    task_address,
    task_at,
)

HIDDEN_ROOM = 2
"""Times as many places where first keys are hidden: for some queries those are most of the best, and a query that finds
fewer than k keys is scanned alone."""

_WORD = np.int64
GRAPH = np.dtype(
    [
        ("codes_at", _WORD),  # uint8 (rows, width)
        ("rows", _WORD),
        ("width", _WORD),
        ("edges_at", _WORD),  # int32 (rows, degree)
        ("degree", _WORD),
        ("ids_at", _WORD),  # int32 (rows,)
        ("entries_at", _WORD),  # int32 (entries,)
        ("entries", _WORD),
        ("counts_at", _WORD),  # int64 (3,)
        ("cell_starts_at", _WORD),  # int32 (landmarks + 1,)
        ("cell_keys_at", _WORD),  # int32, as many as the last of cell_starts says
        ("landmarks", _WORD),
        ("mean_at", _WORD),  # float32 (head_dim,)
        ("scale_at", _WORD),  # float32 (head_dim,)
        ("keys_at", _WORD),  # stored keys of the index, from id 0 on
        ("first", _WORD),  # token of the key with id 0
        ("best", _WORD),  # keys to find: a step may have room for more, of other rows
        ("room", _WORD),
        ("beam", _WORD),
        # byte offsets into the search's own scratch, and sizes there
        ("planes_at", _WORD),
        ("found_at", _WORD),
        ("scores_at", _WORD),
        ("pool_at", _WORD),
        ("pool", _WORD),
        ("visited_at", _WORD),
        ("visited", _WORD),
        ("fresh_at", _WORD),
        ("fresh", _WORD),
        ("survivors_at", _WORD),
    ],
    align=True,
)


class SearchArguments(NamedTuple):
    """Arguments of `search_graph` for one graph, for callers that search without the index.

    mean, scale: for `codes.encode_query_rows` (planes of width graph.codes.shape[1]). keys: (n, head_dim) stored, as
    the kernels take it.
    """

    graph: Graph
    mean: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]
    keys: npt.NDArray[Any]
    beam: int


def room_for(k: int, beam: int) -> int:
    """Pool length for the best k."""
    return max(beam, k + max(8, k // SPARE))


@njit(nogil=True, cache=True)
def _search(descriptor, number, worker, like):
    """Search of a graph for one query; by a scan where a graph cannot answer."""
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    query, dim = task.part, step.head_dim
    row = carray(at_address(span.index_at), 1, GRAPH)[0]
    top_k = row.best
    codes = carray(at_address(row.codes_at), (row.rows, row.width), np.uint8)
    edges = carray(at_address(row.edges_at), (row.rows, row.degree), np.int32)
    node_ids = carray(at_address(row.ids_at), row.rows, np.int32)
    entries = carray(at_address(row.entries_at), row.entries, np.int32)
    counts = carray(at_address(row.counts_at), 3, np.int64)
    cell_starts = carray(at_address(row.cell_starts_at), row.landmarks + 1, np.int32)
    cell_keys = carray(at_address(row.cell_keys_at), cell_starts[row.landmarks], np.int32)
    mean, scale = floats_at(row.mean_at, 1, dim)[0], floats_at(row.scale_at, 1, dim)[0]
    own = query_of(step, task.entry, query)
    scratch = scratch_of(step, worker)
    mine = scratch + step.own_at
    planes = carray(at_address(mine + row.planes_at), (1, 1, row.width), np.int8)
    bounds = carray(at_address(scratch + step.tile_at), 2, np.float32)
    encode_query_rows(own, mean, scale, planes, bounds[:1], bounds[1:])
    parts = (
        carray(at_address(mine + row.pool_at), row.pool, np.int64),
        carray(at_address(mine + row.visited_at), row.visited, np.uint64),
        carray(at_address(mine + row.fresh_at), row.fresh, np.int32),
        carray(at_address(mine + row.survivors_at), row.fresh, np.int64),
    )
    # the range may end before the index does: what other sequences appended is not seen
    least, limit = span.low - row.first, span.high - row.first
    keys = rows_at(row.keys_at, limit, dim, like)
    ids = carray(at_address(mine + row.found_at), top_k, np.int32)
    scores = carray(at_address(mine + row.scores_at), top_k, np.float32)
    graph = (codes, edges, node_ids, entries, counts, cell_starts, cell_keys)
    pool = words_at(scratch + step.pool_at, 1, step.capacity)[0]
    scored = nbytes = np.int64(0)
    count = np.int64(0)
    if bounds[1] == bounds[1]:  # the query is finite
        count, scored, _ = search_graph(
            graph, keys, own, planes, bounds[:1], 0, top_k, row.room, row.beam, least, limit, parts, ids, scores
        )
        nbytes = scored * row.width + min(scored, row.room) * bytes_of_row(like, dim)
    if count == min(top_k, limit - least):
        for i in range(count):
            pool[i] = pack_score(scores[i], ids[i] + row.first)
    else:
        stored = rows_at(span.keys_at, span.high, dim, like)
        count = scan_alone(own, stored, span.low, span.high, top_k, pool)
        scored += limit - least
        nbytes += (limit - least) * bytes_of_row(like, dim)
    hand_in(pool, count, span.first, step, task.entry, query, lists[query])
    count_cost(step, worker, scored, nbytes)
    return np.int64(0)


def _task(descriptor, number, worker, like):
    return _search(descriptor, number, worker, carray(like, (1, 1)))


def prepare_graph(fmt: Format) -> None:
    """Compile the task, or load it."""
    task_address(_task, fmt)


def graph_search(request: SearchRequest, given: SearchArguments, length: int, row_bytes: int) -> CompiledSearch:
    """Search of the graph of an index of `length` keys whose stored rows have `row_bytes` bytes."""
    graph, keys = given.graph, given.keys
    assert len(keys) < 2 or keys.strides == (row_bytes, keys.itemsize), keys.strides
    # keys that take no part take places in the pool: it gets longer by their share
    room = -(-room_for(request.k, given.beam) * length // request.visible)
    if request.hidden:
        room *= HIDDEN_ROOM
    fresh = block_of(graph.adjacency.shape[1])
    visited = visited_words(int(graph.counts[1]))
    layout = ScratchLayout()
    arrays: dict[str, npt.NDArray[Any]] = {
        "codes_at": graph.codes,
        "edges_at": graph.adjacency,
        "ids_at": graph.ids,
        "entries_at": graph.entries,
        "counts_at": graph.counts,
        "cell_starts_at": graph.cells.starts,
        "cell_keys_at": graph.cells.keys,
        "mean_at": given.mean,
        "scale_at": given.scale,
    }
    row = record(
        GRAPH,
        1,
        first=request.first,
        pool=room + fresh,
        visited=visited,
        fresh=fresh,
        planes_at=layout.take(graph.codes.shape[1]),
        found_at=layout.take(4 * request.k),
        scores_at=layout.take(4 * request.k),
        pool_at=layout.take(8 * (room + fresh)),
        visited_at=layout.take(8 * visited),
        fresh_at=layout.take(4 * fresh),
        survivors_at=layout.take(8 * fresh),
        keys_at=address_of(keys),
        rows=min(len(graph.codes), len(graph.adjacency), len(graph.ids)),
        width=graph.codes.shape[1],
        degree=graph.adjacency.shape[1],
        entries=len(graph.entries),
        landmarks=len(graph.cells.starts) - 1,
        best=request.k,
        room=room,
        beam=-(-given.beam * length // request.visible),
        **arrays,
    )
    return CompiledSearch(
        task_address(_task, request.fmt), address_of(row), by_query=True, scratch=layout.nbytes, alive=(row, given)
    )
