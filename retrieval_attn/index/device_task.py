"""The search task of keys that a device names: exact scores for the candidates of one query.

The ids lie where the device wrote them before it called the host.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.gathered import score_gathered
from retrieval_attn.index.kernels.packed import keep_best, pack_score
from retrieval_attn.index.task.atomics import at_address, bytes_of_row, rows_at
from retrieval_attn.index.task.descriptor import (
    ALL_KEPT,
    LIST_COUNT,
    LIST_HEAD,
    LIST_RANGE,
    count_cost,
    step_at,
    words_at,
)
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest, address_of, record
from retrieval_attn.index.task.tasks import (
    hand_in,
    lists_of,
    query_of,
    range_at,
    scan_alone,
    scratch_of,
    task_address,
    task_at,
)

MAX_PARTS = 4
"""Tasks that the candidates of one query are cut into at most."""

_WORD = np.int64
CANDIDATES = np.dtype(
    [
        ("ids_at", _WORD),  # int32 (queries, room), -1 for none
        ("room", _WORD),
        ("first", _WORD),  # token of the key with id 0
        ("needed", _WORD),  # candidates of a query that there must be
        ("keeps_all", _WORD),  # 1: all are attended to
    ]
)


@njit(nogil=True, cache=True)
def _score_candidates(descriptor, number, worker, like):
    """The best of a part of the candidates of one query; of all keys, where there are too few."""
    step = step_at(descriptor)
    task = task_at(step, number)
    span, lists = range_at(step, task.range), lists_of(step, task)
    query, part = task.part % step.queries, task.part // step.queries
    row = carray(at_address(span.index_at), 1, CANDIDATES)[0]
    room, first = row.room, row.first
    ids = carray(at_address(row.ids_at + query * room * 4), room, np.int32)
    own = query_of(step, task.entry, query)
    keys = rows_at(span.keys_at, span.high, step.head_dim, like)
    limit = span.high - first
    scratch = scratch_of(step, worker)
    pool = words_at(scratch + step.pool_at, 1, step.capacity)[0]
    enough = ids[min(row.needed, limit) - 1] >= 0  # not for a query that is not finite, say
    start, stop = room * part // task.parts, room * (part + 1) // task.parts
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
            lists[query][LIST_HEAD + i] = pool[i] - span.first
        lists[query][LIST_COUNT], lists[query][LIST_RANGE] = count, ALL_KEPT
        count_cost(step, worker, scored, scored * bytes_of_row(like, step.head_dim))
        return np.int64(0)
    if not enough:
        count = np.int64(0)
        if part == 0:  # once for the query, whatever its other parts found
            count = scan_alone(own, keys, span.low, span.high, step.top_k, pool)
            scored += limit
    elif count > step.top_k:
        keep_best(pool, count, step.top_k)
        count = step.top_k
    hand_in(pool, count, span.first, step, task.entry, query, lists[query])
    count_cost(step, worker, scored, scored * bytes_of_row(like, step.head_dim))
    return np.int64(0)


def _candidates_task(descriptor, number, worker, like):
    return _score_candidates(descriptor, number, worker, carray(like, (1, 1)))


def prepare_candidates(fmt: Format) -> None:
    """Compile the task, or load it."""
    task_address(_candidates_task, fmt)


def candidate_search(
    request: SearchRequest, ids: npt.NDArray[np.int32], needed: int, *, keeps_all: bool = False
) -> CompiledSearch:
    """Exact scores for the keys in ids (queries, room) int32; of all keys for a query with less than `needed`.

    Where there is room for fewer, that many are needed. keeps_all: every key in ids is attended to.
    """
    room = ids.shape[1]
    sizes = {"room": room, "first": request.first, "needed": min(needed, room), "keeps_all": int(keeps_all)}
    row = record(CANDIDATES, 1, ids_at=ids, **sizes)
    return CompiledSearch(
        task_address(_candidates_task, request.fmt),
        address_of(row),
        by_query=True,
        max_parts=MAX_PARTS,
        capacity=ids.shape[1],
        scratch=4 * ids.shape[1],
        alive=(row, ids),
    )
