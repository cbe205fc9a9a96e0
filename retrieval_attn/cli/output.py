"""Output of commands: pieces of an answer, and a line with the seconds of a running step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self


def without_leading_space(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of an answer without its leading white space."""
    begun = False
    for piece in pieces:
        text = piece if begun else piece.lstrip()
        if text:
            begun = True
            yield text


SILENT_SECONDS = 2.0
EVERY_SECONDS = 0.5
LINE_SECONDS = 4.0
"""Time between two lines in a pipe or a log file."""


class Spinner:
    """Show a line on the error output after two seconds, and clear it at the end of the `with` block or in `end`.

    Without a terminal, print it again every few seconds.
    """

    def __init__(self, what: str) -> None:
        """what: the step, such as "loading the model"."""
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Clear the line. Calling it again changes nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        if self._ended.wait(SILENT_SECONDS):
            return
        width, terminal = 0, sys.stderr.isatty()
        while True:
            text = f"{self._what}: {time.perf_counter() - began:.0f} s"
            width = max(width, len(text))
            print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
            if self._ended.wait(EVERY_SECONDS if terminal else LINE_SECONDS):
                break
        if terminal:
            print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
