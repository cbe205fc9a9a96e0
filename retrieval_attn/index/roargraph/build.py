"""The query-aware graph over keys: made from the exact lists of training queries, without any search.

Follows RoarGraph's projection (attach a query's neighbours to its best keys, prune by occlusion, add reverse
edges) with what attention keys need: every list is attached to several of its best keys, lists that meet at a key
are united, and distances between keys are L2 over codes, whose channels are centred and evenly scaled. There is no
connectivity pass. Every step computes a node's row from frozen input, so the graph does not depend on threads.

Nodes are numbered by how many lists name them, most first: what searches touch most lies together.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.index.kernels.codes import PLANE_BASE, ZERO_CODE, dot_u8_one
from retrieval_attn.index.kernels.dots import prefetch_row
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.roargraph.search import Graph, fill_pool
from retrieval_attn.index.threads import kernel_threads

AHEAD = 12
"""Rows that are asked for before they are copied."""
CHUNK = 512
"""Nodes per parallel task: each task has its own scratch."""


class Shape(NamedTuple):
    """How edges are chosen.

    degree: most edges of a node. targets: best keys that each list is attached to. fill: edges that a node gets at
    least, if pruning leaves fewer and there are candidates. candidates: most keys considered for one node, the highest
    ranks of its lists first.
    """

    degree: int
    targets: int
    fill: int
    candidates: int


class Near(NamedTuple):
    """Keys as the builder measures distances between them: codes (nodes, width) uint8 and what follows from them.

    signed: codes - 128, (nodes, 1, width) int8. norms: (nodes,) int32, sums of squares of signed. sums: (nodes,)
    int32, 128 times the sums of signed, which the product of codes and signed has too much.
    """

    codes: npt.NDArray[np.uint8]
    signed: npt.NDArray[np.int8]
    norms: npt.NDArray[np.int32]
    sums: npt.NDArray[np.int32]


def channel_ratios(scale: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
    """(width,) float32: what makes the steps of all channels equal, 1 for the coarsest; 0 for padding."""
    ratios = np.zeros(width, np.float32)
    if len(scale) and scale.max() > 0:
        ratios[: len(scale)] = scale / scale.max()
    return ratios


def near_of(codes: npt.NDArray[np.uint8], ratios: npt.NDArray[np.float32]) -> Near:
    """Return the inputs of distances between code rows (nodes, width), channels rescaled by ratios (width,)."""
    nodes, width = codes.shape
    near = near_scratch(nodes, width)
    with kernel_threads(None):
        _rescale_all(codes, ratios, near)
    return near


@njit(nogil=True, cache=True)
def rescale(codes, row, ratios, near, at):
    """Write code row `row`, its channels rescaled, and its norm to place `at` of `near`."""
    norm = np.int32(0)
    total = np.int32(0)
    for j in range(codes.shape[1]):
        number = np.int32(np.rint(np.float32(np.int32(codes[row, j]) - np.int32(ZERO_CODE)) * ratios[j]))
        near.codes[at, j] = np.uint8(number + np.int32(ZERO_CODE))
        near.signed[at, 0, j] = np.int8(number)
        norm += number * number
        total += number
    near.norms[at] = norm
    near.sums[at] = total * np.int32(ZERO_CODE)


@njit(parallel=True, nogil=True, cache=True)
def _rescale_all(codes, ratios, near):
    for i in prange(codes.shape[0]):
        rescale(codes, i, ratios, near, i)


@njit(nogil=True, cache=True)
def distance(codes, a, signed, b, norms_a, norms_b, sums_b, width):
    """Squared L2 distance of two coded rows."""
    product = dot_u8_one(codes, a, signed, b, width) - sums_b
    return norms_a + norms_b - 2 * product


@njit(nogil=True, cache=True)
def prune(buffer, order, count, degree, fill, out):
    """Choose at most `degree` of candidates 0..count - 1 and write their positions to out; returns how many.

    buffer: their rows as Near; order[i]: distance to the node << 32 | position, ascending. A candidate is left out
    if one already chosen is as near to it as the node is, or nearer (of equal keys one is chosen). Up to `fill` are
    then taken from those left out.
    """
    codes, signed, norms, sums = buffer
    width = codes.shape[1]
    chosen = 0
    rejected = 0
    for i in range(count):
        at = order[i] & 0xFFFFFFFF
        far = order[i] >> 32
        keep = True
        for j in range(chosen):
            other = out[j]
            if distance(codes, at, signed, other, norms[at], norms[other], sums[other], width) <= far:
                keep = False
                break
        if keep:
            out[chosen] = at
            chosen += 1
            if chosen == degree:
                return chosen
        else:
            order[rejected] = at  # reuse: positions before i are done with
            rejected += 1
    for i in range(min(rejected, max(0, fill - chosen))):
        out[chosen] = order[i]
        chosen += 1
    return chosen


@njit(nogil=True, cache=True)
def _gather(near, node, candidates, count, buffer, order):
    """Copy the candidates' rows next to each other and sort them by distance to node."""
    codes, signed, norms, sums = near
    width = codes.shape[1]
    for i in range(min(AHEAD, count)):
        prefetch_row(codes, np.int64(candidates[i]))
    for i in range(count):
        if i + AHEAD < count:
            prefetch_row(codes, np.int64(candidates[i + AHEAD]))
        copy_row(codes, np.int64(candidates[i]), buffer, i)
        far = distance(buffer.codes, i, signed, node, buffer.norms[i], norms[node], sums[node], width)
        order[i] = (np.int64(far) << 32) | np.int64(i)
    order[:count].sort()


