"""Preparation: what threads load or compile while a device reads, so that nobody waits for it afterwards.

Nothing depends on it. What fails, or is not begun when the reading ends by an error, is made when it is used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from retrieval_attn.offload.threads import ThreadPool

THREADS = 3
"""Pieces of work at the same time. Compiling, and loading, run outside Python's lock for the most part."""
logger = logging.getLogger(__name__)


class Preparation:
    """See the module. Used as a context around the reading, which it ends with."""

    def __init__(self) -> None:
        self._pool = ThreadPool(THREADS, "retrieval_attn-prepare")
        self._futures: list[Future[None]] = []
        self._stop = threading.Event()

    def begin(self, what: str, work: Callable[[], object]) -> None:
        """Have a thread do this. what: in the log."""
        self._futures.append(self._pool.submit(self._do, what, work))

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for future in self._futures:
                    future.result()
        finally:
            self._stop.set()

    def _do(self, what: str, work: Callable[[], object]) -> None:
        if self._stop.is_set():
            return
        try:
            work()
        except Exception as error:  # whatever a compiler raises
            logger.info("%s could not be prepared while reading: %s: %s", what, type(error).__name__, error)
