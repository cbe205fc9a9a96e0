"""One layer's step as tasks for the pool: search the keys of every head, then attend to what was found.

Everything a step needs lies behind ONE descriptor of int64 words, so that a C function on any thread can run it
(`run_step`). An *entry* is one key-value head of one sequence, with as many queries as it has query heads, times
positions. Its tokens lie in *pieces*: ranges of arrays, each with the function that searches it (`search_tasks`).
Search tasks leave their best candidates as packed numbers in lists; a task per query then joins the lists of its entry,
keeps the best k and attends to them, with the scores that the search computed (`attend_task`). Those tasks come last,
and wait for their entry.

Candidates are ordered completely, and summed in one order: results are the same for any number of threads and tasks.
Functions are called by address: Numba compiles what a kernel calls into it again, so one kernel of all would take it
half a minute for every storage format.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from retrieval_attn.cpu.atomics import (
    at_address,
    atomic_add,
    atomic_load,
    call_task,
    nanoseconds,
    pause,
    yield_core,
)
from retrieval_attn.cpu.pool import YIELD_NANOSECONDS, run_job
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.packed import EMPTY

# Words of the descriptor. AT: an address, of what the brackets say, C-contiguous.
(
    POOL,  # address of the pool's control block
    WIDTH,  # most threads
    TASK,  # address of the task function
    ATTEND,  # address of the attend task's function for the storage format
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
    LIST_WORDS,  # of a list: LIST_HEAD and room for candidates
    LISTS_AT,  # int64 (ENTRIES, QUERIES, LISTS, LIST_WORDS)
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
    BOUNDS_AT,  # float32 (QUERIES,), or int32 (PADDED / 4, 16)
    TILE_AT,  # float32 (4, 64)
    PLANES_AT,  # int8 (2 or PADDED, most width of codes)
    FOUND_AT,  # int32 (TOP_K,)
    GRAPH_POOL_AT,  # int64 (GRAPH_POOL,)
    VISITED_AT,  # uint64 (VISITED,)
    FRESH_AT,  # int32 (FRESH,)
    SURVIVORS_AT,  # int64 (FRESH,)
    GRAPH_POOL,
    VISITED,
    FRESH,
    STEPS_AT,  # float32 (2, PADDED)
    JOINED_AT,  # int64 (JOINED,)
    JOINED,
    NANOSECONDS,  # wall clock of the last run
    NUMBERS_AT,  # float64 (most numbers of a sketch,)
    PROJECTED_AT,  # float32 (4, most numbers of a sketch)
    SAMPLE_AT,  # float32 (4, SAMPLE)
    SAMPLE,
    GENERATION,  # counts the runs
) = range(57)
WORDS = 64

# A row of the table of entries.
ENTRY_LISTS, ENTRY_PIECE, ENTRY_PIECES, ENTRY_TASKS = range(4)
ENTRY_WORDS = 4
# A row of the table of pieces: addresses of the search task's function and of keys and values of token 0; tokens
# [low, high) take part, with the ids first + token.
SEARCH, KEYS, VALUES, LOW, HIGH, FIRST, INDEX = range(7)
PIECE_WORDS = 7
# A row of the table of search tasks. Of a scanned piece: part `part` of `parts`, -1 for what all parts of a sketch
# wait for; of a graph `part` is the query, of a device's candidates it is the query + QUERIES times the part.
TASK_ENTRY, TASK_PIECE, TASK_PART, TASK_PARTS, TASK_LIST = range(5)
TASK_WORDS = 5
# What describes a graph, behind INDEX: one such row for the whole group, or one for each query head; or coded keys.
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
    KEPT,  # of a coded scan: keys that are scored again; of a device's candidates: the least that there must be
    QUERY_SIDE,  # of a sketch: float32 (RANK, HEAD_DIM)
    RANK,
    WIDE,  # how many of RANK numbers have 8 bits
    IDS,  # int32 (16 * CODE_ROWS,): the key of every place, -1 for none; of a device's candidates: (QUERIES, ROOM)
    TOTAL,  # blocks in use
    LEAVES,  # uint8 (LEAF_ROWS, 16 * LEAF_NUMBERS): coded means of the leaves
    LEAF_ROWS,
    LEAF_NUMBERS,
    LEAF_STEPS,  # float32 (LEAF_NUMBERS,)
    ORDERED,  # how many leaves
    SHARE,  # bits of a float32
    READY,  # int64 (8,): the GENERATION that what follows belongs to
    CHOSEN,  # int32 (PADDED / 4, TOTAL + 1): blocks that four queries look at together
    COUNTS,  # int64 (PADDED / 4,): how many
    OWN_PLANES,  # int8 (PADDED, RANK): coded queries
    OWN_STEPS,  # float32 (PADDED / 4, 2, 4)
    OWN_BOUNDS,  # float32 (PADDED,)
    LANDMARKS,
    CELL_STARTS,  # int32 (LANDMARKS + 1,)
    CELL_KEYS,  # int32, as many as the last of CELL_STARTS says
) = range(42)
GRAPH_WORDS = 48
# A list begins with how many packed candidates follow, in any order, and the row of the piece that they belong to if
# they are packed by the sums of their codes (-1: by their scores).
LIST_COUNT, LIST_PIECE = range(2)
LIST_HEAD = 2
# A row of meters: nanoseconds; (query, key) pairs whose score was computed; bytes of keys, codes and values read.
SEARCH_TIME, ATTEND_TIME, SCANNED, BYTES = range(4)
METER_WORDS = 16

BAD_ID = 1
"""Error code of a task: an index named a token that is not among those searched."""


@njit(nogil=True, cache=True)
def words_at(address, rows, columns):
    """int64 array (rows, columns) at an address."""
    return carray(at_address(address), (rows, columns), np.int64)


@njit(nogil=True, cache=True)
def floats_at(address, rows, columns):
    """float32 array (rows, columns) at an address."""
    return carray(at_address(address), (rows, columns), np.float32)


@njit(nogil=True, cache=True)
def count_cost(step, worker, scanned, nbytes):
    """Add to what the worker's tasks of this step cost."""
    meters = words_at(step[METERS_AT], step[WORKERS], METER_WORDS)[worker]
    meters[SCANNED] += scanned
    meters[BYTES] += nbytes


