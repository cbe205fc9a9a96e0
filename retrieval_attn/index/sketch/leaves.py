"""Keys in leaves of 16 that lie near each other, one block of a sketch each; a search looks at the promising ones.

The keys of a head are halved again and again at the median of the number that varies most (a k-d tree: Bentley, 1975,
with the median splits of Friedman, Bentley and Finkel, 1977) until 16 are left. Distances are those of the sketch's
numbers, in which queries point everywhere alike, so near keys have near scores for most queries: the mean of a leaf
tells which leaves can hold the best keys. Means are coded as keys are and scanned first. How many leaves a head's
queries need is measured when the index is built, for it differs: all of them, where a tree does not help.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.sketch.blocks import BLOCK, PAIR, WIDE_STEP, NumberBlocks, coded_blocks
from retrieval_attn.index.sketch.scan import any_query, mean_scores, value_of_rank

TREE_NUMBERS = 16
"""Numbers of a key that the tree may split at: the first carry most of what queries tell keys apart by."""
LEAF_NUMBERS = 32
"""Most numbers of a leaf's mean, each in 8 bits."""
PLACE_BYTES = 4 + LEAF_NUMBERS // BLOCK
"""Bytes per key in addition to its codes: the id of its place, and its share of the leaf's mean."""
SPREAD_SAMPLE = 256
"""Keys of a node that the number which varies most is told from."""
SAMPLE_STEP = 8
"""One pair of blocks of means in SAMPLE_STEP is scanned first, to know how high a score the wanted share reaches."""
GOLDEN = 0.618
"""Leaves that follow each other lie about so much of the tree apart."""


class Leaves(NamedTuple):
    """means: coded means of leaves, 16 to a block. ordered: how many leaves there are: leaf i is block i of the sketch,
    and blocks behind the last are always looked at. share: of the leaves, what a search looks at; 1.0 is all.
    """

    means: NumberBlocks
    ordered: int
    share: float


