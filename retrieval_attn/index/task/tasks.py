"""The records of a step, and the functions that all search tasks share.

All inputs of a step lie behind ONE address, so that a C function on any thread can run it (`cpu/step`). An *entry* is
one key-value head of one sequence, with as many queries as it has query heads, times positions. Its tokens lie in
*ranges* of arrays, each with the function that searches it. Search tasks write their best candidates as packed numbers
to lists; a task per query then joins the lists of its entry.

Numba reads a record behind an address as it reads a number behind one: fields cost nothing at run time, and compiled
functions are cached as ever (docs/archive/log.md has the times). A field named `..._at` is the address of a
C-contiguous array, which the comment describes.

A task is `int64 f(int64 descriptor, int64 task, int64 worker, like)`: `like` is a pointer whose type alone gives the
storage format, so that one function is compiled once for each format.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import dot
from retrieval_attn.index.kernels.packed import EMPTY, keep_best, pack_score
from retrieval_attn.index.kernels.scan import rescore
from retrieval_attn.index.task.atomics import (
    YIELD_NANOSECONDS,
    at_address,
    atomic_load,
    atomic_max,
    nanoseconds,
    pause,
    rows_at,
    yield_core,
)

_WORD = np.int64

STEP = np.dtype(
    [
        ("pool", _WORD),  # address of the pool's control block
        ("width", _WORD),  # most threads
        ("task", _WORD),  # address of the function of all tasks
        ("attend", _WORD),  # address of the attend task's function for the storage format
        ("status", _WORD),  # what run_job returned
        ("nanoseconds", _WORD),  # wall clock of the last run
        ("generation", _WORD),  # counts the runs
        ("entries", _WORD),
        ("queries", _WORD),  # per entry
        ("padded", _WORD),  # queries rounded up to a multiple of 4
        ("head_dim", _WORD),
        ("value_dim", _WORD),
        ("top_k", _WORD),  # keys that a query attends to at most
        ("keep", _WORD),  # of those, the most that are chosen by their scores
        ("scale", np.float32),
        ("softcap", np.float32),  # 0: none
        ("queries_at", _WORD),  # float32 (entries, queries, head_dim), read at every step
        ("tiles_at", _WORD),  # float32 (entries, padded, head_dim): the same, padded by zeros
        ("out_at", _WORD),  # float32 (entries, queries, value_dim)
        ("lse_at", _WORD),  # float32 (entries, queries)
        ("rest_at", _WORD),  # float32 (entries, queries): the share of out that is estimated
        ("entries_at", _WORD),  # ENTRY (entries,)
        ("ranges_at", _WORD),  # RANGE (of all entries,)
        ("tasks_at", _WORD),  # TASK (tasks,)
        ("tasks", _WORD),  # search tasks
        ("lists", _WORD),  # most candidate lists of an entry
        ("list_words", _WORD),  # of a list: LIST_HEAD and room for candidates
        ("lists_at", _WORD),  # int64 (entries, queries, lists, list_words)
        ("floors_at", _WORD),  # int64 (entries, queries): what is below cannot be among the best k
        ("pending_at", _WORD),  # int64 (entries, 8): search tasks not done yet, scored pairs, bytes read
        ("meters_at", _WORD),  # METER (workers,)
        ("workers", _WORD),
        ("scratch_at", _WORD),  # scratch of worker 0
        ("scratch_stride", _WORD),  # bytes from one worker's scratch to the next
        ("capacity", _WORD),  # candidates that a scan keeps per query
        # from here on byte offsets into a worker's scratch
        ("pool_at", _WORD),  # int64 (queries, capacity)
        ("rows_at", _WORD),  # int64 (top_k,)
        ("scores_at", _WORD),  # float32 (top_k,)
        ("digits_at", _WORD),  # int64 (256,)
        ("owners_at", _WORD),  # int16 (top_k,): clusters of attended keys, -1 for none
        ("left_at", _WORD),  # float32 (clusters,): keys that were not attended to
        ("weights_at", _WORD),  # float32 (clusters,)
        ("sampled_at", _WORD),  # float32 (columns,)
        ("counts_at", _WORD),  # int64 (queries,)
        ("bars_at", _WORD),  # int64 (queries,)
        ("bounds_at", _WORD),  # float32 (padded,), or int32 (padded / 4, BOUND_WORDS)
        ("steps_at", _WORD),  # float32 (2, padded)
        ("tile_at", _WORD),  # float32 (padded, scan.score_columns(padded)), 4 * 64 at least
        ("joined_at", _WORD),  # int64 (joined,)
        ("joined", _WORD),
        ("own_at", _WORD),  # further arguments of a kind's search
    ],
    align=True,
)
ENTRY = np.dtype(
    [
        ("lists", _WORD),
        ("first_range", _WORD),
        ("ranges", _WORD),
        ("tasks", _WORD),
        ("clusters", _WORD),  # by which the keys that are not attended to are estimated; 0: they are left out
        ("counts_at", _WORD),  # float32 (clusters,): keys
        ("means_at", _WORD),  # float32 (head_dim, clusters): mean keys
        ("sums_at", _WORD),  # float32 (clusters, value_dim): summed values
        ("samples_at", _WORD),  # bfloat16 (columns * head_dim,): keys of each cluster, see `cpu/cluster_sums.py`
        ("columns", _WORD),
        ("sampled", _WORD),  # of a cluster
        ("budgets_at", _WORD),  # int64 (queries,): keys that each query attends to, at most top_k; 0: top_k
    ]
)
RANGE = np.dtype(
    [
        ("search", _WORD),  # address of the search task's function
        ("keys_at", _WORD),  # keys and values of token 0
        ("values_at", _WORD),
        ("low", _WORD),  # tokens [low, high) take part, with the ids first + token
        ("high", _WORD),
        ("first", _WORD),
        ("index_at", _WORD),  # what the search reads of an index: records of its kind
        ("kept", _WORD),  # candidates by code: how many are scored again; 0: none are by code
        ("members_at", _WORD),  # uint8: the cluster of token 0 and of those behind it; 0: they belong to none
    ]
)
TASK = np.dtype(
    [
        ("entry", _WORD),
        ("range", _WORD),
        # of a range that is cut by tokens, one of `parts`, -1 for what all of them wait for; of one that is cut by
        # queries, the query + queries * one of `parts`
        ("part", _WORD),
        ("parts", _WORD),
        ("list", _WORD),
    ]
)
METER = np.dtype(
    {
        "names": ["search_time", "attend_time", "scanned", "nbytes"],  # nanoseconds; scored pairs; bytes read
        "formats": [_WORD] * 4,
        "itemsize": 128,  # workers write side by side: two cache lines each
    }
)
WORDS = STEP.itemsize // 8
METER_WORDS = METER.itemsize // 8
STATUS, NANOSECONDS = (STEP.fields[name][1] // 8 for name in ("status", "nanoseconds"))  # type: ignore[index]
"""Of a descriptor that is seen as int64 words."""
SEARCH_TIME, ATTEND_TIME, SCANNED, BYTES = range(4)
"""Of a meter that is seen as int64 words."""

# A list begins with how many packed candidates follow, in any order, and the number of the range that they belong to if
# they are packed by the sums of their codes (-1: by their scores; ALL_KEPT: so, too, and all of them are attended to).
LIST_COUNT, LIST_RANGE = range(2)
ALL_KEPT = -2
LIST_HEAD = 2


@njit(nogil=True, cache=True)
def step_at(address):
    """The STEP record at an address."""
    return carray(at_address(address), 1, STEP)[0]


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
    meter = carray(at_address(step.meters_at), step.workers, METER)[worker]
    meter.scanned += scanned
    meter.nbytes += nbytes


@njit(nogil=True, cache=True)
def wait_for(address, value):
    """Return when the word there is `value`."""
    since = nanoseconds()
    while atomic_load(address) != value:
        for _ in range(32):
            pause()
        # the thread that is waited for may need this very core
        if nanoseconds() - since > YIELD_NANOSECONDS:
            yield_core()


_CARRIED = {
    Format.FLOAT32: types.float32,
    Format.BFLOAT16: types.uint16,
    Format.FLOAT16: types.int16,
    Format.INT8: types.int8,
}
"""Types that carry a format inside kernels, see `formats`."""
_compiled: list[Any] = []


def address_for_c(function: Callable[..., Any], signature: Any) -> int:
    """Compile a module's function for C, or load it from Numba's cache, for good; returns its address."""
    compiled: Any = cfunc(signature, cache=True)(function)
    _compiled.append(compiled)  # its code lives as long as the object
    return int(compiled.address)


@functools.cache
def task_address(function: Callable[..., Any], fmt: Format) -> int:
    """Address of the task `function` for rows in `fmt`; compiled, or loaded, on first use.

    function: int64 f(descriptor, number, worker, like); like: a pointer to the type that carries `fmt`, never read.
    """
    return address_for_c(function, types.int64(*[types.int64] * 3, types.CPointer(_CARRIED[fmt])))


@njit(nogil=True, cache=True)
def task_at(step, number):
    """The TASK record of search task `number`."""
    return carray(at_address(step.tasks_at), step.tasks, TASK)[number]


@njit(nogil=True, cache=True)
def range_at(step, number):
    """The RANGE record `number`."""
    return carray(at_address(step.ranges_at), number + 1, RANGE)[number]


@njit(nogil=True, cache=True)
def lists_of(step, task):
    """The lists that a task writes to, (queries, list_words)."""
    queries, width, size = step.queries, step.lists, step.list_words
    address = step.lists_at + task.entry * queries * width * size * 8
    return carray(at_address(address), (queries, width, size), np.int64)[:, task.list]


@njit(nogil=True, cache=True)
def scratch_of(step, worker):
    """Address of the worker's scratch."""
    return step.scratch_at + worker * step.scratch_stride


