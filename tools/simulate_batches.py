"""The scheduler beside static batching, in simulated time: `python -m tools.simulate_batches`.

Nothing is computed. A step takes `--step-ms` and `--row-ms` for each row; reading takes `--token-us` for each token of
a prompt. `--beside` is the share of reading that costs decoding no time, as where a GPU reads while the host searches.
Prompts and answers have lengths drawn evenly from `--low` to `--high`, as in the offline benchmark of nano-vllm.

* continuous: `retrieval_attn.engine.scheduler`, with slots for `--rows` rows.
* static: as many jobs as have come, at most `--rows`, are read together and decode until the last of them has ended;
  prompts are padded to the longest, and rows that have ended run on.
* static, trimmed: the same, but padding costs nothing.

With `--memory-tokens` both have that many tokens of host memory: the scheduler reserves what a job asks for, static
batching what the longest prompt and answer could take.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from retrieval_attn.engine.job import Job
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.scheduler import Results, Scheduler, StepPlan

SPIKE = 3.0


@dataclass(frozen=True)
class Cost:
    """What work takes, in seconds: a step for itself and for each row, a token to read.

    beside: share of reading that costs decoding no time. past: tokens before it with which a token takes twice as long.
    noise: of the time of a tick's cells, the deviation of its logarithm. spikes: share of ticks whose cells take three
    times as long. Only the continuous run has both, from a seed. end: what ends the layers of a prompt of several
    chunks, for each of its tokens, in all layers.
    """

    step: float
    row: float
    token: float
    beside: float = 0.0
    past: float = math.inf
    noise: float = 0.0
    spikes: float = 0.0
    end: float = 0.0

    def decode(self, rows: int) -> float:
        """A step of so many rows."""
        return self.step + self.row * rows if rows else 0.0

    def cell(self, unread: int, number: int, limits: Limits) -> float:
        """A cell of a prompt's reading, which goes through all chunks layer by layer, and through what ends each."""
        begin = number % limits.layer_cells(unread) * limits.chunk_tokens
        if begin >= unread:
            return unread * self.end / limits.layers
        tokens = min(limits.chunk_tokens, unread - begin)
        return tokens * self.token / limits.layers * (1 + begin / self.past)

    def prompt(self, unread: int, limits: Limits) -> float:
        """A whole prompt's reading."""
        return limits.layers * sum(self.cell(unread, number, limits) for number in range(limits.layer_cells(unread)))

    def drawn(self, draw: random.Random) -> float:
        """By what the time of a tick's cells is multiplied."""
        return math.exp(draw.gauss(0.0, self.noise)) * (SPIKE if draw.random() < self.spikes else 1.0)

    def tick(self, rows: int, read_seconds: float) -> float:
        """A step and what was read at its time."""
        decode = self.decode(rows)
        return max(decode + read_seconds * (1 - self.beside), read_seconds)


@dataclass(frozen=True)
class Arrival:
    """A job and when it comes, in seconds. answer: tokens after which it ends, at most its max_tokens."""

    job: Job
    seconds: float
    answer: int


