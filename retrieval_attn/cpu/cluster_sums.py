"""Sums of clusters over tokens that come or go, and the clusters that they join: compiled, all heads in one call.

A window that is full moves its oldest tokens in the middle of a step, for every row and layer. Without Python's lock.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.kernels.dots import TILE_QUERIES, scale_of, score_tile, widen

TILE_TOKENS = 64
"""Tokens whose keys stay in a near cache while all clusters are tried."""

Floats = npt.NDArray[np.float32]


def count_tokens(
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    members: npt.NDArray[np.uint8],
    span: tuple[int, int],
    sign: float,
    fmt: Format,
    sums: tuple[Floats, Floats, Floats],
) -> npt.NDArray[np.bool_]:
    """Add tokens span[0] .. span[1] to the sums of their clusters, or take them off (sign -1).

    They are added up one after the other, their sums then to those of all: what is small is not added to what is large.
    keys (heads, tokens, head_dim), values (heads, tokens, value_dim) as stored, members (heads, tokens) uint8, all
    C-contiguous. sums: counts (heads, C), of keys (heads, C, head_dim), of values (heads, C, value_dim), float32,
    written to. Returns (heads, C) bool: the clusters that are others now.
    """
    changed = np.zeros(sums[0].shape, np.bool_)
    own = tuple(np.zeros(one.shape, np.float32) for one in sums)
    _count(_bits(keys, fmt), _bits(values, fmt), members, span[0], span[1], np.float32(sign), own, changed)
    _add(changed, own, (sums[0], sums[1], sums[2]))
    return changed


def fill_table(
    changed: npt.NDArray[np.bool_], sums: tuple[Floats, Floats, Floats], table: tuple[Floats, Floats, Floats]
) -> None:
    """Write the clusters in `changed` (heads, C) into a table: counts, mean keys (heads, head_dim, C), sums of values.

    sums: as in `count_tokens`. All float32, C-contiguous.
    """
    _fill(changed, *sums, *table)


def nearest_clusters(
    keys: npt.NDArray[Any],
    span: tuple[int, int],
    fmt: Format,
    probes: Floats,
    offsets: Floats,
    found: npt.NDArray[np.uint8],
) -> None:
    """found[:, span[0] : span[1]] (heads, tokens) = the cluster of each of these keys (heads, tokens, head_dim).

    probes (heads, C, head_dim) and offsets (heads, C) float32: that of the largest probe . key + offset, the first of
    equal ones. C: a multiple of TILE_QUERIES.
    """
    _nearest(_bits(keys, fmt), *span, probes, offsets, found)


def prepare_sums(fmt: Format) -> None:
    """Compile all of these for keys in `fmt`, or load them."""
    rows = from_float32(np.zeros((1, 1, 4), np.float32), fmt)
    probes, found = np.zeros((1, TILE_QUERIES, 4), np.float32), np.zeros((1, 1), np.uint8)
    nearest_clusters(rows, (0, 1), fmt, probes, probes[:, :, 0].copy(), found)
    sums = probes[:, :, 0].copy(), probes.copy(), probes.copy()
    changed = count_tokens(rows, rows, found, (0, 1), 1, fmt, sums)
    fill_table(changed, sums, (sums[0].copy(), np.zeros((1, 4, TILE_QUERIES), np.float32), probes.copy()))


def _bits(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[Any]:
    """As kernels tell formats apart; int8 with the bytes of its steps, so that the array is contiguous."""
    return array.view(np.int16) if fmt is Format.FLOAT16 else array


@njit(nogil=True, cache=True)
def _count(keys, values, members, low, high, sign, sums, changed):
    counts, key_sums, value_sums = sums
    dim, value_dim = key_sums.shape[2], value_sums.shape[2]
    for head in range(keys.shape[0]):
        own_keys, own_values = keys[head], values[head]
        key_rows, value_rows = own_keys[:, :dim], own_values[:, :value_dim]
        for token in range(low, high):
            cluster = members[head, token]
            changed[head, cluster] = True
            counts[head, cluster] += sign
            scale = sign * scale_of(key_rows, token)
            for d in range(dim):
                key_sums[head, cluster, d] += widen(own_keys[token, d]) * scale
            scale = sign * scale_of(value_rows, token)
            for d in range(value_dim):
                value_sums[head, cluster, d] += widen(own_values[token, d]) * scale


@njit(nogil=True, cache=True)
def _add(changed, own, sums):
    (own_counts, own_keys, own_values), (counts, key_sums, value_sums) = own, sums
    for head in range(changed.shape[0]):
        for cluster in range(changed.shape[1]):
            if changed[head, cluster]:
                counts[head, cluster] += own_counts[head, cluster]
                for d in range(key_sums.shape[2]):
                    key_sums[head, cluster, d] += own_keys[head, cluster, d]
                for d in range(value_sums.shape[2]):
                    value_sums[head, cluster, d] += own_values[head, cluster, d]


@njit(nogil=True, cache=True)
def _fill(changed, counts, key_sums, value_sums, table_counts, means, table_values):
    for head in range(changed.shape[0]):
        for cluster in range(changed.shape[1]):
            if changed[head, cluster]:
                number = counts[head, cluster]
                table_counts[head, cluster] = number
                divisor = max(number, np.float32(1))
                for d in range(key_sums.shape[2]):
                    means[head, d, cluster] = key_sums[head, cluster, d] / divisor
                for d in range(value_sums.shape[2]):
                    table_values[head, cluster, d] = value_sums[head, cluster, d]


@njit(nogil=True, cache=True)
def _nearest(keys, low, high, probes, offsets, found):
    scores = np.empty((TILE_QUERIES, TILE_TOKENS), np.float32)
    best = np.empty(TILE_TOKENS, np.float32)
    for head in range(keys.shape[0]):
        rows, queries = keys[head][:, : probes.shape[2]], probes[head]
        for start in range(low, high, TILE_TOKENS):
            size = min(TILE_TOKENS, high - start)
            for first in range(0, queries.shape[0], TILE_QUERIES):
                score_tile(queries, first, rows, start, size, scores)
                for i in range(TILE_QUERIES):
                    offset, cluster = offsets[head, first + i], np.uint8(first + i)
                    for t in range(size):
                        score = scores[i, t] + offset
                        if first + i == 0 or score > best[t]:
                            best[t] = score
                            found[head, start + t] = cluster
