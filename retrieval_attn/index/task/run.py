"""Run one search outside a step: the tasks of one key-value head on Numba's threads, for any kind of index."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import carray, njit, prange

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.packed import EMPTY, id_of, score_of, sort_best
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.task.atomics import atomic_add, atomic_load, atomic_max, call_search
from retrieval_attn.index.task.search import (
    CompiledSearch,
    ScratchLayout,
    SearchRequest,
    address_of,
    scratch_offsets,
    task_lists,
    task_places,
    word_places,
)
from retrieval_attn.index.task.tasks import (
    LIST_HEAD,
    METER,
    RANGE,
    STEP,
    TASK,
    join_lists,
    scratch_of,
    step_at,
    task_address,
    words_at,
)
from retrieval_attn.index.threads import kernel_threads

TASKS_PER_THREAD = 4
MAX_QUERIES = 64
"""Queries of one run; more take several runs."""

_spare: list[npt.NDArray[np.uint8]] = []
"""Memory of the last run, for the next one."""


class SearchResult(NamedTuple):
    """The best keys for each query, best first; equal scores are ordered by lower id.

    ids: (queries, k) int32, -1 where fewer than k keys exist.
    scores: (queries, k) float32, raw inner products (unscaled), -inf where ids is -1.
    keys_scanned: (query, key) pairs whose score was computed, coded or exact, over all queries; a pair that
    was scored twice (by its code, then exactly) counts once.
    """

    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    keys_scanned: int


@njit(nogil=True, cache=True)
def _run_tasks(descriptor, function, tasks, state_at, worker):
    """Run tasks in turn with the other workers. state_at: address of the next task's number and of an error code."""
    number = atomic_add(state_at, 1)
    while number < tasks:
        code = call_search(function, descriptor, number, worker)
        if code != 0:
            atomic_max(state_at + 8, code)
        number = atomic_add(state_at, 1)


@njit(nogil=True, cache=True)
def _collect_queries(descriptor, collect, worker, workers, ids, scores):
    """Write the results of queries `worker`, `worker` + `workers`, ... to ids and scores (queries, k)."""
    step = step_at(descriptor)
    size = step.lists * step.list_words
    for query in range(worker, step.queries, workers):
        count = call_search(collect, descriptor, query, worker)
        found = words_at(step.lists_at + query * size * 8, 1, size)[0]
        for i in range(count):
            ids[query, i] = id_of(found[i])
            scores[query, i] = score_of(found[i])


@njit(parallel=True, nogil=True, cache=True)
def _run_together(descriptor, function, tasks, state_at, collect, workers, ids, scores):
    for worker in prange(workers):
        _run_tasks(descriptor, function, tasks, state_at, worker)
    if atomic_load(state_at + 8) == 0:
        for worker in prange(workers):
            _collect_queries(descriptor, collect, worker, workers, ids, scores)


@njit(nogil=True, cache=True)
def _run_alone(descriptor, function, tasks, state_at, collect, ids, scores):
    """Run on the calling thread, which may hold Python code as a task."""
    _run_tasks(descriptor, function, tasks, state_at, 0)
    if atomic_load(state_at + 8) == 0:
        _collect_queries(descriptor, collect, 0, 1, ids, scores)


def _collect_task(descriptor, query, worker, like):
    """Sort the best candidates of one query to the front of its lists, best first; return their number."""
    like = carray(like, (1, 1))
    step = step_at(descriptor)
    size = step.lists * step.list_words
    found = words_at(step.lists_at + query * size * 8, 1, size)[0]
    floor = atomic_load(step.floors_at + query * 8)
    count = join_lists(step, scratch_of(step, worker), 0, query, step.lists, found, floor, like)
    for i in range(1, count):
        if found[i] > found[i - 1]:  # results of a graph are sorted
            sort_best(found, count)
            break
    return count


