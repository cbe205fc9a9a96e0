"""A server as a process of its own, as users start it, with the bundled model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import httpx

from tests.preloaded import CLI, ROOT, PreloadedProcess
from tests.waiting import WAIT_SECONDS, wait_until

START_SECONDS = 120
END_SECONDS = 120
WORDS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The special magic Bergen number is: 7391846. "
QUESTION = "What is the special magic Bergen number?"
ANSWER = "7391846"


def document(repeats: int = 40) -> str:
    """A text with one number in its middle, 23 tokens and a few more for each of the repeats."""
    return WORDS * (repeats // 2) + NEEDLE + WORDS * (repeats - repeats // 2)


def saved(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """Save a context and return its record when it is durable."""
    reply = http.post("/v1/contexts", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = {}

    def is_durable() -> bool:
        found.update(http.get(f"/v1/contexts/{body['name']}").json())
        assert "error" not in found, found
        return bool(found["durable"])

    wait_until(is_durable, lambda: found, pause=0.02)
    assert found["tokens"] == reply.json()["tokens"]
    return found


class Served:
    """A server that runs. url: without a slash at its end. log: its lines so far."""

    def __init__(self, process: subprocess.Popen[str] | PreloadedProcess, stderr: TextIO) -> None:
        """Reads its log from now on."""
        self.process, self._stderr = process, stderr
        self.log: list[dict[str, Any]] = []
        self.other: list[str] = []
        self.url = ""
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Until it listens, at most so long."""
        assert self._listens.wait(seconds) and self.url, "\n".join(self.other)

    def _read(self) -> None:
        for line in self._stderr:
            try:
                found = json.loads(line)
            except ValueError:
                self.other.append(line)
                continue
            self.log.append(found)
            if "url" in found:
                self.url = found["url"]
                self._listens.set()
        self._listens.set()

    def client(self, key: str | None = None) -> httpx.Client:
        """Of its own address."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=WAIT_SECONDS, headers=headers)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Let it end; its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(END_SECONDS)
        self.finish_log()
        return status

    def finish_log(self) -> None:
        """Until all that was written is read: its engine's process writes there, too, and ends a little later."""
        self._reader.join(END_SECONDS)


def processes(pid: int) -> list[int]:
    """A process and all that it started, and so on. Linux."""
    tasks = os.listdir(f"/proc/{pid}/task")
    children = [child for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return [pid, *(one for child in children for one in processes(int(child)))]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended. Linux."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@contextmanager
def serving(
    *arguments: str, environment: dict[str, str] | None = None, start_seconds: float = START_SECONDS,
    most_files: int = 0, preloaded: bool = False, constants: Mapping[str, float] | None = None,
) -> Iterator[Served]:  # fmt: skip
    """Start a server on a free port, wait until it listens, and kill it at the end of the block.

    start_seconds: maximum seconds until it listens. most_files: limit of open files; 0: the system's. preloaded: fork
    the server from a process with all modules imported, which saves most of a start; for tests of other things.
    constants: values of module constants by dotted name, for a preloaded server.
    """
    with starting(
        *arguments, environment=environment, most_files=most_files, preloaded=preloaded, constants=constants
    ) as served:
        served.wait(start_seconds)
        yield served


@contextmanager
def starting(
    *arguments: str,
    environment: dict[str, str] | None = None,
    most_files: int = 0,
    port: int = 0,
    preloaded: bool = False,
    constants: Mapping[str, float] | None = None,
) -> Iterator[Served]:
    """Start a server as `serving` does, without waiting until it listens."""
    words = [*CLI, "serve", "--port", str(port), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    assert preloaded or not (constants or most_files), "of a new interpreter neither can be set"
    process: subprocess.Popen[str] | PreloadedProcess
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as stderr:
        try:
            if preloaded:
                process = PreloadedProcess(words, variables, ROOT, {2: writing}, constants, most_files=most_files)
            else:
                command = [sys.executable, *words]
                process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=writing, text=True)
        finally:
            os.close(writing)
        served = Served(process, stderr)
        try:
            yield served
        finally:
            served.end(signal.SIGKILL)
            if isinstance(process, PreloadedProcess):
                process.close()
