"""The tables of a step: which tasks search which ranges of tokens, and what their indexes gave to do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.samples import columns_for
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.index.flat_task import exact_search
from retrieval_attn.index.formats import Format
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.task.descriptor import ENTRY, RANGE, TASK
from retrieval_attn.index.task.search import SCAN_TOKENS, CompiledSearch, SearchRequest, address_of


class StepRequest(NamedTuple):
    """What a step is planned for, beside its pieces. parts: tasks that an entry should have at least.

    clusters: of each row, and samples of each, by which it estimates what it does not attend to; 0: it leaves that out.
    top_k: keys that a query attends to at most, of which `keeps` are chosen by score, of each row. named: keys that a
    device names, all of which are attended to, at least.
    """

    q_heads: int
    positions: int
    top_k: int
    scale: float
    softcap: float
    parts: int
    clusters: tuple[tuple[int, int], ...]
    keeps: tuple[int, ...]
    named: int

    def of_row(self, row: int) -> StepRequest:
        """What the tables of a row depend on."""
        return self._replace(clusters=(), keeps=self.keeps[row : row + 1])

    def parts_of(self, piece: SearchRange, tokens: int = SCAN_TOKENS) -> int:
        """Tasks that a scanned piece is cut into. The more, the more candidates are joined; results are the same."""
        return max(1, min(self.parts, -(-(piece.high - piece.low) // max(tokens, 4 * self.top_k))))

    def signature(self, piece: SearchRange, last: bool) -> tuple[int, ...]:
        """What a plan depends on of a piece, which the plan keeps alive (so ids stay taken)."""
        parts = self.parts_of(piece)
        arrays = id(piece.keys), id(piece.values), id(piece.members)
        fixed = *arrays, piece.low, piece.first, parts, 0 if last else piece.high
        if piece.indexes is None:
            return fixed
        # a search that sees few of the indexed keys needs a longer pool, so its length matters, though not to the token
        return *fixed, id(piece.indexes), piece.index_first, piece.version, (piece.most - piece.high) // 256


def likeness_of(rows: Sequence[Sequence[SearchRange]], request: StepRequest) -> tuple[Any, ...] | None:
    """What pieces of other memory must agree in to have the same tables but for the addresses of keys and values.

    None where tables hold more of the pieces: addresses of what their indexes hold.
    """
    found: list[tuple[Any, ...]] = [request]
    for keep, row in zip(request.keeps, rows, strict=True):
        for piece in row:
            searched: tuple[Any, ...] = ()
            if piece.indexes is not None:
                visible = piece.high - piece.low
                searched = tuple(index.search_likeness(keep, visible) for index in piece.indexes)
                if None in searched:
                    return None
            shapes = piece.keys.shape[::2], piece.values.shape[2]
            few = min(piece.high - piece.low, request.top_k + 32)  # as many decide about scratch memory
            end = 0 if piece is row[-1] else piece.high
            tokens = piece.low, piece.first, piece.index_first, end, few, request.parts_of(piece)
            found.append((*shapes, piece.members is None, *tokens, searched))
        found.append(())
    return tuple(found)


@dataclass(frozen=True)
class Tables:
    """entries, ranges, tasks: arrays of ENTRY, RANGE and TASK. searches: of the ranges."""

    entries: npt.NDArray[Any]
    ranges: npt.NDArray[Any]
    tasks: npt.NDArray[Any]
    searches: list[CompiledSearch]

    @property
    def lists(self) -> int:
        """Most candidate lists of an entry."""
        return int(self.entries["lists"].max())

    def most(self, name: str) -> int:
        """The largest of a number of all searches."""
        return max((getattr(search, name) for search in self.searches), default=0)


Searches = list[CompiledSearch] | None
"""Of a piece, one per key-value head; None: some head has no compiled search."""


class RowTables(NamedTuple):
    """Tables of one row of a step. pieces: what they name by address. Ranges are counted from 0, entries not.
    searches: of each range.
    """

    pieces: list[SearchRange]
    entries: npt.NDArray[Any]
    ranges: npt.NDArray[Any]
    tasks: npt.NDArray[np.int64]
    searches: list[CompiledSearch]


class MadeRows:
    """Tables of a step's rows as they were made last: of a row that has not changed since, they are taken again, and of
    one that has, the searches of its pieces that have not.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[object, RowTables]] = {}
        self._searches: dict[int, dict[object, tuple[SearchRange, list[CompiledSearch]]]] = {}

    def know_some(self, rows: Sequence[Sequence[SearchRange]], request: StepRequest) -> bool:
        """Whether the tables of some row are known."""
        return any(len(own) and self._find(row, _key(row, own, request)) is not None for row, own in enumerate(rows))

    def of(
        self, rows: Sequence[Sequence[SearchRange]], request: StepRequest, make: Callable[[int], RowTables | None]
    ) -> list[RowTables] | None:
        """The tables of all rows; make: those of a row that are not known. None: there are none for some row."""
        found: dict[int, tuple[object, RowTables]] = {}
        for row, own in enumerate(rows):
            key = _key(row, own, request)
            tables = self._find(row, key)
            tables = make(row) if tables is None else tables
            if tables is None:
                return None
            found[row] = key, tables
        self._rows = found
        self._searches = {row: own for row, own in self._searches.items() if row in found}
        return [tables for _, tables in found.values()]

    def searches(
        self, row: int, request: StepRequest, make: Callable[[SearchRange], Searches]
    ) -> Callable[[SearchRange], Searches]:
        """What gives the searches of a row's pieces: those known, or what `make` makes. Only these are known then."""
        known, self._searches[row] = self._searches.get(row, {}), {}

        def of(piece: SearchRange) -> Searches:
            key = request.of_row(row), request.signature(piece, False)
            found = known[key][1] if key in known else make(piece)
            if found is not None and piece.indexes is not None:  # a scan is made at once
                self._searches[row][key] = piece, found  # the piece lives: its arrays' ids are its own
            return found

        return of

    def forget(self, row: int | None = None) -> None:
        """Drop the tables of a row, None: of all, and what they keep alive."""
        if row is None:
            self._rows.clear()
            self._searches.clear()
        else:
            self._rows.pop(row, None)
            self._searches.pop(row, None)

    def _find(self, row: int, key: object) -> RowTables | None:
        known = self._rows.get(row)
        return known[1] if known is not None and known[0] == key else None


