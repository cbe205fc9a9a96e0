"""Keys that lie far from each other: where every search starts, and how keys outside of the graph are found.

Training queries say where most queries go. What none of them asked for (one sentence among thousands of copies of
another) has few edges or is no node at all, and no beam finds a way there; but it lies far from all the rest. So some
keys are chosen each as the one farthest from those before (Gonzalez, 1985): one of each kind of copies, and what
resembles nothing. They are nodes and entries of the graph, and every other key belongs to the landmark nearest to it.

Keys that are no nodes are kept by landmark, as *cells*; a search scores those of the landmarks that it ends up with.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.index.kernels.codes import PLANE_BASE, ZERO_CODE, dot_u8_two
from retrieval_attn.index.kernels.dots import prefetch_row
from retrieval_attn.index.kernels.packed import id_of, keep_best, sort_best
from retrieval_attn.index.roargraph.build import add_edge, distance_terms, key_as_query
from retrieval_attn.index.roargraph.search import Cells
from retrieval_attn.index.threads import kernel_threads

MIN_KEYS = 32
"""Keys per landmark at least, over all."""
AT_ONCE = 16
"""Landmarks that one pass over the keys measures distances to."""
CANDIDATES = 128
"""Keys farthest from the landmarks so far that the next ones are chosen from."""
LANDMARK_EDGES = 8
"""Nodes nearest to a landmark, of those that belong to it, that it gets edges to."""
COPY = PLANE_BASE // 2
"""A key nearer than this per channel (one step of its code) is a copy: distances are no more exact than that."""
ROWS = 1024
"""Keys per parallel task."""


class Landmarks(NamedTuple):
    """Which keys are landmarks, and where the others belong.

    ids: (m,) int32 keys, in the order of choice. homes: (n,) int32, number of the landmark nearest to each key. gaps:
    (n,) int64, squared distance to it, times PLANE_BASE / 2.
    """

    ids: npt.NDArray[np.int32]
    homes: npt.NDArray[np.int32]
    gaps: npt.NDArray[np.int64]


def choose_landmarks(codes: npt.NDArray[np.uint8], ratios: npt.NDArray[np.float32], count: int) -> Landmarks:
    """At most `count` keys far from each other, of code rows (n, width) whose channels count by ratios (width,).

    Fewer where there are no more different ones, or fewer than MIN_KEYS keys for each. The same at any thread count.
    """
    num = len(codes)
    count = min(count, -(-num // MIN_KEYS))
    ids = np.empty(count, np.int32)
    homes, gaps = np.full(num, -1, np.int32), np.full(num, np.iinfo(np.int64).max, np.int64)
    terms = np.empty(num, np.int32)
    distance_terms(codes, 0, num, ratios, terms)
    planes, shifts = np.empty((AT_ONCE, 2, codes.shape[1]), np.int8), np.empty(AT_ONCE, np.int64)
    found = 0
    with kernel_threads(None):
        while found < count:
            more = _choose(codes, ratios, terms, gaps, ids, found, planes, shifts)
            if not more:
                break
            _measure(codes, terms, planes, shifts, found, more, homes, gaps)
            found += more
    return Landmarks(ids[:found].copy(), homes, gaps)


@njit(nogil=True, cache=True, inline="always")
def _gap(codes, row, terms, planes, place, shift):
    """Squared distance of key `row` to the landmark in `place`, times PLANE_BASE / 2."""
    product = np.int64(dot_u8_two(codes, row, planes, place, codes.shape[1]))
    return max(np.int64(0), np.int64(terms[row]) + shift - product)  # rounding may make it negative


@njit(nogil=True, cache=True)
def _choose(codes, ratios, terms, gaps, ids, found, planes, shifts):
    """Write up to AT_ONCE further landmarks to ids[found:], coded to planes; returns how many, 0 if all are copies.

    Only while they are known to be about as far away as any key: then a pass over all keys has to say more.
    """
    num = codes.shape[0]
    packed = np.empty(num, np.int64)
    for i in range(num):
        # the first is the one farthest from the mean
        far = np.int64(terms[i]) if found == 0 else gaps[i]
        packed[i] = (min(far, np.int64(0x7FFFFFFF)) << 32) | (np.int64(0xFFFFFFFF) - i)
    size = min(CANDIDATES, num)
    keep_best(packed, num, size)
    sort_best(packed, size)
    left = np.empty(size, np.int64)
    for i in range(size):
        left[i] = packed[i] >> 32
    least = left[size - 1] if size < num else np.int64(0)
    more = 0
    while more < min(AT_ONCE, len(ids) - found):
        best = 0
        for i in range(1, size):
            if left[i] > left[best]:
                best = i
        if found + more > 0 and (left[best] <= COPY * codes.shape[1] or (more > 0 and 2 * left[best] < least)):
            break
        node = id_of(packed[best])
        ids[found + more] = node
        key_as_query(codes, node, ratios, planes, more)
        total = np.int64(0)
        for j in range(codes.shape[1]):
            total += np.int64(planes[more, 0, j]) * PLANE_BASE + np.int64(planes[more, 1, j])
        shifts[more] = np.int64(terms[node]) + total * ZERO_CODE
        for i in range(size):
            far = _gap(codes, id_of(packed[i]), terms, planes, more, shifts[more])
            left[i] = far if found + more == 0 else min(left[i], far)
        left[best] = 0
        more += 1
        if found + more == 1:
            break  # distances to the mean say nothing about the next
    return more


@njit(parallel=True, nogil=True, cache=True)
def _measure(codes, terms, planes, shifts, first, count, homes, gaps):
    """Give keys that are nearer to one of the landmarks first, first + 1, ... (count of them, coded) to it."""
    num = codes.shape[0]
    for chunk in prange((num + ROWS - 1) // ROWS):
        for row in range(chunk * ROWS, min(num, (chunk + 1) * ROWS)):
            prefetch_row(codes, min(row + 8, num - 1))
            for place in range(count):
                far = _gap(codes, row, terms, planes, place, shifts[place])
                if far < gaps[row]:
                    gaps[row] = far
                    homes[row] = first + place


@njit(nogil=True, cache=True)
def _join(adjacency, order, homes, limit):
    """Edges both ways, where there is room, between landmarks homes[i] and their nodes order[i], nearest first."""
    taken = np.zeros(len(adjacency), np.int32)
    for node in order:
        home = homes[node]
        if home != node and taken[home] < limit:
            taken[home] += 1
            add_edge(adjacency, home, node)
            add_edge(adjacency, node, home)


def join_landmarks(adjacency: npt.NDArray[np.int32], homes: npt.NDArray[np.int32], gaps: npt.NDArray[np.int64]) -> None:
    """Give each landmark edges to the nodes nearest to it and back, in place.

    homes, gaps: of each node, (nodes,), homes being nodes themselves.
    """
    _join(adjacency, np.argsort(gaps, kind="stable"), homes, LANDMARK_EDGES)


def make_cells(
    homes: npt.NDArray[np.int32], gaps: npt.NDArray[np.int64], outside: npt.NDArray[np.int32], count: int
) -> Cells:
    """Cells of the keys `outside` of the graph (ids), with homes and gaps (n,) of all keys; homes are nodes < count."""
    order = outside[np.lexsort((outside, -gaps[outside], homes[outside]))]
    sizes = np.bincount(homes[order], minlength=count)
    return Cells(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), order.astype(np.int32))


def without_keys(cells: Cells, stays: npt.NDArray[np.bool_], landmarks: npt.NDArray[np.bool_]) -> Cells:
    """Cells of the keys that stay (n,), by the landmarks that do (m,): keys of one that goes join those before it.

    Without any landmark there are no cells.
    """
    if not landmarks.any():
        return Cells(np.zeros(1, np.int32), np.empty(0, np.int32))
    here = stays[cells.keys]
    before = np.concatenate([[0], np.cumsum(here)]).astype(np.int32)
    starts = before[cells.starts]
    inner = starts[:-1][landmarks]
    inner[0] = 0
    return Cells(np.concatenate([inner, starts[-1:]]), cells.keys[here])


def cells_fit(cells: Cells, nodes: int, num_keys: int) -> bool:
    """Whether arrays from a file are cells of a graph of `nodes` nodes over `num_keys` keys."""
    starts, keys = cells
    return (
        starts.dtype == keys.dtype == np.int32
        and starts.ndim == keys.ndim == 1
        and 1 <= len(starts) <= nodes + 1
        and int(starts[0]) == 0
        and int(starts[-1]) == len(keys)
        and bool((np.diff(starts) >= 0).all())
        and (not len(keys) or (int(keys.min()) >= 0 and int(keys.max()) < num_keys))
    )
