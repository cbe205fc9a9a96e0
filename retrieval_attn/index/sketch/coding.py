"""How keys of a head become rows in leaves: coded in the order of the keys, then ordered, then carried to their places.

What is coded has TREE_NUMBERS numbers in 8 bits, by which keys are ordered (`leaves.leaf_order`), and then the key's
row (`rows.py`), laid out as `index/kernels/key_codes.py` has codes: so a device that still holds the keys can code them
(`Training.coder`), and one pass over them suffices on the host.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.formats import Format, kernel_view
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.kernels.key_codes import CodeSpace
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.sketch.blocks import BLOCK, WIDE_LEVELS, BlockSteps
from retrieval_attn.index.sketch.leaves import LEAF_NUMBERS, TREE_NUMBERS
from retrieval_attn.index.sketch.rows import KeyRows, key_bytes, place_of_number, row_order

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
