"""The exact index: every key is scored, in one pass for all queries of a head's group (keys are read once).

It needs no training and no memory, and is the reference that approximate kinds are measured against. Each
worker keeps, per query, a pool of candidates above its k-th best so far and halves it by quickselect when
full.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.base import MAX_KEYS, KeyIndex, SearchResult, register
from retrieval_attn.index.dots import TILE_QUERIES
from retrieval_attn.index.formats import Format, check_queries, check_rows, kernel_view
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.packed import EMPTY
from retrieval_attn.index.scan import TILE_KEYS, scan_exact
from retrieval_attn.index.threads import kernel_threads

MIN_KEYS_PER_TASK = 2048
TASKS_PER_THREAD = 4
POOL_BYTES = 64 << 20
"""Most memory for candidate pools in one pass; more queries are searched in several passes."""


@njit(nogil=True, cache=True)
def _scan(keys, queries, num_queries, start, stop, k, pool):
    """`scan_exact` without a bound, with scratch of its own."""
    counts = np.empty(num_queries, np.int64)
    floors = np.full(num_queries, EMPTY, np.int64)
    bounds = np.empty(num_queries, np.float32)
    scores = np.empty((TILE_QUERIES, TILE_KEYS), np.float32)
    scan_exact(keys, queries, num_queries, start, stop, k, pool, counts, floors, bounds, scores)


@njit(parallel=True, nogil=True, cache=True)
def _scan_heads(keys, length, queries, num_queries, splits, k, pools):
    """`_scan` of every head in parts: pools (heads, splits, num_queries, capacity), queries (heads, padded, d).

    keys (at least heads, at least length, d).
    """
    heads = queries.shape[0]
    for task in prange(heads * splits):
        head = task // splits
        split = task % splits
        start = length * split // splits
        stop = length * (split + 1) // splits
        _scan(keys[head], queries[head], num_queries, start, stop, k, pools[head, split])


def search_exact(keys: npt.NDArray[Any], queries: npt.NDArray[np.float32], k: int, fmt: Format) -> SearchResult:
    """Exact best k of each head: keys (heads, n, d) in `fmt`, queries (heads, m, d) float32 C-contiguous.

    Rows must be contiguous, the other strides are free. Returns ids and scores (heads, m, k); the result
    does not depend on the number of threads. The caller checks shapes.
    """
    heads, length, dim = keys.shape
    num_queries = queries.shape[1]
    ids = np.full((heads, num_queries, k), -1, np.int32)
    scores = np.full((heads, num_queries, k), -np.inf, np.float32)
    if length and num_queries and heads:
        kept = min(k, length)
        splits = _num_splits(heads, length)
        capacity = min(2 * kept + 64, -(-length // splits) + 1)
        capacity = max(capacity, kept)
        at_once = max(TILE_QUERIES, POOL_BYTES // (8 * heads * splits * capacity))
        for first in range(0, num_queries, at_once):
            rows = slice(first, min(first + at_once, num_queries))
            best = _best(keys, queries[:, rows], kept, fmt, splits, capacity)
            ids[:, rows, :kept] = (best & 0xFFFFFFFF) ^ 0xFFFFFFFF
            bits = (best >> 32).astype(np.int32)
            scores[:, rows, :kept] = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    return SearchResult(ids, scores, heads * num_queries * length)


def _best(
    keys: npt.NDArray[Any],
    queries: npt.NDArray[np.float32],
    k: int,
    fmt: Format,
    splits: int,
    capacity: int,
) -> npt.NDArray[np.int64]:
    """Packed candidates (heads, queries, k), best first; k <= keys.shape[1]."""
    heads, num_queries, dim = queries.shape
    padded = -(-num_queries // TILE_QUERIES) * TILE_QUERIES
    tiles = np.zeros((heads, padded, dim), np.float32)
    tiles[:, :num_queries] = queries
    pools = np.empty((heads, splits, num_queries, capacity), np.int64)
    _scan_heads(one_layout(kernel_view(keys, fmt)), keys.shape[1], tiles, num_queries, splits, k, pools)
    best = pools[..., :k].transpose(0, 2, 1, 3).reshape(heads, num_queries, splits * k)
    if splits > 1:
        best.partition(splits * k - k, axis=-1)
        best = best[..., -k:]
    return np.ascontiguousarray(np.sort(best, axis=-1)[..., ::-1])


def _num_splits(heads: int, length: int) -> int:
    """Parts that the keys of one head are cut into: enough tasks to balance, none too small to pay for
    itself.
    """
    wanted = -(-TASKS_PER_THREAD * numba.get_num_threads() // heads)
    return max(1, min(wanted, length // MIN_KEYS_PER_TASK))


@register
class FlatIndex(KeyIndex):
    """Exact search over views of the caller's keys.

    A NaN score ranks below -inf; infinities rank as numbers do.
    """

    kind: ClassVar[str] = "flat"

    def __init__(self, keys: npt.NDArray[Any], fmt: Format) -> None:
        """keys (n, head_dim) of dtype fmt.dtype, rows contiguous; n may be 0. Raises ShapeError."""
        check_rows("keys", keys, fmt, 2)
        self._fmt = fmt
        self._head_dim = int(keys.shape[1])
        self._pieces: list[npt.NDArray[Any]] = []
        self._length = 0
        self.insert(keys)

    @classmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> FlatIndex:
        """The exact index; `queries` is not needed and there are no options."""
        return cls(keys, fmt)

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append a view of keys (n, head_dim).

        Raises ShapeError for another shape, dtype or more than 2**31 - 1.
        """
        check_rows("keys", keys, self._fmt, 2)
        if keys.shape[1] != self._head_dim:
            raise ShapeError(f"keys must be (n, {self._head_dim}) as the index is, got {keys.shape}")
        if self._length + len(keys) > MAX_KEYS:
            raise ShapeError(f"an index holds at most {MAX_KEYS} keys, got {self._length + len(keys)}; use two")
        if not len(keys):
            return
        joined = _joined(self._pieces[-1], keys) if self._pieces else None
        # a new list, never a changed one: a search in another thread keeps the pieces that it started with
        self._pieces = [*self._pieces, keys] if joined is None else [*self._pieces[:-1], joined]
        self._length += len(keys)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        if length < 0:
            raise ConfigError(f"length={length} must be >= 0")
        self._pieces = list(self._within(min(length, self._length)))
        self._length = min(length, self._length)
        return True

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The exact best k; see KeyIndex.search."""
        found = self.search_heads([self], check_queries("queries", queries, 2)[None], k, limit=limit)
        return SearchResult(found.ids[0], found.scores[0], found.keys_scanned)

    @classmethod
    def search_heads(
        cls,
        indexes: Sequence[KeyIndex],
        queries: npt.NDArray[np.float32],
        k: int,
        *,
        limit: int | None = None,
    ) -> SearchResult:
        """All heads in one kernel call where their keys lie evenly in one array, else one call per head."""
        flats = [index for index in indexes if isinstance(index, FlatIndex)]
        if len(flats) != len(indexes) or not flats:
            raise ConfigError("search_heads of flat needs at least one index, and only flat ones")
        queries = check_queries("queries", queries, 3)
        heads, _, dim = queries.shape
        if heads != len(flats) or any(dim != flat.head_dim for flat in flats):
            raise ShapeError(
                f"queries must be ({len(flats)}, n, {flats[0].head_dim}) as the keys are, got {queries.shape}"
            )
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise ConfigError(f"k={k!r} must be a whole number >= 1")
        if limit is not None and limit < 0:
            raise ConfigError(f"limit={limit} must be >= 0, or None for all keys")
        pieces = [flat._within(len(flat) if limit is None else min(limit, len(flat))) for flat in flats]
        with kernel_threads(None):
            together = _stacked(pieces) if all(flat._fmt is flats[0]._fmt for flat in flats) else None
            if together is not None:
                return search_exact(together, queries, int(k), flats[0]._fmt)
            found = [_search_pieces(pieces[i], queries[i], int(k), flat._fmt) for i, flat in enumerate(flats)]
        return SearchResult(
            np.stack([one.ids for one in found]),
            np.stack([one.scores for one in found]),
            sum(one.keys_scanned for one in found),
        )

    def _within(self, stop: int) -> list[npt.NDArray[Any]]:
        """Views of keys [0, stop)."""
        views = []
        for piece in self._pieces:
            if stop <= 0:
                break
            views.append(piece[:stop])
            stop -= len(piece)
        return views

    def __len__(self) -> int:
        return self._length

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self._head_dim

    @property
    def nbytes(self) -> int:
        """0: only views of the caller's keys are held."""
        return 0


