"""A server at twice its capacity, for as long as you like: it must refuse in time, and not grow.

    python -m tools.server_overload --minutes 60

Starts the server with the bundled model in processes of its own. Requests come by a Poisson process and wait for nobody
(open loop): ever more, until a third of them is refused, which gives the capacity; at 90 % of it, to learn the usual
99th percentiles of the first token's time and of the whole answer's; then at `--times` the capacity. Requests ask about
shared documents of 1K to 4K tokens, about new ones, go on with conversations, or are short; answers have 16 to 64
tokens, streamed or whole; some clients go away.

Exit status 1 unless: every answer is 200, or 503 with a sensible Retry-After; the 99th percentiles of those that were
answered, in each tenth of the time, are within 2 times the usual ones; memory, threads, open files and what the tree of
prefixes holds do not grow behind the first fifth; a known question is answered as before right after the load; and the
server ends by SIGTERM with status 0 when it has finished what was under way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.server.process import ANSWER, QUESTION, WORDS, Served, document, processes, serving
from tools.http_load import Heard, LoadClient

CHAT = "/v1/chat/completions"
CONVERSATIONS = 32
"""That go on; the oldest are left."""
GONE_SHARE = 0.08
BUSY = 0.9
"""Of the capacity, where the 99th percentiles are those of a server that is not overloaded."""
WITHIN = 2.0
FIRST_RATE = 1.0
"""Requests a second that look for the capacity begin with."""
RETRY_SECONDS = 60
"""The longest Retry-After that makes sense."""
ROOM = {"rss": 32 << 20, "threads": 2, "files": 16, "nodes": 64, "tree_bytes": 8 << 20}
"""What medians of a fifth of the looks may differ by: pieces of the allocator, clients that are there by chance."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed; nan of none."""
    order = sorted(values)
    return order[max(math.ceil(share * len(order)) - 1, 0)] if order else math.nan


@dataclass(frozen=True)
class Plan:
    """What is measured.

    capacity: requests a second; None: it is measured. new_tokens: maximum tokens of a new document. save: gets what
    came of each request.
    """

    minutes: float = 60.0
    times: float = 2.0
    capacity: float | None = None
    round_minutes: float = 1.0
    calm_minutes: float = 4.0
    documents: int = 8
    new_tokens: int = 3_000
    seed: int = 0
    save: Path | None = None


class Asked(NamedTuple):
    """One request of the mix. keep: what becomes of its answer."""

    body: dict[str, Any]
    gone_after: float | None
    keep: Callable[[str], None]


