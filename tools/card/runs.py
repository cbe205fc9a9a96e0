"""Running a measure: a process with a time limit, the card's memory watched, its result file read."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.memory.host_room import VARIABLE, available_host_bytes
from retrieval_attn_eval.bench.session.card import watch
from tools.card.measure import Measure

__all__ = ["ROOT", "Lane", "Run", "card_names", "lanes", "run_measure"]

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12
"""Of what a measure printed: kept where it failed."""
STACK_LINES = 600
"""The same of one that was ended: where each of its threads was stands there."""
STACK_SECONDS = 5.0
END_SECONDS = 10.0


@dataclass(frozen=True)
class Lane:
    """Where one measure runs at a time. card: nvidia-smi's name of its card; None: whichever processes see. cores: all
    that its processes get, and their share of the host's memory; empty: as this process has them.
    """

    card: str | None = None
    cores: frozenset[int] = frozenset()
    memory_share: float = 1.0

    def environment(self) -> dict[str, str]:
        """Of its processes."""
        own = {} if self.card is None else {"CUDA_VISIBLE_DEVICES": self.card}
        if self.cores:
            own[VARIABLE] = f"{int(available_host_bytes() * self.memory_share)}B"
        return {**os.environ, **own}


def lanes(count: int) -> list[Lane]:
    """One for each of the first `count` cards, with its part of the cores. Raises ValueError where one is missing."""
    if count == 1:
        return [Lane(next(iter(card_names("uuid")), None))]
    names, cores = card_names("uuid"), sorted(os.sched_getaffinity(0))
    if len(names) < count or len(cores) < count:
        raise ValueError(f"--cards {count} needs as many GPUs and cores; {len(names)} and {len(cores)} are there")
    each = len(cores) // count
    parts = [frozenset(cores[number * each : (number + 1) * each]) for number in range(count)]
    return [Lane(name, part, 0.95 / count) for name, part in zip(names, parts, strict=False)]


@dataclass(frozen=True)
class Run:
    """What became of a measure. status: "ok", "failed" or "not run", with a note. found: its result file, without the
    times of single tokens. values: by what they are. card_bytes: most of the card's memory that was used meanwhile, by
    nvidia-smi; None: not known.
    """

    measure: Measure
    status: str
    note: str = ""
    seconds: float = 0.0
    values: dict[str, float | None] | None = None
    found: dict[str, Any] | None = None
    card_bytes: int | None = None

    @property
    def command(self) -> str:
        """As one types it; FOLDER for that of the results."""
        return shlex.join(["python", "-m", *self.measure.command("FOLDER")])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = self.values or {}
        rows = [
            {
                "what": goal.what, "unit": goal.unit, "goal": goal.text, "found": values.get(goal.what),
                "verdict": goal.verdict(values.get(goal.what)),
            }
            for goal in self.measure.goals
        ]  # fmt: skip
        return {
            "measure": self.measure.name, "setting": self.measure.setting, "command": self.command,
            "status": self.status, "note": self.note, "seconds": round(self.seconds, 1), "card_bytes": self.card_bytes,
            "rows": rows, "found": self.found,
        }  # fmt: skip


def card_names(fields: str) -> list[str]:
    """What nvidia-smi says of each card that processes see; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    some = ["-i", visible] if visible else []
    query = ["nvidia-smi", *some, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def run_measure(measure: Measure, lane: Lane, seconds_left: float) -> Run:
    """Run it for its limit, or as long as seconds are left. Never raises for it."""
    limit = min(measure.limit, seconds_left)
    with tempfile.TemporaryDirectory(prefix="card-") as name:
        folder, log = Path(name) / "out", Path(name) / "log"
        sampler = watch(lane.card)
        began = time.monotonic()
        try:
            if sampler is not None:
                sampler.start()
            status = _process([*PYTHON, "-m", *measure.command(str(folder))], log, limit, lane)
            seconds = time.monotonic() - began
            card_bytes = None if sampler is None else sampler.peak()
        finally:
            if sampler is not None:
                sampler.close()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(lines[-(LAST_LINES if status is not None else STACK_LINES) :])
        note = "" if status == 0 else f"ended after {limit:.0f} s" if status is None else f"exit status {status}"
        try:  # a run that was ended leaves what it had
            found = json.loads((folder / measure.result).read_text(encoding="utf-8"))
            values = {goal.what: goal.find(found) for goal in measure.goals}
        except (OSError, ValueError, KeyError, IndexError) as error:
            note = "; ".join(filter(None, (note, f"no result: {type(error).__name__}: {error}".replace(name, ""))))
            return Run(measure, "failed", f"{note}\n{last}", seconds, card_bytes=card_bytes)
        for row in found["rows"] if found.get("what") == "serve" else ():
            note = "; ".join(filter(None, (note, f"{row['way']}: {row['note']}" if row["note"] else "")))
            row.pop("answers", None)
        note = f"{note}\n{last}" if status != 0 else note
        return Run(measure, "failed" if status != 0 else "ok", note, seconds, values, found, card_bytes)


PYTHON = (sys.executable, "-X", "faulthandler")


def _process(command: list[str], log: Path, limit: float, lane: Lane) -> int | None:
    """Its exit status; None where it was ended after `limit` seconds, with all that it started. The log has the stacks
    of its threads then.
    """
    cores = os.sched_getaffinity(0)
    with log.open("wb") as file:
        if lane.cores:
            os.sched_setaffinity(0, lane.cores)  # of this thread, and so of what it starts
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, env=lane.environment(), start_new_session=True
            )
        finally:
            os.sched_setaffinity(0, cores)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))  # its stacks are wanted, not its memory
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACK_SECONDS)
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what it started, too: a server that is left would hold the card's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)  # its own session: nobody else is in this group
        except ProcessLookupError:
            break
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
