"""Block a prefill thread between chunks until the engine grants more of them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from retrieval_attn.errors import ConfigError

__all__ = ["ChunkKind", "Gate", "GatedRead", "PrefillThreads", "ReadCancelled", "prefill_threads"]

log = logging.getLogger(__name__)

ChunkKind = Literal["chunk", "end", "image"]
"""Chunks whose durations differ: of tokens in a layer, the end of a layer's pass, a layer of a vision tower."""


class ReadCancelled(Exception):
    """Ends a prefill thread whose request was cancelled."""


class Gate:
    """Synchronizes a prefill thread, which calls `enter`, `finish` and `end`, with the engine's thread, which calls the
    rest.

    Attributes:
        total: planned chunks. A chunk is computed in one layer; after several chunks a layer's end counts as one more.
        granted: granted chunks that have not begun.
        next_kind: kind of the next chunk.
        alone: whether no sequence decodes, so that the end of a layer's pass need not be interrupted.
        is_stalled: whether the thread waits for others inside of a chunk.
        finishing: whether all chunks are done and the thread needs no further grants.
        ended: whether the thread has ended.
    """

    def __init__(
        self,
        total: int,
        settle: Callable[[], object] | None = None,
        layer_chunks: int = 0,
        chunk_tokens: int = 1,
        image_chunks: int = 0,
    ) -> None:
        """Args:
        total: planned chunks, with those of images.
        settle: waits for a device; called by the thread before it blocks, so that granted chunks are complete.
        layer_chunks: chunks of each layer before its end. 0: layers have no end of their own.
        chunk_tokens: tokens of a chunk.
        image_chunks: chunks of images, which come first.
        """
        self.total, self._layer_chunks, self._in_layer = total, layer_chunks, 0
        self._chunk_tokens = chunk_tokens
        self.granted = self._begun = self._holders = self._inside = 0
        self._waiting = self._cancelled = self.finishing = self.ended = self.is_stalled = False
        self.alone = True
        self._image_chunks = image_chunks
        self.next_kind: ChunkKind = "image" if image_chunks else "chunk"
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
        """Chunks still to run; 0 after the end. Grows if chunks are halved for lack of device memory."""
        return 0 if self.ended else max(self.total - self.chunks_done, 0)

    @property
    def chunks_alike(self) -> int:
        """Chunks before the next one of another kind, at least 1, if all run as planned; 1 before a layer's end."""
        if self.next_kind == "image":
            return max(self._image_chunks - self.chunks_done, 1)
        if not self._layer_chunks:
            return max(self.chunks_left, 1)
        with self._changed:
            return 1 if self.next_kind == "end" else self._layer_chunks - self._in_layer % self._layer_chunks

    def grant(self, chunks: int, *, alone: bool = True) -> None:
        """Allow `chunks` further chunks."""
        with self._changed:
            self.alone = alone
            self.granted += chunks
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make `enter` raise ReadCancelled."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def enter(self, tokens: int = 1, *, kind: ChunkKind = "chunk") -> int:
        """Block until a chunk is granted. Return the tokens to compute: of as many chunks as are granted and `tokens`
        take, since one forward of them launches fewer kernels. One chunk of another kind. Raises ReadCancelled.
        """
        if self._stops:
            self.settle()
        with self._changed:
            self._inside, self.next_kind = 0, kind
            while self._stops:
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()
            self._waiting = False
            if self._cancelled:
                raise ReadCancelled
            taken = 1 if kind != "chunk" else max(1, min(self.granted, -(-tokens // self._chunk_tokens)))
            self.granted -= taken
            self._begun += taken
            self._in_layer = self._in_layer + taken if kind == "chunk" else 0
            self._inside, self.next_kind = taken, "image" if self._begun < self._image_chunks else "chunk"
            return taken * self._chunk_tokens

    def enter_end(self, begins: bool) -> None:
        """Block as `enter` before the end of a layer's pass, and between its parts while sequences decode.

        A part that does not begin the end raises nothing: half of an end cannot be undone, the next chunk will raise.
        """
        if begins:
            self.enter(kind="end")
        elif not self.alone:
            with suppress(ReadCancelled):
                self.enter(kind="end")

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

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Mark the thread, which calls this, as waiting for copies or index builds of others inside of a chunk."""
        with self._changed:
            self.is_stalled = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.is_stalled = False

    def wait(self, timeout: float | None, *, or_stalled: bool = False) -> bool:
        """Wait until all granted chunks are complete. Returns False after `timeout` seconds.

        or_stalled: at most until the thread waits for others.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self.ended
                    or self.finishing
                    or (self._waiting and not self.granted)
                    or (or_stalled and self.is_stalled)
                ),
                timeout,
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


Work = tuple[Callable[[], None], threading.Event]
"""Work of a thread, and what is set once it has returned."""


class PrefillThreads:
    """Daemon threads that run prefills, each one after another; the last used one first.

    They stay, since PyTorch keeps cuDNN's plans per thread: a new thread takes .2 to .5 s for each again.
    """

    def __init__(self) -> None:
        self._resting: list[queue.SimpleQueue[Work]] = []
        self._lock = threading.Lock()
        self._started = 0

    @property
    def running(self) -> int:
        """Prefills whose thread has not come back from them."""
        with self._lock:
            return self._started - len(self._resting)

    def start(self, work: Callable[[], None]) -> threading.Event:
        """Run `work`, which raises nothing. The event is set once it has returned and is forgotten."""
        over = threading.Event()
        with self._lock:
            inbox = self._resting.pop() if self._resting else None
            self._started += inbox is None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(inbox,), name="retrieval_attn-read", daemon=True).start()
        inbox.put((work, over))
        return over

    def _run(self, inbox: queue.SimpleQueue[Work]) -> None:
        while True:
            work, over = inbox.get()
            try:
                work()
            except BaseException:
                log.exception("a prefill thread failed")
            del work
            with self._lock:
                self._resting.append(inbox)
            over.set()
            del over


prefill_threads = PrefillThreads()
"""Of the process."""


class GatedRead:
    """A prefill in a gated thread, as the engine's thread uses it. gate: of the thread."""

    gate: Gate
    _over: threading.Event

    @property
    def done(self) -> bool:
        """Whether the thread has ended: the prompt is prefilled and indexed, or an error occurred."""
        return self.gate.ended

    def go(self, chunks: int, *, alone: bool = True) -> None:
        """Grant `chunks` further chunks and return at once. alone: no sequence decodes meanwhile.

        Raises ConfigError for a number below 1.
        """
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ConfigError(f"chunks={chunks!r} must be a whole number >= 1")
        self.gate.grant(chunks, alone=alone)

    def wait(self, timeout: float | None = None, *, or_stalled: bool = False) -> bool:
        """See `Gate.wait`."""
        return self._joined(self.gate.wait(timeout, or_stalled=or_stalled))

    def wait_done(self, timeout: float | None) -> bool:
        """Wait until the prefill is `done`. Returns False after `timeout` seconds."""
        return self._joined(self.gate.wait_ended(timeout))

    def _joined(self, waited: bool) -> bool:
        if self.done:
            self._over.wait()  # it has nothing left to do
        return waited
