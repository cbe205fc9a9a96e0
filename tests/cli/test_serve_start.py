"""The first lines of a server: before its model is loaded, and a request that works as it is printed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrieval_attn.cli import main
from tests.server.process import serving

ROOT = Path(__file__).resolve().parents[2]
SERVE = ("serve", "bundled", "--port", "0", "--warm-up", "0", "--max-context", "2k")


def shown_until(file: int, pattern: str, seconds: float = 150.0) -> str:
    """Read a terminal until it shows the pattern."""
    seen, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, seen):
        assert time.monotonic() < deadline, seen
        if select.select([file], [], [], 1.0)[0]:
            seen += os.read(file, 65536).decode(errors="replace").replace("\r", "")
    return seen


@pytest.mark.slow
def test_a_terminal_shows_loading_and_a_request_that_works() -> None:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    pid, file = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable, [sys.executable, "-m", "retrieval_attn.cli", *SERVE], {**os.environ, "COLUMNS": "500"}
        )
    try:
        seen = shown_until(file, r"Ctrl-C ends the server\.\n")
        assert re.match(r"loading bundled; requests to http://127\.0\.0\.1:\d+ get 503 until it is ready\n", seen)
        printed = re.search(r"^curl .*$", seen, re.MULTILINE)
        assert printed, seen
        answer = subprocess.run(["bash", "-c", printed[0]], capture_output=True, text=True, timeout=100, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(file)


@pytest.mark.slow
def test_without_a_terminal_all_lines_are_json() -> None:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    with serving("bundled", "--warm-up", "0", "--max-context", "2k") as served:
        assert served.log[0]["message"].startswith("loading bundled; requests to ") and not served.other


def test_flags_are_checked_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such-model", "--gpu-memory", "24GiB", "--device", "cpu"]) == 2
    assert "the model would run on the CPU" in capsys.readouterr().err
    assert main(["serve", "no/such-model", "--index", "foo"]) == 2
    assert "index='foo' is not a known kind" in capsys.readouterr().err
