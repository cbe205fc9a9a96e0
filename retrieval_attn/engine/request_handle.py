"""Ticket: what who submitted a request holds of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from retrieval_attn.engine.request import Event, Finished

__all__ = ["RequestHandle"]


class RequestHandle:
    """Events of one request as they come, and its end. For one reader; `cancel` may be called by any thread."""

    def __init__(self, number: str, cancel: Callable[[], None]) -> None:
        """number: the request's, for logs."""
        self.id = number
        self._cancel = cancel
        self._queue: queue.SimpleQueue[Event | Finished] = queue.SimpleQueue()
        self._finished: Finished | None = None
        self._listener: Callable[[Event | Finished], None] | None = None
        self._lock = threading.Lock()

    def put(self, item: Event | Finished) -> None:
        """Called by the engine."""
        with self._lock:
            if self._listener is None:
                self._queue.put(item)
            else:
                self._listener(item)

    def listen(self, listener: Callable[[Event | Finished], None]) -> None:
        """Let `listener` have all items, those that are there first, in place of who iterates; once, at most.

        It is called by a thread of the engine, which waits for it: it must be quick, and must not raise.
        """
        with self._lock:
            while not self._queue.empty():
                listener(self._queue.get())
            self._listener = listener

    def __iter__(self) -> Iterator[Event]:
        """Events until the end. Raises what went wrong, if it was an error."""
        while self._finished is None:
            item = self._queue.get()
            if isinstance(item, Event):
                yield item
                continue
            self._finished = item
        if self._finished.error is not None:
            raise self._finished.error

    def result(self) -> Finished:
        """Wait for the end; events are passed over. Never raises: `Finished.error` says what went wrong."""
        while self._finished is None:
            item = self._queue.get()
            if isinstance(item, Finished):
                self._finished = item
        return self._finished

    def cancel(self) -> None:
        """The answer is not wanted any more. It ends soon, as "cancelled"; nothing happens if it has ended."""
        self._cancel()