@njit(nogil=True, cache=True)
def copy_row(codes, row, near, at):
    """Write the rescaled code row `row` and its norm to place `at` of `near`."""
    norm = np.int32(0)
    total = np.int32(0)
    source = codes[row]
    target = near.codes[at]
    signed = near.signed[at, 0]
    for j in range(codes.shape[1]):
        number = np.int32(source[j]) - np.int32(ZERO_CODE)
        target[j] = source[j]
        signed[j] = np.int8(number)
        norm += number * number
        total += number
    near.norms[at] = norm
    near.sums[at] = total * np.int32(ZERO_CODE)


@njit(nogil=True, cache=True)
def near_scratch(room, width):
    """A `Near` of arbitrary content for `room` rows."""
    return Near(
        np.empty((room, width), np.uint8),
        np.empty((room, 1, width), np.int8),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
    )


@njit(nogil=True, cache=True)
def _attach(lists, targets, nodes):
    """Lists by the nodes that they are attached to: starts (nodes + 1,) int64, and list numbers, ascending."""
    num_lists, length = lists.shape
    starts = np.zeros(nodes + 1, np.int64)
    for i in range(num_lists):
        for j in range(min(targets, length)):
            if lists[i, j] >= 0:
                starts[lists[i, j] + 1] += 1
    for node in range(nodes):
        starts[node + 1] += starts[node]
    at = starts[:-1].copy()
    attached = np.empty(starts[-1], np.int32)
    for i in range(num_lists):
        for j in range(min(targets, length)):
            node = lists[i, j]
            if node >= 0:
                attached[at[node]] = i
                at[node] += 1
    return starts, attached


@njit(nogil=True, cache=True, inline="always")
def _own_edges(adjacency, node, seen, candidates):
    """The edges of a node as its first candidates, they and itself marked as seen; how many."""
    count = 0
    seen[node] = node
    for i in range(adjacency.shape[1]):
        other = adjacency[node, i]
        if other < 0:
            break
        seen[other] = node
        candidates[count] = other
        count += 1
    return count


