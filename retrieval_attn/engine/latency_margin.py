"""Margin: what is kept free between two tokens, because ticks take longer than expected. Imports no torch."""

from __future__ import annotations

__all__ = ["LatencyMargin"]

LATE_SHARE = 0.005
"""Of ticks that may take longer than expected and the margin: half of what a 99th percentile allows, for the first
ones come before the margin is known."""
STRIDE = 1 / 8
"""Of the time between two tokens, what the margin grows by at most, so that one long tick tells little."""


class LatencyMargin:
    """Seconds beyond what is expected that all but LATE_SHARE of ticks stay within.

    It grows where a tick exceeded it, and shrinks a little with every other one, so that both come to rest where so
    few exceed it (a stochastic gradient of the quantile's loss). Nothing is assumed of how times are distributed.
    """

    def __init__(self, inter_token_seconds: float) -> None:
        self._stride = STRIDE * inter_token_seconds
        self.seconds = 0.0

    def learn(self, expected: float, took: float) -> None:
        """A tick took so many seconds where so many were expected."""
        over = took - expected - self.seconds
        if over > 0:
            self.seconds += min(over, self._stride)
        else:
            self.seconds = max(self.seconds - LATE_SHARE * self._stride, 0.0)