def leaf_order(codes: npt.NDArray[np.int8], steps: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Keys of numbers codes * steps, (n, rank) int8 and (rank,) float32, in leaves: (n,) int32, every 16 in a row are
    one.

    Neighbours in the tree do not follow each other: of leaves in a row searches take samples.
    """
    order = np.arange(len(codes), dtype=np.int32)
    if len(codes) > BLOCK:
        _split(codes, steps.astype(np.float64) ** 2, order, np.empty(len(codes), np.int32))
    whole = len(codes) // BLOCK
    if whole > 1:
        stride = next(step for step in range(int(GOLDEN * whole) | 1, 2 * whole + 2) if np.gcd(step, whole) == 1)
        mixed = np.arange(whole) * stride % whole
        order[: whole * BLOCK] = order[: whole * BLOCK].reshape(whole, BLOCK)[mixed].ravel()
    return order


@njit(nogil=True, cache=True)
def _split(codes, weights, order, others):
    """Order keys (n, d) int8 into leaves. weights: of a number's variance; others: scratch (n,) int32.

    Nodes wait on a stack; the larger half has no turn. Keys are counted by their code, and keep their order.
    """
    starts, stops = np.empty(64, np.int64), np.empty(64, np.int64)
    counts = np.empty(256, np.int64)
    totals, squares = np.empty(codes.shape[1], np.int64), np.empty(codes.shape[1], np.int64)
    starts[0], stops[0] = 0, len(order)
    waiting = 1
    while waiting:
        waiting -= 1
        start, stop = starts[waiting], stops[waiting]
        if stop - start <= BLOCK:
            continue
        number = _widest(codes, weights, order, start, stop, totals, squares)
        counts[:] = 0
        for i in range(start, stop):
            counts[np.int64(codes[order[i], number]) + 128] += 1
        half = ((stop - start) // 2 + BLOCK - 1) // BLOCK * BLOCK
        border = before = np.int64(0)
        while before + counts[border] <= half:
            before += counts[border]
            border += 1
        ties = half - before
        border -= 128
        left, right = start, np.int64(0)
        for i in range(start, stop):
            key = order[i]
            code = np.int64(codes[key, number])
            tie = code == border
            if code < border or (tie and ties > 0):
                order[left] = key
                left += 1
                ties -= tie
            else:
                others[right] = key
                right += 1
        order[left:stop] = others[:right]
        starts[waiting], stops[waiting] = start, start + half
        starts[waiting + 1], stops[waiting + 1] = start + half, stop
        waiting += 2


@njit(nogil=True, cache=True)
def _widest(codes, weights, order, start, stop, totals, squares):
    """The number with the largest variance among the keys order[start:stop]. totals, squares: scratch (d,) int64."""
    step = max(1, (stop - start) // SPREAD_SAMPLE)
    totals[:] = 0
    squares[:] = 0
    count = 0
    for i in range(start, stop, step):
        key = order[i]
        for j in range(len(totals)):
            code = np.int64(codes[key, j])
            totals[j] += code
            squares[j] += code * code
        count += 1
    best, widest = -1.0, 0
    for j in range(len(totals)):
        spread = (squares[j] - np.float64(totals[j]) * totals[j] / count) * weights[j]
        if spread > best:
            best, widest = spread, j
    return widest


def code_means(means: npt.NDArray[np.float32]) -> NumberBlocks:
    """Blocks of the leaves' means (leaves, rank) float32: the first LEAF_NUMBERS numbers, in 8 bits."""
    numbers = means[:, :LEAF_NUMBERS]
    wide = -(-numbers.shape[1] // WIDE_STEP) * WIDE_STEP
    padded = np.zeros((len(numbers), wide), np.float32)
    padded[:, : numbers.shape[1]] = numbers
    return coded_blocks(padded)


@njit(nogil=True, cache=True)
def choose_blocks(means, ordered, total, share, planes, steps, num_queries, chosen, sample, bounds, scores):
    """Put the blocks that a search looks at into `chosen`, lowest first, and return how many.

    Leaves among the best `share` for any of the queries, about, and all of the blocks from `ordered` to `total`.
    means: blocks of leaves' means; planes, steps: queries coded for them. chosen: int32, room for total + 1; behind an
    odd number the last is repeated. Scratch: sample float32 (num_queries, at least 4 * rows of means), bounds, scores.
    """
    count = 0
    if share >= 1.0 or not ordered:
        for block in range(total):
            chosen[block] = block
        count = total
    else:
        wides = planes.shape[1] // WIDE_STEP
        rows = means.shape[0]
        bounds[:] = np.inf
        taken = 0
        for row in range(0, rows, 2 * SAMPLE_STEP):
            after = min(row + 6 * SAMPLE_STEP, rows - 2)
            mean_scores(means, row, row + 1, after, after + 1, planes, wides, 0, steps, bounds, scores)
            for query in range(num_queries):
                for lane in range(BLOCK):
                    sample[query, taken + lane] = scores[query, lane]
                    sample[query, taken + BLOCK + lane] = scores[query + TILE_QUERIES, lane]
            taken += min(PAIR, ordered - row * BLOCK)
        for query in range(num_queries):
            bounds[query] = value_of_rank(sample[query], taken, int(share * taken + 0.5))
        for row in range(0, rows, 2):
            after = min(row + 12, rows - 2)
            left, right = mean_scores(means, row, row + 1, after, after + 1, planes, wides, 0, steps, bounds, scores)
            near = any_query(left) | (any_query(right) << BLOCK)
            leaf = row * BLOCK
            while near:
                if near & 1 and leaf < ordered:
                    chosen[count] = leaf
                    count += 1
                near >>= 1
                leaf += 1
        for block in range(ordered, total):
            chosen[count] = block
            count += 1
    if count & 1:
        chosen[count] = chosen[count - 1]
    return count
