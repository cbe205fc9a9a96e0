"""Conversations as CachedAttention found them in ShareGPT: their turns, and how long they get.

From the paper (USENIX ATC 2024, section 4): 5.75 turns on average, 73 % of sessions with several, at most 40; 47 % of
the sessions longer than 2K tokens, 30 % longer than 4K. Not in the paper: the shapes. Turns and lengths are lognormal
here; a session's mean tokens per turn are independent of its turns.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

__all__ = ["Statistics", "turn_tokens"]


@dataclass(frozen=True)
class Statistics:
    """mean_turns, most_turns: of a session; single: share of those with one; over_2k, over_4k: of those with more
    tokens. most_tokens: longer ones are made so long, in proportion.
    """

    mean_turns: float = 5.75
    single: float = 0.27
    most_turns: int = 40
    over_2k: float = 0.47
    over_4k: float = 0.30
    most_tokens: int | None = None


def turn_tokens(sessions: int, draw: random.Random, found: Statistics | None = None) -> list[list[int]]:
    """Of so many sessions, the tokens of each turn: the question and its answer together."""
    found = Statistics() if found is None else found
    normal = statistics.NormalDist()
    near, far = normal.inv_cdf(1 - found.over_2k), normal.inv_cdf(1 - found.over_4k)
    spread = math.log(2) / (far - near)
    location = math.log(2048) - near * spread
    turns_at, turns_spread = _turn_spread(found)
    counts = [min(math.ceil(math.exp(draw.gauss(turns_at, turns_spread))), found.most_turns) for _ in range(sessions)]
    # what of the lengths' spread the number of turns leaves: tokens per turn
    logs = [math.log(count) for count in counts]
    mean_log, rest = statistics.fmean(logs), math.sqrt(max(spread**2 - statistics.pvariance(logs), 0.0))
    made = []
    for count in counts:
        length = math.exp(location + math.log(count) - mean_log + draw.gauss(0, rest))
        if found.most_tokens is not None:
            length = min(length, found.most_tokens)
        shares = [draw.expovariate(1) for _ in range(count)]
        made.append([max(round(length * share / sum(shares)), 1) for share in shares])
    return made


def _turn_spread(found: Statistics) -> tuple[float, float]:
    """Location and spread of a lognormal whose whole numbers, rounded up, have this mean and this share of ones."""
    normal = statistics.NormalDist()
    low, high = 0.1, 3.0
    for _ in range(60):
        spread = (low + high) / 2
        location = -spread * normal.inv_cdf(found.single)
        tails = [1 - normal.cdf((math.log(turn) - location) / spread) for turn in range(1, found.most_turns)]
        low, high = (spread, high) if 1 + sum(tails) < found.mean_turns else (low, spread)
    return location, spread
