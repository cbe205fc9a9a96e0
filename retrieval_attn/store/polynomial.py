"""The polynomial of CRC-32C (Castagnoli) and its table of bytes."""

from __future__ import annotations

import functools

BLOCK = 1 << 16
"""Bytes that one checksum of a file covers."""
POLYNOMIAL = 0x82F63B78
"""Its bits in reverse, the lowest power first."""


@functools.cache
def byte_table() -> tuple[int, ...]:
    """Return the checksum table of single bytes."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)
