"""Settings of the C library's allocator, for a process that serves for weeks."""

from __future__ import annotations

import ctypes
import os

__all__ = ["set_allocator"]

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MMAP_BYTES = 1 << 20


def set_allocator() -> bool:
    """Let all threads allocate from one arena, and map arrays of MMAP_BYTES and more. Return whether both hold now.

    Call it before threads are started. glibc gives threads arenas of their own, up to eight for each core, and raises
    the size from which it maps memory with each array that is freed, up to 32 MiB. What a prefill frees then stays in
    the process, between arrays of the prefix cache. With a fixed threshold such memory returns to the system when it is
    freed. See docs/archive/numbers.md, memory of a server. Does nothing with another C library. MALLOC_ARENA_MAX and
    MALLOC_MMAP_THRESHOLD_ of the environment are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_ARENA_MAX, 1, "MALLOC_ARENA_MAX"), (M_MMAP_THRESHOLD, MMAP_BYTES, "MALLOC_MMAP_THRESHOLD_"))
    done = [mallopt(option, value) == 1 for option, value, variable in wanted if variable not in os.environ]
    return len(done) == len(wanted) and all(done)
