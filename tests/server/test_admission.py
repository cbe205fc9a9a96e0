"""Admission by the wait that is to be expected, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from retrieval_attn.engine.engine import Engine
from retrieval_attn.server.admission import (
    MAX_RETRY_SECONDS,
    SHORT_TOKENS,
    UNPACED,
    Admission,
    QueuedPrompt,
    QueuedRequest,
)
from retrieval_attn.server.client import LocalEngine
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.run import measure_pace
from tests.engine.test_engine import llm_of

_first = itertools.count(10)


def prompt(tokens: int, *, of: QueuedPrompt | None = None, scope: str | None = "key") -> QueuedPrompt:
    """A prompt that begins as no other one, or continues the first tokens of another."""
    ids = np.full(tokens, next(_first), np.int32)
    if of is not None:
        ids[: len(of.ids)] = of.ids[:tokens]
    return QueuedPrompt(ids, scope)


@dataclass
class Clock:
    """Seconds that pass when the test says so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


class Line:
    """Requests that wait, and are served one after the other, each some seconds behind the one before."""

    def __init__(self, seconds: float = math.inf, requests: int = 1000, token_seconds: float | None = None) -> None:
        """What admission allows."""
        self.clock = Clock()
        self.admission = Admission(requests, 1 << 30, seconds, self.clock)
        if token_seconds is not None:
            self.admission.expect(token_seconds, token_seconds)
        self._waiting: deque[QueuedRequest] = deque()

    def come(self, tokens: int = 10, times: int = 1) -> None:
        """Raises ApiError."""
        for _ in range(times):
            self._waiting += self.admission.enter(prompt(tokens))

    def serve(self, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.clock.seconds += seconds
            self._waiting.popleft().leave(served=True)

    def refused(self, tokens: int = 10) -> int:
        """Seconds until it should come again."""
        with pytest.raises(ApiError) as found:
            self.come(tokens)
        assert found.value.status == 503 and found.value.code == "queue_full"
        assert found.value.retry_after is not None
        return found.value.retry_after


def test_the_wait_is_what_waits_times_the_pace_of_late() -> None:
    line = Line()
    line.come(times=20)
    assert line.admission.expected_seconds(10) == math.inf  # nothing was served yet: nothing can be promised
    line.serve(0.5, times=10)
    assert line.admission.expected_seconds(10) == pytest.approx(5)
    line.serve(0.5, times=10)
    assert line.admission.expected_seconds(10) == 0
    line.come(times=70)
    line.serve(2.0, times=66)  # the slower ones are all that is remembered
    assert line.admission.expected_seconds(10) == pytest.approx(4 * 2.0)


def test_time_in_which_nobody_waits_says_nothing() -> None:
    line = Line()
    for _ in range(3):
        line.come(times=4)
        line.serve(0.25, times=4)
        line.clock.seconds += 1000
    line.come(times=8)
    assert line.admission.expected_seconds(10) == pytest.approx(2)


def test_who_would_wait_too_long_is_told_when_to_come_again() -> None:
    line = Line(seconds=3)
    line.come(times=4)
    line.serve(1.0, times=4)
    line.come(times=4)
    assert line.admission.expected_seconds(10) == pytest.approx(4)
    retry = line.refused()
    assert retry == 4 and line.admission.requests == 4
    line.serve(1.0, times=retry)  # what was told is true: at that time nobody waits any more
    line.come()


def test_a_stall_is_noticed_while_it_lasts() -> None:
    line = Line(seconds=5)
    line.come(times=4)
    line.serve(0.1, times=2)
    line.come()
    line.clock.seconds += 60
    assert line.admission.expected_seconds(10) > 30
    assert line.refused() == MAX_RETRY_SECONDS


def test_one_request_waits_in_any_case_with_all_its_choices() -> None:
    line = Line(seconds=1, requests=2)
    line.come(tokens=50_000)
    line.serve(100.0)
    waiting = line.admission.enter(*[prompt(50_000)] * 4)  # alone, however slow the server was
    assert (line.admission.requests, line.admission.tokens) == (4, 50_000)
    line.clock.seconds += 100
    assert line.refused(tokens=SHORT_TOKENS + 1) == MAX_RETRY_SECONDS
    for one in waiting:
        assert one.leave(served=True) and not one.leave()
    assert (line.admission.requests, line.admission.tokens) == (0, 0)


def test_long_prompts_do_not_make_short_ones_look_slow() -> None:
    """In the line of the short ones, by their tokens; those that the engine overtakes are in another line."""
    line = Line(seconds=5)
    for _ in range(4):
        line.come(tokens=2_000)
        line.serve(40.0)
    line.come(tokens=50, times=4)  # 40 s each, if requests were all that counts
    assert line.admission.expected_seconds(50) == pytest.approx(4)
    line.serve(0.1, times=4)
    line.come(tokens=SHORT_TOKENS + 1)
    line.serve(100.0)
    line.come(tokens=SHORT_TOKENS + 1)
    assert line.refused(tokens=SHORT_TOKENS + 1) == MAX_RETRY_SECONDS
    assert line.admission.expected_seconds(SHORT_TOKENS) == 0
    line.come(tokens=50)


def test_who_goes_away_was_not_served() -> None:
    line = Line()
    line.come(times=4)
    line.serve(1.0, times=4)
    line.come(times=4)
    for gone in line.admission.enter(prompt(10), prompt(10)):
        gone.leave()
    assert line.admission.expected_seconds(10) == pytest.approx(4)


def test_a_common_prefix_is_counted_once() -> None:
    """Eight clients ask about a document of 100,000 tokens that takes 14 s to prefill: none is refused, and the wait
    is that for one prefill. Another key's request for the same document prefills it again.
    """
    line = Line(seconds=20, token_seconds=14e-5)
    document = prompt(100_000)
    queued = [one for _ in range(8) for one in line.admission.enter(prompt(100_012, of=document))]
    assert line.admission.tokens == 100_012 + 7 * 12
    assert line.admission.expected_seconds(100_012) == pytest.approx(14, rel=0.01)
    line.admission.enter(prompt(100_012, of=document, scope="another"))
    assert line.refused(tokens=100_012) == 29
    queued += line.admission.enter(prompt(100_012, of=document))  # the wait is of a prefill that serves it, too
    line.clock.seconds += 14
    for one in queued:
        assert one.leave(served=True)
    assert (line.admission.requests, line.admission.tokens) == (1, 100_012)


def test_who_joins_a_long_prefill_is_not_refused() -> None:
    """A fresh server expected 80 s for a document that takes 12: seven of eight clients that asked about it got 503.
    Too many requests are refused.
    """
    line = Line(seconds=60, requests=8, token_seconds=8e-4)
    document = prompt(100_000)
    for _ in range(7):
        line.admission.enter(prompt(100_012, of=document))
    line.admission.enter(prompt(100_012, of=document))
    with pytest.raises(ApiError):
        line.admission.enter(prompt(100_012, of=document))


def test_a_common_beginning_does_not_lift_the_limit() -> None:
    """Prompts of 3,500 tokens, 1,500 of them a system prompt that all have: each waits for what others read besides."""
    line = Line(seconds=60, token_seconds=8e-4)
    system = prompt(1_500)
    with pytest.raises(ApiError):
        for _ in range(200):
            line.admission.enter(prompt(3_500, of=system))
    assert 30 < line.admission.requests < 50  # 2,000 tokens each, 75,000 in 60 s


def test_a_prefix_whose_reader_goes_away_is_read_by_another_one() -> None:
    line = Line(token_seconds=1e-3)
    document = prompt(5_000)
    first, second, third = (line.admission.enter(prompt(5_000 + more, of=document))[0] for more in (10, 20, 30))
    assert (first.tokens, second.tokens, third.tokens) == (5_010, 20, 30)
    first.leave()
    assert (second.tokens, third.tokens, line.admission.tokens) == (5_020, 30, 5_050)
    assert line.admission.expected_seconds(5_020) == pytest.approx(5.05)
    second.leave(served=True)
    assert (third.tokens, line.admission.tokens) == (30, 30)
    third.leave()
    assert (line.admission.requests, line.admission.tokens) == (0, 0)


def test_prompts_that_share_nothing_are_counted_whole() -> None:
    admission = Admission(100, 1 << 30)
    same = prompt(300)
    admission.enter(QueuedPrompt(same.ids, None), QueuedPrompt(same.ids, None))  # scored prompts
    assert admission.tokens == 600
    admission.enter(same)
    admission.enter(prompt(300, of=prompt(63)), prompt(100))
    assert admission.tokens == 600 + 300 + 400
    admission.enter(prompt(400, of=QueuedPrompt(same.ids[:100], "key")))
    assert admission.tokens == 1300 + 300


@pytest.mark.parametrize("times", [0.5, 2.0, 10.0])
def test_waits_are_bounded_at_any_load(times: float) -> None:
    """Rows are free by chance, requests come by chance: who is taken in waits for about as long as may be, at most;
    none is refused where the load is half of what can be borne, and no more than must be where it is too much.
    """
    chance, clock = random.Random(1), Clock()
    rows, service, most = 8, 2.0, 3.0
    admission = Admission(1000, 1 << 30, most, clock)
    free = [0.0] * rows  # when each row is
    line: deque[tuple[float, QueuedRequest]] = deque()
    waits, refused, retries = [], 0, []
    came = 0.0
    for _ in range(4_000):
        came += chance.expovariate(times * rows / service)
        while line and free[0] <= came:
            began, waiting = line.popleft()
            clock.seconds = max(free[0], began)
            waits.append((clock.seconds, clock.seconds - began))
            waiting.leave(served=True)
            heapq.heapreplace(free, clock.seconds + chance.uniform(0.5, 1.5) * service)
        clock.seconds = came
        try:
            line += [(came, one) for one in admission.enter(prompt(chance.randrange(10, SHORT_TOKENS)))]
        except ApiError as error:
            assert line and error.retry_after is not None
            refused += 1
            retries.append(error.retry_after)
    late = sorted(seconds for at, seconds in waits if at > 20)
    assert late[int(0.99 * len(late))] <= 2 * most  # the pace is a mean: what is ahead may take longer
    # before, rows were free, and first tokens came faster than they can for long
    assert max(seconds for _, seconds in waits) <= 4 * most
    if times < 1:
        assert refused == 0
    else:
        answered = len(waits) / came / (rows / service)
        assert answered > 0.95, f"{answered:.2f} of what could be answered"
        assert 1 - 1.1 / times < refused / 4_000 and all(1 <= seconds <= 2 * most for seconds in retries)


def test_a_pace_is_measured_while_requests_enter(caplog: pytest.LogCaptureFixture) -> None:
    """Until it is known all are accepted, beyond the number that is without a measure; then waits follow from it."""

    async def measured(engine: Engine) -> tuple[float, float]:
        admission, client = Admission(1000, 1 << 30, 60.0), LocalEngine(engine)
        task = asyncio.create_task(measure_pace(client, admission, 97, 500))
        await asyncio.sleep(0)
        began = time.perf_counter()
        admission.enter(*[prompt(100_000)] * (2 * UNPACED))
        admission.enter(prompt(100_000))
        before = admission.expected_seconds(100_000)
        await task
        after = admission.expected_seconds(100_000)
        assert (time.perf_counter() - began) * 6_600 > after  # 3.3M tokens, 500 of which were read
        return before, after

    with Engine(llm_of()) as engine:
        before, after = asyncio.run(measured(engine))
        assert before < 1 and after > 1 and not caplog.records
    assert asyncio.run(measured(engine))[1] < 1 and "was not measured: The engine is closed" in caplog.text


def test_more_than_can_be_promised_is_refused_while_no_pace_is_known() -> None:
    """50 long prompts at once, the first of which was never served: some must be told to come again."""
    line = Line(seconds=60)
    line.come(100_000, times=UNPACED)
    assert line.refused(tokens=100_000) == MAX_RETRY_SECONDS
    line.serve(1.0)
    line.come(tokens=100_000)  # the pace is known: 16 seconds


def test_a_measured_pace_is_used_until_requests_were_served() -> None:
    """50 prompts of 100,000 tokens at 10,000 tokens a second: six are read within a minute."""
    line = Line(seconds=60, token_seconds=1e-4)
    line.come(100_000, times=7)
    assert line.refused(100_000) == MAX_RETRY_SECONDS
    assert line.admission.expected_seconds(100_000) == pytest.approx(70)
    line.clock.seconds += 100  # none is served, whatever the measure says
    assert line.admission.expected_seconds(100_000) == pytest.approx(100)
