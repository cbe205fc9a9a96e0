"""Collection: blocks in which Python's garbage collector must not run, or would run for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_gc() -> Iterator[None]:
    """Nothing is collected until the block ends; a caller that turned the collector off itself finds it off.

    Garbage that is freed may call CUDA, which breaks a capture, or waits for a device that waits for us. Imports of
    torch and transformers make objects that stay: a sixth of their time is the collector's, which finds nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
