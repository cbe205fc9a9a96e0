"""Search tasks of a step: scan a part of a piece for all queries of its entry, by keys or by their codes, or search a
graph for one of them.

What is searched, where candidates go and what the words mean is laid out in `step`.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from retrieval_attn.cpu.atomics import at_address, atomic_load, atomic_max, atomic_swap
from retrieval_attn.cpu.gather import bytes_of_row
from retrieval_attn.cpu.step import descriptor as at
from retrieval_attn.cpu.step.descriptor import count_cost, floats_at, task_in_format, wait_for, words_at
from retrieval_attn.cpu.stored_rows import rows_at
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import encode_query_rows
from retrieval_attn.index.kernels.dots import TILE_QUERIES, bits_to_float, dot
from retrieval_attn.index.kernels.packed import EMPTY, keep_best, pack_score
from retrieval_attn.index.kernels.scan import BOUND_WORDS, TILE_KEYS, scan_codes, scan_exact
from retrieval_attn.index.roargraph.search import search_graph
from retrieval_attn.index.sketch.blocks import BLOCK
from retrieval_attn.index.sketch.leaves import choose_blocks
from retrieval_attn.index.sketch.scan import encode_block_queries, project_queries, sample_bounds, scan_chosen


@njit(nogil=True, cache=True)
def task_of(descriptor, number):
    """The step's words, the row of the task, the row of its piece, and its lists (queries, LIST_WORDS)."""
    step = words_at(descriptor, 1, at.WORDS)[0]
    task = words_at(step[at.TASKS_AT], step[at.TASKS], at.TASK_WORDS)[number]
    piece = words_at(step[at.PIECES_AT], task[at.TASK_PIECE] + 1, at.PIECE_WORDS)[task[at.TASK_PIECE]]
    queries, width, size = step[at.QUERIES], step[at.LISTS], step[at.LIST_WORDS]
    address = step[at.LISTS_AT] + task[at.TASK_ENTRY] * queries * width * size * 8
    lists = carray(at_address(address), (queries, width, size), np.int64)[:, task[at.TASK_LIST]]
    return step, task, piece, lists


@njit(nogil=True, cache=True)
def hand_in(pool, count, top_k, first, step, entry, query, found):
    """Write candidates pool[:count] to the list `found`, their ids moved by `first`, but those that have lost already.

    EMPTY ones are left out. With top_k others, the worst is a floor for all lists of the query.
    """
    address = step[at.FLOORS_AT] + (entry * step[at.QUERIES] + query) * 8
    if count == top_k and pool[count - 1] != EMPTY:
        least = pool[0]
        for i in range(1, count):
            least = min(least, pool[i])
        atomic_max(address, least - first)
    floor = atomic_load(address)
    kept = 0
    for i in range(count):
        if pool[i] == EMPTY:
            break
        found[at.LIST_HEAD + kept] = pool[i] - first
        kept += 1 if pool[i] - first >= floor else 0
    found[at.LIST_COUNT], found[at.LIST_PIECE] = kept, -1


