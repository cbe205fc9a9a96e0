"""Rows of a step as last planned, and their tables: only changed parts are planned or written again.

Each row has slots of constant size in the tables, so that a changed row is written alone.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.cpu.cluster_sums import columns_for
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.step.tables import (
    Needs,
    RowTables,
    Searches,
    SearchRange,
    StepRequest,
    StepShape,
    batch_key_of,
    piece_searches,
    row_tables,
    spare_keys,
    zeros,
)
from retrieval_attn.errors import ConfigError
from retrieval_attn.index.task.search import CompiledSearch, address_of
from retrieval_attn.index.task.tasks import ENTRY, RANGE, TASK

_ENTRY_WORDS, _RANGE_WORDS, _TASK_WORDS = (dtype.itemsize // 8 for dtype in (ENTRY, RANGE, TASK))
_FIRST_RANGE = 1  # column of the words of an entry
_ENTRY, _RANGE = 1, 2  # columns of the words of a task, behind its turn
_PLACED = slice(1, 6)  # of a range: keys_at, values_at, low, high, first
_HIGH, _MEMBERS = 4, 8


class TaskTable:
    """Tables of all rows of a step. entries, ranges, tasks: arrays of ENTRY, RANGE and TASK; count: number of tasks."""

    def __init__(self, rows: int, heads: int, ranges: int, tasks: int) -> None:
        """Allocate empty rows. ranges, tasks: maxima of a row over all heads."""
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
        """Write a row's tables and the addresses of its ranges; call `order` before the next run."""
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
        """Mark a row as stale, so that `write` writes all of it."""
        self._of[row] = None

    def order(self) -> None:
        """Put the tasks of all rows in the order of their turns, those of a row together."""
        if not self._ordered:
            words = self.tasks.view(np.int64).reshape(-1, _TASK_WORDS)
            self.count, self._ordered = int(_merge_turns(self._own_tasks, self._counts, words)), True

    def extend(self, row: int, pieces: int, high: int) -> None:
        """Let the last of `pieces` ranges of a row end before token `high`."""
        self._range_words[row, pieces - 1 : self._heads * pieces : pieces, _HIGH] = high

    def place_clusters(self, row: int, table: ClusterTable | None) -> None:
        """Write a row's clusters into its entries; None: no clusters."""
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
        """Write the addresses of each entry's keys per query; None: the same number for all queries."""
        self.entries["budgets_at"] = 0
        if counts is not None:
            count = len(self.entries)
            self.entries["budgets_at"] = address_of(counts) + counts.nbytes // count * np.arange(count)


@njit(nogil=True, cache=True)
def _merge_turns(own, counts, tasks):
    """Merge own[row, : counts[row]] of all rows into `tasks` by their turns; return the number of tasks."""
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
    """Compile the ordering of tasks, or load it from Numba's cache."""
    _merge_turns.compile("int64(int64[:,:,::1], int64[::1], int64[:,::1])")


MOST_ALIKE = 8
"""Tables of a row that are kept for the next pieces that are searched like theirs."""
_Clusters = ClusterTable | None


class PlannedRow:
    """A row of a step, as it was planned last. pieces: None: it was not, or what it held is forgotten. tables: how they
    are searched. written: whether the step's places hold both.
    """

    def __init__(self) -> None:
        self.pieces: tuple[SearchRange, ...] | None = None
        self.tables: RowTables | None = None
        self.written = False
        self._request: StepRequest | None = None
        self._key: tuple[Any, ...] = ()
        self._spare: tuple[int, ...] = ()
        self._like: dict[object, RowTables] = {}  # of pieces that are searched alike, wherever they lie
        self._searches: dict[object, tuple[SearchRange, list[CompiledSearch]]] = {}

    def take(
        self,
        own: Sequence[SearchRange],
        request: StepRequest,
        shape: StepShape,
        make: Callable[[SearchRange, StepRequest], Searches],
    ) -> bool:
        """Be for these pieces, of one and the same shape every time; False: some have no compiled search.

        request: the row's own. make: what gives the searches of a piece. Raises ShapeError for arrays of another shape.
        """
        if request != self._request:
            self.forget()
            self._request, self._like = request, {}
        held, spare = self.pieces, tuple([0 if piece.indexes is None else spare_keys(piece) for piece in own])
        if held is not None and len(held) == len(own) and spare == self._spare and all(map(operator.is_, held, own)):
            return True
        key = tuple(request.signature(piece, piece is own[-1]) for piece in own)
        if held is None or key != self._key:
            for piece in own:
                piece.check(shape.fmt, shape[:3])
            batch_key = batch_key_of(own, request)
            tables = None if batch_key is None else self._like.get(batch_key)
            if tables is not None:
                self._searches = {}  # of other pieces
            else:
                tables = row_tables(own, request, shape, self._known_searches(request, make))
                if tables is None:
                    self.forget()
                    return False
                if batch_key is not None:
                    self._like = {**dict(list(self._like.items())[1 - MOST_ALIKE :]), batch_key: tables}
            self.tables, self.written = tables, False
        self.pieces, self._key, self._spare = tuple(own), key, spare
        return True

    def forget(self) -> None:
        """Release the pieces and the data made from them."""
        self.pieces, self.tables, self.written, self._searches = None, None, False, {}

    def _known_searches(
        self, request: StepRequest, make: Callable[[SearchRange, StepRequest], Searches]
    ) -> Callable[[SearchRange], Searches]:
        """Return a function from pieces of the row to searches, known ones or those of `make`; only these are kept."""
        known, self._searches = self._searches, {}

        def of(piece: SearchRange) -> Searches:
            key = request.signature(piece, False)
            found = known[key][1] if key in known else make(piece, request)
            if found is not None and piece.indexes is not None:  # a scan is made at once
                self._searches[key] = piece, found  # the piece lives: its arrays' ids are its own
            return found

        return of


