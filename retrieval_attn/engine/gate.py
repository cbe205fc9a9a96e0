"""Gate: where a thread that computes waits between two cells, until others grant it more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from retrieval_attn.errors import ConfigError

__all__ = ["Gate", "GatedRead", "ReadCancelled"]


class ReadCancelled(Exception):
    """The read was cancelled; nobody waits for it any more."""


class Gate:
    """Between the thread of a read, which calls `enter` and `end`, and those who drive the read: everything else.

    total: cells, as planned. granted: of these, those that were granted and have not begun. at_end: the cell that the
    thread is before ends a layer's pass. finishing: the thread has done its cells, and needs no more of them for what
    it still does. ended: it has said its last.
    """

    def __init__(self, total: int, settle: Callable[[], object] | None = None, chunks: int = 0) -> None:
        """settle: called by the thread before it waits, so that all of the cells that ran is done by then: a device
        may still compute what it was given. chunks: cells of each layer before the one that ends its pass; 0: none do.
        """
        self.total, self._chunks, self._in_layer = total, chunks, 0
        self.granted = self._begun = self._holders = 0
        self._inside = self._waiting = self._cancelled = self.at_end = self.finishing = self.ended = False
        self._settle = settle
        self._changed = threading.Condition()

    @property
    def cells_done(self) -> int:
        """Cells that ran, without the one that is running."""
        with self._changed:
            return self._begun - self._inside

    @property
    def cells_left(self) -> int:
        """Cells still to run; 0 at the end."""
        return 0 if self.ended else max(self.total - self.cells_done, 0)

    @property
    def cells_alike(self) -> int:
        """Cells to come before one of another kind, if all go as planned; 1 before what ends a layer's pass."""
        if not self._chunks:
            return max(self.cells_left, 1)
        with self._changed:
            return 1 if self.at_end else self._chunks - self._in_layer % self._chunks

    def grant(self, cells: int) -> None:
        """So many more."""
        with self._changed:
            self.granted += cells
            self._changed.notify_all()

    def cancel(self) -> None:
        """`enter` raises from now on."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def enter(self, *, end: bool = False) -> None:
        """Before each cell. end: it ends a layer's pass. Raises ReadCancelled."""
        if self._stops:
            self.settle()
        with self._changed:
            self._inside, self.at_end = False, end
            while self._stops:
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
            self._waiting = False
            if self._cancelled:
                raise ReadCancelled
            self.granted -= 1
            self._begun += 1
            self._in_layer = 0 if end else self._in_layer + 1
            self._inside, self.at_end = True, False

    def settle(self) -> None:
        """Wait until a device has computed what the thread gave it."""
        if self._settle is not None:
            self._settle()

    def finish(self) -> None:
        """Behind the last cell."""
        self.settle()
        with self._changed:
            self.finishing, self._inside = True, False
            self._changed.notify_all()

    def end(self) -> None:
        """The thread's last call."""
        with self._changed:
            self.ended, self._inside = True, False
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Until the granted cells are done, or all are. False: not within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended or self.finishing or (self._waiting and not self.granted), timeout
            )

    def wait_ended(self, timeout: float | None) -> bool:
        """Until the end. False: not within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, timeout)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the thread is between two cells, or at its end, whatever was granted."""
        with self._changed:
            self._holders += 1
            try:
                self._changed.wait_for(lambda: self.ended or self._waiting)
                yield
            finally:
                self._holders -= 1
                self._changed.notify_all()

    @property
    def _stops(self) -> bool:
        return (not self.granted or self._holders > 0) and not self._cancelled


class GatedRead:
    """A read in a thread behind a gate, as who drives it sees it."""

    _gate: Gate
    _thread: threading.Thread

    @property
    def done(self) -> bool:
        """The thread has ended: all is read and indexed, or went wrong."""
        return self._gate.ended

    @property
    def cells_done(self) -> int:
        """Cells that ran, without the one that is running."""
        return self._gate.cells_done

    @property
    def cells_left(self) -> int:
        """Cells still to run, 0 when it is done. Chunks that do not fit the device's memory get halved: then, more."""
        return self._gate.cells_left

    @property
    def at_end(self) -> bool:
        """The next cell is what ends a layer's pass, which takes another time than a chunk."""
        return self._gate.at_end

    @property
    def cells_alike(self) -> int:
        """Cells to come before one that takes another time; at least 1."""
        return self._gate.cells_alike

    def go(self, cells: int) -> None:
        """Grant so many cells more. Returns at once. Raises ConfigError for a number below 1."""
        if isinstance(cells, bool) or not isinstance(cells, int) or cells < 1:
            raise ConfigError(f"cells={cells!r} must be a whole number >= 1")
        self._gate.grant(cells)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the granted cells are done, or all are. False: not within `timeout` seconds."""
        return self._joined(self._gate.wait(timeout))

    def wait_done(self, timeout: float | None) -> bool:
        """Wait until it is `done`. False: not within `timeout` seconds."""
        return self._joined(self._gate.wait_ended(timeout))

    def _joined(self, waited: bool) -> bool:
        if self.done:
            self._thread.join()  # it has nothing left to do
        return waited
