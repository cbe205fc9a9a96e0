"""Number of prefill chunks between two decode steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.resource_pool import ScheduledRequest

__all__ = ["LatencyMargin", "PrefillBudget", "chunk_kind"]


TAIL_QUANTILE = 0.005
"""Share of rounds that may take longer than expected plus the margin: half of what a 99th percentile allows."""
LEARNING_RATE = 1 / 8
"""Largest growth of the margin per round, as a share of the inter-token time, so that one outlier counts little."""


class LatencyMargin:
    """Estimates seconds by which all but TAIL_QUANTILE of the rounds exceed their expected duration.

    The margin grows when a round exceeds it and shrinks a little otherwise: a stochastic gradient of the quantile loss.
    It assumes no distribution.
    """

    def __init__(self, inter_token_seconds: float) -> None:
        self._rate = LEARNING_RATE * inter_token_seconds
        self.seconds = 0.0

    def learn(self, expected: float, took: float) -> None:
        """Update the margin with the expected and the measured seconds of a round."""
        over = took - expected - self.seconds
        if over > 0:
            self.seconds += min(over, self._rate)
        else:
            self.seconds = max(self.seconds - TAIL_QUANTILE * self._rate, 0.0)


LEAST_SHARE = 1 / 8
"""Least share of a step's duration for prefill in a round, even if the step alone exceeds the inter-token time."""
LEAST_ROOM = 1 / 4
"""Least share of the time left by a step for prefill, however uncertain the duration of its chunks."""
ROUNDING = 1e-6
"""Rounding error of sums of seconds, as a share of a chunk."""
PATIENCE = 64
"""Rounds without a chunk after which a prefill gets one, whatever was measured."""
FEW_TOKENS = 64
"""Chunks of fewer tokens take as long as one of this many."""
LONG_TURN = 4
"""A long prefill that short ones overtake gets a chunk once in this many rounds."""


SHORT, LONG, END, IMAGE = "short", "long", "end", "image"
"""Kinds of chunks: of short prompts, chunks of a long one, what ends a layer's pass of a long one, layers of a vision
tower."""


def chunk_kind(entry: ScheduledRequest) -> str:
    """Return the kind of the next chunk of a request."""
    return entry.next_kind if entry.next_kind != "chunk" else LONG if entry.is_long else SHORT


ALONE_SECONDS = 0.1
"""Time of the chunks that are granted at once while no sequence decodes, at least: a new request waits for them."""


class PrefillBudget:
    """Divides the time that decoding leaves among prefills, by the measured durations of steps and chunks.

    The chunks of a round are all of short prompts, all of one long prompt, or one end of a layer's pass of it, so that
    the seconds per chunk are known for each kind. While sequences decode, prefill gets the whole chunks that fit into
    what a step leaves of inter_token_seconds, and at least LEAST_SHARE of the step. If no chunk fits, the time is saved
    up until one does. A safety margin stays free: without it half of the rounds would exceed the inter-token time.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decode = 0.0
        self._seconds_per_chunk: dict[str, tuple[tuple[float, float], ...]] = dict.fromkeys(
            (SHORT, LONG, END, IMAGE), ((0.0, 1.0),)
        )
        self._saved = 0.0
        self._patience = PATIENCE
        self._long_waits = 0
        self._margin = LatencyMargin(limits.inter_token_seconds)
        self._expected: tuple[float, float] | None = None  # of the tick under way: when it began, its seconds

    def measured(self, read: Mapping[str, int], entries: Mapping[str, ScheduledRequest], chunk_seconds: float) -> None:
        """Store the mean seconds of the chunks in `read`; the larger of the last two means counts.

        entries: requests as they were when the chunks were granted.
        """
        done = [(entries[name], chunks) for name, chunks in read.items() if chunks > 0 and name in entries]
        kinds = {chunk_kind(entry) for entry, _ in done}
        if chunk_seconds > 0 and len(kinds) == 1:
            tokens = sum(chunks * self._tokens(entry) for entry, chunks in done) / sum(chunks for _, chunks in done)
            kind = kinds.pop()
            self._seconds_per_chunk[kind] = (self._seconds_per_chunk[kind][-1], (chunk_seconds, tokens))

    def measured_step(self, rows: int, seconds: float) -> None:
        """Store the duration of a step of `rows` sequences."""
        if rows and seconds > 0:
            self._decode = seconds

    def plan(self, reading: Iterable[ScheduledRequest], rows: int, now: float) -> tuple[tuple[str, int], ...]:
        """Return the chunks of each prefill in a round with a step of `rows` sequences.

        Interactive requests come first, each kind by age. now: seconds. The time since the last call updates the
        margin.
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
        read = sum(chunks * self._seconds(entries[name]) for name, chunks in shares)
        if rows and self._decode and read:
            self._expected = now, self._step(rows) + read
        return shares

    def _step(self, rows: int) -> float:
        """Return the expected seconds of a step of `rows` sequences."""
        return self._decode if rows else 0.0

    def _share(self, turn: Iterable[ScheduledRequest], rows: int) -> Iterator[tuple[str, int]]:
        limits, step = self._limits, self._step(rows)
        left = limits.inter_token_seconds - step if rows else max(limits.inter_token_seconds, ALONE_SECONDS)
        room = max(left - self._margin.seconds if rows else left, left * LEAST_ROOM, step * LEAST_SHARE)
        for number, entry in enumerate(turn):
            chunk = self._seconds(entry)
            chunks = int(room / chunk + ROUNDING) if chunk > 0 else 0
            if number == 0 and chunks == 0:
                self._saved += room
                self._patience -= 1
                chunks = int(rows == 0 or self._saved >= chunk or self._patience <= 0)
            if chunks <= 0:
                break
            self._saved, self._patience = 0.0, PATIENCE
            # a prompt of several parts, or with smaller chunks than planned, takes more chunks than were counted: who
            # is beyond them may need as many as fit
            counted = limits.chunks(entry.job) - entry.chunks_done
            share = 1 if entry.next_kind == END else min(counted, chunks) if counted > 0 else chunks
            yield entry.job.id, share
            room -= share * chunk

    def _tokens(self, entry: ScheduledRequest) -> int:
        """Return the tokens of a request's next chunk; the end of a layer's pass covers the whole prompt, a chunk of an
        image none.
        """
        if entry.next_kind == IMAGE:
            return FEW_TOKENS
        unread = entry.job.unread_tokens
        return max(unread if entry.next_kind == END else min(unread, self._limits.chunk_tokens), FEW_TOKENS)

    def _seconds(self, entry: ScheduledRequest) -> float:
        """Return the expected seconds of a request's next chunk, 0 if none was measured."""
        tokens, kind = self._tokens(entry), chunk_kind(entry)
        *before, last = (seconds * max(tokens / measured, 1.0) for seconds, measured in self._seconds_per_chunk[kind])
        # the chunks of a long prompt take longer and longer, until the next layer begins with its first
        trend = 2 * last - before[0] if before and before[0] > 0 and kind == LONG else 0.0
        return max(*before, last, trend)
