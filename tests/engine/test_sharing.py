"""Who comes before whom: owners, priorities, age, long and short prompts, rows that are parked; and what it costs."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest

from retrieval_attn.engine.fairness import FairQueue
from retrieval_attn.engine.request_needs import State
from retrieval_attn.engine.scheduler import StepResult
from tests.engine.bench import Bench


def served(queue: FairQueue, count: int, tokens: int = 100) -> list[str]:
    """Jobs in the order in which the queue gives them, each charged with so many tokens."""
    order = []
    for _ in range(count):
        (job,) = queue.heads(1, with_long=True)
        queue.serve(job, job[0], tokens, is_long=False)
        order.append(job)
    return order


class TestOwners:
    def test_a_thousand_jobs_of_one_owner_do_not_keep_another_waiting(self) -> None:
        bench = Bench()
        for number in range(1_000):
            bench.submit(f"many{number}", tokens=20, owner="many")
        for _ in range(100):
            bench.schedule()
        bench.submit("one", tokens=20, owner="one")
        before = len(list(bench.order()))
        bench.until(lambda: bench.state("one") is not State.WAITING)
        assert list(bench.order()).index("one") - before <= 1

    def test_owners_get_equal_tokens_whatever_their_jobs_are_like(self) -> None:
        """Three owners with long answers, long prompts, or many small jobs: tokens read and generated come out even."""
        bench = Bench(rows=8, host_bytes=10_000_000)
        shapes = {"answers": (20, 300), "prompts": (90, 10), "small": (10, 5)}
        for owner, (prompt, tokens) in shapes.items():
            for number in range(5):
                bench.submit(f"{owner}{number}", prompt, tokens, owner=owner)
        for _ in range(2_000):
            for name in bench.schedule().start:
                owner = bench.jobs[name].owner
                bench.submit(f"j{len(bench.jobs)}", *shapes[owner], owner=owner)
        started = list(bench.order())
        had = dict.fromkeys(shapes, 0)
        for name in started:
            had[bench.jobs[name].owner] += bench.jobs[name].unread_tokens
        for name, tokens in bench.tokens.items():
            had[bench.jobs[name].owner] += tokens
        assert max(had.values()) - min(had.values()) < 2 * bench.limits.quantum_tokens + 2 * 8 * 320
        assert min(had.values()) > 6_000

    def test_time_without_jobs_gives_no_credit(self) -> None:
        """Who comes late is served next, but does not catch up on what others had meanwhile."""
        queue = FairQueue(10)
        for number in range(100):
            queue.add(f"a{number}", "a", is_long=False)
        for number in range(50):
            queue.serve(f"a{number}", "a", 100, is_long=False)
        for number in range(50):
            queue.add(f"b{number}", "b", is_long=False)
        order = [job[0] for job in served(queue, 20)]
        assert order[0] == "b"
        assert 9 <= order.count("b") <= 11

    def test_who_comes_back_brings_no_credit(self) -> None:
        """As above, with an account from before."""
        queue = FairQueue(10)
        queue.add("b", "b", is_long=False)
        for number in range(100):
            queue.add(f"a{number}", "a", is_long=False)
        queue.serve("b", "b", 1, is_long=False)
        for number in range(50):
            queue.serve(f"a{number}", "a", 100, is_long=False)
        for number in range(50):
            queue.add(f"b{number}", "b", is_long=False)
        order = [job[0] for job in served(queue, 20)]
        assert 9 <= order.count("b") <= 11

    def test_what_was_had_while_nobody_waited_is_no_debt(self) -> None:
        queue = FairQueue(10)
        queue.add("a", "a", is_long=False)
        queue.serve("a", "a", 5_000, is_long=False)
        for number in range(20):
            queue.add(f"b{number}", "b", is_long=False)
            queue.add(f"a{number}", "a", is_long=False)
        order = [job[0] for job in served(queue, 20)]
        assert 9 <= order.count("a") <= 11

    def test_debts_stay(self) -> None:
        """Who leaves the queue and comes back owes what was generated meanwhile."""
        queue = FairQueue(10)
        queue.add("a0", "a", is_long=False)
        queue.add("b0", "b", is_long=False)
        queue.serve("a0", "a", 10, is_long=False)
        queue.charge("a", 1_000)
        queue.add("a1", "a", is_long=False)
        for number in range(1, 30):
            queue.add(f"b{number}", "b", is_long=False)
        order = served(queue, 25, 50)
        assert order.index("a1") in (20, 21)

    def test_accounts_of_those_who_left_are_forgotten(self) -> None:
        queue = FairQueue(10)
        queue.add("last", "last", is_long=True)
        queue.charge("last", 10**9)
        for number in range(20_000):
            queue.add("x", f"owner{number}", is_long=False)
            queue.heads(2, with_long=True)
            queue.serve("x", f"owner{number}", 100, is_long=False)
        assert len(queue._accounts) < 5_000
        assert sum(len(lane._heap) for lane in queue._lanes) < 5_000
        for number in range(20_000):
            queue.add("x", f"other{number}", is_long=False)
            queue.remove("x", f"other{number}", is_long=False)
        assert len(queue._accounts) < 5_000
        assert sum(len(lane._heap) for lane in queue._lanes) < 5_000
        assert queue.heads(2, with_long=True) == ["last"]

    def test_jobs_of_one_owner_come_in_order(self) -> None:
        bench = Bench()
        names = [f"j{number}" for number in range(50)]
        for number, name in enumerate(names):
            bench.submit(name, tokens=1 + 5 * number % 7)
        bench.finish()
        assert list(bench.order()) == names


class TestPriorities:
    def test_interactive_jobs_come_first(self) -> None:
        bench = Bench(ahead=0)
        for number in range(8):
            bench.submit(f"b{number}", priority="batch")
        for number in range(8):
            bench.submit(f"i{number}")
        bench.finish()
        assert [name[0] for name in bench.order()] == list("iiiiiiiibbbbbbbb")

    def test_an_old_batch_job_counts_as_interactive(self) -> None:
        """Interactive jobs come without end, enough to fill every slot: the batch job waits its time, no longer."""
        bench = Bench(promote_seconds=2.0)
        bench.submit("batch", priority="batch", owner="b")
        number = 0
        started = -1.0
        while bench.now < 4.0:
            while bench.scheduler.waiting < 20:
                bench.submit(f"i{number}", owner="i")
                number += 1
            if "batch" in bench.schedule().start:
                started = bench.now
        assert 1.9 < started < 2.5

    def test_a_batch_row_makes_room_and_comes_back(self) -> None:
        bench = Bench(rows=2, ahead=1)
        bench.submit("b0", tokens=30, priority="batch")
        bench.submit("b1", tokens=30, priority="batch")
        bench.until(lambda: len(bench.plans[-1].decode) == 2 if bench.plans else False)
        bench.submit("i", tokens=5)
        bench.until(lambda: bool(bench.parks[-1]))
        assert bench.parks[-1] == ("b1",) and set(bench.plans[-1].decode) == {"b0", "i"}
        assert bench.state("b1") is State.PREEMPTED
        had = bench.tokens["b1"]
        bench.until(lambda: bool(bench.resumes[-1]))
        assert bench.resumes[-1] == ("b1",) and bench.plans[-1].leave == ("i",)
        assert bench.tokens["b1"] == had + 1
        bench.finish()
        assert bench.tokens == {"b0": 30, "b1": 30, "i": 5}

    def test_a_batch_row_is_parked_before_an_interactive_prompt_is_read(self) -> None:
        """Room for one job: the interactive one is read only after the batch row gave up its place."""
        bench = Bench(rows=1, ahead=0)
        bench.submit("b", tokens=30, priority="batch")
        bench.until(lambda: bench.state("b") is State.DECODING)
        bench.submit("i", tokens=5)
        plan = bench.schedule()
        assert bench.parks[-1] == ("b",) and plan.start == ("i",)
        bench.finish()
        assert bench.tokens == {"b": 30, "i": 5}
        assert sum(map(len, bench.parks)) == 1

    def test_a_parked_row_comes_before_a_batch_job_that_never_ran(self) -> None:
        bench = Bench(rows=1)
        bench.submit("old", tokens=30, priority="batch")
        bench.submit("new", tokens=30, priority="batch")
        bench.until(lambda: bench.state("new") is State.READY)
        bench.submit("i", tokens=5)
        bench.until(lambda: bench.state("i") is State.GONE)
        assert bench.resumes[-1] == ("old",) and bench.state("new") is State.READY

    def test_interactive_rows_are_not_parked(self) -> None:
        bench = Bench(rows=2)
        for number in range(10):
            bench.submit(f"i{number}")
            bench.submit(f"b{number}", priority="batch")
        bench.finish()
        assert all(name.startswith("b") for parked in bench.parks for name in parked)

    def test_an_old_batch_row_is_not_parked(self) -> None:
        bench = Bench(rows=1, promote_seconds=0.5)
        bench.submit("b", tokens=200, priority="batch")
        bench.until(lambda: bench.now > 0.6)
        bench.submit("i", tokens=5)
        bench.finish()
        assert not any(bench.parks)

    def test_a_parked_row_comes_back_among_interactive_jobs_without_end(self) -> None:
        bench = Bench(rows=1, promote_seconds=2.0)
        bench.submit("b", tokens=50, priority="batch")
        bench.until(lambda: bench.state("b") is State.DECODING)
        number = 0
        while bench.state("b") is not State.GONE:
            while bench.scheduler.waiting < 3:
                bench.submit(f"i{number}")
                number += 1
            bench.schedule()
            assert bench.now < 4.0, "the parked row starves"
        assert bench.tokens["b"] == 50


class TestReading:
    def test_cells_fit_what_a_step_leaves(self) -> None:
        """Steps of 10 ms, chunks of 8 ms, a token every 50 ms at least: five chunks beside each step, and no more."""
        bench = Bench(step=0.010, chunk=0.008)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.until(lambda: bench.state("row") is State.DECODING)
        bench.submit("long", prompt=20_000)
        for _ in range(30):
            bench.schedule()
        granted = [sum(chunks for _, chunks in plan.read) for plan in bench.plans[-20:]]
        assert set(granted) == {5} or set(granted) == {4}
        assert max(granted) * 0.008 + 0.010 <= bench.limits.inter_token_seconds

    def test_cells_of_several_prompts_fit_together(self) -> None:
        bench = Bench(step=0.010, chunk=0.008, rows=8)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.schedule()
        for number in range(7):
            bench.submit(f"s{number}", prompt=90, tokens=1_000)
        bench.until(lambda: bench.state("s6") is State.DECODING)
        granted = [dict(plan.read) for plan in bench.plans]
        assert any(len(chunks) > 1 for chunks in granted)
        assert max(sum(chunks.values()) for chunks in granted) <= 5

    def test_cells_of_short_prompts_have_their_own_time(self) -> None:
        """A chunk of a long prompt takes 40 ms, one of a short prompt 1 ms: one of the first, or many of the second."""
        bench = Bench(step=0.010, rows=8)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("s0", prompt=90, tokens=1_000)
        bench.chunk_seconds = 0.001
        bench.until(lambda: bench.state("s0") is State.DECODING)
        bench.submit("long", prompt=50_000)
        bench.chunk_seconds = 0.040
        for _ in range(6):
            bench.schedule()
        for number in range(1, 6):
            bench.submit(f"s{number}", prompt=90, tokens=1_000)
        assert len(bench.schedule().read) == 5

    def test_a_cell_of_one_token_takes_as_long_as_one_of_a_few(self) -> None:
        """What was measured with one token is no 32nd of what 32 take: a layer's weights and keys are read for all."""
        bench = Bench(step=0.010, chunk=0.008)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("one", prompt=2, tokens=1_000)
        bench.until(lambda: bench.state("one") is State.DECODING)
        bench.submit("some", prompt=33)
        assert bench.schedule().read == (("some", 2),)

    def test_a_cell_that_does_not_fit_comes_seldom(self) -> None:
        """Cells of 100 ms, room for 40 ms a step: a chunk in every third step, so that the mean keeps to the budget."""
        bench = Bench(step=0.010, chunk=0.100)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("long", prompt=20_000)
        for _ in range(100):
            bench.schedule()
        granted = [sum(chunks for _, chunks in plan.read) for plan in bench.plans[-60:]]
        assert max(granted) == 1 and sum(granted) == 20

    def test_steps_that_take_too_long_do_not_stop_a_reading(self) -> None:
        """Decoding alone takes twice what it should: a reading still gets an eighth of its time."""
        bench = Bench(step=0.100, chunk=0.010)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("long", prompt=20_000)
        for _ in range(50):
            bench.schedule()
        assert [sum(chunks for _, chunks in plan.read) for plan in bench.plans[-40:]] == [1] * 40

    def test_without_measurements_a_reading_gets_on(self) -> None:
        bench = Bench(step=0.0, chunk=0.0)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("long", prompt=2_000)
        bench.until(lambda: bench.state("long") is State.DECODING, most=100)

    def test_a_reading_without_any_room_gets_on(self) -> None:
        """A budget of nothing, and steps that nobody timed: no share of them is anything, and still chunks come."""
        bench = Bench(step=0.0, chunk=0.010, inter_token_seconds=0.0)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("long", prompt=250)
        bench.until(lambda: bench.state("long") is State.DECODING, most=500)

    def test_a_short_prompt_overtakes_a_long_one(self) -> None:
        bench = Bench(step=0.010, chunk=0.008)
        bench.submit("long", prompt=20_000, owner="a")
        bench.until(lambda: len(bench.plans) == 5)
        bench.submit("short", prompt=60, tokens=3, owner="b")
        at = len(bench.plans)
        bench.until(lambda: bench.state("short") is State.GONE)
        assert len(bench.plans) - at <= 7
        assert bench.state("long") is State.READING

    def test_a_long_prompt_gets_on_among_short_ones_without_end(self) -> None:
        bench = Bench(step=0.010, chunk=0.008)
        bench.submit("long", prompt=5_000, owner="a")
        number = 0
        while bench.state("long") is not State.DECODING:
            while bench.scheduler.waiting < 5:
                bench.submit(f"s{number}", prompt=90, tokens=2, owner="b")
                number += 1
            bench.schedule()
            assert bench.now < 8 * 100 * 0.008, "the long prompt starves"

    def test_one_long_prompt_at_a_time(self) -> None:
        bench = Bench(host_bytes=10_000_000)
        for number in range(4):
            bench.submit(f"long{number}", prompt=3_000, owner=str(number))
        bench.finish()
        for plan in bench.plans:
            assert len(plan.read) <= 1
        seen = [name for plan in bench.plans for name, _ in plan.read]
        assert [name for name, before in zip(seen, ["", *seen], strict=False) if name != before] == list(bench.order())

    def test_what_ends_a_layer_is_told_from_chunks(self) -> None:
        """It is granted alone, by what such ends took, and its time is not believed of chunks."""
        bench = Bench(step=0.010, chunk=0.004, inter_token_seconds=0.070)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("long", prompt=20_000)
        for _ in range(20):
            bench.schedule()
        chunks = bench.plans[-1].read
        assert chunks == (("long", 15),)
        assert bench.schedule(next_kinds={"long": "end"}).read == (("long", 1),)  # the first one, whatever it takes
        end = {"read": {"long": 1}, "chunk_seconds": 0.100}
        bench.now += 0.100 - bench.chunk_seconds
        for _ in range(2):
            bench.schedule(**end)  # a chunk's turn again
            end = {}
        assert bench.plans[-1].read == chunks
        granted: list[Any] = []
        for _ in range(6):
            took = {"chunk_seconds": 0.100} if bench.plans[-1].read == (("long", 1),) else {}
            granted.append(bench.schedule(next_kinds={"long": "end"}, **took).read)
        assert granted.count((("long", 1),)) <= 3 and () in granted  # room for 100 ms is saved up: 60 a tick

    def test_a_prompt_of_several_parts_takes_what_fits_to_its_end(self) -> None:
        """Each part goes through all layers, and only the first one's chunks were counted: of the second one a chunk a
        tick made every short prompt of two parts wait 32 ticks.
        """
        bench = Bench(step=0.010, chunk=0.004, rows=4)
        bench.submit("row", prompt=1, tokens=1_000)
        bench.submit("parts", prompt=90, tokens=1_000)
        counted = bench.limits.chunks(bench.jobs["parts"])
        read: list[int] = []
        while len(read) < 12:
            took = {"read": {"parts": read[-1]}, "chunk_seconds": 0.004} if read else {"read": {}}
            read += [chunks for _, chunks in bench.schedule(**took, read_done=()).read]
        assert counted < 8 <= min(read[-6:])  # 40 ms are left: 10, or a few less

    def test_a_second_long_prompt_waits_without_holding_anything(self) -> None:
        bench = Bench()
        bench.submit("first", prompt=5_000, owner="a")
        bench.submit("second", prompt=5_000, owner="b")
        bench.submit("short", owner="c")
        assert bench.schedule().start == ("first", "short")
        bench.until(lambda: bench.state("first") is not State.READING)
        assert bench.plans[-1].start == ("second",)

    def test_an_interactive_long_prompt_pauses_a_batch_jobs(self) -> None:
        bench = Bench()
        bench.submit("batch", prompt=20_000, priority="batch")
        for _ in range(5):
            bench.schedule()
        bench.submit("interactive", prompt=1_000)
        plan = bench.schedule()
        assert plan.start == ("interactive",) and [name for name, _ in plan.read] == ["interactive"]
        bench.until(lambda: bench.state("interactive") is State.GONE)
        assert bench.state("batch") is State.READING
        bench.finish()
        assert bench.chunks["batch"] == bench.limits.chunks(bench.jobs["batch"]) == 402