def _key(row: int, own: Sequence[SearchRange], request: StepRequest) -> object:
    """What the tables of a row depend on, but for the end of its last piece: who plans writes that anew."""
    return request.of_row(row), tuple(request.signature(piece, piece is own[-1]) for piece in own)


def make_tables(
    rows: Sequence[Sequence[SearchRange]],
    request: StepRequest,
    fmt: Format,
    sizes: tuple[int, int, int],
    candidates: npt.NDArray[np.int32] | None,
    made: MadeRows,
) -> Tables | None:
    """Tables for the pieces of each row; None if one of their indexes has no compiled search.

    sizes: key-value heads, queries of an entry, and queries padded. candidates: (entries * queries, room), see
    `StepBuffers`. made: by the same step before, with the same of all these.
    """

    def make(row: int) -> RowTables | None:
        entry = row * sizes[0] * sizes[1]
        own = None if candidates is None else candidates[entry : entry + sizes[0] * sizes[1]]
        asked = request.of_row(row)
        searches = made.searches(row, request, lambda piece: _piece_searches(piece, asked, fmt, sizes, own))
        return _row_tables(row, rows[row], request, sizes, searches)

    found = made.of(rows, request, make)
    if found is None:
        return None
    entries, ranges, tasks, count = [], [], [np.empty((0, 1 + len(TASK.names or ())), np.int64)], 0
    for one in found:
        own, own_tasks = one.entries.copy(), one.tasks.copy()
        own["first_range"] += count
        own_tasks[:, _RANGE_COLUMN] += count
        count += len(one.ranges)
        entries.append(own)
        ranges.append(one.ranges)
        tasks.append(own_tasks)
    searches = [search for one in found for search in one.searches]
    return Tables(np.concatenate(entries), _aligned(np.concatenate(ranges)), _ordered(tasks), searches)


_RANGE_COLUMN = 2  # of the rows of tasks: their turn comes first


