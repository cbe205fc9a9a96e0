"""BackgroundSaves: write contexts to the store after their requests were answered.

A context can be asked from its cache in memory before its files are durable. Writes run one at a time, in the order of
their submission, so that a context is written after the one that it continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from retrieval_attn.engine.radix_cache import Lease
from retrieval_attn.engine.saved_text import SavedTexts, UnsavedText
from retrieval_attn.errors import StoreError, UnknownContextError
from retrieval_attn.offload.threads import with_device_memory
from retrieval_attn.saving.save import Saved, Saver

__all__ = ["SAVE_SECONDS", "BackgroundSave", "BackgroundSaves", "SaveState"]

log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""Longest time that a server's shutdown waits for contexts that are not durable."""
CANCEL_SECONDS = 10.0
"""Longest time that the removal of a context waits for the layer that is being written."""


class SaveState(NamedTuple):
    """State of a context that is not durable.

    Attributes:
        name: name of the context.
        tokens: its tokens, those of the saved context that it continues included.
        nbytes: bytes written so far.
        created: seconds since 1970 at which the save began.
        error: message of the error that ended the write; None while it runs.
    """

    name: str
    tokens: int
    nbytes: int
    created: float
    error: str | None = None


class SaveCancelled(Exception):
    """The write of a context was cancelled."""


class BackgroundSave:
    """One context that is in memory and not durable yet.

    Attributes:
        text: the context, as requests name it.
        saved: progress of the write.
    """

    def __init__(self, text: UnsavedText, lease: Lease, saver: Callable[[], Saver]) -> None:
        """Store what the write needs.

        Args:
            text: the context; it keeps its cache until the files are durable.
            lease: lease on the context's node of the prefix cache, held until the write ends.
            saver: makes the saver when the write begins; nodes that were written meanwhile are its parents then.
        """
        self.text, self.saved = text, Saved(text.name, text.tokens)
        self._lease, self._saver = lease, saver
        self._created = time.time()
        self.cancelled, self.superseded = threading.Event(), False

    @property
    def state(self) -> SaveState:
        """State for clients."""
        error = self.saved.error
        told = None if error is None else str(error) or type(error).__name__
        return SaveState(self.text.name, self.text.tokens, self.saved.nbytes, self._created, told)

    def write(self) -> None:
        """Write the context and commit its name. Raises StoreError, and SaveCancelled."""
        try:
            self._look()
            saver = with_device_memory(self._saver, self._wait)
            saver.saved, saver.wait = self.saved, self._wait
            self.text.set_durable(saver.run(self._look))
        finally:
            self._lease.release()

    def _wait(self, seconds: float) -> None:
        self.cancelled.wait(seconds)
        self._look()

    def _look(self) -> None:
        if self.cancelled.is_set():
            raise SaveCancelled


class BackgroundSaves:
    """Contexts that are in memory and not durable yet, by name. Thread-safe.

    A failed write keeps its record, with its error, until the name is saved again or removed.
    """

    def __init__(self, texts: SavedTexts) -> None:
        """texts: saved contexts of the store; they find a context here before it is durable."""
        self._texts = texts
        self._saves: dict[str, BackgroundSave] = {}
        self._last: BackgroundSave | None = None
        self._lock = threading.Lock()
        self._failed = 0

    @property
    def counts(self) -> dict[str, Any]:
        """Return the number of contexts that are not durable yet, and of failed writes since the start."""
        with self._lock:
            running = sum(save.saved.error is None for save in self._saves.values())
            return {"saves_running": running, "saves_failed": self._failed}

    def states(self) -> list[SaveState]:
        """Return the states of all contexts that are not durable, sorted by name."""
        with self._lock:
            return [self._saves[name].state for name in sorted(self._saves)]

    def add(self, save: BackgroundSave) -> Saved:
        """Write a context in a thread; an earlier write under the same name is cancelled."""
        name = save.text.name
        with self._lock:
            if (before := self._saves.get(name)) is not None:
                before.superseded = True
                before.cancelled.set()
            self._saves[name] = save
            previous, self._last = self._last, save
            self._texts.set_unsaved(name, save.text)
            save.saved.start(lambda: self._run(save, previous))
        return save.saved

    def cancel(self, name: str) -> bool:
        """Cancel the write of a context and forget its text. Return whether there was one that is not durable.

        The write ends with the layer that is being written, and leaves nothing in the store.
        """
        with self._lock:
            save = self._saves.pop(name, None)
            if save is None:
                return False
            save.cancelled.set()
            self._texts.set_unsaved(name, None)
        save.saved.join(CANCEL_SECONDS)
        return True

    def close(self, seconds: float | None) -> None:
        """Wait until all contexts are durable, at most `seconds`; cancel the rest. None: wait without a limit."""
        with self._lock:
            waiting = [save for save in self._saves.values() if not save.saved.done]
        if not waiting:
            return
        limit = "" if seconds is None else f", at most {seconds:g} s"
        log.info("waiting until %d saved contexts are on the disk%s", len(waiting), limit)
        end = None if seconds is None else time.monotonic() + seconds
        for save in waiting:
            if not save.saved.join(None if end is None else max(0.0, end - time.monotonic())):
                save.cancelled.set()
                log.error("the context %r is not saved: the disk was too slow for the shutdown", save.text.name)

    def _run(self, save: BackgroundSave, previous: BackgroundSave | None) -> None:
        if previous is not None:
            previous.saved.join()
        name = save.text.name
        try:
            save.write()
        except SaveCancelled:
            self._forget(save)
            raise
        except BaseException as error:
            log.warning("saving the context %r failed: %s", name, error)
            with self._lock:
                self._failed += 1
            save.text.release()
            raise
        if save.cancelled.is_set() and not save.superseded:
            self._remove(name)
        self._forget(save)

    def _forget(self, save: BackgroundSave) -> None:
        with self._lock:
            if self._saves.get(save.text.name) is save:
                del self._saves[save.text.name]
                self._texts.set_unsaved(save.text.name, None)
            if self._last is save:
                self._last = None

    def _remove(self, name: str) -> None:
        """Remove a name that was committed while its write was cancelled."""
        try:
            self._texts.store.remove(name)
            self._texts.store.gc()
        except UnknownContextError:
            return
        except StoreError as error:
            log.warning("cannot remove the context %r: %s", name, error)
