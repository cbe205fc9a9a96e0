"""Spherical k-means over training queries, in the space where keys have equal spread: the direction of a query there
says which keys it ranks first, and its length says nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format

ROUNDS = 5
QUERIES_PER_CENTROID = 16
"""Fewest training queries per centroid, on average, that are clustered; and most that a round looks at."""


def directions(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """rows (n, d) scaled to length 1, float32; rows of length 0 stay."""
    wide = rows.astype(np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True, initial=0.0)
    wide /= np.where(largest > 0, largest, 1.0)  # squares of very small or large numbers leave even float64
    length = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    return (wide / np.where(length > 0, length, 1.0)).astype(np.float32)


def cluster_queries(
    rows: npt.NDArray[np.float32], most: int, seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Centroids (c, d) float32 of length 1, c <= most, and the centroid of each row (n,) int32. n >= 1.

    Starts from rows drawn without repetition. A centroid that loses all its rows stays where it was. Sums are taken
    in order of rows: the same for a seed at any number of threads.
    """
    near = directions(rows)
    count = max(1, min(most, len(near) // QUERIES_PER_CENTROID))
    order = np.random.default_rng(seed).permutation(len(near))
    centroids = near[order[:count]]
    sample = near[order[: count * QUERIES_PER_CENTROID]]
    for _ in range(ROUNDS):
        member = _nearest(centroids, sample)
        by_member = np.argsort(member, kind="stable")
        present, starts = np.unique(member[by_member], return_index=True)
        sums = np.add.reduceat(sample[by_member].astype(np.float64), starts, axis=0)
        centroids = centroids.copy()
        centroids[present] = directions(sums.astype(np.float32))
    return centroids, _nearest(centroids, near)


def _nearest(centroids: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """The centroid with the largest inner product for each row (n,)."""
    return search_exact(centroids[None], np.ascontiguousarray(rows)[None], 1, Format.FLOAT32).ids[0, :, 0]
