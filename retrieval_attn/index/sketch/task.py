"""The search task of a sketch: one task chooses blocks for all queries of an entry, then parts of them are scanned."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.sketch.front import WEIGHED, Front
from retrieval_attn.index.sketch.rows import BLOCK, PAIR, PARTS, KeyRows, spread_planes
from retrieval_attn.index.sketch.scan import (
    SAMPLED,
    WAITING_ROOM,
    Leaves,
    choose_blocks,
    encode_block_queries,
    project_queries,
    sample_bounds,
    scan_front,
)
from retrieval_attn.index.task.atomics import at_address, atomic_swap
from retrieval_attn.index.task.search import (
    CODED_TOKENS,
    CompiledSearch,
    ScratchLayout,
    SearchRequest,
    address_of,
    record,
)
from retrieval_attn.index.task.tasks import (
    count_cost,
    floats_at,
    hand_in_codes,
    lists_of,
    part_of,
    range_at,
    scratch_of,
    step_at,
    task_address,
    task_at,
    tiles_of,
    wait_for,
    words_at,
)


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


def scratch_floats(leaf_rows: int) -> int:
    """float32 numbers per query that choosing blocks and their bound take, for `leaf_rows` rows of coded means."""
    return max(SAMPLED + PAIR, 4 * leaf_rows)


def wanted_of(search: SketchArguments, kept: int) -> int:
    """How many keys the front should let pass for a query of which the best `kept` get an exact score.

    Of fewer that are kept a larger part would be lost: half of what ways were weighed with passes in any case.
    """
    return int(np.ceil(search.passing * max(kept, (kept + WEIGHED) / 2)))


_WORD = np.int64
SKETCH = np.dtype(
    [
        ("front_at", _WORD),  # uint8 (blocks, front_width)
        ("blocks", _WORD),
        ("front_width", _WORD),
        ("front_step_at", _WORD),  # float32 (front_rank,)
        ("front_rank", _WORD),
        ("narrow", _WORD),  # how many of front_rank numbers have 4 bits
        ("rows_at", _WORD),  # uint8 (16 * blocks, width)
        ("width", _WORD),
        ("step_at", _WORD),  # float32 (rank,)
        ("side_at", _WORD),  # float32 (rank, head_dim): what queries are projected by
        ("rank", _WORD),
        ("wide", _WORD),  # how many of rank numbers have 8 bits
        ("ids_at", _WORD),  # int32 (16 * blocks,): the key of every place, -1 for none
        ("total", _WORD),  # blocks in use
        ("leaves_at", _WORD),  # uint8 (leaf_rows, 16 * leaf_numbers): coded means of the leaves
        ("leaf_rows", _WORD),
        ("leaf_numbers", _WORD),
        ("leaf_step_at", _WORD),  # float32 (leaf_numbers,)
        ("ordered", _WORD),  # how many leaves
        ("first", _WORD),  # token of the key with id 0
        ("length", _WORD),  # how many keys there are
        ("whole", _WORD),  # blocks below have a key in every place
        ("kept", _WORD),
        ("wanted", _WORD),  # keys that the front should let pass for a query
        # what the first task leaves for the others
        ("ready_at", _WORD),  # int64: the generation that what follows belongs to
        ("chosen_at", _WORD),  # int32 (padded / 4, total + 1): blocks that four queries look at together
        ("counts_at", _WORD),  # int64 (padded / 4,): how many
        ("planes_at", _WORD),  # int8 (padded, front_rank): queries coded for the front
        ("steps_at", _WORD),  # float32 (padded / 4, 2, 4)
        ("row_planes_at", _WORD),  # int8 (padded, PARTS * width): for rows
        ("row_steps_at", _WORD),  # float32 (padded / 4, 2, 4)
        ("bounds_at", _WORD),  # float32 (padded,)
        # byte offsets into the search's own scratch, and a size there
        ("leaf_planes", _WORD),  # int8 (4, leaf_numbers)
        ("numbers", _WORD),  # float64 (the most numbers of a key)
        ("row_numbers", _WORD),  # int8 (4, rank)
        ("waiting", _WORD),  # int64 (WAITING_ROOM,)
        ("projected", _WORD),  # float32 (4, rank)
        ("sample", _WORD),  # float32 (4, sampled)
        ("sampled", _WORD),
        ("share", np.float32),  # of the leaves, what is looked at
    ],
    align=True,
)


@njit(nogil=True, cache=True)
def _prepare(step, task, span, row, scratch):
    """Prepare a sketch search for all its parts: coded queries, the blocks to scan, a bound for each query.

    Four queries at a time look together. Returns how many (query, place) pairs will be scored, leaves included.
    """
    queries, dim, padded, rank, tiled = step.queries, step.head_dim, step.padded, row.rank, step.padded // TILE_QUERIES
    hidden, length = span.low - row.first, span.high - row.first
    tiles = tiles_of(step, task.entry)
    mine = scratch + step.own_at
    projected = floats_at(mine + row.projected, TILE_QUERIES, rank)
    side, sizes = floats_at(row.side_at, rank, dim), floats_at(row.step_at, 1, rank)[0]
    front_sizes = floats_at(row.front_step_at, 1, row.front_rank)[0]
    planes = carray(at_address(row.planes_at), (padded, row.front_rank), np.int8)
    steps = carray(at_address(row.steps_at), (tiled, 2, TILE_QUERIES), np.float32)
    row_numbers = carray(at_address(mine + row.row_numbers), (TILE_QUERIES, rank), np.int8)
    row_planes = carray(at_address(row.row_planes_at), (padded, PARTS * row.width), np.int8)
    row_steps = carray(at_address(row.row_steps_at), (tiled, 2, TILE_QUERIES), np.float32)
    numbers = carray(at_address(mine + row.numbers), max(rank, row.front_rank, row.leaf_numbers), np.float64)
    leaf_planes = carray(at_address(mine + row.leaf_planes), (TILE_QUERIES, row.leaf_numbers), np.int8)
    leaf_steps = floats_at(scratch + step.steps_at, 2, TILE_QUERIES)
    leaf_sizes = floats_at(row.leaf_step_at, 1, row.leaf_numbers)[0]
    means = carray(at_address(row.leaves_at), (row.leaf_rows, row.leaf_numbers * BLOCK), np.uint8)
    chosen = carray(at_address(row.chosen_at), (tiled, row.total + 1), np.int32)
    counts = carray(at_address(row.counts_at), tiled, np.int64)
    sample = floats_at(mine + row.sample, TILE_QUERIES, row.sampled)
    bounds = carray(at_address(row.bounds_at), padded, np.float32)
    scores = floats_at(scratch + step.tile_at, 8, BLOCK)
    products = floats_at(scratch + step.tile_at, TILE_QUERIES, 32)
    blocks = carray(at_address(row.front_at), (row.blocks, row.front_width), np.uint8)
    ids = carray(at_address(row.ids_at), row.blocks * BLOCK, np.int32)
    scored = np.int64(0)
    for tile in range(tiled):
        first = tile * TILE_QUERIES
        own = min(TILE_QUERIES, queries - first)
        four = slice(first, first + TILE_QUERIES)
        project_queries(tiles[four], side, projected, products)
        encode_block_queries(projected, own, front_sizes, row.narrow, planes[four], steps[tile], numbers)
        encode_block_queries(projected, own, sizes, row.wide, row_numbers, row_steps[tile], numbers)
        spread_planes(row_numbers, own, row.wide, row_planes[four])
        encode_block_queries(projected, own, leaf_sizes, row.leaf_numbers, leaf_planes, leaf_steps, numbers)
        counts[tile] = choose_blocks(
            means, row.ordered, row.total, row.share, leaf_planes, leaf_steps, own, chosen[tile], sample,
            bounds[four], scores,
        )  # fmt: skip
        sample_bounds(
            blocks, ids, planes[four], row.narrow, steps[tile], own, chosen[tile], counts[tile], hidden, length,
            row.wanted, sample, bounds[four], scores,
        )  # fmt: skip
        scored += own * (counts[tile] * BLOCK + (row.ordered if counts[tile] < row.total else 0))
    # all that was written above is visible to a thread that reads this generation there
    atomic_swap(row.ready_at, step.generation)
    return scored


def sketch_task(descriptor, number, worker, like):
    """Scan of the chosen blocks of one part of a sketch for all queries of its entry, or what comes before all parts.

    Exact scores come when all parts are in.
    """
    like = carray(like, (1, 1))
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    queries, padded = step.queries, step.padded
    row = carray(at_address(span.index_at), 1, SKETCH)[0]
    scratch = scratch_of(step, worker)
    if task.part < 0:
        scored = _prepare(step, task, span, row, scratch)
        count_cost(step, worker, scored, scored // queries * (row.front_width // BLOCK))
        return np.int64(0)
    wait_for(row.ready_at, step.generation)
    part, parts, tiled = task.part, task.parts, padded // TILE_QUERIES
    hidden, length = span.low - row.first, span.high - row.first
    blocks = carray(at_address(row.front_at), (row.blocks, row.front_width), np.uint8)
    rows = carray(at_address(row.rows_at), (row.blocks * BLOCK, row.width), np.uint8)
    ids = carray(at_address(row.ids_at), row.blocks * BLOCK, np.int32)
    planes = carray(at_address(row.planes_at), (padded, row.front_rank), np.int8)
    steps = carray(at_address(row.steps_at), (tiled, 2, TILE_QUERIES), np.float32)
    row_planes = carray(at_address(row.row_planes_at), (padded, PARTS * row.width), np.int8)
    row_steps = carray(at_address(row.row_steps_at), (tiled, 2, TILE_QUERIES), np.float32)
    chosen = carray(at_address(row.chosen_at), (tiled, row.total + 1), np.int32)
    looked_at = carray(at_address(row.counts_at), tiled, np.int64)
    pool = words_at(scratch + step.pool_at, queries, step.capacity)
    counts = carray(at_address(scratch + step.counts_at), queries, np.int64)
    bounds = carray(at_address(scratch + step.bounds_at), padded, np.float32)
    shared = carray(at_address(row.bounds_at), padded, np.float32)
    for query in range(padded):  # an array for a slice would compile Numba's message for shapes that differ: a second
        bounds[query] = shared[query]
    finite = floats_at(scratch + step.steps_at, 1, padded)[0]
    floors = floats_at(scratch + step.steps_at + 4 * padded, 1, TILE_QUERIES)[0]
    waiting = carray(at_address(scratch + step.own_at + row.waiting), WAITING_ROOM, np.int64)
    scores = floats_at(scratch + step.tile_at, 8, BLOCK)
    whole = row.whole if hidden <= 0 and length >= row.length else np.int64(0)
    scored = np.int64(0)
    for tile in range(tiled):
        first = tile * TILE_QUERIES
        own = min(TILE_QUERIES, queries - first)
        # blocks are scanned in pairs, so parts begin at an even one
        pairs = (looked_at[tile] + 1) // 2
        start, stop = pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, looked_at[tile])
        scored += scan_front(
            blocks, rows, ids, planes[first : first + TILE_QUERIES], row.narrow, steps[tile],
            row_planes[first : first + TILE_QUERIES], row.wide, row_steps[tile], own, chosen[tile], start, stop,
            whole, hidden, length, row.kept, pool[first : first + own], counts[first : first + own],
            bounds[first : first + TILE_QUERIES], floors, waiting, scores,
        )  # fmt: skip
        for query in range(TILE_QUERIES):
            finite[first + query] = row_steps[tile, 0, query]
    start, stop = part_of(hidden, length, task)  # for queries that need an exact answer
    hand_in_codes(pool, counts, start, stop, row.first, finite, step, task, span, lists, like)
    count_cost(step, worker, 0, scored * row.width)
    return np.int64(0)


def sketch_search(request: SearchRequest, arguments: SketchArguments, kept: int, share: float) -> CompiledSearch:
    """Search of a sketch of whose candidates the best `kept` get an exact score. share: of the leaves."""
    keys, front, ids, total, side, leaves = arguments[:6]
    means, rank = leaves.means, len(side)
    tiles, width = request.padded // TILE_QUERIES, keys.rows.shape[1]
    ready = aligned_empty((8,), np.int64)
    planes = aligned_empty((request.padded, len(front.step)), np.int8)
    row_planes = aligned_empty((request.padded, PARTS * width), np.int8)
    ready[:], planes[:], row_planes[:] = 0, 0, 0
    arrays = {
        "front_at": front.blocks,
        "front_step_at": front.step,
        "rows_at": keys.rows,
        "step_at": keys.step,
        "side_at": side,
        "ids_at": ids,
        "leaves_at": means.blocks,
        "leaf_step_at": means.step,
        "ready_at": ready,
        "chosen_at": aligned_empty((tiles, total + 1), np.int32),
        "counts_at": aligned_empty((tiles,), np.int64),
        "planes_at": planes,
        "steps_at": aligned_empty((tiles, 2, TILE_QUERIES), np.float32),
        "row_planes_at": row_planes,
        "row_steps_at": aligned_empty((tiles, 2, TILE_QUERIES), np.float32),
        "bounds_at": aligned_empty((request.padded,), np.float32),
    }
    layout, sampled = ScratchLayout(), scratch_floats(len(means.blocks))
    row = record(
        SKETCH,
        **arrays,
        blocks=front.blocks.shape[0],
        front_width=front.blocks.shape[1],
        front_rank=len(front.step),
        narrow=front.narrow,
        width=width,
        rank=rank,
        wide=keys.wide,
        total=total,
        leaf_rows=len(means.blocks),
        leaf_numbers=len(means.step),
        ordered=leaves.ordered,
        first=request.first,
        length=arguments.length,
        whole=arguments.whole,
        kept=kept,
        wanted=wanted_of(arguments, kept),
        leaf_planes=layout.take(TILE_QUERIES * len(means.step)),
        numbers=layout.take(8 * max(rank, len(front.step), len(means.step))),
        row_numbers=layout.take(TILE_QUERIES * rank),
        waiting=layout.take(8 * WAITING_ROOM),
        projected=layout.take(4 * TILE_QUERIES * rank),
        sample=layout.take(4 * TILE_QUERIES * sampled),
        sampled=sampled,
        share=share,
    )
    return CompiledSearch(
        task_address(sketch_task, request.fmt),
        address_of(row),
        part_tokens=CODED_TOKENS,
        first_task=True,
        kept=kept,
        capacity=2 * kept + 64,
        scratch=layout.nbytes,
        alive=(row, arguments, arrays),
    )
