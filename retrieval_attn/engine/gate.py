"""Block a prefill thread between chunks until the engine grants more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from retrieval_attn.errors import ConfigError

__all__ = ["Gate", "GatedRead", "ReadCancelled"]


class ReadCancelled(Exception):
    """Ends a prefill thread whose request was cancelled."""


class Gate:
    """Synchronizes a prefill thread, which calls `enter`, `finish` and `end`, with the engine's thread, which calls the
    rest.

    Attributes:
        total: planned chunks. A chunk is computed in one layer; after several chunks a layer's end counts as one more.
        granted: granted chunks that have not begun.
        at_end: whether the next chunk is a layer's end.
        finishing: whether all chunks are done and the thread needs no further grants.
        ended: whether the thread has ended.
    """

    def __init__(
        self, total: int, settle: Callable[[], object] | None = None, layer_chunks: int = 0, chunk_tokens: int = 1
    ) -> None:
        """Args:
        total: planned chunks.
        settle: waits for a device; called by the thread before it blocks, so that granted chunks are complete.
        layer_chunks: chunks of each layer before its end. 0: layers have no end of their own.
        chunk_tokens: tokens of a chunk.
        """
        self.total, self._layer_chunks, self._in_layer = total, layer_chunks, 0
        self._chunk_tokens = chunk_tokens
        self.granted = self._begun = self._holders = self._inside = 0
        self._waiting = self._cancelled = self.at_end = self.finishing = self.ended = False
        self._settle = settle
        self._changed = threading.Condition()

    @property
    def has_ends(self) -> bool:
        """Whether the end of a layer's pass is a chunk of its own."""
        return self._layer_chunks > 0

    @property
    def chunks_done(self) -> int:
        """Completed chunks, without the running one."""
        with self._changed:
            return self._begun - self._inside

    @property
    def chunks_left(self) -> int:
        """Chunks still to run; 0 after the end."""
        return 0 if self.ended else max(self.total - self.chunks_done, 0)

    @property
    def chunks_alike(self) -> int:
        """Chunks before the next one of another kind, if all run as planned; 1 before a layer's end."""
        if not self._layer_chunks:
            return max(self.chunks_left, 1)
        with self._changed:
            return 1 if self.at_end else self._layer_chunks - self._in_layer % self._layer_chunks

    def grant(self, chunks: int) -> None:
        """Allow `chunks` further chunks."""
        with self._changed:
            self.granted += chunks
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make `enter` raise ReadCancelled."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def enter(self, tokens: int = 1, *, end: bool = False) -> int:
        """Block until a chunk is granted. Return the tokens to compute: of as many chunks as are granted and `tokens`
        take, since one forward of them launches fewer kernels. `end`: it is a layer's end. Raises ReadCancelled.
        """
        if self._stops:
            self.settle()
        with self._changed:
            self._inside, self.at_end = 0, end
            while self._stops:
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
            self._waiting = False
            if self._cancelled:
                raise ReadCancelled
            taken = 1 if end else max(1, min(self.granted, -(-tokens // self._chunk_tokens)))
            self.granted -= taken
            self._begun += taken
            self._in_layer = 0 if end else self._in_layer + taken
            self._inside, self.at_end = taken, False
            return taken * self._chunk_tokens

    def settle(self) -> None:
        """Wait until the device has executed the thread's launches."""
        if self._settle is not None:
            self._settle()

    def finish(self) -> None:
        """Note that the last chunk is complete."""
        self.settle()
        with self._changed:
            self.finishing, self._inside = True, 0
            self._changed.notify_all()

    def end(self) -> None:
        """Note the end of the thread. The thread's last call."""
        with self._changed:
            self.ended, self._inside = True, 0
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all granted chunks are complete. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended or self.finishing or (self._waiting and not self.granted), timeout
            )

    def wait_ended(self, timeout: float | None) -> bool:
        """Wait for the end of the thread. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended, timeout)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the thread between two chunks, or at its end, inside the `with` block."""
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
    """A prefill in a gated thread, as the engine's thread uses it."""

    _gate: Gate
    _thread: threading.Thread

    @property
    def done(self) -> bool:
        """Whether the thread has ended: the prompt is prefilled and indexed, or an error occurred."""
        return self._gate.ended

    @property
    def chunks_done(self) -> int:
        """Completed chunks, without the running one."""
        return self._gate.chunks_done

    @property
    def chunks_left(self) -> int:
        """Chunks still to run; 0 if `done`. Grows if chunks are halved for lack of device memory."""
        return self._gate.chunks_left

    @property
    def at_end(self) -> bool:
        """Whether the next chunk is a layer's end, whose duration differs from that of other chunks."""
        return self._gate.at_end

    @property
    def chunks_alike(self) -> int:
        """Chunks before the next one of another kind, at least 1."""
        return self._gate.chunks_alike

    def go(self, chunks: int) -> None:
        """Grant `chunks` further chunks and return at once. Raises ConfigError for a number below 1."""
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ConfigError(f"chunks={chunks!r} must be a whole number >= 1")
        self._gate.grant(chunks)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all granted chunks are complete. Returns False after `timeout` seconds."""
        return self._joined(self._gate.wait(timeout))

    def wait_done(self, timeout: float | None) -> bool:
        """Wait until the prefill is `done`. Returns False after `timeout` seconds."""
        return self._joined(self._gate.wait_ended(timeout))

    def _joined(self, waited: bool) -> bool:
        if self.done:
            self._thread.join()  # it has nothing left to do
        return waited
