"""Filling a context to its token target: from below, never above, with about one tokenisation per sample.

Token counts add up over the units of a haystack (exactly for byte-level BPE, nearly for others), so a draft's
estimate finds the number of units, one count of the whole text checks it, and what is left over or too much moves
the number by the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["MIN_FILL", "Draft", "Fitted", "fit"]

MIN_FILL = 0.99
_CLOSE = 0.002  # of the target: near enough not to count the text again
_MARGIN = 0.001  # of the target: what an estimate by averages keeps free at first
_ROUNDS = 16


class Draft:
    """A sample before its size is known: everything but the number of haystack units.

    context(n) has n units and n >= lowest; estimate(n) is about its tokens and does not fall with n.
    exact: the estimate adds up real counts; otherwise it uses averages.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]
    lowest: int = 1
    highest: int | None = None
    exact: bool = True

    def estimate(self, n: int) -> float:
        raise NotImplementedError

    def context(self, n: int) -> str:
        raise NotImplementedError

    def tune(self, n: int, room: int) -> bool:
        """Use up to `room` tokens that are too few for another unit; context(n) changes.  False: cannot."""
        return False

    def untune(self) -> None:
        """Take back what `tune` did."""

    def references(self, n: int) -> tuple[str, ...]:
        """Answers to the question about n units."""
        return self.answers

    def meta(self, n: int, context: str) -> dict[str, Any]:
        """JSON values worth keeping with the sample."""
        return {}

    def most(self, tokens: float) -> int:
        """Largest number of units whose estimate is at most `tokens`; `lowest` if none is."""
        low, step = self.lowest, 64
        high = low + step
        while self.estimate(self._capped(high)) <= tokens and self._capped(high) == high:
            low, step = high, step * 2
            high += step
        high = self._capped(high)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.estimate(middle) <= tokens else (low, middle - 1)
        return low

    def _capped(self, n: int) -> int:
        return n if self.highest is None else min(n, self.highest)


@dataclass(frozen=True)
class Fitted:
    """A context of its final size.  tokens: of the context alone."""

    context: str
    tokens: int
    units: int
    tuned: bool


class _Search:
    """Where the search for one draft's size stands."""

    def __init__(self, draft: Draft, budget: int, target: int) -> None:
        self.draft, self.budget, self.target = draft, budget, target
        self.n = draft.most(budget - (0 if draft.exact else _MARGIN * target))
        self.text = draft.context(self.n)
        self.best: Fitted | None = None
        self.over: int | None = None
        self.done = False
        self._tuning = 0  # tokens given to the running attempt
        self._attempts = 3

    def see(self, tokens: int) -> None:
        """Take the count of `text` and choose what to try next."""
        if self._tuning:
            self._see_tuned(tokens)
            return
        room = self.budget - tokens
        if room >= 0 and (self.best is None or self.n > self.best.units):
            self.best = Fitted(self.text, tokens, self.n, False)
        if room < 0:
            self.over = self.n if self.over is None else min(self.over, self.n)
        following = self.n
        if not 0 <= room <= _CLOSE * self.target:
            following = self.draft.most(self.budget - (tokens - self.draft.estimate(self.n)))
        if self.over is not None:
            following = min(following, self.over - 1)
        if self.best is not None and following <= self.best.units:
            self._tune(self.budget - self.best.tokens)
            return
        if following < self.draft.lowest:
            self.done = True
            return
        self.n, self.text = following, self.draft.context(following)

    def _tune(self, room: int) -> None:
        assert self.best is not None
        enough = room <= (1 - MIN_FILL) * self.target
        if enough or not self._attempts or not self.draft.tune(self.best.units, room):
            self.done = True
            return
        self._attempts -= 1
        self._tuning = room
        self.text = self.draft.context(self.best.units)

    def _see_tuned(self, tokens: int) -> None:
        assert self.best is not None
        room, self._tuning = self._tuning, 0
        if tokens <= self.budget:
            self.best = Fitted(self.text, tokens, self.best.units, True)
            self.done = True
            return
        self.draft.untune()
        self._tune(room - (tokens - self.budget))


def fit(drafts: Sequence[Draft], counter: TokenCounter, target: int, around: Sequence[int], name: str) -> list[Fitted]:
    """Size every draft to its target.

    around: tokens of each sample that are not its context (head, question, answer prefix, answer).
    Raises ConfigError, with what is needed, if even the smallest context does not fit.
    """
    searches = [_Search(d, target - used, target) for d, used in zip(drafts, around, strict=True)]
    for _ in range(_ROUNDS):
        active = [search for search in searches if not search.done]
        if not active:
            break
        for search, tokens in zip(active, counter.counts([s.text for s in active]), strict=True):
            search.see(tokens)
    fitted = []
    for search, used in zip(searches, around, strict=True):
        if search.best is None:
            draft = search.draft
            needed = used + counter.counts([draft.context(draft.lowest)])[0]
            raise ConfigError(
                f"length {target} is too short for {name}: question, answer and the smallest context need {needed}"
                " tokens; give a longer length or leave the task out"
            )
        fitted.append(search.best)
    return fitted
