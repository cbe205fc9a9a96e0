"""One layer's step as tasks for the pool: search the keys of every head, then attend to what was found.

Everything a step needs lies behind ONE descriptor of int64 words, so that a C function on any thread can run it
(`run_step`). An *entry* is one key-value head of one sequence, with as many queries as it has query heads, times
positions. Its tokens lie in *pieces*: ranges of arrays, each scanned exactly or searched through an index. Search tasks
leave their best candidates as packed numbers in lists; a task per query then joins the lists of its entry, keeps the
best k and attends to them, with the scores that the search computed. Those tasks come last, and wait for their entry.

Which tasks there are depends on lengths only, and candidates are ordered completely: results are the same for any
number of threads.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from retrieval_attn.cpu.atomics import (
    at_address,
    atomic_add,
    atomic_load,
    atomic_max,
    nanoseconds,
    pause,
    yield_core,
)
from retrieval_attn.cpu.gather import attend_rows
from retrieval_attn.cpu.pool import YIELD_NANOSECONDS, run_job
from retrieval_attn.index.codes import encode_query_rows
from retrieval_attn.index.dots import bits_to_float
from retrieval_attn.index.flat import _scan
from retrieval_attn.index.formats import Format
from retrieval_attn.index.graph_search import search_graph
from retrieval_attn.index.packed import EMPTY, id_of, keep_best, pack_score, score_of

# Words of the descriptor. AT: an address, of what the brackets say, C-contiguous.
(
    POOL,  # address of the pool's control block
    WIDTH,  # most threads
    FUNCTION,  # address of the task function of the storage format
    STATUS,  # what run_job returned
    ENTRIES,
    QUERIES,  # per entry
    PADDED,  # QUERIES rounded up to a multiple of 4
    HEAD_DIM,
    VALUE_DIM,
    TOP_K,
    SCALE,  # bits of a float32
    SOFTCAP,  # bits of a float32, 0: none
    QUERIES_AT,  # float32 (ENTRIES, QUERIES, HEAD_DIM), read at every step
    TILES_AT,  # float32 (ENTRIES, PADDED, HEAD_DIM): the same, padded by zeros
    OUT_AT,  # float32 (ENTRIES, QUERIES, VALUE_DIM)
    LSE_AT,  # float32 (ENTRIES, QUERIES)
    ENTRIES_AT,  # int64 (ENTRIES, ENTRY_WORDS)
    PIECES_AT,  # int64 (pieces of all entries, PIECE_WORDS)
    TASKS_AT,  # int64 (TASKS, TASK_WORDS)
    TASKS,  # search tasks
    LISTS,  # most candidate lists of an entry
    LISTS_AT,  # int64 (ENTRIES, QUERIES, LISTS, 1 + TOP_K): a count, and so many packed candidates in any order
    FLOORS_AT,  # int64 (ENTRIES, QUERIES): what is below cannot be among the best k
    PENDING_AT,  # int64 (ENTRIES, 8): search tasks not done yet, in the first of 8 words
    METERS_AT,  # int64 (workers, METER_WORDS)
    WORKERS,
    SCRATCH_AT,  # scratch of worker 0
    SCRATCH_STRIDE,  # bytes from one worker's scratch to the next
    CAPACITY,  # candidates that a scan keeps per query
    SCAN_AT,  # from here on byte offsets into a worker's scratch: int64 (QUERIES, CAPACITY)
    ROWS_AT,  # int64 (TOP_K,)
    SCORES_AT,  # float32 (TOP_K,)
    DIGITS_AT,  # int64 (256,)
    COUNTS_AT,  # int64 (QUERIES,)
    BARS_AT,  # int64 (QUERIES,)
    BOUNDS_AT,  # float32 (QUERIES,)
    TILE_AT,  # float32 (4, 64)
    ALONE_AT,  # float32 (4, HEAD_DIM): one query and zeros
    PLANES_AT,  # int8 (2, most width of codes)
    FOUND_AT,  # int32 (TOP_K,)
    GRAPH_POOL_AT,  # int64 (GRAPH_POOL,)
    VISITED_AT,  # uint64 (VISITED,)
    FRESH_AT,  # int32 (FRESH,)
    SURVIVORS_AT,  # int64 (FRESH,)
    GRAPH_POOL,
    VISITED,
    FRESH,
) = range(47)
WORDS = 64

# A row of the table of entries.
ENTRY_LISTS, ENTRY_PIECE, ENTRY_PIECES, ENTRY_TASKS = range(4)
ENTRY_WORDS = 4
# A row of the table of pieces: addresses of keys and values of token 0; tokens [low, high) have the ids first + token.
KIND, KEYS, VALUES, LOW, HIGH, FIRST, INDEX = range(7)
PIECE_WORDS = 7
EXACT, GRAPH = 0, 1
# A row of the table of search tasks. Of an exact piece: part `part` of `parts`; else `part` is the query.
TASK_ENTRY, TASK_PIECE, TASK_PART, TASK_PARTS, TASK_LIST = range(5)
TASK_WORDS = 5
# What describes a graph, behind INDEX: one such row for the whole group, or one for each query head.
(
    CODES,
    CODE_ROWS,
    CODE_WIDTH,
    EDGES,
    DEGREE,
    NODE_IDS,
    START_NODES,
    STARTS,
    NODE_COUNTS,
    MEAN,
    STEP_SIZES,
    GRAPH_KEYS,
    GRAPH_FIRST,  # token of the key with id 0
    PLANES,
    ROOM,
    BEAM,
    PATIENCE,
    BETA,
    SEED_NODES,  # int32 (QUERIES, SEEDS)
    SEEDS,
    GRAPHS,
) = range(21)
GRAPH_WORDS = 24
# A row of meters: nanoseconds; (query, key) pairs whose score was computed; bytes of keys, codes and values read.
SEARCH_TIME, ATTEND_TIME, SCANNED, BYTES = range(4)
METER_WORDS = 16

BAD_ID, BAD_KIND = 1, 2
"""Error codes of tasks."""


@njit(nogil=True, cache=True)
def _words(address, rows, columns):
    return carray(at_address(address), (rows, columns), np.int64)


@njit(nogil=True, cache=True)
def _floats(address, rows, columns):
    return carray(at_address(address), (rows, columns), np.float32)


@njit(nogil=True, cache=True)
def _scan_keys(step, scratch, keys, tiles, queries, start, stop, pool):
    """The best keys of [start, stop) for each query, unordered, in pool[query]."""
    _scan(keys, tiles, queries, start, stop, step[TOP_K], pool)


@njit(nogil=True, cache=True)
def _scan_part(step, scratch, piece, task, entry, lists, like):
    """Exact search of one part of a piece for all queries of its entry; returns pairs scored and bytes read."""
    queries, top_k, dim = step[QUERIES], step[TOP_K], step[HEAD_DIM]
    low, high, first = piece[LOW], piece[HIGH], piece[FIRST]
    start = low + (high - low) * task[TASK_PART] // task[TASK_PARTS]
    stop = low + (high - low) * (task[TASK_PART] + 1) // task[TASK_PARTS]
    keys = carray(at_address(piece[KEYS]), (high, dim), like.dtype)
    tiles = _floats(step[TILES_AT] + entry * step[PADDED] * dim * 4, step[PADDED], dim)
    pool = _words(scratch + step[SCAN_AT], queries, step[CAPACITY])
    _scan_keys(step, scratch, keys, tiles, queries, start, stop, pool)
    for query in range(queries):
        _hand_in(pool[query], min(top_k, stop - start), top_k, first, step, entry, query, lists[query])
    return (stop - start) * queries, (stop - start) * dim * like.itemsize


@njit(nogil=True, cache=True)
def _hand_in(pool, count, top_k, first, step, entry, query, found):
    """Write candidates pool[:count] to the list `found`, their ids moved by `first`, but those that have lost already.

    With top_k of them, the worst is a floor for all lists of the query.
    """
    address = step[FLOORS_AT] + (entry * step[QUERIES] + query) * 8
    if count == top_k:
        least = pool[0]
        for i in range(1, count):
            least = min(least, pool[i])
        atomic_max(address, least - first)
    floor = atomic_load(address)
    kept = 0
    for i in range(count):
        found[1 + kept] = pool[i] - first
        kept += np.int64(pool[i] - first >= floor)
    found[0] = kept


@njit(nogil=True, cache=True)
def _scan_alone(step, scratch, piece, entry, query, like, found):
    """Exact search of a whole piece for one query, where a graph cannot answer; returns keys scored and bytes read."""
    top_k, dim = step[TOP_K], step[HEAD_DIM]
    low, high = piece[LOW], piece[HIGH]
    keys = carray(at_address(piece[KEYS]), (high, dim), like.dtype)
    tiles = _floats(step[TILES_AT] + (entry * step[PADDED] + query) * dim * 4, 1, dim)
    alone = _floats(scratch + step[ALONE_AT], 4, dim)
    for j in range(dim):
        alone[0, j] = tiles[0, j]
    pool = _words(scratch + step[SCAN_AT], 1, step[CAPACITY])
    _scan_keys(step, scratch, keys, alone, 1, low, high, pool)
    _hand_in(pool[0], min(top_k, high - low), top_k, piece[FIRST], step, entry, query, found)
    return high - low, (high - low) * dim * like.itemsize


@njit(nogil=True, cache=True)
def _search_graph(step, scratch, piece, entry, query, like, found):
    """Search of a graph for one query; returns keys scored and bytes read."""
    queries, top_k, dim = step[QUERIES], step[TOP_K], step[HEAD_DIM]
    graphs = _words(piece[INDEX], 1, GRAPH_WORDS)[0, GRAPHS]
    row = _words(piece[INDEX], graphs, GRAPH_WORDS)[query * graphs // queries]
    width = row[CODE_WIDTH]
    codes = carray(at_address(row[CODES]), (row[CODE_ROWS], width), np.uint8)
    edges = carray(at_address(row[EDGES]), (row[CODE_ROWS], row[DEGREE]), np.int32)
    node_ids = carray(at_address(row[NODE_IDS]), row[CODE_ROWS], np.int32)
    starts = carray(at_address(row[START_NODES]), row[STARTS], np.int32)
    counts = carray(at_address(row[NODE_COUNTS]), 3, np.int64)
    mean, sizes = (_floats(row[MEAN], 1, dim)[0], _floats(row[STEP_SIZES], 1, dim)[0])
    own = _floats(step[TILES_AT] + (entry * step[PADDED] + query) * dim * 4, 1, dim)
    planes = carray(at_address(scratch + step[PLANES_AT]), (1, row[PLANES], width), np.int8)
    bounds = carray(at_address(scratch + step[TILE_AT]), 2, np.float32)
    encode_query_rows(own, mean, sizes, planes, bounds[:1], bounds[1:])
    if bounds[1] != bounds[1]:
        return _scan_alone(step, scratch, piece, entry, query, like, found)
    parts = (
        carray(at_address(scratch + step[GRAPH_POOL_AT]), step[GRAPH_POOL], np.int64),
        carray(at_address(scratch + step[VISITED_AT]), step[VISITED], np.uint64),
        carray(at_address(scratch + step[FRESH_AT]), step[FRESH], np.int32),
        carray(at_address(scratch + step[SURVIVORS_AT]), step[FRESH], np.int64),
    )
    seeds = carray(at_address(row[SEED_NODES] + query * row[SEEDS] * 4), row[SEEDS], np.int32)
    limit = piece[HIGH] - row[GRAPH_FIRST]
    keys = carray(at_address(row[GRAPH_KEYS]), (limit, dim), like.dtype)
    ids = carray(at_address(scratch + step[FOUND_AT]), top_k, np.int32)
    scores = carray(at_address(scratch + step[SCORES_AT]), top_k, np.float32)
    beta = bits_to_float(np.int32(row[BETA]))
    graph = (codes, edges, node_ids, starts, counts)
    count, scored, _ = search_graph(
        graph, keys, own, planes, bounds[:1], 0, seeds, top_k, row[ROOM], row[BEAM], row[PATIENCE], beta, limit, parts,
        ids, scores,
    )  # fmt: skip
    if count < min(top_k, limit) and (beta < 0 or count == 0):
        more = _scan_alone(step, scratch, piece, entry, query, like, found)
        return scored + more[0], scored * width + more[1]
    pool = _words(scratch + step[SCAN_AT], 1, step[CAPACITY])[0]
    first = row[GRAPH_FIRST] + piece[FIRST]
    for i in range(count):
        pool[i] = pack_score(scores[i], ids[i])
    _hand_in(pool, count, top_k, first, step, entry, query, found)
    return scored, scored * width + min(scored, row[ROOM]) * dim * like.itemsize


@njit(nogil=True, cache=True)
def _search(step, scratch, task_number, worker, like):
    """Run a search task; returns its error code."""
    task = _words(step[TASKS_AT], step[TASKS], TASK_WORDS)[task_number]
    entry = task[TASK_ENTRY]
    piece = _words(step[PIECES_AT], task[TASK_PIECE] + 1, PIECE_WORDS)[task[TASK_PIECE]]
    queries, width, top_k = step[QUERIES], step[LISTS], step[TOP_K]
    address = step[LISTS_AT] + entry * queries * width * (1 + top_k) * 8
    lists = carray(at_address(address), (queries, width, 1 + top_k), np.int64)[:, task[TASK_LIST]]
    code = np.int64(0)
    scanned = nbytes = np.int64(0)
    if piece[KIND] == EXACT:
        scanned, nbytes = _scan_part(step, scratch, piece, task, entry, lists, like)
    elif piece[KIND] == GRAPH:
        query = task[TASK_PART]
        scanned, nbytes = _search_graph(step, scratch, piece, entry, query, like, lists[query])
    else:
        lists[:, 0] = 0
        code = np.int64(BAD_KIND)
    meters = _words(step[METERS_AT], step[WORKERS], METER_WORDS)[worker]
    meters[SCANNED] += scanned
    meters[BYTES] += nbytes
    return code


@njit(nogil=True, cache=True)
def _wait_for(address):
    """Return when the word there is 0."""
    since = nanoseconds()
    while atomic_load(address) != 0:
        for _ in range(32):
            pause()
        if nanoseconds() - since > YIELD_NANOSECONDS:
            yield_core()


@njit(nogil=True, cache=True)
def _join_lists(found, lists, top_k, floor):
    """Bring the best candidates of `lists` lists to the front of `found`, in any order; returns how many, <= top_k."""
    kept = 0
    for number in range(lists):
        start = number * (1 + top_k)
        for i in range(start + 1, start + 1 + found[start]):
            packed = found[i]
            found[kept] = packed  # never ahead of what is still to be read
            kept += np.int64(packed >= floor)
    if kept > top_k:
        keep_best(found, kept, top_k)
        kept = top_k
    return kept


@njit(nogil=True, cache=True)
def _sort_by_id(found, other, count, digits):
    """Sort packed candidates found[:count] by id, lowest first; returns whether the result lies in `other` instead.

    Each byte of the ids in turn, lowest first. digits: (256,) int64 scratch.
    """
    most = np.int64(0)
    for i in range(count):
        most = max(most, id_of(found[i]))
    moved = False
    shift = 0
    while most >> shift:
        digits[:] = 0
        for i in range(count):
            digits[(id_of(found[i]) >> shift) & 255] += 1
        start = np.int64(0)
        for digit in range(256):
            start, digits[digit] = start + digits[digit], start
        for i in range(count):
            digit = (id_of(found[i]) >> shift) & 255
            other[digits[digit]] = found[i]
            digits[digit] += 1
        found, other = other, found
        moved = not moved
        shift += 8
    return moved


@njit(nogil=True, cache=True)
def _attend(step, scratch, entry, query, worker, like):
    """Attend to the best candidates of one query; returns an error code."""
    entries = _words(step[ENTRIES_AT], step[ENTRIES], ENTRY_WORDS)
    queries, top_k, value_dim = step[QUERIES], step[TOP_K], step[VALUE_DIM]
    number = entry * queries + query
    out = _floats(step[OUT_AT], step[ENTRIES] * queries, value_dim)[number]
    lse = _floats(step[LSE_AT], step[ENTRIES] * queries, 1)
    size = step[LISTS] * (1 + top_k)
    found = carray(at_address(step[LISTS_AT] + number * size * 8), size, np.int64)
    floor = atomic_load(step[FLOORS_AT] + number * 8)
    count = _join_lists(found, entries[entry, ENTRY_LISTS], top_k, floor)
    rows = carray(at_address(scratch + step[ROWS_AT]), top_k, np.int64)
    scores = carray(at_address(scratch + step[SCORES_AT]), top_k, np.float32)
    # one order, whatever the order of finding was, or sums would differ; and neighbours in memory come together
    digits = carray(at_address(scratch + step[DIGITS_AT]), 256, np.int64)
    if _sort_by_id(found, rows, count, digits):
        found = rows
    first, last = entries[entry, ENTRY_PIECE], entries[entry, ENTRY_PIECE] + entries[entry, ENTRY_PIECES]
    pieces = _words(step[PIECES_AT], last, PIECE_WORDS)
    row_bytes = value_dim * like.itemsize
    at = first
    for i in range(count):
        key = id_of(found[i])
        token = key - pieces[at, FIRST]
        if token < pieces[at, LOW] or token >= pieces[at, HIGH]:  # mostly the same piece as before
            for at in range(first, last):
                token = key - pieces[at, FIRST]
                if pieces[at, LOW] <= token < pieces[at, HIGH]:
                    break
            else:
                out[:] = np.float32(np.nan)
                lse[number, 0] = np.float32(np.nan)
                return np.int64(BAD_ID)
        scores[i] = score_of(found[i])
        rows[i] = pieces[at, VALUES] + token * row_bytes  # may be where found[i] lay
    scale, softcap = bits_to_float(np.int32(step[SCALE])), bits_to_float(np.int32(step[SOFTCAP]))
    lse[number, 0] = attend_rows(like, rows, scores, count, scale, softcap, out)
    meters = _words(step[METERS_AT], step[WORKERS], METER_WORDS)[worker]
    meters[BYTES] += count * row_bytes
    return np.int64(0)


@njit(nogil=True, cache=True)
def _run_task(descriptor, task, worker, like):
    step = _words(descriptor, 1, WORDS)[0]
    scratch = step[SCRATCH_AT] + worker * step[SCRATCH_STRIDE]
    meters = _words(step[METERS_AT], step[WORKERS], METER_WORDS)[worker]
    since = nanoseconds()
    if task < step[TASKS]:
        code = _search(step, scratch, task, worker, like)
        entry = _words(step[TASKS_AT], step[TASKS], TASK_WORDS)[task, TASK_ENTRY]
        atomic_add(step[PENDING_AT] + entry * 64, -1)
        meters[SEARCH_TIME] += nanoseconds() - since
        return code
    number = task - step[TASKS]
    entry = number // step[QUERIES]
    if atomic_load(step[PENDING_AT] + entry * 64) != 0:
        _wait_for(step[PENDING_AT] + entry * 64)
        since = nanoseconds()
    code = _attend(step, scratch, entry, number % step[QUERIES], worker, like)
    meters[ATTEND_TIME] += nanoseconds() - since
    return code


# One function per storage format: the type of the array decides how its elements are read.


def _task_float32(descriptor, task, worker):
    return _run_task(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _task_bfloat16(descriptor, task, worker):
    return _run_task(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _task_float16(descriptor, task, worker):
    return _run_task(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


@functools.cache
def task_function(fmt: Format) -> int:
    """Address of the task function for steps over keys and values in `fmt`; compiled, or loaded, on first use."""
    function = {Format.FLOAT32: _task_float32, Format.BFLOAT16: _task_bfloat16, Format.FLOAT16: _task_float16}[fmt]
    return _address(cfunc("int64(int64, int64, int64)", cache=True)(function))


@njit(nogil=True, cache=True)
def run_step(descriptor):
    """Run the step behind the address `descriptor`: out and lse of the queries that lie in its buffer now.

    Returns, and leaves in the descriptor's STATUS, what `pool.run_job` returned: 0 if all went well.
    """
    step = _words(descriptor, 1, WORDS)[0]
    entries, queries, padded, dim = step[ENTRIES], step[QUERIES], step[PADDED], step[HEAD_DIM]
    source = carray(at_address(step[QUERIES_AT]), (entries, queries, dim), np.float32)
    tiles = carray(at_address(step[TILES_AT]), (entries, padded, dim), np.float32)
    table = _words(step[ENTRIES_AT], entries, ENTRY_WORDS)
    pending = _words(step[PENDING_AT], entries, 8)
    for entry in range(entries):
        for query in range(queries):
            for j in range(dim):
                tiles[entry, query, j] = source[entry, query, j]
        pending[entry, 0] = table[entry, ENTRY_TASKS]
    _words(step[FLOORS_AT], entries, queries)[:] = EMPTY
    _words(step[METERS_AT], step[WORKERS], METER_WORDS)[:] = 0
    status = run_job(step[POOL], step[FUNCTION], descriptor, step[TASKS] + entries * queries, step[WIDTH])
    step[STATUS] = status
    return status


def _callback(descriptor):
    run_step(descriptor)


@functools.cache
def step_callback() -> int:
    """Address of `run_step` as a C function of one pointer, void f(void *), for a CUDA host function: see STATUS."""
    return _address(cfunc("void(int64)", cache=True)(_callback))


_compiled: list[Any] = []


def _address(function: Any) -> int:
    _compiled.append(function)  # its code lives as long as the object
    return int(function.address)