class TestCost:
    @staticmethod
    def tick_seconds(waiting: int, owners: int) -> float:
        """Median CPU seconds of a scheduler step in which rows decode and no request arrives or ends."""
        bench = Bench(rows=16, host_bytes=10**12)
        for number in range(waiting):
            bench.submit(f"j{number}", tokens=5_000, owner=str(number % owners), priority="batch")
        bench.until(lambda: len(bench.plans) > 1 and not bench.plans[-1].read)
        seconds = []
        for _ in range(300):
            results = bench.results
            began = time.thread_time()
            plan = bench.scheduler.schedule(results, bench.now)
            seconds.append(time.thread_time() - began)
            bench.results = StepResult(tokens=plan.decode, decode_seconds=0.01)
        assert bench.scheduler.waiting == waiting - 18
        return median(seconds)

    @pytest.mark.parametrize("owners", [1, 5_000])
    def test_a_tick_does_not_depend_on_what_waits(self, owners: int) -> None:
        """Ten thousand waiting jobs cost a tick no more than a hundred do."""
        few, many = self.tick_seconds(100, owners), self.tick_seconds(10_000, owners)
        assert many < 3 * few, f"{1e6 * few:.0f} us with 100 waiting, {1e6 * many:.0f} us with 10,000"

    def test_equal_jobs_by_the_thousand_come_and_go(self) -> None:
        bench = Bench()
        for number in range(10_000):
            bench.submit(f"j{number}")
        for number in range(10_000):
            assert bench.scheduler.abort(f"j{number}")
        assert len(bench.schedule().leave) == 10_000
        assert bench.scheduler.idle
