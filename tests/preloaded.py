"""Python programs in processes that are forked from one with all modules imported.

Importing torch and transformers takes most of a start's seconds. Tests of a start itself run a new interpreter. A
server's engine process is forked from the same process.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

__all__ = ["CLI", "PreloadedPopen", "PreloadedProcess", "forked_processes", "run_preloaded", "run_program"]

CLI = ("-m", "retrieval_attn.cli")
"""What a new interpreter would get to run `retrieval-attn`."""

ROOT = Path(__file__).resolve().parents[1]
BEFORE_IMPORT = {"OMP_NUM_THREADS": "1"}
"""Environment variables that libraries read when they are imported."""
_FIRST_RECEIVED = 64
"""Lowest number of a file descriptor that a forked process receives, before it gets its own number."""


class PreloadedProcess:
    """A program in a forked process, with the methods of `subprocess.Popen` that tests call."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: str | os.PathLike[str],
        files: Mapping[int, int],
        constants: Mapping[str, float] | None = None,
        new_session: bool = False,
        finalizes: bool = False,
        most_files: int = 0,
    ) -> None:
        """Start `python WORDS`, which begin with "-c" or "-m".

        environment: replaces the forking process's. files: file descriptors that become the standard input (0), output
        (1) and error output (2); they stay open here. A terminal as input becomes the controlling terminal.
        constants: values of module constants by their dotted names. new_session: lead a session and a process group.
        finalizes: end the interpreter as a new one ends, for tests of what is left at its end. most_files: limit of
        open files; 0: the system's.
        """
        context = _context()
        passed = {number: _Descriptor(file) for number, file in files.items()}
        self._process = context.Process(
            target=run_program,
            args=(list(words), dict(environment), os.fspath(cwd), dict(constants or {}), passed),
            kwargs={
                "new_session": new_session,
                "finalizes": finalizes,
                "forkserver": _address(),
                "most_files": most_files,
            },
        )
        self._process.start()
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
            raise subprocess.TimeoutExpired("python", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Wait until it has ended."""
        self._process.join()
        self._process.close()


class PreloadedPopen(PreloadedProcess):
    """`subprocess.Popen` of a Python module, forked from a process with all modules imported."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """command: `sys.executable`, options of the interpreter, which are dropped, "-m", and the rest. stdin: None or
        DEVNULL; the program must not read it. stderr: a file, or STDOUT.
        """
        if isinstance(stderr, int):
            assert stderr == subprocess.STDOUT
            stderr = stdout
        assert command[0] == sys.executable and stdin in (None, subprocess.DEVNULL)
        words = command[command.index("-m") :]
        files = {number: number if file is None else file.fileno() for number, file in ((1, stdout), (2, stderr))}
        files |= {number: number for number in pass_fds}
        self._waiting = threading.Lock()
        super().__init__(words, os.environ if env is None else env, cwd or Path.cwd(), files, None, start_new_session)

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raise `subprocess.TimeoutExpired` after `timeout` seconds. Threads wait in turn."""
        with self._waiting:
            if timeout is not None:
                return super().wait(timeout)
            self._process.join()
            return super().wait(0)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs or a thread waits for it."""
        if not self._waiting.acquire(blocking=False):
            return None
        try:
            return super().poll()
        finally:
            self._waiting.release()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def forked_processes() -> Any:
    """Return a module `subprocess` whose `Popen` forks, for a test that replaces that of a module with it."""
    return SimpleNamespace(**{**vars(subprocess), "Popen": PreloadedPopen})


def run_preloaded(
    words: Sequence[str],
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ROOT,
    timeout: float = 200,
    stdout: int | None = None,
    finalizes: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end, as `subprocess.run` with captured output does.

    given: standard input, less than a pipe holds. environment: variables besides those of this process. stdout: file
    descriptor; None: captured. finalizes: as of `PreloadedProcess`.
    """
    assert len(given) < 2**15, "longer input needs a thread that writes it"
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        reading, writing = os.pipe()
        os.write(writing, given.encode())
        os.close(writing)
        try:
            files = {0: reading, 1: output.fileno() if stdout is None else stdout, 2: errors.fileno()}
            variables = {**os.environ, **(environment or {})}
            process = PreloadedProcess(words, variables, cwd, files, finalizes=finalizes)
        finally:
            os.close(reading)
        try:
            status = process.wait(timeout)
        finally:
            process.send_signal(signal.SIGKILL)
            process.close()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(words), status, output.read(), errors.read())


class _Descriptor:
    """A file descriptor that is passed along when a process is started."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getstate__(self) -> Any:
        return DupFd(self._number)

    def __setstate__(self, passed: Any) -> None:
        received = passed.detach()
        self._number = fcntl.fcntl(received, fcntl.F_DUPFD, _FIRST_RECEIVED)  # above numbers that are replaced
        os.close(received)

    def replace(self, number: int) -> None:
        """Duplicate it to this descriptor and close it."""
        os.dup2(self._number, number)
        os.close(self._number)


def run_program(
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    constants: Mapping[str, float],
    files: dict[int, _Descriptor],
    *,
    new_session: bool = False,
    finalizes: bool = False,
    forkserver: str = "",
    most_files: int = 0,
) -> None:
    """Run `python WORDS` to its end, as a new interpreter would. forkserver: address of the forking process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    if forkserver:
        _fork_engines(forkserver)
    for number, file in files.items():
        file.replace(number)
    if most_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if 0 in files:
        sys.stdin = os.fdopen(0, closefd=False)
        if os.isatty(0):
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if 1 in files:
        sys.stdout = os.fdopen(1, "w", closefd=False)  # line by line in a terminal, as Python's own
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for dotted, value in constants.items():
        module, _, name = dotted.rpartition(".")
        before = getattr(importlib.import_module(module), name)  # raises for a constant that was renamed or removed
        setattr(importlib.import_module(module), name, type(before)(value))
    kind, program, *arguments = words
    try:
        if kind == "-c":
            sys.argv = [kind, *arguments]
            sys.modules["__main__"] = ModuleType("__main__")  # its variables are deleted when the interpreter ends
            exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = [program, *arguments]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except BaseException as error:
        if not finalizes:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        status = error.code if isinstance(error, SystemExit) else 1
        ctypes.pythonapi.Py_Exit(status if isinstance(status, int) else int(status is not None))
    finally:
        if not finalizes:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    if finalizes:
        ctypes.pythonapi.Py_Exit(0)


def _fork_engines(address: str) -> None:
    """Let this forked process fork its engine's process from the process at `address`, too."""
    from retrieval_attn.server import engine_process

    server: Any = multiprocessing.forkserver._forkserver
    server._forkserver_address, server.ensure_running = address, lambda: None
    engine_process.subprocess = forked_processes()


def _address() -> str:
    """Return the address of the forking process; start it if it does not run yet."""
    server: Any = multiprocessing.forkserver._forkserver
    with _variables_of_imports():
        server.ensure_running()
    return str(server._forkserver_address)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@contextmanager
def _variables_of_imports() -> Iterator[None]:
    """Set BEFORE_IMPORT while the forking process is started."""
    before = {name: os.environ.get(name) for name in BEFORE_IMPORT}
    os.environ.update(BEFORE_IMPORT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