@dataclass
class Outcome:
    """What came of a run. Slots are counted over steps, those that only read included, while jobs wait."""

    name: str
    seconds: float = 0.0
    tokens: int = 0
    row_steps: int = 0
    slot_steps: int = 0
    parks: int = 0
    plan_seconds: float = 0.0
    ticks: int = 0
    queued: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-12)

    @property
    def filled(self) -> float:
        """Percent of slots whose row got a token of use, while jobs waited."""
        return 100 * self.row_steps / max(self.slot_steps, 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; nan of none."""
    order = sorted(values)
    return order[max(math.ceil(share * len(order)) - 1, 0)] if order else math.nan


class Continuous:
    """Carries the scheduler's plans out."""

    def __init__(self, limits: Limits, cost: Cost) -> None:
        self.limits = limits
        self.cost = cost
        self.scheduler = Scheduler(limits)
        self.now = 0.0
        self._unread: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._draw = random.Random(0)

    def run(self, arrivals: Sequence[Arrival], check: Callable[[Scheduler], None] | None = None) -> Outcome:
        """Until all have left. check: called after each tick."""
        outcome = Outcome("continuous")
        known = {arrival.job.id: arrival for arrival in arrivals}
        results, next_one = Results(), 0
        while next_one < len(arrivals) or not self.scheduler.idle:
            while next_one < len(arrivals) and arrivals[next_one].seconds <= self.now:
                job = arrivals[next_one].job
                self.scheduler.submit(job, self.now)
                self._unread[job.id], self._tokens[job.id] = self.limits.cells(job), 0
                next_one += 1
            began = time.perf_counter()
            plan = self.scheduler.tick(results, self.now)
            outcome.plan_seconds += time.perf_counter() - began
            outcome.ticks += 1
            if check is not None:
                check(self.scheduler)
            outcome.parks += len(plan.park)
            outcome.queued += [self.now - known[name].seconds for name in plan.start]
            if self.scheduler.waiting:
                outcome.row_steps += len(plan.decode)
                outcome.slot_steps += self.limits.decoding_rows
            results = self._carry_out(plan, known, outcome)
            if not plan.decode and not plan.read and self.scheduler.idle and next_one < len(arrivals):
                self.now = max(self.now, arrivals[next_one].seconds)
        outcome.seconds = self.now
        return outcome

    def _carry_out(self, plan: StepPlan, known: dict[str, Arrival], outcome: Outcome) -> Results:
        read: dict[str, int] = {}
        at_end = []
        read_seconds = 0.0
        for name, cells in plan.read:
            job = known[name].job
            first, layer = self.limits.cells(job) - self._unread[name], self.limits.layer_cells(job.unread_tokens)
            alike = layer - 1 - first % layer if layer > 1 else cells  # chunks before what ends the layer's pass
            read[name] = min(cells, self._unread[name], alike or 1)
            if layer > 1 and (first + read[name]) % layer == layer - 1:
                at_end.append(name)
            cell = partial(self.cost.cell, job.unread_tokens, limits=self.limits)
            read_seconds += sum(cell(number) for number in range(first, first + read[name]))
            self._unread[name] -= read[name]
        read_seconds *= self.cost.drawn(self._draw)
        self.now += self.cost.tick(len(plan.decode), read_seconds)
        ended = []
        for name in plan.decode:
            self._tokens[name] += 1
            last = self._last.get(name)
            if last is None:
                outcome.first.append(self.now - known[name].seconds)
            else:
                outcome.gaps.append(self.now - last)
            self._last[name] = self.now
            if self._tokens[name] == known[name].answer:
                ended.append(name)
        outcome.tokens += len(plan.decode)
        return Results(
            ended=tuple(ended),
            tokens=plan.decode,
            read=read,
            read_done=tuple(name for name in read if self._unread[name] == 0),
            decode_seconds=self.cost.decode(len(plan.decode)),
            cell_seconds=read_seconds / max(sum(read.values()), 1),
            at_end=tuple(at_end),
        )


def static(arrivals: Sequence[Arrival], limits: Limits, cost: Cost, *, trimmed: bool) -> Outcome:
    """A batch is read, decodes until its last row has ended, and then the next one begins."""
    outcome = Outcome("static, trimmed" if trimmed else "static")
    now, begun, rows = 0.0, 0, limits.decoding_rows
    while begun < len(arrivals):
        now = max(now, arrivals[begun].seconds)
        batch = [arrival for arrival in arrivals[begun : begun + rows] if arrival.seconds <= now]
        begun += len(batch)
        waits = begun < len(arrivals)
        outcome.queued += [now - arrival.seconds for arrival in batch]
        prompts = [cost.prompt(arrival.job.unread_tokens, limits) for arrival in batch]
        now += sum(prompts) if trimmed else max(prompts) * len(batch)
        left = sorted((arrival.answer for arrival in batch), reverse=True)
        for step in range(left[0]):
            while left[-1] <= step:
                left.pop()
            seconds = cost.decode(len(left) if trimmed else len(batch))
            now += seconds
            if step == 0:
                outcome.first += [now - arrival.seconds for arrival in batch]
            else:
                outcome.gaps += [seconds] * len(left)
            outcome.tokens += len(left)
            if waits:
                outcome.row_steps += len(left)
                outcome.slot_steps += rows
    outcome.seconds = now
    return outcome


def load(options: argparse.Namespace) -> list[Arrival]:
    """Jobs of even lengths; all at once, or by a Poisson process. Each asks for `high` tokens, and stops before."""
    draw = random.Random(options.seed)
    low, high = options.low, options.high
    now, made = 0.0, []
    for number in range(options.jobs):
        now += draw.expovariate(options.per_second) if options.per_second else 0.0
        prompt, answer = draw.randint(low, high), draw.randint(low, high)
        if options.long_every and number % options.long_every == options.long_every - 1:
            prompt = options.long_tokens
        made.append(Arrival(Job(f"j{number}", prompt, high, owner=f"o{number % 7}"), now, answer))
    return made


def cost_of(options: argparse.Namespace) -> Cost:
    """Of all ways."""
    ms = 1 / 1000
    return Cost(
        options.step_ms * ms, options.row_ms * ms, options.token_us * ms * ms, options.beside, options.past_tokens,
        options.noise, options.spikes, options.end_us * ms * ms,
    )  # fmt: skip


def limits_of(options: argparse.Namespace) -> Limits:
    """For the continuous run."""
    tokens = options.memory_tokens or options.jobs * (options.long_tokens + 2 * options.high)
    return Limits(
        rows=options.rows,
        pages=options.rows + options.ahead,
        row_pages=1,
        host_bytes=tokens,
        token_bytes=1,
        row_seconds=options.row_ms / 1000,
        step_seconds=1e9,
        inter_token_seconds=options.inter_token_ms / 1000,
        waiting=options.jobs,
        chunk_tokens=options.chunk,
        layers=options.layers,
        ahead=options.ahead,
    )


def static_limits(options: argparse.Namespace) -> Limits:
    """For static batching: memory for the longest prompt and answer in each row."""
    limits = limits_of(options)
    longest = max(options.high, options.long_tokens if options.long_every else 0) + options.high
    return replace(limits, rows=max(min(limits.rows, limits.host_bytes // longest), 1))


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--jobs", type=int, default=1000)
    made.add_argument("--low", type=int, default=100, help="shortest prompt and answer, tokens")
    made.add_argument("--high", type=int, default=1024, help="longest prompt and answer, tokens")
    made.add_argument("--per-second", type=float, default=0.0, help="arrivals; 0: all at once")
    made.add_argument("--rows", type=int, default=32)
    made.add_argument("--ahead", type=int, default=2, help="jobs read before a slot is free")
    made.add_argument("--memory-tokens", type=int, default=0, help="host memory of all jobs, tokens; 0: enough")
    made.add_argument("--step-ms", type=float, default=8.0)
    made.add_argument("--row-ms", type=float, default=1.0)
    made.add_argument("--token-us", type=float, default=60.0, help="to read one token")
    made.add_argument("--end-us", type=float, default=0.0, help="for a token of a long text, what ends its layers")
    made.add_argument("--beside", type=float, default=0.0, help="share of reading that costs decoding nothing")
    made.add_argument(
        "--past-tokens", type=float, default=math.inf, help="before it, with which a token takes twice that"
    )
    made.add_argument("--noise", type=float, default=0.0, help="deviation of the logarithm of reading's time")
    made.add_argument(
        "--spikes", type=float, default=0.0, help="share of ticks whose reading takes three times as long"
    )
    made.add_argument("--long-every", type=int, default=0, help="every so manyth job has a long prompt; 0: none")
    made.add_argument("--long-tokens", type=int, default=131072)
    made.add_argument("--inter-token-ms", type=float, default=80.0)
    made.add_argument("--chunk", type=int, default=2048)
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each way of batching."""
    options = parser().parse_args(arguments)
    cost, arrivals = cost_of(options), load(options)
    limits = limits_of(options)
    outcomes = [Continuous(limits, cost).run(arrivals)]
    outcomes += [static(arrivals, static_limits(options), cost, trimmed=trimmed) for trimmed in (False, True)]
    if options.json:
        print(json.dumps([{**asdict(outcome), "rate": outcome.rate, "filled": outcome.filled} for outcome in outcomes]))
        return 0
    print(f"{'':16} tokens/s  continuous is  slots filled  queued p50, p99 s  first token p50, p99 s  gap p99 ms")
    for outcome in outcomes:
        queued, first = ([quantile(v, share) for share in (0.5, 0.99)] for v in (outcome.queued, outcome.first))
        cells = [f"{outcome.name:16} {outcome.rate:8.0f} {outcomes[0].rate / outcome.rate:13.2f}x"]
        cells.append(f"{outcome.filled:12.1f}% {queued[0]:10.1f} {queued[1]:7.1f} {first[0]:15.1f} {first[1]:7.1f}")
        cells.append(f"{1e3 * quantile(outcome.gaps, 0.99):11.1f}")
        print(*cells)
    own = outcomes[0]
    plan_us = 1e6 * own.plan_seconds / max(own.ticks, 1)
    print(f"A tick took {plan_us:.0f} us of this machine; {own.parks} times a row was parked.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
