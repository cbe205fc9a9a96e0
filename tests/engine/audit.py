"""Checks of an engine's accounts: pages, bytes, slots, leases and links are recounted from the objects that hold them.

Each function raises AssertionError with the first difference. All take the locks that the engine's own threads take.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from retrieval_attn.engine.inflight_prefills import InflightPrefills
from retrieval_attn.engine.node import Branches, Node, Sizes
from retrieval_attn.engine.paged_prefix import PagePool
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request_needs import State
from retrieval_attn.engine.resident_set import ResidentSet
from retrieval_attn.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from retrieval_attn.engine.engine import Engine


def check_engine(engine: Engine) -> None:
    """Recount pages, bytes, slots and references of an engine, once idle texts are copied."""
    while engine._idle is not None and engine._idle.is_copying:
        time.sleep(0.001)
    with engine._changed:
        check_scheduler(engine._scheduler)
        if engine._tree is not None:
            check_tree(engine._tree)
        if engine._exact is not None:
            check_pages(engine._exact._pool)


def check_pages(pool: PagePool) -> None:
    """Require that every page is free or held, once. O(pages)."""
    free, held, total = pool.counts()
    with pool._lock:
        stack = pool._stack[: pool._free]
        _equal("free + held pages", free + held, total)
        _require(
            len(np.unique(stack)) == len(stack) and not pool._held[stack].any(),
            "a page is free twice, or free and held",
        )


def check_scheduler(scheduler: Scheduler) -> None:
    """Require that every byte and slot is free or held by one job in one state. O(jobs)."""
    limits, places, queues = scheduler.limits, scheduler._places, scheduler._queues
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
    counted_on = sum(places.known_bytes(entry.job) for entry in places.admitted())
    _require(places.unreserved_bytes + counted_on >= 0, f"{places.unreserved_bytes:,} free host bytes")
    slots = [*places.free_slots, *(entry.slot for entry in seated)]
    _equal("free + used slots", sorted(slots), list(range(limits.rows)))
    _equal("jobs with a slot", sum(entry.slot >= 0 for entry in entries.values()), len(seated))
    for entry in entries.values():
        most = entry.job.max_tokens
        _require(
            0 <= entry.generated <= most and entry.in_flight >= 0 and entry.generated + entry.in_flight <= most,
            f"job {entry.job.id!r} has {entry.generated} tokens and {entry.in_flight} in flight, of {most}",
        )


def check_tree(tree: RadixCache) -> None:
    """Require that counts, links and references of all nodes agree. O(nodes).

    The references of a node are its own leases and its children's references.
    """
    check_claims(tree._pending)
    with tree._lock:
        check_residents(tree._residents)
        found, waiting = 0, [tree.root]
        while waiting:
            node = waiting.pop()
            found += node is not tree.root
            children = list(node.children())
            _check_node(node, children)
            if any(child.held is not None and child not in tree._residents for child in children):
                raise AssertionError(f"a child of {node!r} holds bytes that are not counted")
            waiting += children
        _equal("nodes of the tree", found, tree._count)


def check_claims(claims: InflightPrefills) -> None:
    """Require that each claim reads or waits once, and that the waiting ones have an open future."""
    with claims._lock:
        waiting = [claim for followers in claims._reads.values() for claim in followers]
        _require(
            len(set(waiting)) == len(waiting) and not set(waiting) & set(claims._reads),
            "a claim waits twice, or reads and waits",
        )
        _require(
            not any(claim.is_owner for claim in waiting) and all(claim.is_owner for claim in claims._reads),
            "a claim waits for a read that is its own, or reads without the work",
        )


def check_residents(residents: ResidentSet) -> None:
    """Require that counts and sums are those of the nodes in memory."""
    sums = Sizes(*map(sum, zip(Sizes(), *(node.sizes for node in residents), strict=True)))
    _equal("bytes of the nodes in memory", residents.sizes, sums)
    unused = Sizes(*map(sum, zip(Sizes(), *(node.sizes for node in residents if not node.refs), strict=True)))
    _equal("bytes of the nodes without leases", residents.idle, unused)
    _equal("nodes without a child in memory", set(residents._last), {n for n in residents if not n.held_children})
    for node in residents:
        if node.held is None or node.gone or node.parent is None or not node.parent.in_memory:
            raise AssertionError(f"{node!r} is listed as in memory, but it or its parent is not")


def _is_found(branches: Branches, child: Node) -> bool:
    """Return whether a lookup by a child's own ids finds it."""
    seen = branches._seen.get(child.namespace)
    key = child.ids[: branches._key_tokens]
    return (
        seen is not None
        and child in seen.found.get((child.at, key.tobytes()), ())
        and len(key) in seen.lengths.get(child.at, ())
        and (not branches.doubles(child) or child.at in seen.doubled)
    )


def _check_node(node: Node, children: Sequence[Node]) -> None:
    """Require that a node and its children agree."""
    if node.refs != node.leases + sum(child.refs for child in children) or node.leases < 0:
        raise AssertionError(f"{node!r} has {node.leases} leases, but its children's references do not add up")
    if node.held_children != sum(child.in_memory for child in children):
        raise AssertionError(f"{node!r} counts {node.held_children} children in memory, which is wrong")
    if node.parent is not None and not (node.in_memory or node.refs or children):
        raise AssertionError(f"{node!r} is of no use, but in the tree")
    for child in children:
        inside = child.at < len(node) and node.ids[child.at] == child.ids[0]
        assert node.branches is not None
        if child.parent is not node or child.gone or child.start != node.start + child.at or not len(child):
            raise AssertionError(f"{child!r} is not linked as a child of {node!r}")
        if not _is_found(node.branches, child) or node.branches.doubles(child) != inside:
            raise AssertionError(f"{child!r} cannot be found from {node!r}")
        if node.namespace is not None and child.namespace != node.namespace:
            raise AssertionError(f"{child!r} has another namespace than {node!r}")


def _equal(name: str, found: object, expected: object) -> None:
    _require(found == expected, f"{name}: {found}, must be {expected}")


def _require(holds: bool, message: str) -> None:
    """Raise AssertionError, also under `python -O`."""
    if not holds:
        raise AssertionError(message)
