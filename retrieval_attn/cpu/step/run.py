"""One layer's step as tasks for the pool: search the keys of every head, then attend to what was found.

What the records mean is laid out in `index/task/tasks.py`. Search tasks leave their best candidates in lists; a
task per query joins the lists of its entry, keeps the best k and attends to them, with the scores that the search
computed (`attend_task`). Those tasks come last, and wait for their entry.

Candidates are ordered completely, and summed in one order: results are the same for any number of threads and tasks.
Functions are called by address: Numba compiles what a kernel calls into it again, so one kernel of all would take it
half a minute for every storage format.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from retrieval_attn.cpu.pool import run_job
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.task.atomics import at_address, atomic_add, atomic_load, call_search, nanoseconds
from retrieval_attn.index.task.tasks import (
    ENTRY,
    METER,
    METER_WORDS,
    RANGE,
    TASK,
    address_for_c,
    step_at,
    wait_for,
    words_at,
)

BAD_ID = 1
"""Error code of a task: an index named a token that is not among those searched."""


@njit(nogil=True, cache=True, inline="always")
def _count_for(step, entry, scanned, nbytes):
    """Add what a task of `entry` has cost: rows of a step are told apart."""
    atomic_add(step.pending_at + entry * 64 + 8, scanned)
    atomic_add(step.pending_at + entry * 64 + 16, nbytes)


@njit(nogil=True, cache=True, inline="always")
def entry_at(turn, entries, queries, width):
    """The entry, and the query of its group, that a turn of the attend tasks is for.

    As many entries as threads take turns, query after query, and then the next ones: each thread mostly meets the
    samples of one head, and finds them in its cache.
    """
    first = turn // (width * queries) * width
    others = min(width, entries - first)
    turn -= first * queries
    return first + turn % others, turn // others


def _run_task(descriptor, number, worker):
    step = step_at(descriptor)
    meter = carray(at_address(step.meters_at), step.workers, METER)[worker]
    scanned, nbytes = meter.scanned, meter.nbytes
    since = nanoseconds()
    if number < step.tasks:
        task = carray(at_address(step.tasks_at), step.tasks, TASK)[number]
        span = carray(at_address(step.ranges_at), task.range + 1, RANGE)[task.range]
        code = call_search(span.search, descriptor, number, worker)
        _count_for(step, task.entry, meter.scanned - scanned, meter.nbytes - nbytes)
        atomic_add(step.pending_at + task.entry * 64, -1)
        meter.search_time += nanoseconds() - since
        return code
    entry, own = entry_at(number - step.tasks, step.entries, step.queries, step.width)
    query = entry * step.queries + own
    pending = step.pending_at + entry * 64
    if atomic_load(pending) != 0:
        # searches of the same entry are still running elsewhere: waiting is no work of this task's
        wait_for(pending, 0)
        since = nanoseconds()
    code = call_search(step.attend, descriptor, query, worker)
    meter.attend_time += nanoseconds() - since
    _count_for(step, entry, meter.scanned - scanned, meter.nbytes - nbytes)
    return code


@njit(nogil=True, cache=True)
def run_step(descriptor):
    """Run the step behind the address `descriptor`: out and lse of the queries that lie in its buffer now.

    Returns, and leaves in the descriptor's status, what `pool.run_job` returned: 0 if all went well.
    """
    began = nanoseconds()
    step = step_at(descriptor)
    entries, queries, padded, dim = step.entries, step.queries, step.padded, step.head_dim
    source = carray(at_address(step.queries_at), (entries, queries, dim), np.float32)
    tiles = carray(at_address(step.tiles_at), (entries, padded, dim), np.float32)
    table = carray(at_address(step.entries_at), entries, ENTRY)
    pending = words_at(step.pending_at, entries, 8)
    for entry in range(entries):
        for query in range(queries):
            for j in range(dim):
                tiles[entry, query, j] = source[entry, query, j]
        pending[entry, 0] = table[entry].tasks
        pending[entry, 1:3] = 0
    step.generation += 1
    words_at(step.floors_at, entries, queries)[:] = EMPTY
    words_at(step.meters_at, step.workers, METER_WORDS)[:] = 0
    status = run_job(step.pool, step.task, descriptor, step.tasks + entries * queries, step.width)
    step.status = status
    step.nanoseconds = nanoseconds() - began
    return status


def _callback(descriptor):
    run_step(descriptor)


def compile_step() -> None:
    """Compile what runs a step, or load it from Numba's cache."""
    run_step.compile("int64(int64)")
    run_task_address()


@functools.cache
def run_task_address() -> int:
    """Address of the function of a step's tasks, as `pool.run_job` takes it."""
    return address_for_c(_run_task, "int64(int64, int64, int64)")


@functools.cache
def callback_address() -> int:
    """Address of `run_step` as a C function of one pointer, void f(void *), for a CUDA host function: see `status`."""
    return address_for_c(_callback, "void(int64)")
