"""Threads that work while a device computes: they start when there is work and end soon after there is none."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from retrieval_attn.memory.reclaim import reclaim

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Item = TypeVar("Item")

IDLE_SECONDS = 0.25
"""How long a thread waits for more. Threads are joined when Python ends, so this is what an end waits at most."""

OOM_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 10)
"""Seconds between two attempts of a thread to allocate GPU memory: the longest prefill chunk is over by the end."""
OOM_BYTES = 64 << 20
"""GPU memory that idle texts free before the next attempt: a thread of the background allocates less at once."""

SWITCH_SECONDS = 1e-4
"""After which a thread that runs Python makes room for one that waits to. torch releases the interpreter with every
operation: next to one thread of pure Python an addition of eight numbers takes 5.9 ms with Python's own .005, .03 ms
with this, and alone .004."""


def take_turns_often() -> None:
    """Threads of this process wait for each other's Python no longer than SWITCH_SECONDS from now on.

    For a thread that launches a device's work one operation after the other while threads move and index what came
    before.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


class TurnLock:
    """A reentrant lock; `with lock.later()` lets all others go first.

    A thread that releases a plain lock and takes it again at once, piece after piece of long work, keeps it: those that
    wait are woken, and find it taken.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._waiting = 0

    def __enter__(self) -> None:
        with self._changed:
            self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Hold the lock, once no other thread waits for it. A thread that holds it already must not call this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
        with self._lock:
            yield


_told = threading.local()


@contextlib.contextmanager
def telling(stalled: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Within it, the calling thread enters `stalled()` wherever it waits for work of other threads."""
    _told.stalled = stalled
    try:
        yield
    finally:
        _told.stalled = None


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """Wait until all are done, whatever their results; see `telling`."""
    left = [one for one in futures if not one.done()]
    if not left:
        return
    stalled = getattr(_told, "stalled", None)
    with contextlib.nullcontext() if stalled is None else stalled():
        wait(left)


BUSY_SECONDS = 0.1
"""Time after a decode step or an upload in which threads of the background yield to the next one."""


class Activity:
    """Time of the last decode step or upload of a question: threads of the background yield to these."""

    def __init__(self) -> None:
        self._last = -math.inf

    def note(self) -> None:
        """Note that foreground work begins."""
        self._last = time.monotonic()

    @property
    def is_recent(self) -> bool:
        """Whether there was some within BUSY_SECONDS."""
        return self.was_within(BUSY_SECONDS)

    def was_within(self, seconds: float) -> bool:
        """Return whether there was some within the last `seconds`."""
        return time.monotonic() - self._last < seconds


foreground = Activity()
"""Of the process."""
questions = Activity()
"""Uploads of the process: the first token of a question waits for each of them."""


class ThreadPool:
    """At most `most` threads that do what they are given in the order it came.

    Unlike those of an executor they do not stay: after an interruption, once nothing is waiting, none is left.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._name = name
        self._todo: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._resting = self._running = self._started = 0

    @property
    def busy(self) -> int:
        """Pieces of work that are being done or wait."""
        with self._changed:
            return self._running + len(self._todo)

    def submit(self, work: Callable[..., Result], *args: Any) -> Future[Result]:
        """Have work(*args) done by a thread. Cancelling the future helps until it has begun."""
        return self._submit_all(work, [args])[0]

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """[work(item) for item in items], each done by a thread; not to be called by the pool's own.

        After an error what has not begun is dropped, the rest is waited for, and the first error is raised.
        """
        futures = self._submit_all(work, [(item,) for item in items])
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def _submit_all(self, work: Callable[..., Result], arguments: list[tuple[Any, ...]]) -> list[Future[Result]]:
        futures: list[Future[Result]] = [Future() for _ in arguments]
        with self._changed:
            self._todo.extend(zip(futures, [work] * len(futures), arguments, strict=True))
            self._changed.notify(len(futures))
            for _ in range(min(len(self._todo) - self._resting, self.most - self._threads)):
                self._threads += 1
                self._started += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._started}").start()
        return futures

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    self._resting += 1
                    self._changed.wait_for(lambda: bool(self._todo), IDLE_SECONDS)
                    self._resting -= 1
                    if not self._todo:
                        self._threads -= 1
                        return
                future, work, args = self._todo.popleft()
                self._running += 1
            run_for(future, work, *args)
            del future, work, args  # what they hold must not live until the next piece of work comes
            with self._changed:
                self._running -= 1


def run_for(future: Future[Any], work: Callable[..., Any], *args: Any) -> None:
    """`future` gets what work(*args) returns or raises; one that was cancelled before gets nothing done."""
    if future.set_running_or_notify_cancel():
        settle(future, work, *args)


def settle(future: Future[Any], work: Callable[..., Any], *args: Any) -> None:
    """Set the result of a future that runs already, as `run_for` does."""
    try:
        future.set_result(work(*args))
    except BaseException as error:
        future.set_exception(error)


def with_device_memory(attempt: Callable[[], Result], wait: Callable[[float], object]) -> Result:
    """Call `attempt`, again and again while a GPU has no memory for it. Return its result.

    Steps and prefills take memory for a moment; a thread of the background can wait until they return it.

    Args:
        attempt: allocates GPU memory; it must be repeatable.
        wait: sleeps for some seconds.

    Raises torch.OutOfMemoryError after the last attempt, and the exceptions of `attempt` and `wait`.
    """
    for seconds in OOM_WAITS:
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            log.info("a thread waits %g s for GPU memory: %s", seconds, str(error).partition("\n")[0])
        reclaim(device=OOM_BYTES)
        torch.cuda.empty_cache()
        wait(seconds)
    return attempt()
