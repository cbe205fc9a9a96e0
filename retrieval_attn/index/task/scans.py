"""Search tasks over all keys of a range, exact or by codes, and over candidates that were selected elsewhere.

`candidate_search` scores ids that are in memory before the step runs, as a device writes them; `called_search` calls a
Python function for the ids, which is how a kind without compiled code is searched.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.extending import overload

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import Codes, encode_query_rows
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_gathered
from retrieval_attn.index.kernels.packed import EMPTY, keep_best, pack_score
from retrieval_attn.index.kernels.scan import BOUND_WORDS, compiled_columns, scan_codes, scan_exact
from retrieval_attn.index.task.atomics import at_address, atomic_load, bytes_of_row, call_task, rows_at
from retrieval_attn.index.task.search import (
    CODED_TOKENS,
    CandidateFunction,
    CompiledSearch,
    PythonSearch,
    SearchRequest,
    address_of,
    record,
)
from retrieval_attn.index.task.tasks import (
    ALL_KEPT,
    LIST_COUNT,
    LIST_HEAD,
    LIST_RANGE,
    count_cost,
    floats_at,
    hand_in,
    hand_in_codes,
    lists_of,
    part_of,
    query_of,
    range_at,
    scan_alone,
    scratch_of,
    step_at,
    task_address,
    task_at,
    tiles_of,
    words_at,
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


def _keys_task(descriptor, number, worker, like):
    """Exact search of one part of a range for all queries of its entry."""
    like = carray(like, (1, 1))
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


def _codes_task(descriptor, number, worker, like):
    """Scan of the codes of one part of a range for all queries of its entry; exact scores come when all are in."""
    like = carray(like, (1, 1))
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


def exact_search(fmt: Format) -> CompiledSearch:
    """The scan of a range's stored keys: for ranges without an index, and where it is faster than the index."""
    return CompiledSearch(task_address(_keys_task, fmt))


def compile_coded_search(fmt: Format) -> None:
    """Compile the scan of codes, or load it."""
    task_address(_codes_task, fmt)


