"""Shelf: prefetches saved contexts into RAM and evicts others, by the queue of requests that wait for them.

RAM is the system's page cache of the files: every process that maps a context shares one copy, and eviction writes
nothing. The system may evict pages by itself; `refresh` reads which are resident. The policy is that of CachedAttention
(USENIX ATC 2024, section 3.3): the queue decides what is prefetched and what is evicted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from retrieval_attn.errors import ConfigError, StoreError
from retrieval_attn.store.mapped import give_up, resident_bytes
from retrieval_attn.store.names import NamedContext
from retrieval_attn.store.store import ContextStore

logger = logging.getLogger(__name__)
IN_RAM = 0.9
"""Share of a group's bytes in memory from which the group counts as resident."""


@dataclass(frozen=True)
class Group:
    """Nodes that the same names reach: they are prefetched and evicted together.

    nodes: digests, root first; the last one identifies the group. names: contexts that contain the nodes. files: by
    layer, so that the first layers of all nodes come first. nbytes: of all files.
    """

    nodes: tuple[str, ...]
    names: frozenset[str]
    files: tuple[Path, ...]
    nbytes: int

    @property
    def digest(self) -> str:
        return self.nodes[-1]

    def resident_bytes(self) -> int:
        """Return the bytes in memory, 0 if the system does not report them."""
        found = 0
        for path in self.files:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found += resident_bytes(path) or 0
        return found


@dataclass
class TierEntry:
    """State of a group. nbytes: size on disk. saved_at: when the newest of its contexts was saved, seconds."""

    nbytes: int
    in_ram: bool = True
    saved_at: float = 0.0


class Moves(NamedTuple):
    """Groups to move, by digest. fetch: from disk to RAM, soonest needed first. evict: from RAM, in this order."""

    fetch: list[str]
    evict: list[str]


class Done(NamedTuple):
    """Result of one pass. fetched, evicted: digests of groups. nbytes: of the fetched groups."""

    fetched: list[str]
    evicted: list[str]
    nbytes: int


def plan_moves(entries: Mapping[str, TierEntry], queue: Sequence[str], ram_bytes: int) -> Moves:
    """Choose the groups to prefetch and evict; change nothing.

    The prefetch window is as many groups of the queue as `ram_bytes` holds of mean size. Eviction takes groups outside
    the queue first, the earliest saved first, then the queue's last, but none that is needed before the group that
    it would make room for. Unknown digests of the queue are skipped.
    """
    if not entries:
        return Moves([], [])
    waiting = [digest for digest in dict.fromkeys(queue) if digest in entries]
    ranks = {digest: rank for rank, digest in enumerate(waiting)}
    mean_bytes = max(sum(entry.nbytes for entry in entries.values()) / len(entries), 1.0)
    missing = [digest for digest in waiting[: math.ceil(ram_bytes / mean_bytes)] if not entries[digest].in_ram]

    def value(digest: str) -> tuple[int, float]:
        return (1, -ranks[digest]) if digest in ranks else (0, entries[digest].saved_at)

    victims = sorted((digest for digest, entry in entries.items() if entry.in_ram), key=value)
    free = ram_bytes - sum(entry.nbytes for entry in entries.values() if entry.in_ram)
    evicted = 0
    while free < 0 and evicted < len(victims):
        free += entries[victims[evicted]].nbytes
        evicted += 1
    fetch: list[str] = []
    for digest in missing:
        left, more = free - entries[digest].nbytes, evicted
        while left < 0 and more < len(victims) and ranks.get(victims[more], math.inf) > ranks[digest]:
            left += entries[victims[more]].nbytes
            more += 1
        if left < 0:  # the remaining groups in RAM are needed sooner
            break
        fetch.append(digest)
        free, evicted = left, more
    return Moves(fetch, victims[:evicted])


