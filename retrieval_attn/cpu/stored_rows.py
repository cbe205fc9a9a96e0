"""Stored keys at an address as an array, inside kernels; how long their rows are is the format's."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.extending import overload

from retrieval_attn.cpu.atomics import at_address
from retrieval_attn.index.formats import SCALE_BYTES


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
