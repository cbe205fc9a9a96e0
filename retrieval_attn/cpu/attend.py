"""Attention of a few queries over a range of tokens in host memory.

It returns a partial (out, lse): `out` normalised over the keys that took part, `lse` the natural log-sum-exp of their
scaled (and soft-capped) scores. No key: out 0, lse -inf. Partials over disjoint keys merge exactly (`merge_partials`).
The blockwise softmax follows FlashAttention-2 (Dao 2023, section 3.1). Arithmetic is float32, sums over blocks float64.
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

from retrieval_attn.cpu.gather import exp, exponentiate, scale_scores, total_of
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_queries, check_rows, kernel_view
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_tile, weigh_tile
from retrieval_attn.index.threads import kernel_threads

Partial = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]

TILE_TOKENS = 64
PART_TOKENS = 1024
"""Fewest tokens of a range that are worth a task of their own."""
WANTED_TASKS = 64
"""Tasks that a range is cut into if it is long enough.

A constant: results must not depend on the thread count.
"""


@njit(nogil=True, cache=True, fastmath={"contract"})
def attend_part(queries, first, keys, values, start, stop, scale, softcap, sums, tops, totals):
    """Four queries over tokens [start, stop): writes sums (4, value_dim) not normalised, tops (4,), totals (4,)."""
    weights = np.empty((TILE_QUERIES, TILE_TOKENS), np.float32)
    sums[:] = np.float32(0.0)
    tops[:] = np.float32(-np.inf)
    totals[:] = 0.0
    for tile in range(start, stop, TILE_TOKENS):
        size = min(TILE_TOKENS, stop - tile)
        score_tile(queries, first, keys, tile, size, weights)
        for r in range(TILE_QUERIES):
            top = max(tops[r], scale_scores(weights[r], size, scale, softcap))
            shift = top if top > -np.inf else np.float32(0.0)
            exponentiate(weights[r], size, shift)
            if top > tops[r]:
                fade = exp(tops[r] - shift)
                totals[r] *= fade
                sums[r] *= fade
                tops[r] = top
            totals[r] += total_of(weights[r], size)
        weigh_tile(weights, values, tile, size, sums)


@njit(parallel=True, nogil=True, cache=True)
def _attend_range_heads(queries, keys, values, start, stop, scale, softcap, sums, tops, totals):
    """queries (heads, padded, d); sums (heads, padded, parts, value_dim), tops and totals (heads, padded, parts)."""
    heads, padded, parts = tops.shape
    tiles = padded // TILE_QUERIES
    length = stop - start
    for task in prange(heads * tiles * parts):
        head = task // (tiles * parts)
        first = task // parts % tiles * TILE_QUERIES
        part = task % parts
        attend_part(
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

    queries (heads, n, d) float32; keys (heads, tokens, d), values (heads, tokens, dv) stored in `fmt` (of its dtype,
    the last axis its width) with contiguous rows, the other strides free. Scores are scale * q.k, then
    softcap * tanh(score / softcap) if softcap is given. Returns out (heads, n, dv) and lse (heads, n), float32; an
    empty range gives 0 and -inf. The result is the same for every thread count. Raises ShapeError for shapes, dtypes
    or layouts that do not fit, ConfigError for scale or softcap.
    """
    queries, scale32, softcap32 = _check(queries, keys, values, fmt, scale, softcap)
    if not 0 <= start <= stop <= keys.shape[1]:
        raise ShapeError(f"the range must lie within 0 .. {keys.shape[1]} tokens, got [{start}, {stop})")
    heads, n, dim = queries.shape
    out = np.zeros((heads, n, fmt.dim_of(values)), np.float32)
    lse = np.full((heads, n), -np.inf, np.float32)
    if start == stop or not lse.size:
        return out, lse
    padded = -(-n // TILE_QUERIES) * TILE_QUERIES
    if padded != n:
        queries = np.concatenate([queries, np.zeros((heads, padded - n, dim), np.float32)], axis=1)
    tasks = heads * padded // TILE_QUERIES
    parts = max(1, min(-(-WANTED_TASKS // tasks), -(-(stop - start) // PART_TOKENS)))
    sums = np.empty((heads, padded, parts, out.shape[2]), np.float32)
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
    if keys.shape[0] != heads or fmt.dim_of(keys) != dim or values.shape[:2] != keys.shape[:2]:
        raise ShapeError(
            "queries (heads, n, d), keys (heads, tokens, d) and values (heads, tokens, dv) must agree in "
            f"heads, d and tokens, got {queries.shape}, {keys.shape}, {values.shape}"
        )
    check_score_options(scale, softcap)
    return queries, np.float32(scale), np.float32(0.0 if softcap is None else softcap)
