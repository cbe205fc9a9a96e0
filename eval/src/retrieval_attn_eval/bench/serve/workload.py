"""Workloads of `bench serve`: requests, and when they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import retrieval_attn as ra
from retrieval_attn_eval.bench.serve.call import Call
from retrieval_attn_eval.bench.serve.cuts import cuts
from retrieval_attn_eval.load.line import Block, Line

__all__ = ["ANSWERS", "WORKLOADS", "Workload", "calls_of"]

WORKLOADS = ("clients", "document", "mixed", "trace")
ANSWERS = (100, 1024)
"""Tokens of mixed answers, least and most, before they are scaled."""

Ids = Callable[[int], list[int]]


@dataclass(frozen=True)
class Workload:
    """kind: one of WORKLOADS. length: tokens of a prompt, or of the document; mixed prompts have a quarter of it to
    all of it. question: tokens of a prompt's last part. tokens: of an answer. scale: of mixed and traced answers'
    lengths. rate: arrivals a second, 0: all at once. speed: how much faster than written a trace runs.
    """

    kind: str
    requests: int
    length: int
    question: int
    tokens: int
    scale: float
    rate: float
    speed: float
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


def calls_of(workload: Workload, lines: Sequence[Line], ids: Ids) -> list[Call]:
    """Requests in the order of their arrival. lines: of the trace. ids: a new text of so many tokens."""
    chance = random.Random(workload.seed)
    if workload.kind == "trace":
        return _traced(workload, lines, ids)
    arrivals = _arrivals(workload, chance)
    if workload.kind == "document":
        document = tuple(ids(workload.length))
        return [
            Call(_request((document, tuple(ids(workload.question))), workload.tokens), arrival) for arrival in arrivals
        ]
    calls = []
    for arrival in arrivals:
        length, tokens = workload.length, workload.tokens
        if workload.kind == "mixed":
            length = chance.randint(max(workload.question + 1, workload.length // 4), workload.length)
            tokens = workload.scaled(chance.randint(*ANSWERS))
        prompt = tuple(ids(length))
        cut = length - workload.question
        calls.append(Call(_request((prompt[:cut], prompt[cut:]), tokens), arrival))
    return calls


def _request(parts: tuple[tuple[int, ...], ...], tokens: int) -> ra.Request:
    """Greedy, of a known number of tokens."""
    return ra.Request(parts, max_tokens=tokens, draw=ra.SamplingParams(), stop_ids=frozenset())


def _arrivals(workload: Workload, chance: random.Random) -> list[float]:
    """Seconds: a Poisson process that begins with a request."""
    if workload.rate == 0:
        return [0.0] * workload.requests
    arrivals = [0.0]
    while len(arrivals) < workload.requests:
        arrivals.append(arrivals[-1] + chance.expovariate(workload.rate))
    return arrivals


def _traced(workload: Workload, lines: Sequence[Line], ids: Ids) -> list[Call]:
    texts: dict[Block, tuple[int, ...]] = {}
    for block in dict.fromkeys(block for line in lines for block in line.blocks):
        texts[block] = tuple(ids(block.tokens))
    calls = []
    for line, ends in zip(lines, cuts([line.blocks for line in lines]), strict=True):
        parts = tuple(
            tuple(token for block in line.blocks[start:end] for token in texts[block])
            for start, end in pairwise([0, *ends])
        )
        calls.append(Call(_request(parts, workload.scaled(line.answer_tokens)), line.seconds / workload.speed))
    return calls
