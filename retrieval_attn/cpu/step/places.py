"""Where the tables of a step lie: each row has places of constant size, so that one that changes is written alone."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.samples import columns_for
from retrieval_attn.cpu.step.buffers import zeros
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.cpu.step.tables import RowTables
from retrieval_attn.index.task.descriptor import ENTRY, RANGE, TASK
from retrieval_attn.index.task.search import address_of

_ENTRY_WORDS, _RANGE_WORDS, _TASK_WORDS = (dtype.itemsize // 8 for dtype in (ENTRY, RANGE, TASK))
_FIRST_RANGE = 1  # column of the words of an entry
_ENTRY, _RANGE = 1, 2  # columns of the words of a task, behind its turn
_PLACED = slice(1, 6)  # of a range: keys_at, values_at, low, high, first
_HIGH, _MEMBERS = 4, 8


class TaskTable:
    """See the module. entries, ranges, tasks: arrays of ENTRY, RANGE and TASK; count: tasks that there are."""

    def __init__(self, rows: int, heads: int, ranges: int, tasks: int) -> None:
        """ranges, tasks: of a row at most, all heads together. Every row is empty."""
        self.entries, self.ranges = zeros(rows * heads, dtype=ENTRY), zeros(rows * ranges, dtype=RANGE)
        self.tasks, self.count = zeros(rows * tasks, dtype=TASK), 0
        self._heads, self._room = heads, ranges
        self._entry_words = self.entries.view(np.int64).reshape(rows, heads, _ENTRY_WORDS)
        self._range_words = self.ranges.view(np.int64).reshape(rows, ranges, _RANGE_WORDS)
        self._own_tasks = np.zeros((rows, tasks, 1 + _TASK_WORDS), np.int64)
        self._counts = np.zeros(rows, np.int64)
        self._number = np.arange(heads)[:, None]
        self._of: list[RowTables | None] = [None] * rows
        self._ordered = True

    def write(self, row: int, tables: RowTables, pieces: Sequence[SearchRange]) -> None:
        """Write a row's tables, and where its pieces lie; `order` then comes before the next run."""
        heads = self._heads
        ranges = self._range_words[row, : heads * len(pieces)].reshape(heads, len(pieces), _RANGE_WORDS)
        if self._of[row] is not tables:
            entries, count = self._entry_words[row, :, : tables.entries.shape[1]], len(tables.tasks)
            entries[:] = tables.entries
            entries[:, _FIRST_RANGE] += row * self._room
            ranges[:] = tables.ranges
            own = tables.tasks.copy()
            own[:, _ENTRY] += row * heads
            own[:, _RANGE] += row * self._room
            held = self._own_tasks[row]
            if self._counts[row] != count or not np.array_equal(held[:count], own):
                self._counts[row], held[:count], self._ordered = count, own, False
            self._of[row] = tables
        for number, piece in enumerate(pieces):
            keys, values, members = piece.keys, piece.values, piece.members
            first = np.array([address_of(keys), address_of(values), piece.low, piece.high, piece.first])
            ranges[:, number, _PLACED] = first + self._number * [keys.strides[0], values.strides[0], 0, 0, 0]
            if members is not None:
                ranges[:, number, _MEMBERS] = address_of(members) + self._number[:, 0] * members.strides[0]
            else:
                ranges[:, number, _MEMBERS] = 0

    def forget(self, row: int) -> None:
        """A row is not as it was written: `write` writes all of it."""
        self._of[row] = None

    def order(self) -> None:
        """Put the tasks of all rows in the order of their turns, those of a row together."""
        if not self._ordered:
            words = self.tasks.view(np.int64).reshape(-1, _TASK_WORDS)
            self.count, self._ordered = int(_merge_turns(self._own_tasks, self._counts, words)), True

    def extend(self, row: int, pieces: int, high: int) -> None:
        """The last of so many pieces of a row ends before token `high` now."""
        self._range_words[row, pieces - 1 : self._heads * pieces : pieces, _HIGH] = high

    def place_clusters(self, row: int, table: ClusterTable | None) -> None:
        """Write a row's clusters into its entries; None: it has none."""
        own = self.entries[row * self._heads : (row + 1) * self._heads]
        own["clusters"] = 0 if table is None else table.clusters
        own["sampled"] = 0 if table is None else table.sampled
        own["columns"] = 0 if table is None else columns_for(table.clusters * table.sampled)
        if table is not None:
            arrays: dict[str, npt.NDArray[Any]] = {
                "counts_at": table.counts,
                "means_at": table.means,
                "sums_at": table.value_sums,
            }
            if table.samples is not None:
                arrays["samples_at"] = table.samples.packed
            for name, array in arrays.items():
                own[name] = address_of(array) + array.strides[0] * self._number[:, 0]

    def place_budgets(self, counts: npt.NDArray[np.int64] | None) -> None:
        """Write where each entry's keys per query lie, of entry after entry; None: all queries attend to as many."""
        self.entries["budgets_at"] = 0
        if counts is not None:
            count = len(self.entries)
            self.entries["budgets_at"] = address_of(counts) + counts.nbytes // count * np.arange(count)


@njit(nogil=True, cache=True)
def _merge_turns(own, counts, tasks):
    """tasks = own[row, : counts[row]] of all rows by their turns, without these; returns how many."""
    at = np.zeros(len(counts), np.int64)
    left, count = counts.sum(), 0
    while count < left:
        turn = np.int64(-1)
        for row in range(len(counts)):
            if at[row] < counts[row] and (turn < 0 or own[row, at[row], 0] < turn):
                turn = own[row, at[row], 0]
        for row in range(len(counts)):
            while at[row] < counts[row] and own[row, at[row], 0] == turn:
                for word in range(tasks.shape[1]):
                    tasks[count, word] = own[row, at[row], 1 + word]
                at[row] += 1
                count += 1
    return count


def compile_places() -> None:
    """Compile what puts tasks in order, or load it from Numba's cache."""
    _merge_turns.compile("int64(int64[:,:,::1], int64[::1], int64[:,::1])")