def search_range(
    keys: npt.NDArray[Any],
    fmt: Format,
    queries: npt.NDArray[np.float32],
    k: int,
    task_of: Callable[[SearchRequest], CompiledSearch],
) -> SearchResult:
    """Search keys for the best k of each query by the tasks of `task_of`, on the threads that Numba uses.

    keys: (n, width) of dtype fmt.dtype, C-contiguous; n may be 0. queries: (m, head_dim) float32, C-contiguous. The
    result does not depend on the number of threads.
    """
    count = len(queries)
    ids = np.full((count, k), -1, np.int32)
    scores = np.full((count, k), -np.inf, np.float32)
    scanned, best = 0, min(k, len(keys))
    for start in range(0, count if best else 0, MAX_QUERIES):
        rows = slice(start, min(start + MAX_QUERIES, count))
        padded = -(-(rows.stop - start) // TILE_QUERIES) * TILE_QUERIES
        search = task_of(SearchRequest(fmt, rows.stop - start, padded, best, 0, len(keys)))
        scanned += _run(search, keys, fmt, queries[rows], best, ids[rows], scores[rows])
    return SearchResult(ids, scores, scanned)


class _Layout(NamedTuple):
    """Memory of a run. words: its first int64 words, STEP, RANGE and TASK records, with addresses counted from 0.

    addresses: places of these addresses among the words. The other fields are byte offsets.
    """

    words: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    range_at: int
    tiles_at: int
    floors_at: int
    state_at: int
    meters_at: int
    lists_at: int
    nbytes: int


@functools.lru_cache(256)
def _layout(
    count: int, dim: int, k: int, capacity: int, lists: int, threads: int, workers: int, search: CompiledSearch
) -> _Layout:
    """Return the layout for `count` queries of a search of this form, without its addresses."""
    padded = -(-count // TILE_QUERIES) * TILE_QUERIES
    tasks = _tasks(search, count, lists)
    list_words = LIST_HEAD + max(k, search.kept)
    scratch, layout = ScratchLayout(), ScratchLayout()
    offsets = scratch_offsets(scratch, count, padded, k, capacity, lists * list_words, search.scratch)
    stride = scratch.nbytes + CACHE_LINE
    step_at, range_at, tasks_at = (layout.take(n) for n in (STEP.itemsize, RANGE.itemsize, tasks.nbytes))
    tiles_at, floors_at, state_at = (layout.take(n) for n in (4 * padded * dim, 8 * count, CACHE_LINE))
    meters_at, lists_at = layout.take(workers * METER.itemsize), layout.take(8 * count * lists * list_words)
    scratch_at = layout.take(workers * stride)
    addresses = {"ranges_at": range_at, "tasks_at": tasks_at, "tiles_at": tiles_at, "floors_at": floors_at}
    addresses |= {"meters_at": meters_at, "lists_at": lists_at, "scratch_at": scratch_at}
    values = {**offsets, **addresses, "width": threads, "workers": workers, "entries": 1, "queries": count}
    values |= {"padded": padded, "head_dim": dim, "top_k": k, "keep": k, "tasks": len(tasks), "lists": lists}
    values |= {"generation": 1, "list_words": list_words, "scratch_stride": stride, "capacity": capacity}
    words, places = np.zeros(tiles_at // 8, np.int64), word_places(STEP)
    for name, value in values.items():
        words[step_at // 8 + places[name]] = value
    words[places["joined"]] = lists * list_words
    words[tasks_at // 8 : tasks_at // 8 + tasks.size] = tasks.ravel()
    at = np.array([places[name] for name in addresses])
    return _Layout(words, at, range_at, tiles_at, floors_at, state_at, meters_at, lists_at, layout.nbytes)


def _run(
    search: CompiledSearch,
    keys: npt.NDArray[Any],
    fmt: Format,
    queries: npt.NDArray[np.float32],
    k: int,
    ids: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
) -> int:
    """Write the best k keys of each query to ids and scores (queries, k or more); return the scores computed."""
    count, dim = queries.shape
    with kernel_threads(None):
        threads = numba.get_num_threads()
        lists = task_lists(search, count, k, len(keys), TASKS_PER_THREAD * threads if threads > 1 else 1)
        capacity = max(search.capacity, min(2 * k + 64, 2 * len(keys) + 1), k + 1)
        form = search._replace(task=0, index_at=0, alive=(), python=None)
        workers = 1 if search.python is not None else threads
        layout = _layout(count, dim, k, capacity, lists, threads, workers, form)
        memory = _spare.pop() if _spare else None
        if memory is None or memory.nbytes < layout.nbytes:
            memory = aligned_empty((layout.nbytes,), np.uint8)
        base, words = address_of(memory), memory[: layout.lists_at].view(np.int64)
        words[: len(layout.words)] = layout.words
        words[layout.addresses] += base
        words[len(layout.words) : layout.floors_at // 8] = 0
        words[len(layout.words) :].view(np.float32)[: queries.size] = queries.ravel()
        words[layout.floors_at // 8 : layout.state_at // 8] = EMPTY
        words[layout.state_at // 8 :] = 0
        span = layout.range_at // 8
        words[span + _SPAN] = search.task, address_of(keys), len(keys), search.index_at, search.kept
        tasks = int(words[_NUM_TASKS])
        given = base, search.task, tasks, base + layout.state_at, task_address(_collect_task, fmt)
        if workers > 1:
            _run_together(*given, workers, ids, scores)
        else:
            _run_alone(*given, ids, scores)
    if search.python is not None and (error := search.python.take_error()) is not None:
        raise error
    scanned = int(memory[layout.meters_at : layout.lists_at].view(METER)["scanned"].sum())
    if not _spare:
        _spare.append(memory)
    return scanned


_SPAN = np.array([word_places(RANGE)[name] for name in ("search", "keys_at", "high", "index_at", "kept")])
_NUM_TASKS = word_places(STEP)["tasks"]


def _tasks(search: CompiledSearch, queries: int, lists: int) -> npt.NDArray[np.int64]:
    """Return the TASK records of a search as int64 (tasks, fields)."""
    place = task_places(search, queries, lists)
    rows = np.zeros((len(place) + search.first_task, len(TASK.names or ())), np.int64)
    rows[search.first_task :, 2] = place
    rows[search.first_task :, 3] = lists
    rows[search.first_task :, 4] = place // queries if search.by_query else place
    if search.first_task:
        rows[0, 2:4] = -1, 1
    return rows