class Shelf:
    """Keeps the contexts that are needed next in RAM. Thread-safe. A context manager; `close` ends its thread."""

    def __init__(self, store: ContextStore, *, ram_bytes: int) -> None:
        """ram_bytes: maximum size of saved contexts in the page cache. Raises ConfigError if it is negative."""
        if ram_bytes < 0:
            raise ConfigError(f"ram_bytes must be 0 bytes or more, got {ram_bytes}")
        self._store, self._ram_bytes = store, ram_bytes
        self.entries: dict[str, TierEntry] = {}
        """Groups by digest, as of the last `refresh`."""
        self._groups: dict[str, Group] = {}
        self._of_name: dict[str, tuple[str, ...]] = {}
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

    def expect(self, names: Sequence[str]) -> None:
        """Prefetch these contexts in a background thread, the first one first.

        A later call replaces the queue, also while a fetch runs. Unknown names are skipped.
        """
        with self._wake:
            if self._closed:
                raise StoreError("this shelf is closed; create a new one")
            self._queue = tuple(names)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="context-shelf", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread after the file that it reads now."""
        with self._wake:
            self._closed, self._queue = True, None
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def refresh(self) -> None:
        """Read the store's names and which bytes are in memory."""
        with self._lock:
            contexts = {context.name: context for context in self._store.list()}
            self._groups, self._of_name = grouped(self._store, contexts.values())
            self.entries = {
                digest: TierEntry(
                    group.nbytes,
                    in_ram=group.resident_bytes() >= IN_RAM * group.nbytes,
                    saved_at=max(contexts[name].saved_at for name in group.names),
                )
                for digest, group in self._groups.items()
            }

    def _apply(self, names: tuple[str, ...], stop: Callable[[], bool]) -> Done:
        with self._lock:
            self.refresh()
            queue = [digest for name in names for digest in self._of_name.get(name, ())]
            moves = plan_moves(self.entries, queue, self._ram_bytes)
            evicted = [digest for digest in moves.evict if self._evict(self._groups[digest])]
            waiting = [self._groups[digest] for digest in moves.fetch]
        fetched, nbytes = [], 0
        for group in waiting:
            if stop():
                break
            read = self._fetch(group, stop)
            nbytes += read
            if read:
                fetched.append(group.digest)
                with self._lock:
                    if group.digest in self.entries:
                        self.entries[group.digest].in_ram = True
        return Done(fetched, evicted, nbytes)

    def _fetch(self, group: Group, stop: Callable[[], bool]) -> int:
        """Read a group into memory. Return its bytes, 0 if it was not read to the end."""
        try:
            nodes = [self._store.get(node) for node in group.nodes]
            for file in sorted({file for node in nodes for file in node.files}):
                for node in nodes:
                    if file in node.files:
                        if stop():
                            return 0
                        node.file(file).populate()
        except StoreError as error:  # opening the context raises the same error
            logger.warning("cannot prefetch a saved context: %s", error)
            return 0
        return sum(node.nbytes for node in nodes)

    def _evict(self, group: Group) -> bool:
        try:
            for path in group.files:
                give_up(path)
        except (OSError, StoreError) as error:
            logger.warning("cannot evict a saved context from the page cache: %s", error)
            return False
        self.entries[group.digest].in_ram = False
        return True

    def _work(self) -> None:
        """Run the thread: a newer queue replaces the rest of an older one."""
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
                logger.warning("cannot prefetch saved contexts: %s", error)
            finally:
                with self._wake:
                    self._working = False
                    self._wake.notify_all()


def grouped(
    store: ContextStore, contexts: Collection[NamedContext]
) -> tuple[dict[str, Group], dict[str, tuple[str, ...]]]:
    """Return all groups by digest, and the digests of each context's groups, root first.

    A context with a missing node is left out.
    """
    reached: dict[str, set[str]] = {}
    for context in contexts:
        for node in context.chain:
            reached.setdefault(node, set()).add(context.name)
    groups: dict[str, Group] = {}
    of_name: dict[str, tuple[str, ...]] = {}
    for context in contexts:
        try:
            own = _groups_of(store, context, reached, groups)
        except (OSError, StoreError) as error:
            logger.warning("the context %r is neither prefetched nor evicted: %s", context.name, error)
            continue
        groups.update((group.digest, group) for group in own)
        of_name[context.name] = tuple(group.digest for group in own)
    return groups, of_name


def _groups_of(
    store: ContextStore, context: NamedContext, reached: dict[str, set[str]], known: dict[str, Group]
) -> list[Group]:
    """Return the groups of one chain. A name that reaches a node reaches its ancestors: equal sets are adjacent."""
    groups: list[Group] = []
    run: list[str] = []
    for node, following in zip(context.chain, [*context.chain[1:], None], strict=True):
        run.append(node)
        if following is not None and reached[following] == reached[node]:
            continue
        group = known.get(node)
        if group is None:
            files = sorted((path for one in run for path in store.files(one)), key=lambda path: path.name)
            nbytes = sum(path.stat().st_size for path in files)
            group = Group(tuple(run), frozenset(reached[node]), tuple(files), nbytes)
        groups.append(group)
        run = []
    return groups
