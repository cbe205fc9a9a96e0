"""Stream: an answer in pieces, as they are generated, that can be left at any time."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from retrieval_attn.answer import Answer

Work = Callable[[Callable[[str], None], threading.Event], Answer]
"""Makes an answer: calls the first argument with each piece of text, and stops soon once the second is set."""

JOIN_SECONDS = 30.0
"""A stream that is collected as garbage waits so long for its worker: who collects it may hold what that waits for."""


class Stream(Iterator[str]):
    """Pieces of one answer, while a thread generates it.

    However the loop over it is left (break, an exception, `close()`, the end of a `with` block, garbage collection or
    the end of the program), generating stops at the next token. An error of the generating thread is raised in the
    loop. answer: the whole `Answer` with its costs once the text has ended by itself, None before and after `close()`.
    The thread starts with the first piece that is asked for.
    """

    def __init__(self, work: Work) -> None:
        """See `Context.stream`, which makes it."""
        self.answer: Answer | None = None
        self._worker = _Worker(work)
        # also runs before the interpreter ends, which must not find the thread inside compiled code
        self._collected = weakref.finalize(self, self._worker.stop, JOIN_SECONDS)

    def __next__(self) -> str:
        try:
            item = self._worker.next()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, str):
            return item
        self.close()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # its traceback names this frame
        self.answer = item or self.answer
        raise StopIteration

    def close(self) -> None:
        """Stop generating and wait for the thread, which ends at its next token. Calling it again changes nothing."""
        self._worker.stop()
        self._collected.detach()  # not before: a second Ctrl-C may end the wait

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """The thread, and what it has made so far. It knows nothing of the stream, which can thus be collected."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._made: queue.SimpleQueue[str | Answer | BaseException] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def next(self) -> str | Answer | BaseException | None:
        """Wait for the next piece, the answer at the end, or what went wrong; None after `stop`."""
        if self._cancelled.is_set():
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieval_attn-stream", daemon=True)
            self._thread.start()
        made = self._made.get()
        return None if self._cancelled.is_set() else made

    def stop(self, seconds: float | None = None) -> None:
        """Cancel the work and wait for the thread, at most `seconds` seconds."""
        self._cancelled.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._made.put(self._work(self._made.put, self._cancelled))
        except BaseException as error:
            self._made.put(error)