@njit(nogil=True, cache=True)
def _scan_part(descriptor, number, worker, like):
    """Exact search of one part of a piece for all queries of its entry."""
    step, task, piece, lists = task_of(descriptor, number)
    entry, queries, top_k, dim = task[at.TASK_ENTRY], step[at.QUERIES], step[at.TOP_K], step[at.HEAD_DIM]
    low, high = piece[at.LOW], piece[at.HIGH]
    start = low + (high - low) * task[at.TASK_PART] // task[at.TASK_PARTS]
    stop = low + (high - low) * (task[at.TASK_PART] + 1) // task[at.TASK_PARTS]
    keys = rows_at(piece[at.KEYS], high, dim, like)
    tiles = floats_at(step[at.TILES_AT] + entry * step[at.PADDED] * dim * 4, step[at.PADDED], dim)
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    pool = words_at(scratch + step[at.SCAN_AT], queries, step[at.CAPACITY])
    floors = carray(at_address(scratch + step[at.BARS_AT]), queries, np.int64)
    for query in range(queries):
        # what other parts found already counts here: fewer keys have to be kept
        floor = atomic_load(step[at.FLOORS_AT] + (entry * queries + query) * 8)
        floors[query] = EMPTY if floor == EMPTY else floor + piece[at.FIRST]
    counts = carray(at_address(scratch + step[at.COUNTS_AT]), queries, np.int64)
    bounds = carray(at_address(scratch + step[at.BOUNDS_AT]), queries, np.float32)
    scores = floats_at(scratch + step[at.TILE_AT], TILE_QUERIES, TILE_KEYS)
    scan_exact(keys, tiles, queries, start, stop, top_k, pool, counts, floors, bounds, scores)
    for query in range(queries):
        hand_in(pool[query], top_k, top_k, piece[at.FIRST], step, entry, query, lists[query])
    count_cost(step, worker, (stop - start) * queries, (stop - start) * bytes_of_row(like, dim))
    return np.int64(0)


@njit(nogil=True, cache=True)
def scan_alone(queries, keys, low, high, top_k, pool):
    """The best top_k of tokens [low, high) for the one query, unordered, in pool; returns how many. Simple and slow."""
    count = 0
    floor = EMPTY
    for token in range(low, high):
        packed = pack_score(dot(queries, 0, keys, token), token)
        if packed > floor:
            pool[count] = packed
            count += 1
            if count == len(pool):
                keep_best(pool, count, top_k)
                count = top_k
                floor = pool[top_k - 1]
    if count > top_k:
        keep_best(pool, count, top_k)
    return min(count, top_k)


