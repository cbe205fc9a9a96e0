"""The worker pool: every task once, errors, turns, foreign threads, sleep, close, fork, constant memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import carray, cfunc, njit

from retrieval_attn.cpu.pool import JobError, Pool, default_pool, run_job
from retrieval_attn.errors import BackendError, ConfigError
from retrieval_attn.index.task.atomics import at_address, atomic_add, atomic_load, atomic_swap, nanoseconds
from tests.cpu.reference import in_threads
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MOST = 4096
Words = npt.NDArray[np.int64]

# Descriptor of the test jobs, int64 words: [0, MOST) how often each task ran; then per worker a flag that it is busy,
# the number of clashes, the tasks per worker, nanoseconds that a task takes, the code that a task fails with.
BUSY, CLASHES, PER_WORKER, LASTS, CODES = MOST, MOST + 64, MOST + 65, MOST + 129, MOST + 130
WORDS = 2 * MOST + 130


@cfunc("int64(int64, int64, int64)", cache=True)
def count(descriptor: int, task: int, worker: int) -> int:
    """Notes who ran what, and fails where the descriptor says so."""
    if atomic_swap(descriptor + 8 * (BUSY + worker), 1):
        atomic_add(descriptor + 8 * CLASHES, 1)
    atomic_add(descriptor + 8 * task, 1)
    atomic_add(descriptor + 8 * (PER_WORKER + worker), 1)
    since = nanoseconds()
    while nanoseconds() - since < atomic_load(descriptor + 8 * LASTS):
        pass
    atomic_swap(descriptor + 8 * (BUSY + worker), 0)
    return atomic_load(descriptor + 8 * (CODES + task))


@njit(nogil=True, cache=True)
def repeat(control: int, function: int, descriptor: int, tasks: int, width: int, times: int) -> int:
    """Post a job many times; returns the first error."""
    for _ in range(times):
        error = run_job(control, function, descriptor, tasks, width)
        if error != 0:
            return error
    return 0


@cfunc("int64(int64)", cache=True)
def foreign(address: int) -> int:
    """Body of a thread that Python did not start: [control, function, descriptor, tasks, width, times, result]."""
    words = carray(at_address(address), 7, np.int64)
    words[6] = repeat(words[0], words[1], words[2], words[3], words[4], words[5])
    return 0


COUNT: Any = count.address
FOREIGN: Any = foreign.address


@pytest.fixture
def words() -> Words:
    return np.zeros(WORDS, np.int64)


@pytest.fixture(params=[1, 2, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param, cpus=()) as made:
        yield made


def check_counts(words: Words, tasks: int, times: int) -> None:
    assert (words[:tasks] == times).all() and (words[tasks:MOST] == 0).all()
    assert words[CLASHES] == 0, "two tasks ran at once as the same worker"


@pytest.mark.parametrize("tasks", [0, 1, 2, 31, 1000])
def test_every_task_runs_once_per_job(pool: Pool, words: Words, tasks: int) -> None:
    """Whatever the number of threads; breaks if a late worker takes a task of the next job."""
    for _ in range(200):
        assert pool.run(COUNT, words.ctypes.data, tasks) is None
    check_counts(words, tasks, 200)
    assert words[PER_WORKER : PER_WORKER + 64].sum() == 200 * tasks
    assert not words[PER_WORKER + pool.workers : PER_WORKER + 64].any()


def test_the_lowest_error_is_reported_and_the_other_tasks_still_run(pool: Pool, words: Words) -> None:
    """Not the first in time: that would differ from run to run."""
    words[CODES + 70], words[CODES + 7], words[CODES + 8] = 3, 9, 1
    assert pool.run(COUNT, words.ctypes.data, 100) == JobError(7, 9)
    check_counts(words, 100, 1)
    words[CODES + 7] = -1
    assert pool.run(COUNT, words.ctypes.data, 100) == JobError(7, 2**31 - 1)
    words[CODES : CODES + 100] = 0
    words[CODES] = 2**32
    assert pool.run(COUNT, words.ctypes.data, 100) == JobError(0, 2**31 - 1)
    words[CODES] = 0
    assert pool.run(COUNT, words.ctypes.data, 100) is None


def test_width_limits_who_takes_part(words: Words) -> None:
    """threads=1: the poster alone, without a word to the others."""
    with Pool(4, cpus=()) as pool:
        words[LASTS] = 20_000
        for threads in (1, 2, 4, 99):
            words[PER_WORKER : PER_WORKER + 64] = 0
            pool.run(COUNT, words.ctypes.data, 200, threads=threads)
            assert not words[PER_WORKER + min(threads, 4) : PER_WORKER + 64].any(), threads
        with pytest.raises(ConfigError, match="threads=0"):
            pool.run(COUNT, words.ctypes.data, 200, threads=0)


def test_caller_may_stay_out_of_the_work(words: Words) -> None:
    """Then worker 0 never runs a task, and as many threads are started as were asked for."""
    with Pool(2, caller_works=False, spin_microseconds=0) as pool:
        assert (pool.threads, pool.workers) == (2, 3)
        for _ in range(50):
            pool.run(COUNT, words.ctypes.data, 10)
            pool.run(COUNT, words.ctypes.data, 10, threads=1)
        check_counts(words, 10, 100)
        assert words[PER_WORKER] == 0


@pytest.mark.parametrize("spin", [0, 30])
def test_sleepers_are_woken(words: Words, spin: float) -> None:
    """After a pause long enough to sleep, jobs still get help: breaks if a wake-up is lost."""
    with Pool(3, caller_works=False, spin_microseconds=spin) as pool:
        for i in range(300):
            pool.run(COUNT, words.ctypes.data, 5)
            if i % 10 == 0:
                time.sleep(0.002)
        check_counts(words, 5, 300)


def test_callers_take_turns(pool: Pool) -> None:
    """Four Python threads post at once; each job is whole."""
    descriptors = [np.zeros(WORDS, np.int64) for _ in range(4)]
    errors: list[object] = []

    def post(words: Words) -> None:
        errors.append(repeat(pool.address, COUNT, words.ctypes.data, 17, 8, 500))

    in_threads(*[functools.partial(post, words) for words in descriptors])
    assert errors == [0] * 4
    for words in descriptors:
        check_counts(words, 17, 500)


def test_a_thread_unknown_to_python_may_post(pool: Pool, words: Words) -> None:
    """As a CUDA callback thread does; while it works, the main thread holds the GIL all the time."""
    library = ctypes.CDLL(None)
    arguments = np.array([pool.address, COUNT, words.ctypes.data, 32, 8, 300, -1], np.int64)
    thread = ctypes.c_ulong()
    body = ctypes.c_void_p(FOREIGN)
    held_gil = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody takes the GIL away: the job must not need it
    try:
        create = ctypes.PyDLL(None).pthread_create  # PyDLL: the call itself keeps the GIL too
        assert create(ctypes.byref(thread), None, body, ctypes.c_void_p(arguments.ctypes.data)) == 0
        deadline = time.perf_counter() + 20
        while arguments[6] == -1 and time.perf_counter() < deadline:
            pass
    finally:
        sys.setswitchinterval(held_gil)
    library.pthread_join(thread, None)
    assert arguments[6] == 0
    check_counts(words, 32, 300)


def threads() -> set[str]:
    """The ids of this process's threads, those that are leaving too."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux lists a process's threads there")
