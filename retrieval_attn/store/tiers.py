"""Tiers: which saved nodes are in RAM, which wait on disk, and which leave the store. A policy: it moves no bytes.

Follows CachedAttention (USENIX ATC 2024), section 3.3: whoever schedules requests knows which contexts come next, and
that queue decides what is fetched ahead and what is given up. `Lru` and `Fifo` know the past alone; they are here to be
compared with (`python -m tools.simulate_tiers`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

__all__ = ["Fifo", "TierEntry", "Ledger", "Lru", "Moves", "Policy", "Tiers"]

Digest = str


class Moves(NamedTuple):
    """What is to be done, each list in its order. A node is in one list at most.

    fetch: bring from disk to RAM, soonest needed first. evict: give up the copy in RAM; the disk has another. drop:
    remove from disk, and with it from RAM; no node is dropped before its children.
    """

    fetch: list[Digest]
    evict: list[Digest]
    drop: list[Digest]


@dataclass
class TierEntry:
    """One node of the store.

    nbytes: on disk, and in RAM as many. rebuild_seconds: what it would take to make it anew. in_ram: its pages are
    there. clean: the disk has all of it; a node that is still being written is not clean, and stays where it is. kept:
    somebody named it, so it is never dropped. busy: requests that read it now; it is neither evicted nor dropped.
    """

    nbytes: int
    rebuild_seconds: float = 0.0
    parent: Digest | None = None
    in_ram: bool = True
    clean: bool = True
    kept: bool = False
    busy: int = 0
    added: float = 0.0
    used: float = 0.0

    def worth(self, now: float) -> float:
        """Seconds to make one byte anew, per second since it was used: of equal cost, the older is worth less.

        Cost alone would keep long contexts forever that nobody comes back to.
        """
        return self.rebuild_seconds / max(self.nbytes, 1) / max(now - self.used, 1e-9)


class Ledger:
    """All nodes that a policy knows, and the bytes of both tiers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds; only their order matters."""
        self._clock = clock
        self._held: dict[Digest, TierEntry] = {}
        self._ram: set[Digest] = set()
        self.ram_bytes = 0
        self.disk_bytes = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self._held

    def __iter__(self) -> Iterator[Digest]:
        return iter(self._held)

    def __getitem__(self, digest: Digest) -> TierEntry:
        return self._held[digest]

    def get(self, digest: Digest) -> TierEntry | None:
        """None for a node that is not there."""
        return self._held.get(digest)

    @property
    def mean_bytes(self) -> float:
        """Of a node, S_kv of the paper; 1 where there is none."""
        return max(self.disk_bytes / len(self._held), 1.0) if self._held else 1.0

    def add(self, digest: Digest, held: TierEntry) -> None:
        """A node is in the store, used now. One that was there keeps the time it came first."""
        before = self._held.get(digest)
        held.used = self._clock()
        held.added = held.used if before is None else before.added
        self.remove(digest)
        self._held[digest] = held
        self.disk_bytes += held.nbytes
        self._place(digest, held)

    @property
    def now(self) -> float:
        """Seconds on the ledger's clock."""
        return self._clock()

    def touch(self, digest: Digest) -> None:
        """A request used the node now. Raises KeyError for one that is not there."""
        self._held[digest].used = self._clock()

    def move(self, digest: Digest, *, in_ram: bool) -> None:
        """The node's pages came to RAM or left it. Raises KeyError for one that is not there."""
        held = self._held[digest]
        if held.in_ram != in_ram:
            self._displace(digest, held)
            held.in_ram = in_ram
            self._place(digest, held)

    def remove(self, digest: Digest) -> None:
        """The node left the store; nothing happens for one that is not there."""
        held = self._held.pop(digest, None)
        if held is not None:
            self.disk_bytes -= held.nbytes
            self._displace(digest, held)

    def apply(self, moves: Moves) -> None:
        """All of them were done."""
        for digest in moves.drop:
            self.remove(digest)
        for digest in moves.evict:
            self.move(digest, in_ram=False)
        for digest in moves.fetch:
            self.move(digest, in_ram=True)

    def evictable(self) -> list[Digest]:
        """Nodes whose pages may leave RAM, in no order."""
        return [digest for digest in self._ram if (held := self._held[digest]).clean and not held.busy]

    def droppable(self) -> list[Digest]:
        """Nodes that may leave the store, in no order; some only after others that continue them."""
        return [digest for digest, held in self._held.items() if held.clean and not held.kept and not held.busy]

    def children(self) -> dict[Digest, int]:
        """How many nodes of the store continue a node, for those that any continues."""
        counts: dict[Digest, int] = {}
        for held in self._held.values():
            if held.parent is not None:
                counts[held.parent] = counts.get(held.parent, 0) + 1
        return counts

    def _place(self, digest: Digest, held: TierEntry) -> None:
        if held.in_ram:
            self._ram.add(digest)
            self.ram_bytes += held.nbytes

    def _displace(self, digest: Digest, held: TierEntry) -> None:
        if held.in_ram:
            self._ram.discard(digest)
            self.ram_bytes -= held.nbytes


