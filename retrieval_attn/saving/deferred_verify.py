"""What opening a context leaves for later: page-locking its files, and comparing them with their checksums."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from retrieval_attn.compile.progress import ProgressBar
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.errors import StoreDamagedError, StoreError
from retrieval_attn.offload.lock_ahead import lock_ahead
from retrieval_attn.store import SavedNode

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Between two looks at how far the thread is that compares."""
FIRST_SECONDS = 0.5
"""After opening: who opens a context to ask at once is not disturbed before the question comes."""
QUESTION_SECONDS = 2.0
"""After the beginning of a question."""


class DeferredVerify:
    """Compares the checksums that opening left out, in a thread, a layer after the other.

    What is in memory gives way to questions, which want the memory's bandwidth, too: a first answer waited up to a
    quarter of a second. Of a file on a disk the thread reads what the question will want next.

    error: what it found. files, compared: how many there are, and were compared.
    """

    def __init__(
        self,
        chain: Sequence[SavedNode],
        locked: Iterable[Segment] = (),
        on_damage: Callable[[StoreDamagedError], None] | None = None,
    ) -> None:
        """locked: segments of the files, to be page-locked before that if all are in memory. on_damage: is told, by the
        thread that compares.
        """
        self.error: StoreDamagedError | None = None
        self.files, self.compared = sum(len(node.files) for node in chain), 0
        self._ended, self._pause = threading.Event(), _Pause()
        self._pause.until(FIRST_SECONDS)
        task = list(chain), [weakref.ref(one) for one in locked], weakref.ref(self), self._ended, self._pause
        thread = threading.Thread(target=_run, args=(*task, on_damage), name="retrieval_attn-check", daemon=True)
        weakref.finalize(self, self._ended.set)
        self._thread = thread
        thread.start()

    def hold(self) -> None:
        """Compare nothing for a while: a question is being read."""
        self._pause.until(QUESTION_SECONDS)

    def wait(self, *, progress: bool) -> None:
        """Until all was compared. Raises StoreDamagedError. progress: show a bar."""
        self._pause.end()
        with ProgressBar(
            total=self.files, desc="comparing", unit="file", delay=2.0, leave=False, disable=not progress
        ) as bar:
            while self._thread.is_alive():
                self._thread.join(LOOK_SECONDS)
                bar.update(self.compared - bar.n)
        self.require_whole()

    def require_whole(self) -> None:
        """Raise StoreDamagedError if anything was found so far."""
        if self.error is not None:
            raise self.error


class _Pause:
    """A time until which nothing is done."""

    def __init__(self) -> None:
        self._until, self._over = 0.0, threading.Event()

    def until(self, seconds: float) -> None:
        """From now on, or as long as it was before; nothing after `end`."""
        self._until = max(self._until, time.monotonic() + seconds)

    def end(self) -> None:
        """For good: somebody waits for what is done after it."""
        self._over.set()

    def wait(self, ended: threading.Event) -> bool:
        """Until it is over or `ended`; whether it is ended."""
        while not ended.is_set() and not self._over.is_set() and (left := self._until - time.monotonic()) > 0:
            self._over.wait(min(left, LOOK_SECONDS))
        return ended.is_set()


def _run(
    chain: list[SavedNode],
    locked: list[weakref.ref[Segment]],
    owner: weakref.ref[DeferredVerify],
    ended: threading.Event,
    pause: _Pause,
    on_damage: Callable[[StoreDamagedError], None] | None,
) -> None:
    def stop() -> bool:
        return pause.wait(ended)

    try:
        if locked and all(node.in_memory(file) for node in chain for file in node.files):
            lock_ahead(locked, stop)
        for file in sorted({file for node in chain for file in node.files}):
            for node in chain:
                if file in node.files:
                    node.check(file, stop if node.in_memory(file) else ended.is_set)
                    if (found := owner()) is not None:
                        found.compared += 1
                        del found
    except StoreError as error:
        found, damage = owner(), error if isinstance(error, StoreDamagedError) else StoreDamagedError(str(error))
        if found is not None:
            found.error = damage
        log.error("%s", error)
        if on_damage is not None:
            on_damage(damage)
