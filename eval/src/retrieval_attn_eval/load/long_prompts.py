"""Traces with long prompts: questions about documents of a Zipf distribution, and sessions of agents.

Both are drawn with a seed, as lines of blocks: `load replay` and `bench serve --url` send them to a server, and `bench
serve` to an engine. The turns of a session have a delay of 0: each is sent when the turn before it is answered. A
prompt repeats the trace's own answers, not the server's, as AgentX's replay does, so that two runs send equal prompts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from retrieval_attn_eval.load.line import Block, Line

__all__ = ["AGENT_TOKENS", "AgentProfile", "agent_lines", "document_lines"]

TEXTS, TEXT_REQUESTS = 50, 8
"""Maximum number of documents, and requests per document."""
LENGTHS = 16
"""The longest document over the shortest one, as 128K over 8K."""
ZIPF = 1.0
"""Exponent of the ranks: the n-th document is asked about in proportion to 1 / n."""

AGENT_TOKENS = 200 * 1024
"""Longest prompt of an agent; all other lengths of a session shrink with it."""


def document_lines(
    requests: int, longest: int, question: int, answer: int, arrivals: Sequence[float], clients: int, seed: int
) -> list[Line]:
    """Draw questions about documents.

    Args:
        requests: number of questions. There is a document for every TEXT_REQUESTS of them, at most TEXTS.
        longest: tokens of the longest document; the shortest has a sixteenth. Ratios of lengths are equal.
        question, answer: tokens of each.
        arrivals: seconds of each request. If all are 0, `clients` clients send them in turn, each after its last
            answer.
        clients: number of clients.
        seed: seed of the lengths and the draw.
    """
    draw, numbers = random.Random(seed), itertools.count(1)
    count = max(2, min(TEXTS, requests // TEXT_REQUESTS))
    shares = [LENGTHS ** (-number / (count - 1)) for number in range(count)]
    draw.shuffle(shares)
    texts = [Block(next(numbers), max(1, round(longest * share))) for share in shares]
    weights = [(rank + 1) ** -ZIPF for rank in range(count)]
    drawn = draw.choices(texts, weights, k=requests)
    closed = not any(arrivals)
    lines = []
    for number, (text, seconds) in enumerate(zip(drawn, arrivals, strict=True)):
        blocks = (text, Block(next(numbers), question))
        session = f"client-{number % clients}" if closed else None
        lines.append(Line(seconds, blocks, answer, session, 0.0 if closed and number >= clients else None))
    return lines


@dataclass(frozen=True)
class AgentProfile:
    """Shape of agents' sessions, with prompts of up to AGENT_TOKENS tokens.

    AgentX's traces have a theoretical hit rate of 96.8 %, and of 85.8 % if contexts are compacted. With the defaults a
    trace has 86 %; with limits=(1, 1) and kept=0.85, so that most turns only append, it has 97 %.

    Attributes:
        turns: least and most turns of a session.
        system: tokens of the system prompt with its tools, which all sessions share.
        task: tokens of the user's task.
        result: least and most tokens of a tool's result.
        limits: least and most tokens at which a session clears old results, as shares of the longest prompt.
        kept: share of the limit that is left after clearing.
        cleared: tokens in place of a cleared result.
    """

    turns: Sequence[int] = (100, 200)
    system: int = 12_000
    task: int = 1_500
    result: Sequence[int] = (1_024, 2_048)
    limits: Sequence[float] = (0.2, 1.0)
    kept: float = 0.955
    cleared: int = 12

    @classmethod
    def of_turns(cls, turns: int) -> AgentProfile:
        """Return the profile of sessions with `turns` turns, whose results fill the longest prompt in that time.

        They clear half of a prompt that is too long, and so only once or twice.
        """
        usual = cls()
        longer = sum(usual.turns) / 2 / turns
        results = [round(tokens * longer) for tokens in usual.result]
        return replace(usual, turns=(turns, turns), result=results, limits=(1.0, 1.0), kept=0.5)


def agent_lines(
    sessions: int, longest: int, answer: int, arrivals: Sequence[float], seed: int, profile: AgentProfile | None = None
) -> list[Line]:
    """Draw sessions of agents, in order of their turns.

    Args:
        sessions: number of sessions; all begin with the same system prompt.
        longest: tokens of the longest prompt. All lengths but the answer's are scaled by it.
        answer: tokens of each answer, which the next prompt repeats.
        arrivals: seconds at which each session begins.
        seed: seed of all draws.
        profile: shape of the sessions.
    """
    shape = AgentProfile() if profile is None else profile
    scale = longest / AGENT_TOKENS
    draw, numbers = random.Random(seed), itertools.count(2)

    def block(tokens: float) -> Block:
        return Block(next(numbers), max(1, round(tokens * scale)))

    system, cleared = Block(0, max(1, round(shape.system * scale))), Block(1, max(1, round(shape.cleared * scale)))
    turns: list[list[Line]] = []
    for number, began in zip(range(sessions), arrivals, strict=True):
        limit = round(longest * draw.uniform(*shape.limits))
        said, results, lines = [system, block(shape.task)], list[int](), list[Line]()
        for turn in range(draw.randint(*shape.turns)):
            if turn:
                results.append(len(said) + 1)
                said += [Block(next(numbers), answer), block(draw.uniform(*shape.result))]
                if _tokens(said) > limit:
                    _clear(said, results, round(limit * shape.kept), cleared)
            if _tokens(said) > longest:
                break  # of answers alone: nothing is left to clear
            lines.append(Line(began, tuple(said), answer, f"agent-{number}", 0.0 if turn else None))
        turns.append(lines)
    rounds = itertools.zip_longest(*turns)
    return sorted((line for lines in rounds for line in lines if line is not None), key=lambda line: line.seconds)


def _clear(said: list[Block], results: list[int], most: int, cleared: Block) -> None:
    """Replace the oldest results by a stub until the prompt has `most` tokens; the last result stays."""
    tokens = _tokens(said)
    while tokens > most and len(results) > 1:
        place = results.pop(0)
        tokens -= said[place].tokens - cleared.tokens
        said[place] = cleared


def _tokens(blocks: Sequence[Block]) -> int:
    return sum(block.tokens for block in blocks)
