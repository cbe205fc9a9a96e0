"""Searching a sketch: which blocks to look at, a bound that few keys pass, then the scan, in parts on many threads.

What is chosen and the bound do not depend on the parts, and neither does the result.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.index.kernels.coded import best_in_parts
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.sketch.blocks import BLOCK, PAIR
from retrieval_attn.index.sketch.fit import WEIGHED
from retrieval_attn.index.sketch.front import Front
from retrieval_attn.index.sketch.leaves import Leaves, choose_blocks
from retrieval_attn.index.sketch.rows import PARTS, KeyRows, spread_planes
from retrieval_attn.index.sketch.scan import (
    SAMPLED,
    WAITING_ROOM,
    encode_block_queries,
    project_queries,
    sample_bounds,
    scan_front,
)

KEYS_PER_TASK = 16384


class SketchArguments(NamedTuple):
    """Arguments of a compiled search of a sketch: keys in rows, their front, the id of every place (-1: none), the
    number of blocks in use, the projection of queries, (rank, head_dim), and the leaves. passing: keys that the front
    passes per key that gets an exact score. length: number of keys. whole: blocks below have a key in every place.
    """

    keys: KeyRows
    front: Front
    ids: npt.NDArray[np.int32]
    total: int
    query_side: npt.NDArray[np.float32]
    leaves: Leaves
    passing: float
    length: int
    whole: int


@njit(parallel=True, nogil=True, cache=True)
def _scan_parts(
    blocks, rows, ids, planes, narrow, steps, row_planes, wide, row_steps, num_queries, chosen, count, whole, stop,
    kept, bounds, pools, counts,
):  # fmt: skip
    """counts (parts, num_queries): candidates at the front of pools (parts, num_queries, capacity)."""
    parts = pools.shape[0]
    pairs = (count + 1) // 2
    for part in prange(parts):
        first, last = pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, count)
        scores = np.empty((8, BLOCK), np.float32)
        own, floors, waiting = bounds.copy(), np.empty(TILE_QUERIES, np.float32), np.empty(WAITING_ROOM, np.int64)
        scan_front(
            blocks, rows, ids, planes, narrow, steps, row_planes, wide, row_steps, num_queries, chosen, first, last,
            whole, 0, stop, kept, pools[part], counts[part], own, floors, waiting, scores,
        )  # fmt: skip


def scratch_floats(leaf_rows: int) -> int:
    """float32 numbers per query that choosing blocks and their bound take, for `leaf_rows` rows of coded means."""
    return max(SAMPLED + PAIR, 4 * leaf_rows)


def best_of_blocks(
    search: SketchArguments, stop: int, queries: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]:
    """The `kept` keys below `stop` with the largest approximate scores among the blocks looked at, per query.

    queries (n, head_dim) float32. Returns packed candidates (n, min(kept, stop)), unordered; how many scores of keys
    by the front and of leaves were computed; and which queries (n,) bool are not finite or found too few, whose
    candidates say nothing. The same at any number of threads. Queries are taken in groups of 4, as heads of a group
    are: the keys that one of them looks at are looked at for all.
    """
    kept = min(kept, stop)
    found, lost = np.empty((len(queries), kept), np.int64), np.zeros(len(queries), bool)
    scanned = 0
    for start in range(0, len(queries), TILE_QUERIES):
        some = slice(start, start + TILE_QUERIES)
        found[some], scores, lost[some] = _best_of_four(search, stop, queries[some], kept)
        scanned += scores
    return found, scanned, lost


def _best_of_four(
    search: SketchArguments, stop: int, queries: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]:
    keys, front, leaves, count = search.keys, search.front, search.leaves, len(queries)
    padded = np.zeros((TILE_QUERIES, queries.shape[1]), np.float32)
    padded[:count] = queries
    projected = np.zeros((TILE_QUERIES, len(search.query_side)), np.float32)
    project_queries(padded, search.query_side, projected, np.empty((TILE_QUERIES, 32), np.float32))

    def encoded(step: npt.NDArray[np.float32], split: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        planes, steps = np.zeros((TILE_QUERIES, len(step)), np.int8), np.zeros((2, TILE_QUERIES), np.float32)
        encode_block_queries(projected, count, step, split, planes, steps, np.empty(len(step), np.float64))
        return planes, steps

    row_numbers, row_steps = encoded(keys.step, keys.wide)
    row_planes = np.empty((TILE_QUERIES, PARTS * keys.rows.shape[1]), np.int8)
    spread_planes(row_numbers, count, keys.wide, row_planes)
    planes, steps = encoded(front.step, front.narrow)
    means = leaves.means
    leaf_planes, leaf_steps = encoded(means.step, len(means.step))
    chosen = np.empty(search.total + 1, np.int32)
    sample = np.empty((TILE_QUERIES, scratch_floats(len(means.blocks))), np.float32)
    bounds, scores = np.empty(TILE_QUERIES, np.float32), np.empty((8, BLOCK), np.float32)
    share = np.float32(leaves.share)  # as in a step: one specialisation for both
    looked_at = choose_blocks(
        means.blocks, leaves.ordered, search.total, share, leaf_planes, leaf_steps, count, chosen, sample,
        bounds, scores,
    )  # fmt: skip
    sample_bounds(
        front.blocks, search.ids, planes, front.narrow, steps, count, chosen, looked_at, 0, stop,
        wanted_of(search, kept), sample, bounds, scores,
    )  # fmt: skip
    lost = np.isnan(row_steps[0, :count])

    def scan(some: slice, number: int, pools: npt.NDArray[np.int64]) -> None:
        counts = np.zeros((len(pools), number), np.int64)
        _scan_parts(
            front.blocks, keys.rows, search.ids, planes, front.narrow, steps, row_planes, keys.wide, row_steps, number,
            chosen, looked_at, search.whole if stop >= search.length else 0, stop, kept, bounds, pools, counts,
        )  # fmt: skip
        for part, query in np.ndindex(counts.shape):
            pools[part, query, counts[part, query] :] = EMPTY
        lost[some] |= counts.sum(axis=0) < kept

    found = best_in_parts(count, max(looked_at * BLOCK, kept), kept, KEYS_PER_TASK, scan)
    leaves_scored = leaves.ordered if looked_at < search.total else 0
    return found, count * (looked_at * BLOCK + leaves_scored), lost


def wanted_of(search: SketchArguments, kept: int) -> int:
    """How many keys the front should let pass for a query of which the best `kept` get an exact score.

    Of fewer that are kept a larger part would be lost: half of what ways were weighed with passes in any case.
    """
    return int(np.ceil(search.passing * max(kept, (kept + WEIGHED) / 2)))
