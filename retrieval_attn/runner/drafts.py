"""Drafts: the tokens that a sequence may continue with, looked up in its own ids, and how many of them to verify.

Prompt lookup (Saxena 2023; Yang et al. 2023, "Inference with Reference"): an answer that quotes its prompt repeats
n-grams of it. A forward of the newest token and its drafts verifies all of them (Leviathan et al. 2023, section 2). The
sampler chooses each token as without drafts, by the noise of its position, and a draft counts if it is that token.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = [
    "BLOCKS", "DRAFTED_TOKENS", "BlockCosts", "BlockPlans", "Draft", "DraftBlock", "DraftLength", "Drafter", "Drafts",
    "LookupDrafter", "compile_lookup",
]  # fmt: skip

Ids = NDArray[np.int32]
DRAFT_SIZES = (1, 3, 7, 15)
"""Numbers of drafts in a forward: with the newest token 2, 4, 8 or 16, so that few plans of host steps are kept."""
BLOCKS = tuple(1 + drafts for drafts in DRAFT_SIZES)
"""Tokens of a captured step with drafts."""
DRAFTED_TOKENS = BLOCKS[-1]
"""New tokens of one forward in which some are drafts: a CPU's kernels multiply as many rows at once."""
NGRAM = 3
"""Last tokens that must occur before for a draft, but for one next to the last draft's source."""
REACH = 32
"""Tokens around the place where a quotation would go on, in which one equal token is enough: behind an edit."""
LONGEST_MATCH = 32
CERTAIN = 8
"""Matched tokens from which a source is remembered over an edit."""
RESUMED = 4
"""Tokens elsewhere that are as good a sign as one of several where a quotation would go on."""
CANDIDATES = 32
"""Earlier occurrences that are compared."""
FIRST_CAPACITY = 1024
NONE = -1


class Draft(NamedTuple):
    """Proposed tokens. certainty: newest tokens of the sequence that precede their source, too; more if the source goes
    on where the last one ended.
    """

    tokens: list[int]
    certainty: int


