"""Threads of parallel kernels: their number, mutual exclusion, cores, BLAS threads, forked processes and Ctrl-C.

The numbers of threads that the user has given torch and others stay as they are.

Numba's `workqueue` layer (its fallback on systems without libgomp and TBB) aborts the process when two Python threads
enter a parallel kernel; there, and until the layer is known, they take turns.

Threads do not survive a fork: OpenMP blocks forever or aborts in a process forked from one that computed, so such a
process is refused.

A launcher such as torchrun starts one process per GPU and says so in the environment. Each would otherwise take all
cores, and pin its workers to the same ones. So cores are divided: evenly, in whole physical cores, neighbours (one
socket's) to one rank. Ranks that the launcher has bound to cores of their own keep those.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numba
import threadpoolctl

from retrieval_attn.errors import BackendError, ConfigError


@dataclass
class _ForkState:
    """computed: libraries started threads in this process. forked: they did so in a parent process."""

    computed: bool = False
    forked: bool = False


_process = _ForkState()


def refuse_forked() -> None:
    """Raise BackendError in a process that was forked from one that computed."""
    if _process.forked:
        raise BackendError(
            f"Process {os.getpid()} was forked from a process whose threads had computed; threads do not survive a "
            "fork, and torch would block forever. Fork before the first context is read, or start processes "
            'with multiprocessing.get_context("spawn").'
        )


def use_threads() -> None:
    """Note that this process computes with threads. Raises as `refuse_forked`."""
    refuse_forked()
    _process.computed = True


def _after_fork() -> None:
    _process.forked, _process.computed = _process.forked or _process.computed, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


log = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()


def check_threads(threads: int | None) -> None:
    """Raise ConfigError unless `threads` is None (as many as Numba has) or 1 .. numba.config.NUMBA_NUM_THREADS.

    Also where Numba was told not to compile.
    """
    options = vars(numba.config)  # set at import from the environment
    if options["DISABLE_JIT"]:
        raise ConfigError(
            "searches need compilation by Numba, but NUMBA_DISABLE_JIT is set; unset it before the first import"
        )
    most: int = options["NUMBA_NUM_THREADS"]
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise ConfigError(
            f"threads={threads!r} must be None or a whole number from 1 to {most}, the threads Numba has; "
            "set NUMBA_NUM_THREADS before the first import for more"
        )


@functools.cache
def say_if_threads_spin() -> bool:
    """Log once, where other programs use the processor, that threads of torch's OpenMP spin; whether that was said.

    The policy is read when torch is loaded, so that only who starts Python can choose it. Steps of a small model on two
    busy cores take 170 to 210 ms in place of 8 to 10.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ or not hasattr(os, "getloadavg"):
        return False
    load, cores = os.getloadavg()[0], len(usable_cores())
    if load < cores / 2:
        return False
    log.warning(
        "the CPU is busy (load %.1f on %d cores): set OMP_WAIT_POLICY=passive before starting Python, or decoding can "
        "be 10 times slower.",
        load,
        cores,
    )
    return True


