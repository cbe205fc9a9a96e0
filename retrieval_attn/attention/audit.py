"""HeadAudit: the error of a head's output, measured exactly for heads that are drawn, with a bound for all of them.

For every token of an eager step some heads of a layer are drawn; each one's output is compared with exact attention
over all its keys. Which heads are drawn is a hash of layer and position: the same for the same token, whatever else
runs. Drawn evenly and apart from each other, they bound the mean error of all heads of all audited layers and tokens
whatever the errors' distribution is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_ERROR = 1.0
"""An error as large as the output itself, or larger, counts as this: bounds hold for numbers of a known range."""
CONFIDENCE = 0.95
_MASK = (1 << 64) - 1


class HeadAudit:
    """Of one layer. heads: drawn per token, each among all. count, total, squares: of the errors in [0, MAX_ERROR]."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def draw(self, layer: int, position: int, q_heads: int) -> list[int]:
        """Query heads whose outputs for the token at `position` are measured; one may be drawn twice."""
        return [_mixed((layer << 48) ^ (number << 40) ^ position) % q_heads for number in range(self.heads)]

    def add(self, errors: npt.NDArray[np.float64]) -> None:
        """Relative errors of drawn heads, any shape, each drawn by itself."""
        clipped = np.minimum(errors, MAX_ERROR)
        self.count += clipped.size
        self.total += float(clipped.sum())
        self.squares += float((clipped**2).sum())


@dataclass(frozen=True)
class AuditResult:
    """samples: heads that were compared. mean_error: their mean relative error. upper_bound: what the mean over all
    heads exceeds with probability 1 - CONFIDENCE at most.
    """

    samples: int
    mean_error: float
    upper_bound: float


def audited(layers: Iterable[HeadAudit | None]) -> AuditResult | None:
    """What the audits of some layers say together; None if no head was compared."""
    found = [audit for audit in layers if audit is not None]
    count = sum(audit.count for audit in found)
    if not count:
        return None
    mean = sum(audit.total for audit in found) / count
    variance = max(0.0, sum(audit.squares for audit in found) - count * mean**2) / max(1, count - 1)
    return AuditResult(count, mean, upper_bound(count, mean, variance))


def upper_bound(count: int, mean: float, variance: float) -> float:
    """What the expected mean of `count` independent numbers in [0, MAX_ERROR] stays below with probability CONFIDENCE.

    mean, variance (by count - 1): of the numbers. The empirical Bernstein bound, without an assumption about their
    distribution (Maurer and Pontil 2009, theorem 4, with the range as unit); MAX_ERROR for fewer than two numbers.
    """
    if count < 2:
        return MAX_ERROR
    log = math.log(2 / (1 - CONFIDENCE))
    return min(MAX_ERROR, mean + math.sqrt(2 * variance * log / count) + MAX_ERROR * 7 * log / (3 * (count - 1)))


def _mixed(number: int) -> int:
    """A hash of 64 bits in which every bit depends on all bits (SplitMix64: Steele, Lea and Flood 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
