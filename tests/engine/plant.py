"""A plant that carries plans out in simulated time, keeps books of its own, and refuses a plan that breaks them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput, StepResult
from retrieval_attn.errors import AdmissionError, EngineFullError
from tests.engine.audit import check_scheduler

END_REASONS = ("tokens", "ended", "failed", "aborted")


@dataclass
class Request:
    """What the plant knows of a job: what will happen to it, and what it has had."""

    job: RequestNeeds
    stops_after: int
    fails_after: int
    chunks: int
    chunks_done: int = 0
    read: bool = False
    tokens: int = 0
    reason: str = ""
    waited: int = 0


class Plant:
    """late: a step's results come one tick later, as where step t+1 is planned while t runs."""

    def __init__(self, limits: Limits, seed: int, *, late: bool) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.draw = random.Random(seed)
        self.late = late
        self.now = 0.0
        self.there: dict[str, Request] = {}
        self.gone: dict[str, Request] = {}
        self.rows: set[str] = set()
        self.started: set[str] = set()
        self.parked: set[str] = set()
        self.aborted: set[str] = set()
        self.plans: list[SchedulerOutput] = []
        self.parks = 0
        self.outside = 0
        self._pending: list[StepResult] = []

    def submit(self, name: str, job: RequestNeeds) -> bool:
        draw = self.draw
        try:
            self.scheduler.submit(job, self.now)
        except EngineFullError:
            assert self.scheduler.waiting == self.limits.waiting
            return False
        except AdmissionError:
            assert (job.prompt_tokens - job.cached_tokens + job.max_tokens) * self.limits.token_bytes > (
                self.limits.host_bytes
            )
            return False
        unread = job.prompt_tokens - job.cached_tokens - 1
        chunks = -(-unread // self.limits.chunk_tokens) * self.limits.layers
        # chunks that do not fit are halved: readings may take more chunks than the limits say
        chunks += draw.randrange(3) if chunks else 0
        stops = draw.randint(1, job.max_tokens) if draw.random() < 0.3 else job.max_tokens + 1
        fails = draw.randint(1, chunks + job.max_tokens) if draw.random() < 0.1 else chunks + job.max_tokens + 1
        self.there[name] = Request(job, stops, fails, chunks, read=chunks == 0)
        return True

    def abort(self, name: str) -> None:
        known = name in self.there
        assert self.scheduler.abort(name) is known
        if known:
            self.aborted.add(name)

    def disturb(self) -> None:
        """The tree takes and frees memory, and comes to hold more of a job's prompt."""
        free = self.limits.host_bytes - self._reserved_tokens() * self.limits.token_bytes
        self.outside = self.draw.randint(0, max(free, 0)) if self.draw.random() < 0.2 else self.outside // 2
        self.scheduler.set_outside(self.outside)
        if self.there and self.draw.random() < 0.2:
            name = self.draw.choice(list(self.there))
            request = self.there[name]
            more = self.draw.randint(request.job.cached_tokens, request.job.prompt_tokens - 1)
            self.scheduler.set_cached(name, more)
            request.job = replace(request.job, cached_tokens=more)
            if name not in self.started:
                unread = replace(request.job, known_tokens=0).unread_tokens
                request.chunks = -(-unread // self.limits.chunk_tokens) * self.limits.layers
                request.read = request.chunks == 0
        if self.there and self.draw.random() < 0.1:  # which may turn out wrong
            name = self.draw.choice(list(self.there))
            if self.scheduler.state(name) is not State.WAITING:
                return
            known = self.draw.randint(0, self.there[name].job.prompt_tokens - 1)
            self.scheduler.set_known(name, known)
            self.there[name].job = replace(self.there[name].job, known_tokens=known)

    def schedule(self) -> SchedulerOutput:
        results = self._pending.pop(0) if len(self._pending) > self.late else StepResult()
        plan = self.scheduler.schedule(results, self.now)
        check_scheduler(self.scheduler)
        self.plans.append(plan)
        self._leave(plan, results)
        self._move(plan)
        self._check_books(plan)
        self._work(plan)
        return plan

    def _leave(self, plan: SchedulerOutput, results: StepResult) -> None:
        assert len(set(plan.leave)) == len(plan.leave)
        due = {
            **{name: "tokens" for name in results.tokens if self._had_all(name)},
            **dict.fromkeys((name for name in results.ended if name in self.there), "ended"),
            **dict.fromkeys((name for name in results.failed if name in self.there), "failed"),
            **dict.fromkeys(self.aborted, "aborted"),
        }
        assert set(plan.leave) == set(due), "who is done leaves at once, and nobody else"
        for name in plan.leave:
            request = self.there.pop(name)
            request.reason = due[name]
            self.gone[name] = request
            for places in (self.rows, self.started, self.parked):
                places.discard(name)
            assert self.scheduler.state(name) is State.GONE
        self.aborted.clear()

    def _had_all(self, name: str) -> bool:
        if name not in self.there:
            return False
        # tokens of steps that are still on their way are not told yet
        told = self.there[name].tokens - sum(name in results.tokens for results in self._pending)
        return told == self.there[name].job.max_tokens

    def _move(self, plan: SchedulerOutput) -> None:
        parked = {name for name in self.started if self.scheduler.state(name) is State.PREEMPTED}
        for name in parked - self.parked:
            self.rows.remove(name)
            assert self.there[name].job.priority == "batch"
        self.parks += len(parked - self.parked)
        self.rows |= self.parked - parked
        self.parked = parked
        for name in plan.start:
            assert name not in self.started
            self.started.add(name)
            self._check_bytes(name)
        for name in plan.decode:
            request = self.there[name]
            assert name in self.started and name not in self.parked, name
            assert request.read, "only who is read decodes"
            self.rows.add(name)
        assert list(plan.decode) == sorted(plan.decode, key=lambda name: self.scheduler._places.entries[name].slot)

    def _reserved_tokens(self) -> int:
        jobs = [self.there[name].job for name in self.started]
        return sum(job.prompt_tokens - job.cached_tokens + job.max_tokens for job in jobs)

    def _promised_tokens(self) -> int:
        """Return the known tokens of admitted jobs without a completed chunk, which the prefix cache should hold."""
        new = [name for name in self.started if self.scheduler.state(name) is State.READING]
        told = self.scheduler._places.entries
        jobs = [self.there[name].job for name in new if not told[name].chunks_done]
        return sum(max(job.known_tokens - job.cached_tokens, 0) for job in jobs)

    def _check_bytes(self, name: str) -> None:
        """Of who was admitted: reserved bytes fit, if it knows tokens without those that leases will free."""
        tokens = self._reserved_tokens()
        job = self.there[name].job
        if job.known_tokens > job.cached_tokens:
            tokens -= self._promised_tokens()
        assert tokens * self.limits.token_bytes + self.outside <= self.limits.host_bytes

    def _check_books(self, plan: SchedulerOutput) -> None:
        limits = self.limits
        assert len(self.started) - len(self.parked) <= limits.rows + limits.ahead
        assert len(self.rows) <= limits.rows
        ready = [n for n in self.started - self.rows - self.parked if self.scheduler.state(n) is State.READY]
        assert not ready or self.scheduler.slots_in_use == limits.rows, "a slot is free and a job is ready"
        reads = [name for name, _ in plan.read]
        assert len(set(reads)) == len(reads)
        assert all(chunks > 0 and name in self.started for name, chunks in plan.read)
        assert self.late or not any(self.there[name].read for name in reads), "it is read already"
        long = [name for name in reads if limits.is_long(self.there[name].job)]
        assert len(long) <= 1, "one long read at a time"
        assert len(reads) < 2 or not long, "and nothing beside it"
        if self.scheduler.state(reads[0] if reads else "") is State.READING:
            return
        reading = [name for name in self.started if self.scheduler.state(name) is State.READING]
        assert not reading or plan.decode, "readings wait, and nothing decodes"

    def _work(self, plan: SchedulerOutput) -> None:
        """What comes of a plan; the last of the pending results when it is told late."""
        tokens, ended, failed, read_done = [], [], [], []
        read: dict[str, int] = {}
        for name, chunks in plan.read:
            request = self.there[name]
            done = min(chunks, request.chunks - request.chunks_done)
            request.chunks_done += done
            if request.chunks_done >= request.fails_after:
                failed.append(name)
            if done:
                read[name] = done
            if request.chunks_done == request.chunks and not request.read:
                read_done.append(name)
                request.read = True
        for name in plan.decode:
            request = self.there[name]
            if request.chunks + request.tokens + 1 >= request.fails_after:
                failed.append(name)
                continue
            request.tokens += 1
            assert request.tokens <= request.job.max_tokens, "a step beyond what was reserved"
            tokens.append(name)
            if request.tokens >= request.stops_after:
                ended.append(name)
        decode = 0.002 * len(plan.decode) * self.draw.uniform(0.5, 1.5)
        chunk = self.draw.uniform(0.001, 0.02)
        self.now += decode + chunk * sum(read.values()) + 0.0005
        self._pending.append(
            StepResult(
                ended=tuple(ended),
                tokens=tuple(tokens),
                failed=tuple(failed),
                read=read,
                read_done=tuple(read_done),
                decode_seconds=decode,
                chunk_seconds=chunk if read else 0.0,
            )
        )
        while len(self._pending) < 1 + self.late:
            self._pending.insert(0, StepResult())