class Mix:
    """Draws requests; knows the conversations that can go on."""

    def __init__(self, seed: int, documents: int, new_tokens: int) -> None:
        """documents: that are shared. new_tokens: maximum tokens of any other."""
        self._chance = random.Random(seed)
        self._new_tokens = new_tokens
        tokens = [1_000 + 3_000 * number // max(1, documents - 1) for number in range(documents)]
        self._shared = [self._text(f"Shared {number}", each) for number, each in enumerate(tokens)]
        self._conversations: deque[list[dict[str, str]]] = deque(maxlen=CONVERSATIONS)
        self._numbers = 0

    def next(self) -> Asked:
        """Another request."""
        chance, kind = self._chance, self._chance.random()
        self._numbers += 1
        question = {"role": "user", "content": f"Tell story {self._numbers} of the sea."}
        if kind < 0.2 and self._conversations:
            at = chance.randrange(len(self._conversations))
            messages = [*self._conversations[at], question]
            del self._conversations[at]
        elif kind < 0.55:
            messages = [{"role": "system", "content": chance.choice(self._shared)}, question]
        elif kind < 0.7:
            text = self._text(f"New {self._numbers}", chance.randrange(self._new_tokens // 6, self._new_tokens))
            messages = [{"role": "system", "content": text}, question]
        else:
            messages = [question]
        body = {
            "model": "bundled",
            "messages": messages,
            "max_tokens": chance.randrange(16, 65),
            "temperature": 2.0,  # answers that end by chance, and mostly by their length
            "seed": self._numbers,
            "stream": chance.random() < 0.6,
        }
        gone = chance.uniform(0.05, 2.0) if chance.random() < GONE_SHARE else None
        return Asked(body, gone, lambda text: self._goes_on(messages, text))

    def shared(self) -> list[dict[str, Any]]:
        """A question about each of the shared documents."""
        question = {"role": "user", "content": "Tell a story."}
        asked = [[{"role": "system", "content": text}, question] for text in self._shared]
        return [{"model": "bundled", "messages": messages, "max_tokens": 1} for messages in asked]

    def _goes_on(self, messages: list[dict[str, str]], text: str) -> None:
        if len(messages) < 8:
            self._conversations.append([*messages, {"role": "assistant", "content": text or "No."}])

    @staticmethod
    def _text(name: str, tokens: int) -> str:
        return f"{name}. " + WORDS * max(1, tokens // 22)


class Outcome(NamedTuple):
    """at: seconds since the phase began, when it was due. late: that the client began behind that."""

    at: float
    late: float
    status: int
    first: float | None
    whole: float


@dataclass
class Phase:
    """What came of the requests of some time."""

    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    retries: Counter[int] = field(default_factory=Counter)

    def add(self, at: float, late: float, asked: Asked, heard: Heard) -> None:
        """One has ended."""
        if problem := self._problem(asked, heard):
            self.wrong.append(problem)
        elif heard.status == 503:
            assert heard.retry_after is not None
            self.retries[int(heard.retry_after)] += 1
        if heard.status == 200 and not problem:
            asked.keep(_text_of(heard.body, stream=asked.body["stream"]))
        self.outcomes.append(Outcome(at, late, heard.status, heard.first, heard.whole))

    @staticmethod
    def _problem(asked: Asked, heard: Heard) -> str:
        if heard.status == 503:
            told = heard.retry_after or ""
            sensible = told.isdecimal() and 1 <= int(told) <= RETRY_SECONDS
            right = sensible and b"queue_full" in heard.body
            return "" if right else f"503, retry-after {told!r}: {heard.body[:200]!r}"
        if heard.status == 200 and asked.body["stream"]:
            return _stream_problem(heard.body)
        return "" if heard.status in (0, 200) else f"{heard.status}: {heard.body[:200]!r}"

    def between(self, begin: float, end: float) -> Phase:
        """Of those that were due then."""
        return Phase([one for one in self.outcomes if begin <= one.at < end])

    @property
    def counts(self) -> dict[str, int]:
        """By what came: answered, refused, gone (the client went), wrong (anything else)."""
        found = Counter(one.status for one in self.outcomes)
        return {"answered": found[200], "refused": found[503], "gone": found[0], "wrong": len(self.wrong)}

    @property
    def ended(self) -> int:
        """Requests that took the server's time to their end, or until their client went."""
        return sum(one.status in (0, 200) for one in self.outcomes)

    def quantile(self, share: float) -> dict[str, float]:
        """Seconds of those that were answered: first token (of streams), whole."""
        done = [one for one in self.outcomes if one.status == 200]
        firsts = [one.first for one in done if one.first is not None]
        return {"first": quantile(firsts, share), "whole": quantile([one.whole for one in done], share)}


def _stream_problem(body: bytes) -> str:
    ended = body.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in body
    return "" if ended else f"a stream ended with {body[-300:]!r}"


def _text_of(body: bytes, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


class Look(NamedTuple):
    """What the server's processes hold."""

    rss: int
    threads: int
    files: int
    nodes: int
    tree_bytes: int


async def looked(served: Served, client: LoadClient) -> Look:
    """Now."""
    heard = await client.ask("/metrics")
    lines = [line.rpartition(" ") for line in heard.body.decode().splitlines() if not line.startswith("#")]
    values = {name.partition(":")[2]: float(value) for name, _, value in lines}
    rss = threads = files = 0
    for pid in processes(served.process.pid):
        rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        threads += len(os.listdir(f"/proc/{pid}/task"))
        files += len(os.listdir(f"/proc/{pid}/fd"))
    return Look(rss, threads, files, int(values["prefix_cache_entries"]), int(values["prefix_cache_bytes"]))


def grown(looks: Sequence[Look]) -> list[str]:
    """What is more in the last fifth of the looks than in the second, beyond ROOM."""
    fifth = max(1, len(looks) // 5)
    found = []
    for name, room in ROOM.items():
        values = [getattr(look, name) for look in looks]
        before, after = statistics.median(values[fifth : 2 * fifth]), statistics.median(values[-fifth:])
        if after > before + room:
            found.append(f"{name}: {before:,.0f} in the second fifth, {after:,.0f} in the last")
    return found


class Load:
    """Asks one server."""

    def __init__(self, client: LoadClient, mix: Mix, seed: int) -> None:
        self._client, self._mix = client, mix
        self._chance = random.Random(seed + 1)
        self.phase = Phase()

    async def warm_up(self) -> None:
        """Have the shared documents read: this is done once, and not a part of the capacity."""
        for asked in self._mix.shared():
            await self._client.ask(CHAT, asked)

    async def capacity(self, seconds: float) -> float:
        """Requests a second that the server brings to an end when more come than it can take: their number doubles,
        each time for so many seconds, until a third and more are refused.
        """
        rate = FIRST_RATE
        while True:
            phase = await self.open(rate, seconds)
            if phase.wrong:
                raise AssertionError(f"{len(phase.wrong)} wrong answers, such as {phase.wrong[0]}")
            counts = phase.counts
            print(f"{rate:g} requests/s: {counts}", flush=True)
            if counts["refused"] > len(phase.outcomes) / 3:
                return phase.ended / seconds
            rate *= 2

    async def open(self, rate: float, seconds: float) -> Phase:
        """Requests that come by a Poisson process, so many a second, and wait for nobody; all of them have ended."""
        phase, began, due = Phase(), time.perf_counter(), 0.0
        self.phase = phase
        running: set[asyncio.Task[None]] = set()

        async def one(at: float) -> None:
            late = time.perf_counter() - began - at
            asked = self._mix.next()
            heard = await self._client.ask(CHAT, asked.body, gone_after=asked.gone_after, due=began + at)
            phase.add(at, late, asked, heard)

        while (due := due + self._chance.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            task = asyncio.create_task(one(due))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        return phase


async def known(client: LoadClient) -> tuple[str, float]:
    """The answer to a question whose answer is known, and the seconds to it."""
    messages = [{"role": "system", "content": document()}, {"role": "user", "content": QUESTION}]
    heard = await client.ask(CHAT, {"model": "bundled", "messages": messages, "max_tokens": 16, "temperature": 0})
    answer = _text_of(heard.body, stream=False) if heard.status == 200 else f"{heard.status} {heard.body!r}"
    return answer, heard.whole


async def watched(served: Served, client: LoadClient, load: Load, every: float, looks: list[Look]) -> None:
    """Look again and again, until it is cancelled."""
    while True:
        await asyncio.sleep(every)
        looks.append(await looked(served, client))
        print(f"{looks[-1]} {load.phase.counts} p99 {load.phase.quantile(0.99)}", flush=True)


async def drained(served: Served, client: LoadClient, mix: Mix) -> list[str]:
    """End the server by SIGTERM while it answers. What went wrong."""
    asked = [{**mix.next().body, "stream": True} for _ in range(4)]
    under_way = [asyncio.create_task(client.ask(CHAT, body)) for body in asked]
    await asyncio.sleep(0.5)
    status = await asyncio.to_thread(served.end)
    heard = [one for one in await asyncio.gather(*under_way) if one.status != 503]  # these were not taken in
    cut = [problem for one in heard if (problem := str(one.status) if one.status != 200 else _stream_problem(one.body))]
    problems = [f"{len(cut)} of {len(heard)} answers under way were cut by SIGTERM: {cut[0]}"] if cut else []
    return problems if status == 0 else [*problems, f"the server ended with status {status}"]


async def measured(served: Served, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a whole run, and what is wrong with them."""
    address = urlsplit(served.url)
    assert address.hostname is not None and address.port is not None
    with contextlib.closing(LoadClient(address.hostname, address.port)) as client:
        return await _measured(served, plan, client)


async def _measured(served: Served, plan: Plan, client: LoadClient) -> tuple[dict[str, Any], list[str]]:
    mix, seconds, looks = Mix(plan.seed, plan.documents, plan.new_tokens), plan.minutes * 60, list[Look]()
    load = Load(client, mix, plan.seed)
    before = await known(client)
    await load.warm_up()
    capacity = plan.capacity or await load.capacity(plan.round_minutes * 60)
    print(f"capacity: {capacity:.2f} requests/s", flush=True)
    calm = await load.open(BUSY * capacity, plan.calm_minutes * 60)
    print(f"at {BUSY:.0%}: {calm.counts}, p99 {calm.quantile(0.99)}", flush=True)
    watching = asyncio.create_task(watched(served, client, load, min(60.0, seconds / 15), looks))
    over = await load.open(plan.times * capacity, seconds)
    watching.cancel()
    after = await known(client)
    print(f"at {plan.times:g} times: {over.counts}, p99 {over.quantile(0.99)}", flush=True)
    if plan.save is not None:
        plan.save.write_text(json.dumps({"calm": calm.outcomes, "over": over.outcomes, "looks": looks}))
    tenths = [over.between(seconds * n / 10, seconds * (n + 1) / 10) for n in range(10)]
    usual, worst = calm.quantile(0.99), dict[str, float]()
    for name, value in usual.items():
        worst[name] = max(tenth.quantile(0.99)[name] for tenth in tenths) / value
    problems = calm.wrong[:5] + over.wrong[:5] + grown(looks)
    problems += [f"p99 of {name} is {times:.2f} times the usual" for name, times in worst.items() if times > WITHIN]
    if before[0] != after[0] or ANSWER not in after[0]:
        problems.append(f"the known question was answered {before[0]!r} before and {after[0]!r} after the load")
    if not over.counts["refused"]:
        problems.append("nothing was refused: this was no overload")
    problems += await drained(served, client, mix)
    numbers = {
        "capacity": capacity,
        "times_of_what_ended": len(over.outcomes) / max(1, over.ended),
        "over": {**over.counts, "p50": over.quantile(0.5), "p99": over.quantile(0.99)},
        "retry_after": dict(sorted(over.retries.items())),
        "tenths": [{**tenth.counts, "p99": tenth.quantile(0.99)} for tenth in tenths],
        "calm": {**calm.counts, "p50": calm.quantile(0.5), "p99": usual},
        "worst_times": worst,
        "client_late_p99": quantile([one.late for one in over.outcomes], 0.99),
        "looks": [list(look) for look in looks],
        "known_seconds": [before[1], after[1]],
    }
    return numbers, problems


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, metavar="N")
    parser.add_argument("--times", type=float, metavar="X", help="of the capacity (default: %(default)s)")
    parser.add_argument("--capacity", type=float, metavar="N", help="requests a second (default: it is measured)")
    parser.add_argument("--round-minutes", type=float, metavar="N", help="of measuring it (default: %(default)s)")
    parser.add_argument("--calm-minutes", type=float, metavar="N", help="at 90 %% of it (default: %(default)s)")
    parser.add_argument("--queue-timeout", default="2", metavar="S", help="the server's option (default: %(default)s)")
    parser.add_argument(
        "--prefix-cache-memory", default="1GiB", metavar="SIZE", help="the server's (default: %(default)s)"
    )
    parser.add_argument("--engine", default="process", help="the server's option (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="gets what came of each request, as JSON")
    parser.add_argument("--seed", type=int)
    parser.set_defaults(**vars(Plan()))
    args = parser.parse_args(arguments)
    plan = Plan(**{one.name: getattr(args, one.name) for one in fields(Plan) if hasattr(args, one.name)})
    options = (
        "--queue-timeout",
        args.queue_timeout,
        "--prefix-cache-memory",
        args.prefix_cache_memory,
        "--engine",
        args.engine,
    )
    with serving(*options) as served:
        numbers, problems = asyncio.run(measured(served, plan))
    print(json.dumps(numbers))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
