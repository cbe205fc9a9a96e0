"""The stored keys of one head as an index uses them: one array, the caller's own memory wherever that is possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.memory import aligned_empty, base_of

MAX_KEYS = 2**31 - 1
"""ids are int32."""


class StoredKeys:
    """Keys (n, head_dim) of dtype fmt.dtype in one C-contiguous array.

    Keys that follow each other in the caller's memory are a view of it; other keys are copied, with room for more.
    """

    def __init__(self, keys: npt.NDArray[Any], fmt: Format) -> None:
        """keys: (n, head_dim) as stored, rows contiguous; n may be 0. Raises ShapeError."""
        check_rows("keys", keys, fmt, 2)
        self.fmt = fmt
        self.head_dim = fmt.dim_of(keys)
        self.whole = self._room = np.empty((0, keys.shape[1]), fmt.dtype)
        self.add(keys)

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def nbytes(self) -> int:
        """Bytes of keys that had to be copied, and of room for more."""
        return int(self._room.nbytes)

    def check(self, keys: npt.NDArray[Any]) -> None:
        """Raise ShapeError unless keys (n, head_dim) can be added: shape, dtype, at most 2**31 - 1 together."""
        check_rows("keys", keys, self.fmt, 2)
        if self.fmt.dim_of(keys) != self.head_dim:
            raise ShapeError(
                f"keys must be (n, {self.head_dim}) as the index is, got {(len(keys), self.fmt.dim_of(keys))}"
            )
        if len(self) + len(keys) > MAX_KEYS:
            raise ShapeError(
                f"an index holds at most {MAX_KEYS} keys, got {len(self) + len(keys)}; split them over two indexes"
            )

    def add(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim). Raises ShapeError as `check` does."""
        self.check(keys)
        if len(keys):
            # a new view, never a changed one: a search in another thread keeps the array that it started with
            self.whole = self.extended(keys)

    def cut(self, length: int) -> None:
        """Forget all ids >= length. Raises ConfigError for length < 0."""
        if length < 0:
            raise ConfigError(f"length={length} must be >= 0 keys")
        self.whole = self.whole[:length]

    def extended(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array that `add` would make of these keys, which the caller checked; nothing else changes."""
        start, stop = len(self), len(self) + len(keys)
        if not len(self._room):
            whole = (keys if keys.flags.c_contiguous else None) if not start else joined(self.whole, keys)
            if whole is not None:
                return whole
        if len(self._room) < stop:
            room = aligned_empty((stop + stop // 4, keys.shape[1]), self.fmt.dtype)
            room[:start] = self.whole
            self._room = room
        self._room[start:stop] = keys
        return self._room[:stop]


def joined(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return one view over both, if the rows of `second` follow those of `first` in one buffer; else None."""
    root, row_bytes = base_of(first), first.shape[1] * first.itemsize
    follows = second.ctypes.data == first.ctypes.data + len(first) * row_bytes and second.flags.c_contiguous
    if not follows or base_of(second) is not root or not root.flags.c_contiguous:
        return None
    # made from the root, not from `first`: views of views of views would grow a chain with every insert
    shape = len(first) + len(second), first.shape[1]
    return np.ndarray(shape, first.dtype, buffer=root, offset=first.ctypes.data - root.ctypes.data)
