"""Freed memory that the C library keeps in its heap, and its return to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

GROWTH = 64 << 20
"""Growth of the resident bytes at which a prefill trims the heap: below, pages would be faulted in again too often."""
_PAGES = Path("/proc/self/statm")


def trim_heap() -> None:
    """Return freed memory to the system, of which glibc keeps chunks below 32 MiB. Linux with glibc only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident bytes of this process; 0 if the system does not tell."""
    try:
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class HeapTrimmer:
    """Trims the heap when the process has grown by `growth` bytes since the last trim."""

    def __init__(self, growth: int = GROWTH) -> None:
        self._growth = growth
        self._kept: int | None = None

    def trim_if_grown(self) -> None:
        """Trim the heap if the process has grown. The first call notes its size."""
        size = resident_bytes()
        if self._kept is None or size < self._kept:
            self._kept = size
        if size >= self._kept + self._growth:
            trim_heap()
            self._kept = resident_bytes()
