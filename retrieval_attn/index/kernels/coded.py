"""The best keys by their codes: one pass over all code rows for all queries, on as many threads as Numba has."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.scan import BOUND_WORDS, scan_codes
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.threads import kernel_threads

MIN_KEYS_PER_TASK = 8192
POOL_BYTES = 64 << 20
"""Most memory for candidate pools in one pass; more queries are searched in several passes."""


@njit(parallel=True, nogil=True, cache=True)
def _scan_parts(codes, length, planes, num_queries, kept, pools):
    """codes (1 or more, rows, width), of which the first are scanned: of one layout, see `memory.one_layout`."""
    parts = pools.shape[0]
    for part in prange(parts):
        counts = np.empty(num_queries, np.int64)
        bounds = np.empty((planes.shape[0] // TILE_QUERIES, BOUND_WORDS), np.int32)
        sums = np.empty((4, 16), np.int32)
        start = length * part // parts
        stop = length * (part + 1) // parts
        scan_codes(codes[0], planes, num_queries, start, stop, kept, pools[part], counts, bounds, sums)


def best_codes(codes: npt.NDArray[Any], length: int, planes: npt.NDArray[np.int8], kept: int) -> npt.NDArray[np.int64]:
    """The `kept` keys of codes[:length] with the largest sums, per query: (n, min(kept, length)) packed, unordered.

    codes (at least length, width) uint8, or int8 keys (at least length, head_dim) as kernels take them, all finite;
    planes (n, 1, width) int8 as `codes.encode_query` gives them, against a mean of 0 and steps of 1 for keys. Of equal
    sums the lower id; the result does not depend on the number of threads.
    """
    rows = codes[None] if codes.dtype == np.uint8 else one_layout(codes[None])

    def scan(some: slice, count: int, pools: npt.NDArray[np.int64]) -> None:
        padded = np.zeros((-(-count // TILE_QUERIES) * TILE_QUERIES, *planes.shape[1:]), np.int8)
        padded[:count] = planes[some]
        _scan_parts(rows, length, padded, count, min(kept, length), pools)

    return best_in_parts(len(planes), length, kept, MIN_KEYS_PER_TASK, scan)


def best_in_parts(
    num: int, length: int, kept: int, keys_per_task: int, scan: Callable[[slice, int, npt.NDArray[np.int64]], None]
) -> npt.NDArray[np.int64]:
    """The `kept` best of `length` keys for `num` queries, scanned in parts: (num, min(kept, length)), unordered.

    scan(queries, count, pools) leaves the best of each part at the front of pools (parts, count, capacity) int64. It is
    called for as many queries at a time as POOL_BYTES allow, with Numba's threads set. A part has at least
    `keys_per_task` keys, unless it is the only one.
    """
    kept = min(kept, length)
    best = np.empty((num, kept), np.int64)
    if not best.size:
        return best
    parts = max(1, min(numba.get_num_threads(), length // keys_per_task))
    capacity = 2 * kept + 64
    at_once = max(TILE_QUERIES, POOL_BYTES // (8 * parts * capacity) // TILE_QUERIES * TILE_QUERIES)
    with kernel_threads(None):
        for first in range(0, num, at_once):
            some = slice(first, min(first + at_once, num))
            count = some.stop - first
            pools = np.empty((parts, count, capacity), np.int64)
            scan(some, count, pools)
            found = pools[..., :kept].transpose(1, 0, 2).reshape(count, parts * kept)
            if parts > 1:
                found.partition(parts * kept - kept, axis=1)
            best[some] = found[:, -kept:]
    return best
