"""Outbox: what is told to those who asked, in the order in which it happened, beside the step that comes next.

Making text of tokens and waking who waits for it takes Python's lock, and a GPU would wait for that before its next
step. A replay leaves the lock to others while it runs: then a thread tells what was put here until it began.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["OutputQueue"]

Telling = Callable[[], None]


class OutputQueue:
    """See the module. Everything is called by one thread. What is put here must not raise."""

    def __init__(self) -> None:
        self._put: list[Telling] = []
        self._sent: queue.SimpleQueue[list[Telling] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, telling: Telling) -> None:
        """To be called, behind all that were put before."""
        self._put.append(telling)

    def send(self) -> None:
        """Call what was put: at once, or behind what the thread has to call still."""
        if self._thread is not None:
            self.send_beside()
            return
        put, self._put = self._put, []
        for telling in put:
            telling()

    def send_beside(self) -> None:
        """Let the thread call what was put, as soon as it gets Python's lock. Quick."""
        if not self._put:
            return
        put, self._put = self._put, []
        self._sent.put(put)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieval_attn-outbox", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Call what is left, and end."""
        self.send()
        if self._thread is not None:
            self._sent.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            for telling in sent:
                telling()