def _search_pieces(
    pieces: list[npt.NDArray[Any]], queries: npt.NDArray[np.float32], k: int, fmt: Format
) -> SearchResult:
    """Exact best k over keys that lie in several arrays, ids counted through."""
    found = [search_exact(piece[None], queries[None], k, fmt) for piece in pieces]
    if not found:
        empty = np.full((len(queries), k), -1, np.int32)
        return SearchResult(empty, np.full(empty.shape, -np.inf, np.float32), 0)
    bases = np.cumsum([0] + [len(piece) for piece in pieces])
    ids = np.concatenate(
        [np.where(one.ids[0] < 0, -1, one.ids[0] + base) for one, base in zip(found, bases, strict=False)],
        axis=1,
    )
    scores = np.concatenate([one.scores[0] for one in found], axis=1)
    order = np.argsort(-order_codes(scores, ids), axis=1, kind="stable")[:, :k]
    return SearchResult(
        np.take_along_axis(ids, order, axis=1).astype(np.int32),
        np.take_along_axis(scores, order, axis=1),
        sum(one.keys_scanned for one in found),
    )


def order_codes(scores: npt.NDArray[np.float32], ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 that order like scores (any shape): NaN below -inf, and entries whose id is negative below all.

    -0.0 and 0.0 get the same code. Ties are left to the caller (a stable sort keeps the earlier entry first).
    """
    bits = (scores + np.float32(0.0)).view(np.int32)
    codes = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    codes = np.where(np.isnan(scores), -(2**31), codes)
    return np.where(ids < 0, -(2**32), codes)


def _root(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array whose memory `array` is a view of, itself if it is no view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _view(
    root: npt.NDArray[Any], like: npt.NDArray[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[Any] | None:
    """A view of `root` that begins where `like` does; None if root is no plain buffer. Checked against its end."""
    if not root.flags.c_contiguous:
        return None
    offset = like.ctypes.data - root.ctypes.data
    # made from the root, not from `like`: views of views of views would grow a chain with every insert
    return np.ndarray(shape, like.dtype, buffer=root, offset=offset, strides=strides)


def _joined(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """One view over both, if `second` follows `first` in the same memory with the same row stride; else None."""
    stride = (first if len(first) > 1 else second).strides[0]
    follows = second.ctypes.data == first.ctypes.data + len(first) * stride
    same_stride = len(second) < 2 or second.strides[0] == stride
    root = _root(first)
    if not (follows and same_stride and stride > 0 and _root(second) is root):
        return None
    return _view(root, first, (len(first) + len(second), first.shape[1]), (stride, first.strides[1]))


def _stacked(pieces: list[list[npt.NDArray[Any]]]) -> npt.NDArray[Any] | None:
    """(heads, n, d) view over single-piece heads that lie at even distances in one array; else None."""
    if any(len(head) != 1 for head in pieces):
        return None
    views = [head[0] for head in pieces]
    first = views[0]
    if len(views) == 1:
        return first[None]
    root = _root(first)
    addresses = [view.ctypes.data for view in views]
    step = addresses[1] - addresses[0]
    for i, view in enumerate(views):
        alike = view.shape == first.shape and view.strides == first.strides
        if not alike or addresses[i] != addresses[0] + i * step or _root(view) is not root:
            return None
    return _view(root, first, (len(views), *first.shape), (step, *first.strides)) if step > 0 else None
