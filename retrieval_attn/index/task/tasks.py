"""What all search tasks share: reading their task, handing candidates in, and the scan that answers where nothing else
can.

A task is `int64 f(int64 descriptor, int64 task, int64 worker, like)`: `like` is a pointer whose type alone says the
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
from retrieval_attn.index.task.atomics import at_address, atomic_load, atomic_max, rows_at
from retrieval_attn.index.task.descriptor import LIST_COUNT, LIST_HEAD, LIST_RANGE, RANGE, TASK, floats_at

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
    """Address of the task `function` for rows in `fmt`; compiled, or loaded, on first use."""
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
