"""A pool of threads that stay inside compiled code and run the tasks of a job without the GIL.

A job is a C function `int64 f(int64 descriptor, int64 task, int64 worker)` (`numba.cfunc`), the address of a
descriptor it understands, and a number of tasks. A task returns 0, or an error code from 1 to 2**31 - 1; it must not
raise, and must not run a job of the same pool. The thread that posts a job works on it as well, as worker 0, unless the
pool was told otherwise. `run_job` is compiled: other kernels call it, and C functions on threads that Python does not
know.

All words live in one control block. The claim word holds the number of the job (high half) and its tasks that no thread
has taken (low half): taking one is a single compare-and-swap, which fails if the job is no longer the one whose
function was read before. So no thread waits for a worker without a task: one that sleeps or was preempted is not
missed.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import BackendError, ConfigError
from retrieval_attn.index.task.atomics import (
    YIELD_NANOSECONDS,
    atomic_add,
    atomic_exchange_if,
    atomic_load,
    atomic_min,
    atomic_swap,
    call_task,
    nanoseconds,
    pause,
    sleep_on,
    wake,
    yield_core,
)
from retrieval_attn.index.threads import allowed_cores, usable_cores

SPIN_MICROSECONDS = 2000.0
"""How long workers look for the next job before they sleep: longer than a layer of a decode step takes elsewhere. A
sleeper is of no help for the first 150 us of a job (measured on a virtual machine); one that looks gives way to others.
"""
LOOKS = 32
"""Pauses between two readings of the clock."""
WOKEN_AT_ONCE = 2
"""Sleepers that the poster wakes, and that each of them wakes in turn: waking all would keep the poster busy."""
MAX_TASKS = 2**31 - 1

# Byte offsets into the control block. Each group of words that is written together has a cache line of its own, two
# lines apart: processors fetch them in pairs.
_STATE, _CALLER_WORKS, _SPIN = 0, 8, 16
_CLAIM = 128
_FUNCTION, _DESCRIPTOR, _TASKS, _WIDTH = 256, 264, 272, 280
_DONE = 384
_ERROR = 512
_LOCK = 640
_SLEEPERS, _ALARM = 768, 776
_BYTES = 896

_OPEN, _CLOSED, _FORKED = 1, 2, 3
CLOSED, FORKED = -2, -3
"""What `run_job` returns without running anything."""
_NO_ERROR = np.iinfo(np.int64).max
_LEFT = 0xFFFFFFFF


@njit(nogil=True, cache=True)
def _take_tasks(control, worker, claim):
    """Run tasks of the job that `claim` names until none is left; returns how many were run."""
    count = 0
    while claim & _LEFT:
        function = atomic_load(control + _FUNCTION)
        descriptor = atomic_load(control + _DESCRIPTOR)
        tasks = atomic_load(control + _TASKS)
        if worker >= atomic_load(control + _WIDTH):
            return count
        if atomic_exchange_if(control + _CLAIM, claim, claim - 1):
            task = tasks - (claim & _LEFT)
            code = call_task(function, descriptor, task, worker)
            if code != 0:
                if code < 0 or code > 0x7FFFFFFF:
                    code = np.int64(0x7FFFFFFF)
                atomic_min(control + _ERROR, (task << 32) | code)
            atomic_add(control + _DONE, 1)
            count += 1
        claim = atomic_load(control + _CLAIM)
    return count


@njit(nogil=True, cache=True)
def _work(control, worker):
    """Run the tasks of a worker thread until the pool closes."""
    idle_since = nanoseconds()
    while True:
        if _take_tasks(control, worker, atomic_load(control + _CLAIM)):
            idle_since = nanoseconds()
        for _ in range(LOOKS):
            if atomic_load(control + _CLAIM) & _LEFT:
                break
            pause()
        if atomic_load(control + _CLAIM) & _LEFT and worker < atomic_load(control + _WIDTH):
            continue
        if atomic_load(control + _STATE) != _OPEN:
            return
        idle = nanoseconds() - idle_since
        if idle > atomic_load(control + _SPIN):
            alarm = atomic_load(control + _ALARM)
            atomic_add(control + _SLEEPERS, 1)
            # looked at once more after having signed in: a poster either sees the sleeper or is seen by it
            if not (atomic_load(control + _CLAIM) & _LEFT) and atomic_load(control + _STATE) == _OPEN:
                sleep_on(control + _ALARM, alarm)
            left = atomic_add(control + _SLEEPERS, -1) - 1
            if left > 0 and atomic_load(control + _CLAIM) & _LEFT:
                wake(control + _ALARM, WOKEN_AT_ONCE)
            idle_since = nanoseconds()
        elif idle > YIELD_NANOSECONDS:
            yield_core()


@njit(nogil=True, cache=True)
def _lock(control):
    since = nanoseconds()
    while not atomic_exchange_if(control + _LOCK, 0, 1):
        for _ in range(LOOKS):
            if atomic_load(control + _LOCK) == 0:
                break
            pause()
        if nanoseconds() - since > YIELD_NANOSECONDS:
            yield_core()


@njit(nogil=True, cache=True)
def run_job(control, function, descriptor, tasks, width):
    """Run tasks 0 .. tasks - 1 of a job on at most `width` threads, the caller's among them; blocks until all are done.

    control: `Pool.address`; function: address of int64 f(int64 descriptor, int64 task, int64 worker), 0 <= worker <
    `Pool.workers`, no two tasks at once with the same worker. Every task runs, also after an error. Returns 0, or the
    error of the lowest task that failed as task << 32 | code, or CLOSED, or FORKED. Callers take turns.
    """
    if tasks <= 0:
        return np.int64(0)
    _lock(control)
    state = atomic_load(control + _STATE)
    if state != _OPEN:
        atomic_swap(control + _LOCK, 0)
        return np.int64(CLOSED if state == _CLOSED else FORKED)
    atomic_swap(control + _DONE, 0)
    atomic_swap(control + _ERROR, _NO_ERROR)
    atomic_swap(control + _FUNCTION, function)
    atomic_swap(control + _DESCRIPTOR, descriptor)
    atomic_swap(control + _TASKS, tasks)
    caller_works = atomic_load(control + _CALLER_WORKS)
    atomic_swap(control + _WIDTH, max(width, 1) + 1 - caller_works)
    claim = (((atomic_load(control + _CLAIM) >> 32) + 1) << 32) | tasks
    atomic_swap(control + _CLAIM, claim)
    helped = (width > 1 and tasks > 1) or not caller_works
    if helped and atomic_add(control + _SLEEPERS, 0) > 0:
        atomic_add(control + _ALARM, 1)
        wake(control + _ALARM, WOKEN_AT_ONCE)
    if caller_works:
        _take_tasks(control, 0, claim)
    if atomic_load(control + _DONE) != tasks:
        since = nanoseconds()
        while atomic_load(control + _DONE) != tasks:
            for _ in range(LOOKS):
                if atomic_load(control + _DONE) == tasks:
                    break
                pause()
            if nanoseconds() - since > YIELD_NANOSECONDS:
                yield_core()
    error = atomic_load(control + _ERROR)
    atomic_swap(control + _LOCK, 0)
    return np.int64(0) if error == _NO_ERROR else error


@njit(nogil=True, cache=True)
def _close(control, state):
    """Wait for the job that runs, then refuse to post or wait."""
    _lock(control)
    atomic_swap(control + _STATE, state)
    atomic_add(control + _ALARM, 1)
    wake(control + _ALARM, 0x7FFFFFFF)
    atomic_swap(control + _LOCK, 0)


class JobError(NamedTuple):
    """The first task of a job that failed, and its error code (1 .. 2**31 - 1)."""

    task: int
    code: int


class Pool:
    """Threads that wait in compiled code for jobs. Any thread may post; several that do take turns.

    Closing is safe at any time and happens by itself at the interpreter's exit or when the pool is collected.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        cpus: Sequence[int] | None = None,
        spin_microseconds: float = SPIN_MICROSECONDS,
        caller_works: bool = True,
    ) -> None:
        """Compile what the threads run and start them (a second on the first use of a machine, else milliseconds).

        threads: that work on a job at once, the poster's included if caller_works. None: all cores this process may
        use (of several ranks on a machine its share: `index/threads.py`), less one that stays free for the rest of the
        program if there are more than four. cpus: cores that the
        started threads are pinned to in turn, () for none; None: one each, the last ones, if that leaves one to the
        poster (a sleeper that is free to move wakes up on the core of the poster, and waits there). spin_microseconds:
        how long they look for another job before they sleep. Raises ConfigError.
        """
        ours = usable_cores()
        if threads is None:
            threads = len(ours) if len(ours) <= 4 else len(ours) - 1
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
            raise ConfigError(f"threads={threads!r} must be None or a whole number from 1 to 1024")
        if not 0 <= spin_microseconds < 1e9:
            raise ConfigError(f"spin_microseconds={spin_microseconds!r} must lie in 0 .. 1e9")
        started = threads - 1 if caller_works else threads
        if cpus is None:
            cpus = ours[len(ours) - started :] if started < len(ours) else ()
        unknown = sorted(set(cpus) - set(allowed_cores()))
        if unknown:
            raise ConfigError(f"cpus {unknown} are not among those this process may use: {allowed_cores()}")
        self.threads, self.cpus = threads, tuple(cpus)
        """Threads that work on a job at once, and cores that the started ones are pinned to, () for none."""
        words = _BYTES // 8
        memory = np.zeros(words + 16, np.int64)
        control = memory[-memory.ctypes.data % 128 // 8 :][:words]
        control[_CALLER_WORKS // 8] = caller_works
        control[_SPIN // 8] = int(spin_microseconds * 1000)
        control[_STATE // 8] = _OPEN
        self._control = control
        self._started = started
        compile_pool()
        workers = [
            threading.Thread(
                target=_enter,
                args=(control, 1 + i, cpus[i % len(cpus)] if cpus else None),
                name=f"retrieval-attn-{1 + i}",
                daemon=True,  # the interpreter would wait for others before it lets anyone close them
            )
            for i in range(started)
        ]
        for worker in workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _shut, control, workers, os.getpid())
        _forkable[id(control)] = self

    @property
    def address(self) -> int:
        """Address of the control block, for `run_job`; valid while the pool object lives."""
        return int(self._control.ctypes.data)

    @property
    def workers(self) -> int:
        """Worker numbers that tasks may see are below this: as many pieces of scratch memory are needed."""
        return self._started + 1

    @property
    def closed(self) -> bool:
        """No job can be run any more."""
        return bool(self._control[_STATE // 8] != _OPEN)

    def run(self, function: int, descriptor: int, tasks: int, *, threads: int | None = None) -> JobError | None:
        """Run a job (see `run_job`) and wait for it without the GIL. threads: at most this many, None for all.

        Returns None, or the error of the lowest task that failed. tasks may be 0. Raises ConfigError for numbers out of
        range, BackendError if the pool is closed or belongs to the process that this one was forked from.
        """
        if not 0 <= tasks <= MAX_TASKS or not function:
            raise ConfigError(
                f"a job needs a function and 0 .. {MAX_TASKS} tasks, got tasks={tasks}, address {function:#x}"
            )
        width = self.threads if threads is None else threads
        if width < 1:
            raise ConfigError(f"threads={threads} must be at least 1")
        code = run_job(self.address, function, descriptor, tasks, min(width, self.threads))
        raise_if_unusable(code)
        return None if code == 0 else JobError(code >> 32, code & _LEFT)

    def close(self) -> None:
        """Wait for a job that runs, stop the threads and join them. Later jobs raise; closing again does nothing."""
        self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def raise_if_unusable(code: int) -> None:
    """Raise BackendError if `code`, returned by `run_job`, says that the pool could not run the job at all."""
    if code == CLOSED:
        raise BackendError("the pool of worker threads is closed; make a new Pool")
    if code == FORKED:
        raise BackendError(
            "the pool of worker threads belongs to the process that this one was forked from, and threads do not "
            "survive a fork; make a new Pool here, or start processes with the 'spawn' method"
        )


def compile_pool() -> None:
    """Compile what a pool runs, or load it from Numba's cache."""
    _work.compile("void(int64, int64)")
    _close.compile("void(int64, int64)")
    run_job.compile("int64(int64, int64, int64, int64, int64)")


def default_pool() -> Pool:
    """The pool that everything shares unless given another: made on first use, again if closed or after a fork."""
    global _default
    with _default_lock:
        if _default is None or _default.closed:
            _default = Pool()
        return _default


_default: Pool | None = None
_default_lock = threading.Lock()
_forkable: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()


def _enter(control: npt.NDArray[np.int64], worker: int, cpu: int | None) -> None:
    """Body of a worker thread; holds the control block, so that it outlives the thread."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a core that was taken away meanwhile: run anywhere
            os.sched_setaffinity(0, {cpu})  # of the calling thread only
    _work(control.ctypes.data, worker)


def _shut(control: npt.NDArray[np.int64], workers: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return
    _close(control.ctypes.data, _CLOSED)
    for worker in workers:
        worker.join()


def _after_fork() -> None:
    """In the child: the threads are gone, and a lock that one of them held would never be released."""
    global _default_lock
    _default_lock = threading.Lock()
    for pool in list(_forkable.values()):
        pool._control[_STATE // 8] = _FORKED
        pool._control[_LOCK // 8] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