def _row_tables(
    row: int,
    own: Sequence[SearchRange],
    request: StepRequest,
    sizes: tuple[int, int, int],
    searches: Callable[[SearchRange], Searches],
) -> RowTables | None:
    """Those of row `row`; see `make_tables`."""
    heads, queries, _ = sizes
    ranges, of_pieces = np.zeros((heads, len(own)), RANGE), []
    tasks: list[npt.NDArray[np.int64]] = [np.empty((0, 1 + len(TASK.names or ())), np.int64)]
    lists, counts = np.zeros(heads, np.int64), np.zeros(heads, np.int64)
    for number, piece in enumerate(own):
        found = searches(piece)
        if found is None:
            return None
        of_pieces.append(found)
        for alike, members in _alike(found):
            # a row for each head, a column for each task: (alike, tasks)
            entry, at = row * heads + alike[:, None], alike[:, None] * len(own) + number
            if members.by_query:
                parts = max(1, min(request.parts // queries, members.max_parts))
                place = np.arange(parts * queries)[None]
                tasks.append(_task_rows(place, -1, entry, at, place, parts, lists[alike, None] + place // queries))
            else:
                if members.first_task:
                    tasks.append(_task_rows(np.zeros((1, 1)), -1, entry, at, -1, 1, 0))
                    counts[alike] += 1
                parts = request.parts_of(piece, members.part_tokens)
                place = np.arange(parts)[None]
                # all heads' first parts first: what they find lets later parts drop most of their keys
                tasks.append(_task_rows(place, place, entry, at, place, parts, lists[alike, None] + place))
            counts[alike] += place.shape[1]
            lists[alike] += parts
        _place_range(ranges[:, number], piece, found)
    entries = np.zeros(heads, ENTRY)
    entries["lists"], entries["tasks"], entries["ranges"] = lists, counts, len(own)
    entries["first_range"] = np.arange(heads) * len(own)
    ordered = [found[head] for head in range(heads) for found in of_pieces]
    return RowTables(list(own), entries, ranges.reshape(-1), np.concatenate(tasks), ordered)


def _alike(searches: Sequence[CompiledSearch]) -> list[tuple[npt.NDArray[np.int64], CompiledSearch]]:
    """Heads whose searches are cut into tasks alike, and one of their searches."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for head, one in enumerate(searches):
        groups.setdefault((one.by_query, one.max_parts, one.part_tokens, one.first_task), []).append(head)
    return [(np.array(heads), searches[heads[0]]) for heads in groups.values()]


def _place_range(ranges: npt.NDArray[Any], piece: SearchRange, searches: Sequence[CompiledSearch]) -> None:
    """Write a piece, and how each head (one of `ranges` each) searches it."""
    heads = np.arange(len(ranges))
    arrays = {"keys_at": piece.keys, "values_at": piece.values, "members_at": piece.members}
    for name, array in arrays.items():
        if array is not None:
            ranges[name] = address_of(array) + array.strides[0] * heads
    ranges["low"], ranges["high"], ranges["first"] = piece.low, piece.high, piece.first
    ranges["search"] = [one.task for one in searches]
    ranges["index_at"] = [one.index_at for one in searches]
    ranges["kept"] = [one.kept for one in searches]


def _piece_searches(
    piece: SearchRange,
    request: StepRequest,
    fmt: Format,
    sizes: tuple[int, int, int],
    candidates: npt.NDArray[np.int32] | None,
) -> Searches:
    """How each head searches a piece; None: some head has no compiled search. request: `of_row`. candidates: of it."""
    heads, queries, padded = sizes
    visible, hidden = piece.high - piece.low, piece.low - piece.index_first
    found: list[CompiledSearch] = []
    for head in range(heads):
        search: CompiledSearch | None = exact_search(fmt)
        if piece.indexes is not None and (not hidden or piece.indexes[head].hides_first_keys):
            own = None if candidates is None else candidates[head * queries : (head + 1) * queries]
            (keep,), first = request.keeps, piece.index_first
            search = piece.indexes[head].compiled_search(
                SearchRequest(fmt, queries, padded, keep, first, visible, own, request.named, hidden)
            )
        if search is None:
            return None
        found.append(search)
    return found


def place_clusters(entries: npt.NDArray[Any], heads: int, tables: Sequence[ClusterTable | None]) -> None:
    """Write each row's clusters, with `heads` key-value heads, into its entries; None: it has none."""
    for row, table in enumerate(tables):
        own = entries[row * heads : (row + 1) * heads]
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
                own[name] = address_of(array) + array.strides[0] * np.arange(heads)


def place_budgets(entries: npt.NDArray[Any], counts: npt.NDArray[np.int64] | None) -> None:
    """Write where each entry's keys per query lie, of entry after entry; None: all queries attend to as many."""
    entries["budgets_at"] = 0
    if counts is not None:
        entries["budgets_at"] = address_of(counts) + counts.nbytes // len(entries) * np.arange(len(entries))


def _task_rows(like: npt.NDArray[Any], *columns: Any) -> npt.NDArray[np.int64]:
    """(tasks, 1 + fields of TASK) int64: the turn that a task takes, then the task, head after head.

    like: (1, tasks of a head). columns: numbers, (heads, 1), (1, tasks) or (heads, tasks); the entry is (heads, 1).
    """
    rows = np.empty((len(columns[1]), like.shape[1], len(columns)), np.int64)
    for column, values in enumerate(columns):
        rows[:, :, column] = values
    return rows.reshape(-1, len(columns))


def _ordered(tasks: list[npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
    """Tasks of all heads by their turns, those of a head together."""
    fields = len(TASK.names or ())
    rows = np.concatenate(tasks)
    order = np.lexsort((rows[:, 1], rows[:, 0]))  # stable
    array = aligned_empty((len(rows),), TASK)
    array.view(np.int64).reshape(len(rows), fields)[:] = rows[order, 1:]
    return array


def _aligned(records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = aligned_empty((len(records),), records.dtype)
    array[:] = records
    return array
