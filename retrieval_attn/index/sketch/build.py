"""Build a sketch of the keys of a head: rows in leaves, then the search parameters, then the front."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import NotFiniteError
from retrieval_attn.index.base import SearchResult
from retrieval_attn.index.formats import Format, kernel_view
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.kernels.key_codes import CodeSpace
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.sketch.blocks import BLOCK
from retrieval_attn.index.sketch.coding import RowCoder, code_rows, place_rows, row_space
from retrieval_attn.index.sketch.fit import FitQueries
from retrieval_attn.index.sketch.front import Front, empty_front, plan_front, write_front
from retrieval_attn.index.sketch.leaves import TREE_NUMBERS, Leaves, code_means, leaf_order
from retrieval_attn.index.sketch.rows import KeyRows, clear_places, empty_rows

SAMPLED_KEYS = 8192
"""Maximum keys, evenly spaced, from which projection, steps and search parameters are learned."""
MIN_LEAVES = 512
"""Leaves below which a search scans all of them."""
TILE = 64


class Ordered(NamedTuple):
    """Keys of a head in their places. keys: rows; ids (places,) int32; total: blocks in use; leaves: share 1.0.

    numbers (m, rank) float32: of every `every`-th key.
    """

    keys: KeyRows
    ids: npt.NDArray[np.int32]
    total: int
    leaves: Leaves
    numbers: npt.NDArray[np.float32]
    every: int

    def front(self, size: int) -> Front:
        """Return their front of `size` bytes per key."""
        front = empty_front(plan_front(self.numbers, self.keys.mean, [size])[size], len(self.keys.rows))
        write_front(front, self.keys, 0, int((self.ids >= 0).sum()))
        return front


def no_leaves(rank: int, share: float = 1.0) -> Leaves:
    """Return empty leaves, for keys that are not ordered."""
    return Leaves(code_means(np.empty((0, rank), np.float32)), 0, share)


def ordered_keys(
    arrays: list[npt.NDArray[Any]],
    fmt: Format,
    key_side: npt.NDArray[np.float32],
    wide: int,
    *,
    room: int,
    leafy: bool,
    coder: RowCoder | None = None,
) -> Ordered:
    """Code the keys of `arrays`, ids from 0 on, with steps fitted to them; leafy: order many keys in leaves. Raises
    NotFiniteError.

    room: keys to allocate room for. coder: codes the keys of a single array on a device.
    """
    total, rank = sum(len(array) for array in arrays), len(key_side)
    every = max(1, total // SAMPLED_KEYS)
    sample, before = [np.empty((0, rank), np.float32)], 0
    for array in arrays:  # evenly spaced over all of them
        sample.append(projected(array[-before % every :: every], fmt, key_side))
        before += len(array)
    numbers = np.concatenate(sample)
    check_finite(numbers, 0, every)
    keys = empty_rows(numbers, wide, max(room, total))
    space, steps = row_space(key_side, numbers, keys)
    coded = _coded(space, arrays, fmt) if coder is None else coder.rows(space, fmt, *arrays)
    leafy = leafy and total >= MIN_LEAVES * BLOCK
    tree = coded[:, :TREE_NUMBERS].view(np.int8)
    order = leaf_order(tree, steps) if leafy else np.arange(total, dtype=np.int32)
    means = place_rows(coded, order, keys)
    clear_places(keys, total)
    ids = np.full(len(keys.rows), -1, np.int32)
    ids[:total] = order
    leaves = Leaves(code_means(means), len(means), 1.0) if leafy else no_leaves(rank)
    return Ordered(keys, ids, len(means), leaves, numbers, every)


def held_for(
    made: Ordered,
    query_side: npt.NDArray[np.float32],
    queries: npt.NDArray[np.float32],
    found: SearchResult,
    best: npt.NDArray[np.float32],
    group: int,
) -> FitQueries:
    """Return `FitQueries` of queries (m, head_dim) with exact best keys `found`, numbers `best` (m * k, rank)."""
    logits = found.scores.astype(np.float64) / np.sqrt(queries.shape[1])
    weights: npt.NDArray[np.float64] = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    places = np.empty(int((made.ids >= 0).sum()), np.int64)
    taken = np.flatnonzero(made.ids >= 0)
    places[made.ids[taken]] = taken
    own = (queries @ query_side.T).astype(np.float32)
    sampled = np.arange(0, len(made.numbers), 2) * made.every  # every second one is enough for weights
    scores = np.zeros((len(queries), 0), np.float32)
    homes, sample_homes = np.zeros(found.ids.shape, np.int64), np.zeros(len(sampled), np.int64)
    if made.leaves.ordered:
        means = made.leaves.means.decoded(made.leaves.ordered)
        scores = (own[:, : means.shape[1]] @ means[:, : own.shape[1]].T).astype(np.float32)
        homes, sample_homes = places[found.ids] // BLOCK, places[sampled] // BLOCK
    mean = made.keys.mean
    distances, sample = (best - mean).reshape(*found.ids.shape, -1), made.numbers[::2] - mean
    return FitQueries(group, own, distances, weights, sample, scores, homes, sample_homes, len(places))


def projected(keys: npt.NDArray[Any], fmt: Format, key_side: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """B k of keys (n, head_dim) in `fmt`: (n, rank) float32, bit-identical however keys are cut into calls."""
    rank = len(key_side)
    rows = np.zeros((-(-rank // TILE_QUERIES) * TILE_QUERIES, key_side.shape[1]), np.float32)
    rows[:rank] = key_side
    out = np.empty((len(keys), rank), np.float32)
    if len(keys):
        _project(one_layout(kernel_view(keys, fmt)[None]), len(keys), rows, out)
    return out


@njit(nogil=True, cache=True)
def _project(keys, length, rows, out):  # type: ignore[no-untyped-def]
    """out[i, j] = rows[j] . keys[0, i] for i < length; rows (multiple of 4, d) float32, out (length, rows) float32."""
    scores = np.empty((TILE_QUERIES, TILE), np.float32)
    for tile in range(0, length, TILE):
        size = min(TILE, length - tile)
        for first in range(0, len(rows), TILE_QUERIES):
            score_tile(rows, first, keys[0], tile, size, scores)
            for i in range(size):
                for j in range(TILE_QUERIES):
                    if first + j < out.shape[1]:
                        out[tile + i, first + j] = scores[j, i]


def check_finite(numbers: npt.NDArray[np.float32], start: int, every: int) -> None:
    """Raise NotFiniteError if one of numbers (n, rank) is not finite: of key start + i * every in row i."""
    bad = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(bad):
        raise NotFiniteError(_not_finite(str(len(bad)), start + int(bad[0]) * every))


def _coded(space: CodeSpace, arrays: list[npt.NDArray[Any]], fmt: Format) -> npt.NDArray[np.uint8]:
    """Keys of `arrays` as `coding` has them. Raises NotFiniteError."""
    parts, before = [np.empty((0, space.key_bytes), np.uint8)], 0
    for array in arrays:
        rows, bad = code_rows(space, array, fmt)
        if bad >= 0:
            raise NotFiniteError(_not_finite("one", before + bad))
        parts.append(rows)
        before += len(array)
    return parts[1] if len(arrays) == 1 else np.concatenate(parts)


def _not_finite(count: str, first: int) -> str:
    return (
        f"keys to be sketched must be finite, got {count} with NaN or infinity, the first at id {first}; leave them "
        "out or use index='flat'"
    )
