"""The memory behind one step's descriptor address, as records with named fields.

Everything that a step reads lies behind ONE address, so that a C function on any thread can run it (`cpu/step`). An
*entry* is one key-value head of one sequence, with as many queries as it has query heads, times positions. Its tokens
lie in *ranges* of arrays, each with the function that searches it. Search tasks leave their best candidates as packed
numbers in lists; a task per query then joins the lists of its entry and attends to the best.

Numba reads a record behind an address as it reads a number behind one: fields cost nothing at run time, and compiled
functions are cached as ever (docs/archive/log.md has the times). A field named `..._at` is an address of what the
comment says, C-contiguous.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import carray, njit

from retrieval_attn.index.task.atomics import YIELD_NANOSECONDS, at_address, atomic_load, nanoseconds, pause, yield_core

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
