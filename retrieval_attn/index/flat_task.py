"""Search tasks over all keys of a range: exact, and by codes."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import Codes, encode_query_rows
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.kernels.scan import BOUND_WORDS, compiled_columns, scan_codes, scan_exact
from retrieval_attn.index.task.atomics import at_address, atomic_load, bytes_of_row, rows_at
from retrieval_attn.index.task.descriptor import count_cost, floats_at, step_at, words_at
from retrieval_attn.index.task.search import CODED_TOKENS, CompiledSearch, SearchRequest, address_of, record
from retrieval_attn.index.task.tasks import (
    hand_in,
    hand_in_codes,
    lists_of,
    part_of,
    range_at,
    scratch_of,
    task_address,
    task_at,
    tiles_of,
)

_WORD = np.int64
CODED = np.dtype(
    [
        ("codes_at", _WORD),  # uint8 (rows, width)
        ("rows", _WORD),
        ("width", _WORD),
        ("mean_at", _WORD),  # float32 (head_dim,)
        ("scale_at", _WORD),  # float32 (head_dim,)
        ("first", _WORD),  # token of the key with id 0
        ("kept", _WORD),
    ]
)


@njit(nogil=True, cache=True)
def _scan_keys(descriptor, number, worker, like):
    """Exact search of one part of a range for all queries of its entry."""
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    queries, dim = step.queries, step.head_dim
    start, stop = part_of(span.low, span.high, task)
    keys = rows_at(span.keys_at, span.high, dim, like)
    tiles = tiles_of(step, task.entry)
    scratch = scratch_of(step, worker)
    pool = words_at(scratch + step.pool_at, queries, step.capacity)
    floors = carray(at_address(scratch + step.bars_at), queries, np.int64)
    for query in range(queries):
        # what other parts found already counts here: fewer keys have to be kept
        floor = atomic_load(step.floors_at + (task.entry * queries + query) * 8)
        floors[query] = EMPTY if floor == EMPTY else floor + span.first
    counts = carray(at_address(scratch + step.counts_at), queries, np.int64)
    bounds = carray(at_address(scratch + step.bounds_at), queries, np.float32)
    scores = floats_at(scratch + step.tile_at, step.padded, compiled_columns(step.padded))
    scan_exact(keys, tiles, queries, start, stop, step.top_k, pool, counts, floors, bounds, scores)
    for query in range(queries):
        hand_in(pool[query], step.top_k, span.first, step, task.entry, query, lists[query])
    count_cost(step, worker, (stop - start) * queries, (stop - start) * bytes_of_row(like, dim))
    return np.int64(0)


def _coded_rows(row, span, dim, like):
    """The codes that a coded scan goes through: the index's own, or rows of int8 as they are stored."""


@overload(_coded_rows)
def _choose_coded_rows(row, span, dim, like):
    if like.dtype == types.int8:
        return lambda row, span, dim, like: rows_at(span.keys_at, span.high, dim, like)
    return lambda row, span, dim, like: carray(at_address(row.codes_at), (row.rows, row.width), np.uint8)


@njit(nogil=True, cache=True)
def _scan_codes(descriptor, number, worker, like):
    """Scan of the codes of one part of a range for all queries of its entry; exact scores come when all are in."""
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    queries, dim, padded = step.queries, step.head_dim, step.padded
    row = carray(at_address(span.index_at), 1, CODED)[0]
    start, stop = part_of(span.low - row.first, span.high - row.first, task)
    scratch = scratch_of(step, worker)
    codes = _coded_rows(row, span, dim, like)
    planes = carray(at_address(scratch + step.own_at), (padded, 1, row.width), np.int8)
    steps = floats_at(scratch + step.steps_at, 2, padded)
    mean, scale = floats_at(row.mean_at, 1, dim)[0], floats_at(row.scale_at, 1, dim)[0]
    encode_query_rows(tiles_of(step, task.entry), mean, scale, planes, steps[0], steps[1])
    pool = words_at(scratch + step.pool_at, queries, step.capacity)
    counts = carray(at_address(scratch + step.counts_at), queries, np.int64)
    bounds = carray(at_address(scratch + step.bounds_at), (padded // TILE_QUERIES, BOUND_WORDS), np.int32)
    sums = carray(at_address(scratch + step.tile_at), (4, 16), np.int32)
    scan_codes(codes, planes, queries, start, stop, row.kept, pool, counts, bounds, sums)
    counts[:] = min(row.kept, stop - start)
    hand_in_codes(pool, counts, start, stop, row.first, steps[1], step, task, span, lists, like)
    count_cost(step, worker, (stop - start) * queries, (stop - start) * codes.strides[0])
    return np.int64(0)


def _keys_task(descriptor, number, worker, like):
    return _scan_keys(descriptor, number, worker, carray(like, (1, 1)))


def _codes_task(descriptor, number, worker, like):
    return _scan_codes(descriptor, number, worker, carray(like, (1, 1)))


def exact_search(fmt: Format) -> CompiledSearch:
    """The scan of a range's stored keys: for ranges without an index, and where it is faster than the index."""
    return CompiledSearch(task_address(_keys_task, fmt))


def prepare_codes(fmt: Format) -> None:
    """Compile the scan of codes, or load it."""
    task_address(_codes_task, fmt)


def coded_search(request: SearchRequest, codes: Codes, stored: bool, kept: int) -> CompiledSearch:
    """The scan of `codes`, of whose best `kept` get an exact score. stored: the keys themselves serve as codes."""
    row = record(
        CODED,
        1,
        codes_at=codes.codes,
        rows=codes.codes.shape[0],
        width=codes.codes.shape[1],
        mean_at=codes.mean,
        scale_at=codes.scale,
        first=0 if stored else request.first,  # rows of stored keys are the tokens of the range
        kept=kept,
    )
    return CompiledSearch(
        task_address(_codes_task, request.fmt),
        address_of(row),
        part_tokens=CODED_TOKENS,
        kept=kept,
        capacity=2 * kept + 64,
        scratch=request.padded * codes.codes.shape[1],
        alive=(row, codes),
    )
