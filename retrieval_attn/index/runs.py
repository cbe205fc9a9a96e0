"""The caller's keys as an index sees them: views in order of id, joined where they follow each other in memory.

Decoding adds one key at a time, and indexes must not copy keys; candidates that an approximate search leaves are
scored here with the stored keys.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.base import MAX_KEYS, KeyIndex
from retrieval_attn.index.formats import Format, check_rows, kernel_view
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.kernels.scan import rescore
from retrieval_attn.index.memory import aligned_empty, one_layout


class KeyRuns:
    """Keys (n, head_dim) of dtype fmt.dtype in one or more arrays, ids counted through. Never copies a key."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format) -> None:
        """keys (n, head_dim), rows contiguous; n may be 0. Raises ShapeError."""
        check_rows("keys", keys, fmt, 2)
        self.fmt = fmt
        self.head_dim = fmt.dim_of(keys)
        self.arrays: list[npt.NDArray[Any]] = []
        self.length = 0
        self.add(keys)

    def check(self, keys: npt.NDArray[Any]) -> None:
        """Raise ShapeError unless keys (n, head_dim) can be added: shape, dtype, at most 2**31 - 1 together."""
        check_rows("keys", keys, self.fmt, 2)
        if self.fmt.dim_of(keys) != self.head_dim:
            raise ShapeError(
                f"keys must be (n, {self.head_dim}) as the index is, got {(len(keys), self.fmt.dim_of(keys))}"
            )
        if self.length + len(keys) > MAX_KEYS:
            raise ShapeError(
                f"an index holds at most {MAX_KEYS} keys, got {self.length + len(keys)}; split them over two indexes"
            )

    def add(self, keys: npt.NDArray[Any]) -> None:
        """Append a view of keys (n, head_dim). Raises ShapeError as `check` does."""
        self.check(keys)
        if not len(keys):
            return
        whole = joined(self.arrays[-1], keys) if self.arrays else None
        # a new list, never a changed one: a search in another thread keeps the arrays that it started with
        self.arrays = [*self.arrays, keys] if whole is None else [*self.arrays[:-1], whole]
        self.length += len(keys)

    def cut(self, length: int) -> None:
        """Forget all ids >= length. Raises ConfigError for length < 0."""
        if length < 0:
            raise ConfigError(f"length={length} must be >= 0 keys")
        self.arrays = self.within(length)
        self.length = min(length, self.length)

    def within(self, stop: int) -> list[npt.NDArray[Any]]:
        """Views of keys [0, stop), stop may be more than there are."""
        views = []
        for array in self.arrays:
            if stop <= 0:
                break
            views.append(array[:stop])
            stop -= len(array)
        return views

    def best(
        self, coded: npt.NDArray[np.int64], queries: npt.NDArray[np.float32], k: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The k best of each query's candidates by exact inner product: ids, scores (n, k), best first.

        coded: (n, c) int64 packed candidates of any score, each id once in a row, EMPTY where there are fewer;
        queries: (n, head_dim) float32, C-contiguous. -1 and -inf where there are fewer than k.
        """
        num, count = coded.shape
        exact: npt.NDArray[np.int64] = np.full((num, count), EMPTY, np.int64)
        base = 0
        for array in self.arrays:
            _rescore_rows(one_layout(kernel_view(array, self.fmt)[None]), len(array), queries, coded, base, exact)
            base += len(array)
        width = min(k, count)
        exact.partition(count - width, axis=1)
        ids = np.full((num, k), -1, np.int32)
        scores = np.full((num, k), -np.inf, np.float32)
        unpack(np.sort(exact[:, count - width :], axis=1)[:, ::-1], ids[:, :width], scores[:, :width])
        return ids, scores


class JoinedKeys(KeyRuns):
    """Keys in one array: those that do not follow the earlier ones in memory are copied, with room for more."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format) -> None:
        """keys (n, head_dim), rows contiguous; n may be 0. Raises ShapeError."""
        self._room = keys[:0]
        super().__init__(keys, fmt)

    @property
    def whole(self) -> npt.NDArray[Any]:
        """All keys (n, head_dim)."""
        return self.arrays[0] if self.arrays else self._room[:0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys that had to be copied, and of room for more."""
        return int(self._room.nbytes)

    def add(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim). Raises ShapeError as `check` does."""
        self.check(keys)
        if not len(keys):
            return
        self.arrays, self.length = [self._extended(keys)], self.length + len(keys)

    def _extended(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        start, stop = self.length, self.length + len(keys)
        if not len(self._room):
            whole = keys if not start else joined(self.whole, keys)
            if whole is not None:
                return whole
        if len(self._room) < stop:
            room = aligned_empty((stop + stop // 4, keys.shape[1]), self.fmt.dtype)
            room[:start] = self.whole
            self._room = room
        self._room[start:stop] = keys
        return self._room[:stop]


class RunsIndex(KeyIndex):
    """An index that sees its keys as `KeyRuns`."""

    _keys: KeyRuns

    def __len__(self) -> int:
        return self._keys.length

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self._keys.head_dim

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        return True


def unpack(packed: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], scores: npt.NDArray[np.float32]) -> None:
    """Write ids and float32 scores of packed candidates of the same shape; those that are EMPTY are left alone."""
    bits = (packed >> 32).astype(np.int32)
    values = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    ids[...] = np.where(packed == EMPTY, ids, (packed & 0xFFFFFFFF) ^ 0xFFFFFFFF)
    scores[...] = np.where(packed == EMPTY, scores, values)


@njit(nogil=True, cache=True)
def _rescore_rows(keys, length, queries, coded, base, exact):
    for query in range(len(queries)):
        rescore(keys[0], length, queries, query, coded[query], coded.shape[1], base, exact[query])


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


def joined(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """One view over both, if `second` follows `first` in the same memory with the same row stride; else None."""
    stride = (first if len(first) > 1 else second).strides[0]
    follows = second.ctypes.data == first.ctypes.data + len(first) * stride
    same_stride = len(second) < 2 or second.strides[0] == stride
    root = _root(first)
    if not (follows and same_stride and stride > 0 and _root(second) is root):
        return None
    return _view(root, first, (len(first) + len(second), first.shape[1]), (stride, first.strides[1]))


def stacked(runs: list[list[npt.NDArray[Any]]]) -> npt.NDArray[Any] | None:
    """(heads, n, d) view over single-run heads that lie at even distances in one array; else None."""
    if any(len(head) != 1 for head in runs):
        return None
    views = [head[0] for head in runs]
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