@njit(nogil=True, cache=True)
def tiles_of(step, entry):
    """Queries of an entry, (padded, head_dim)."""
    return floats_at(step.tiles_at + entry * step.padded * step.head_dim * 4, step.padded, step.head_dim)


@njit(nogil=True, cache=True)
def query_of(step, entry, query):
    """One query, (1, head_dim)."""
    return floats_at(step.tiles_at + (entry * step.padded + query) * step.head_dim * 4, 1, step.head_dim)


@njit(nogil=True, cache=True)
def part_of(low, high, task):
    """The share of [low, high) that a task scans."""
    return low + (high - low) * task.part // task.parts, low + (high - low) * (task.part + 1) // task.parts


@njit(nogil=True, cache=True)
def hand_in(pool, count, first, step, entry, query, found):
    """Write candidates pool[:count] to the list `found`, their ids moved by `first`, but those that have lost already.

    EMPTY ones are left out. With top_k others, the worst is a floor for all lists of the query.
    """
    address = step.floors_at + (entry * step.queries + query) * 8
    if count == step.top_k and pool[count - 1] != EMPTY:
        least = pool[0]
        for i in range(1, count):
            least = min(least, pool[i])
        atomic_max(address, least - first)
    # read after the own floor is in: other tasks of the query may have raised it further
    floor = atomic_load(address)
    kept = 0
    for i in range(count):
        if pool[i] == EMPTY:
            break
        found[LIST_HEAD + kept] = pool[i] - first
        kept += 1 if pool[i] - first >= floor else 0
    found[LIST_COUNT], found[LIST_RANGE] = kept, -1


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
def hand_in_codes(pool, counts, start, stop, origin, finite, step, task, span, lists, like):
    """Write each query's counts[query] candidates to its list, packed as their codes are, to be scored when all are in.

    pool: (queries, capacity) with ids from `origin` of the range's array on. finite[query]: NaN for a query whose codes
    say nothing; it gets the exact best of [start, stop).
    """
    for query in range(step.queries):
        found = lists[query]
        if finite[query] != finite[query]:
            own = query_of(step, task.entry, query)
            keys = rows_at(span.keys_at, span.high, step.head_dim, like)
            alone = scan_alone(own, keys, start + origin, stop + origin, step.top_k, pool[query])
            hand_in(pool[query], alone, span.first, step, task.entry, query, found)
            continue
        for i in range(counts[query]):
            found[LIST_HEAD + i] = pool[query, i] - origin - span.first
        found[LIST_COUNT], found[LIST_RANGE] = counts[query], task.range