class PlannedRows:
    """All rows of a step for one request and shape. places: where they lie; None: they have none yet.

    room, clusters: what the places and the step's memory have room for. is_written: the places hold all that was taken.
    """

    def __init__(
        self, request: StepRequest, rows: int, shape: StepShape, candidates: npt.NDArray[np.int32] | None
    ) -> None:
        """candidates: (entries * queries, room), see `StepBuffers`."""
        self.request, self.shape = request, shape
        count = shape.heads * shape.queries
        self._makers = [
            functools.partial(
                piece_searches,
                shape=shape,
                candidates=None if candidates is None else candidates[row * count : (row + 1) * count],
            )
            for row in range(rows)
        ]
        self._rows = [PlannedRow() for _ in range(rows)]
        self._tables: list[_Clusters] = [None] * rows
        self._placed: list[_Clusters | int] = [0] * rows  # of `_tables`; 0: none
        self._highs = [0] * rows
        self.places: TaskTable | None = None
        self.room, self.clusters, self.is_written = Needs(0, 0, 0, 0, 0, 0), 0, False

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def pieces(self) -> list[tuple[SearchRange, ...]]:
        """Those of each row, none of one that was forgotten."""
        return [row.pieces or () for row in self._rows]

    def take(self, rows: Sequence[Sequence[SearchRange]], keeps: Sequence[int], tables: Sequence[_Clusters]) -> bool:
        """Be for these pieces and clusters; False: some index has no compiled search. Raises ShapeError.

        keeps: as many keys each row is searched for, at most as many as the request says.
        """
        self.is_written, self._tables = False, list(tables)
        requests = {keep: self.request._replace(keep=keep) for keep in set(keeps)}
        for row, own, keep, make in zip(self._rows, rows, keeps, self._makers, strict=True):
            if not row.take(own, requests[keep], self.shape, make):
                return False
        self.is_written = all(row.written for row in self._rows) and all(map(operator.is_, tables, self._placed))
        return True

    def needs(self) -> tuple[Needs, int]:
        """Return the current needs of all rows, and the most clusters, or columns of samples, of a head."""
        needs = [row.tables.needs for row in self._rows if row.tables is not None]
        return functools.reduce(Needs.joined, needs), max(map(_clusters_of, self._tables), default=0)

    def fit(self) -> bool:
        """Whether the places and the step's memory have room for what they do not hold yet."""
        tables = [row.tables for row in self._rows if row.tables is not None and not row.written]
        clusters = [one for one, placed in zip(self._tables, self._placed, strict=True) if one is not placed]
        return (
            self.places is not None
            and all(own.needs.fits(self.room) for own in tables)
            and max(map(_clusters_of, clusters), default=0) <= self.clusters
        )

    def make_places(self, room: Needs, clusters: int) -> TaskTable:
        """Allocate places with `room`, of a step with memory for `clusters` clusters. `write` fills them."""
        self.places = TaskTable(len(self), self.shape.heads, _power(room.ranges), _power(room.tasks))
        self.room, self.clusters, self._placed = room, clusters, [0] * len(self)
        for row in self._rows:
            row.written = False
        return self.places

    def write(self) -> None:
        """Write to the places what they do not hold."""
        places = self.places
        assert places is not None
        for number, row in enumerate(self._rows):
            if not row.written and row.tables is not None and row.pieces is not None:
                places.write(number, row.tables, row.pieces)
                self._highs[number], row.written = row.pieces[-1].high if row.pieces else 0, True
        for number, table in enumerate(self._tables):
            if table is not self._placed[number]:
                places.place_clusters(number, table)
                self._placed[number] = table
        places.order()
        self.is_written = True

    def extend(self, highs: Sequence[int]) -> None:
        """See `LayerStep.extend`."""
        for number, (row, high) in enumerate(zip(self._rows, highs, strict=True)):
            own = row.pieces
            if not own or high == self._highs[number]:
                continue
            if not own[-1].low <= high <= own[-1].most:
                raise ConfigError(
                    f"high={high} must lie in {own[-1].low} .. {own[-1].most}, where keys are; plan again"
                )
            assert self.places is not None
            self.places.extend(number, len(own), high)
            self._highs[number] = high

    def python_error(self) -> BaseException | None:
        """Return the exception that a search in Python raised, once; None if none did."""
        searches = [search for row in self._rows if row.tables is not None for search in row.tables.searches]
        errors = [search.python.take_error() for search in searches if search.python is not None]
        return next((error for error in errors if error is not None), None)

    def forget(self, row: int | None = None) -> None:
        """Release the data of a row, None: of all, that is not the step's own."""
        for number, planned in enumerate(self._rows):
            if row in (None, number):
                planned.forget()
                self._tables[number], self._placed[number] = None, 0
                if self.places is not None:
                    self.places.forget(number)


def _clusters_of(table: _Clusters) -> int:
    """Numbers that a query keeps for the clusters of a head: one for each, or for each column of samples."""
    return 0 if table is None else max(table.clusters, columns_for(table.clusters * table.sampled))


def _power(number: int) -> int:
    """The next power of 2: a row that needs a little more has it."""
    return 1 << max(0, number - 1).bit_length()
