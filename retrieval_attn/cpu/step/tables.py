"""Inputs of a step's rows: ranges of tokens, tables of search tasks, and buffers.

Tables of one row depend neither on its position among other rows nor on addresses of its keys: `planned.py` adds both.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.pool import Pool
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.base import DeviceSearch, Searchable
from retrieval_attn.index.formats import Format
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.task.scans import exact_search
from retrieval_attn.index.task.search import (
    SCAN_TOKENS,
    CompiledSearch,
    ScratchLayout,
    SearchRequest,
    range_parts,
    scratch_offsets,
    task_lists,
    task_places,
)
from retrieval_attn.index.task.tasks import METER_WORDS, RANGE, TASK


class SearchRange(NamedTuple):
    """Tokens [low, high) of arrays of one sequence: its tokens first + low and so on.

    keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim): in one storage format, C-contiguous.
    indexes: one per head, beginning at token index_first <= low and covering all tokens; None: tokens are scanned
    exactly. version: changes whenever the indexes change. members: cluster of each token (kv_heads, tokens) uint8, if
    keys that are not attended are estimated.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    low: int
    high: int
    first: int
    indexes: tuple[Searchable, ...] | None = None
    index_first: int = 0
    version: int = 0
    members: npt.NDArray[np.uint8] | None = None

    @property
    def most(self) -> int:
        """Largest possible `high` by arrays and indexes."""
        covered = self.keys.shape[1] if not self.indexes else self.index_first + len(self.indexes[-1])
        return min(int(self.keys.shape[1]), covered)

    def check(self, fmt: Format, dims: tuple[int, int, int]) -> None:
        """Raise ShapeError unless arrays and ranges fit `fmt` and dims (heads, head_dim, value_dim)."""
        heads, dim, value_dim = dims
        keys, values = self.keys, self.values
        tokens = keys.shape[1]
        if keys.shape != (heads, tokens, fmt.width(dim)) or values.shape != (heads, tokens, fmt.width(value_dim)):
            raise ShapeError(
                f"pieces must be {heads} heads of {dim} and {value_dim}, got {keys.shape} and {values.shape}"
            )
        for array in (keys, values):
            if array.dtype != fmt.dtype or not array.flags.c_contiguous or not array.flags.aligned:
                raise ShapeError(
                    f"pieces must be C-contiguous {fmt.dtype}, got {array.dtype} of strides {array.strides}"
                )
        members = self.members
        if members is not None and (members.shape != (heads, tokens) or not members.flags.c_contiguous):
            raise ShapeError(
                f"clusters of ({heads}, {tokens}) keys must be so many and contiguous, got {members.shape}"
            )
        if self.indexes is not None and (len(self.indexes) != heads or not 0 <= self.index_first <= self.low):
            raise ShapeError(f"a piece of {heads} heads needs as many indexes, from token {self.low} on or earlier")
        if not 0 <= self.low <= self.high <= self.most or self.first + tokens >= 2**32 - 1 or self.first + self.low < 0:
            raise ShapeError(f"tokens [{self.low}, {self.high}) must lie in 0 .. {tokens}, all ids below 2**32 - 1")


FEW_TOKENS = 256
"""Tokens of a piece are rounded up to a multiple of it where they decide about scratch memory."""


