"""The last task of a step for one query: join the candidates that were found, keep the best k, attend to them.

The search has computed the scores, so keys are not read again. `step` documents the words of a table entry.

Where an entry has clusters, keys that are not attended to are estimated. Of cluster c, `left` keys were not attended
to. Each counts as much as the others do on average, u, and has the mean value of those that are left: so a cluster adds
u * left to the sum of weights and u * (sum of its values - values of its attended keys) to the weighted sum. The last
difference needs no reading: an attended key of weight e gets the weight e - u. If all keys are attended to, nothing is
estimated; keys that are all equal give the mean of all values.

u is the mean exponential of the scores of some keys of the cluster, its samples, as far as they are below all scores
that were attended to: the others were attended to themselves. The score of the mean key counts as PRIOR samples more,
and alone where there are none; by itself it is too low, for an exponential is convex.

The idea of one weight per cluster of keys is that of Clustered Attention (Vyas et al. 2020, section 3.2), there for
queries. Scores are soft-capped as those of keys are. Sums of weights are float64, the rest float32, in a fixed order.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from retrieval_attn.cpu.cluster_sums import score_samples
from retrieval_attn.cpu.gather import (
    AHEAD_OF_SOFTMAX,
    attend_rows,
    exp,
    exponentiate,
    prefetch_at,
    scale_scores,
    sum_rows,
    total_of,
)
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

PRIOR = np.float32(4.0)
"""Samples that the mean key stands for: few samples say little. KL on code at 8K, 16 samples of each of 64 clusters:
.0018 with 4, .0026 with none; by mean keys alone .0070."""

STEEPNESS = np.float32(10.0)
"""A sample counts as a whole from a tenth of a logit below the least score on, and less nearer to it: a sum that it
enters or leaves as a whole would jump with the last bit of a score. One that was attended to has the least score at
least, up to rounding, and counts nothing."""


@njit(nogil=True, cache=True, fastmath={"contract"})
def score_means(query, means, scores):
    """scores (clusters,) = means.T @ query; query (head_dim,), means (head_dim, clusters)."""
    scores[:] = np.float32(0.0)
    for j in range(means.shape[0]):
        number = query[j]
        for c in range(scores.shape[0]):
            scores[c] += number * means[j, c]


@njit(nogil=True, cache=True, fastmath={"contract"})
def add_sums(weights, sums, out):
    """out (value_dim,) += weights (clusters,) @ sums (clusters, value_dim)."""
    for c in range(weights.shape[0]):
        weight = weights[c]
        if weight != 0.0:  # NaN, too
            for j in range(out.shape[0]):
                out[j] += weight * sums[c, j]


@njit(nogil=True, cache=True, inline="always")
def _part_of_sample(logit, least, shift):
    """How much of a sample counts, see STEEPNESS, and its weight relative to exp(shift)."""
    inside = max(np.float32(0.0), min(np.float32(1.0), (least - logit) * STEEPNESS))
    return inside, inside * exp(min(logit - shift, np.float32(0.0)))


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})  # divisions that may raise are not vectorised
def _weigh_clusters(weights, left, sampled, least, shift):
    """weights (clusters,), logits of mean keys: overwritten by what a key that is left weighs, relative to exp(shift).

    sampled (number * clusters,): logits of samples, of which those below `least` count, see STEEPNESS; overwritten, the
    i-th of all clusters before those after it. Returns the sum over all keys that are left.
    """
    clusters = left.shape[0]
    number = sampled.shape[0] // clusters
    for c in range(clusters):
        weights[c] = exp(min(weights[c] - shift, np.float32(0.0)))
    if number > 0:
        counts = sampled[:clusters]
        for c in range(clusters):
            inside, weight = _part_of_sample(sampled[c], least, shift)
            weights[c] = weights[c] * PRIOR + weight
            counts[c] = PRIOR + inside
        for i in range(1, number):
            logits = sampled[i * clusters : (i + 1) * clusters]
            for c in range(clusters):
                inside, weight = _part_of_sample(logits[c], least, shift)
                weights[c] += weight
                counts[c] += inside
        for c in range(clusters):
            weights[c] /= counts[c]
    for c in range(clusters):
        weights[c] = weights[c] if left[c] > 0 else np.float32(0.0)
    return _sum_left(weights, left)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum_left(weights, left):
    """Sum of weights * left (clusters,) in float64."""
    total = 0.0
    for c in range(left.shape[0]):
        total += np.float64(weights[c]) * np.float64(left[c])
    return total


@njit(nogil=True, cache=True)
def attend_and_estimate(like, rows, scores, count, owners, scale, softcap, left, weights, sampled, sums, out):
    """Attend as `gather.attend_rows`, with estimates for the keys `left`; return the lse and the share of estimates.

    owners (at least count,) int16: the cluster of each row, -1 for none. left (clusters,) float32: keys that are no
    rows. weights (clusters,) and sampled (number * clusters,): inner products of the query and the mean keys, and the
    samples, overwritten. sums (clusters, value_dim): of the values of all keys, rows among them. The share of the
    weights that is estimated lies in [0, 1]; 0 where nothing is left.
    """
    for i in range(min(AHEAD_OF_SOFTMAX, count)):
        prefetch_at(rows[i], bytes_of_row(like, out.shape[0]))
    clusters = left.shape[0]
    top = scale_scores(scores, count, scale, softcap)
    scale_scores(weights, clusters, scale, softcap)
    scale_scores(sampled, sampled.shape[0], scale, softcap)
    least = np.float32(np.inf)
    for i in range(count):
        least = min(least, scores[i])
    for c in range(clusters):
        if left[c] > 0:
            top = max(top, weights[c])
    # with nothing attended to, samples may be above all; otherwise they are not counted there
    if count == 0:
        for i in range(sampled.shape[0]):
            top = max(top, sampled[i])
    shift = top if top > -np.inf else np.float32(0.0)  # all -inf: -inf - -inf would be NaN
    exponentiate(scores, count, shift)
    estimated = _weigh_clusters(weights, left, sampled, least, shift)
    total = total_of(scores, count) + estimated
    if total == 0.0:
        out[:] = np.float32(0.0)
        return np.float32(-np.inf), np.float32(0.0)
    for i in range(count):
        if owners[i] >= 0:
            scores[i] -= weights[owners[i]]
    sum_rows(like, rows, scores, count, out)
    add_sums(weights, sums, out)
    inverse = np.float32(1.0 / total)
    for j in range(out.shape[0]):
        out[j] *= inverse
    return np.float32(np.float64(shift) + math.log(total)), np.float32(estimated / total)


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
