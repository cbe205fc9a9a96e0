"""The search task of a piece whose candidates a device names: exact scores for those of one query.

What the words mean is laid out in `step`. The ids lie where the device wrote them before it called the host.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from retrieval_attn.cpu.atomics import at_address
from retrieval_attn.cpu.gather import bytes_of_row
from retrieval_attn.cpu.step import descriptor as at
from retrieval_attn.cpu.step.descriptor import count_cost, floats_at, task_in_format, words_at
from retrieval_attn.cpu.step.search_tasks import hand_in, scan_alone, task_of
from retrieval_attn.cpu.stored_rows import rows_at
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import dot, prefetch_row
from retrieval_attn.index.kernels.packed import keep_best, pack_score

AHEAD = 24
"""Candidates whose keys are asked for before they are scored."""


@njit(nogil=True, cache=True)
def _score_given(descriptor, number, worker, like):
    """The best of a part of the candidates of one query; of all keys, where the device named too few."""
    step, task, piece, lists = task_of(descriptor, number)
    entry, query = task[at.TASK_ENTRY], task[at.TASK_PART] % step[at.QUERIES]
    part, parts = task[at.TASK_PART] // step[at.QUERIES], task[at.TASK_PARTS]
    top_k, dim = step[at.TOP_K], step[at.HEAD_DIM]
    row = words_at(piece[at.INDEX], 1, at.GRAPH_WORDS)[0]
    room, origin = row[at.ROOM], row[at.GRAPH_FIRST]
    given = carray(at_address(row[at.IDS] + query * room * 4), room, np.int32)
    own = floats_at(step[at.TILES_AT] + (entry * step[at.PADDED] + query) * dim * 4, 1, dim)
    keys = rows_at(piece[at.KEYS], piece[at.HIGH], dim, like)
    limit = piece[at.HIGH] - origin
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    pool = words_at(scratch + step[at.SCAN_AT], 1, step[at.CAPACITY])[0]
    enough = given[min(row[at.KEPT], limit) - 1] >= 0  # not for a query that is not finite, say
    start, stop = room * part // parts, room * (part + 1) // parts
    for i in range(start, min(start + AHEAD, stop)):
        if 0 <= given[i] < limit:
            prefetch_row(keys, origin + given[i])
    count = np.int64(0)
    for i in range(start, stop):
        if i + AHEAD < stop and 0 <= given[i + AHEAD] < limit:
            prefetch_row(keys, origin + given[i + AHEAD])
        if 0 <= given[i] < limit:
            token = origin + given[i]
            pool[count] = pack_score(dot(own, 0, keys, token), token)
            count += 1
    scored = count
    if not enough:
        count = np.int64(0)
        if part == 0:
            count = scan_alone(own, keys, piece[at.LOW], piece[at.HIGH], top_k, pool)
            scored += limit
    elif count > top_k:
        keep_best(pool, count, top_k)
        count = top_k
    hand_in(pool, count, top_k, piece[at.FIRST], step, entry, query, lists[query])
    count_cost(step, worker, scored, scored * bytes_of_row(like, dim))
    return np.int64(0)


def _given_float32(descriptor, task, worker):
    return _score_given(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _given_bfloat16(descriptor, task, worker):
    return _score_given(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _given_float16(descriptor, task, worker):
    return _score_given(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _given_int8(descriptor, task, worker):
    return _score_given(descriptor, task, worker, carray(at_address(descriptor), (1, 1), np.int8))


@functools.cache
def given_task(fmt: Format) -> int:
    """Address of the function that scores named keys in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _given_float32, _given_bfloat16, _given_float16, _given_int8)