@njit(nogil=True, cache=True)
def _project_chunk(near, lists, starts, attached, degree, fill, max_candidates, adjacency, chunk):
    nodes = adjacency.shape[0]
    width = near[0].shape[1]
    length = lists.shape[1]
    seen = np.full(nodes, -1, np.int32)
    candidates = np.empty(max_candidates, np.int32)
    buffer = near_scratch(max_candidates, width)
    order = np.empty(max_candidates, np.int64)
    chosen = np.empty(degree, np.int64)
    for node in range(chunk * CHUNK, min(nodes, (chunk + 1) * CHUNK)):
        if starts[node] == starts[node + 1]:
            continue
        count = _own_edges(adjacency, node, seen, candidates)
        for rank in range(length):
            for i in range(starts[node], starts[node + 1]):
                other = lists[attached[i], rank]
                if other >= 0 and seen[other] != node and count < max_candidates:
                    seen[other] = node
                    candidates[count] = other
                    count += 1
            if count == max_candidates:
                break
        _gather(near, node, candidates, count, buffer, order)
        kept = prune(buffer, order, count, degree, fill, chosen)
        for i in range(degree):
            adjacency[node, i] = candidates[chosen[i]] if i < kept else -1


@njit(parallel=True, nogil=True, cache=True)
def _project(near, lists, starts, attached, degree, fill, max_candidates, adjacency):
    """Prune the edges of each node that has lists, and the keys in them, to its new edges; rows are -1 padded."""
    for chunk in prange((adjacency.shape[0] + CHUNK - 1) // CHUNK):
        _project_chunk(near, lists, starts, attached, degree, fill, max_candidates, adjacency, chunk)


@njit(nogil=True, cache=True)
def _transpose(adjacency):
    """Return the reverse edges of each node: starts (nodes + 1,) int64, and the source nodes, ascending."""
    nodes, degree = adjacency.shape
    starts = np.zeros(nodes + 1, np.int64)
    for i in range(nodes):
        for j in range(degree):
            if adjacency[i, j] < 0:
                break
            starts[adjacency[i, j] + 1] += 1
    for node in range(nodes):
        starts[node + 1] += starts[node]
    at = starts[:-1].copy()
    pointing = np.empty(starts[-1], np.int32)
    for i in range(nodes):
        for j in range(degree):
            other = adjacency[i, j]
            if other < 0:
                break
            pointing[at[other]] = i
            at[other] += 1
    return starts, pointing


@njit(nogil=True, cache=True)
def _add_reverse_chunk(near, adjacency, starts, pointing, fill, max_candidates, out, chunk):
    nodes, degree = adjacency.shape
    width = near[0].shape[1]
    room = max_candidates + degree
    seen = np.full(nodes, -1, np.int32)
    candidates = np.empty(room, np.int32)
    buffer = near_scratch(room, width)
    order = np.empty(room, np.int64)
    chosen = np.empty(degree, np.int64)
    for node in range(chunk * CHUNK, min(nodes, (chunk + 1) * CHUNK)):
        count = _own_edges(adjacency, node, seen, candidates)
        total = starts[node + 1] - starts[node]
        step = max(1, (total + max_candidates - 1) // max_candidates)
        for i in range(starts[node], starts[node + 1], step):
            other = pointing[i]
            if seen[other] != node:
                seen[other] = node
                candidates[count] = other
                count += 1
        if count <= degree:
            for i in range(degree):
                out[node, i] = candidates[i] if i < count else -1
            continue
        _gather(near, node, candidates, count, buffer, order)
        kept = prune(buffer, order, count, degree, fill, chosen)
        for i in range(degree):
            out[node, i] = candidates[chosen[i]] if i < kept else -1


@njit(parallel=True, nogil=True, cache=True)
def _add_reverse(near, adjacency, starts, pointing, fill, max_candidates, out):
    """out[node] = its edges and its reverse edges, pruned where they are more than fit."""
    for chunk in prange((adjacency.shape[0] + CHUNK - 1) // CHUNK):
        _add_reverse_chunk(near, adjacency, starts, pointing, fill, max_candidates, out, chunk)


@njit(nogil=True, cache=True)
def _count(lists, length, counts):
    for i in range(lists.shape[0]):
        for j in range(lists.shape[1]):
            if 0 <= lists[i, j] < length:
                counts[lists[i, j]] += 1


@njit(nogil=True, cache=True)
def add_edge(adjacency, node, other):
    """Put an edge where there is room and it is not there yet; says whether the node has it now."""
    for i in range(adjacency.shape[1]):
        if adjacency[node, i] == other:
            return True
        if adjacency[node, i] < 0:
            adjacency[node, i] = other
            return True
    return False


@njit(nogil=True, cache=True)
def _add_temporal(adjacency, by_token):
    """Edges both ways between nodes that follow each other in the text, where there is room."""
    for i in range(len(by_token) - 1):
        add_edge(adjacency, by_token[i], by_token[i + 1])
        add_edge(adjacency, by_token[i + 1], by_token[i])


@njit(nogil=True, cache=True)
def _relabel(lists, local, out):
    for i in range(lists.shape[0]):
        for j in range(lists.shape[1]):
            key = lists[i, j]
            out[i, j] = local[key] if 0 <= key < len(local) else -1


@njit(nogil=True, cache=True)
def _components(adjacency, nodes):
    """The lowest node that each node is connected with, edges taken both ways: (nodes,) int32."""
    roots = np.arange(nodes).astype(np.int32)
    for i in range(nodes):
        for j in range(adjacency.shape[1]):
            if adjacency[i, j] < 0:
                break
            a = np.int32(i)
            b = adjacency[i, j]
            while roots[a] != a:
                roots[a] = roots[roots[a]]
                a = roots[a]
            while roots[b] != b:
                roots[b] = roots[roots[b]]
                b = roots[b]
            roots[max(a, b)] = min(a, b)
    for i in range(nodes):
        roots[i] = roots[roots[i]]  # roots before i are final
    return roots


def choose_entries(adjacency: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    """Up to `count` nodes to start from, int32: the hottest of each connected part, largest first, then of all."""
    nodes = len(adjacency)
    count = min(count, nodes)
    parts, sizes = np.unique(_components(adjacency, nodes), return_counts=True)
    hottest = parts[np.argsort(-sizes, kind="stable")][:count]  # the lowest node of a part is its hottest
    others = np.setdiff1d(np.arange(count, dtype=np.int32), hottest)
    return np.unique(np.concatenate([hottest, others[: count - len(hottest)]]))


def list_counts(lists: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    """(length,) int32: how many of the lists (m, kk) name each key."""
    counts = np.zeros(length, np.int32)
    _count(lists, length, counts)
    return counts


def hot_first(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Key ids by how many lists name them, most first, equal ones by id; without keys that no list names."""
    return np.argsort(-counts, kind="stable").astype(np.int32)[: int((counts > 0).sum())]


def relabelled(lists: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    """Lists of key ids as lists of nodes; -1 where a key has none."""
    local = np.full(length, -1, np.int32)
    local[ids] = np.arange(len(ids), dtype=np.int32)
    out = np.empty(lists.shape, np.int32)
    _relabel(lists, local, out)
    return out


def make_edges(
    near: Near, lists: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], shape: Shape
) -> npt.NDArray[np.int32]:
    """Adjacency (nodes, degree) int32, -1 padded at the end of a row, from lists (m, kk) of nodes, best first.

    ids: the key of each node, for edges along the text. The same at any thread count.
    """
    nodes = len(near.codes)
    projected = np.full((nodes, shape.degree), -1, np.int32)
    adjacency = aligned_empty(projected.shape, np.int32)
    starts, attached = _attach(lists, shape.targets, nodes)
    room = max(shape.candidates, 2 * shape.degree)
    with kernel_threads(None):
        _project(near, lists, starts, attached, shape.degree, shape.fill, room, projected)
        starts, pointing = _transpose(projected)
        _add_reverse(near, projected, starts, pointing, shape.fill, room, adjacency)
    _add_temporal(adjacency, np.argsort(ids, kind="stable"))
    return adjacency


INSERT_BEAM = 128
"""Pool length of the search for a new key's neighbours."""
INSERT_EDGES = 32
"""Most edges a new key starts with."""


@njit(nogil=True, cache=True)
def distance_terms(codes, start, stop, ratios, minus):
    """minus[i] for rows [start, stop): what to take from the product with `key_as_query` to order like -distance."""
    for i in range(start, stop):
        total = 0.0
        for j in range(codes.shape[1]):
            number = np.float64(np.int32(codes[i, j]) - np.int32(ZERO_CODE)) * np.float64(ratios[j])
            total += number * number
        minus[i] = np.int32(np.rint(total * (PLANE_BASE / 2)))


@njit(nogil=True, cache=True)
def key_as_query(codes, row, ratios, planes, place):
    """planes[place] (two planes): code row `row` as a query, PLANE_BASE * ratio**2 * (code - 128)."""
    for j in range(codes.shape[1]):
        ratio = np.float64(ratios[j])
        number = np.int32(np.rint(ratio * ratio * PLANE_BASE * (np.int32(codes[row, j]) - np.int32(ZERO_CODE))))
        first = (number + np.int32(PLANE_BASE // 2)) >> 7
        first = min(max(first, np.int32(-127)), np.int32(127))
        planes[place, 0, j] = first
        planes[place, 1, j] = min(max(number - first * PLANE_BASE, np.int32(-128)), np.int32(127))


@njit(nogil=True, cache=True)
def _order(near, node, count, order):
    """order[:count]: places 0 .. count - 1 of `near` by distance to place `node`."""
    width = near.codes.shape[1]
    for i in range(count):
        far = distance(near.codes, i, near.signed, node, near.norms[i], near.norms[node], near.sums[node], width)
        order[i] = (np.int64(far) << 32) | np.int64(i)
    order[:count].sort()


@njit(nogil=True, cache=True)
def _edge_back(codes, adjacency, ratios, node, other, fill, near, order, chosen):
    """Give `node` the edge to `other`, pruning its row if it is full."""
    degree = adjacency.shape[1]
    if add_edge(adjacency, node, other):
        return
    for i in range(degree):
        rescale(codes, np.int64(adjacency[node, i]), ratios, near, i)
    rescale(codes, other, ratios, near, degree)
    rescale(codes, node, ratios, near, degree + 1)
    _order(near, degree + 1, degree + 1, order)
    kept = prune(near, order, degree + 1, degree, fill, chosen)
    row = adjacency[node].copy()
    for i in range(degree):
        if i >= kept:
            adjacency[node, i] = -1
        elif chosen[i] == degree:
            adjacency[node, i] = other
        else:
            adjacency[node, i] = row[chosen[i]]


@njit(nogil=True, cache=True)
def link_nodes(graph, minus, ratios, start, stop, fill, scratch):
    """Give nodes [start, stop) edges, in order; all nodes before `start` have theirs.

    adjacency is changed in place; rows of the nodes linked must exist and are overwritten.
    """
    codes, adjacency, ids, entries, counts, cell_starts, cell_keys = graph
    degree = adjacency.shape[1]
    width = codes.shape[1]
    room = max(INSERT_BEAM, degree) + 2
    near = near_scratch(room, width)
    order = np.empty(room, np.int64)
    chosen = np.empty(degree, np.int64)
    planes = np.empty((1, 2, width), np.int8)
    found = np.empty(INSERT_BEAM, np.int64)
    for node in range(start, stop):
        now = Graph(codes, adjacency, ids, entries, np.array([node, node, counts[2]]), cell_starts, cell_keys)
        key_as_query(codes, node, ratios, planes, 0)
        count, _, _ = fill_pool(now, minus, planes, 0, node - 1, INSERT_BEAM, INSERT_BEAM, scratch)
        for i in range(count):
            found[i] = (scratch.pool[i] & 0xFFFFFFFF) >> 1
            rescale(codes, found[i], ratios, near, i)
        rescale(codes, node, ratios, near, count)
        _order(near, count, count, order)
        kept = prune(near, order, count, min(degree, INSERT_EDGES), 0, chosen)
        for i in range(degree):
            adjacency[node, i] = found[chosen[i]] if i < kept else -1
        for i in range(kept):
            # `chosen` is scratch of the pruning below: the row just written has the neighbours
            _edge_back(codes, adjacency, ratios, np.int64(adjacency[node, i]), node, fill, near, order, chosen)
        if node > 0 and ids[node - 1] + 1 == ids[node]:
            add_edge(adjacency, node, node - 1)
            add_edge(adjacency, node - 1, node)
