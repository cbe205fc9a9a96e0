"""Shelf: carries out what a policy decides, on the nodes of a store. Fetching runs in a thread of its own.

RAM is the system's cache of the files, so that every process that maps a context shares one copy, and giving a copy up
costs nothing: the disk has it. The system may give pages up by itself; `refresh` looks what is there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from retrieval_attn.errors import ConfigError, StoreError, UnknownContextError
from retrieval_attn.store.groups import Group, grouped
from retrieval_attn.store.names import NamedContext
from retrieval_attn.store.pages import give_up
from retrieval_attn.store.store import ContextStore
from retrieval_attn.store.tiers import Ledger, Moves, Policy, TierEntry, Tiers

__all__ = ["Done", "Shelf"]

logger = logging.getLogger(__name__)
IN_RAM = 0.9
"""Share of a group's bytes in memory from which on it counts as there."""


class Done(NamedTuple):
    """What one pass did. fetched, evicted: groups of nodes, by the digest of their last. dropped: names.

    nbytes: of what was fetched.
    """

    fetched: list[str]
    evicted: list[str]
    dropped: list[str]
    nbytes: int


class Shelf:
    """Keeps the contexts that come next in RAM, and all of them within the disk's budget. Any thread.

    Use it in a `with` block, or `close` it: its thread ends then.
    """

    def __init__(
        self,
        store: ContextStore,
        *,
        ram_bytes: int,
        disk_bytes: int | None = None,
        may_drop: Callable[[NamedContext], bool] = lambda context: False,
        rebuild_seconds: Callable[[NamedContext], float] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """ram_bytes: of saved contexts in the system's cache. disk_bytes: of the whole store; None: no limit.

        may_drop: whether a context may be removed for room; without it none is. rebuild_seconds: to read a context
        anew; without it a second per GiB. policy: Tiers by default. Raises ConfigError for negative budgets.
        """
        for name, given in (("ram_bytes", ram_bytes), ("disk_bytes", disk_bytes)):
            if given is not None and given < 0:
                raise ConfigError(f"{name} must not be negative, got {given}; use bytes")
        self._store, self._ram_bytes, self._disk_bytes = store, ram_bytes, disk_bytes
        self._may_drop, self._rebuild_seconds = may_drop, rebuild_seconds
        self._policy: Policy = Tiers(Ledger(time.time)) if policy is None else policy
        self._groups: dict[str, Group] = {}
        self._of_name: dict[str, tuple[str, ...]] = {}
        self._used: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        self._lock = threading.RLock()
        self._wake = threading.Condition()
        self._queue: tuple[str, ...] | None = None
        self._working = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- what users say --------------------------------------------------------------------------------

    def expect(self, names: Sequence[str]) -> None:
        """These contexts are needed, the first the soonest; the rest is done in the background.

        A later call replaces the queue, also of a fetch that is under way. Unknown names are passed over.
        """
        with self._wake:
            if self._closed:
                raise StoreError("this shelf is closed; make another")
            self._queue = tuple(names)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="context-shelf", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was expected is done; whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: self._queue is None and not self._working, timeout_seconds)

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """A request reads this context inside the block: it is used now, and neither evicted nor dropped.

        Raises UnknownContextError.
        """
        self._store.resolve(name)
        with self._lock:
            self._used[name] = time.time()
            self._busy[name] = self._busy.get(name, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._used[name] = time.time()
                self._busy[name] -= 1

    def make_room(self, nbytes: int) -> list[str]:
        """Remove contexts that may be dropped until a save of `nbytes` fits the disk's budget; returns their names."""
        with self._lock:
            self.refresh()
            return self._drop(self._plan((), nbytes).drop)

    def apply(self, names: Sequence[str]) -> Done:
        """What `expect` does, now and here."""
        return self._apply(tuple(names), lambda: False)

    def close(self) -> None:
        """End the thread, after the file that it reads now."""
        with self._wake:
            self._closed, self._queue = True, None
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # -- what is there ---------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Groups of nodes and where they are, as of the last `refresh`."""
        return self._policy.ledger

    def refresh(self) -> None:
        """Read the store's names and look which bytes are in memory."""
        with self._lock:
            contexts = {context.name: context for context in self._store.list()}
            self._groups, self._of_name = grouped(self._store, contexts.values())
            ledger = self._policy.ledger
            for digest in [digest for digest in ledger if digest not in self._groups]:
                ledger.remove(digest)
            for digest, group in self._groups.items():
                here = [contexts[name] for name in group.names]
                held = TierEntry(
                    group.nbytes,
                    rebuild_seconds=group.nbytes * max(self._cost(context) for context in here),
                    parent=group.parent,
                    in_ram=group.resident_bytes() >= IN_RAM * group.nbytes,
                    kept=not all(self._may_drop(context) for context in here),
                    busy=sum(self._busy.get(name, 0) for name in group.names),
                )
                ledger.add(digest, held)
                held.used = max(self._used.get(context.name, context.saved_at) for context in here)

    def _cost(self, context: NamedContext) -> float:
        """Seconds to make a byte of a context anew."""
        if self._rebuild_seconds is None:
            return 1 / (1 << 30)
        return self._rebuild_seconds(context) / max(context.nbytes, 1)

    # -- moves -----------------------------------------------------------------------------------------

    def _plan(self, names: Sequence[str], coming: int) -> Moves:
        """coming: bytes that a save will need."""
        queue = [digest for name in names for digest in self._of_name.get(name, ())]
        free_disk = sys.maxsize
        if self._disk_bytes is not None:
            free_disk = self._disk_bytes - self._store.nbytes() - coming
            if free_disk < 0:  # what no name reaches goes before anything that one does
                self._store.gc()
                free_disk = self._disk_bytes - self._store.nbytes() - coming
        return self._policy.plan(queue, self._ram_bytes - self.ledger.ram_bytes, free_disk)

    def _apply(self, names: tuple[str, ...], stop: Callable[[], bool]) -> Done:
        with self._lock:
            self.refresh()
            moves = self._plan(names, 0)
            dropped = self._drop(moves.drop)
            evicted = [digest for digest in moves.evict if self._evict(self._groups[digest])]
            waiting = [(digest, self._groups[digest]) for digest in moves.fetch]
        fetched, nbytes = [], 0
        for digest, group in waiting:
            if stop():
                break
            read = self._fetch(group, stop)
            nbytes += read
            if read:
                fetched.append(digest)
                with self._lock:
                    if digest in self.ledger:
                        self.ledger.move(digest, in_ram=True)
        return Done(fetched, evicted, dropped, nbytes)

    def _fetch(self, group: Group, stop: Callable[[], bool]) -> int:
        """Bytes that were brought to memory; 0 where not all were."""
        nbytes = 0
        try:
            nodes = [self._store.get(node) for node in group.nodes]
            for file in sorted({file for node in nodes for file in node.files}):
                for node in nodes:
                    if file in node.files:
                        if stop():
                            return 0
                        node.populate(file, None)
            nbytes = sum(node.nbytes for node in nodes)
        except StoreError as error:  # whoever opens the context gets the same error, by name
            logger.warning("a context cannot be fetched ahead: %s", error)
            return 0
        return nbytes

    def _evict(self, group: Group) -> bool:
        try:
            for path in group.files:
                give_up(path)
        except (OSError, StoreError) as error:
            logger.warning("the system keeps the pages of a context: %s", error)
            return False
        self.ledger.move(group.nodes[-1], in_ram=False)
        return True

    def _drop(self, digests: Sequence[str]) -> list[str]:
        """Names that were removed, with the nodes that only they reached."""
        names = sorted({name for digest in digests for name in self._groups[digest].names})
        removed = []
        for name in names:
            with contextlib.suppress(UnknownContextError):
                saved, known = self._store.resolve(name).digest, self._of_name.get(name, ())
                if saved in known[-1:]:  # nobody saved it again meanwhile
                    self._store.remove(name)
                    removed.append(name)
        if removed:
            self._store.gc()
            for digest in digests:
                self.ledger.remove(digest)
        return removed

    def _work(self) -> None:
        """The thread: one queue after the other, and a newer one before the rest of an older one."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._queue is not None)
                if self._closed:
                    return
                assert self._queue is not None
                names, self._queue, self._working = self._queue, None, True
            try:
                self._apply(names, lambda: self._closed or self._queue is not None)
            except StoreError as error:
                logger.warning("contexts are not fetched ahead: %s", error)
            finally:
                with self._wake:
                    self._working = False
                    self._wake.notify_all()
