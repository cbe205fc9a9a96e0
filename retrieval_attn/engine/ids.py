"""Ids as int32 arrays, and how far two of them agree. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ShapeError

__all__ = ["Ids", "common", "int32_row"]

Ids = NDArray[np.int32]
_LIMITS = np.iinfo(np.int32)
_FIRST_BLOCK = 512
_GROWTH = 16


def int32_row(ids: Sequence[int] | NDArray[np.integer], what: str = "token ids") -> Ids:
    """ids as a contiguous int32 array (ids,); an int32 array is not copied. Raises ShapeError for anything else.

    A list takes about 40 ns an id to convert, an array next to nothing: callers with long prompts pass arrays.
    """
    array = np.asarray(ids)
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(f"{what} must be one row of integers, but have dtype {array.dtype} and shape {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < _LIMITS.min or high > _LIMITS.max:
        raise ShapeError(f"{what} must fit 32 bits, but lie in [{low}, {high}]")
    return np.ascontiguousarray(array, np.int32)


def common(first: Ids, second: Ids) -> int:
    """Tokens at the beginning in which both agree, from 0 to the shorter one's length; every id of them is compared.

    Goes by growing blocks: most pairs differ early, and a long equal pair is read at memory speed.
    """
    end = min(len(first), len(second))
    if end <= _FIRST_BLOCK and first[:end].tobytes() == second[:end].tobytes():  # a short span that agrees: 3x as fast
        return end
    at, size = 0, _FIRST_BLOCK
    while at < end:
        stop = min(at + size, end)
        differs = first[at:stop] != second[at:stop]
        place = int(differs.argmax())
        if differs[place]:
            return at + place
        at, size = stop, size * _GROWTH
    return end