class Drafter(ABC):
    """Propose the next tokens of one sequence. Proposals never change a text, only the time that it takes."""

    @abstractmethod
    def extend(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens to the sequence."""

    @abstractmethod
    def propose(self, most: int) -> Draft:
        """Return up to `most` tokens that may follow; none without a guess."""


class LookupDrafter(Drafter):
    """Propose what followed an earlier occurrence of the newest tokens: the longest match of the last ones compared.

    Hash chains of n-grams: O(1) per token, 12 to 20 bytes of host memory for each.
    """

    def __init__(self, ids: Sequence[int] | NDArray[Any] = ()) -> None:
        """ids: of the prompt."""
        self._length, self._source = 0, NONE  # source: of the next token if the last long quotation goes on
        self._allocate(FIRST_CAPACITY)
        self.extend(ids)

    def extend(self, ids: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens to the sequence."""
        new = np.asarray(ids, np.int32)
        start, stop = self._length, self._length + len(new)
        if stop > len(self._ids):
            known = self._ids[:start]
            self._allocate(1 << max(stop, 2 * len(self._ids)).bit_length())
            self._ids[:start] = known
            start = 0
        self._ids[self._length : stop] = new
        self._source += len(new) if self._source != NONE else 0
        self._length = stop
        _chain(self._ids, start, stop, self._heads, self._earlier)

    def propose(self, most: int) -> Draft:
        """Return up to `most` tokens that may follow; none without a guess."""
        if most < 1 or self._length <= NGRAM:
            return Draft([], 0)
        tokens = np.empty(most, np.int32)
        source, certainty = _look_up(self._ids, self._length, self._earlier, self._source, tokens)
        if not certainty:
            return Draft([], 0)
        if certainty >= CERTAIN:
            self._source = source
        return Draft(tokens.tolist(), certainty)

    def _allocate(self, capacity: int) -> None:
        self._ids, self._earlier = np.zeros(capacity, np.int32), np.full(capacity, NONE, np.int32)
        self._heads = np.full(2 * capacity, NONE, np.int32)  # a power of two


@njit(nogil=True, cache=True)
def _chain(ids, start, stop, heads, earlier):
    """Link each token from `start` on to the last token before it that ends an n-gram of the same hash."""
    mask = np.uint64(len(heads) - 1)
    for last in range(max(start, NGRAM - 1), stop):
        key = np.uint64(0)
        for i in range(last - NGRAM + 1, last + 1):
            key = (key ^ np.uint64(np.uint32(ids[i]))) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        place = key & mask
        earlier[last] = heads[place]
        heads[place] = last


@njit(nogil=True, cache=True)
def _matching(ids, place, last):
    """Return how many tokens up to `place` are those up to `last`, of the last ones compared."""
    count = 0
    while count < LONGEST_MATCH and count <= place and ids[place - count] == ids[last - count]:
        count += 1
    return count


@njit(nogil=True, cache=True)
def _look_up(ids, length, earlier, near, tokens):
    """Write the tokens after the best match; returns the place of the first and the certainty, 0 for no match.

    near: place of the first if a quotation goes on, which is preferred among equal matches; NONE: the newest is.
    """
    last = length - 1
    best, matched, certain = -1, 0, 0
    for far in range(2 * REACH + 1 if near != NONE else 0):
        place = near - 1 + ((far + 1) // 2 if far % 2 else -(far // 2))  # nearest first
        count = _matching(ids, place, last) if 0 <= place < last else 0
        if count > matched:
            best, matched, certain = place, count, min(LONGEST_MATCH, RESUMED * count if count > 1 else 1)
    place = earlier[last]
    for _ in range(CANDIDATES):
        if place < 0:
            break
        count = _matching(ids, place, last)
        if count >= NGRAM and count > matched:
            best, matched, certain = place, count, count
        place = earlier[place]
    for i in range(len(tokens) if matched else 0):
        source = best + 1 + i  # behind the end the drafts themselves go on: a period
        tokens[i] = ids[source] if source <= last else tokens[source - length]
    return best + 1, certain


def compile_lookup() -> None:
    """Compile what proposes drafts, or load it from Numba's cache."""
    LookupDrafter((1, 2, 3) * 3).propose(1)


EXTRA = 0.15
"""Time of one more token in a forward, in forwards of one token, before any was measured."""
LEAST_EXTRA = 0.02
FADING = 0.97
"""Weight of older steps for each newer one."""
OUTLIER = 3.0
RECENT = 15
"""Steps of one size whose times are kept."""
MEASURED = 3
"""Steps of one token before the first block whose time is compared with theirs."""


class BlockCosts:
    """Measure the time of a step by its tokens: that of the last steps of one size, for others a line through all."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weight, tokens, seconds, tokens^2, tokens * seconds
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))  # by tokens

    def note(self, tokens: int, seconds: float) -> None:
        """Take in a step of `tokens` tokens. One that the machine delayed counts as little more than expected."""
        if self._sums[0] > 1:
            start, slope = self._line()
            seconds = min(seconds, OUTLIER * (start + slope * tokens))
        self._sums = FADING * self._sums + (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._recent[tokens].append(seconds)

    @property
    def has_plain(self) -> bool:
        """Return whether the time of a step of one token is known."""
        return len(self._recent[1]) >= MEASURED

    def spent(self, seconds: float) -> float:
        """Return the time of a step beyond that of one token, in such steps; `has_plain` is True."""
        return seconds / statistics.median(self._recent[1]) - 1.0

    def extra(self, rows: int, drafts: int) -> float:
        """Return the time that drafts add to a step of `rows` tokens, in such steps.

        The quickest of the last steps of a size counts: the first one may be delayed, and then the line is lower.
        """
        if not self._sums[0]:
            return EXTRA * drafts
        plain, block = self._recent[rows], self._recent[rows + drafts]
        is_known = len(plain) >= MEASURED and len(block) > 0
        measured = min(block) / statistics.median(plain) - 1.0 if is_known else math.inf
        if is_known and len(block) > 1:
            return max(LEAST_EXTRA * drafts, measured)
        start, slope = self._line()
        expected = drafts * min(1.0, max(LEAST_EXTRA, slope / (start + slope * rows)))
        return max(LEAST_EXTRA * drafts, min(expected, measured))

    def seconds(self, tokens: int) -> float:
        """Return the expected time of a step of `tokens` tokens; one was measured."""
        start, slope = self._line()
        return start + slope * tokens

    def _line(self) -> tuple[float, float]:
        weight, tokens, seconds, squares, products = self._sums
        mean, level = tokens / weight, seconds / weight
        spread, common = squares / weight - mean * mean, products / weight - mean * level
        usual = EXTRA * level / (1 + EXTRA * (mean - 1))
        slope = min(max((common + usual) / (spread + 1), 0.0), level / mean)
        return level - slope * mean, slope


ACCEPTANCE = (0.5, 0.4, 0.55, 0.7, 0.85, 0.92)
"""Share of accepted drafts before any was verified, by class of certainty."""
CERTAINTIES = (NGRAM, 4, 8, 16, 32)
"""Least certainty of each later class."""
PRIOR, FORGETTING = 2.0, 0.9
SPENT_SHARE = 0.01
"""Time, as a share of that of all tokens, that may be spent in vain."""
LOAN = 0.5
"""Steps of one token that may be spent in vain before the first token."""
AHEAD = 0.5
"""Share of a step in which the host plans the search of a larger block."""
LONGEST_PAUSE = 128
"""Tokens without drafts after many blocks that did not pay."""


class DraftLength:
    """Choose how many drafts to verify. A text of 256 tokens takes at most 1.02 of its time without drafts.

    A draft is worth a forward of one more token if it is accepted more often than the token costs. Blocks in turn that
    do not pay double a pause. balance: steps saved so far. drafted, accepted: tokens.
    """

    def __init__(self) -> None:
        self.balance, self.drafted, self.accepted = LOAN, 0, 0
        self._known = [(share * PRIOR, PRIOR) for share in ACCEPTANCE]
        self._misses = self._pause = 0  # blocks in turn that did not pay; tokens until the next one

    def note_token(self) -> None:
        """Count a token of the text."""
        self.balance += SPENT_SHARE
        self._pause -= self._pause > 0

    def choose(self, draft: Draft, most: int, extra: Callable[[int], float], surplus: float = 0.0) -> int:
        """Return the number of drafts to verify, at most `most`.

        extra: see `BlockCosts.extra`, of a number. surplus: what the balance must allow in addition.
        """
        if self._pause:
            return 0
        hits, tries = self._known[_class_of(draft.certainty)]
        chance, best, gain = hits / tries, 0, 0.0
        for count in DRAFT_SIZES:
            cost = extra(count)
            if count > min(most, len(draft.tokens)):
                break
            if cost + surplus > self.balance:
                continue
            expected = count * chance if chance > 0.999 else chance * (1 - chance**count) / (1 - chance)
            if expected - cost > gain:
                best, gain = count, expected - cost
        return best

    def note(self, certainty: int, drafted: int, accepted: int, extra: float) -> None:
        """Take in a verified draft. extra: its cost, measured if possible."""
        place = _class_of(certainty)
        hits, tries = (FORGETTING * one for one in self._known[place])
        prior, missing = ACCEPTANCE[place], (1 - FORGETTING) * PRIOR
        self._known[place] = (hits + missing * prior + accepted, tries + missing + accepted + (accepted < drafted))
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.balance += accepted - extra
        self._misses = self._misses + 1 if accepted < extra else 0
        self._pause = min(LONGEST_PAUSE, (1 << self._misses) - 2) if self._misses else 0


def _class_of(certainty: int) -> int:
    return sum(certainty >= least for least in CERTAINTIES)


class DraftBlock(NamedTuple):
    """Drafts for one forward behind the newest token. certainty, extra: see `Draft` and `BlockCosts`."""

    drafts: list[int]
    certainty: int = 0
    extra: float = 0.0


class BlockPlans(ABC):
    """Which captured steps of several tokens can be launched at once."""

    @abstractmethod
    def is_ready(self, tokens: int) -> bool:
        """Return whether a step of `tokens` tokens need not wait for the plan of its search."""

    @abstractmethod
    def plan_later(self, tokens: int, seconds: float) -> None:
        """Plan such a step along with others, for at most about `seconds` in each of these."""


def _extra_of_ready(plans: BlockPlans, extra: Callable[[int], float], drafts: int) -> float:
    return extra(drafts) if plans.is_ready(1 + drafts) else math.inf


class Drafts:
    """The drafts of one sequence: its drafter, and how many it verifies at once.

    costs: times of captured steps, from the last token of the step before, so that they contain idle time of the
    device. Steps that drafts delayed are not among them: the delay is taken off the balance.
    """

    def __init__(self, drafter: Drafter) -> None:
        """drafter: has the ids of the prompt."""
        self._drafter = drafter
        self.length, self.tokens, self.costs = DraftLength(), 0, BlockCosts()
        self._ended: float | None = None
        self._delayed = self._waits = False  # this step, the next one
        self._spent: float | None = None  # by the last block, in steps
        self._captures = 0  # of the graphs, when the last step ended
        self._surplus = 0.0  # expected steps of a block beyond its extra

    def add(self, tokens: Sequence[int]) -> None:
        """Append the newest tokens of the answer. tokens counts them."""
        self._drafter.extend(tokens)
        self.tokens += len(tokens)
        for _ in tokens:
            self.length.note_token()

    def block(self, most: int, extra: Callable[[int], float], plans: BlockPlans | None = None) -> DraftBlock:
        """Return what to verify in the next step: up to `most` drafts, or none.

        extra: their cost by their number. plans: of steps; those that are not ready are planned. None: all are ready.
        """
        draft = self._drafter.propose(min(most, DRAFT_SIZES[-1]))
        count = self.length.choose(draft, most, extra, self._surplus) if draft.tokens else 0
        if plans is not None and count and not plans.is_ready(1 + count):
            wanted = 1 + count
            count = self.length.choose(draft, count - 1, partial(_extra_of_ready, plans, extra), self._surplus)
            plans.plan_later(wanted, AHEAD * self.costs.seconds(1 + count))
        return DraftBlock(draft.tokens[:count], draft.certainty, extra(count)) if count else DraftBlock([])

    def timed_block(self, most: int, plans: BlockPlans) -> DraftBlock:
        """Return drafts for a step that `end_step` times; none until the time of a step of one token is known."""
        if most < 1 or not self.costs.has_plain:
            return DraftBlock([])
        return self.block(most, partial(self.costs.extra, 1), plans)

    def wait(self) -> None:
        """Note that the step after the present one is not launched early, because drafts are expected."""
        self._waits = True

    def restart(self, now: float | None = None) -> None:
        """Time the next step from now on, in seconds; None: do not time it, but the one after it."""
        self._ended = now

    def end_replay(self, tokens: int, captures: int, delay: float) -> None:
        """Record the time of a captured step of `tokens` tokens whose first token was read, unless it was captured now.

        captures: count of the step's graphs. delay: seconds of plans in it.
        """
        if self._ended is not None:
            self._ended += delay
        before, self._captures = self._captures, captures
        if captures != before:
            self.restart()
        self.end_step(tokens, time.perf_counter())

    def end_step(self, tokens: int, now: float) -> None:
        """Record the time of a step of `tokens` tokens when its first token is read; `note` records a block."""
        began, self._ended = self._ended, now
        delayed, self._delayed, self._waits = self._delayed, tokens > 1 or self._waits, False
        if began is None:
            return
        if tokens == 1 and delayed and self.costs.has_plain:
            self.length.balance -= min(1.0, self.costs.spent(now - began))
            return
        if tokens > 1 and self.costs.has_plain:
            self._spent = self.costs.spent(now - began)
        self.costs.note(tokens, now - began)

    def note(self, block: DraftBlock, accepted: int) -> None:
        """Take in how many of the drafts of a block were right."""
        if not block.drafts:
            return
        extra = block.extra
        spent, self._spent = extra if self._spent is None else self._spent, None
        spent = min(spent, OUTLIER * (1 + extra) - 1)
        self._surplus = (self._surplus + max(0.0, spent - extra)) / 2
        self.length.note(block.certainty, len(block.drafts), accepted, spent)
