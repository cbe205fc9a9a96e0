"""Heap: how the C library keeps memory that arrays gave back, in a process that serves for weeks."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["HeapWatch", "use_one_arena"]

log = logging.getLogger(__name__)

M_ARENA_MAX = -8
VARIABLE = "MALLOC_ARENA_MAX"
LOOK_SECONDS = 10.0
GROWN_BYTES = 64 << 20
GROWN_PART = 64
"""Memory is given back when the process has grown by GROWN_BYTES, and by this part of what it had."""


def use_one_arena() -> bool:
    """Let all threads allocate from one arena of glibc; whether it does so now. Call it before threads are started.

    Every long prompt is read by a thread of its own, and glibc gives threads arenas of their own, up to eight for each
    core. What a read leaves behind lies among the keys that the tree of prefixes keeps, in all of these arenas, and
    only a thread of the same arena can use it again: the process grows by gigabytes that nobody holds. Does nothing
    with another C library, or where the variable MALLOC_ARENA_MAX says how many there shall be.
    """
    if VARIABLE in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_ARENA_MAX, 1) == 1


class HeapWatch:
    """Gives memory that nothing uses back to the system, in a thread, whenever the process has grown. Context manager.

    What reads and steps leave free lies between arrays of the tree, and the C library keeps it: next to a tree that is
    full, hundreds of megabytes that only grow. Giving it back takes some 20 ms for each 100 MB, in which no other
    thread allocates. Does nothing with another C library than glibc.
    """

    def __init__(
        self,
        *,
        seconds: float = LOOK_SECONDS,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], object] | None = None,
    ) -> None:
        """seconds: between two looks. resident: bytes in memory; trim: gives back; None: this process's own."""
        self._seconds, self._resident = seconds, resident or resident_bytes
        self._trim = trim or _glibc_trim()
        self._least = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-heap", daemon=True)

    def __enter__(self) -> HeapWatch:
        if self._trim is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> bool:
        """Give back if the process has grown; whether it did."""
        resident = self._resident()
        if not self._least or resident < self._least:
            self._least = resident
        if self._trim is None or resident - self._least < max(GROWN_BYTES, self._least // GROWN_PART):
            return False
        self._trim()
        self._least = self._resident()
        log.debug("gave %d MB back to the system, %d MB stay", (resident - self._least) >> 20, self._least >> 20)
        return True

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self.look()


def resident_bytes() -> int:
    """Of this process in memory. Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _glibc_trim() -> Callable[[], object] | None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return None
    trim.argtypes = [ctypes.c_size_t]
    return lambda: trim(0)
