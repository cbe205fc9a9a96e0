"""Decide which requests are prefilled, decode, wait or leave in the next step. Deterministic; imports no torch.

Batches change between steps (Orca, OSDI 2022). A request is admitted only with all memory that it may need, without
preemption by recomputation, so that no request waits for memory of another waiting one. Load decides when a request is
computed, never its result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from retrieval_attn.engine.fairness import FairQueue
from retrieval_attn.engine.gate import ChunkKind
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.prefill_budget import PrefillBudget
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.engine.resource_pool import ResourcePool, ScheduledRequest
from retrieval_attn.errors import AdmissionError, EngineFullError

__all__ = ["StepResult", "Scheduler", "SchedulerOutput"]

TRIES = 8
"""Jobs looked at, when the first lacks host memory, for one that fits."""
OVERTAKES = 16
"""Jobs that may overtake one that lacks host memory; then all wait until it has it."""


class StepResult(NamedTuple):
    """Results since the last round. Unknown requests are ignored.

    Attributes:
        ended: requests that sampled a stop token or stop string.
        tokens: requests with one more token; one with several appears as often. Each planned one appears here, or in
            `ended` or `failed`, in any later round.
        failed: requests with an error, in any state.
        read: completed prefill chunks.
        read_done: requests whose prompt is prefilled.
        decode_seconds: duration of the last step; 0: not measured.
        chunk_seconds: mean duration of a chunk in `read`; 0: not measured.
        next_kinds: kinds of the next chunks of requests in `read`.
    """

    ended: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    read: Mapping[str, int] = {}
    read_done: tuple[str, ...] = ()
    decode_seconds: float = 0.0
    chunk_seconds: float = 0.0
    next_kinds: Mapping[str, ChunkKind] = {}


class SchedulerOutput(NamedTuple):
    """Plan of a round, executed in this order.

    Attributes:
        leave: requests that end; their resources are freed.
        start: admitted requests; prefill begins, or they are ready if only the last prompt token is left.
        decode: sequences of this step in the order of their slots, without preempted ones.
        read: largest number of prefill chunks by request before the next step.
    """

    start: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    read: tuple[tuple[str, int], ...] = ()
    leave: tuple[str, ...] = ()


def _seating_order(entry: ScheduledRequest) -> tuple[bool, bool, int]:
    return (not entry.interactive, not entry.interactive and entry.state is not State.PREEMPTED, entry.order)


class Scheduler:
    """Schedules requests from submission to end; `schedule` is called before every step.

    A round takes O(rows + changes), however many requests wait. `lacking_bytes`: host bytes that the next request
    lacks; the engine evicts prefixes for them and reports with `set_outside`.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lacking_bytes = 0
        self._places = ResourcePool(limits)
        self._queues = {True: FairQueue(limits.quantum_tokens), False: FairQueue(limits.quantum_tokens)}
        self._batch_by_age: OrderedDict[str, ScheduledRequest] = OrderedDict()
        self._grants = PrefillBudget(limits)
        self._leaving: dict[str, None] = {}
        self._ticks = 0
        self._order = 0
        self._now = 0.0
        self._draining = False

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._places.entries

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queues[True]) + len(self._queues[False])

    @property
    def knowing(self) -> list[str]:
        """Requests with known tokens that are not leased for them."""
        return [
            name for name, entry in self._places.entries.items() if entry.job.known_tokens > entry.job.cached_tokens
        ]

    @property
    def slots_in_use(self) -> int:
        """Slots with a running sequence."""
        return len(self._places.seated())

    def state(self, job: str) -> State:
        """Return the state of a request; gone if it is unknown."""
        entry = self._places.entries.get(job)
        return State.GONE if entry is None else entry.state

    def next_kind(self, job: str) -> ChunkKind:
        """Return the kind of a request's next chunk, as its grant is planned."""
        entry = self._places.entries.get(job)
        return "chunk" if entry is None else entry.next_kind

    def progress(self, job: str) -> float:
        """Return the completed share of a request's prefill; 0 if it is unknown."""
        entry = self._places.entries.get(job)
        return 0.0 if entry is None else min(1.0, entry.chunks_done / max(1, self.limits.chunks(entry.job)))

    @property
    def host_bytes_in_use(self) -> int:
        """Host bytes of the limit that requests have reserved or the prefix cache uses."""
        return self.limits.host_bytes - self._places.free_bytes

    def submit(self, job: RequestNeeds, now: float) -> None:
        """Queue a request. now: seconds of a monotonic clock.

        Raises:
            AdmissionError: the request never fits, or its id is in use.
            EngineFullError: too many wait, or `drain` was called. A refused request leaves nothing behind.
        """
        if job.id in self._places.entries:
            raise AdmissionError(f"A request {job.id!r} exists already; give each request its own id.")
        self.limits.refuse_too_large(job)
        if self._draining:
            raise EngineFullError("The engine is draining and accepts no requests; use another engine or restart it.")
        if self.waiting >= self.limits.waiting:
            raise EngineFullError(
                f"The queue has {self.waiting:,} of at most {self.limits.waiting:,} requests; try again later or "
                "raise Limits.waiting."
            )
        self._now = max(self._now, now)
        self._order += 1
        interactive = job.priority == "interactive"
        entry = ScheduledRequest(
            job, self._now, self._order, self.limits.job_bytes(job), self.limits.is_long(job), interactive=interactive
        )
        self._places.enter(entry)
        self._queues[interactive].add(job.id, job.owner, is_long=entry.is_long)
        if not interactive:
            self._batch_by_age[job.id] = entry

    def abort(self, job: str) -> bool:
        """End a request in the next round, whatever its state. Returns False if it is gone already."""
        if job not in self._places.entries:
            return False
        self._leaving[job] = None
        return True

    def drain(self) -> None:
        """Refuse new requests and serve the present ones to their end."""
        self._draining = True

    def set_cached(self, job: str, cached_tokens: int) -> None:
        """Set the prompt tokens of a request that are in the prefix cache.

        A waiting request may gain or lose some; it raises AdmissionError, unchanged, if it becomes too large. An
        admitted one frees what it reserved for them, and raises ConfigError for fewer. Unknown requests are ignored.
        """
        if (entry := self._places.entries.get(job)) is None:
            return
        changed = replace(entry.job, cached_tokens=cached_tokens)
        self.limits.refuse_too_large(changed)
        if entry.state is State.WAITING:
            entry.host_bytes = self.limits.job_bytes(changed)
        else:
            self._places.shrink(entry, changed)
        _renew(entry, changed, self._queues[entry.interactive], self.limits)

    def set_known(self, job: str, known_tokens: int) -> None:
        """Set the prompt tokens of a waiting request that are cached now, see `RequestNeeds`."""
        if (entry := self._places.entries.get(job)) is not None:
            job_now = replace(entry.job, known_tokens=known_tokens)
            _renew(entry, job_now, self._queues[entry.interactive], self.limits)

    def set_outside(self, host_bytes: int) -> None:
        """Set the host bytes, of those in the limits, that anything but requests uses."""
        self._places.outside_bytes = host_bytes

    def schedule(self, results: StepResult, now: float) -> SchedulerOutput:
        """Take the results of the last round and plan the next step. now: seconds, as in `submit`."""
        self._now = max(self._now, now)
        self._ticks += 1
        self._take_in(results)
        leave = self._pop_finished()
        self._promote()
        self._seat()
        start = self._admit()
        if start:
            self._seat()
        rows = [entry for entry in self._places.seated() if entry.wants_step]
        for entry in rows:
            entry.in_flight += 1
        return SchedulerOutput(
            start=start,
            decode=tuple(entry.job.id for entry in rows),
            read=self._grants.plan(self._places.held[State.READING].values(), len(rows), now),
            leave=leave,
        )

    def _take_in(self, results: StepResult) -> None:
        self._grants.measured(results.read, self._places.entries, results.chunk_seconds)
        self._grants.measured_step(len(results.tokens), results.decode_seconds)
        for name, chunks in results.read.items():
            if entry := self._places.entries.get(name):
                entry.chunks_done += chunks
                entry.next_kind = results.next_kinds.get(name, "chunk")
        for name in results.read_done:
            entry = self._places.entries.get(name)
            if entry is not None and entry.state is State.READING:
                self._places.move(entry, State.READY)
        for name in results.tokens:
            if entry := self._places.entries.get(name):
                entry.in_flight = max(entry.in_flight - 1, 0)
                entry.generated += 1
                self._queues[entry.charged].charge(entry.job.owner, 1)
                if entry.generated >= entry.job.max_tokens:
                    self._leaving[name] = None
        for name in chain(results.ended, results.failed):
            if name in self._places.entries:
                self._leaving[name] = None

    def _pop_finished(self) -> tuple[str, ...]:
        leave = tuple(self._leaving)
        self._leaving.clear()
        for name in leave:
            entry = self._places.entries[name]
            if entry.state is State.WAITING:
                self._queues[entry.interactive].remove(name, entry.job.owner, is_long=entry.is_long)
                self._batch_by_age.pop(name, None)
            self._places.move(entry, State.GONE)
        return leave

    def _promote(self) -> None:
        """Treat batch requests of sufficient age as interactive."""
        due = self._now - self.limits.promote_seconds
        while self._batch_by_age:
            name, entry = next(iter(self._batch_by_age.items()))
            if entry.submitted > due:
                break
            del self._batch_by_age[name]
            self._queues[False].remove(name, entry.job.owner, is_long=entry.is_long)
            entry.interactive = True
            self._queues[True].add(name, entry.job.owner, is_long=entry.is_long)
        for entry in self._places.admitted():
            entry.interactive = entry.interactive or entry.submitted <= due

    def _seat(self) -> None:
        """Assign slots: to interactive requests, which may preempt; to preempted ones; to batch ones; each by age."""
        unseated = chain(self._places.held[State.READY].values(), self._places.held[State.PREEMPTED].values())
        for entry in sorted(unseated, key=_seating_order):
            parked = entry.state is State.PREEMPTED
            fits = self._places.free_slots and (not parked or self._places.has_room)
            if not fits and not (entry.interactive and self._preempt_one()):
                continue
            entry.since = self._ticks
            self._places.move(entry, State.DECODING)

    def _preempt_one(self) -> bool:
        """Preempt the batch request that got its slot last, unless in this round."""
        rows = [e for e in self._places.seated() if not e.interactive and e.since < self._ticks]
        if not rows:
            return False
        entry = max(rows, key=lambda e: e.order)
        self._places.move(entry, State.PREEMPTED)
        return True

    def _admit(self) -> tuple[str, ...]:
        """Admit requests that fit. Returns their ids."""
        start: list[str] = []
        room = self._places.room()
        while (entry := self._next(room)) is not None:
            job = entry.job
            room[False] -= 1
            room[True] -= entry.interactive
            entry.charged = entry.interactive
            self._queues[entry.interactive].serve(job.id, job.owner, job.unread_tokens, is_long=entry.is_long)
            self._batch_by_age.pop(job.id, None)
            start.append(job.id)
            self._places.move(entry, State.READING)
            if job.is_there:
                self._places.move(entry, State.READY)
        return tuple(start)

    def _next(self, room: Mapping[bool, int]) -> ScheduledRequest | None:
        """Return the next request to admit, or None. A limited number may overtake one that lacks host memory."""
        self.lacking_bytes = 0
        blocked: ScheduledRequest | None = None
        for interactive in (True, False):
            if room[interactive] <= 0:
                continue
            with_long = not any(
                e.is_long and e.interactive >= interactive for e in self._places.held[State.READING].values()
            )
            for count in (1, TRIES):
                for name in self._queues[interactive].heads(count, with_long=with_long)[count > 1 :]:
                    entry = self._places.entries[name]
                    if not self._places.fits(entry):
                        blocked = blocked or entry
                        self.lacking_bytes = max(self._places.lacking_bytes(blocked), 0)
                        if blocked.overtaken >= OVERTAKES:
                            return None
                    elif self._places.has_room or (interactive and self._preempt_one()):
                        if blocked is not None:
                            blocked.overtaken += 1
                        return entry
                    else:
                        return None
                if blocked is None:
                    break
        return None


def _renew(entry: ScheduledRequest, job: RequestNeeds, queue: FairQueue, limits: Limits) -> None:
    """Replace the needs of a scheduled request; its unread tokens decide whether it is long."""
    is_long = limits.is_long(job)
    if entry.state is State.WAITING and is_long != entry.is_long:
        queue.remove(job.id, job.owner, is_long=entry.is_long)
        queue.add(job.id, job.owner, is_long=is_long)
    entry.job, entry.is_long = job, is_long
