"""Attention of a few queries over keys and values in host memory: over given ids, or over a range of tokens.

Both return a partial (out, lse): `out` normalised over the keys that took part, `lse` the natural log-sum-
exp of their scaled (and soft-capped) scores. No key: out 0, lse -inf. Partials over disjoint keys merge
exactly (`merge_partials`). The blockwise softmax follows FlashAttention-2 (Dao 2023, section 3.1).
Arithmetic is float32, sums over blocks float64.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.dots import (
    TILE_QUERIES,
    bits_to_float,
    dot,
    float_to_bits,
    prefetch_row,
    score_tile,
    weigh_tile,
    widen,
)
from retrieval_attn.index.formats import Format, check_queries, check_rows, kernel_view
from retrieval_attn.index.threads import kernel_threads

Partial = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]

AHEAD = 8
"""Gathered rows that are prefetched before their turn."""
TILE_TOKENS = 64
PART_TOKENS = 1024
"""Fewest tokens of a range that are worth a task of their own."""
WANTED_TASKS = 64
"""Tasks that a range is cut into if it is long enough.

A constant: results must not depend on the thread count.
"""

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits: n * _LN2_HIGH is exact
_LN2_LOW = np.float32(0.693147180559945309 - 0.693359375)
_LEAST = np.float32(-87.0)  # exp below is under the smallest normal float32 times 2: taken as 0
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1.0 / math.factorial(n)) for n in range(2, 8))


@njit(nogil=True, cache=True, inline="always")
def _exp(x):
    """exp(x) for float32 x <= 0, to about 1 ulp; 0 below -87; NaN for NaN. Branch-free, so loops over it
    vectorise.
    """
    safe = x if x > _LEAST else _LEAST  # NaN too: converting it to int would be undefined
    n = np.int32(safe * _LOG2E - np.float32(0.5))
    r = safe - np.float32(n) * _LN2_HIGH
    r = r - np.float32(n) * _LN2_LOW
    p = _C6 + r * _C7  # Taylor series: |r| <= ln(2) / 2 leaves 5e-9
    p = _C5 + r * p
    p = _C4 + r * p
    p = _C3 + r * p
    p = _C2 + r * p
    p = np.float32(1.0) + r * (np.float32(1.0) + r * p)
    value = p * bits_to_float(np.int32((n + np.int32(127)) << np.int32(23)))
    zero = np.float32(0.0) if x == x else x
    return value if x > _LEAST else zero


@njit(nogil=True, cache=True)
def _scale_scores(scores, count, scale, softcap):
    """Turn products scores[:count] into scores in place; returns the largest, or -inf without any.

    NaN: the result may be anything, the weights that follow are NaN all the same.
    """
    for i in range(count):
        scores[i] *= scale
    if softcap > 0:
        for i in range(count):
            scores[i] = softcap * np.float32(math.tanh(np.float32(scores[i] / softcap)))
    top = np.int32(-0x7F800001)  # the code of -inf
    for i in range(count):  # in integers, which LLVM takes several at a time: the maximum of floats it does not
        bits = float_to_bits(scores[i])
        code = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        top = max(top, code)
    return bits_to_float(np.int32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(nogil=True, cache=True)
def _exponentiate(scores, count, shift):
    """scores[:count] = exp(scores[:count] - shift), all scores <= shift."""
    for i in range(count):
        scores[i] = _exp(scores[i] - shift)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _total(weights, count):
    """Sum of weights[:count] in float64."""
    total = 0.0
    for i in range(count):
        total += np.float64(weights[i])
    return total


@njit(nogil=True, cache=True, fastmath={"contract"})
def _attend_gathered(queries, query, keys, values, ids, scale, softcap, out):
    """One query over values[ids]; writes out (value_dim,), returns its lse."""
    value_dim = values.shape[1]
    rows = np.empty(ids.shape[0], np.int64)
    weights = np.empty(ids.shape[0], np.float32)
    count = 0
    for i in range(ids.shape[0]):
        if ids[i] >= 0:
            rows[count] = ids[i]
            count += 1
    for i in range(count):
        if i + AHEAD < count:
            prefetch_row(keys, rows[i + AHEAD])
        weights[i] = dot(queries, query, keys, rows[i])
    for i in range(min(AHEAD, count)):
        prefetch_row(values, rows[i])
    top = _scale_scores(weights, count, scale, softcap)
    shift = top if top > -np.inf else np.float32(0.0)  # all -inf: -inf - -inf would be NaN
    _exponentiate(weights, count, shift)
    total = _total(weights, count)
    for j in range(value_dim):
        out[j] = np.float32(0.0)
    if total == 0.0:
        return np.float32(-np.inf)
    quads = count // 4 * 4
    for i in range(0, quads, 4):
        for ahead in range(i + AHEAD, min(i + AHEAD + 4, count)):
            prefetch_row(values, rows[ahead])
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for j in range(value_dim):
            low = w0 * widen(values[r0, j]) + w1 * widen(values[r1, j])
            high = w2 * widen(values[r2, j]) + w3 * widen(values[r3, j])
            out[j] += low + high
    for i in range(quads, count):
        for j in range(value_dim):
            out[j] += weights[i] * widen(values[rows[i], j])
    inverse = np.float32(1.0 / total)
    for j in range(value_dim):
        out[j] *= inverse
    return np.float32(np.float64(shift) + math.log(total))


@njit(parallel=True, nogil=True, cache=True)
def _attend_gathered_heads(queries, keys, values, ids, scale, softcap, out, lse):
    heads, rows = lse.shape
    for task in prange(heads * rows):
        head = task // rows
        row = task % rows
        lse[head, row] = _attend_gathered(
            queries[head], row, keys[head], values[head], ids[head, row], scale, softcap, out[head, row]
        )


@njit(nogil=True, cache=True, fastmath={"contract"})
def _attend_part(queries, first, keys, values, start, stop, scale, softcap, sums, tops, totals):
    """Four queries over tokens [start, stop): writes sums (4, value_dim) not normalised, tops (4,), totals
    (4,).
    """
    weights = np.empty((TILE_QUERIES, TILE_TOKENS), np.float32)
    sums[:] = np.float32(0.0)
    tops[:] = np.float32(-np.inf)
    totals[:] = 0.0
    for tile in range(start, stop, TILE_TOKENS):
        size = min(TILE_TOKENS, stop - tile)
        score_tile(queries, first, keys, tile, size, weights)
        for r in range(TILE_QUERIES):
            top = max(tops[r], _scale_scores(weights[r], size, scale, softcap))
            shift = top if top > -np.inf else np.float32(0.0)
            _exponentiate(weights[r], size, shift)
            if top > tops[r]:
                fade = _exp(tops[r] - shift)
                totals[r] *= fade
                sums[r] *= fade
                tops[r] = top
            totals[r] += _total(weights[r], size)
        weigh_tile(weights, values, tile, size, sums)


@njit(parallel=True, nogil=True, cache=True)
def _attend_range_heads(queries, keys, values, start, stop, scale, softcap, sums, tops, totals):
    """queries (heads, padded, d); sums (heads, padded, parts, value_dim), tops and totals (heads, padded,
    parts).
    """
    heads, padded, parts = tops.shape
    tiles = padded // TILE_QUERIES
    length = stop - start
    for task in prange(heads * tiles * parts):
        head = task // (tiles * parts)
        first = task // parts % tiles * TILE_QUERIES
        part = task % parts
        _attend_part(
            queries[head],
            first,
            keys[head],
            values[head],
            start + length * part // parts,
            start + length * (part + 1) // parts,
            scale,
            softcap,
            sums[head, first : first + TILE_QUERIES, part],
            tops[head, first : first + TILE_QUERIES, part],
            totals[head, first : first + TILE_QUERIES, part],
        )


def attend_ids_heads(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    ids: npt.NDArray[np.int32],
    fmt: Format,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attention of each query over its own ids, all key-value heads in one call.

    queries (heads, n, d) float32; keys (heads, tokens, d), values (heads, tokens, dv) of dtype fmt.dtype with
    contiguous rows, the other strides free; ids (heads, n, k) int32 in any order, -1 = nothing; an id given
    twice counts twice. Scores are scale * q.k, then softcap * tanh(score / softcap) if softcap is given.
    Returns out (heads, n, dv) and lse (heads, n), float32; a query without ids gets 0 and -inf. Raises
    ShapeError for shapes, dtypes, layouts or ids that do not fit, ConfigError for scale or softcap.
    """
    queries, scale32, softcap32 = _check(queries, keys, values, fmt, scale, softcap)
    heads, n, _ = queries.shape
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 3 or ids.shape[:2] != (heads, n):
        raise ShapeError(f"ids must be int32 ({heads}, {n}, k), got {getattr(ids, 'dtype', type(ids))} {np.shape(ids)}")
    if ids.size and (ids.max() >= keys.shape[1] or ids.min() < -1):
        raise ShapeError(
            f"ids must lie in -1 .. {keys.shape[1] - 1} (the tokens given), got {ids.min()} .. {ids.max()}"
        )
    out = np.empty((heads, n, values.shape[2]), np.float32)
    lse = np.empty((heads, n), np.float32)
    if lse.size:
        with kernel_threads(None):
            _attend_gathered_heads(
                queries,
                kernel_view(keys, fmt),
                kernel_view(values, fmt),
                np.ascontiguousarray(ids),
                scale32,
                softcap32,
                out,
                lse,
            )
    return out, lse


