"""How many cells of which readings fit between two steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.resource_pool import ScheduledRequest

__all__ = ["LatencyMargin", "PrefillBudget", "kind_of"]


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


LEAST_SHARE = 1 / 8
"""Of a step's time, what readings get beside it even where the step alone takes longer than it should."""
LEAST_ROOM = 1 / 4
"""Of the time that a step leaves, what readings get at least, however uncertain it is what they take."""
ROUNDING = 1e-6
"""Of a cell: what sums of seconds differ by, which is no reason for a cell less."""
PATIENCE = 64
"""Ticks without a cell after which a reading gets one, whatever was measured."""
FEW_TOKENS = 64
"""Fewer tokens in a cell take no less time: it is what is done once for all of them."""
LONG_TURN = 4
"""Among this many ticks with readings, a long one that short ones overtake gets one."""


SHORT, LONG, END = "short", "long", "end"
"""Kinds of cells: of short prompts, chunks of a long one, and what ends a layer's pass of a long one."""


def kind_of(entry: ScheduledRequest) -> str:
    """Of its next cell."""
    return END if entry.at_end else LONG if entry.is_long else SHORT


class PrefillBudget:
    """Shares out the time that decoding leaves, by what the last steps and cells took.

    A tick's cells are all of short readings, all chunks of one long reading, or one that ends a layer's pass of it: so
    that each kind's seconds per cell are known by themselves. While rows decode, whole cells are granted that fit what
    a step leaves of inter_token_seconds, and LEAST_SHARE of the step at least; where not even one fits, room is saved
    up until one does. A margin stays free, as ticks took longer than expected: else half of them would be late.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decode = 0.0
        self._cells: dict[str, tuple[tuple[float, float], ...]] = dict.fromkeys((SHORT, LONG, END), ((0.0, 1.0),))
        self._saved = 0.0
        self._patience = PATIENCE
        self._long_waits = 0
        self._margin = LatencyMargin(limits.inter_token_seconds)
        self._expected: tuple[float, float] | None = None  # of the tick under way: when it began, its seconds

    def measured(self, read: Mapping[str, int], entries: Mapping[str, ScheduledRequest], cell_seconds: float) -> None:
        """What a cell took, the mean of those in `read`; of the last two such numbers the larger is believed.

        entries: as they were when these cells were granted.
        """
        done = [(entries[name], cells) for name, cells in read.items() if cells > 0 and name in entries]
        kinds = {kind_of(entry) for entry, _ in done}
        if cell_seconds > 0 and len(kinds) == 1:
            tokens = sum(cells * self._tokens(entry) for entry, cells in done) / sum(cells for _, cells in done)
            kind = kinds.pop()
            self._cells[kind] = (self._cells[kind][-1], (cell_seconds, tokens))

    def measured_step(self, rows: int, seconds: float) -> None:
        """What a step of so many rows took."""
        if rows and seconds > 0:
            self._decode = seconds

    def plan(self, reading: Iterable[ScheduledRequest], rows: int, now: float) -> tuple[tuple[str, int], ...]:
        """Cells for readings, interactive ones first and each kind by age, beside a step of `rows` rows.

        now: seconds. What the last plan took until now is learned from.
        """
        if self._expected is not None:
            began, seconds = self._expected
            self._margin.learn(seconds, now - began)
        self._expected = None
        order = sorted(reading, key=lambda entry: (not entry.interactive, entry.order))
        short = [entry for entry in order if not entry.is_long]
        long = [entry for entry in order if entry.is_long][:1]
        if not order:
            self._saved, self._patience, self._long_waits = 0.0, PATIENCE, 0
            return ()
        if short and long and self._long_waits + 1 < LONG_TURN:
            self._long_waits += 1
            turn = short
        else:
            self._long_waits = 0
            turn = long or short
        shares = tuple(self._share(turn, rows))
        entries = {entry.job.id: entry for entry in order}
        read = sum(cells * self._seconds(entries[name]) for name, cells in shares)
        if rows and self._decode and read:
            self._expected = now, self._step(rows) + read
        return shares

    def _step(self, rows: int) -> float:
        """Seconds that a step of so many rows may take."""
        return self._decode if rows else 0.0

    def _share(self, turn: Iterable[ScheduledRequest], rows: int) -> Iterator[tuple[str, int]]:
        limits, step = self._limits, self._step(rows)
        left = limits.inter_token_seconds - step
        room = max(left - self._margin.seconds if rows else left, left * LEAST_ROOM, step * LEAST_SHARE)
        for number, entry in enumerate(turn):
            cell = self._seconds(entry)
            cells = int(room / cell + ROUNDING) if cell > 0 else 0
            if number == 0 and cells == 0:
                self._saved += room
                self._patience -= 1
                cells = int(rows == 0 or self._saved >= cell or self._patience <= 0)
            if cells <= 0:
                break
            self._saved, self._patience = 0.0, PATIENCE
            # a prompt of several parts, or with smaller chunks than planned, takes more cells than were counted: who
            # is beyond them may need as many as fit
            counted = limits.cells(entry.job) - entry.cells_done
            share = 1 if entry.at_end else min(counted, cells) if counted > 0 else cells
            yield entry.job.id, share
            room -= share * cell

    def _tokens(self, entry: ScheduledRequest) -> int:
        """Of a prompt in one cell: what ends a layer's pass is about all of them."""
        unread = entry.job.unread_tokens
        return max(unread if entry.at_end else min(unread, self._limits.chunk_tokens), FEW_TOKENS)

    def _seconds(self, entry: ScheduledRequest) -> float:
        """What a cell of a reading may take: as cells took, and more if it has more tokens. 0 if none was measured."""
        tokens, kind = self._tokens(entry), kind_of(entry)
        *before, last = (seconds * max(tokens / measured, 1.0) for seconds, measured in self._cells[kind])
        # the chunks of a long prompt take longer and longer, until the next layer begins with its first
        trend = 2 * last - before[0] if before and before[0] > 0 and kind == LONG else 0.0
        return max(*before, last, trend)
