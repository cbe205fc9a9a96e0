"""How many cells of which readings fit between two steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from retrieval_attn.batch.entry import Entry
from retrieval_attn.batch.limits import Limits

__all__ = ["Grants"]

LEAST_SHARE = 1 / 8
"""Of a step's time, what readings get beside it even where the step alone takes longer than it should."""
PATIENCE = 64
"""Ticks without a cell after which a reading gets one, whatever was measured."""
LONG_TURN = 4
"""Among this many ticks with readings, a long one that short ones overtake gets one."""


class Grants:
    """Shares out the time that decoding leaves, by what the last steps and cells took.

    A tick's cells are all of short readings or all of one long reading, whose chunks take longer: so that each kind's
    seconds per cell are known by themselves. While rows decode, whole cells are granted that fit what a step leaves of
    inter_token_seconds, and LEAST_SHARE of the step at least; where not even one fits, room is saved up until one does.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._decode = 0.0
        self._decoded_rows = 0
        self._cell = {False: (0.0, 0.0), True: (0.0, 0.0)}
        self._saved = 0.0
        self._patience = PATIENCE
        self._long_waits = 0

    def measured(self, read: Mapping[str, int], entries: Mapping[str, Entry], cell_seconds: float) -> None:
        """What a cell took, the mean of those in `read`; of the last two such numbers the larger is believed."""
        kinds = {entries[name].is_long for name, cells in read.items() if cells > 0 and name in entries}
        if cell_seconds > 0 and len(kinds) == 1:
            kind = kinds.pop()
            self._cell[kind] = (self._cell[kind][1], cell_seconds)

    def measured_step(self, rows: int, seconds: float) -> None:
        """What a step of so many rows took."""
        if rows and seconds > 0:
            self._decode, self._decoded_rows = seconds, rows

    def plan(self, reading: Iterable[Entry], rows: int) -> tuple[tuple[str, int], ...]:
        """Cells for readings, interactive ones first and each kind by age, beside a step of `rows` rows."""
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
        cells = self._cells(rows, turn[0].is_long)
        granted = []
        for entry in turn:
            if cells <= 0:
                break
            # chunks may have become smaller than planned: a reading that goes on gets at least one more
            share = min(max(self._limits.cells(entry.job) - entry.cells_done, 1), cells)
            granted.append((entry.job.id, share))
            cells -= share
        return tuple(granted)

    def _cells(self, rows: int, is_long: bool) -> int:
        cell = max(self._cell[is_long])
        if cell <= 0:
            return 1
        room = self._limits.inter_token_seconds
        if rows == 0:
            return max(int(room / cell), 1)
        step = self._decode + self._limits.row_seconds * max(rows - self._decoded_rows, 0)
        room = max(room - step, step * LEAST_SHARE)
        cells = int(room / cell)
        if cells == 0:
            self._saved += room
            self._patience -= 1
            cells = int(self._saved >= cell or self._patience <= 0)
        if cells:
            self._saved, self._patience = 0.0, PATIENCE
        return cells
