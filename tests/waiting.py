"""Wait for events of other threads and processes, with one limit for all tests."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_SECONDS = 120.0
"""Seconds until a test fails that waits for an event: more than a loaded machine needs, less than a test may take."""


def comes_true(holds: Callable[[], bool], *, seconds: float = WAIT_SECONDS, pause: float = 0.01) -> bool:
    """Wait until `holds()` is true. Return False if it still is false after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return holds()
        time.sleep(pause)
    return True


def wait_until(holds: Callable[[], bool], message: Callable[[], object] = str, *, pause: float = 0.01) -> None:
    """Wait until `holds()` is true. Fail with `message()` after WAIT_SECONDS."""
    assert comes_true(holds, pause=pause), message()
