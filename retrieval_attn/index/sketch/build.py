"""Build a sketch of the keys of a head: rows in leaves, then the search parameters, then the front."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import NotFiniteError
from retrieval_attn.index.base import SearchResult
from retrieval_attn.index.formats import Format, kernel_view
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.kernels.key_codes import CodeSpace
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.sketch.front import FitQueries, Front, empty_front, plan_front, write_front
from retrieval_attn.index.sketch.rows import (
    BLOCK,
    WIDE_LEVELS,
    BlockSteps,
    KeyRows,
    clear_places,
    empty_rows,
    key_bytes,
    place_of_number,
    row_order,
)
from retrieval_attn.index.sketch.scan import LEAF_NUMBERS, TREE_NUMBERS, Leaves, code_means, leaf_order

TILE = 64
"""Keys that are coded at a time."""


class RowCoder(Protocol):
    """Makes rows where the keys lie, on a device say."""

    def rows(self, space: CodeSpace, fmt: Format, keys: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Rows (n, space.key_bytes) of keys (n, head_dim) in `fmt`, until the calling thread's next call.

        Raises ShapeError if a key is not finite.
        """


def row_space(
    key_side: npt.NDArray[np.float32], sample: npt.NDArray[np.float32], keys: KeyRows
) -> tuple[CodeSpace, npt.NDArray[np.float32]]:
    """Return the space of row codes: numbers key_side . k (rank, head_dim), of which `sample` (m, rank) are those of
    some keys; and the step of each of the numbers that keys are ordered by, (TREE_NUMBERS,) float32.
    """
    tree = BlockSteps.of(_cut_to(sample, TREE_NUMBERS), np.full(TREE_NUMBERS, WIDE_LEVELS // 2))
    order = row_order(keys.wide, keys.narrow)
    sides = np.concatenate([_cut_to(key_side.T, TREE_NUMBERS).T, key_side[order]])
    step = np.concatenate([tree.step, keys.step[order]])
    mean = np.concatenate([tree.mean, keys.mean[order]])
    over = np.zeros(len(step), np.float32)
    np.divide(np.float32(1), step, out=over, where=step > 0)
    nothing = np.zeros((0, key_side.shape[1]), np.float32)
    wide = keys.wide + TREE_NUMBERS
    return CodeSpace(nothing, sides * over[:, None], mean * over, nothing, wide, keys.narrow), tree.step


def code_rows(space: CodeSpace, keys: npt.NDArray[Any], fmt: Format) -> tuple[npt.NDArray[np.uint8], int]:
    """Rows (n, space.key_bytes) of keys (n, head_dim) in `fmt`, and the first key with a number not finite, or -1."""
    rank = len(space.shift)
    sides = np.zeros((-(-rank // TILE_QUERIES) * TILE_QUERIES, space.key_side.shape[1]), np.float32)
    sides[:rank] = space.key_side
    rows = np.empty((len(keys), space.key_bytes), np.uint8)
    if not len(keys):
        return rows, -1
    bad = _code_rows(
        one_layout(kernel_view(keys, fmt)[None]), len(keys), sides, space.shift, space.wide, space.narrow // 2, rows
    )
    return rows, int(bad)


@njit(nogil=True, cache=True)
def _code_rows(keys, length, sides, shift, wide, half, rows):
    """See `code_rows`. sides: as many rows as a multiple of TILE_QUERIES."""
    rank = wide + 2 * half
    scores = np.empty((TILE_QUERIES, TILE), np.float32)
    tile = np.empty((rank, TILE), np.uint8)
    bad = np.int64(-1)
    for start in range(0, length, TILE):
        size = min(TILE, length - start)
        wrong = np.float32(0)
        for first in range(0, len(sides), TILE_QUERIES):
            score_tile(sides, first, keys[0], start, size, scores)
            for j in range(first, min(first + TILE_QUERIES, rank)):
                low, high, add = np.float32(-128), np.float32(127), np.float32(0)
                if j >= wide:
                    low, high = np.float32(-8), np.float32(7)
                    if j < wide + half:
                        add = np.float32(8)  # in the upper half of a byte numbers have a sign
                line = scores[j - first]
                for i in range(size):
                    number = np.floor(line[i] - shift[j])
                    wrong += number - number
                    tile[j, i] = np.uint8(np.int32(min(max(number, low), high) + add) & 255)
        if wrong != 0 and bad < 0:  # inf - inf and NaN - NaN are NaN
            bad = _first_wrong(sides, keys, start, size, rank, shift)
        for i in range(size):
            row = rows[start + i]
            for j in range(wide):
                row[j] = tile[j, i]
            for j in range(half):
                row[wide + j] = tile[wide + j, i] | (tile[wide + half + j, i] & 15) << 4
    return bad


@njit(nogil=True, cache=True)
def _first_wrong(sides, keys, start, size, rank, shift):
    """The first key of a tile with a number that is not finite."""
    scores = np.empty((TILE_QUERIES, TILE), np.float32)
    first_key = size
    for first in range(0, len(sides), TILE_QUERIES):
        score_tile(sides, first, keys[0], start, size, scores)
        for j in range(first, min(first + TILE_QUERIES, rank)):
            for i in range(first_key):
                if not np.isfinite(scores[j - first, i] - shift[j]):
                    first_key = i
                    break
    return start + first_key


def place_rows(coded: npt.NDArray[np.uint8], order: npt.NDArray[np.int32], keys: KeyRows) -> npt.NDArray[np.float32]:
    """Write the rows of `coded` into `keys`, that of key order[i] at place i.

    Returns the mean of the first LEAF_NUMBERS numbers of every 16 places, (blocks of them, numbers) float32, as the
    codes tell them: what rounding takes from 16 keys is little.
    """
    count = -(-len(order) // BLOCK)
    means = np.zeros((count, min(len(keys.step), LEAF_NUMBERS)), np.float32)
    if len(order) and len(keys.step):
        _place(coded, order, keys.rows, key_bytes(keys.wide, keys.narrow), keys.wide, keys.mean, keys.step, means)
    return means


@njit(nogil=True, cache=True)
def _place(coded, order, rows, width, wide, mean, step, means):
    """See `place_rows`: the first TREE_NUMBERS bytes of what is coded stay out."""
    numbers = means.shape[1]
    sums = np.zeros(numbers, np.int64)
    for leaf in range(len(means)):
        sums[:] = 0
        start, stop = leaf * BLOCK, min((leaf + 1) * BLOCK, len(order))
        for place in range(start, stop):
            given, row = coded[order[place]], rows[place]
            for byte in range(width):
                # rows count from the least code, where a byte that was coded has a sign
                row[byte] = given[TREE_NUMBERS + byte] ^ 128
            row[width:] = 0
            for j in range(numbers):
                byte, shift, mask = place_of_number(j, wide)
                sums[j] += row[byte] >> shift & mask
        for j in range(numbers):
            middle = np.float32(127.5) if j < wide else np.float32(7.5)
            means[leaf, j] = mean[j] + step[j] * (np.float32(sums[j]) / np.float32(stop - start) - middle)


def _cut_to(numbers: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    """The first `count` columns, zeros behind the last."""
    cut = np.zeros((len(numbers), count), np.float32)
    cut[:, : numbers.shape[1]] = numbers[:, :count]
    return cut


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


def no_leaves(rank: int) -> Leaves:
    """Return empty leaves, for keys that are not ordered."""
    return Leaves(code_means(np.empty((0, rank), np.float32)), 0, 1.0)


def ordered_keys(
    stored: npt.NDArray[Any],
    fmt: Format,
    key_side: npt.NDArray[np.float32],
    wide: int,
    *,
    room: int,
    leafy: bool,
    coder: RowCoder | None = None,
) -> Ordered:
    """Code the stored keys (n, head_dim) with steps fitted to them; leafy: order many keys in leaves. Raises
    NotFiniteError.

    room: keys to allocate room for. coder: codes the keys on a device.
    """
    total, rank = len(stored), len(key_side)
    every = max(1, total // SAMPLED_KEYS)
    numbers = projected(stored[::every], fmt, key_side)
    check_finite(numbers, 0, every)
    keys = empty_rows(numbers, wide, max(room, total))
    space, steps = row_space(key_side, numbers, keys)
    coded = _coded(space, stored, fmt) if coder is None else coder.rows(space, fmt, stored)
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
def _project(keys, length, rows, out):
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


def _coded(space: CodeSpace, stored: npt.NDArray[Any], fmt: Format) -> npt.NDArray[np.uint8]:
    """Keys as `coding` has them. Raises NotFiniteError."""
    rows, bad = code_rows(space, stored, fmt)
    if bad >= 0:
        raise NotFiniteError(_not_finite("one", bad))
    return rows


def _not_finite(count: str, first: int) -> str:
    return (
        f"keys to be sketched must be finite, got {count} with NaN or infinity, the first at id {first}; leave them "
        "out or use index='flat'"
    )
