"""CRC-32C (Castagnoli) of bytes, and of every block of an array. Imports Numba only for more than a few bytes.

The polynomial, its reflection and the inverted start and end are those of RFC 3720, appendix B.4. Records of a store
are short: a loop in Python does them, so that listing contexts loads no compiler.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt

from retrieval_attn.store.polynomial import BLOCK, byte_table

_SHORT, _LONG = 64, 1 << 15
"""Bytes from which kernels are worth a call where they are loaded; and where Numba must be imported for them first."""

_loaded = False


def _kernels() -> ModuleType:
    global _loaded
    from retrieval_attn.store import crc_kernels

    _loaded = True
    return crc_kernels


def crc32c(data: bytes | memoryview | npt.NDArray[np.uint8], start: int = 0) -> int:
    """The checksum of `data`, contiguous bytes. start: the checksum of what came before them; 0 for nothing."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if len(view) >= (_SHORT if _loaded else _LONG):
        return _kernels().checksum(np.frombuffer(view, np.uint8), start)
    table, register = byte_table(), ~start & 0xFFFFFFFF
    for byte in view:
        register = table[(register ^ byte) & 255] ^ register >> 8
    return ~register & 0xFFFFFFFF


def block_sums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The checksum of every BLOCK bytes of `data`, (bytes,) contiguous; the last block may be shorter.

    Holds no interpreter lock.
    """
    sums = np.zeros(-(-len(data) // BLOCK), np.uint32)
    _kernels().blocks(data, sums)
    return sums
