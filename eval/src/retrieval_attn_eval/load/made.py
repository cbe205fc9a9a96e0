"""Traces that are drawn: sessions that arrive by a Poisson process, with the turns and lengths of CachedAttention."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from retrieval_attn_eval.load.conversation import Conversation
from retrieval_attn_eval.load.line import Line
from retrieval_attn_eval.load.sessions import Statistics, turn_tokens

__all__ = ["Arrivals", "make_trace"]

QUESTION_SHARE = 0.32
"""Of a turn's tokens: questions of ShareGPT have 161 on average, answers 338 (vLLM, SOSP 2023, section 6.1)."""


@dataclass(frozen=True)
class Arrivals:
    """rate: sessions a second. think_seconds: from an answer to the next question, on average (exponential).
    token_seconds: an answer's time for each of its tokens; it goes into timestamps alone, for a replay waits.
    """

    rate: float = 1.0
    think_seconds: float = 60.0
    token_seconds: float = 0.03


def make_trace(sessions: int, arrivals: Arrivals, found: Statistics, seed: int) -> list[Line]:
    """The requests of so many sessions, in order of time; equal arguments give equal traces."""
    draw = random.Random(seed)
    numbers = itertools.count(1)
    lines: list[Line] = []
    began = 0.0
    for number, turns in enumerate(turn_tokens(sessions, draw, found)):
        conversation, history, seconds = Conversation(numbers), 0, began
        for turn, tokens in enumerate(turns):
            question = max(1, round(tokens * QUESTION_SHARE))
            answer = max(1, tokens - question)
            delay = draw.expovariate(1 / arrivals.think_seconds) if turn and arrivals.think_seconds else 0.0
            seconds += delay
            blocks = conversation.prompt(history + question)
            lines.append(Line(seconds, blocks, answer, f"s{number}", delay if turn else None))
            history += question + answer
            seconds += answer * arrivals.token_seconds
        began += draw.expovariate(arrivals.rate)
    return sorted(lines, key=lambda line: line.seconds)
