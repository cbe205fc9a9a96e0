"""HeadBudgets: how many keys each query head attends to, chosen by what more keys take off its output's error.

Sampled queries attend with a few numbers of keys and to all of them. The squared error that is left, sinks and window
merged, is weighed against keys: heads that gain most per key get more, under one sum for the layer. (By the share that
is estimated instead, KL to full attention fell less, docs/archive/log.md: a share says nothing about values.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import Partial, merge_partials
from retrieval_attn.errors import ConfigError, ShapeError

LEVELS = (25, 50, 100, 200, 400)
"""Keys that a head may get."""
SAMPLED_QUERIES = 16
"""Per query head. More changed nothing."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeadBudgets:
    """Keys that each query head of a layer attends to at most. Raises ConfigError for none, or fewer than one."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ConfigError(f"every query head needs at least 1 key, got {self.counts}")

    @property
    def most(self) -> int:
        """The largest."""
        return max(self.counts)


def budgets_of(
    top_k: int | HeadBudgets | tuple[HeadBudgets, ...], rows: int
) -> tuple[tuple[HeadBudgets, ...], tuple[int, ...]]:
    """The budgets of each row, none where there are none, and the most keys of a head of each. Raises ConfigError."""
    if not isinstance(top_k, HeadBudgets | tuple):
        return (), (top_k,) * rows
    budgets = top_k if isinstance(top_k, tuple) else (top_k,) * rows
    if len(budgets) != rows:
        raise ConfigError(f"{rows} rows need budgets each, got those of {len(budgets)}; give them as a tuple")
    return budgets, tuple(one.most for one in budgets)


def budget_counts(budgets: Sequence[HeadBudgets], q_heads: int, positions: int) -> npt.NDArray[np.int64]:
    """Keys per query, (rows, q_heads, positions). Raises ShapeError for budgets of another number of heads."""
    for one in budgets:
        if len(one.counts) != q_heads:
            raise ShapeError(f"budgets of {len(one.counts)} heads were given for {q_heads} query heads")
    return np.tile(np.array([one.counts for one in budgets], np.int64)[..., None], (1, 1, positions))


def measured_errors(static: Partial, attend: Callable[[int | None], Any]) -> Floats:
    """Mean squared error of each head's output with each of LEVELS, (q_heads, levels).

    static: attention of sampled queries to the keys on the device, (q_heads, n, value_dim) and (q_heads, n) float32.
    attend: attention of these queries to their best k keys on the host, None: to all; has `out` and `lse`.
    """

    def whole(k: int | None) -> Floats:
        found = attend(k)
        out: Floats = merge_partials([static, (found.out, found.lse)])[0].astype(np.float64)
        return out

    exact = whole(None)
    return np.stack([((whole(k) - exact) ** 2).sum(axis=2).mean(axis=1) for k in LEVELS], axis=1)


def allocated(errors: Floats, mean: int) -> HeadBudgets:
    """One of LEVELS for each head, `mean` on average at most, by the errors that these leave, (heads, levels).

    Every head begins with the fewest; the step with the largest gain per key is taken as long as one fits. Of equal
    gains the first head's, and its smallest step. Errors that are not finite gain nothing.
    """
    heads = len(errors)
    at, left = np.zeros(heads, np.int64), heads * (mean - LEVELS[0])
    costs = np.array(LEVELS)
    while True:
        best: tuple[float, int, int] | None = None
        for head in range(heads):
            for level in range(at[head] + 1, len(LEVELS)):
                cost = int(costs[level] - costs[at[head]])
                gain = float(errors[head, at[head]] - errors[head, level]) / cost
                if cost <= left and gain > 0 and (best is None or gain > best[0]):
                    best = gain, head, level
        if best is None:
            return HeadBudgets(tuple(costs[at].tolist()))
        _, head, level = best
        left -= int(costs[level] - costs[at[head]])
        at[head] = level
