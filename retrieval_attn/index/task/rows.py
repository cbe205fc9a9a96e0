"""Stored keys at an address as an array, inside kernels; how long their rows are is the format's."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from retrieval_attn.index.formats import SCALE_BYTES
from retrieval_attn.index.task.atomics import at_address


def rows_at(address, rows, dim, like):
    """Stored rows at an address, as kernels take them (`formats.kernel_view`): (rows, dim) of the format of `like`.

    like: any array of the format. In compiled functions only.
    """
    raise NotImplementedError("rows_at is for compiled functions")


@overload(rows_at)
def _rows_at(address, rows, dim, like):
    if like.dtype == types.int8:

        def scaled(address, rows, dim, like):
            return carray(at_address(address), (rows, dim + SCALE_BYTES), np.int8)[:, :dim]

        return scaled

    def plain(address, rows, dim, like):
        return carray(at_address(address), (rows, dim), like.dtype)

    return plain


@njit(nogil=True, cache=True, inline="always")
def bytes_of_row(like, dim):
    """Bytes of a stored row of `dim` numbers: `formats.Format.row_bytes`. like: an array of the format."""
    return dim * like.itemsize + (SCALE_BYTES if like.itemsize == 1 else 0)
