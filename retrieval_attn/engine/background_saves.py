"""BackgroundSaves: write contexts to the store after their requests were answered. DiskTier: also idle texts.

A context can be asked from its cache in memory before its files are durable. Writes run one at a time, in the order of
their submission, so that a context is written after the one that it continues.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from retrieval_attn.engine.ids import Ids
from retrieval_attn.engine.node import Node, Payload, Sizes
from retrieval_attn.engine.prefix_handle import FIRST_MARK, PrefixEntry, text_mark
from retrieval_attn.engine.radix_cache import Lease, RadixCache
from retrieval_attn.engine.saved_text import BLOCK_TOKENS, SavedTexts, UnsavedText
from retrieval_attn.errors import InputDataError, StoreError, UnknownContextError
from retrieval_attn.memory.reclaim import register
from retrieval_attn.model.weights import weight_state
from retrieval_attn.offload.threads import foreground, questions, with_device_memory
from retrieval_attn.saving.save import Saved, Saver

__all__ = ["SAVE_SECONDS", "BackgroundSave", "BackgroundSaves", "ContextState", "DiskCounts", "DiskTier"]

log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""Longest time that a server's shutdown waits for contexts that are not durable."""
CANCEL_SECONDS = 10.0
"""Longest time that the removal of a context waits for the layer that is being written."""
LEAST_TOKENS = BLOCK_TOKENS
"""Minimum tokens of a text that the disk tier saves: later prompts do not find a shorter one."""
OPEN_SECONDS = 0.1
"""Estimated time to open a saved text, beyond that of its bytes. See docs/benchmarks.md, saved contexts."""
WRITE_BYTES_PER_SECOND = float(1 << 30)
"""Estimated speed of the disk before the first write."""
RATED_BYTES = 1 << 20
"""Minimum size of a write that measures the speed of the disk."""
DISK_SHARE = 0.5
"""Share of the disk's free memory, the files of automatic texts included, that these files may have."""
SAVED_SHARE = 0.25
"""Share of the host memory for idle texts that is free or can be freed at once, because the disk has the texts."""
WAIT_SECONDS = 0.002
LOOK_SECONDS = 0.05
"""Polling interval for cancellation while a write is queued, and longest part of a write by which a pause is measured,
in seconds."""
RECLAIM_SECONDS = 5.0
"""Time without further writes after memory was needed at once."""
WRITE_SECONDS = 0.25
"""Longest estimated write that a request waits for when it needs the memory of the text."""
QUESTION_PAUSE = 9
"""Longest pause of a write while questions are read, as a multiple of the time since its last one. With pauses of 2 s
after 16 MiB, a server whose requests never ended saved next to nothing (docs/archive/log.md)."""
BROKEN_SECONDS = 60.0
"""Time without further writes of idle texts after one that failed."""