def test_close_joins_the_threads_and_refuses_jobs(words: Words) -> None:
    """No thread is left, and a job says why it cannot run. A pool nobody holds closes itself."""
    Pool(1).close()
    before = threads()
    pool = Pool(4, spin_microseconds=1e6)
    wait_until(lambda: len(threads() - before) == 3)
    started = threads() - before
    pool.run(COUNT, words.ctypes.data, 8)
    pool.close()
    assert pool.closed
    wait_until(lambda: not threads() & started)
    with pytest.raises(BackendError, match="closed"):
        pool.run(COUNT, words.ctypes.data, 8)
    pool.close()
    before = threads()
    dropped = Pool(4)
    assert not dropped.closed
    wait_until(lambda: len(threads() - before) == 3)
    started = threads() - before
    del dropped
    gc.collect()
    wait_until(lambda: not threads() & started)
    check_counts(words, 8, 1)


def test_the_shared_pool_is_one_until_it_is_closed() -> None:
    first = default_pool()
    assert default_pool() is first and not first.closed
    first.close()
    assert default_pool() is not first and not default_pool().closed


@pytest.mark.parametrize(
    "options, message",
    [
        ({"threads": 0}, "threads=0"),
        ({"threads": True}, "threads=True"),
        ({"threads": 1.5}, "threads=1.5"),
        ({"cpus": [99999]}, "99999"),
        ({"spin_microseconds": -1}, "spin_microseconds=-1"),
        ({"spin_microseconds": float("nan")}, "spin_microseconds=nan"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    """Before a thread is started."""
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        Pool(**options)
    assert threading.active_count() == before


def test_bad_jobs_are_named(words: Words) -> None:
    """A null function would end the process."""
    with Pool(1) as pool:
        for function, tasks in ((0, 4), (COUNT, -1), (COUNT, 2**31)):
            with pytest.raises(ConfigError, match="a job needs"):
                pool.run(function, words.ctypes.data, tasks)


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_fork_is_told_apart() -> None:
    """Threads do not survive a fork: an error in the child, also if the pool was busy then; the parent goes on."""
    done = python(
        """
        import os, threading, numpy as np
        from tests.cpu.test_pool import COUNT, LASTS, WORDS
        from retrieval_attn.cpu.pool import Pool, default_pool
        from retrieval_attn.errors import BackendError
        pool, words, shared = Pool(2), np.zeros(WORDS, np.int64), default_pool()
        words[LASTS] = 50_000_000
        busy = threading.Thread(target=pool.run, args=(COUNT, words.ctypes.data, 4))
        busy.start()
        child = os.fork()
        if not child:
            try:
                pool.run(COUNT, words.ctypes.data, 4)
            except BackendError as error:
                fresh = default_pool()
                assert fresh is not shared
                words[LASTS] = 0
                assert fresh.run(COUNT, words.ctypes.data, 4) is None
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        busy.join()
        assert pool.run(COUNT, words.ctypes.data, 4) is None and (words[:4] == 2).all()
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_interpreter_exits_with_pools_open() -> None:
    """Threads that spin, sleep or work must not hang or crash its end."""
    done = python(
        """
        import threading, numpy as np
        from tests.cpu.test_pool import COUNT, LASTS, WORDS
        from retrieval_attn.cpu.pool import Pool, default_pool
        pools = [Pool(3, spin_microseconds=spin) for spin in (0, 1e8)]
        words = np.zeros(WORDS, np.int64)
        default_pool().run(COUNT, words.ctypes.data, 4)
        words[LASTS] = 100_000_000
        threading.Thread(target=pools[0].run, args=(COUNT, words.ctypes.data, 4), daemon=True).start()
        """
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_hundred_thousand_jobs_in_constant_memory(words: Words) -> None:
    """Not a byte per job (the bench runs a million)."""
    with Pool(2) as pool:
        repeat(pool.address, COUNT, words.ctypes.data, 8, 2, 1000)
        before = resident_bytes()
        repeat(pool.address, COUNT, words.ctypes.data, 8, 2, 100_000)
        for _ in range(10_000):
            pool.run(COUNT, words.ctypes.data, 8)
        assert resident_bytes() - before < 1 << 20
    check_counts(words, 8, 111_000)


def resident_bytes() -> int:
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc on this system")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
