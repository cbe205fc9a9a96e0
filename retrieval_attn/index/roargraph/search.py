"""Beam search on a graph over coded keys, one query at a time, without the GIL and without allocation.

Scores are integers (codes against a coded query); the pool that is left is scored again with the stored keys.
A pool entry is ONE int64: score << 32 | node << 1 | expanded. A hop scores the new neighbours of the best
entry not yet expanded into a small buffer, filters them against the pool's worst without branches, and merges the
few that survive in one pass.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.index.kernels.codes import dot_u8, encode_query_rows
from retrieval_attn.index.kernels.dots import dot, prefetch_row
from retrieval_attn.index.kernels.packed import EMPTY, id_of, pack_score, score_of
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.task.atomics import at_address, bytes_of_row, rows_at
from retrieval_attn.index.task.search import CompiledSearch, ScratchLayout, SearchRequest, address_of, record
from retrieval_attn.index.task.tasks import (
    count_cost,
    floats_at,
    hand_in,
    lists_of,
    query_of,
    range_at,
    scan_alone,
    scratch_of,
    step_at,
    task_address,
    task_at,
    words_at,
)


class Cells(NamedTuple):
    """Keys that are no nodes, by the landmark nearest to them; see `landmarks`. Landmark i is node i.

    starts: (landmarks + 1,) int32. keys: int32 ids; those of landmark i are keys[starts[i] : starts[i + 1]], farthest
    first: of those near to it the landmark itself tells enough.
    """

    starts: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int32]


class Graph(NamedTuple):
    """A graph over the coded keys of one head; arrays may have room beyond `counts`.

    codes: (room, width) uint8, row = node. adjacency: (room, degree) int32 nodes, -1 padded. ids: (room,) int32,
    the key of each node. entries: (e,) int32 nodes that every search starts from. counts: (3,) int64: nodes with
    edges, all nodes (those after are scanned one by one), keys in the index. cell_starts, cell_keys: see `Cells`.
    """

    codes: npt.NDArray[np.uint8]
    adjacency: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    entries: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    cell_starts: npt.NDArray[np.int32]
    cell_keys: npt.NDArray[np.int32]

    @property
    def cells(self) -> Cells:
        """Keys that are no nodes."""
        return Cells(self.cell_starts, self.cell_keys)


class GraphScratch(NamedTuple):
    """Scratch memory of one search; one per worker. See `make_scratch`."""

    pool: npt.NDArray[np.int64]
    visited: npt.NDArray[np.uint64]
    fresh: npt.NDArray[np.int32]
    survivors: npt.NDArray[np.int64]


def block_of(degree: int) -> int:
    """Nodes that are scored at once."""
    return max(degree, 64)


def visited_words(nodes: int) -> int:
    """Words of the set of visited nodes."""
    return nodes // 64 + 8


def make_scratch(room: int, degree: int, nodes: int) -> GraphScratch:
    """Allocate scratch of a search with a pool of `room` over up to `nodes` nodes of up to `degree` edges."""
    block = block_of(degree)
    return GraphScratch(
        aligned_empty((room + block,), np.int64),
        aligned_empty((visited_words(nodes),), np.uint64),
        aligned_empty((block,), np.int32),
        aligned_empty((block,), np.int64),
    )


@njit(nogil=True, cache=True)
def _merge(pool, count, room, survivors, found):
    """Merge survivors[:found] (any order) into pool[:count] (descending); returns new count and the first place."""
    for i in range(1, found):
        item = survivors[i]
        j = i - 1
        while j >= 0 and survivors[j] < item:
            survivors[j + 1] = survivors[j]
            j -= 1
        survivors[j + 1] = item
    i = count - 1
    j = found - 1
    at = count + found - 1
    while j >= 0:
        if i >= 0 and pool[i] < survivors[j]:
            pool[at] = pool[i]
            i -= 1
        else:
            pool[at] = survivors[j]
            j -= 1
        at -= 1
    return min(room, count + found), i + 1


@njit(nogil=True, cache=True)
def _score_fresh(codes, minus, planes, query, fresh, num_fresh, worst, survivors, flag):
    """Score nodes fresh[:num_fresh]; survivors: those above `worst` as pool entries; returns how many."""
    width = codes.shape[1]
    found = 0
    for i in range(num_fresh):
        node = np.int64(fresh[i])
        score = np.int64(dot_u8(codes, node, planes, query, width))
        if minus is not None:
            score -= minus[node]
        item = (score << 32) | (node << 1) | flag
        survivors[found] = item
        found += 1 if item > worst else 0
    return found


@njit(nogil=True, cache=True)
def fill_pool(graph, minus, planes, query, start, room, beam, scratch):
    """The best `room` nodes that the search meets, best first, in scratch.pool; returns (count, keys scored, hops).

    planes (n, 1 or 2, width) int8: coded queries, of which `query` is taken. start: one more node to start from, -1 for
    none. Stops when the best `beam` are expanded.
    """
    codes, adjacency, ids, entries, counts, _, _ = graph
    pool, visited, fresh, survivors = scratch
    linked = counts[0]
    total = counts[1]
    degree = adjacency.shape[1]
    block = len(fresh)
    for i in range((total + 63) >> 6):
        visited[i] = 0
    count = 0
    scored = 0
    worst = EMPTY
    one = np.uint64(1)
    at = 0
    while at <= len(entries):
        num_fresh = 0
        while at <= len(entries) and num_fresh < block:
            node = np.int64(entries[at]) if at < len(entries) else np.int64(start)
            at += 1
            if node < 0 or node >= linked:
                continue
            bit = one << np.uint64(node & 63)
            word = visited[node >> 6]
            fresh[num_fresh] = node
            num_fresh += 1 if (word & bit) == 0 else 0
            visited[node >> 6] = word | bit
            prefetch_row(codes, node)
        found = _score_fresh(codes, minus, planes, query, fresh, num_fresh, worst, survivors, 0)
        count, _ = _merge(pool, count, room, survivors, found)
        scored += num_fresh
        if count == room:
            worst = pool[room - 1]
    tail = linked
    while tail < total:  # keys that have no edges yet
        num_fresh = min(block, total - tail)
        for i in range(num_fresh):
            fresh[i] = tail + i
        found = _score_fresh(codes, minus, planes, query, fresh, num_fresh, worst, survivors, 1)
        count, _ = _merge(pool, count, room, survivors, found)
        scored += num_fresh
        tail += num_fresh
        if count == room:
            worst = pool[room - 1]
    cursor = 0
    hops = 0
    while True:
        while cursor < count and pool[cursor] & 1:
            cursor += 1
        if cursor >= min(count, beam):
            break
        item = pool[cursor]
        pool[cursor] = item | 1
        node = (item & 0xFFFFFFFF) >> 1
        hops += 1
        num_fresh = 0
        for i in range(degree):
            other = np.int64(adjacency[node, i])
            if other < 0:
                break
            if other >= linked:  # forgotten, or linked by another thread since
                continue
            bit = one << np.uint64(other & 63)
            word = visited[other >> 6]
            fresh[num_fresh] = other
            num_fresh += 1 if (word & bit) == 0 else 0
            visited[other >> 6] = word | bit
            prefetch_row(codes, other)
        if cursor + 1 < count:
            prefetch_row(adjacency, (pool[cursor + 1] & 0xFFFFFFFF) >> 1)
        found = _score_fresh(codes, minus, planes, query, fresh, num_fresh, worst, survivors, 0)
        scored += num_fresh
        first = count
        if found:
            count, first = _merge(pool, count, room, survivors, found)
            if count == room:
                worst = pool[room - 1]
        cursor = min(cursor + 1, first)
    return count, scored, hops


AHEAD = 6
"""Stored rows that are asked for before they are scored."""
SPARE = 4
"""A quarter more than k are scored exactly, so that keys misplaced by their codes come back."""
CELL_KEYS = 16
"""Keys of one cell that a search scores at most."""
MAX_OUTSIDE = 64
"""Keys of all cells that a search scores at most: as many places as every pool has behind its last."""


@njit(nogil=True, cache=True, inline="always")
def _insert(pool, count, item):
    """Put `item` where it belongs in pool[:count], best first, which has room for it."""
    j = count - 1
    while j >= 0 and pool[j] < item:
        pool[j + 1] = pool[j]
        j -= 1
    pool[j + 1] = item


@njit(nogil=True, cache=True)
def score_pool(graph, queries, query, keys, count, least, limit, scratch):
    """Replace scratch.pool[:count] by exact scores and keys, best first, only keys [least, limit); returns how many."""
    ids = graph[2]
    pool = scratch[0]
    kept = 0
    for i in range(min(AHEAD, count)):
        prefetch_row(keys, np.int64(ids[(pool[i] & 0xFFFFFFFF) >> 1]))
    for i in range(count):
        if i + AHEAD < count:
            prefetch_row(keys, np.int64(ids[(pool[i + AHEAD] & 0xFFFFFFFF) >> 1]))
        key = np.int64(ids[(pool[i] & 0xFFFFFFFF) >> 1])
        if 0 <= key < least or key >= limit:  # of an id below 0 the step's last task tells
            continue
        _insert(pool, kept, pack_score(dot(queries, query, keys, key), key))  # nearly sorted already
        kept += 1
    return kept


@njit(nogil=True, cache=True)
def gather_outside(graph, count, scratch):
    """Write keys that are no nodes to scratch.pool[count:]: those of the cells of the landmarks among the `count` in
    it, best landmark first. Returns how many.
    """
    starts, keys = graph[5], graph[6]
    pool = scratch[0]
    landmarks = len(starts) - 1
    found = 0
    for i in range(count):
        node = (pool[i] & 0xFFFFFFFF) >> 1
        if node < landmarks:
            for j in range(starts[node], min(starts[node + 1], starts[node] + CELL_KEYS)):
                if found == MAX_OUTSIDE:
                    return found
                pool[count + found] = keys[j]
                found += 1
    return found


@njit(nogil=True, cache=True)
def add_outside(queries, query, keys, first, count, kept, least, limit, scratch):
    """Merge the keys [least, limit) of scratch.pool[first : first + count] into the scored ones, scratch.pool[:kept].

    kept <= first. Returns how many scored ones there are now.
    """
    pool = scratch[0]
    for i in range(min(AHEAD, count)):
        prefetch_row(keys, pool[first + i])
    for i in range(count):
        if i + AHEAD < count:
            prefetch_row(keys, pool[first + i + AHEAD])
        key = pool[first + i]
        if least <= key < limit:
            _insert(pool, kept, pack_score(dot(queries, query, keys, key), key))
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def search_graph(graph, keys, queries, planes, steps, query, k, room, beam, least, limit, scratch, ids, scores):
    """Search for one query: its best k keys of [least, limit) to ids[:k], scores[:k]; returns (found, scored, hops).

    keys (n, head_dim) stored format; queries (q, head_dim) float32 of which `query` is taken, planes and steps the
    same coded. room: length of the pool, >= k. beam: how many of its best are expanded. Unused places get id -1 and
    score -inf. Fewer than k are found if the graph leads to fewer or others took their places. A query that is not
    finite (step 0): some keys, with what its inner products are. Allocates nothing, checks nothing.
    """
    count, scored, hops = fill_pool(graph, None, planes, query, -1, room, beam, scratch)
    pool = scratch[0]
    outside = gather_outside(graph, count, scratch)
    first = count
    if least == 0 and limit >= graph[4][2]:  # no place is lost to other keys
        count = min(count, k + max(8, k // SPARE))
    found = score_pool(graph, queries, query, keys, count, least, limit, scratch)
    found = min(k, add_outside(queries, query, keys, first, outside, found, least, limit, scratch))
    scored += outside
    for i in range(found):
        ids[i] = id_of(pool[i])
        scores[i] = score_of(pool[i])
    for i in range(found, k):
        ids[i] = -1
        scores[i] = -np.inf
    return found, scored, hops


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


def graph_task(descriptor, number, worker, like):
    """Search of a graph for one query; by a scan where a graph cannot answer."""
    like = carray(like, (1, 1))
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


def graph_search(request: SearchRequest, given: SearchArguments, length: int, row_bytes: int) -> CompiledSearch:
    """Search of the graph of an index of `length` keys whose stored rows have `row_bytes` bytes."""
    graph, keys = given.graph, given.keys
    assert len(keys) < 2 or keys.strides == (row_bytes, keys.itemsize), keys.strides
    # keys that take no part take places in the pool: it gets longer by their share
    room = max(given.beam, request.k + max(8, request.k // SPARE))
    room = -(-room * length // request.visible)
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
        task_address(graph_task, request.fmt), address_of(row), by_query=True, scratch=layout.nbytes, alive=(row, given)
    )