@njit(nogil=True, cache=True)
def _search_graph(descriptor, number, worker, like):
    """Search of a graph for one query; by a scan where a graph cannot answer."""
    step, task, piece, lists = task_of(descriptor, number)
    entry, query = task[at.TASK_ENTRY], task[at.TASK_PART]
    queries, top_k, dim = step[at.QUERIES], step[at.TOP_K], step[at.HEAD_DIM]
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    graphs = words_at(piece[at.INDEX], 1, at.GRAPH_WORDS)[0, at.GRAPHS]
    row = words_at(piece[at.INDEX], graphs, at.GRAPH_WORDS)[query * graphs // queries]
    width = row[at.CODE_WIDTH]
    codes = carray(at_address(row[at.CODES]), (row[at.CODE_ROWS], width), np.uint8)
    edges = carray(at_address(row[at.EDGES]), (row[at.CODE_ROWS], row[at.DEGREE]), np.int32)
    node_ids = carray(at_address(row[at.NODE_IDS]), row[at.CODE_ROWS], np.int32)
    starts = carray(at_address(row[at.START_NODES]), row[at.STARTS], np.int32)
    counts = carray(at_address(row[at.NODE_COUNTS]), 3, np.int64)
    cell_starts = carray(at_address(row[at.CELL_STARTS]), row[at.LANDMARKS] + 1, np.int32)
    cell_keys = carray(at_address(row[at.CELL_KEYS]), cell_starts[row[at.LANDMARKS]], np.int32)
    mean, sizes = (floats_at(row[at.MEAN], 1, dim)[0], floats_at(row[at.STEP_SIZES], 1, dim)[0])
    own = floats_at(step[at.TILES_AT] + (entry * step[at.PADDED] + query) * dim * 4, 1, dim)
    planes = carray(at_address(scratch + step[at.PLANES_AT]), (1, row[at.PLANES], width), np.int8)
    bounds = carray(at_address(scratch + step[at.TILE_AT]), 2, np.float32)
    encode_query_rows(own, mean, sizes, planes, bounds[:1], bounds[1:])
    parts = (
        carray(at_address(scratch + step[at.GRAPH_POOL_AT]), step[at.GRAPH_POOL], np.int64),
        carray(at_address(scratch + step[at.VISITED_AT]), step[at.VISITED], np.uint64),
        carray(at_address(scratch + step[at.FRESH_AT]), step[at.FRESH], np.int32),
        carray(at_address(scratch + step[at.SURVIVORS_AT]), step[at.FRESH], np.int64),
    )
    seeds = carray(at_address(row[at.SEED_NODES] + query * row[at.SEEDS] * 4), row[at.SEEDS], np.int32)
    limit = piece[at.HIGH] - row[at.GRAPH_FIRST]
    keys = rows_at(row[at.GRAPH_KEYS], limit, dim, like)
    ids = carray(at_address(scratch + step[at.FOUND_AT]), top_k, np.int32)
    scores = carray(at_address(scratch + step[at.SCORES_AT]), top_k, np.float32)
    beta = bits_to_float(np.int32(row[at.BETA]))
    graph = (codes, edges, node_ids, starts, counts, cell_starts, cell_keys)
    pool = words_at(scratch + step[at.SCAN_AT], 1, step[at.CAPACITY])[0]
    scored = nbytes = np.int64(0)
    count = np.int64(0)
    if bounds[1] == bounds[1]:  # the query is finite
        count, scored, _ = search_graph(
            graph, keys, own, planes, bounds[:1], 0, seeds, top_k, row[at.ROOM], row[at.BEAM], row[at.PATIENCE], beta,
            limit, parts, ids, scores,
        )  # fmt: skip
        nbytes = scored * width + min(scored, row[at.ROOM]) * bytes_of_row(like, dim)
    if count == min(top_k, limit) or (beta >= 0 and count > 0):
        for i in range(count):
            pool[i] = pack_score(scores[i], ids[i] + row[at.GRAPH_FIRST])
    else:
        stored = rows_at(piece[at.KEYS], piece[at.HIGH], dim, like)
        count = scan_alone(own, stored, piece[at.LOW], piece[at.HIGH], top_k, pool)
        scored += limit
        nbytes += limit * bytes_of_row(like, dim)
    hand_in(pool, count, top_k, piece[at.FIRST], step, entry, query, lists[query])
    count_cost(step, worker, scored, nbytes)
    return np.int64(0)


@njit(nogil=True, cache=True)
def _hand_in_codes(pool, counts, start, stop, origin, finite, step, task, piece, lists, like):
    """Write each query's counts[query] candidates to its list, packed as their codes are, to be scored when all are in.

    pool: (queries, capacity) with ids from `origin` of the piece's array on. finite[query]: NaN for a query whose codes
    say nothing; it gets the exact best of [start, stop).
    """
    entry, top_k, dim = task[at.TASK_ENTRY], step[at.TOP_K], step[at.HEAD_DIM]
    for query in range(step[at.QUERIES]):
        found = lists[query]
        if finite[query] != finite[query]:
            own = floats_at(step[at.TILES_AT] + (entry * step[at.PADDED] + query) * dim * 4, 1, dim)
            keys = rows_at(piece[at.KEYS], piece[at.HIGH], dim, like)
            alone = scan_alone(own, keys, start + origin, stop + origin, top_k, pool[query])
            hand_in(pool[query], alone, top_k, piece[at.FIRST], step, entry, query, found)
            continue
        for i in range(counts[query]):
            found[at.LIST_HEAD + i] = pool[query, i] - origin - piece[at.FIRST]
        found[at.LIST_COUNT], found[at.LIST_PIECE] = counts[query], task[at.TASK_PIECE]


def _coded_rows(row, piece, dim, like):
    """The codes that a coded scan goes through: the index's own, or rows of int8 as they are stored."""


@overload(_coded_rows)
def _choose_coded_rows(row, piece, dim, like):
    if like.dtype == types.int8:
        return lambda row, piece, dim, like: rows_at(piece[at.KEYS], piece[at.HIGH], dim, like)
    return lambda row, piece, dim, like: carray(
        at_address(row[at.CODES]), (row[at.CODE_ROWS], row[at.CODE_WIDTH]), np.uint8
    )


@njit(nogil=True, cache=True)
def _scan_coded(descriptor, number, worker, like):
    """Scan of the codes of one part of a piece for all queries of its entry; exact scores come when all are in."""
    step, task, piece, lists = task_of(descriptor, number)
    entry, queries, dim, padded = task[at.TASK_ENTRY], step[at.QUERIES], step[at.HEAD_DIM], step[at.PADDED]
    row = words_at(piece[at.INDEX], 1, at.GRAPH_WORDS)[0]
    width, kept, origin = row[at.CODE_WIDTH], row[at.KEPT], row[at.GRAPH_FIRST]
    low, high = piece[at.LOW] - origin, piece[at.HIGH] - origin
    start = low + (high - low) * task[at.TASK_PART] // task[at.TASK_PARTS]
    stop = low + (high - low) * (task[at.TASK_PART] + 1) // task[at.TASK_PARTS]
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    codes = _coded_rows(row, piece, dim, like)
    tiles = floats_at(step[at.TILES_AT] + entry * padded * dim * 4, padded, dim)
    planes = carray(at_address(scratch + step[at.PLANES_AT]), (padded, 1, width), np.int8)
    steps = floats_at(scratch + step[at.STEPS_AT], 2, padded)
    mean, sizes = floats_at(row[at.MEAN], 1, dim)[0], floats_at(row[at.STEP_SIZES], 1, dim)[0]
    encode_query_rows(tiles, mean, sizes, planes, steps[0], steps[1])
    pool = words_at(scratch + step[at.SCAN_AT], queries, step[at.CAPACITY])
    counts = carray(at_address(scratch + step[at.COUNTS_AT]), queries, np.int64)
    bounds = carray(at_address(scratch + step[at.BOUNDS_AT]), (padded // TILE_QUERIES, BOUND_WORDS), np.int32)
    sums = carray(at_address(scratch + step[at.TILE_AT]), (4, 16), np.int32)
    scan_codes(codes, planes, queries, start, stop, kept, pool, counts, bounds, sums)
    counts[:] = min(kept, stop - start)
    _hand_in_codes(pool, counts, start, stop, origin, steps[1], step, task, piece, lists, like)
    count_cost(step, worker, (stop - start) * queries, (stop - start) * codes.strides[0])
    return np.int64(0)


@njit(nogil=True, cache=True)
def _prepare_sketch(step, task, piece, row, scratch):
    """What all parts of a sketch wait for: coded queries, the blocks to look at, and a bound for each query.

    Four queries at a time look together. Returns how many (query, place) pairs will be scored, leaves included.
    """
    entry, queries, dim, padded = task[at.TASK_ENTRY], step[at.QUERIES], step[at.HEAD_DIM], step[at.PADDED]
    rank, wide, length = row[at.RANK], row[at.WIDE], piece[at.HIGH] - row[at.GRAPH_FIRST]
    tiles = floats_at(step[at.TILES_AT] + entry * padded * dim * 4, padded, dim)
    projected = floats_at(scratch + step[at.PROJECTED_AT], TILE_QUERIES, rank)
    side, sizes = floats_at(row[at.QUERY_SIDE], rank, dim), floats_at(row[at.STEP_SIZES], 1, rank)[0]
    planes = carray(at_address(row[at.OWN_PLANES]), (padded, rank), np.int8)
    steps = carray(at_address(row[at.OWN_STEPS]), (padded // TILE_QUERIES, 2, TILE_QUERIES), np.float32)
    numbers = carray(at_address(scratch + step[at.NUMBERS_AT]), rank, np.float64)
    leaf_numbers = row[at.LEAF_NUMBERS]
    leaf_planes = carray(at_address(scratch + step[at.PLANES_AT]), (TILE_QUERIES, leaf_numbers), np.int8)
    leaf_steps = floats_at(scratch + step[at.STEPS_AT], 2, TILE_QUERIES)
    leaf_sizes = floats_at(row[at.LEAF_STEPS], 1, leaf_numbers)[0]
    means = carray(at_address(row[at.LEAVES]), (row[at.LEAF_ROWS], leaf_numbers * BLOCK), np.uint8)
    chosen = carray(at_address(row[at.CHOSEN]), (padded // TILE_QUERIES, row[at.TOTAL] + 1), np.int32)
    counts = carray(at_address(row[at.COUNTS]), padded // TILE_QUERIES, np.int64)
    sample = floats_at(scratch + step[at.SAMPLE_AT], TILE_QUERIES, step[at.SAMPLE])
    bounds = carray(at_address(row[at.OWN_BOUNDS]), padded, np.float32)
    scores = floats_at(scratch + step[at.TILE_AT], 8, BLOCK)
    products = floats_at(scratch + step[at.TILE_AT], TILE_QUERIES, 32)
    share = bits_to_float(np.int32(row[at.SHARE]))
    blocks = carray(at_address(row[at.CODES]), (row[at.CODE_ROWS], row[at.CODE_WIDTH]), np.uint8)
    ids = carray(at_address(row[at.IDS]), row[at.CODE_ROWS] * BLOCK, np.int32)
    scored = np.int64(0)
    for tile in range(padded // TILE_QUERIES):
        first = tile * TILE_QUERIES
        own = min(TILE_QUERIES, queries - first)
        four = slice(first, first + TILE_QUERIES)
        project_queries(tiles[four], side, projected, products)
        encode_block_queries(projected, own, sizes, wide, planes[four], steps[tile], numbers)
        encode_block_queries(projected, own, leaf_sizes, leaf_numbers, leaf_planes, leaf_steps, numbers)
        counts[tile] = choose_blocks(
            means, row[at.ORDERED], row[at.TOTAL], share, leaf_planes, leaf_steps, own, chosen[tile], sample,
            bounds[four], scores,
        )  # fmt: skip
        sample_bounds(
            blocks, ids, planes[four], wide, steps[tile], own, chosen[tile], counts[tile], length, row[at.KEPT],
            sample, bounds[four], scores,
        )  # fmt: skip
        scored += own * (counts[tile] * BLOCK + (row[at.ORDERED] if counts[tile] < row[at.TOTAL] else 0))
    atomic_swap(row[at.READY], step[at.GENERATION])
    return scored


@njit(nogil=True, cache=True)
def _scan_sketch(descriptor, number, worker, like):
    """Scan of the chosen blocks of one part of a sketch for all queries of its entry, or what comes before all parts.

    Exact scores come when all parts are in.
    """
    step, task, piece, lists = task_of(descriptor, number)
    queries, padded = step[at.QUERIES], step[at.PADDED]
    row = words_at(piece[at.INDEX], 1, at.GRAPH_WORDS)[0]
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    if task[at.TASK_PART] < 0:
        scored = _prepare_sketch(step, task, piece, row, scratch)
        count_cost(step, worker, scored, scored // queries * (row[at.CODE_WIDTH] // BLOCK))
        return np.int64(0)
    wait_for(row[at.READY], step[at.GENERATION])
    rank, wide, kept, origin = row[at.RANK], row[at.WIDE], row[at.KEPT], row[at.GRAPH_FIRST]
    length = piece[at.HIGH] - origin  # a sketch is searched from its first key on
    part, parts = task[at.TASK_PART], task[at.TASK_PARTS]
    blocks = carray(at_address(row[at.CODES]), (row[at.CODE_ROWS], row[at.CODE_WIDTH]), np.uint8)
    ids = carray(at_address(row[at.IDS]), row[at.CODE_ROWS] * BLOCK, np.int32)
    planes = carray(at_address(row[at.OWN_PLANES]), (padded, rank), np.int8)
    steps = carray(at_address(row[at.OWN_STEPS]), (padded // TILE_QUERIES, 2, TILE_QUERIES), np.float32)
    chosen = carray(at_address(row[at.CHOSEN]), (padded // TILE_QUERIES, row[at.TOTAL] + 1), np.int32)
    looked_at = carray(at_address(row[at.COUNTS]), padded // TILE_QUERIES, np.int64)
    pool = words_at(scratch + step[at.SCAN_AT], queries, step[at.CAPACITY])
    counts = carray(at_address(scratch + step[at.COUNTS_AT]), queries, np.int64)
    bounds = carray(at_address(scratch + step[at.BOUNDS_AT]), padded, np.float32)
    bounds[:] = carray(at_address(row[at.OWN_BOUNDS]), padded, np.float32)
    finite = floats_at(scratch + step[at.STEPS_AT], 1, padded)[0]
    scores = floats_at(scratch + step[at.TILE_AT], 8, BLOCK)
    for tile in range(padded // TILE_QUERIES):
        first = tile * TILE_QUERIES
        own = min(TILE_QUERIES, queries - first)
        pairs = (looked_at[tile] + 1) // 2
        start, stop = pairs * part // parts * 2, min(pairs * (part + 1) // parts * 2, looked_at[tile])
        scan_chosen(
            blocks, ids, planes[first : first + TILE_QUERIES], wide, steps[tile], own, chosen[tile], start, stop,
            length, kept, pool[first : first + own], counts[first : first + own],
            bounds[first : first + TILE_QUERIES], scores,
        )  # fmt: skip
        finite[first : first + TILE_QUERIES] = steps[tile, 0]
    start, stop = length * part // parts, length * (part + 1) // parts  # for queries that need an exact answer
    _hand_in_codes(pool, counts, start, stop, origin, finite, step, task, piece, lists, like)
    return np.int64(0)


# One function per storage format: the type of the array decides how its elements are read.


def _scan_float32(descriptor, task, worker):
    return _scan_part(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _scan_bfloat16(descriptor, task, worker):
    return _scan_part(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _scan_float16(descriptor, task, worker):
    return _scan_part(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _scan_int8(descriptor, task, worker):
    return _scan_part(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int8))


def _graph_float32(descriptor, task, worker):
    return _search_graph(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _graph_bfloat16(descriptor, task, worker):
    return _search_graph(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _graph_float16(descriptor, task, worker):
    return _search_graph(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _graph_int8(descriptor, task, worker):
    return _search_graph(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int8))


@functools.cache
def scan_task(fmt: Format) -> int:
    """Address of the function that scans keys in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _scan_float32, _scan_bfloat16, _scan_float16, _scan_int8)


def _coded_float32(descriptor, task, worker):
    return _scan_coded(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _coded_bfloat16(descriptor, task, worker):
    return _scan_coded(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _coded_float16(descriptor, task, worker):
    return _scan_coded(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _coded_int8(descriptor, task, worker):
    return _scan_coded(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int8))


@functools.cache
def coded_task(fmt: Format) -> int:
    """Address of the function that scans codes of keys in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _coded_float32, _coded_bfloat16, _coded_float16, _coded_int8)


@functools.cache
def graph_task(fmt: Format) -> int:
    """Address of the function that searches a graph over keys in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _graph_float32, _graph_bfloat16, _graph_float16, _graph_int8)


def _sketch_float32(descriptor, task, worker):
    return _scan_sketch(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _sketch_bfloat16(descriptor, task, worker):
    return _scan_sketch(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _sketch_float16(descriptor, task, worker):
    return _scan_sketch(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _sketch_int8(descriptor, task, worker):
    return _scan_sketch(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int8))


@functools.cache
def sketch_task(fmt: Format) -> int:
    """Address of the function that scans a sketch of keys in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _sketch_float32, _sketch_bfloat16, _sketch_float16, _sketch_int8)
