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
from retrieval_attn.index.sketch.blocks import BLOCK, KeyBlocks
from retrieval_attn.index.sketch.leaves import Leaves, choose_blocks
from retrieval_attn.index.sketch.scan import SAMPLED, encode_block_queries, project_queries, sample_bounds, scan_chosen

KEYS_PER_TASK = 16384


class SketchArguments(NamedTuple):
    """What a compiled search of a sketch reads: coded keys, the id of every place (-1: none), how many blocks are in
    use, what queries are projected by, (rank, head_dim), and the leaves.
    """

    keys: KeyBlocks
    ids: npt.NDArray[np.int32]
    total: int
    query_side: npt.NDArray[np.float32]
    leaves: Leaves


@njit(parallel=True, nogil=True, cache=True)
def _scan_parts(blocks, ids, planes, wide, steps, num_queries, chosen, count, stop, kept, bounds, pools, counts):
    """counts (parts, num_queries): candidates at the front of pools (parts, num_queries, capacity)."""
    parts = pools.shape[0]
    pairs = (count + 1) // 2
    for part in prange(parts):
        first, last = pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, count)
        scores = np.empty((8, BLOCK), np.float32)
        own = bounds.copy()
        scan_chosen(
            blocks, ids, planes, wide, steps, num_queries, chosen, first, last, 0, stop, kept, pools[part],
            counts[part], own, scores,
        )  # fmt: skip


def scratch_floats(leaf_rows: int) -> int:
    """float32 numbers per query that choosing blocks and their bound take, for so many rows of coded means."""
    return max(2 * SAMPLED, 4 * leaf_rows)


def best_of_blocks(
    search: SketchArguments, stop: int, queries: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]:
    """The `kept` keys below `stop` with the largest approximate scores among the blocks looked at, per query.

    queries (n, head_dim) float32. Returns packed candidates (n, min(kept, stop)), unordered; how many scores of keys
    and leaves were computed; and which queries (n,) bool are not finite or found too few, whose candidates say nothing.
    The same at any number of threads. Queries are taken in groups of 4, as heads of a group are: the blocks that one
    of them looks at are looked at for all.
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
    keys, leaves, rank, count = search.keys, search.leaves, len(search.query_side), len(queries)
    projected, numbers = np.zeros((TILE_QUERIES, rank), np.float32), np.empty(rank, np.float64)
    padded = np.zeros((TILE_QUERIES, queries.shape[1]), np.float32)
    padded[:count] = queries
    project_queries(padded, search.query_side, projected, np.empty((TILE_QUERIES, 32), np.float32))
    planes, steps = np.zeros((TILE_QUERIES, rank), np.int8), np.zeros((2, TILE_QUERIES), np.float32)
    encode_block_queries(projected, count, keys.step, keys.wide, planes, steps, numbers)
    means = leaves.means
    leaf_planes, leaf_steps = np.zeros((TILE_QUERIES, len(means.step)), np.int8), np.zeros_like(steps)
    encode_block_queries(projected, count, means.step, means.wide, leaf_planes, leaf_steps, numbers)
    chosen = np.empty(search.total + 1, np.int32)
    sample = np.empty((TILE_QUERIES, scratch_floats(len(means.blocks))), np.float32)
    bounds, scores = np.empty(TILE_QUERIES, np.float32), np.empty((8, BLOCK), np.float32)
    share = np.float32(leaves.share)  # as in a step: one specialisation for both
    looked_at = choose_blocks(
        means.blocks, leaves.ordered, search.total, share, leaf_planes, leaf_steps, count, chosen, sample,
        bounds, scores,
    )  # fmt: skip
    sample_bounds(
        keys.blocks,
        search.ids,
        planes,
        keys.wide,
        steps,
        count,
        chosen,
        looked_at,
        0,
        stop,
        kept,
        sample,
        bounds,
        scores,
    )
    lost = np.isnan(steps[0, :count])

    def scan(some: slice, number: int, pools: npt.NDArray[np.int64]) -> None:
        counts = np.zeros((len(pools), number), np.int64)
        _scan_parts(
            keys.blocks, search.ids, planes, keys.wide, steps, number, chosen, looked_at, stop, kept, bounds, pools,
            counts,
        )  # fmt: skip
        for part, query in np.ndindex(counts.shape):
            pools[part, query, counts[part, query] :] = EMPTY
        lost[some] |= counts.sum(axis=0) < kept

    found = best_in_parts(count, max(looked_at * BLOCK, kept), kept, KEYS_PER_TASK, scan)
    leaves_scored = leaves.ordered if looked_at < search.total else 0
    return found, count * (looked_at * BLOCK + leaves_scored), lost
