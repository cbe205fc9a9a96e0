"""Workloads of `bench serve`: requests, and when they come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import retrieval_attn as ra
from retrieval_attn_eval.bench.serve.call import Call
from retrieval_attn_eval.bench.serve.cuts import cuts
from retrieval_attn_eval.load.line import Block, Line
from retrieval_attn_eval.load.long_prompts import agent_lines, document_lines

__all__ = ["ANSWERS", "WORKLOADS", "Workload", "calls_of", "lines_of"]

WORKLOADS = ("clients", "document", "mixed", "documents", "agent", "trace")
ANSWERS = (100, 1024)
"""Tokens of mixed answers, least and most, before they are scaled."""

Ids = Callable[[int], list[int]]


@dataclass(frozen=True)
class Workload:
    """Requests to draw, or to take from a trace.

    Attributes:
        kind: one of WORKLOADS.
        requests: number of requests; of sessions for "agent".
        length: tokens of a prompt, or of the document. Mixed prompts have a quarter of it to all of it; it is the
            longest of "documents", and the longest prompt of an agent.
        question: tokens of a prompt's last part.
        tokens: tokens of an answer.
        scale: factor of mixed and traced answers' lengths.
        rate: arrivals per second. 0: all at once.
        speed: factor by which a trace runs faster than written.
        clients: clients of "documents" that send one request at a time, if all come at once.
        seed: seed of all draws.
    """

    kind: str
    requests: int
    length: int
    question: int
    tokens: int
    scale: float
    rate: float
    speed: float
    clients: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @property
    def longest_answer(self) -> int:
        """Tokens, of all workloads but a trace."""
        return self.tokens if self.kind != "mixed" else self.scaled(ANSWERS[1])

    def scaled(self, tokens: int) -> int:
        """Tokens of an answer that has so many unscaled."""
        return max(1, round(tokens * self.scale))


def lines_of(workload: Workload, trace: Sequence[Line]) -> list[Line]:
    """Return the requests in order of their arrival, as lines of blocks. trace: lines of the trace's file."""
    chance = random.Random(workload.seed)
    if workload.kind == "trace":
        return [_replayed(line, workload) for line in trace]
    arrivals = _arrivals(workload, chance)
    question, tokens = workload.question, workload.tokens
    if workload.kind == "agent":
        return agent_lines(workload.requests, workload.length, tokens, arrivals, workload.seed)
    if workload.kind == "documents":
        return document_lines(
            workload.requests, workload.length, question, tokens, arrivals, workload.clients, workload.seed
        )
    numbers = itertools.count(1)
    if workload.kind == "document":
        document = Block(0, workload.length)
        return [Line(arrival, (document, Block(next(numbers), question)), tokens) for arrival in arrivals]
    lines = []
    for arrival in arrivals:
        length = workload.length
        if workload.kind == "mixed":
            length = chance.randint(max(question + 1, length // 4), length)
            tokens = workload.scaled(chance.randint(*ANSWERS))
        blocks = (Block(next(numbers), length - question), Block(next(numbers), question))
        lines.append(Line(arrival, blocks, tokens))
    return lines


def calls_of(workload: Workload, lines: Sequence[Line], ids: Ids) -> list[Call]:
    """Return the requests for an engine.

    Args:
        workload: kind of the requests.
        lines: requests as `lines_of` returns them.
        ids: makes a new text of so many tokens, for a block.
    """
    texts: dict[Block, tuple[int, ...]] = {}
    for block in dict.fromkeys(block for line in lines for block in line.blocks):
        texts[block] = tuple(ids(block.tokens))
    if workload.kind in ("trace", "agent"):
        ends = cuts([line.blocks for line in lines])
    else:
        ends = [list(range(1, len(line.blocks) + 1)) for line in lines]
    calls, began = [], set[str]()
    for line, places in zip(lines, ends, strict=True):
        parts = tuple(
            tuple(token for block in line.blocks[start:end] for token in texts[block])
            for start, end in pairwise([0, *places])
        )
        # the first turn of a session is sent at its arrival, a turn without a delay too
        waits = line.session is not None and (line.delay is not None or line.session not in began)
        began |= {line.session} if waits and line.session is not None else set()
        request = ra.Request(parts, max_tokens=line.answer_tokens, draw=ra.SamplingParams(), stop_ids=frozenset())
        calls.append(Call(request, line.seconds, line.session if waits else None, line.delay or 0.0))
    return calls


def _replayed(line: Line, workload: Workload) -> Line:
    """A line of a trace at the workload's speed, with an answer of its scale."""
    delay = None if line.delay is None else line.delay / workload.speed
    seconds, tokens = line.seconds / workload.speed, workload.scaled(line.answer_tokens)
    return line._replace(seconds=seconds, answer_tokens=tokens, delay=delay)


def _arrivals(workload: Workload, chance: random.Random) -> list[float]:
    """Seconds: a Poisson process that begins with a request."""
    if workload.rate == 0:
        return [0.0] * workload.requests
    arrivals = [0.0]
    while len(arrivals) < workload.requests:
        arrivals.append(arrivals[-1] + chance.expovariate(workload.rate))
    return arrivals
