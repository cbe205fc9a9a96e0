"""Ctrl-C waits until a change that must not be half done is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within this block the main thread gets no KeyboardInterrupt: one that comes meanwhile is raised at the end.

    For short work on objects that others share. Other threads get none anyway: there this does nothing, and so it does
    where the program handles the signal itself in C. Blocks nest.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            handler(*late[0])
