"""CRC-32C (Castagnoli) of bytes, and of every block of an array. Imports Numba only for more than a few bytes.

The polynomial, its reflection and the inverted start and end are those of RFC 3720, appendix B.4. Records of a store
are short: a loop in Python does them, so that listing contexts loads no compiler.
"""

from __future__ import annotations

import threading
from types import ModuleType

import numpy as np
import numpy.typing as npt

from retrieval_attn.store.polynomial import BLOCK, byte_table

_SHORT, _LONG = 64, 1 << 15
"""Bytes from which kernels are worth a call where they are loaded; and where Numba must be imported for them first."""
_PER_THREAD = 256
"""Blocks below which another thread costs more than it saves."""


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


def block_sums(data: npt.NDArray[np.uint8], *, threads: int = 1) -> npt.NDArray[np.uint32]:
    """The checksum of every BLOCK bytes of `data`, (bytes,) contiguous; the last block may be shorter.

    Holds no interpreter lock. threads: how many share the work where there is enough of it.
    """
    kernels = _kernels()
    count = -(-len(data) // BLOCK)
    sums = np.zeros(count, np.uint32)
    parts = max(1, min(threads, count // _PER_THREAD))
    # a part begins with a multiple of three blocks, which the kernel takes side by side
    edges = [count * part // parts // 3 * 3 for part in range(parts)] + [count]

    def work(part: int) -> None:
        first, last = edges[part], edges[part + 1]
        kernels.blocks(data[first * BLOCK : last * BLOCK], sums[first:last])

    others = [threading.Thread(target=work, args=(part,), daemon=True) for part in range(1, parts)]
    for other in others:
        other.start()
    work(0)
    for other in others:
        other.join()
    return sums
