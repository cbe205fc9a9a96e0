"""Heap: how the C library keeps memory that arrays gave back, in a process that serves for weeks."""

from __future__ import annotations

import ctypes
import os

__all__ = ["use_one_arena"]

M_ARENA_MAX = -8
VARIABLE = "MALLOC_ARENA_MAX"


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
