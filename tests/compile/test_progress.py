"""Progress without a terminal's width and in a pipe: it is shown, and never older than a few seconds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from retrieval_attn.compile import progress
from retrieval_attn.compile.progress import ProgressBar

SCRIPT = """
from retrieval_attn.compile.progress import ProgressBar
with ProgressBar(total=4, desc="reading", unit="layer") as bar:
    for _ in range(4):
        bar.update()
"""


def test_a_terminal_without_a_width_shows_a_bar() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=theirs, env=environment, timeout=60)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while piece := os.read(ours, 65536):
            shown += piece.decode()
    os.close(ours)
    assert done.returncode == 0 and "reading: 100%" in shown and "4/4" in shown


def test_a_pipe_gets_whole_lines() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert "\r" not in done.stderr
    assert done.stderr.splitlines()[0].startswith("reading: 0 %, 0 of 4 layer, 00:00 elapsed")
    assert done.stderr.splitlines()[-1].startswith("reading: 100 %, 4 of 4 layer")


def test_one_long_step_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come while nothing is updated, once the delay is over; nothing is left of a bar that is not kept."""
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.1)
    with ProgressBar(total=2, desc="one", delay=0.2, leave=False) as bar:
        bar._closed.wait(0.1)
        assert capsys.readouterr().err == ""
        bar._closed.wait(0.6)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3 and all(line.startswith("one: 0 %, 0 of 2") for line in lines)


def test_a_disabled_bar_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(total=2, disable=True) as bar:
        bar.update()
        bar.describe("other")
        assert not bar.visible
    assert capsys.readouterr().err == ""