class ContextState(NamedTuple):
    """State of a saved context that requests can use.

    Attributes:
        name: name of the context.
        tokens: its tokens, those of the saved context that it continues included.
        nbytes: bytes of its files; of a context that is not durable, those written so far.
        created: seconds since 1970.
        error: message of the error that ended the write of a context that is not durable.
        durable: whether its files are on the disk and its name is committed.
    """

    name: str
    tokens: int
    nbytes: int
    created: float
    error: str | None = None
    durable: bool = False


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
        self._created, self._resumed = time.time(), time.monotonic()
        self._paused = 0.0
        self.cancelled, self.superseded = threading.Event(), False

    @property
    def state(self) -> ContextState:
        """State for clients."""
        error = self.saved.error
        told = None if error is None else str(error) or type(error).__name__
        return ContextState(self.text.name, self.text.tokens, self.saved.nbytes, self._created, told)

    @property
    def written_seconds(self) -> float:
        """Seconds of the write, which has ended, without its pauses."""
        return max(self.saved.seconds - self._paused, 1e-6)

    def write(self) -> None:
        """Write the context and commit its name. Raises StoreError, and SaveCancelled."""
        try:
            self._raise_if_cancelled()
            self._resumed = time.monotonic()
            saver = with_device_memory(self._saver, self._wait)
            saver.saved, saver.wait, saver.on_piece = self.saved, self._wait, self._yield_to_requests
            self.text.set_durable(saver.run(self._raise_if_cancelled))
        finally:
            self._lease.release()

    def _wait(self, seconds: float) -> None:
        self.cancelled.wait(seconds)
        self._raise_if_cancelled()

    def _yield_to_requests(self) -> None:
        """Between two parts of an array, wait while questions are read, and while rows decode as long as the part took.

        A write takes the memory's bandwidth and Python's lock: first tokens of questions on 100K took .77 s with one
        and .35 s without (docs/archive/numbers.md).
        """
        began = now = time.monotonic()
        part = min(now - self._resumed, LOOK_SECONDS)
        until = began + (part if foreground.is_recent else 0.0)
        while now < until or (questions.is_recent and now < began + QUESTION_PAUSE * part):
            self.cancelled.wait(WAIT_SECONDS)
            self._raise_if_cancelled()
            now = time.monotonic()
        self._paused += now - began
        self._resumed = now

    def _raise_if_cancelled(self) -> None:
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
        self._automatic: BackgroundSave | None = None
        self._lock = threading.Lock()
        self._failed = 0

    @property
    def counts(self) -> dict[str, Any]:
        """Return the number of contexts that are not durable yet, and of failed writes since the start."""
        with self._lock:
            running = sum(save.saved.error is None for save in self._saves.values())
            return {"saves_running": running, "saves_failed": self._failed}

    def states(self) -> list[ContextState]:
        """Return the states of all contexts that are not durable, sorted by name."""
        with self._lock:
            return [self._saves[name].state for name in sorted(self._saves)]

    def add_automatic(self, save: BackgroundSave, done: Callable[[BaseException | None], None]) -> None:
        """Write a text of the prefix cache in a thread. No request can name it, and `add` cancels the write.

        done: called by the thread with the error of the write, SaveCancelled or None.
        """

        def run() -> None:
            while previous is not None and not save.cancelled.is_set() and not previous.saved.join(LOOK_SECONDS):
                pass
            error: BaseException | None = None
            try:
                save.write()
            except BaseException as raised:  # `done` gets it
                error = raised
            with self._lock:
                self._automatic = None
                if self._last is save:  # a cancelled one may end before those that it waited for
                    self._last = None if previous is None or previous.saved.done else previous
            done(error)

        with self._lock:
            previous, self._last, self._automatic = self._last, save, save
            save.saved.start(run)

    def cancel_automatic(self, seconds: float = CANCEL_SECONDS) -> bool:
        """Cancel the write of a text of the prefix cache. Return whether there was one in another thread, which ended.

        It ends with the layer that is being written. seconds: longest time to wait for that.
        """
        with self._lock:
            save = self._automatic
        if save is None or save.saved.runs_here:
            return False
        save.cancelled.set()
        return save.saved.join(seconds)

    @property
    def automatic_bytes(self) -> int | None:
        """Return the bytes written so far of the running write of the prefix cache.

        None if there is none, or if it waits for a context that is written before it.
        """
        with self._lock:
            save = self._automatic
            if save is None or any(not other.saved.done for other in self._saves.values()):
                return None
        return save.saved.nbytes

    def add(self, save: BackgroundSave) -> Saved:
        """Write a context in a thread; writes under the same name and of the prefix cache are cancelled."""
        name = save.text.name
        with self._lock:
            if (before := self._saves.get(name)) is not None:
                before.superseded = True
                before.cancelled.set()
            self._saves[name] = save
            if self._automatic is not None:
                self._automatic.cancelled.set()
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
        """Wait until all contexts are durable, at most `seconds`; cancel the rest. None: wait without a limit.

        A write of the prefix cache is cancelled at once.
        """
        with self._lock:
            waiting, automatic = [save for save in self._saves.values() if not save.saved.done], self._automatic
        if automatic is not None:
            automatic.cancelled.set()
            automatic.saved.join()  # until its layer is written
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


class DiskCounts(NamedTuple):
    """Counts of a disk tier.

    Attributes:
        disk_saves, disk_saved_bytes: texts written, and their bytes beyond those of the texts that they continue.
        disk_evictions: evictions from host memory of texts that the disk had.
        disk_removals: texts removed from the disk.
        disk_nbytes: bytes on the disk now, also of other processes; 0 before the first write.
    """

    disk_saves: int = 0
    disk_saved_bytes: int = 0
    disk_evictions: int = 0
    disk_removals: int = 0
    disk_nbytes: int = 0