class Policy(Protocol):
    """Decides what moves between the tiers."""

    ledger: Ledger

    def plan(self, queue: Sequence[Digest], free_ram: int, free_disk: int) -> Moves:
        """What to move now; changes nothing.

        queue: nodes that requests wait for, the next first; a context's root stands before what continues it. Nodes
        that are not in the store are passed over. free_ram, free_disk: bytes of the budgets that are not used; below
        zero where a tier holds too much. Where nothing more may go, the moves leave it so.
        """
        ...


class Tiers:
    """Scheduler-aware fetching and eviction.

    * Prefetch window: the first C_mem / S_kv nodes of the queue; what is on disk only is fetched, in order.
    * Eviction window: the first (C_mem + C_disk) / S_kv places. RAM gives up nodes outside it first, the least worth
      first: by seconds to make a byte anew, over the seconds since its last use. Then the one nearest the window's
      tail, but never for a node that is needed later than it.
    * The disk gives up nodes outside the window in the same order, and those in it only if nothing else is left.
    """

    def __init__(self, ledger: Ledger | None = None, *, spare_ram: int = 0, spare_disk: int = 0) -> None:
        """spare_ram, spare_disk: bytes to keep free, so that a fetch or a save never waits for room."""
        self.ledger = Ledger() if ledger is None else ledger
        self._spare_ram, self._spare_disk = spare_ram, spare_disk

    def plan(self, queue: Sequence[Digest], free_ram: int, free_disk: int) -> Moves:
        """See Policy."""
        ledger = self.ledger
        in_memory, on_disk = max(free_ram + ledger.ram_bytes, 0), max(free_disk + ledger.disk_bytes, 0)
        window = min(math.ceil((in_memory + on_disk) / ledger.mean_bytes), len(queue))
        drop: list[Digest] = []
        if free_disk < 0:  # in one go down to the spare bytes: what is dropped is looked for seldom
            wanted = _ranks(islice(queue, window), ledger)
            drop = _drops(ledger, _by_value(ledger.droppable(), wanted, ledger), self._spare_disk - free_disk)
        dropped = set(drop)
        free_ram += sum(ledger[digest].nbytes for digest in drop if ledger[digest].in_ram)
        ahead = math.ceil(in_memory / ledger.mean_bytes)
        missing: list[tuple[int, Digest]] = []
        seen: set[Digest] = set()
        for place, digest in enumerate(islice(queue, window)):
            if len(seen) == ahead:
                break
            held = ledger.get(digest)
            if held is None or digest in dropped or digest in seen:
                continue
            seen.add(digest)
            if held.clean and not held.in_ram:
                missing.append((place, digest))
        need = sum(ledger[digest].nbytes for _, digest in missing)
        if free_ram - need >= self._spare_ram:
            return Moves([digest for _, digest in missing], [], drop)
        ranks = _ranks(islice(queue, window), ledger, ledger.evictable())
        victims = _by_value((digest for digest in ledger.evictable() if digest not in dropped), ranks, ledger)
        fetch, evict = self._exchange(missing, victims, ranks, free_ram)
        return Moves(fetch, evict, drop)

    def _exchange(
        self, missing: Sequence[tuple[int, Digest]], victims: Sequence[Digest], ranks: dict[Digest, int], free: int
    ) -> tuple[list[Digest], list[Digest]]:
        """What to fetch, and what to evict for it; victims: the least valuable first."""
        ledger = self.ledger
        gone = 0
        while free < self._spare_ram and gone < len(victims):
            free += ledger[victims[gone]].nbytes
            gone += 1
        fetch: dict[Digest, None] = {}
        for place, digest in missing:
            left, more = free - ledger[digest].nbytes, gone
            while left < self._spare_ram and more < len(victims) and ranks.get(victims[more], math.inf) > place:
                left += ledger[victims[more]].nbytes
                more += 1
            if left < self._spare_ram:  # what is left in RAM is needed sooner
                break
            fetch[digest], free, gone = None, left, more
        return list(fetch), list(victims[:gone])


