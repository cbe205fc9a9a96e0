"""The scheduler: admission, states, fairness, readings between steps, parking; time is given, nothing computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.engine.scheduler import SchedulerOutput, StepResult
from retrieval_attn.errors import AdmissionError, ConfigError, EngineFullError
from tests.engine.audit import check_scheduler
from tests.engine.bench import LIMITS, Bench


def test_a_job_goes_through_its_states_and_gets_its_tokens() -> None:
    bench = Bench()
    bench.submit("a", prompt=50, tokens=3)
    assert bench.state("a") is State.WAITING
    plan = bench.schedule()
    assert plan.start == ("a",) and plan.read == (("a", 1),) and plan.decode == ()
    assert bench.state("a") is State.READING
    bench.schedule()
    for _ in range(3):
        assert bench.schedule().decode == ("a",)
        assert bench.state("a") is State.DECODING
    plan = bench.schedule()
    assert plan == SchedulerOutput(leave=("a",))
    assert bench.state("a") is State.GONE and bench.scheduler.idle
    assert bench.tokens == {"a": 3}


@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (50, 49)])
def test_a_job_with_nothing_to_read_decodes_in_the_tick_that_admits_it(prompt: int, cached: int) -> None:
    bench = Bench()
    bench.submit("a", prompt=prompt, tokens=2, cached_tokens=cached)
    plan = bench.schedule()
    assert plan.start == plan.decode == ("a",) and plan.read == ()


def test_a_token_from_the_reading_itself_counts() -> None:
    """An engine may choose the first token from the prompt's last logits: then one step less is planned."""
    bench = Bench()
    bench.submit("a", tokens=3)
    bench.schedule()
    bench.schedule()
    bench.schedule(tokens=("a",))
    bench.finish()
    assert sum("a" in plan.decode for plan in bench.plans) == 2


