"""Exact attention of one token per row over a stretch of memory of each row: sinks and windows of many rows at once.

One job for the pool of worker threads, whose tasks are four query heads of one key-value head of one row. The same
tokens give the same bits for any number of rows and threads.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.cpu.attend import attend_part, check_score_options
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.errors import BackendError, ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.task.atomics import at_address, call_search, rows_at
from retrieval_attn.index.task.search import address_of
from retrieval_attn.index.task.tasks import address_for_c, floats_at, task_address

_WORD = np.int64
_ENTRY = np.dtype([("keys_at", _WORD), ("values_at", _WORD), ("tokens", _WORD)])
_JOB = np.dtype(
    [
        ("task", _WORD),  # address of the function for the format
        ("tiles", _WORD),  # per entry
        ("head_dim", _WORD),
        ("value_dim", _WORD),
        ("scale", np.float32),
        ("softcap", np.float32),  # 0: none
        ("entries_at", _WORD),  # _ENTRY (entries,)
        ("queries_at", _WORD),  # float32 (entries, tiles * 4, head_dim)
        ("out_at", _WORD),  # float32 (entries, tiles * 4, value_dim)
        ("lse_at", _WORD),  # float32 (entries, tiles * 4)
    ],
    align=True,
)


Stretches = npt.NDArray[np.int64]
"""A `WindowRow` in each row."""
Tokens = npt.NDArray[np.uint8]


class WindowRow(NamedTuple):
    """Where one row's tokens lie: the addresses of its first token's key and value in head 0, bytes from a head to the
    next, and how many tokens there are. Tokens of a head lie one behind the other.
    """

    keys_at: int
    values_at: int
    key_stride: int
    value_stride: int
    tokens: int


@njit(nogil=True, cache=True)
def _put_last(places, keys, values):
    for row in range(len(places)):
        keys_at, values_at, key_stride, value_stride, tokens = places[row]
        for head in range(keys.shape[1]):
            own, width = keys[row, head], keys.shape[2]
            target = carray(at_address(keys_at + head * key_stride + (tokens - 1) * width), width, np.uint8)
            target[:] = own
            own, width = values[row, head], values.shape[2]
            target = carray(at_address(values_at + head * value_stride + (tokens - 1) * width), width, np.uint8)
            target[:] = own


def put_last(rows: Stretches, keys: Tokens, values: Tokens) -> None:
    """Write the last token of each stretch: keys and values (rows, kv_heads, bytes of a token) uint8, C-contiguous."""
    if not len(rows) == len(keys) == len(values):
        raise ShapeError(f"{len(rows)} rows need a token each, got keys {keys.shape} and values {values.shape}")
    _put_last(rows, keys, values)


def _tile(descriptor, number, worker, like):
    like = carray(like, (1, 1))
    job = carray(at_address(descriptor), 1, _JOB)[0]
    entry, first = number // job.tiles, number % job.tiles * TILE_QUERIES
    own = carray(at_address(job.entries_at), entry + 1, _ENTRY)[entry]
    padded = job.tiles * TILE_QUERIES
    queries = floats_at(job.queries_at + entry * padded * job.head_dim * 4, padded, job.head_dim)
    sums = floats_at(job.out_at + (entry * padded + first) * job.value_dim * 4, TILE_QUERIES, job.value_dim)
    lse = floats_at(job.lse_at + (entry * padded + first) * 4, 1, TILE_QUERIES)[0]
    keys = rows_at(own.keys_at, own.tokens, job.head_dim, like)
    values = rows_at(own.values_at, own.tokens, job.value_dim, like)
    tops, totals = np.empty(TILE_QUERIES, np.float32), np.empty(TILE_QUERIES, np.float64)
    attend_part(queries, first, keys, values, 0, own.tokens, job.scale, job.softcap, sums, tops, totals)
    for i in range(TILE_QUERIES):
        if own.tokens == 0:
            lse[i] = np.float32(-np.inf)
            continue
        lse[i] = np.float32(tops[i] + np.log(totals[i]))
        inverse = np.float32(1.0 / totals[i])
        for j in range(job.value_dim):
            sums[i, j] *= inverse
    return np.int64(0)


def _task(descriptor, number, worker):
    job = carray(at_address(descriptor), 1, _JOB)[0]
    return call_search(job.task, descriptor, number, worker)


@functools.cache
def _task_address() -> int:
    return address_for_c(_task, "int64(int64, int64, int64)")


def compile_windows(fmt: Format) -> None:
    """Compile what `attend_stretches` runs, or load it from Numba's cache."""
    _task_address()
    task_address(_tile, fmt)
    _put_last.compile("void(int64[:,::1], uint8[:,:,::1], uint8[:,:,::1])")


def attend_stretches(
    pool: Pool,
    fmt: Format,
    queries: npt.NDArray[np.float32],
    rows: list[WindowRow] | Stretches,
    dims: tuple[int, int],
    *,
    scale: float,
    softcap: float | None,
    threads: int | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Attention of queries (rows, q_heads, head_dim) float32 over each row's tokens, in `fmt`.

    dims: key-value heads, and the values' dim. Returns out (rows, q_heads, value_dim) and lse (rows, q_heads), float32;
    0 and -inf for a row without tokens. The memory of `rows` must live and stay. Raises ShapeError, ConfigError, and
    BackendError for a pool that is closed.
    """
    check_score_options(scale, softcap)
    (count, q_heads, dim), (heads, value_dim) = queries.shape, dims
    if count != len(rows) or q_heads % heads or queries.dtype != np.float32:
        raise ShapeError(f"queries {queries.shape} {queries.dtype} do not belong to {len(rows)} rows of {heads} heads")
    if not count:
        return np.empty((0, q_heads, value_dim), np.float32), np.empty((0, q_heads), np.float32)
    entries, group = count * heads, q_heads // heads
    tiles = -(-group // TILE_QUERIES)
    padded = tiles * TILE_QUERIES
    tiled = np.zeros((entries, padded, dim), np.float32)
    tiled[:, :group] = queries.reshape(entries, group, dim)
    out = np.empty((entries, padded, value_dim), np.float32)
    lse = np.empty((entries, padded), np.float32)
    places = np.asarray(rows, np.int64)
    heads_of = np.arange(heads, dtype=np.int64)
    table = np.empty((count, heads), _ENTRY)
    table["keys_at"] = places[:, 0, None] + places[:, 2, None] * heads_of
    table["values_at"] = places[:, 1, None] + places[:, 3, None] * heads_of
    table["tokens"] = places[:, 4, None]
    job: npt.NDArray[Any] = np.zeros(1, _JOB)
    numbers = task_address(_tile, fmt), tiles, dim, value_dim, scale, softcap or 0.0
    # `ctypes`: what `address_of` asks takes longer for records
    job[0] = (*numbers, table.ctypes.data, address_of(tiled), address_of(out), address_of(lse))
    error = pool.run(_task_address(), job.ctypes.data, entries * tiles, threads=threads)
    if error is not None:
        raise BackendError(f"attention to windows failed in task {error.task} with code {error.code}")
    shape = count, q_heads
    return out[:, :group].reshape(*shape, value_dim), lse[:, :group].reshape(shape)
