"""Exact-ish nearest keys of many training queries on the CPU, as coded products (no GPU needed).

A tile of 8 queries by 32 keys stays in registers; keys are rearranged so that one vector holds four channels of 16
keys, and each tile of them is read once per block of 128 queries. The few sums above a query's bound go to its pool,
and a sample of one tile in 16 gives a bound that few pass. What the pools keep is scored again with the stored keys.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.base import check_training
from retrieval_attn.index.formats import Format, check_rows, kernel_view
from retrieval_attn.index.kernels.codes import Codes, encode_query
from retrieval_attn.index.kernels.dots import _load, _offset, _spread, dot, intrinsic, lowest_bit, prefetch_row
from retrieval_attn.index.kernels.packed import id_of, keep_best, pack_score, pack_sum
from retrieval_attn.index.kernels.products import HAS_VNNI, add_products
from retrieval_attn.index.memory import aligned_empty, one_layout
from retrieval_attn.index.threads import kernel_threads

TILE_QUERIES = 8
TILE_KEYS = 32
BLOCK_QUERIES = 128
"""Queries that share one pass over the keys: with their numbers they fill half of a 32 KiB L1 at 128 channels."""
SAMPLE_STEP = 16
"""One tile in SAMPLE_STEP is scanned first. A tile holds keys from the whole context, so that the sample does too."""
AHEAD = 8
"""Rows asked for ahead of the one that is scored."""
LOWEST_SUM = -(2**31)

_LANES = 16
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_SUMS = ir.VectorType(_INT32, _LANES)
_BYTES = ir.VectorType(ir.IntType(8), 64)


def training_lists(
    queries: npt.NDArray[np.float32], keys: npt.NDArray[Any], fmt: Format, codes: Codes, kk: int
) -> npt.NDArray[np.int32]:
    """The kk keys with the largest inner product for each training query: (heads, m, kk) int32, best first.

    queries: (heads, m, head_dim) float32; keys: (n, head_dim) stored in `fmt`; codes: of these keys (more rows may be
    there). Found by codes with a quarter more than asked for, then ordered by exact inner products (equal ones by
    lower id), so about .99 of a list is the exact one. -1 where there are fewer than kk keys, and for queries that
    are not finite. The same at any thread count. Raises ShapeError, ConfigError.
    """
    check_rows("keys", keys, fmt, 2)
    checked, _ = check_training(queries, None, fmt.dim_of(keys), len(keys))
    assert checked is not None
    if isinstance(kk, bool) or not isinstance(kk, int | np.integer) or kk < 1:
        raise ConfigError(f"kk={kk!r} must be a whole number >= 1")
    if len(codes.codes) < len(keys) or len(codes.mean) != fmt.dim_of(keys):
        raise ShapeError(
            f"codes must cover {len(keys)} keys with head_dim={fmt.dim_of(keys)}, got codes of {codes.codes.shape[0]} "
            f"keys with head_dim={len(codes.mean)}"
        )
    heads, each, dim = checked.shape
    lists = np.full((heads, each, int(kk)), -1, np.int32)
    if not lists.size or not len(keys):
        return lists
    flat = checked.reshape(heads * each, dim)
    packed = aligned_empty((-(-len(keys) // TILE_KEYS), codes.codes.shape[1] // 4, TILE_KEYS, 4), np.uint8)
    stored = one_layout(kernel_view(keys, fmt)[None])
    rows = -(-len(flat) // TILE_QUERIES) * TILE_QUERIES
    padded = np.zeros((rows, dim), np.float32)
    padded[: len(flat)] = flat
    coded = encode_query(padded, codes)
    with kernel_threads(None):
        _pack_tiles(codes.codes, len(keys), packed)
        _all_lists(packed, len(keys), coded.planes, coded.offset, flat, stored, lists.reshape(len(flat), int(kk)))
    return lists


@intrinsic
def _score_tile(typingctx, packed, tile, planes, first, bounds, row, sums, masks):
    """Sums of 8 queries from `first` on with 32 keys of tile `tile`, kept only where above bounds[row + i].

    Bit t of masks[i] says that the sum of query i and key t is above its bound; sums (8, 32) int32 is written only if
    any is. Returns the queries with any as bits.
    """

    def codegen(context, builder, signature, args):
        packed, tile, planes, first, bounds, row, sums, masks = args
        packed_type, _, planes_type, _, bounds_type, _, sums_type, masks_type = signature.args

        def array(kind, value):
            return context.make_array(kind)(context, builder, value)

        def base(kind, value):
            return builder.ptrtoint(array(kind, value).data, _INT64)

        def plus(address, number):
            return builder.add(address, ir.Constant(_INT64, number))

        tiles = array(packed_type, packed)
        tile_at = builder.add(base(packed_type, packed), builder.mul(tile, builder.extract_value(tiles.strides, 0)))
        stride = builder.extract_value(array(planes_type, planes).strides, 0)
        query_at = [
            builder.add(base(planes_type, planes), builder.mul(builder.add(first, ir.Constant(_INT64, i)), stride))
            for i in range(TILE_QUERIES)
        ]
        slots = [cgutils.alloca_once(builder, _SUMS) for _ in range(2 * TILE_QUERIES)]
        for slot in slots:
            builder.store(ir.Constant(_SUMS, [0] * _LANES), slot)
        steps = builder.extract_value(tiles.shape, 1)
        with cgutils.for_range(builder, steps) as loop:
            block = _offset(builder, tile_at, loop.index, 4 * TILE_KEYS)
            codes = [_load(builder, plus(block, half * 64), _BYTES, 64) for half in (0, 1)]
            for i in range(TILE_QUERIES):
                four = _load(builder, _offset(builder, query_at[i], loop.index, 4), _INT32, 4)
                numbers = builder.bitcast(_spread(builder, four, _LANES), _BYTES)
                for half in (0, 1):
                    slot = slots[2 * i + half]
                    builder.store(add_products(builder, builder.load(slot), codes[half], numbers, HAS_VNNI), slot)
        any_of = None
        results = [builder.load(slot) for slot in slots]
        bounds_at = _offset(builder, base(bounds_type, bounds), row, 4)
        masks_at = base(masks_type, masks)
        for i in range(TILE_QUERIES):
            bound = _spread(builder, _load(builder, plus(bounds_at, 4 * i), _INT32, 4), _LANES)
            halves = []
            for half in (0, 1):
                above = builder.icmp_signed(">", results[2 * i + half], bound)
                halves.append(builder.zext(builder.bitcast(above, ir.IntType(_LANES)), _INT64))
            mask = builder.or_(halves[0], builder.shl(halves[1], ir.Constant(_INT64, _LANES)))
            builder.store(mask, builder.inttoptr(plus(masks_at, 8 * i), _INT64.as_pointer()))
            has = builder.zext(builder.icmp_signed("!=", mask, ir.Constant(_INT64, 0)), _INT64)
            bit = builder.shl(has, ir.Constant(_INT64, i))
            any_of = bit if any_of is None else builder.or_(any_of, bit)
        with builder.if_then(builder.icmp_signed("!=", any_of, ir.Constant(_INT64, 0)), likely=False):
            sums_at = base(sums_type, sums)
            for number, result in enumerate(results):
                builder.store(result, builder.inttoptr(plus(sums_at, 64 * number), _SUMS.as_pointer()), align=4)
        return any_of

    signature = types.int64(packed, types.int64, planes, types.int64, bounds, types.int64, sums, masks)
    return signature, codegen


@njit(nogil=True, cache=True)
def _pack_tile(codes, num_keys, packed, tile):
    """packed[tile, c, t, b] = codes[tile + t * tiles, 4 * c + b]; rows that are no keys become zeros."""
    tiles = packed.shape[0]
    block = packed[tile]
    for t in range(TILE_KEYS):
        key_id = tile + t * tiles
        for c in range(packed.shape[1]):
            for b in range(4):
                block[c, t, b] = codes[key_id, 4 * c + b] if key_id < num_keys else 0


@njit(parallel=True, nogil=True, cache=True)
def _pack_tiles(codes, num_keys, packed):
    for tile in prange(packed.shape[0]):
        _pack_tile(codes, num_keys, packed, tile)


@njit(nogil=True, cache=True)
def _scan_tile(packed, tile, num_keys, planes, first, count, kept, capacity, pool, counts, bounds, sums, masks):
    """Add the keys of a tile whose sums are above a query's bound to its pool, for queries [first, first + count).

    A pool of `capacity` is cut to its best `kept`, and the last of them becomes the bound.
    """
    tiles = packed.shape[0]
    for row in range(0, count, TILE_QUERIES):
        found = _score_tile(packed, tile, planes, first + row, bounds, row, sums, masks)
        while found:
            i = lowest_bit(found)
            found &= found - 1
            query = row + i
            left = masks[i]
            while left:
                t = lowest_bit(left)
                left &= left - 1
                key_id = tile + t * tiles
                if key_id >= num_keys:
                    continue
                pool[query, counts[query]] = pack_sum(sums[i, t], key_id)
                counts[query] += 1
                if counts[query] == capacity:
                    keep_best(pool[query], capacity, kept)
                    counts[query] = kept
                    bounds[query] = max(bounds[query], np.int32(pool[query, kept - 1] >> 32))


@njit(nogil=True, cache=True)
def _scan_block(packed, num_keys, planes, first, count, kept, pool, counts, bounds):
    """Score all keys for queries [first, first + count): the kept best of each in pool[i, :counts[i]], unordered.

    planes has rows up to the next multiple of 8, bounds as many entries. Which of several keys with the sum of the
    last one are kept is the same at every run, not always the lower id.
    """
    tiles = packed.shape[0]
    capacity = pool.shape[1]
    sums = np.empty((TILE_QUERIES, TILE_KEYS), np.int32)
    masks = np.empty(TILE_QUERIES, np.int64)
    counts[:] = 0
    bounds[:] = np.iinfo(np.int32).max  # rows that only fill up a tile of queries stay out
    bounds[:count] = LOWEST_SUM
    # Of the sample's best, a number such that the last is very likely below the kept-th best of all keys.
    share = kept / SAMPLE_STEP
    sampled = int(share + 4.0 * np.sqrt(share) + 4.0)
    sample = tiles // SAMPLE_STEP * TILE_KEYS > 4 * sampled
    if sample:
        for tile in range(0, tiles, SAMPLE_STEP):
            _scan_tile(
                packed,
                tile,
                num_keys,
                planes,
                first,
                count,
                sampled,
                2 * sampled + 32,
                pool,
                counts,
                bounds,
                sums,
                masks,
            )
        for query in range(count):
            keep_best(pool[query], counts[query], sampled)
            counts[query] = sampled
            bounds[query] = np.int32(pool[query, sampled - 1] >> 32) - np.int32(1)
    for tile in range(tiles):
        if not sample or tile % SAMPLE_STEP:
            _scan_tile(packed, tile, num_keys, planes, first, count, kept, capacity, pool, counts, bounds, sums, masks)
    for query in range(count):
        if counts[query] > kept:
            keep_best(pool[query], counts[query], kept)
            counts[query] = kept


@njit(nogil=True, cache=True)
def _scan_again(packed, num_keys, planes, first, count, kept, pool, counts, bounds, wanted):
    """Without a sample, the queries whose bound from it was too high: fewer than `wanted` in their pool."""
    sums = np.empty((TILE_QUERIES, TILE_KEYS), np.int32)
    masks = np.empty(TILE_QUERIES, np.int64)
    bounds[:] = np.iinfo(np.int32).max
    low = count
    high = 0
    for query in range(count):
        if counts[query] < wanted:
            counts[query] = 0
            bounds[query] = LOWEST_SUM
            low = min(low, query)
            high = query + 1
    low = low // TILE_QUERIES * TILE_QUERIES
    for row in range(low, high, TILE_QUERIES):
        rows = slice(row, row + TILE_QUERIES)
        if bounds[rows].min() != LOWEST_SUM:
            continue
        size = min(TILE_QUERIES, count - row)
        for tile in range(packed.shape[0]):
            _scan_tile(
                packed,
                tile,
                num_keys,
                planes,
                first + row,
                size,
                kept,
                pool.shape[1],
                pool[rows],
                counts[rows],
                bounds[rows],
                sums,
                masks,
            )
        for query in range(row, row + size):
            if counts[query] > kept:
                keep_best(pool[query], counts[query], kept)
                counts[query] = kept


@njit(nogil=True, cache=True)
def _list_block(packed, num_keys, planes, offset, queries, keys, first, lists):
    """Lists of queries [first, first + 128) that exist: coded scan, then exact scores of what it kept."""
    count = min(BLOCK_QUERIES, len(queries) - first)
    kk = lists.shape[1]
    kept = min(kk + kk // 4 + 8, num_keys)
    pool = np.empty((BLOCK_QUERIES, 2 * kept + 64), np.int64)
    counts = np.empty(BLOCK_QUERIES, np.int64)
    bounds = np.empty(BLOCK_QUERIES, np.int32)
    _scan_block(packed, num_keys, planes, first, count, kept, pool, counts, bounds)
    _scan_again(packed, num_keys, planes, first, count, kept, pool, counts, bounds, min(kk, num_keys))
    stored = keys[0]
    for i in range(count):
        query = first + i
        if offset[query] != offset[query]:
            continue  # not finite: no list
        for j in range(min(AHEAD, counts[i])):
            prefetch_row(stored, id_of(pool[i, j]))
        for j in range(counts[i]):
            if j + AHEAD < counts[i]:
                prefetch_row(stored, id_of(pool[i, j + AHEAD]))
            key_id = id_of(pool[i, j])
            pool[i, j] = pack_score(dot(queries, query, stored, key_id), key_id)
        best = np.sort(pool[i, : counts[i]])
        for j in range(min(kk, counts[i])):
            lists[query, j] = id_of(best[counts[i] - 1 - j])


@njit(parallel=True, nogil=True, cache=True)
def _all_lists(packed, num_keys, planes, offset, queries, keys, lists):
    for block in prange(-(-len(queries) // BLOCK_QUERIES)):
        _list_block(packed, num_keys, planes, offset, queries, keys, block * BLOCK_QUERIES, lists)