@contextlib.contextmanager
def kernel_threads(threads: int | None) -> Iterator[None]:
    """Run parallel kernels of the calling thread on `threads` threads inside the block, then restore the count.

    None leaves the count alone, or of several ranks on a machine lowers it to this rank's share of the cores
    (`index/threads.py`). Blocks nest. Raises ConfigError for a count that cannot be had, BackendError
    in a process that was forked from one that computed.
    """
    check_threads(threads)
    use_threads()
    _launch()
    if threads is None and local_ranks()[1] > 1:
        threads = min(numba.get_num_threads(), len(usable_cores()))
    with _one_at_a_time if _layer_is_exclusive() else contextlib.nullcontext():
        before = numba.get_num_threads()
        if threads is not None:
            numba.set_num_threads(threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


@contextlib.contextmanager
def builder_threads(threads: int, most: int) -> Iterator[None]:
    """For one of several threads that build indexes at once: parallel kernels inside run on `threads` threads.

    Where only one may run at a time (see the module) builders do not wait for each other, but for each other's kernels,
    which then run on `most` threads. Raises ConfigError and BackendError as `kernel_threads` does.
    """
    check_threads(most)
    use_threads()
    with _launching:
        _launch()
    before = numba.get_num_threads()
    numba.set_num_threads(most if _layer_is_exclusive() else threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)


_launching = threading.Lock()
"""Builders begin together: each would look for the process's libraries, half a minute of 14 threads on one machine."""


@functools.cache
def _launch() -> None:
    """Start Numba's threads; the number of threads of the process's other OpenMP users stays as it was.

    Numba's OpenMP layer sets it to its own for the thread that starts it: torch with one thread had all cores after.
    """
    others = threadpoolctl.ThreadpoolController().select(user_api="openmp").lib_controllers
    counts = [other.get_num_threads() for other in others]
    numba.get_num_threads()
    for other, count in zip(others, counts, strict=True):
        other.set_num_threads(count)


@contextlib.contextmanager
def single_blas() -> Iterator[None]:
    """NumPy's matrix products and eigenproblems use one thread of the caller's from the first such block on to the end
    of the last.

    For callers that are threads themselves: four of them, each with an OpenBLAS of two threads, took six times as long
    as with one thread each.
    """
    _blas_limit.enter()
    try:
        yield
    finally:
        _blas_limit.leave()


class _BlasLimit:
    """The number of BLAS threads belongs to the process: the first to come sets it, the last to go puts it back.

    Both by one thread that lives in between, for threadpoolctl lets no other thread than the one that set it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def enter(self) -> None:
        """One more block."""
        with self._lock:
            if self._inside == 0:
                ready, self._over = threading.Event(), threading.Event()
                self._holder = threading.Thread(target=self._hold, args=(ready, self._over), name="retrieval_attn-blas")
                self._holder.start()
                ready.wait()
            self._inside += 1

    def leave(self) -> None:
        """One less."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._over.set()
                self._holder.join()

    def _hold(self, ready: threading.Event, over: threading.Event) -> None:
        limiter = _controller(len(sys.modules)).limit(limits=1, user_api="blas")
        ready.set()
        over.wait()
        limiter.restore_original_limits()


@functools.lru_cache(1)
def _controller(modules: int) -> threadpoolctl.ThreadpoolController:
    """Knows the process's libraries, which come by imports: searched again when there are other modules than before.

    Looking takes 4 ms, ten times as long where a GPU's libraries are there, and each layer's indexes asked for it.
    """
    return threadpoolctl.ThreadpoolController()


_blas_limit = _BlasLimit()


def _layer_is_exclusive() -> bool:
    try:
        return numba.threading_layer() == "workqueue"
    except ValueError:  # no parallel kernel has run yet
        return True


TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed_cores(process: int = 0) -> list[int]:
    """Cores that a process (0: this one) may run on, ascending. Raises OSError for one that is gone."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(process))
    return list(range(os.cpu_count() or 1))


def local_ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Number of this process among the ranks on this machine, and how many they are; (0, 1) without a launcher.

    By torchrun's variables LOCAL_RANK and LOCAL_WORLD_SIZE; without the second, WORLD_SIZE counts as local.
    """
    try:
        rank = int(environment["LOCAL_RANK"])
        ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def usable_cores() -> list[int]:
    """Cores for this process's threads, ascending, at least one: all it may use, or this rank's share of them."""
    allowed = allowed_cores()
    rank, ranks = local_ranks()
    if ranks == 1:
        return allowed
    try:
        launcher = allowed_cores(os.getppid())
    except OSError:
        launcher = allowed
    return share(allowed, len(launcher), rank, ranks)


def share(allowed: Collection[int], launcher: int, rank: int, ranks: int) -> list[int]:
    """The part of `allowed` that rank `rank` of `ranks` should use, if their launcher may use `launcher` cores.

    Ranks that were bound to as many cores as there are for each keep them all; those that share cores by as many as
    the numbers say divide them. With fewer cores than ranks several ranks get the same one.
    """
    together = min(ranks, max(1, round(len(allowed) * ranks / max(launcher, len(allowed)))))
    ordered = sorted(allowed, key=_place)
    place = rank % together
    low, high = len(ordered) * place // together, len(ordered) * (place + 1) // together
    return sorted(ordered[low:high]) or [ordered[low % len(ordered)]]


def _place(core: int) -> tuple[int, int, int]:
    """Socket, physical core, core: threads of one physical core are neighbours. Unknown topology: by number."""
    try:
        folder = TOPOLOGY / f"cpu{core}" / "topology"
        socket = int((folder / "physical_package_id").read_text())
        return socket, int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Within this block the main thread gets no KeyboardInterrupt: one that comes meanwhile is raised at the end.

    For short work on objects that others share. Other threads get none anyway: there this does nothing, and so it does
    where the program handles the signal itself in C. Blocks nest.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            handler(*late[0])
