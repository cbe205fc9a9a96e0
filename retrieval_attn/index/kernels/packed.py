"""A candidate key as ONE int64: its score in the upper half, its complemented id in the lower.

A larger number is a better key, and of equal scores the lower id wins, so that pools of candidates are sorted,
merged and cut as plain numbers. Scores are either float32 (as order-preserving bits, NaN below -inf) or the int32
sums of coded keys.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import njit

from retrieval_attn.index.kernels.dots import bits_to_float, float_to_bits

EMPTY = np.iinfo(np.int64).min
"""A pool entry that loses against every key."""


@njit(nogil=True, cache=True, inline="always")
def pack_score(score, key_id):
    """Candidate of float32 `score` and `key_id`."""
    bits = float_to_bits(np.float32(score + np.float32(0.0)))  # -0.0 becomes 0.0: they are equal scores
    if bits < 0:
        bits = np.int32(bits ^ np.int32(0x7FFFFFFF))
    if score != score:
        bits = np.int32(-0x80000000)
    return (np.int64(bits) << 32) | (np.int64(0xFFFFFFFF) - np.int64(key_id))


@njit(nogil=True, cache=True)
def score_of(packed):
    """The float32 score of a candidate (another NaN than it was, if it was one)."""
    bits = np.int32(packed >> 32)
    if bits < 0:
        bits = np.int32(bits ^ np.int32(0x7FFFFFFF))
    return bits_to_float(bits)


@njit(nogil=True, cache=True, inline="always")
def pack_sum(total, key_id):
    """Candidate of an int32 sum of products and `key_id`."""
    return (np.int64(total) << 32) | (np.int64(0xFFFFFFFF) - np.int64(key_id))


@njit(nogil=True, cache=True, inline="always")
def id_of(packed):
    """The id of a candidate, int64."""
    return np.int64(0xFFFFFFFF) - (packed & np.int64(0xFFFFFFFF))


@njit(nogil=True, cache=True)
def keep_best(pool, count, k):
    """Reorder pool[:count] (distinct numbers, count >= k) so that the k largest come first, the k-th at k - 1."""
    low = 0
    high = count - 1
    target = k - 1
    while low < high:
        middle = (low + high) >> 1
        a = pool[low]
        b = pool[middle]
        c = pool[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i = low
        j = high
        while i <= j:
            while pool[i] > pivot:
                i += 1
            while pool[j] < pivot:
                j -= 1
            if i <= j:
                pool[i], pool[j] = pool[j], pool[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            return


@njit(nogil=True, cache=True)
def sort_best(pool, count):
    """Sort pool[:count] in place, largest first; allocates nothing (heap sort of a small array)."""
    for start in range(count // 2 - 1, -1, -1):
        _sift(pool, start, count)
    for end in range(count - 1, 0, -1):
        pool[0], pool[end] = pool[end], pool[0]
        _sift(pool, 0, end)


@njit(nogil=True, cache=True)
def _sift(pool, node, count):
    """Restore the heap (smallest on top) below `node`."""
    value = pool[node]
    while True:
        child = 2 * node + 1
        if child >= count:
            break
        if child + 1 < count and pool[child + 1] < pool[child]:
            child += 1
        if value <= pool[child]:
            break
        pool[node] = pool[child]
        node = child
    pool[node] = value
