"""The tests that need a GPU, as far as time allows: how many pass, which fail, which were not reached.

python -m tools.card.tests --seconds 400 --processes 14 --out FOLDER [FILE ...]

Side by side, over one card. What a test printed is told for those that fail. Files in the order given; all of them by
default; names of tests, and @LIST for a file with one of these in each line, do as well.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.card.runs import ROOT
from tools.card.subject import save_found

__all__ = ["main", "outcomes"]

OUTCOMES = ("passed", "failed", "error", "skipped")
_LINE = re.compile(r"\[gw\d+\]\s+\[\s*\d+%\]\s+(PASSED|FAILED|ERROR|SKIPPED)\s+(\S+::.+)")
_COLLECTED = re.compile(r"\d+ workers? \[(\d+) items?\]")
FEW_THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
"""Of a worker's BLAS: as many as the machine has cores, in each of 16 workers, and numpy's eigh took over 110 s."""
KEPT_CHARACTERS = 100_000
"""Of what pytest printed, from its end: errors and stacks."""


def outcomes(lines: Iterable[str]) -> dict[str, list[str]]:
    """Names of tests by what became of them, of pytest's lines with -v and workers. A test's last outcome counts."""
    last: dict[str, str] = {}
    for line in lines:
        if found := _LINE.match(line.strip()):
            last[found[2].strip()] = found[1].lower()
    return {outcome: [name for name, became in last.items() if became == outcome] for outcome in OUTCOMES}


def main(given: Sequence[str] | None = None) -> int:
    """Run them, and write found.json; 1 where one failed, or none ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=400.0, help="of all of them (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--marker", default="cuda", help="of the tests (default: %(default)s)")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    args = parser.parse_args(given)
    # pytest-benchmark, where it is installed, warns beside workers, and warnings are errors here
    flags = ["-m", args.marker, "-v", "-rfE", "-p", "no:benchmark", "-p", "no:cacheprovider", "--timeout=110"]
    workers = ["-n", str(args.processes), "--max-worker-restart=4"]
    command = [sys.executable, "-m", "pytest", *flags, *workers, *args.files]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env={**FEW_THREADS, **os.environ},
    )  # fmt: skip
    late = threading.Timer(args.seconds, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    assert process.stdout is not None
    try:
        lines = list(process.stdout)
        status = process.wait()
    finally:
        late.cancel()
    found = outcomes(lines)
    counts = {name: len(tests) for name, tests in found.items()}
    collected = next((int(one[1]) for line in lines if (one := _COLLECTED.search(line))), 0)
    report = {
        "status": status, "ended": status == -signal.SIGKILL, "tests": collected, **counts,
        "bad": counts["failed"] + counts["error"], "not_reached": max(0, collected - sum(counts.values())),
        "failed_tests": found["failed"] + found["error"], "files": args.files, "log": "".join(lines)[-KEPT_CHARACTERS:],
    }  # fmt: skip
    save_found(args, None, report)
    return 1 if report["bad"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
