"""The last task of a step for one query: join the candidates that were found, keep the best k, attend to them.

Scores come from the search, so keys are not read again. Where the entry has clusters, what is not attended to is
estimated (`estimate.py`). What the words mean is laid out in `step`.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import carray, njit

from retrieval_attn.cpu.cluster_sums import score_samples
from retrieval_attn.cpu.gather import attend_rows
from retrieval_attn.cpu.step.estimate import attend_and_estimate, score_means
from retrieval_attn.cpu.step.run import BAD_ID
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.packed import id_of, keep_best, score_of
from retrieval_attn.index.task.atomics import at_address, atomic_load, bytes_of_row
from retrieval_attn.index.task.tasks import (
    ENTRY,
    RANGE,
    count_cost,
    floats_at,
    join_lists,
    query_of,
    scratch_of,
    step_at,
    task_address,
)


@njit(nogil=True, cache=True)
def _sort_by_id(found, other, count, digits):
    """Sort packed candidates found[:count] by id, lowest first; returns whether the result lies in `other` instead.

    Each byte of the ids in turn, lowest first. digits: (256,) int64 scratch.
    """
    most = np.int64(0)
    for i in range(count):
        most = max(most, id_of(found[i]))
    moved = False
    shift = 0
    while most >> shift:
        digits[:] = 0
        for i in range(count):
            digits[(id_of(found[i]) >> shift) & 255] += 1
        start = np.int64(0)
        for digit in range(256):
            start, digits[digit] = start + digits[digit], start
        for i in range(count):
            digit = (id_of(found[i]) >> shift) & 255
            other[digits[digit]] = found[i]
            digits[digit] += 1
        found, other = other, found
        moved = not moved
        shift += 8
    return moved


def _task(descriptor, number, worker, like):
    """Attend to the best candidates of query `number` of all; returns an error code."""
    like = carray(like, (1, 1))
    step = step_at(descriptor)
    scratch = scratch_of(step, worker)
    entry = number // step.queries
    table = carray(at_address(step.entries_at), step.entries, ENTRY)[entry]
    queries, top_k, value_dim = step.queries, step.top_k, step.value_dim
    out = floats_at(step.out_at, step.entries * queries, value_dim)[number]
    lse = floats_at(step.lse_at, step.entries * queries, 1)
    owners = carray(at_address(scratch + step.owners_at), top_k, np.int16)
    left = carray(at_address(scratch + step.left_at), table.clusters, np.float32)
    if table.clusters > 0:
        left[:] = carray(at_address(table.counts_at), table.clusters, np.float32)
    size = step.lists * step.list_words
    found = carray(at_address(step.lists_at + number * size * 8), size, np.int64)
    floor = atomic_load(step.floors_at + number * 8)
    count = join_lists(step, scratch, entry, number % queries, table.lists, found, floor, like)
    if table.budgets_at != 0:
        own_k = carray(at_address(table.budgets_at), queries, np.int64)[number % queries]
        if count > own_k:
            keep_best(found, count, own_k)
            count = own_k
    rows = carray(at_address(scratch + step.rows_at), top_k, np.int64)
    scores = carray(at_address(scratch + step.scores_at), top_k, np.float32)
    # one order, whatever the order of finding was, or sums would differ; and neighbours in memory come together
    digits = carray(at_address(scratch + step.digits_at), 256, np.int64)
    if _sort_by_id(found, rows, count, digits):
        found = rows
    first, last = table.first_range, table.first_range + table.ranges
    ranges = carray(at_address(step.ranges_at), last, RANGE)
    row_bytes = bytes_of_row(like, value_dim)
    own = first
    for i in range(count):
        key = id_of(found[i])
        token = key - ranges[own].first
        if token < ranges[own].low or token >= ranges[own].high:  # mostly the same range as before
            for own in range(first, last):
                token = key - ranges[own].first
                if ranges[own].low <= token < ranges[own].high:
                    break
            else:
                out[:] = np.float32(np.nan)
                lse[number, 0] = np.float32(np.nan)
                return np.int64(BAD_ID)
        scores[i] = score_of(found[i])
        rows[i] = ranges[own].values_at + token * row_bytes  # may be where found[i] lay
        if table.clusters > 0:
            owners[i] = -1
            if ranges[own].members_at != 0:
                owners[i] = carray(at_address(ranges[own].members_at + token), 1, np.uint8)[0]
                left[owners[i]] -= np.float32(1.0)
    share = np.float32(0.0)
    if table.clusters > 0:
        weights = carray(at_address(scratch + step.weights_at), table.clusters, np.float32)
        means = floats_at(table.means_at, step.head_dim, table.clusters)
        score_means(query_of(step, entry, number % queries)[0], means, weights)
        sums = floats_at(table.sums_at, table.clusters, value_dim)
        sampled = carray(at_address(scratch + step.sampled_at), table.columns, np.float32)
        if table.columns > 0:
            score_samples(query_of(step, entry, number % queries)[0], table.samples_at, sampled)
            sampled = sampled[: table.clusters * table.sampled]
        lse[number, 0], share = attend_and_estimate(
            like, rows, scores, count, owners, step.scale, step.softcap, left, weights, sampled, sums, out
        )
    else:
        lse[number, 0] = attend_rows(like, rows, scores, count, step.scale, step.softcap, out)
    floats_at(step.rest_at, step.entries * queries, 1)[number, 0] = share
    count_cost(step, worker, 0, count * row_bytes)
    return np.int64(0)


def attend_task(fmt: Format) -> int:
    """Address of the function that attends to values in `fmt`; compiled, or loaded, on first use."""
    return task_address(_task, fmt)
