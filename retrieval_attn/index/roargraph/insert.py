"""Linking further keys into a graph one after another, without a rebuild.

A new key is no query: its edges go to the keys nearest to it in L2 (the metric of the builder), found by a beam search
with an integer score that orders like the negative distance, and to its predecessor in the text. Each neighbour
gets the edge back, pruned by the builder's rule where its row is full.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import njit

from retrieval_attn.index.kernels.codes import PLANE_BASE, ZERO_CODE
from retrieval_attn.index.roargraph.build import add_edge, distance, near_scratch, prune, rescale
from retrieval_attn.index.roargraph.search import Graph, fill_pool

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
