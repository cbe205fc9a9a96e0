"""Kernels of clusters: sums over added or removed tokens, assignment of tokens, and sampled keys with their products.

A full window moves its oldest tokens in the middle of a step, for every row and layer; all kernels release the GIL.
Every query of a step reads all samples of its head, which leave the near caches between two tokens: they are stored in
bfloat16, in blocks that are read in order while a block's products stay in registers. Two columns share a 32-bit word:
shifting or masking it gives either one in float32.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.kernels.dots import (
    CACHE_LINE,
    L1,
    LANES,
    TILE_QUERIES,
    _muladd,
    _offset,
    _spread,
    emit_prefetch,
    scale_of,
    score_tile,
    widen,
)
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.task.atomics import intrinsic

TILE_TOKENS = 64
"""Tokens whose keys stay in a near cache while all clusters are compared."""

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
    changed: npt.NDArray[np.bool_],
    sums: tuple[Floats, Floats, Floats],
    shifts: Floats | None,
    table: tuple[Floats, Floats, Floats],
) -> None:
    """Write the clusters in `changed` (heads, C) into a table: counts, mean keys (heads, head_dim, C), sums of values.

    sums: as in `count_tokens`. shifts (heads, C, value_dim): added to every value, or None. All float32, C-contiguous.
    """
    _fill(changed, *sums, np.zeros_like(sums[2]) if shifts is None else shifts, *table)


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
    fill_table(changed, sums, None, (sums[0].copy(), np.zeros((1, 4, TILE_QUERIES), np.float32), probes.copy()))


def _bits(array: npt.NDArray[Any], fmt: Format) -> npt.NDArray[Any]:
    """View `array` in the dtype that kernels tell formats apart by; int8 contiguous, with the bytes of its steps."""
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
def _fill(changed, counts, key_sums, value_sums, shifts, table_counts, means, table_values):
    for head in range(changed.shape[0]):
        for cluster in range(changed.shape[1]):
            if changed[head, cluster]:
                number = counts[head, cluster]
                table_counts[head, cluster] = number
                divisor = max(number, np.float32(1))
                for d in range(key_sums.shape[2]):
                    means[head, d, cluster] = key_sums[head, cluster, d] / divisor
                for d in range(value_sums.shape[2]):
                    table_values[head, cluster, d] = value_sums[head, cluster, d] + number * shifts[head, cluster, d]


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


PAIR = 2 * LANES
"""Columns of a vector of words."""
GROUPS = 4
"""Vectors of words whose columns' sums are kept in registers: 8 sums, enough to hide the latency of an addition."""
AHEAD = 2048
"""Bytes of prefetch distance: 128 KiB outside the near caches take 8 to 12 us in place of 12 to 15."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_INT64 = ir.IntType(64)


def columns_for(samples: int) -> int:
    """Return the columns of `samples` samples of a head; the rest of the last PAIR is zeros."""
    return -(-samples // PAIR) * PAIR


class SampledKeys(NamedTuple):
    """The same number of sampled keys of each cluster of every head, bfloat16.

    packed (kv_heads, blocks, head_dim, width) uint16: columns, one per key, in blocks of `width`, PAIR or GROUPS of it.
    The i-th key of cluster c is column i * clusters + c. Columns j and j + LANES of a PAIR are neighbours.
    """

    packed: npt.NDArray[np.uint16]
    clusters: int
    number: int

    @classmethod
    def of(cls, keys: npt.NDArray[np.float32], clusters: int) -> SampledKeys:
        """keys: (kv_heads, head_dim, clusters * number) float32, cluster after cluster; rounded to bfloat16.

        Raises ShapeError where they are not as many of each cluster, at least one.
        """
        if keys.ndim != 3 or not keys.shape[2] or keys.shape[2] % clusters:
            raise ShapeError(f"samples must be (heads, head_dim, a multiple of {clusters} clusters), got {keys.shape}")
        heads, dim, total = keys.shape
        columns = columns_for(total)
        width = GROUPS * PAIR if columns % (GROUPS * PAIR) == 0 else PAIR
        ordered = np.zeros((heads, dim, columns), np.uint16)
        turned = keys.reshape(heads, dim, clusters, -1).transpose(0, 1, 3, 2).reshape(heads, dim, total)
        ordered[:, :, :total] = from_float32(np.ascontiguousarray(turned, np.float32), Format.BFLOAT16)
        packed = aligned_empty((heads, columns // width, dim, width), np.uint16)
        # (heads, dim, blocks, pairs, side, lane): sides of a pair take turns
        halves = ordered.reshape(heads, dim, columns // width, width // PAIR, 2, LANES)
        packed[:] = halves.transpose(0, 2, 1, 3, 5, 4).reshape(packed.shape)
        return cls(packed, clusters, total // clusters)

    @property
    def nbytes(self) -> int:
        """Bytes of all heads."""
        return self.packed.nbytes

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The keys as they were rounded: (kv_heads, head_dim, clusters * number) float32, cluster after cluster."""
        heads, blocks, dim, width = self.packed.shape
        halves = self.packed.reshape(heads, blocks, dim, width // PAIR, LANES, 2)
        ordered = halves.transpose(0, 2, 1, 3, 5, 4).reshape(heads, dim, blocks * width)
        total = self.clusters * self.number
        turned = ordered[:, :, :total].reshape(heads, dim, self.number, self.clusters).transpose(0, 1, 3, 2)
        return to_float32(turned.reshape(heads, dim, total), Format.BFLOAT16)


def _block_scores(groups: int) -> Any:
    """Return the intrinsic out[: groups * PAIR] = query . columns of one block. Addresses, but for head_dim."""

    def codegen(context, builder, signature, args):
        query, block, dim, out = args
        muladd = _muladd(builder)
        slots = [cgutils.alloca_once(builder, _VECTOR) for _ in range(2 * groups)]
        for slot in slots:
            builder.store(ir.Constant(_VECTOR, [0.0] * LANES), slot)
        shift, mask = (ir.Constant(_WORDS, [word] * LANES) for word in (16, 0xFFFF0000))
        with cgutils.for_range(builder, dim) as loop:
            number = builder.load(builder.inttoptr(_offset(builder, query, loop.index, 4), _FLOAT.as_pointer()))
            spread = _spread(builder, number)
            row = _offset(builder, block, loop.index, groups * PAIR * 2)
            for line in range(groups * PAIR * 2 // CACHE_LINE):
                emit_prefetch(builder, builder.add(row, ir.Constant(_INT64, AHEAD + line * CACHE_LINE)), L1)
            for group in range(groups):
                address = builder.add(row, ir.Constant(_INT64, group * PAIR * 2))
                words = builder.load(builder.inttoptr(address, _WORDS.as_pointer()), align=4)
                sides = builder.shl(words, shift), builder.and_(words, mask)
                for slot, side in zip(slots[2 * group : 2 * group + 2], sides, strict=True):
                    columns = builder.bitcast(side, _VECTOR)
                    builder.store(builder.call(muladd, [spread, columns, builder.load(slot)]), slot)
        for i, slot in enumerate(slots):
            pointer = builder.inttoptr(builder.add(out, ir.Constant(_INT64, i * LANES * 4)), _VECTOR.as_pointer())
            builder.store(builder.load(slot), pointer, align=4)
        return context.get_dummy_value()

    def scores(typingctx, query, block, dim, out):
        return types.void(*[types.int64] * 4), codegen

    return intrinsic(scores)


_score_wide, _score_narrow = _block_scores(GROUPS), _block_scores(1)


@njit(nogil=True, cache=True)
def score_samples(query, samples_at, out):
    """out (columns,) float32 = inner products of query (head_dim,) float32 and a head's columns at address samples_at.

    columns: as `columns_for` gives them.
    """
    query_at, out_at = query.ctypes.data, out.ctypes.data
    columns, dim = out.shape[0], query.shape[0]
    if columns % (GROUPS * PAIR) == 0:
        for first in range(0, columns, GROUPS * PAIR):
            _score_wide(query_at, samples_at + first * dim * 2, dim, out_at + 4 * first)
    else:
        for first in range(0, columns, PAIR):
            _score_narrow(query_at, samples_at + first * dim * 2, dim, out_at + 4 * first)
