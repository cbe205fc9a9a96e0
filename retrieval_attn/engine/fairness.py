"""Who comes next: deficit round robin over owners. Imports no torch.

Deficit round robin (Shreedhar and Varghese, 1995) with payment afterwards (surplus round robin), for how many tokens a
job generates is known only then. Every owner has an account of tokens that were read and generated for it. The owner
whose account is the lowest, counted in whole quanta, comes first; of equal ones, who was served longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

__all__ = ["FairQueue"]

IDLE_ACCOUNTS = 1024
"""Of owners without waiting jobs, whose debts are remembered."""

_Key = tuple[int, int, int, str]


class _Account:
    """One owner's: tokens that it has had, when it was served last, and how many of its jobs wait."""

    __slots__ = ("spent", "turn", "waiting")

    def __init__(self, spent: int) -> None:
        self.spent = spent
        self.turn = 0
        self.waiting = 0


class _Lane:
    """Waiting jobs of one length class: a line per owner, and a heap of owners that is put right when it is looked at.

    Keys only rise, with an account or with the arrival of the first in the line, so a key that is too low is found at
    the heap's top.
    """

    def __init__(self) -> None:
        self.lines: dict[str, OrderedDict[str, int]] = {}
        self._heap: list[_Key] = []
        self._in_heap: set[str] = set()

    def add(self, key: _Key, job: str) -> None:
        owner = key[-1]
        self.lines.setdefault(owner, OrderedDict())[job] = key[2]
        if owner not in self._in_heap:
            self._in_heap.add(owner)
            heappush(self._heap, key)
        if len(self._heap) > 64 + 2 * len(self.lines):
            self._heap = [key for key in self._heap if key[-1] in self.lines]
            heapify(self._heap)
            self._in_heap = set(self.lines)

    def remove(self, owner: str, job: str) -> None:
        line = self.lines[owner]
        del line[job]
        if not line:
            del self.lines[owner]

    def pop_best(self, accounts: dict[str, _Account], quantum: int) -> _Key | None:
        """Take the best owner's entry off the heap; `put_back` must follow."""
        while self._heap:
            key = self._heap[0]
            owner = key[-1]
            line = self.lines.get(owner)
            if line is None:
                heappop(self._heap)
                self._in_heap.discard(owner)
                continue
            account = accounts[owner]
            right = (account.spent // quantum, account.turn, next(iter(line.values())), owner)
            if right == key:
                return heappop(self._heap)
            heapreplace(self._heap, right)
        return None

    def put_back(self, key: _Key) -> None:
        heappush(self._heap, key)

    def knows(self, owner: str) -> bool:
        """Whether a key of the owner is in the heap, be it one that nothing waits behind."""
        return owner in self._in_heap

    def first(self, owner: str) -> str:
        return next(iter(self.lines[owner]))


class FairQueue:
    """Waiting jobs of one priority. Each call takes O(log owners); none depends on how many jobs wait."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = quantum_tokens
        self._accounts: dict[str, _Account] = {}
        self._lanes = (_Lane(), _Lane())
        self._level = 0
        self._clock = 0
        self._length = 0
        self._kept = 0

    def __len__(self) -> int:
        return self._length

    def add(self, job: str, owner: str, *, is_long: bool) -> None:
        """Behind the owner's other jobs. Who had nothing waiting brings no credit from that time, but its debts."""
        self._forget_idle()
        account = self._accounts.setdefault(owner, _Account(self._level))
        if account.waiting == 0:
            account.spent = max(account.spent, self._level)
        account.waiting += 1
        self._clock += 1
        self._length += 1
        key = (account.spent // self._quantum, account.turn, self._clock, owner)
        self._lanes[is_long].add(key, job)

    def remove(self, job: str, owner: str, *, is_long: bool) -> None:
        """A job that waits no longer, whyever."""
        self._lanes[is_long].remove(owner, job)
        self._accounts[owner].waiting -= 1
        self._length -= 1

    def serve(self, job: str, owner: str, tokens: int, *, is_long: bool) -> None:
        """A job was admitted: it waits no longer, and its owner pays for the tokens to be read."""
        account = self._accounts[owner]
        self._level = max(self._level, account.spent)
        self._clock += 1
        account.turn = self._clock
        self.remove(job, owner, is_long=is_long)
        self.charge(owner, tokens)
        if not self._length:
            # no request is queued, so no owner was delayed by this one's use: all counts start at zero again
            self._level = max(self._level, account.spent)

    def charge(self, owner: str, tokens: int) -> None:
        """An owner had tokens."""
        account = self._accounts.setdefault(owner, _Account(self._level))
        account.spent += tokens

    def heads(self, count: int, *, with_long: bool) -> list[str]:
        """At most `count` jobs in the order in which they are to be served; of an owner, the first of each length."""
        found: list[tuple[_Key, str]] = []
        for lane in self._lanes if with_long else self._lanes[:1]:
            keys: list[_Key] = []
            while len(keys) < count and (key := lane.pop_best(self._accounts, self._quantum)) is not None:
                keys.append(key)
            for key in keys:
                lane.put_back(key)
                found.append((key, lane.first(key[-1])))
        return [job for _, job in sorted(found)[:count]]

    def waiting(self) -> list[str]:
        """All jobs that wait, in no order; O(jobs), for checks."""
        return [job for lane in self._lanes for line in lane.lines.values() for job in line]

    def _forget_idle(self) -> None:
        """Drop accounts of owners without jobs: those without debts, and, of too many, who was served longest ago."""
        if len(self._accounts) <= IDLE_ACCOUNTS + 2 * self._kept:
            return
        busy = {o: a for o, a in self._accounts.items() if any(lane.knows(o) for lane in self._lanes)}
        idle = [(a.turn, o) for o, a in self._accounts.items() if o not in busy and a.spent > self._level]
        latest = sorted(idle)[-IDLE_ACCOUNTS:]
        self._accounts = busy | {owner: self._accounts[owner] for _, owner in latest}
        self._kept = len(self._accounts)