@njit(nogil=True, cache=True)
def wait_for(address, value):
    """Return when the word there is `value`."""
    since = nanoseconds()
    while atomic_load(address) != value:
        for _ in range(32):
            pause()
        if nanoseconds() - since > YIELD_NANOSECONDS:
            yield_core()


def _run_task(descriptor, task, worker):
    step = words_at(descriptor, 1, WORDS)[0]
    meters = words_at(step[METERS_AT], step[WORKERS], METER_WORDS)[worker]
    since = nanoseconds()
    if task < step[TASKS]:
        row = words_at(step[TASKS_AT], step[TASKS], TASK_WORDS)[task]
        piece = words_at(step[PIECES_AT], row[TASK_PIECE] + 1, PIECE_WORDS)[row[TASK_PIECE]]
        code = call_task(piece[SEARCH], descriptor, task, worker)
        atomic_add(step[PENDING_AT] + row[TASK_ENTRY] * 64, -1)
        meters[SEARCH_TIME] += nanoseconds() - since
        return code
    number = task - step[TASKS]
    pending = step[PENDING_AT] + number // step[QUERIES] * 64
    if atomic_load(pending) != 0:
        wait_for(pending, 0)
        since = nanoseconds()
    code = call_task(step[ATTEND], descriptor, number, worker)
    meters[ATTEND_TIME] += nanoseconds() - since
    return code


@njit(nogil=True, cache=True)
def run_step(descriptor):
    """Run the step behind the address `descriptor`: out and lse of the queries that lie in its buffer now.

    Returns, and leaves in the descriptor's STATUS, what `pool.run_job` returned: 0 if all went well.
    """
    began = nanoseconds()
    step = words_at(descriptor, 1, WORDS)[0]
    entries, queries, padded, dim = step[ENTRIES], step[QUERIES], step[PADDED], step[HEAD_DIM]
    source = carray(at_address(step[QUERIES_AT]), (entries, queries, dim), np.float32)
    tiles = carray(at_address(step[TILES_AT]), (entries, padded, dim), np.float32)
    table = words_at(step[ENTRIES_AT], entries, ENTRY_WORDS)
    pending = words_at(step[PENDING_AT], entries, 8)
    for entry in range(entries):
        for query in range(queries):
            for j in range(dim):
                tiles[entry, query, j] = source[entry, query, j]
        pending[entry, 0] = table[entry, ENTRY_TASKS]
    step[GENERATION] += 1
    words_at(step[FLOORS_AT], entries, queries)[:] = EMPTY
    words_at(step[METERS_AT], step[WORKERS], METER_WORDS)[:] = 0
    status = run_job(step[POOL], step[TASK], descriptor, step[TASKS] + entries * queries, step[WIDTH])
    step[STATUS] = status
    step[NANOSECONDS] = nanoseconds() - began
    return status


def _callback(descriptor):
    run_step(descriptor)


def compile_step() -> None:
    """Compile what runs a step, or load it from Numba's cache."""
    run_step.compile("int64(int64)")
    task_address()


@functools.cache
def task_address() -> int:
    """Address of the function of a step's tasks, as `pool.run_job` takes it."""
    return address_of(_run_task, TASK_SIGNATURE)


@functools.cache
def callback_address() -> int:
    """Address of `run_step` as a C function of one pointer, void f(void *), for a CUDA host function: see STATUS."""
    return address_of(_callback, "void(int64)")


TASK_SIGNATURE = "int64(int64, int64, int64)"
_compiled: list[Any] = []


def address_of(function: Callable[..., Any], signature: str) -> int:
    """Compile a module's function for C, or load it from Numba's cache, for good; returns its address."""
    compiled: Any = cfunc(signature, cache=True)(function)
    _compiled.append(compiled)  # its code lives as long as the object
    return int(compiled.address)


def task_in_format(fmt: Format, *functions: Callable[..., Any]) -> int:
    """Address of the task for rows in `fmt`, of the functions for float32, bfloat16, float16 and int8 in this order."""
    order = Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16, Format.INT8
    return address_of(dict(zip(order, functions, strict=True))[fmt], TASK_SIGNATURE)