class DiskTier:
    """Saves idle texts of the prefix cache before host memory runs out, and evicts them from it.

    Later prompts find the texts by their token ids, within the namespace (`SavedTexts.matches`), also after a restart.
    Files of such texts have `limit` bytes, or DISK_SHARE of the disk; the least recently used ones are removed. As
    CachedAttention (Gao et al. 2024, section 3.3), what waiting requests continue is evicted last.

    Thread-safe. Locks are taken in this order: prefix cache, tier.
    """

    def __init__(self, tree: RadixCache, texts: SavedTexts, saves: BackgroundSaves, limit: int | None = None) -> None:
        """saves: writes the texts, one at a time. limit: bytes of their files; None: DISK_SHARE of the disk."""
        self._limit = limit
        self._tree, self._texts, self._saves = tree, texts, saves
        self._lock = threading.Lock()
        self._saving: Node | None = None
        self._names = set[str]()  # of texts that this process saved and did not remove
        self._soon = Sizes()
        self._waiting: Mapping[Node, int] = {}
        self._looked_at: tuple[Sizes, int] | None = None  # memory of the cache, and its nodes, all of them saved
        self._broken_until, self._closed = 0.0, False
        self._rate = self._pace = WRITE_BYTES_PER_SECOND  # of the disk, and with pauses
        self._held_bytes: int | None = None  # of the disk
        self._saved = self._saved_bytes = self._evicted = self._removed = 0
        register(self)

    @property
    def counts(self) -> DiskCounts:
        """Return the counts since the start."""
        held = self._held_bytes or 0
        return DiskCounts(self._saved, self._saved_bytes, self._evicted, self._removed, held)

    @property
    def is_saving(self) -> bool:
        """Return whether a text is being written."""
        return self._saving is not None

    def wait(self) -> None:
        """Sleep for WAIT_SECONDS if a text is being written."""
        if self.is_saving:
            time.sleep(WAIT_SECONDS)

    def evict(
        self, need: Sizes, limit: Sizes, waiting: Callable[[], Mapping[Node, int]], free: int, lacking: int = 0,
        release: Callable[[list[Payload]], object] | None = None,
    ) -> None:  # fmt: skip
        """Evict entries that are saved, or cheaper to prefill again than to write, until `need` bytes are free; then
        save the next victims.

        A text that the disk should have stays until it is written, if that takes less time than its prefill; where a
        request waits for the memory, only if it takes at most WRITE_SECONDS.

        Args:
            need: bytes of each kind that are lacking.
            limit: bytes that all entries together may have.
            waiting: returns nodes that waiting requests continue, with positions in the queue.
            free: bytes of free host memory. Entries are saved until it and the next victims that are saved have
                SAVED_SHARE of the limit.
            lacking: bytes of host memory that a request waits for.
            release: see `RadixCache.evict`.
        """
        saving, most_seconds = self._saving, WRITE_SECONDS if lacking else float("inf")
        slow = saving is not None and lacking > 0 and self._seconds_left(saving) > WRITE_SECONDS
        coming = 0 if saving is None or slow else saving.sizes.host
        ahead = max(0, int(SAVED_SHARE * limit.host) - max(0, free))
        now, soon = need.less(Sizes(coming)), Sizes(max(0, need.host) + ahead)
        looks = saving is None and soon.host > 0 and self._looked_at != (self._tree.idle, len(self._tree))
        if not (now.lacking or looks or slow):
            return
        nodes, freed = waiting(), Sizes()
        if now.lacking:
            keeps = functools.partial(self._keeps, most_seconds) if now.host > 0 else self._note_eviction
            freed = self._tree.evict(now, limit, waiting=nodes, keeps=keeps, release=release)
        if slow and freed.host < lacking:  # its text is all that is left
            self._broken_until = max(self._broken_until, time.monotonic() + RECLAIM_SECONDS)
            self._saves.cancel_automatic(0.0)
        with self._lock:
            self._soon, self._waiting = soon, nodes
        self._save_next()

    def _seconds_left(self, saving: Node) -> float:
        """Return the estimated time until the running write ends; infinity while it waits for another one."""
        written = self._saves.automatic_bytes
        return float("inf") if written is None else max(0, saving.sizes.total - written) / self._pace

    def reclaim(self, host: int, device: int) -> tuple[int, int]:
        """Cancel the running write, whose text cannot be evicted, and evict. Returns the freed bytes of each.

        The prefix cache itself is registered for `reclaim` before the tier.
        """
        self._broken_until = max(self._broken_until, time.monotonic() + RECLAIM_SECONDS)
        return self._tree.reclaim(host, device) if self._saves.cancel_automatic() else (0, 0)

    def idle_device_bytes(self) -> int:
        """Return 0: the prefix cache counts them."""
        return 0

    def close(self) -> None:
        """Save no more texts. `BackgroundSaves.close` ends the running write."""
        with self._lock:
            self._closed = True

    def _keeps(self, most_seconds: float, node: Node) -> bool:
        """Return whether a node must not be evicted yet. most_seconds: longest write to wait for."""
        if not self._has(node) and self._wants(node) and _write_seconds(node, self._pace) <= most_seconds:
            return True
        return self._note_eviction(node)

    def _note_eviction(self, node: Node) -> bool:
        self._evicted += self._has(node)
        return False

    def _has(self, node: Node) -> bool:
        """Return whether the store has a node's text."""
        entry = node.held
        if not isinstance(entry, PrefixEntry):
            return False
        if entry.saved is not None and entry.saved.name in self._names:
            return True
        if entry.opened is None or node.namespace is not None or node.start:
            return False
        return node.end - node.marks <= entry.opened.text.tokens  # it came from there

    def _wants(self, node: Node) -> bool:
        """Return whether a node's text can be saved, and reading it again takes longer than opening it."""
        if self._closed or time.monotonic() < self._broken_until:
            return False
        entry = node.held
        if not isinstance(entry, PrefixEntry) or entry.unsavable or node.end < LEAST_TOKENS:
            return False
        if entry.saved is not None and entry.saved_use == node.used:
            return False  # removed from the disk, which has room for texts used later only
        return node.rebuild_seconds > OPEN_SECONDS + _write_seconds(node, self._rate)

    def _save_next(self) -> None:
        """Begin to save the first node to evict that the disk does not have, unless a write is running."""
        with self._lock:
            soon, waiting = self._soon, self._waiting
            if self._saving is not None or self._closed or not soon.lacking:
                return
        now = self._tree.idle, len(self._tree)
        for victim in self._tree.victims(soon, waiting):
            if self._has(victim) or not self._wants(victim):
                continue
            node = self._first_unsaved(victim)
            lease = self._tree.pin(node)
            if lease is None:
                continue
            with self._lock:
                if self._saving is not None or self._closed:
                    lease.release()
                    return
                self._saving = node
            if self._begin(node, lease):
                return
        self._looked_at = now

    def _first_unsaved(self, node: Node) -> Node:
        """Return the first node before this one that the disk should have, so that files hold each token once."""
        first = one = node
        while one.parent is not None and one.at == len(one.parent) and self._is_savable(one.parent):
            one = one.parent
            first = first if self._has(one) else one
        return first

    def _is_savable(self, node: Node) -> bool:
        return isinstance(node.held, PrefixEntry) and (self._has(node) or not node.held.unsavable)

    def _begin(self, node: Node, lease: Lease) -> bool:
        """Begin to save a node. Return False if it cannot be saved."""
        entry = node.held
        assert isinstance(entry, PrefixEntry)
        try:
            ids = self._own_ids(node)
            if ids is None:
                entry.unsavable = True
            else:
                text = self._texts.automatic(ids, entry, entry.opened, node.namespace, generated=_has_answers(node))
                make = functools.partial(self._saver, node, text)
                save = BackgroundSave(text, lease, make)
                self._saves.add_automatic(save, functools.partial(self._finished, node, save))
                return True
        except (InputDataError, StoreError) as error:
            log.warning("a text of %s tokens cannot be saved: %s", f"{node.end:,}", error)
            entry.unsavable = True
        lease.release()
        self._saving = None
        return False

    def _own_ids(self, node: Node) -> Ids | None:
        """Return a node's token ids without marks; None if prompts with these tokens must not continue its text."""
        entry, ids = node.held, node.prefix(len(node))
        assert isinstance(entry, PrefixEntry)
        marks = ids[: node.marks]
        of_weights, tokens = marks[marks <= -FIRST_MARK], len(ids) - len(marks)
        continues_saved = len(of_weights) < len(marks)
        expected = text_mark(self._texts.model, weight_state(self._texts.model), tokens)
        if (continues_saved and node.namespace is None) or not np.array_equal(of_weights, expected):
            return None
        entry.require_savable()
        return ids[len(marks) :] if self._texts.has_options(entry.view()) else None

    def _saver(self, node: Node, text: UnsavedText) -> Saver:
        """Make room on the disk, and return a saver of a text. Raises StoreError."""
        self._make_room(node)
        entry = node.held
        assert isinstance(entry, PrefixEntry)
        before = [one.held.saved for one in node.path() if isinstance(one.held, PrefixEntry)]
        points = [one.point for one in before if one is not None and one.point is not None]
        return self._texts.saver(text, entry.opened, node.namespace, node.rebuild_seconds, points)

    def _make_room(self, node: Node) -> None:
        """Remove texts from the disk, the least recently used first, until a node's text fits. Raises StoreError."""
        nbytes, store = node.sizes.total, self._texts.store
        for one in reversed(list(node.path())[:-1]):
            if self._has(one):
                break
            nbytes += one.sizes.total  # an ancestor that the disk lacks is written, too
        held = store.trim(1 << 62).nbytes if self._held_bytes is None else self._held_bytes
        most = int(DISK_SHARE * (held + store.free_bytes())) if self._limit is None else self._limit
        if nbytes > most:
            assert isinstance(node.held, PrefixEntry)
            node.held.unsavable = True
            raise StoreError(
                f"a text of {nbytes:,} bytes does not fit the {most:,} bytes that idle texts may have in "
                f"{store.folder}; free disk space, name another folder (--store), or raise --prefix-cache-disk"
            )
        if held + nbytes > most:
            trimmed = store.trim(max(0, most - nbytes))
            store.gc()
            held = trimmed.nbytes
            with self._lock:
                self._names -= set(trimmed.names)
                self._removed += len(trimmed.names)
        self._held_bytes = held

    def _finished(self, node: Node, save: BackgroundSave, error: BaseException | None) -> None:
        """Note a write that ended, and begin the next one."""
        entry, saved, held = node.held, save.saved, None
        if error is None:
            with contextlib.suppress(StoreError):  # counted again before the next write
                held = self._texts.store.trim(1 << 62).nbytes  # some of it may have been left by others: not written
        with self._lock:
            self._saving = None
            if error is None and isinstance(entry, PrefixEntry):
                entry.saved, entry.saved_use = save.text, node.used
                self._names.add(save.text.name)
                self._saved += 1
                self._saved_bytes += saved.nbytes
                self._held_bytes = held
                if saved.nbytes >= RATED_BYTES:
                    self._rate = (self._rate + saved.nbytes / save.written_seconds) / 2
                    self._pace = (self._pace + saved.nbytes / saved.seconds) / 2
            elif isinstance(entry, PrefixEntry) and entry.unsavable:
                log.warning("an idle text of %s tokens is not saved: %s", f"{node.end:,}", error)
            elif error is not None and not isinstance(error, SaveCancelled):
                self._broken_until = time.monotonic() + BROKEN_SECONDS
                log.warning("idle texts are not saved for %.0f s: %s", BROKEN_SECONDS, error)
        self._save_next()


def _has_answers(node: Node) -> bool:
    """Return whether a node's text has generated answers."""
    entry = node.held
    opened = entry.opened if isinstance(entry, PrefixEntry) else None
    held = (one.held for one in node.path())
    return (opened is not None and opened.text.generated) or any(
        isinstance(one, PrefixEntry) and one.has_answer for one in held
    )


def _write_seconds(node: Node, rate: float) -> float:
    """Return the time to write a node's bytes, and an upper bound of the time to read them."""
    return node.sizes.total / rate
