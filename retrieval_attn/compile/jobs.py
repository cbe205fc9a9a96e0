"""Compiling kernels ahead: named jobs, done by a few other processes at once, each once per machine.

Numba holds one lock while it compiles, so that threads cannot compile side by side; processes can, and share what they
made through the cache's folder (`cache_dir.py`). A job is a function of this package and its arguments: a change that
adds a kernel that a first token would wait for names a function here that runs it on a few numbers. This process goes
on meanwhile; who is about to run kernels calls `wait_until_compiled`, or compiles what is missing itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from retrieval_attn.compile import cache_dir as place
from retrieval_attn.compile.progress import ProgressBar

MAX_PROCESSES = 8
REASON = "compiling kernels for this processor, once per machine"

logger = logging.getLogger(__name__)
_under_way: set[Compilation] = set()


class CompileJob(NamedTuple):
    """target: "module:function" of the package, which imports no torch. arguments: what it gets, plain strings.

    The function runs kernels on a few numbers, exactly as they are run later: Numba compiles for types and layouts.
    """

    target: str
    arguments: tuple[str, ...] = ()

    def run(self) -> None:
        """Compile here, or load what is compiled."""
        module, name = self.target.split(":")
        getattr(importlib.import_module(module), name)(*self.arguments)

    @property
    def mark(self) -> Path:
        """The file that says that this job is done, for this processor and these sources."""
        module = self.target.split(":")[0]
        key = hashlib.sha256(json.dumps([*self, place.source_key(module)]).encode()).hexdigest()[:24]
        return place.numba_folder() / "jobs" / key

    def __str__(self) -> str:
        name = self.target.removeprefix("retrieval_attn.").replace(":", ".")
        return f"{name}({', '.join(one for one in self.arguments if not one.startswith('{'))})"


def missing(jobs: Sequence[CompileJob]) -> list[CompileJob]:
    """Return the `jobs` that are not done on this machine, each once."""
    return [job for job in dict.fromkeys(jobs) if not job.mark.exists()]


class Compilation:
    """Jobs that other processes do from now on, at most `processes` at once. Used as a context, it ends with it.

    A job that another compilation of this process has under way is waited for, not done again. One that no thread waits
    for ends by itself, or with this process.
    failed: why a job was not done; it is done in this process when its kernels are called. With a bar if `progress`
    and it takes longer than two seconds, which counts jobs that are waited for, too.
    """

    def __init__(self, jobs: Sequence[CompileJob], *, progress: bool = True, processes: int | None = None) -> None:
        """Jobs that are done already are left out. Nothing is started where no process can be, or no kernel be kept:
        this process compiles then, as it goes.
        """
        self.jobs = missing(jobs)
        self.failed: dict[CompileJob, str] = {}
        asked = [(other, other._left_of(self.jobs)) for other in list(_under_way)]
        self._elsewhere = [(other, shared) for other, shared in asked if shared]
        theirs = set[CompileJob]().union(*(shared for _, shared in self._elsewhere))
        self._waiting = [job for job in self.jobs if job not in theirs]
        self._left: set[CompileJob] = set(self._waiting)  # neither done nor failed
        self._lock, self._workers = threading.Condition(), list[subprocess.Popen[str]]()
        self._threads: list[threading.Thread] = []
        self._followers: list[tuple[Compilation, set[CompileJob]]] = []  # whose bars count jobs of this one
        self._bar: Any = None
        if not self._waiting or not sys.executable or not _can_keep():
            self._waiting, self._left = [], set()
        counted = len(self._waiting) + len(theirs)
        if progress and counted:
            self._bar = ProgressBar(total=counted, desc=REASON, unit="kernel", delay=2.0, leave=False)
        for other, shared in self._elsewhere:
            other._tell(self, shared)
        if not self._waiting:
            return
        most = processes or min(MAX_PROCESSES, len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._drive, name=f"retrieval_attn-compile-{number}", daemon=True)
            for number in range(min(most, len(self._waiting)))
        ]
        self._running = len(self._threads)
        _under_way.add(self)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until all jobs are done, or have failed."""
        for thread in self._threads:
            thread.join()
        for other, shared in self._elsewhere:
            other._wait_for_jobs(shared)
            self.failed |= {job: why for job, why in other.failed.items() if job in shared}
        self.close()

    def wait_for(self, targets: Collection[str]) -> None:
        """Until those jobs that run one of these functions are done, or have failed."""
        with self._lock:
            self._lock.wait_for(lambda: not any(job.target in targets for job in self._left))

    def _left_of(self, jobs: Sequence[CompileJob]) -> set[CompileJob]:
        with self._lock:
            return self._left.intersection(jobs)

    def _tell(self, follower: Compilation, jobs: set[CompileJob]) -> None:
        """Have a follower's bar count these jobs, those that were done in the meantime too."""
        with self._lock:
            self._followers.append((follower, jobs))
            done = len(jobs - self._left)
        follower._count(done)

    def _count(self, jobs: int) -> None:
        with self._lock:
            if self._bar is not None and jobs:
                self._bar.update(jobs)

    def _wait_for_jobs(self, jobs: set[CompileJob]) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not jobs & self._left)

    def close(self) -> None:
        """Begin no other job, end the processes."""
        with self._lock:
            self._waiting.clear()
            self._left.clear()
            self._lock.notify_all()
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.kill()
        for thread in self._threads:
            thread.join()
        self._threads = []
        _under_way.discard(self)
        with self._lock:
            bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def __enter__(self) -> Compilation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            self.close()

    def _drive(self) -> None:
        """A thread's work."""
        try:
            self._do_all()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    _under_way.discard(self)

    def _do_all(self) -> None:
        """Start a process, hand it one job after the other."""
        worker: subprocess.Popen[str] | None = None
        while True:
            with self._lock:
                if not self._waiting:
                    break
                job = self._waiting.pop(0)
                if worker is None:
                    try:
                        worker = _start()
                    except OSError as error:
                        self.failed[job] = str(error)
                        self._left.difference_update([job, *self._waiting])
                        self._waiting.clear()
                        self._lock.notify_all()
                        return
                    self._workers.append(worker)
            self._do(job, worker)
            if worker.poll() is not None:
                _end(worker)
                worker = None
        if worker is not None:
            _end(worker)

    def _do(self, job: CompileJob, worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps([job.target, *job.arguments]) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except (OSError, ValueError) as error:
            answer = str(error)
        if answer != "done\n":
            self.failed[job] = answer.strip() or "the process ended"
            worker.kill()
            worker.wait()
            logger.info("%s was not compiled ahead: %s", job, self.failed[job])
        with self._lock:
            self._left.discard(job)
            self._lock.notify_all()
            followers = list(self._followers)
        self._count(1)
        for follower, jobs in followers:
            follower._count(job in jobs)


def wait_until_compiled(*targets: str) -> None:
    """Until no compilation that this process began still has jobs of these functions to do (none named: any jobs).

    Their kernels load then, in place of being compiled.
    """
    for compilation in list(_under_way):
        if targets:
            compilation.wait_for(targets)
        else:
            compilation.wait()


@atexit.register
def _end_all() -> None:
    """Close compilations that no thread waited for when the process ends."""
    for compilation in list(_under_way):
        compilation.close()


if hasattr(os, "register_at_fork"):  # a child has none of the threads, and the processes are not its own
    os.register_at_fork(after_in_child=_under_way.clear)


def _end(worker: subprocess.Popen[str]) -> None:
    """Let it end after its job, if it still runs."""
    with contextlib.suppress(BrokenPipeError), worker:
        pass


_LINUX = hasattr(os, "sched_getaffinity")


def _can_keep() -> bool:
    try:
        place.require_writable(place.numba_folder() / "jobs")
    except OSError as error:
        place.complain(place.numba_folder(), error)
        return False
    return True


def _start() -> subprocess.Popen[str]:
    """A process that does jobs (`worker.py`). A signal of the terminal reaches this process alone, which ends it."""
    paths = [str(place.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    environment[place.VARIABLE] = str(place.folder())
    if place.numba_folder_is_given():
        environment["NUMBA_CACHE_DIR"] = str(place.numba_folder())
    return subprocess.Popen(
        [sys.executable, "-m", "retrieval_attn.compile.worker"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
