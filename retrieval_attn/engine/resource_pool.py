"""Where jobs are, and what they hold there: slots and host bytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.errors import ConfigError

__all__ = ["ResourcePool", "ScheduledRequest"]


@dataclass(slots=True)
class ScheduledRequest:
    """One job: its state and what it holds. order: of submission. interactive: by priority or, since, by age.

    charged: the priority whose queue it was admitted from. generated: tokens that came; in_flight: steps that it was
    planned for and whose result is not there yet. at_end: its next chunk ends a layer's pass. since: the tick in which
    it last got a slot. overtaken: jobs behind it that were admitted while it lacked host memory.
    """

    job: RequestNeeds
    submitted: float
    order: int
    host_bytes: int
    is_long: bool
    interactive: bool
    state: State = State.WAITING
    charged: bool = False
    slot: int = -1
    generated: int = 0
    in_flight: int = 0
    chunks_done: int = 0
    at_end: bool = False
    since: int = -1
    overtaken: int = 0

    @property
    def has_bytes(self) -> bool:
        return self.state not in (State.WAITING, State.GONE)

    @property
    def wants_step(self) -> bool:
        """Whether a further step could still be of use: steps on their way may bring its last token."""
        return self.generated + self.in_flight < self.job.max_tokens


class ResourcePool:
    """All jobs that are there, by state, and what is free. `move` alone takes and gives back.

    entries: every job by its id, waiting ones too. held: those that are admitted and without a slot. slots: those that
    decode; the free slot with the lowest number is taken first, so that few rows stand close. outside_bytes: host bytes
    that something else than a job holds.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.entries: dict[str, ScheduledRequest] = {}
        self.held: dict[State, dict[str, ScheduledRequest]] = {
            state: {} for state in (State.READING, State.READY, State.PREEMPTED)
        }
        self.slots: list[ScheduledRequest | None] = [None] * limits.rows
        self.free_slots = list(range(limits.rows))
        self.unreserved_bytes = limits.host_bytes
        self.outside_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Below 0 where what is outside grew into what jobs had reserved: nothing is admitted until it shrinks."""
        return self.unreserved_bytes - self.outside_bytes

    @property
    def has_room(self) -> bool:
        """Whether fewer than rows + ahead jobs are admitted and not parked."""
        active = len(self.seated()) + len(self.held[State.READING]) + len(self.held[State.READY])
        return active < self._limits.rows + self._limits.ahead

    def seated(self) -> list[ScheduledRequest]:
        """Rows in the order of their slots."""
        return [entry for entry in self.slots if entry is not None]

    def admitted(self) -> Iterator[ScheduledRequest]:
        """All that hold something."""
        return chain(self.seated(), *(held.values() for held in self.held.values()))

    def room(self) -> dict[bool, int]:
        """Jobs of each priority that slots let in: interactive ones see no batch jobs, for these can be parked."""
        there = [entry.interactive for entry in self.admitted()]
        most = self._limits.rows + self._limits.ahead
        return {True: most - sum(there), False: most - len(there)}

    def enter(self, entry: ScheduledRequest) -> None:
        """A job that waits: it holds nothing yet."""
        self.entries[entry.job.id] = entry

    @property
    def promised_bytes(self) -> int:
        """Reserved by jobs that have not begun to read, for tokens that the tree has: they find them, and give as much
        back.
        """
        new = (entry.job for entry in self.held[State.READING].values() if not entry.chunks_done)
        return sum(max(job.known_tokens - job.cached_tokens, 0) for job in new) * self._limits.token_bytes

    def shrink(self, entry: ScheduledRequest, job: RequestNeeds) -> None:
        """Give back what an admitted job reserved beyond what `job`, the same with more cached tokens, needs."""
        if job.cached_tokens < entry.job.cached_tokens:
            raise ConfigError(
                f"Job {job.id!r} was admitted with {entry.job.cached_tokens:,} cached tokens and must keep them, got "
                f"{job.cached_tokens:,}: keep its lease on them until it has left."
            )
        self.unreserved_bytes += entry.host_bytes - self._limits.job_bytes(job)
        entry.job, entry.host_bytes = job, self._limits.job_bytes(job)

    def move(self, entry: ScheduledRequest, state: State) -> None:
        """Change a job's state, and with it what it holds. The caller has seen that there is room."""
        had_bytes = entry.has_bytes
        if entry.state in self.held:
            del self.held[entry.state][entry.job.id]
        elif entry.state is State.DECODING:
            self.slots[entry.slot] = None
            heappush(self.free_slots, entry.slot)
            entry.slot = -1
        entry.state = state
        if state in self.held:
            self.held[state][entry.job.id] = entry
        elif state is State.DECODING:
            entry.slot = heappop(self.free_slots)
            self.slots[entry.slot] = entry
        elif state is State.GONE:
            del self.entries[entry.job.id]
        self.unreserved_bytes -= entry.host_bytes * (entry.has_bytes - had_bytes)
