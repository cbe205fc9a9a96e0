"""Opening: brings a saved context from its store in a thread, beside the steps of other rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from retrieval_attn.engine.gate import ReadCancelled

__all__ = ["Opening"]

Result = TypeVar("Result")


class Opening(Generic[Result]):
    """Work in a thread of its own, from now on, that can be cancelled between layers."""

    def __init__(self, work: Callable[[Callable[[], None]], Result], name: str) -> None:
        """work: calls what it is given after each layer. name: of the thread."""
        self._work = work
        self._cancelled, self._done = threading.Event(), threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """There is a result or an error."""
        return self._done.is_set()

    def result(self) -> Result:
        """Wait for the end. Raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End before the next layer, and wait for that: no thread is left."""
        self._cancelled.set()
        self._thread.join()
        self._result = None

    def _look(self) -> None:
        if self._cancelled.is_set():
            raise ReadCancelled

    def _run(self) -> None:
        try:
            self._result = self._work(self._look)
        except BaseException as error:  # raised to who waits
            self._error = error
        finally:
            self._done.set()
