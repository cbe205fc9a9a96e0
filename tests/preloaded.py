"""Commands of `retrieval-attn` in processes that are forked from one with all modules imported.

Importing torch and transformers takes most of a start's seconds. Tests of a start itself run a new interpreter.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from typing import Any, TextIO

__all__ = ["PreloadedProcess", "run_command"]

BEFORE_IMPORT = {"OMP_NUM_THREADS": "1"}
"""Environment variables that libraries read when they are imported."""


class PreloadedProcess:
    """A command in a forked process, with the methods of `subprocess.Popen` that tests call.

    stderr: lines that the command writes to its error output.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: str | os.PathLike[str],
        constants: Mapping[str, float],
    ) -> None:
        """Start `retrieval-attn ARGUMENTS`.

        environment: replaces the forking process's. constants: values of module constants by their dotted names.
        """
        reading, writing = os.pipe()
        self.stderr: TextIO = os.fdopen(reading, encoding="utf-8")
        context = _context()
        self._process = context.Process(
            target=run_command,
            args=(list(arguments), dict(environment), os.fspath(cwd), dict(constants), _Descriptor(writing)),
        )
        try:
            with _variables_of_imports():
                self._process.start()
        finally:
            os.close(writing)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit status. Raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("retrieval-attn", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __enter__(self) -> PreloadedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stderr.close()
        self._process.join()
        self._process.close()


class _Descriptor:
    """A file descriptor that is passed along when a process is started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getstate__(self) -> Any:
        return DupFd(self._number)

    def __setstate__(self, passed: Any) -> None:
        self._number = passed.detach()

    def replace(self, *numbers: int) -> None:
        """Duplicate it to these descriptors and close it."""
        for number in numbers:
            os.dup2(self._number, number)
        os.close(self._number)


def run_command(
    arguments: list[str], environment: dict[str, str], cwd: str, constants: Mapping[str, float], stderr: _Descriptor
) -> None:
    """Run `retrieval-attn ARGUMENTS` to its end, as a new interpreter would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stderr.replace(2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["retrieval-attn", *arguments]
    for dotted, value in constants.items():
        module, _, name = dotted.rpartition(".")
        before = getattr(importlib.import_module(module), name)  # raises for a constant that was renamed or removed
        setattr(importlib.import_module(module), name, type(before)(value))
    from retrieval_attn.cli import program

    try:
        program()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@contextmanager
def _variables_of_imports() -> Iterator[None]:
    """Set BEFORE_IMPORT while the forking process is started, if it does not run yet."""
    before = {name: os.environ.get(name) for name in BEFORE_IMPORT}
    os.environ.update(BEFORE_IMPORT)
    try:
        multiprocessing.forkserver.ensure_running()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