class StepRequest(NamedTuple):
    """Inputs of a step's plan in addition to its pieces. parts: minimum tasks of an entry.

    top_k: keys that a query attends to at most, of which `keep` are chosen by score. named: keys that a device names,
    all of which are attended to, at least. calls_python: searches may run Python code, which a CUDA graph cannot.
    """

    q_heads: int
    positions: int
    top_k: int
    scale: float
    softcap: float
    parts: int
    keep: int
    named: int
    calls_python: bool = False

    def parts_of(self, piece: SearchRange) -> int:
        """Tasks that a scanned piece is cut into. The more, the more candidates are joined; results are the same."""
        return range_parts(self.parts, self.top_k, piece.high - piece.low, SCAN_TOKENS)

    def signature(self, piece: SearchRange, last: bool) -> tuple[int, ...]:
        """Return the values of a piece that a plan depends on; the plan keeps the piece alive, so ids stay unique."""
        parts = self.parts_of(piece)
        arrays = id(piece.keys), id(piece.values), id(piece.members)
        fixed = *arrays, piece.low, piece.first, parts, 0 if last else piece.high
        if piece.indexes is None:
            return fixed
        # a search that sees few of the indexed keys needs a longer pool, so its length matters, though not to the token
        return *fixed, id(piece.indexes), piece.index_first, piece.version, spare_keys(piece)

    def room_for(self, piece: SearchRange) -> int:
        """Candidates of a query that a scan of a piece keeps at most."""
        tokens = -(-(piece.high - piece.low) // FEW_TOKENS) * FEW_TOKENS
        return max(min(2 * self.top_k + 64, 2 * tokens + 1), self.top_k + 1)


class StepShape(NamedTuple):
    """Shape of a step's arrays: heads, dims and format of all pieces; queries of an entry, also as multiples of 4."""

    heads: int
    head_dim: int
    value_dim: int
    fmt: Format
    queries: int
    padded: int


class Needs(NamedTuple):
    """Memory that a row needs in a step: places for ranges and tasks; candidate lists of an entry, candidates by code
    in each, candidates of a scan, bytes of scratch of a search.
    """

    ranges: int
    tasks: int
    lists: int
    kept: int
    capacity: int
    scratch: int

    def fits(self, room: Needs) -> bool:
        """Whether there is room for it."""
        return all(map(operator.le, self, room))

    def joined(self, other: Needs) -> Needs:
        """Return the larger of both needs, field by field."""
        return Needs(*map(max, self, other))


Searches = list[CompiledSearch] | None
"""Of a piece, one per key-value head; None: one of them calls Python code in a step that cannot."""


class RowTables(NamedTuple):
    """Tables of one row, in words. entries (heads, 4): the first fields of ENTRY; ranges (heads, pieces, fields of
    RANGE): without what a piece says of itself; tasks (tasks, 1 + fields of TASK): the turn that a task takes, then the
    task, by turns and heads. Entries and ranges are counted from 0. searches: what has to live as long.
    """

    entries: npt.NDArray[np.int64]
    ranges: npt.NDArray[np.int64]
    tasks: npt.NDArray[np.int64]
    needs: Needs
    searches: list[CompiledSearch]


def batch_key_of(row: Sequence[SearchRange], request: StepRequest) -> tuple[Any, ...] | None:
    """Return the key that rows with equal tables share.

    None where tables hold more of the pieces: addresses of what their indexes hold.
    """
    found: list[tuple[Any, ...]] = []
    for piece in row:
        searched: tuple[Any, ...] = ()
        visible = piece.high - piece.low
        if piece.indexes is not None:
            if not all(isinstance(index, DeviceSearch) for index in piece.indexes):
                return None
            coded = [index for index in piece.indexes if isinstance(index, DeviceSearch)]
            searched = *(index.batch_key(request.keep, visible) for index in coded), piece.index_first
            searched += (piece.low - piece.index_first,)
        found.append((searched, request.parts_of(piece), request.room_for(piece)))
    return tuple(found)


def spare_keys(piece: SearchRange) -> int:
    """How many more keys its indexes have than it sees, not to the token."""
    return (piece.most - piece.high) // 256


def row_tables(
    own: Sequence[SearchRange], request: StepRequest, shape: StepShape, searches: Callable[[SearchRange], Searches]
) -> RowTables | None:
    """Return the tables of a row; None if one of its searches calls Python code and may not."""
    heads, queries = shape.heads, shape.queries
    ranges, of_pieces = np.zeros((heads, len(own)), RANGE), []
    tasks: list[npt.NDArray[np.int64]] = [np.empty((0, 1 + len(TASK.names or ())), np.int64)]
    lists, counts = np.zeros(heads, np.int64), np.zeros(heads, np.int64)
    for number, piece in enumerate(own):
        found = searches(piece)
        if found is None:
            return None
        of_pieces += found
        for alike, members in _alike(found):
            # a row for each head, a column for each task: (alike, tasks)
            entry, at = alike[:, None], alike[:, None] * len(own) + number
            tokens = piece.high - piece.low
            parts = task_lists(members, queries, request.top_k, tokens, request.parts)
            place = task_places(members, queries, parts)[None]
            if members.by_query:
                tasks.append(_task_rows(place, -1, entry, at, place, parts, lists[alike, None] + place // queries))
            else:
                if members.first_task:
                    tasks.append(_task_rows(np.zeros((1, 1)), -1, entry, at, -1, 1, 0))
                    counts[alike] += 1
                # all heads' first parts first: what they find lets later parts drop most of their keys
                tasks.append(_task_rows(place, place, entry, at, place, parts, lists[alike, None] + place))
            counts[alike] += place.shape[1]
            lists[alike] += parts
        ranges["search"][:, number] = [one.task for one in found]
        ranges["index_at"][:, number] = [one.index_at for one in found]
        ranges["kept"][:, number] = [one.kept for one in found]
    entries = np.stack([lists, np.arange(heads) * len(own), np.full(heads, len(own)), counts], axis=1)
    together = np.concatenate(tasks)
    together = together[np.lexsort((together[:, 1], together[:, 0]))]  # stable
    most = [max((getattr(one, name) for one in of_pieces), default=0) for name in ("kept", "capacity", "scratch")]
    capacity = max([most[1], *(request.room_for(piece) for piece in own)])
    words = ranges.view(np.int64).reshape(heads, len(own), RANGE.itemsize // 8)
    needs = Needs(heads * len(own), len(together), int(lists.max()), most[0], capacity, most[2])
    return RowTables(entries, words, together, needs, of_pieces)


def _alike(searches: Sequence[CompiledSearch]) -> list[tuple[npt.NDArray[np.int64], CompiledSearch]]:
    """Heads whose searches are cut into tasks alike, and one of their searches."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for head, one in enumerate(searches):
        groups.setdefault((one.by_query, one.max_parts, one.part_tokens, one.first_task), []).append(head)
    return [(np.array(heads), searches[heads[0]]) for heads in groups.values()]


def piece_searches(
    piece: SearchRange, request: StepRequest, shape: StepShape, candidates: npt.NDArray[np.int32] | None
) -> Searches:
    """Return the search of each head; None if one calls Python and may not. candidates: those of the row."""
    fmt, queries = shape.fmt, shape.queries
    visible, hidden = piece.high - piece.low, piece.low - piece.index_first
    found: list[CompiledSearch] = []
    for head in range(shape.heads):
        search = exact_search(fmt)
        if piece.indexes is not None:
            own = None if candidates is None else candidates[head * queries : (head + 1) * queries]
            keep, first = request.keep, piece.index_first
            search = piece.indexes[head].task(
                SearchRequest(fmt, queries, shape.padded, keep, first, visible, own, request.named, hidden)
            )
        if search.python is not None and not request.calls_python:
            return None
        found.append(search)
    return found


def _task_rows(like: npt.NDArray[Any], *columns: Any) -> npt.NDArray[np.int64]:
    """(tasks, 1 + fields of TASK) int64: the turn that a task takes, then the task, head after head.

    like: (1, tasks of a head). columns: numbers, (heads, 1), (1, tasks) or (heads, tasks); the entry is (heads, 1).
    """
    rows = np.empty((len(columns[1]), like.shape[1], len(columns)), np.int64)
    for column, values in enumerate(columns):
        rows[:, :, column] = values
    return rows.reshape(-1, len(columns))


class StepBuffers(NamedTuple):
    """External memory of a step, at the same addresses however often the step is planned.

    1-D and C-contiguous, at least as long as named. queries: rows * q_heads * positions * head_dim float32; out: the
    same with value_dim; lse: rows * q_heads * positions float32; meters: workers of the pool * METER_WORDS int64;
    descriptor: WORDS int64, initially zeros. candidates: (rows * q_heads * positions, room) int32, keys that a device
    names for ranges with its own index, as ids of that index, -1 for none; None: no device names keys. rest: as long as
    lse; None: memory of the step's own.
    """

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]
    descriptor: npt.NDArray[np.int64]
    candidates: npt.NDArray[np.int32] | None = None
    rest: npt.NDArray[np.float32] | None = None


class Memory(NamedTuple):
    """Arrays of queries, results and meters of a step."""

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]


def own_memory(shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> Memory:
    """Allocate memory for queries of `shape` (rows, q_heads, positions). dims: head_dim and value_dim."""
    queries, out = (zeros(*shape, dim, dtype=np.float32) for dim in dims)
    lse, rest = (zeros(*shape, dtype=np.float32) for _ in range(2))
    return Memory(queries, out, lse, rest, zeros(workers, METER_WORDS))


def memory_in(buffers: StepBuffers, shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> Memory:
    """Return views of external buffers in place of `own_memory`. Raises ShapeError if they are too small."""
    float32 = np.dtype(np.float32)
    rest = np.zeros(int(np.prod(shape)), np.float32) if buffers.rest is None else buffers.rest
    return Memory(
        _view("queries", buffers.queries, (*shape, dims[0]), float32),
        _view("out", buffers.out, (*shape, dims[1]), float32),
        _view("lse", buffers.lse, shape, float32),
        _view("rest", rest, shape, float32),
        _view("meters", buffers.meters, (workers, METER_WORDS), np.dtype(np.int64)),
    )


def scratch_places(
    layout: ScratchLayout, queries: tuple[int, int], sizes: tuple[int, int], capacity: int, joined: int, own: int
) -> dict[str, int]:
    """Return offsets of a worker's scratch arrays by the descriptor's fields.

    queries: queries of an entry, plain and padded. sizes: top_k, and the maximum of clusters or sample columns of a
    head.
    """
    (number, padded), (top_k, clusters) = queries, sizes
    return {
        "scores_at": layout.take(top_k * 4),
        "digits_at": layout.take(256 * 8),
        "owners_at": layout.take(top_k * 2),
        "left_at": layout.take(clusters * 4),
        "weights_at": layout.take(clusters * 4),
        "sampled_at": layout.take(clusters * 4),
        **scratch_offsets(layout, number, padded, top_k, capacity, joined, own),
    }


class Arena:
    """Scratch memory of a pool's workers, shared by all steps, since jobs of a pool never overlap. It only grows."""

    _all: weakref.WeakKeyDictionary[Pool, Arena] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._scratch = aligned_empty((CACHE_LINE,), np.uint8)
        self._candidates = aligned_empty((CACHE_LINE,), np.uint8)

    @classmethod
    def of(cls, pool: Pool) -> Arena:
        """The arena of `pool`."""
        with cls._lock:
            return cls._all.setdefault(pool, cls())

    def room(self, scratch: int, candidates: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return arrays of at least `scratch` and `candidates` bytes, kept by the caller; later calls replace them."""
        with self._lock:
            if self._scratch.nbytes < scratch:
                self._scratch = aligned_empty((scratch,), np.uint8)
            if self._candidates.nbytes < candidates:
                self._candidates = aligned_empty((candidates,), np.uint8)
            return self._scratch, self._candidates


def zeros(*shape: int, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    array = aligned_empty(shape, dtype)
    array[...] = 0
    return array


def _view(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    count = int(np.prod(shape))
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous or len(array) < count:
        raise ShapeError(
            f"the buffer {name} must be 1-D, contiguous {dtype} with room for {count} numbers, got {array.dtype} "
            f"of shape {array.shape}; make it for the largest step that will be planned"
        )
    return array[:count].reshape(shape)
