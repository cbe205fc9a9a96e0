"""Conservation: every byte and slot is free or held by one job; each job is in one state. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from retrieval_attn.engine.fairness import FairQueue
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import State
from retrieval_attn.engine.resource_pool import ResourcePool

__all__ = ["check_conservation"]


def check_conservation(limits: Limits, places: ResourcePool, queues: Mapping[bool, FairQueue]) -> None:
    """Count anew, from the jobs, what was counted at each change. Raises AssertionError with the first difference."""
    entries, seated = places.entries, places.seated()
    found = [(name, State.WAITING) for queue in queues.values() for name in queue.waiting()]
    found += [(name, state) for state, jobs in places.held.items() for name in jobs]
    found += [(entry.job.id, State.DECODING) for entry in seated]
    for name, times in Counter(name for name, _ in found).items():
        _equal(f"places of job {name!r}", times, 1)
    _equal("jobs in some place", len(found), len(entries))
    for name, state in found:
        _equal(f"state of job {name!r}", entries[name].state, state)
    for interactive, queue in queues.items():
        _equal("waiting jobs by count", len(queue), len(queue.waiting()))
        for name in queue.waiting():
            _equal(f"queue of job {name!r}", entries[name].interactive, interactive)

    states = Counter(entry.state for entry in entries.values())
    rows = states[State.READING] + states[State.READY] + states[State.DECODING]
    _require(rows <= limits.rows + limits.ahead, f"{rows} jobs are admitted and not parked")
    held_bytes = sum(limits.job_bytes(entry.job) for entry in entries.values() if entry.state is not State.WAITING)
    _equal("free + held host bytes", places.unreserved_bytes + held_bytes, limits.host_bytes)
    _require(places.unreserved_bytes >= 0, f"{places.unreserved_bytes:,} free host bytes")
    slots = [*places.free_slots, *(entry.slot for entry in seated)]
    _equal("free + taken slots", sorted(slots), list(range(limits.rows)))
    _equal("jobs with a slot", sum(entry.slot >= 0 for entry in entries.values()), len(seated))
    for entry in entries.values():
        most = entry.job.max_tokens
        _require(
            0 <= entry.generated <= most and entry.in_flight >= 0 and entry.generated + entry.in_flight <= most,
            f"job {entry.job.id!r} has {entry.generated} tokens and {entry.in_flight} on their way, of {most}",
        )


def _equal(what: str, found: object, right: object) -> None:
    _require(found == right, f"{what}: {found}, must be {right}")


def _require(holds: bool, what: str) -> None:
    """As `assert`, but not left out by `python -O`."""
    if not holds:
        raise AssertionError(f"The scheduler lost count: {what}. Please report this.")
