"""What the shelf's policy prefetches and evicts."""

from __future__ import annotations

import random

import pytest

from retrieval_attn.store.shelf import Moves, TierEntry, plan_moves


def entry(saved_at: float = 0.0, *, ram: bool = True, nbytes: int = 10) -> TierEntry:
    return TierEntry(nbytes, in_ram=ram, saved_at=saved_at)


def test_waiting_entries_are_fetched_in_their_order() -> None:
    entries = {"a": entry(ram=False), "b": entry(), "c": entry(ram=False)}
    assert plan_moves(entries, ["c", "unknown", "b", "a", "c"], 30) == Moves(["c", "a"], [])
    assert not entries["c"].in_ram, "a plan changes nothing"


def test_the_prefetch_window_is_what_ram_holds() -> None:
    """Two entries fit: the third of the queue is not fetched, though nothing else is in RAM."""
    entries = {digest: entry(ram=False) for digest in "abcd"}
    assert plan_moves(entries, "abcd", 20).fetch == ["a", "b"]
    assert plan_moves(entries, "abcd", 0).fetch == []


def test_ram_evicts_what_no_request_waits_for_then_the_end_of_the_queue() -> None:
    entries = {digest: entry() for digest in "xab"} | {digest: entry(ram=False) for digest in "cd"}
    # as in figure 9 of the paper: c is fetched for x, which is not in the queue; d would cost b, which comes before it
    assert plan_moves(entries, "acbd", 30) == Moves(["c"], ["x"])
    assert plan_moves(entries, "cdab", 30) == Moves(["c", "d"], ["x", "b"])


def test_outside_the_queue_the_earliest_saved_goes_first() -> None:
    entries = {"new": entry(3.0), "old": entry(1.0), "middle": entry(2.0)}
    assert plan_moves(entries, [], 20).evict == ["old"]
    assert plan_moves(entries, [], 0).evict == ["old", "middle", "new"]
    assert plan_moves(entries, ["old"], 10).evict == ["middle", "new"]


def test_no_entries_no_moves() -> None:
    assert plan_moves({}, ["a"], 0) == Moves([], [])


@pytest.mark.parametrize("seed", range(20))
def test_moves_keep_the_budget(seed: int) -> None:
    """Random stores, queues and budgets: no entry in two lists, room is made if possible."""
    draw = random.Random(seed)
    entries = {
        f"{number}": entry(draw.random(), ram=draw.random() < 0.5, nbytes=draw.randrange(20)) for number in range(40)
    }
    for _ in range(50):
        queue, budget = draw.choices(list(entries), k=draw.randrange(30)), draw.randrange(500)
        moves = plan_moves(entries, queue, budget)
        every = [*moves.fetch, *moves.evict]
        assert len(every) == len(set(every))
        assert all(not entries[digest].in_ram and digest in queue for digest in moves.fetch)
        assert all(entries[digest].in_ram for digest in moves.evict)
        for digest in every:
            entries[digest].in_ram = digest in moves.fetch
        free = budget - sum(one.nbytes for one in entries.values() if one.in_ram)
        assert free >= 0 or not moves.fetch
        assert free >= 0 or all(not one.nbytes for one in entries.values() if one.in_ram)
