"""What the tiers' policies fetch, evict and drop, and their hit rates on CachedAttention's workload."""

from __future__ import annotations

import random

import pytest

from retrieval_attn.store.tiers import Fifo, Ledger, Lru, Moves, TierEntry, Tiers
from tools.simulate_tiers import PAPER, POLICIES, Simulation, Workload, sessions, simulate


class Clock:
    """One second per look."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def ledger(*nodes: tuple[str, TierEntry]) -> Ledger:
    made = Ledger(Clock())
    for digest, held in nodes:
        made.add(digest, held)
    return made


def node(*, ram: bool = True, nbytes: int = 10, **more: object) -> TierEntry:
    return TierEntry(nbytes, **{"rebuild_seconds": 1.0, "in_ram": ram, **more})  # type: ignore[arg-type]


def test_waiting_nodes_are_fetched_in_their_order() -> None:
    policy = Tiers(ledger(("a", node(ram=False)), ("b", node()), ("c", node(ram=False))))
    assert policy.plan(["c", "unknown", "b", "a", "c"], 20, 0) == Moves(["c", "a"], [], [])
    assert policy.ledger["c"].in_ram is False, "a plan changes nothing"


def test_the_prefetch_window_is_what_ram_holds() -> None:
    """Two nodes fit: the third of the queue is not fetched, though nothing else is in RAM."""
    policy = Tiers(ledger(*((digest, node(ram=False)) for digest in "abcd")))
    assert policy.plan("abcd", 20, 0).fetch == ["a", "b"]
    assert policy.plan("abcd", 0, 0).fetch == []


def test_ram_gives_up_what_nobody_waits_for_then_the_windows_tail() -> None:
    held = ledger(*((digest, node()) for digest in "xab"), ("c", node(ram=False)), ("d", node(ram=False)))
    policy = Tiers(held)
    # as in figure 9 of the paper: c is fetched for x, which nobody waits for; d would cost b, which comes before it
    assert policy.plan("acbd", 0, 100) == Moves(["c"], ["x"], [])
    assert policy.plan("cdab", 0, 100) == Moves(["c", "d"], ["x", "b"], [])


def test_of_nodes_that_nobody_waits_for_the_cheapest_then_the_oldest_goes() -> None:
    held = ledger(
        ("dear", node(rebuild_seconds=9.0)), ("old", node()), ("new", node()), ("cheap", node(rebuild_seconds=0.01))
    )
    assert Tiers(held).plan([], -20, 0).evict == ["cheap", "old"]
    assert Tiers(held).plan([], -40, 0).evict == ["cheap", "old", "new", "dear"]


def test_a_dear_node_that_nobody_comes_back_to_leaves_in_the_end() -> None:
    """Cost alone would keep it for ever; the simulated hit rate fell from 82 to 66 percent by that."""
    held = ledger(("dear", node(rebuild_seconds=3.0)), ("used", node()))
    assert Tiers(held).plan([], -10, 0).evict == ["used"]
    for _ in range(10):
        held.touch("used")
    assert Tiers(held).plan([], -10, 0).evict == ["dear"]


def test_what_is_not_clean_or_busy_or_kept_stays() -> None:
    held = ledger(
        ("written", node(clean=False)), ("read", node(busy=1)), ("named", node(kept=True)), ("free", node())
    )  # fmt: skip
    for policy in (Tiers(held), Lru(held), Fifo(held)):
        assert policy.plan([], 0, -1000).drop == ["free"]
        assert sorted(policy.plan([], -1000, 0).evict) == ["free", "named"]


def test_the_disk_gives_up_the_windows_tail_only_if_nothing_else_is_left() -> None:
    held = ledger(*((digest, node()) for digest in "abx"))
    policy = Tiers(held)
    assert policy.plan("ab", 0, -10).drop == ["x"]
    assert policy.plan("ab", 0, -20).drop == ["x", "b"]
    assert policy.plan("ba", 0, -20).drop == ["x", "a"]


def test_dropped_nodes_free_ram_and_are_not_fetched() -> None:
    held = ledger(("a", node()), ("b", node(ram=False)))
    assert Tiers(held).plan([], -10, -10) == Moves([], [], ["a"])
    assert Tiers(held).plan("ab", 20, -10) == Moves([], [], ["b"])


def test_children_leave_before_their_parent() -> None:
    held = ledger(("root", node()), ("turn", node(parent="root")), ("fork", node(parent="root", kept=True)))
    assert Tiers(held).plan([], 0, -1000).drop == ["turn"]
    held["fork"].kept = False
    moves = Tiers(held).plan([], 0, -1000)
    assert moves.drop[-1] == "root" and len(moves.drop) == 3
    held.apply(moves)
    assert list(held) == [] and held.disk_bytes == held.ram_bytes == 0


def test_room_is_kept_free() -> None:
    held = ledger(*((digest, node()) for digest in "abc"))
    assert len(Tiers(held, spare_ram=20).plan([], 0, 0).evict) == 2
    assert len(Tiers(held, spare_disk=10).plan([], 0, -5).drop) == 2


def test_nothing_held_nothing_moved() -> None:
    for policy in (Tiers(), Lru(), Fifo()):
        assert policy.plan(["a"], -5, -5) == Moves([], [], [])


@pytest.mark.parametrize("seed", range(20))
def test_moves_keep_the_budgets(seed: int) -> None:
    """Random stores, queues and budgets: no node in two lists, what may not go stays, and room is made where it can."""
    draw = random.Random(seed)
    held = ledger()
    names = [f"{number}" for number in range(40)]
    for number, name in enumerate(names):
        parent = draw.choice(names[:number]) if number and draw.random() < 0.5 else None
        clean = draw.random() < 0.9
        more = {"kept": draw.random() < 0.3, "busy": draw.random() < 0.1, "clean": clean, "parent": parent}
        held.add(name, node(ram=draw.random() < 0.5 or not clean, nbytes=draw.randrange(20), **more))
    policy = Tiers(held, spare_ram=draw.randrange(30))
    for _ in range(50):
        queue = draw.choices(names, k=draw.randrange(30))
        free_ram, free_disk = draw.randrange(-200, 100), draw.randrange(-200, 100)
        moves = policy.plan(queue, free_ram, free_disk)
        every = [*moves.fetch, *moves.evict, *moves.drop]
        assert len(every) == len(set(every))
        assert all(not held[name].in_ram and held[name].clean for name in moves.fetch)
        assert all(held[name].in_ram and held[name].clean and not held[name].busy for name in moves.evict)
        left = [name for name in held if name not in moves.drop]
        assert not {held[name].parent for name in left} & set(moves.drop)
        before = held.ram_bytes
        free_disk += sum(held[name].nbytes for name in moves.drop)
        held.apply(moves)
        free_ram += before - held.ram_bytes
        if moves.fetch:
            assert free_ram >= 0
        movable = any(held[name].nbytes for name in held.evictable())
        assert free_ram >= 0 or not movable
        parents = {held[name].parent for name in held}
        assert free_disk >= 0 or all(name in parents or not held[name].nbytes for name in held.droppable())
        assert held.ram_bytes == sum(held[name].nbytes for name in held if held[name].in_ram)
        assert held.disk_bytes == sum(held[name].nbytes for name in held)


def test_the_simulated_sessions_are_the_papers() -> None:
    drawn = sessions(Workload())
    count = len(drawn)
    assert count == 9000
    assert abs(sum(len(one.tokens) for one in drawn) / count - 5.75) < 0.15
    assert abs(sum(len(one.tokens) > 1 for one in drawn) / count - 0.73) < 0.02
    assert abs(sum(sum(one.tokens) > 2048 for one in drawn) / count - 0.47) < 0.02
    assert abs(sum(sum(one.tokens) > 4096 for one in drawn) / count - 0.30) < 0.02


def test_hit_rate_is_the_papers() -> None:
    """Ours within 4 points of 86 percent at 10 TB, mixed turns; a quarter of all sessions, and of all room."""
    assert abs(simulate("mixed", 10_000, "tiers", scale=0.25).rate - PAPER[10_000]["tiers"]) < 4


def test_hit_rates_are_apart_as_the_papers() -> None:
    """Where every node takes a whole window, LRU's is within 4 points of 58 percent, and ours 20 points above it.

    The paper's 48 percent of FIFO come out of neither workload (docs/archive/log.md).
    """
    rates = {policy: simulate("windows", 10_000, policy, scale=0.25).rate for policy in POLICIES}
    assert abs(rates["lru"] - PAPER[10_000]["lru"]) < 4
    assert rates["tiers"] > max(rates["lru"], rates["fifo"]) + 15


def test_fetching_ahead_brings_the_hits_to_ram() -> None:
    """At 2 TB every hit is in RAM; policies that do not know the queue have one of ten there at most."""
    found = {policy: simulate("mixed", 2_000, policy, scale=0.25) for policy in POLICIES}
    assert found["tiers"].ram_rate > 0.99 * found["tiers"].rate > 1.3 * found["lru"].rate
    assert all(found[policy].ram_rate < 0.1 * found[policy].rate for policy in ("lru", "fifo"))


def test_a_simulation_repeats() -> None:
    load = Workload(scale=0.03)
    assert Simulation(load, "tiers").run().ram_hits == Simulation(load, "tiers").run().ram_hits
