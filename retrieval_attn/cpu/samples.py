"""Sampled keys of clusters, and their inner products with a query: compiled, for one query.

Every query of a step reads all samples of its head, and between two tokens they leave the near caches. So they are kept
in bfloat16, half the bytes of float32, in blocks that are read from front to back while a block's products stay in
registers. Two columns share a 32-bit word: shifting or masking it gives either in float32, with no shuffle of lanes.
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
from retrieval_attn.index.kernels.dots import CACHE_LINE, L1, LANES, _muladd, _offset, _spread, emit_prefetch
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.task.atomics import intrinsic

PAIR = 2 * LANES
"""Columns of a vector of words."""
GROUPS = 4
"""Vectors of words whose columns' sums are kept in registers: 8 sums, which is what hides the time of an addition."""
AHEAD = 2048
"""Bytes that are asked for before their turn. 128 KiB that no near cache has: 8 to 12 us in place of 12 to 15."""

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_INT64 = ir.IntType(64)


def columns_for(samples: int) -> int:
    """Columns that so many samples of a head take: what is left of the last PAIR is zeros."""
    return -(-samples // PAIR) * PAIR


class SampledKeys(NamedTuple):
    """As many keys of each cluster of every head, bfloat16.

    packed (kv_heads, blocks, head_dim, width) uint16: columns, one per key, in blocks of `width`, PAIR or GROUPS of it.
    The i-th key of cluster c is column i * clusters + c. Columns j and j + LANES of a PAIR lie beside each other.
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


def _block_codegen(groups: int) -> Any:
    """out[: groups * PAIR] = query . columns of one block. Addresses, but for head_dim."""

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

    return codegen


_BLOCK = types.void(*[types.int64] * 4)


@intrinsic
def _score_wide(typingctx, query, block, dim, out):
    return _BLOCK, _block_codegen(GROUPS)


@intrinsic
def _score_narrow(typingctx, query, block, dim, out):
    return _BLOCK, _block_codegen(1)


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
