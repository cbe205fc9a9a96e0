"""Resources of admitted requests: slots and host bytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

from retrieval_attn.engine.gate import ChunkKind
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.errors import ConfigError

__all__ = ["ResourcePool", "ScheduledRequest"]


@dataclass(slots=True)
class ScheduledRequest:
    """Scheduling record of a request.

    Attributes:
        order: order of submission.
        interactive: by priority, or by age since.
        charged: queue that it was admitted from.
        generated: tokens received.
        in_flight: planned steps without a result.
        next_kind: kind of its next chunk.
        since: round in which it last got a slot.
        overtaken: later requests admitted while it lacked host memory.
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
    next_kind: ChunkKind = "chunk"
    since: int = -1
    overtaken: int = 0

    @property
    def has_bytes(self) -> bool:
        return self.state not in (State.WAITING, State.GONE)

    @property
    def wants_step(self) -> bool:
        """Whether another step is of use; steps in flight may yield its last token."""
        return self.generated + self.in_flight < self.job.max_tokens


class ResourcePool:
    """All requests by state, and free resources. Only `move` takes and frees them.

    Attributes:
        entries: all requests by id, waiting ones included.
        held: admitted requests without a slot.
        slots: decoding requests; the lowest free slot is used first, so that small graphs suffice.
        outside_bytes: host bytes used by anything but requests.
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
        """Free host bytes; negative if other users took reserved ones. Nothing is admitted then."""
        return self.unreserved_bytes - self.outside_bytes

    @property
    def has_room(self) -> bool:
        """Whether fewer than rows + ahead requests are admitted and not preempted."""
        active = len(self.seated()) + len(self.held[State.READING]) + len(self.held[State.READY])
        return active < self._limits.rows + self._limits.ahead

    def seated(self) -> list[ScheduledRequest]:
        """Return decoding requests in the order of their slots."""
        return [entry for entry in self.slots if entry is not None]

    def admitted(self) -> Iterator[ScheduledRequest]:
        """Return all requests that hold resources."""
        return chain(self.seated(), *(held.values() for held in self.held.values()))

    def room(self) -> dict[bool, int]:
        """Return how many requests of each priority may be admitted; interactive ones may preempt batch ones."""
        there = [entry.interactive for entry in self.admitted()]
        most = self._limits.rows + self._limits.ahead
        return {True: most - sum(there), False: most - len(there)}

    def enter(self, entry: ScheduledRequest) -> None:
        """Add a waiting request."""
        self.entries[entry.job.id] = entry

    @property
    def promised_bytes(self) -> int:
        """Bytes reserved by requests before prefill for tokens in the prefix cache, which they will free."""
        reading = self.held[State.READING].values()
        return sum(self.known_bytes(entry.job) for entry in reading if not entry.chunks_done)

    def known_bytes(self, job: RequestNeeds) -> int:
        """Return the bytes of a request's tokens that are in the prefix cache now and not yet leased for it."""
        return max(job.known_tokens - job.cached_tokens, 0) * self._limits.token_bytes

    def lacking_bytes(self, entry: ScheduledRequest) -> int:
        """Return the host bytes that a waiting request lacks besides promised ones, at most 0 if it lacks none."""
        return entry.host_bytes - self.known_bytes(entry.job) - self.free_bytes - self.promised_bytes

    def fits(self, entry: ScheduledRequest) -> bool:
        """Return whether there is host memory to admit a waiting request.

        Known tokens are leased in the round of the admission, which frees what was reserved for them: a request that
        knows some may count on promised bytes, of its own and of others.
        """
        return self.lacking_bytes(entry) + (0 if self.known_bytes(entry.job) else self.promised_bytes) <= 0

    def shrink(self, entry: ScheduledRequest, job: RequestNeeds) -> None:
        """Free what an admitted request reserved beyond the needs of `job`, which has more cached tokens."""
        if job.cached_tokens < entry.job.cached_tokens:
            raise ConfigError(
                f"Job {job.id!r} was admitted with {entry.job.cached_tokens:,} cached tokens and must keep them, got "
                f"{job.cached_tokens:,}: keep its lease on them until it has left."
            )
        self.unreserved_bytes += entry.host_bytes - self._limits.job_bytes(job)
        entry.job, entry.host_bytes = job, self._limits.job_bytes(job)

    def move(self, entry: ScheduledRequest, state: State) -> None:
        """Change the state of a request and its resources. The caller has checked that there is room."""
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