@njit(nogil=True, cache=True)
def join_lists(step, scratch, entry, query, lists, found, floor, like):
    """Bring the best candidates of all lists to the front of `found`, in any order; returns how many, <= top_k.

    At most `keep` of them, in addition to those that are attended to whatever their scores.

    Coded candidates of a range are joined first, and scored again: in parts, other keys would get their exact score.
    """
    size = step.list_words
    chosen = carray(at_address(scratch + step.rows_at), step.top_k, np.int64)
    kept = number = always = 0
    while number < lists:
        start = number * size
        span = found[start + LIST_RANGE]
        if span == ALL_KEPT:
            first = start + LIST_HEAD
            for i in range(first, first + found[start + LIST_COUNT]):
                chosen[always] = found[i]
                always += 1
            number += 1
            continue
        if span < 0:
            first = start + LIST_HEAD
            for i in range(first, first + found[start + LIST_COUNT]):
                packed = found[i]
                found[kept] = packed  # never ahead of what is still to be read
                kept += 1 if packed >= floor else 0
            number += 1
            continue
        joined = carray(at_address(scratch + step.joined_at), step.joined, np.int64)
        count = 0
        while number < lists and found[number * size + LIST_RANGE] == span:
            first = number * size + LIST_HEAD
            for i in range(first, first + found[number * size + LIST_COUNT]):
                joined[count] = found[i]
                count += 1
            number += 1
        count = _score_coded(step, entry, query, span, joined, count, like)
        for i in range(count):
            found[kept] = joined[i]
            kept += 1 if joined[i] >= floor else 0
    if kept > step.keep:
        keep_best(found, kept, step.keep)
        kept = step.keep
    found[kept : kept + always] = chosen[:always]
    return kept + always


@njit(nogil=True, cache=True)
def _score_coded(step, entry, query, number, joined, count, like):
    """Cut coded candidates joined[:count] of range `number` to the best, and pack those by their scores; how many."""
    span = carray(at_address(step.ranges_at), number + 1, RANGE)[number]
    own = query_of(step, entry, query)
    keys = rows_at(span.keys_at, span.high, step.head_dim, like)
    if count < min(span.kept, span.high - span.low):  # the sketch was misled: an exact answer, slowly
        count = scan_alone(own, keys, span.low, span.high, step.top_k, joined)
        for i in range(count):
            joined[i] -= span.first
        return count
    if count > span.kept:
        keep_best(joined, count, span.kept)
        count = span.kept
    rescore(keys, span.high, own, 0, joined, count, span.first, joined)
    return count