class TestAdmission:
    def test_host_bytes_are_reserved_for_all_tokens_before_anything_begins(self) -> None:
        """Three jobs of 300 bytes in 899: the third starts when one has left, not before."""
        bench = Bench(host_bytes=899)
        for name in "abc":
            bench.submit(name, prompt=20, tokens=10)
        assert bench.schedule().start == ("a", "b")
        assert bench.scheduler.lacking_bytes == 300 - 299
        bench.until(lambda: bench.state("a") is State.GONE)
        assert bench.plans[-1].start == ("c",) and "a" in bench.plans[-1].leave
        assert not any("c" in plan.start for plan in bench.plans[:-1])

    def test_exactly_what_fits_is_admitted(self) -> None:
        bench = Bench(host_bytes=900)
        for name in "abc":
            bench.submit(name, prompt=20, tokens=10)
        assert bench.schedule().start == ("a", "b", "c")
        assert bench.scheduler.lacking_bytes == 0

    def test_as_many_as_have_a_slot_or_are_read_ahead_are_admitted(self) -> None:
        bench = Bench(rows=1, ahead=1)
        for name in "abc":
            bench.submit(name)
        assert bench.schedule().start == ("a", "b")

    def test_what_can_never_fit_is_refused_with_the_arithmetic(self) -> None:
        bench = Bench(host_bytes=10_000, token_bytes=10)
        with pytest.raises(AdmissionError) as error:
            bench.submit("big", prompt=1_200, cached_tokens=100, tokens=20)
        text = str(error.value)
        assert "(1,200 prompt - 100 cached + 20 generated) = 1,120 tokens x 10 bytes = 11,200 bytes" in text
        assert "10,000" in text and "1,000 tokens" in text
        assert bench.scheduler.idle
        bench.submit("big", prompt=1_080, cached_tokens=100, tokens=20)
        bench.finish()

    def test_rows_bound_a_step(self) -> None:
        bench = Bench(rows=30)
        for number in range(50):
            bench.submit(f"j{number}", tokens=200)
        bench.until(lambda: len(bench.plans) > 20)
        assert max(len(plan.decode) for plan in bench.plans) == 30

    def test_more_than_may_wait_is_refused(self) -> None:
        bench = Bench(waiting=2)
        bench.submit("a")
        bench.submit("b")
        with pytest.raises(EngineFullError, match="2 of at most 2 requests"):
            bench.submit("c")
        bench.schedule()
        bench.submit("c")

    def test_an_id_that_is_there_is_refused_and_is_free_again_afterwards(self) -> None:
        bench = Bench()
        bench.submit("a")
        with pytest.raises(AdmissionError, match="exists already"):
            bench.submit("a")
        bench.finish()
        bench.chunks.clear()
        bench.submit("a")
        bench.finish()

    def test_bytes_held_outside_are_not_given_away(self) -> None:
        bench = Bench(host_bytes=1_000)
        bench.scheduler.set_outside(800)
        bench.submit("a", prompt=20, tokens=10)
        assert bench.schedule().start == ()
        assert bench.scheduler.lacking_bytes == 100
        bench.scheduler.set_outside(700)
        assert bench.schedule().start == ("a",)

    def test_a_prompt_that_was_read_meanwhile_needs_less(self) -> None:
        """Two equal long prompts: the second waits, and is ready at once when the tree has what the first read."""
        bench = Bench(host_bytes=100_000)
        bench.submit("a", prompt=1_000, tokens=50)
        bench.submit("b", prompt=1_000, tokens=50)
        bench.until(lambda: "a" in bench.results.read_done)
        assert bench.state("b") is State.WAITING
        bench.scheduler.set_cached("a", 999)
        bench.scheduler.set_cached("b", 999)
        bench.scheduler.set_outside(9_990)
        plan = bench.schedule()
        assert plan.start == ("b",) and plan.decode == ("a", "b") and not plan.read
        bench.finish()
        assert bench.tokens == {"a": 50, "b": 50}
        bench.scheduler.set_cached("a", 5)

    def test_jobs_on_a_known_text_are_admitted_together(self) -> None:
        """Eight jobs on a text in the tree need memory for their own tokens, not eight times that of the text."""
        bench = Bench(host_bytes=14_000, rows=8)
        bench.scheduler.set_outside(9_000)
        names = tuple(f"j{number}" for number in range(8))
        for name in names:
            bench.submit(name, prompt=900, tokens=50, known_tokens=890)
        assert bench.schedule().start == names and bench.scheduler.lacking_bytes == 0
        for name in names:
            bench.scheduler.set_cached(name, 890)
        bench.submit("more", prompt=900, tokens=50, known_tokens=890)
        assert bench.schedule().start == () and bench.scheduler.lacking_bytes == 8 * 600 + 600 - 5_000

    def test_nothing_is_given_up_for_bytes_that_come_back_by_themselves(self) -> None:
        """A job that was just admitted finds 890 of its tokens in the tree: one that knows none waits for these."""
        bench = Bench(host_bytes=19_000)
        bench.scheduler.set_outside(9_000)
        bench.submit("a", prompt=900, tokens=50, known_tokens=890)
        bench.submit("b", prompt=800, tokens=50)
        assert bench.schedule().start == ("a",) and bench.scheduler.lacking_bytes == 0
        bench.scheduler.set_cached("a", 890)
        assert bench.schedule().start == ("b",) and bench.scheduler.lacking_bytes == 0

    def test_what_is_read_after_all_gives_nothing_back(self) -> None:
        """The tree gave up what a job was to find there: it reads that, and others lack what it reserved."""
        bench = Bench(host_bytes=18_999)
        bench.submit("a", prompt=900, tokens=50, known_tokens=890)
        bench.submit("b", prompt=900, tokens=50)
        assert bench.schedule().start == ("a",) and bench.scheduler.lacking_bytes == 0
        bench.until(lambda: bench.scheduler.lacking_bytes > 0)
        assert bench.state("a") is not State.GONE and bench.chunks["a"] > 0

    def test_bytes_of_cached_tokens_are_the_trees(self) -> None:
        bench = Bench(host_bytes=20_000)
        bench.submit("a", prompt=1_000, tokens=50)
        bench.until(lambda: bench.state("a") is State.DECODING)
        bench.submit("b", prompt=1_000, tokens=50, cached_tokens=900)
        bench.scheduler.set_outside(9_000)
        assert bench.schedule().start == () and bench.scheduler.lacking_bytes == 1_500 - 500
        bench.scheduler.set_cached("a", 900)
        assert bench.schedule().start == ("b",)
        with pytest.raises(ConfigError, match="must keep them"):
            bench.scheduler.set_cached("a", 899)
        check_scheduler(bench.scheduler)

    def test_a_waiting_job_may_lose_what_was_cached(self) -> None:
        bench = Bench(host_bytes=5_000)
        bench.submit("a", prompt=600, tokens=50, cached_tokens=599)
        bench.scheduler.set_cached("a", 150)
        with pytest.raises(AdmissionError, match="6,500 bytes"):
            bench.scheduler.set_cached("a", 0)
        plan = bench.schedule()
        assert plan.start == ("a",) and plan.decode == ()
        bench.finish()

    def test_a_large_job_is_overtaken_a_bounded_number_of_times(self) -> None:
        """While a large one lacks memory, small ones pass, but they must not keep it waiting for ever."""
        bench = Bench(host_bytes=10_000)
        bench.submit("first", prompt=50, tokens=100, owner="x")
        bench.schedule()
        bench.submit("large", prompt=50, tokens=900, owner="y")
        for number in range(200):
            bench.submit(f"s{number}", prompt=50, tokens=50, owner=f"o{number}")
        bench.until(lambda: bench.state("large") is not State.WAITING)
        started = list(bench.order())
        assert 1 < started.index("large") <= 18


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": 0},
        {"prompt_tokens": 1.5},
        {"prompt_tokens": True},
        {"max_tokens": 0},
        {"cached_tokens": -1},
        {"cached_tokens": 10},
        {"priority": "urgent"},
    ],
)
def test_a_wrong_job_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RequestNeeds(**{"id": "a", "prompt_tokens": 10, "max_tokens": 1, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"host_bytes": -1},
        {"token_bytes": 0},
        {"inter_token_seconds": float("nan")},
        {"inter_token_seconds": -1.0},
        {"waiting": 1.0},
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(LIMITS, **wrong)


class TestAbort:
    @pytest.mark.parametrize("state", [State.WAITING, State.READING, State.READY, State.DECODING, State.PREEMPTED])
    def test_honoured_in_every_state_at_the_next_tick(self, state: State) -> None:
        bench = Bench(rows=1, ahead=1, waiting=10)
        if state is State.READING:
            bench.submit("a", prompt=5_000)
        elif state in (State.WAITING, State.READY):
            bench.submit("x", tokens=1_000)
            bench.until(lambda: bench.state("x") is State.DECODING)
            if state is State.WAITING:
                bench.submit("y", tokens=1_000)
                bench.until(lambda: bench.state("y") is State.READY)
            bench.submit("a")
        else:
            bench.submit("a", tokens=1_000, priority="batch")
            if state is State.PREEMPTED:
                bench.until(lambda: bench.state("a") is State.DECODING)
                bench.submit("x", tokens=1_000)
        if state is not State.WAITING:
            bench.until(lambda: bench.state("a") is state)
        assert bench.state("a") is state
        assert bench.scheduler.abort("a")
        plan = bench.schedule()
        assert plan.leave == ("a",)
        assert "a" not in (*plan.start, *plan.decode, *dict(plan.read))
        assert bench.state("a") is State.GONE
        assert not bench.scheduler.abort("a")
        assert bench.schedule().leave == ()

    def test_late_results_of_one_that_is_gone_are_ignored(self) -> None:
        bench = Bench()
        bench.submit("a", tokens=5)
        bench.until(lambda: "a" in bench.tokens)
        bench.scheduler.abort("a")
        bench.schedule()
        bench.schedule(tokens=("a",), ended=("a",), failed=("a",), read={"a": 3}, read_done=("a",))
        assert bench.scheduler.idle

    def test_an_error_in_one_row_takes_that_row_alone(self) -> None:
        bench = Bench()
        for name in "abc":
            bench.submit(name, tokens=20)
        bench.until(lambda: len(bench.plans[-1].decode) == 3 if bench.plans else False)
        plan = bench.schedule(tokens=("a", "c"), failed=("b",))
        assert plan.leave == ("b",) and plan.decode == ("a", "c")

    def test_an_error_while_reading(self) -> None:
        bench = Bench()
        bench.submit("a", prompt=5_000)
        bench.schedule()
        assert bench.schedule(failed=("a",)).leave == ("a",)
        assert bench.scheduler.idle


def test_a_row_that_chose_to_stop_leaves_and_the_next_takes_its_slot() -> None:
    bench = Bench(rows=1)
    bench.submit("a", tokens=100)
    bench.submit("b", tokens=100)
    bench.until(lambda: bench.state("b") is State.READY)
    plan = bench.schedule(ended=("a",))
    assert plan.leave == ("a",) and plan.decode == ("b",)


def test_drain_serves_what_is_there_and_takes_nothing_new() -> None:
    bench = Bench()
    for number in range(20):
        bench.submit(f"j{number}")
    bench.schedule()
    bench.scheduler.drain()
    with pytest.raises(EngineFullError, match="draining"):
        bench.submit("late")
    bench.finish()
    assert bench.tokens == {f"j{number}": 10 for number in range(20)}


def test_a_step_whose_result_is_not_there_yet_is_counted() -> None:
    """An engine that plans step t+1 while t runs must not plan more tokens than were reserved for."""
    bench = Bench()
    bench.submit("a", prompt=1, tokens=3)
    scheduler = bench.scheduler
    assert scheduler.schedule(StepResult(), 0.0).decode == ("a",)
    assert scheduler.schedule(StepResult(), 0.0).decode == ("a",)
    assert scheduler.schedule(StepResult(tokens=("a",)), 0.0).decode == ("a",)
    assert scheduler.schedule(StepResult(tokens=("a",)), 0.0).decode == ()
    check_scheduler(scheduler)
    assert scheduler.schedule(StepResult(tokens=("a",)), 0.0).leave == ("a",)