def coded_search(request: SearchRequest, codes: Codes, stored: bool, kept: int) -> CompiledSearch:
    """The scan of `codes`, of whose best `kept` get an exact score. stored: the keys themselves serve as codes."""
    row = record(
        CODED,
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


MAX_PARTS = 4
"""Tasks that the candidates of one query are cut into at most."""

CANDIDATES = np.dtype(
    [
        ("ids_at", _WORD),  # int32 (queries, room), -1 for none
        ("room", _WORD),
        ("first", _WORD),  # token of the key with id 0
        ("needed", _WORD),  # candidates of a query that there must be
        ("keeps_all", _WORD),  # 1: all are attended to
        ("function", _WORD),  # address of a function that writes the ids: see `PythonSearch`
        ("scanned_at", _WORD),  # int64: scores that it computed
    ]
)


@njit(nogil=True, cache=True)
def _score_part(step, worker, entry, query, part, parts, span, found, like):
    """Write the best of a part of one query's candidates to the list `found`, of all keys if there are too few.

    Returns the scores computed.
    """
    row = carray(at_address(span.index_at), 1, CANDIDATES)[0]
    room, first = row.room, row.first
    ids = carray(at_address(row.ids_at + query * room * 4), room, np.int32)
    own = query_of(step, entry, query)
    keys = rows_at(span.keys_at, span.high, step.head_dim, like)
    limit = span.high - first
    scratch = scratch_of(step, worker)
    pool = words_at(scratch + step.pool_at, 1, step.capacity)[0]
    enough = ids[min(row.needed, limit) - 1] >= 0  # not for a query that is not finite, say
    start, stop = room * part // parts, room * (part + 1) // parts
    scores = carray(at_address(scratch + step.own_at), room, np.float32)
    count = np.int64(0)
    for i in range(start, stop):
        if 0 <= ids[i] < limit:
            pool[count] = first + ids[i]
            count += 1
    score_gathered(own, 0, keys, pool, count, scores)
    for i in range(count):
        pool[i] = pack_score(scores[i], pool[i])
    scored = count
    if enough and row.keeps_all != 0:
        for i in range(count):
            found[LIST_HEAD + i] = pool[i] - span.first
        found[LIST_COUNT], found[LIST_RANGE] = count, ALL_KEPT
        return scored
    if not enough:
        count = np.int64(0)
        if part == 0:  # once for the query, whatever its other parts found
            count = scan_alone(own, keys, span.low, span.high, step.top_k, pool)
            scored += limit
    elif count > step.top_k:
        keep_best(pool, count, step.top_k)
        count = step.top_k
    hand_in(pool, count, span.first, step, entry, query, found)
    return scored


def _candidates_task(descriptor, number, worker, like):
    """Score a part of the candidates of one query."""
    like = carray(like, (1, 1))
    step = step_at(descriptor)
    task = task_at(step, number)
    query, part = task.part % step.queries, task.part // step.queries
    span, lists = range_at(step, task.range), lists_of(step, task)
    scored = _score_part(step, worker, task.entry, query, part, task.parts, span, lists[query], like)
    count_cost(step, worker, scored, scored * bytes_of_row(like, step.head_dim))
    return np.int64(0)


def _called_task(descriptor, number, worker, like):
    """Call the function for the candidates of all queries of an entry, and score them."""
    like = carray(like, (1, 1))
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    row = carray(at_address(span.index_at), 1, CANDIDATES)[0]
    queries_at = step.tiles_at + task.entry * step.padded * step.head_dim * 4
    code = call_task(row.function, queries_at, span.high - row.first, step.width)
    if code != 0:
        for query in range(step.queries):  # the attend tasks still read the lists
            lists[query][LIST_COUNT], lists[query][LIST_RANGE] = 0, -1
        return code
    scored = np.int64(0)
    for query in range(step.queries):
        scored += _score_part(step, worker, task.entry, query, 0, 1, span, lists[query], like)
    scanned = words_at(row.scanned_at, 1, 1)[0, 0]
    count_cost(step, worker, scanned, scored * bytes_of_row(like, step.head_dim))
    return np.int64(0)


def compile_candidate_search(fmt: Format) -> None:
    """Compile the task, or load it."""
    task_address(_candidates_task, fmt)


def candidate_search(
    request: SearchRequest, ids: npt.NDArray[np.int32], needed: int, *, keeps_all: bool = False
) -> CompiledSearch:
    """Exact scores for the keys in ids (queries, room) int32; of all keys for a query with less than `needed`.

    Where there is room for fewer, that many are needed. keeps_all: every key in ids is attended to.
    """
    if request.hidden:
        return exact_search(request.fmt)
    room = ids.shape[1]
    sizes = {"room": room, "first": request.first, "needed": min(needed, room), "keeps_all": int(keeps_all)}
    row = record(CANDIDATES, ids_at=ids, **sizes)
    return CompiledSearch(
        task_address(_candidates_task, request.fmt),
        address_of(row),
        by_query=True,
        max_parts=MAX_PARTS,
        capacity=ids.shape[1],
        scratch=4 * ids.shape[1],
        alive=(row, ids),
    )


def called_search(request: SearchRequest, head_dim: int, room: int, function: CandidateFunction) -> CompiledSearch:
    """Exact scores for the keys that `function` selects, up to `room` a query.

    A query with fewer candidates than it asks for keys is answered by a scan of all keys. The function runs on a worker
    thread with the GIL, so such a search is not part of a CUDA graph.
    """
    if request.hidden:
        return exact_search(request.fmt)
    python = PythonSearch(function, request.queries, head_dim, room)
    sizes = {"room": python.ids.shape[1], "first": request.first, "needed": request.k}
    row = record(
        CANDIDATES, ids_at=python.ids, function=python.address, scanned_at=python.scanned, keeps_all=0, **sizes
    )
    return CompiledSearch(
        task_address(_called_task, request.fmt),
        address_of(row),
        part_tokens=2**62,
        capacity=python.ids.shape[1],
        scratch=4 * python.ids.shape[1],
        alive=(row,),
        python=python,
    )
