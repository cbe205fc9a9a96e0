"""The processes of a session, each with the compile caches that it is to find, and the rows they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_attn_eval.bench.session.row import Row

__all__ = ["Process", "cache_environment", "run_process"]

SESSION = "retrieval_attn_eval.bench.session.process"
POLL_SECONDS = 0.1
END_SECONDS = 20.0
"""A process that was asked to end gets so long before it is killed."""
_CACHES = {
    "RETRIEVAL_ATTN_CACHE": "retrieval_attn",
    "TRITON_HOME": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "xdg",
}
_OVERRIDES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
"""They would win over RETRIEVAL_ATTN_CACHE, and name folders that are not empty."""


@dataclass
class Process:
    """Results of one process.

    Attributes:
        caches: State of the compile caches: "cold", "warm" or "as found". In the saving stage "save", or the state of
            the saved files: "warm" or "cold".
    """

    caches: str
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def row(self, key: str) -> Row | None:
        """The row of this key, None where there is none."""
        return next((row for row in self.rows if row.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "caches": self.caches,
            "seconds": self.seconds,
            **self.facts,
            "rows": [row.to_dict() for row in self.rows],
        }


def cache_environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with all compile caches below `folder`; models of the hub stay where they are."""
    models = base.get("HF_HOME") or str(Path(base.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    kept = {name: value for name, value in base.items() if name not in _OVERRIDES}
    return {**kept, "HF_HOME": models, **{name: str(folder / part) for name, part in _CACHES.items()}}


def run_process(
    found: Process,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
    row_seconds: float,
    told: Callable[[Row], None],
) -> None:
    """Run one process to its end and put what it finds into `found`, calling `told` with each row as it comes.

    settings: fields of `Settings`, or of a saving `Job`. row_seconds: a row that takes longer ends the process. A
    process that dies, or is ended, leaves a failed row with the name of its measure.
    """
    started = time.monotonic()
    begun: dict[str, Any] | None = {"begin": "start", "what": "process started"}
    ended = False

    def take(events: list[dict[str, Any]]) -> None:
        nonlocal begun, ended
        for event in events:
            if "row" in event:
                found.rows.append(Row.from_dict(event["row"]))
                told(found.rows[-1])
                begun = None
            elif "begin" in event:
                begun = event
            ended |= "end" in event
            found.facts |= event.get("facts", {})

    with tempfile.TemporaryDirectory(prefix="session-") as name:
        files = Path(name) / "settings.json", Path(name) / "events.jsonl"
        files[0].write_text(json.dumps(dict(settings)))
        files[1].touch()
        with _started(files, environment) as process, open(files[1], encoding="utf-8") as events:
            since, late = time.monotonic(), False
            while process.poll() is None and not late:
                new = _complete_lines(events)
                since = time.monotonic() if new else since
                late = time.monotonic() - since > row_seconds
                take(new)
                if not new:
                    time.sleep(POLL_SECONDS)
            if late:
                process.kill()
            status = process.wait()
            take(_complete_lines(events))
    if not ended:
        at = begun or {"begin": "between", "what": "between two measures"}
        why = f"took more than {row_seconds:g} s; the process was ended" if late else f"the process {_end(status)}"
        found.rows.append(Row(at["begin"], at["what"], "", status="failed", note=f"{why}; later rows did not run"))
        told(found.rows[-1])
    found.seconds = time.monotonic() - started


@contextmanager
def _started(files: tuple[Path, Path], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", SESSION, *map(str, files)]
    process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _complete_lines(events: Any) -> list[dict[str, Any]]:
    """Events that were written since the last call; a line without its end waits."""
    found: list[dict[str, Any]] = []
    while True:
        place = events.tell()
        line = events.readline()
        if not line.endswith("\n"):
            events.seek(place)
            return found
        found.append(json.loads(line))


def _end(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def own_environment() -> dict[str, str]:
    """This process's, with its import path: a child finds the same package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
