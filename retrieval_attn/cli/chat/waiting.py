"""Waiting: says for how long something has been waited for, where nobody knows how long it will take."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

__all__ = ["Waiting"]

SILENT_SECONDS = 2.0
EVERY_SECONDS = 0.5


class Waiting:
    """A line on a terminal's error output, after two seconds, that is gone at the end of the `with` block or before."""

    def __init__(self, what: str) -> None:
        """what: who is waited for, and what that does."""
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-waiting", daemon=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away. Calling it again changes nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        if self._ended.wait(SILENT_SECONDS):
            return
        width = 0
        while True:
            text = f"{self._what}: {time.perf_counter() - began:.0f} s"
            width = max(width, len(text))
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            if self._ended.wait(EVERY_SECONDS):
                break
        print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