class Lru:
    """Gives up what was used longest ago, in both tiers; fetches nothing ahead."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger

    def plan(self, queue: Sequence[Digest], free_ram: int, free_disk: int) -> Moves:
        """See Policy; the queue is not looked at."""
        return _oldest_first(self.ledger, self._age, free_ram, free_disk)

    def _age(self, digest: Digest) -> float:
        return self.ledger[digest].used


class Fifo(Lru):
    """Gives up what came first, however often it was used since."""

    def _age(self, digest: Digest) -> float:
        return self.ledger[digest].added


def _oldest_first(ledger: Ledger, age: Callable[[Digest], float], free_ram: int, free_disk: int) -> Moves:
    """Moves that free what is too much, oldest first."""
    drop: list[Digest] = []
    if free_disk < 0:
        drop = _drops(ledger, sorted(ledger.droppable(), key=age), -free_disk)
        free_ram += sum(ledger[digest].nbytes for digest in drop if ledger[digest].in_ram)
    evict: list[Digest] = []
    if free_ram < 0:
        dropped = set(drop)
        for digest in sorted(ledger.evictable(), key=age):
            if digest in dropped:
                continue
            evict.append(digest)
            free_ram += ledger[digest].nbytes
            if free_ram >= 0:
                break
    return Moves([], evict, drop)


def _ranks(window: Iterable[Digest], ledger: Ledger, among: Iterable[Digest] | None = None) -> dict[Digest, int]:
    """First place of every node in the window: of those in the store, or of some of them."""
    known = ledger if among is None else set(among)
    ranks: dict[Digest, int] = {}
    for place, digest in enumerate(window):
        if digest in known:
            ranks.setdefault(digest, place)
    return ranks


def _by_value(digests: Iterable[Digest], ranks: dict[Digest, int], ledger: Ledger) -> list[Digest]:
    """The least valuable first: outside the window by worth and last use, then from the window's tail to its head."""
    now = ledger.now

    def value(digest: Digest) -> tuple[int, float, float]:
        held, rank = ledger[digest], ranks.get(digest)
        return (0, held.worth(now), held.used) if rank is None else (1, -rank, 0.0)

    return sorted(digests, key=value)


def _drops(ledger: Ledger, order: Sequence[Digest], need: int) -> list[Digest]:
    """Of these, the first that free so many bytes; a node whose children stay is passed over, and comes after them."""
    children = ledger.children()
    drop: dict[Digest, None] = {}
    again = True
    while need > 0 and again:
        again = False
        for digest in order:
            if need <= 0:
                break
            if digest in drop or children.get(digest):
                continue
            held = ledger[digest]
            drop[digest] = None
            need -= held.nbytes
            if held.parent is not None:
                children[held.parent] = children.get(held.parent, 1) - 1
                again = True
    return list(drop)
