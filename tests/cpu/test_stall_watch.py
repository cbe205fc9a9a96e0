"""A late answer is named from outside: by which thread, in which call, at what, and what all the others did then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrieval_attn.compile import beacon
from retrieval_attn.compile.stall_log import LOCK_SECONDS
from retrieval_attn.compile.stall_watch import VARIABLE
from tests.test_structure import ROOT

SCRIPT = """
import ctypes, sys, threading, time
from numba import cfunc, njit, objmode
import tests.cpu.test_serve as served
from retrieval_attn.cpu.pool import Pool

kind = sys.argv[1]
pool = Pool(2)
libc = ctypes.PyDLL(None)  # a call through it keeps Python's lock

class Slow(served.Device):
    def _search(self, argument):
        if kind == "search" and argument == 2:
            time.sleep(1.0)
        super()._search(argument)

device = Slow()
time.sleep(0.6)  # the watch begins
device.requests[0] = 4
device.requests[1] = 4 if kind in ("search", "none") else 0
device.stream_state = device.event_state = served.NOT_READY

def late():
    time.sleep(0.05)  # the thread that serves waits now
    if kind == "lock":
        libc.usleep(1_000_000)
    elif kind == "request":
        time.sleep(1.0)
    device.requests[1] = 4

other = threading.Thread(target=late, name="the-culprit")
began = time.monotonic()
other.start()
assert device.run(4) == 0
other.join()
time.sleep(0.3)
"""


@pytest.mark.skipif(beacon.FILE < 0, reason="needs files in memory and /proc")
@pytest.mark.parametrize(
    "kind, phase",
    [
        ("search", "searches, call 1 of 2, replay 4"),
        ("request", "waits for the device's request, call 1 of 2, replay 4"),
        ("lock", "call "),
        ("none", ""),
    ],
)
def test_a_late_answer_is_named(kind: str, phase: str, tmp_path: Path) -> None:
    log = tmp_path / "stalls"
    environment = {**os.environ, VARIABLE: str(log), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], env=environment, timeout=120, check=True, cwd=ROOT)
    assert done.returncode == 0
    text = log.read_text()
    if kind == "none":
        assert text == ""
        return
    assert phase in text and "== over: thread" in text
    waits = [float(line.split("at most ")[1].split()[0]) for line in text.splitlines() if "== over:" in line]
    assert 0.9 < max(waits) < 10
    assert "a pool: job 0" in text
    (late,) = {line[1:].split()[0] for line in text.splitlines() if line.startswith("*")}
    assert f"thread {late} " in text
    taken = [float(line.split("had ")[1].split()[0]) for line in text.splitlines() if "Python's lock was" in line]
    if kind == "lock":
        assert " in late\n" in text
        assert max(taken) > 500  # ms
    if kind == "lock" or max(taken) < 1e3 * LOCK_SECONDS:
        # a signal handler reads frames while they change, and may end the process: only where nobody runs Python
        assert ("most recent call first" in text) == (kind == "lock")
    if kind == "request":
        assert "the-culprit" in text


def test_the_watch_ends_with_its_process(tmp_path: Path) -> None:
    log = tmp_path / "stalls"
    script = (
        "import time, os\nfrom pathlib import Path\nfrom retrieval_attn.compile.stall_watch import StallWatch\n"
        f"watch = StallWatch(Path({str(log)!r}))\nprint(watch._process.pid, flush=True)\nos._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=True, capture_output=True)
    pid = int(done.stdout)
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}/cmdline").exists() and b"stall_log" in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until, "it still looks"
        time.sleep(0.05)