def attend_range_heads(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    start: int,
    stop: int,
    fmt: Format,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attention of each query over all tokens [start, stop), all key-value heads in one call.

    Arrays, scores, results and errors as in `attend_ids_heads`. An empty range gives 0 and -inf. The result
    is the same for every thread count.
    """
    queries, scale32, softcap32 = _check(queries, keys, values, fmt, scale, softcap)
    if not 0 <= start <= stop <= keys.shape[1]:
        raise ShapeError(f"the range must lie within 0 .. {keys.shape[1]} tokens, got [{start}, {stop})")
    heads, n, dim = queries.shape
    out = np.zeros((heads, n, values.shape[2]), np.float32)
    lse = np.full((heads, n), -np.inf, np.float32)
    if start == stop or not lse.size:
        return out, lse
    padded = -(-n // TILE_QUERIES) * TILE_QUERIES
    if padded != n:
        queries = np.concatenate([queries, np.zeros((heads, padded - n, dim), np.float32)], axis=1)
    tasks = heads * padded // TILE_QUERIES
    parts = max(1, min(-(-WANTED_TASKS // tasks), -(-(stop - start) // PART_TOKENS)))
    sums = np.empty((heads, padded, parts, values.shape[2]), np.float32)
    tops = np.empty((heads, padded, parts), np.float32)
    totals = np.empty((heads, padded, parts), np.float64)
    with kernel_threads(None):
        _attend_range_heads(
            queries,
            kernel_view(keys, fmt),
            kernel_view(values, fmt),
            start,
            stop,
            scale32,
            softcap32,
            sums,
            tops,
            totals,
        )
    return _normalise(sums[:, :n], tops[:, :n], totals[:, :n])


def _normalise(
    sums: npt.NDArray[np.float32], tops: npt.NDArray[np.float32], totals: npt.NDArray[np.float64]
) -> Partial:
    """Join parts (axis -2 of sums, -1 of the others) into one partial."""
    highest = np.max(tops, axis=-1, keepdims=True).astype(np.float64)
    shift = np.where(np.isneginf(highest), 0.0, highest)
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite or NaN scores give NaN, as full attention does
        weights = np.exp(tops - shift)
        total = np.sum(weights * totals, axis=-1)
        out = np.matmul(weights[..., None, :], sums)[..., 0, :] / np.where(total == 0, 1.0, total)[..., None]
        lse = shift[..., 0] + np.log(total)
    return out.astype(np.float32), lse.astype(np.float32)


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Exact attention over the union of disjoint key sets, from the partials of each set.

    partials: at least one (out (..., dv), lse (...)), float32, equal shapes. Parts with lse -inf count
    nothing; all such: out 0, lse -inf. Raises ShapeError if there is none or shapes differ.
    """
    if not partials or any(o.shape[:-1] != s.shape or o.shape != partials[0][0].shape for o, s in partials):
        raise ShapeError(f"partials must be at least one and of equal shapes, got {[o.shape for o, _ in partials]}")
    if len(partials) == 1:
        return partials[0]
    outs = np.stack([out for out, _ in partials], axis=-2)
    lses = np.stack([lse for _, lse in partials], axis=-1)
    return _normalise(outs, lses, np.ones(lses.shape))


def attend_ids(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    ids: npt.NDArray[np.int32],
    fmt: Format,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """`attend_ids_heads` for one head: queries (n, d), keys (tokens, d), values (tokens, dv), ids (n, k).

    Returns out (n, dv) and lse (n,), float32.
    """
    _check_axes(queries, keys, values)
    if np.ndim(ids) != 2:
        raise ShapeError(f"ids must have 2 axes (n, k), got shape {np.shape(ids)}")
    out, lse = attend_ids_heads(queries[None], keys[None], values[None], ids[None], fmt, scale, softcap)
    return out[0], lse[0]


def attend_range(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    start: int,
    stop: int,
    fmt: Format,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """`attend_range_heads` for one head: queries (n, d), keys (tokens, d), values (tokens, dv).

    Returns out (n, dv) and lse (n,), float32.
    """
    _check_axes(queries, keys, values)
    out, lse = attend_range_heads(queries[None], keys[None], values[None], start, stop, fmt, scale, softcap)
    return out[0], lse[0]


def _check_axes(*arrays: npt.NDArray[Any]) -> None:
    if any(np.ndim(array) != 2 for array in arrays):
        shapes = [np.shape(array) for array in arrays]
        raise ShapeError(f"queries, keys and values must have 2 axes each, got shapes {shapes}")


def check_score_options(scale: float, softcap: float | None) -> None:
    """Raise ConfigError unless scale is finite and softcap is None or finite and above 0."""
    if not math.isfinite(scale):
        raise ConfigError(f"scale={scale} must be finite")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ConfigError(f"softcap={softcap} must be above 0, or None for no soft-cap")


def _check(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    fmt: Format,
    scale: float,
    softcap: float | None,
) -> tuple[npt.NDArray[np.float32], np.float32, np.float32]:
    queries = check_queries("queries", queries, 3)
    check_rows("keys", keys, fmt, 3)
    check_rows("values", values, fmt, 3)
    heads, _, dim = queries.shape
    if keys.shape[0] != heads or keys.shape[2] != dim or values.shape[:2] != keys.shape[:2]:
        raise ShapeError(
            "queries (heads, n, d), keys (heads, tokens, d) and values (heads, tokens, dv) must agree in "
            f"heads, d and tokens, got {queries.shape}, {keys.shape}, {values.shape}"
        )
    check_score_options(scale, softcap)
    return queries, np.float32(scale), np.float32(0.0 if softcap is None else softcap)
