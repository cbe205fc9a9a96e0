"""A bench for single schedules: plans are carried out at once, with fixed seconds for steps and chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput, StepResult
from tests.engine.audit import check_scheduler

LIMITS = Limits(
    rows=4,
    host_bytes=1_000_000,
    token_bytes=10,
    inter_token_seconds=0.05,
    waiting=100_000,
    promote_seconds=60.0,
    chunk_tokens=100,
    layers=2,
    ahead=2,
    quantum_tokens=1000,
)


class Bench:
    """Carries plans out at once: each row gets its token, each reading its chunks; checks after every tick."""

    def __init__(self, step: float = 0.01, chunk: float = 0.01, **changes: Any) -> None:
        self.limits = replace(LIMITS, **changes)
        self.scheduler = Scheduler(self.limits)
        self.step_seconds = step
        self.chunk_seconds = chunk
        self.now = 0.0
        self.results = StepResult()
        self.jobs: dict[str, RequestNeeds] = {}
        self.chunks: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.plans: list[SchedulerOutput] = []
        self.parks: list[tuple[str, ...]] = []
        self.resumes: list[tuple[str, ...]] = []

    def submit(self, name: str, prompt: int = 50, tokens: int = 10, **job: Any) -> None:
        self.jobs[name] = RequestNeeds(name, prompt, tokens, **job)
        self.scheduler.submit(self.jobs[name], self.now)

    def schedule(self, **results: Any) -> SchedulerOutput:
        """One tick with what came of the last plan; `results` on top of it."""
        parked = list(self.scheduler._places.held[State.PREEMPTED])
        plan = self.scheduler.schedule(self.results._replace(**results), self.now)
        check_scheduler(self.scheduler)
        self.plans.append(plan)
        now_parked = self.scheduler._places.held[State.PREEMPTED]
        self.parks.append(tuple(name for name in now_parked if name not in parked))
        self.resumes.append(tuple(name for name in parked if self.state(name) is State.DECODING))
        read, read_done = {}, []
        for name, chunks in plan.read:
            done = self.chunks.get(name, 0)
            read[name] = min(chunks, self.limits.chunks(self.jobs[name]) - done)
            self.chunks[name] = done + read[name]
            if self.chunks[name] == self.limits.chunks(self.jobs[name]):
                read_done.append(name)
        for name in plan.decode:
            self.tokens[name] = self.tokens.get(name, 0) + 1
        seconds = self.step_seconds if plan.decode else 0.0
        self.results = StepResult(
            tokens=plan.decode,
            read=read,
            read_done=tuple(read_done),
            decode_seconds=seconds,
            chunk_seconds=self.chunk_seconds if read else 0.0,
        )
        self.now += seconds + self.chunk_seconds * sum(read.values())
        return plan

    def until(self, done: Callable[[], bool], most: int = 10_000) -> None:
        for _ in range(most):
            if done():
                return
            self.schedule()
        raise AssertionError(f"not done after {most} ticks")

    def finish(self, most: int = 100_000) -> None:
        self.until(lambda: self.scheduler.idle, most)

    def state(self, name: str) -> State:
        return self.scheduler.state(name)

    def order(self) -> Iterator[str]:
        return (name for plan in self.plans for name in plan.start)
