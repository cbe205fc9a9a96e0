"""ProgressBar: progress that is readable on a terminal of any width and in a pipe.

A terminal that does not state its width gets 80 columns. A pipe or a log file gets plain lines instead of a bar. The
display is refreshed by a thread, so that it is never older than `EVERY_SECONDS` while one long step runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any, TextIO

from tqdm import tqdm

EVERY_SECONDS = 4.0
"""Longest time between two plain lines."""
TICK_SECONDS = 0.5
COLUMNS, ROWS = 80, 20
LINE = "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt} {unit}, {elapsed} elapsed, {remaining} left{postfix}"


class ProgressBar(tqdm):
    """A tqdm bar on the error output, see the module. It takes tqdm's keywords.

    line_format: the plain line, in tqdm's `bar_format` syntax.
    """

    def __init__(self, *, disable: bool = False, line_format: str = LINE, **options: Any) -> None:
        """disable: show nothing."""
        self._lines: _Lines | None = None
        self._closed, self._described = threading.Event(), False
        stream = sys.stderr
        if not disable and stream.isatty():
            options |= {"ncols": columns_of(stream), "nrows": ROWS}
        elif not disable:
            self._lines = _Lines(stream)
            options |= {"file": self._lines, "mininterval": EVERY_SECONDS, "bar_format": line_format, "position": 0}
        super().__init__(disable=disable, **options)
        if not disable:
            target, name = (weakref.ref(self), self._closed), "retrieval_attn-progress"
            threading.Thread(target=_refresh, args=target, name=name, daemon=True).start()

    @property
    def visible(self) -> bool:
        """Whether the delay is over, so that the bar may be shown."""
        return not self.disable and time.time() - self.start_t >= self.delay

    def describe(self, text: str) -> None:
        """Change the description, and show it at once if the bar is visible."""
        self._described = True
        self.set_description_str(text, refresh=False)
        if self.visible:
            self.refresh()

    def close(self) -> None:
        """End the display. A bar that is kept (`leave`) shows its last state."""
        self._closed.set()
        super().close()

    def refresh_if_due(self) -> None:
        """Refresh the elapsed time of a visible bar; a plain line at most every `EVERY_SECONDS`.

        A bar at 100 % stays as it is, unless its description says what is still done.
        """
        if not self._described and self.total is not None and self.n >= self.total:
            return
        if self.visible and (self._lines is None or self._lines.age >= EVERY_SECONDS):
            self.refresh()


def columns_of(stream: TextIO) -> int:
    """Return the columns of a terminal: $COLUMNS, its own width, or 80 if it states none."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


def _refresh(bar: weakref.ref[ProgressBar], closed: threading.Event) -> None:
    while not closed.wait(TICK_SECONDS):
        shown = bar()
        if shown is None:
            return
        shown.refresh_if_due()
        del shown


class _Lines:
    """A file that gets each state of a bar as a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding
        self._written = 0.0

    @property
    def age(self) -> float:
        """Seconds since the last line."""
        return time.monotonic() - self._written

    def write(self, text: str) -> None:
        """Write a state without its cursor movements; a cleared bar writes nothing."""
        if line := text.strip().lstrip(": "):
            self._written = time.monotonic()
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()
