"""Search and attention of all heads of a layer by one call through the pool of worker threads.

`LayerStep` turns pieces of host memory into the descriptor that the compiled step runs on, keeps every array behind it
alive, and turns error words into exceptions. What a step computes is in `step.py`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import check_score_options
from retrieval_attn.cpu.budgets import HeadBudgets, budget_counts, budgets_of
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.pool import Pool, raise_if_unusable
from retrieval_attn.cpu.samples import columns_for
from retrieval_attn.cpu.step.attend_task import attend_task
from retrieval_attn.cpu.step.run import BAD_ID, callback_address, compile_step, run_step, run_task_address
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.cpu.step.tables import (
    MadeRows,
    StepRequest,
    Tables,
    likeness_of,
    make_tables,
    place_budgets,
    place_clusters,
)
from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.scan import BOUND_WORDS
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.task.descriptor import ATTEND_TIME, BYTES, LIST_HEAD, METER_WORDS, SCANNED, SEARCH_TIME, STEP
from retrieval_attn.index.task.search import Layout, address_of

TASKS_PER_THREAD = 4
MAX_LISTS_BYTES = 256 << 20
"""Most memory for candidates of one step; beyond it the caller takes another way."""

_MESSAGES = {BAD_ID: "its index returned a token that is not among those searched; build the index again"}


class StepCost(NamedTuple):
    """What one step cost: seconds of wall clock by phase (by the share of the threads' time), (query, key) pairs whose
    score was computed, and bytes of keys, codes and values read, once for queries that are scanned together.
    """

    search_seconds: float
    attend_seconds: float
    keys_scanned: int
    bytes_read: int


def total_cost(costs: Iterable[StepCost]) -> StepCost:
    """What several steps cost together."""
    sums = [sum(column) for column in zip(StepCost(0.0, 0.0, 0, 0), *costs, strict=True)]
    return StepCost(float(sums[0]), float(sums[1]), int(sums[2]), int(sums[3]))


class StepBuffers(NamedTuple):
    """Memory that a step reads and writes, from outside: it keeps its place however often the step is planned.

    1-D and C-contiguous, at least as long as named. queries: rows * q_heads * positions * head_dim float32; out: the
    same with value_dim; lse: rows * q_heads * positions float32; meters: workers of the pool * METER_WORDS int64;
    descriptor: WORDS int64, which begins as zeros. candidates: (rows * q_heads * positions, room) int32, where a device
    names keys for pieces whose index is its own, as ids of that index, -1 where there is none; None: it names none.
    rest: as long as lse; None: memory of the step's own.
    """

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]
    descriptor: npt.NDArray[np.int64]
    candidates: npt.NDArray[np.int32] | None = None
    rest: npt.NDArray[np.float32] | None = None


class Rest(NamedTuple):
    """What a step does about keys that are not among the best.

    clusters: of each row, by which they are estimated, and whose pieces have members then; None: they are left out.
    named: so many keys at least are named in the buffers' candidates, and each query attends to all of its own.
    """

    clusters: Sequence[ClusterTable | None]
    named: int = 0


class LayerStep:
    """The step of one layer, for one sequence or several of equal shape.

    `plan` says what to search, `run` runs it; between two runs pieces may grow at their end (`extend`). Not for two
    threads at once; two steps of one pool take turns. rows: the pieces of each row as they were planned last.
    """

    queries: npt.NDArray[np.float32]
    """What the next step reads: (rows, kv_heads * group, n, head_dim) float32, to be written to."""
    out: npt.NDArray[np.float32]
    """What the last step wrote: (rows, kv_heads * group, n, value_dim) float32. The next one overwrites it."""
    lse: npt.NDArray[np.float32]
    """(rows, kv_heads * group, n) float32, natural logarithms; -inf where there was no token. See `out`."""
    rest: npt.NDArray[np.float32]
    """(rows, kv_heads * group, n) float32: the share of the weights that was estimated. See `out`."""

    def __init__(self, pool: Pool, fmt: Format, *, layer: int = 0, buffers: StepBuffers | None = None) -> None:
        """A step without a plan. layer: named in errors, may be set anew. Compiles the step for `fmt`, or loads it.

        buffers: where queries are read and results written (page-locked memory that a device copies from and to);
        None: memory of its own, new at every plan that changes shapes.
        """
        self.pool = pool
        self._buffers = buffers
        self._fmt = fmt
        self.layer = layer
        words = aligned_empty((STEP.itemsize // 8,), np.int64) if buffers is None else buffers.descriptor
        if buffers is None:
            words[:] = 0
        self._step = words[: STEP.itemsize // 8].view(STEP)
        self.address = int(words.ctypes.data)
        """Of the descriptor: what `run.run_step` and the C function `callback` take. It never changes."""
        self._set(task=run_task_address(), attend=attend_task(fmt), pool=pool.address, width=pool.threads)
        self._plan: tuple[Any, ...] = ()
        self._likeness: tuple[Any, ...] | None = None  # of the plan that was made last, see `likeness_of`
        self._made = MadeRows()
        self._room = (0, 0)
        self._kept: list[Any] = []
        self.rows: list[list[SearchRange]] = []
        compile_step()

    def _set(self, **values: Any) -> None:
        """Write fields of the descriptor; an array stands for its address."""
        for name, value in values.items():
            self._step[name] = value.ctypes.data if isinstance(value, np.ndarray) else value

    @property
    def callback(self) -> int:
        """Address of a C function void f(void *descriptor) that runs the step on the calling thread and the pool."""
        return callback_address()

    def plan(
        self,
        rows: Sequence[Sequence[SearchRange]],
        q_heads: int,
        positions: int,
        top_k: int | HeadBudgets | tuple[HeadBudgets, ...],
        *,
        scale: float,
        softcap: float | None = None,
        threads: int | None = None,
        rest: Rest | None = None,
    ) -> bool:
        """Prepare steps over the pieces of each row (in order of their tokens) for (rows, q_heads, positions) queries.

        Each query attends to its top_k best keys, as many as its head has with budgets; a tuple has those of each row.
        A row is searched for its own largest number, as if it were alone. threads: at most this many of the pool's.
        rest: what is done about the others; None: they are left out.

        Cheap if nothing but the end of the last pieces changed since the last plan, and a tenth of the whole if pieces
        that are searched alike lie elsewhere now: another layer's, or those of another context. Returns False, without
        a plan, if an index has no compiled search or the candidates would need more than MAX_LISTS_BYTES. Raises
        ShapeError for arrays that do not fit together, ConfigError for numbers.
        """
        check_score_options(scale, softcap)
        budgets, numbers = budgets_of(top_k, len(rows))
        top_k = max(numbers, default=1)
        if top_k < 1 or positions < 0 or (threads is not None and threads < 1):
            raise ConfigError(f"top_k={top_k}, positions={positions}, threads={threads} must be at least 1")
        threads = self.pool.threads if threads is None else min(threads, self.pool.threads)
        entries = len(rows) * next((len(piece.keys) for row in rows for piece in row), 1)
        parts = -(-TASKS_PER_THREAD * threads // entries) if threads > 1 else 1
        kept = _rounded_top_k(rows, top_k)
        keeps = tuple(min(kept, number) for number in numbers)
        tables, named = ([None] * len(rows), 0) if rest is None else rest
        sizes = tuple((0, 0) if table is None else (table.clusters, table.sampled) for table in tables)
        candidates = None if self._buffers is None else self._buffers.candidates
        room = 0 if not named or candidates is None else candidates.shape[1]
        most = kept + room
        request = StepRequest(q_heads, positions, most, float(scale), float(softcap or 0.0), parts, sizes, keeps, named)
        pieces = tuple(tuple(request.signature(piece, piece is row[-1]) for piece in row) for row in rows)
        counts = budget_counts(budgets, q_heads, positions) if budgets else None
        plan = request, pieces, tuple(map(id, tables)), budgets
        if plan != self._plan:
            known = self._made.know_some(rows, request)  # then tables are made for the others only
            likeness, self._plan = None if known else likeness_of(rows, request), ()
            if likeness is not None and likeness == self._likeness:
                self._move(rows)
            else:
                self._likeness = None
                if not self._build(rows, request):
                    return False
                self._likeness = likeness
            place_clusters(self._tables.entries, self._heads, tables)
            place_budgets(self._tables.entries, counts)
            self._kept += [tables, counts]
            self._plan = plan
        self._set(width=threads)
        self.rows = [list(row) for row in rows]
        self.extend([row[-1].high if row else 0 for row in rows])
        return True

    def _build(self, rows: Sequence[Sequence[SearchRange]], request: StepRequest) -> bool:
        heads, dim, value_dim = _dims_of(rows, self._fmt)
        if request.q_heads < 1 or request.q_heads % heads:
            raise ShapeError(f"q_heads={request.q_heads} must be a multiple of the {heads} key-value heads")
        entries, queries = len(rows) * heads, request.q_heads // heads * request.positions
        padded = -(-queries // TILE_QUERIES) * TILE_QUERIES
        candidates = None if self._buffers is None else self._buffers.candidates
        tables = make_tables(rows, request, self._fmt, (heads, queries, padded), candidates, self._made)
        if tables is None:
            return False
        list_words = LIST_HEAD + max(request.top_k, tables.most("kept"))
        lists_bytes = entries * queries * tables.lists * list_words * 8
        if lists_bytes > MAX_LISTS_BYTES:
            return False
        longest = max((piece.high - piece.low for row in rows for piece in row), default=0)
        capacity = max(min(2 * request.top_k + 64, 2 * longest + 1), request.top_k + 1, tables.most("capacity"))
        joined = tables.lists * list_words
        layout = Layout()
        sizes = request.top_k, max((max(c, columns_for(c * sampled)) for c, sampled in request.clusters), default=0)
        places = _scratch_places(layout, (queries, padded), sizes, capacity, joined, tables.most("scratch"))
        stride = layout.nbytes + CACHE_LINE
        workers = self.pool.workers
        self._room = workers * stride, lists_bytes
        places_of = _own_memory if self._buffers is None else functools.partial(_memory_in, self._buffers)
        memory = places_of((len(rows), request.q_heads, request.positions), (dim, value_dim), workers)
        self.queries, self.out, self.lse, self.rest, self._meters = memory
        arrays = {
            "queries_at": self.queries,
            "tiles_at": _zeros(entries, padded, dim, dtype=np.float32),
            "out_at": self.out,
            "lse_at": self.lse,
            "rest_at": self.rest,
            "entries_at": tables.entries,
            "ranges_at": tables.ranges,
            "tasks_at": tables.tasks,
            "floors_at": _zeros(entries, queries),
            "pending_at": _zeros(entries, CACHE_LINE // 8),
            "meters_at": self._meters,
        }
        self._set(
            **arrays,
            **places,
            queries=queries,
            padded=padded,
            head_dim=dim,
            value_dim=value_dim,
            top_k=request.top_k,
            keep=max(request.keeps),
            scale=request.scale,
            softcap=request.softcap,
            lists=tables.lists,
            list_words=list_words,
            joined=joined,
            workers=workers,
            scratch_stride=stride,
            capacity=capacity,
        )
        self._tables = tables
        self._heads = heads
        ends = (tables.entries["first_range"] + tables.entries["ranges"] - 1).reshape(len(rows), heads)
        self._lasts = list(ends)  # per row, its last range of each head
        self._arrays = arrays
        self._begin(rows)
        return True

    def _move(self, rows: Sequence[Sequence[SearchRange]]) -> None:
        """Make the plan that was made last one for these pieces, which differ from its own in where they lie alone."""
        self._made.forget()
        ranges, first = self._tables.ranges, 0
        for row in rows:
            for number, piece in enumerate(row):
                dims = self._fmt.dim_of(piece.keys), self._fmt.dim_of(piece.values)
                piece.check(self._fmt, (self._heads, *dims))
                own = slice(first + number, first + self._heads * len(row), len(row))
                arrays = {"keys_at": piece.keys, "values_at": piece.values, "members_at": piece.members}
                for name, array in arrays.items():
                    if array is not None:
                        ranges[name][own] = address_of(array) + array.strides[0] * np.arange(self._heads)
            first += self._heads * len(row)
        self._begin(rows)

    def _begin(self, rows: Sequence[Sequence[SearchRange]]) -> None:
        """The tables are for these pieces now, whose arrays live until `forget`."""
        scratch, lists = _Arena.of(self.pool).room(*self._room)
        entries, tasks = len(self._tables.entries), len(self._tables.tasks)
        self._set(scratch_at=scratch, lists_at=lists, entries=entries, tasks=tasks)
        self._kept = [(scratch, lists), [list(row) for row in rows]]

    def forget(self, row: int | None = None) -> None:
        """Drop the plan and let go of the keys, values and indexes in it; `plan` makes another at the same address.
        row: let go of this row's alone; the next plan of the others takes less.

        Until then a run through `callback` does nothing: `out` and `lse` stay as they are. Tables that hold nothing of
        what was searched stay: the next plan may be like this one.
        """
        self._made.forget(row)
        self._plan, self._kept, self.rows = (), [], []
        self._set(entries=0, tasks=0)

    def extend(self, highs: Sequence[int]) -> None:
        """The last piece of each row now ends before token highs[row] of its arrays (0 for a row without pieces).

        Raises ConfigError for a token outside the arrays.
        """
        for own, last, high in zip(self._kept[1], self._lasts, highs, strict=True):
            if own and not own[-1].low <= high <= own[-1].most:
                raise ConfigError(
                    f"high={high} must lie in {own[-1].low} .. {own[-1].most}, where keys are; plan again"
                )
            if own:
                self._tables.ranges["high"][last] = high

    def run(self) -> StepCost:
        """Run the step on what lies in `queries` now; `out` and `lse` hold its results.

        Without the GIL. Raises BackendError if a head cannot be searched (named), or the pool is closed.
        """
        if not self._plan:
            raise ConfigError("a step without a plan cannot run; call plan first")
        began = time.perf_counter()
        run_step(self.address)
        seconds = time.perf_counter() - began
        self.raise_error()
        return self.cost(seconds)

    def cost(self, seconds: float) -> StepCost:
        """What the last run cost, here or through `callback`, if it took that many seconds of wall clock."""
        meters = self._meters.sum(axis=0)
        search, attend = float(meters[SEARCH_TIME]), float(meters[ATTEND_TIME])
        share = search / max(1.0, search + attend)
        return StepCost(seconds * share, seconds * (1 - share), int(meters[SCANNED]), int(meters[BYTES]))

    def raise_error(self) -> None:
        """Raise what the last run, here or through `callback`, left as its status; BackendError names the head."""
        status = int(self._step["status"][0])
        raise_if_unusable(status)
        if status:
            raise BackendError(f"layer {self.layer}, {_failure(self._step, self._tables, self._heads)}")


def _dims_of(rows: Sequence[Sequence[SearchRange]], fmt: Format) -> tuple[int, int, int]:
    """Key-value heads, head_dim and value_dim of all pieces. Raises ShapeError."""
    if not (pieces := [piece for row in rows for piece in row]):
        raise ShapeError("a step needs at least one piece of one row")
    dims = len(pieces[0].keys), fmt.dim_of(pieces[0].keys), fmt.dim_of(pieces[0].values)
    for piece in pieces:
        piece.check(fmt, dims)
    return dims


def row_costs(step: LayerStep, cost: StepCost) -> list[StepCost]:
    """What each row had of the `cost` of the step's last run; the seconds are shared evenly."""
    rows = len(step.rows)
    counted = step._arrays["pending_at"].reshape(rows, -1, CACHE_LINE // 8)[:, :, 1:3].sum(axis=1)
    shared = cost.search_seconds / rows, cost.attend_seconds / rows
    return [StepCost(*shared, int(scanned), int(nbytes)) for scanned, nbytes in counted]


def _failure(step: npt.NDArray[Any], tables: Tables, heads: int) -> str:
    """Which head failed, and why, by the status of a step."""
    status, searches = int(step["status"][0]), int(step["tasks"][0])
    task, code = status >> 32, status & 0xFFFFFFFF
    if task < searches:
        entry, query = int(tables.tasks["entry"][task]), None
    else:
        query, entry = divmod(task - searches, int(step["entries"][0]))
    where = f"sequence {entry // heads}, key-value head {entry % heads}"
    if query is not None:
        where += f", query {query} of its group"
    return f"{where}: {_MESSAGES.get(code, f'unknown error {code}')}"


class _Memory(NamedTuple):
    """Where queries, results and meters of a step lie."""

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]


def _own_memory(shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> _Memory:
    """New memory for queries of `shape` (rows, q_heads, positions). dims: head_dim and value_dim."""
    queries, out = (_zeros(*shape, dim, dtype=np.float32) for dim in dims)
    lse, rest = (_zeros(*shape, dtype=np.float32) for _ in range(2))
    return _Memory(queries, out, lse, rest, _zeros(workers, METER_WORDS))


def _memory_in(buffers: StepBuffers, shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> _Memory:
    """The same in buffers from outside. Raises ShapeError if they are too small."""
    float32 = np.dtype(np.float32)
    rest = np.zeros(int(np.prod(shape)), np.float32) if buffers.rest is None else buffers.rest
    return _Memory(
        _view("queries", buffers.queries, (*shape, dims[0]), float32),
        _view("out", buffers.out, (*shape, dims[1]), float32),
        _view("lse", buffers.lse, shape, float32),
        _view("rest", rest, shape, float32),
        _view("meters", buffers.meters, (workers, METER_WORDS), np.dtype(np.int64)),
    )


def _rounded_top_k(rows: Sequence[Sequence[SearchRange]], top_k: int) -> int:
    """top_k, but no more than there are tokens: rounded up, for they come one by one and each number is a plan."""
    tokens = max((sum(piece.high - piece.low for piece in row) for row in rows), default=0)
    return int(min(top_k, max(1, -(-tokens // 256)) * 256))


def _scratch_places(
    layout: Layout, queries: tuple[int, int], sizes: tuple[int, int], capacity: int, joined: int, own: int
) -> dict[str, int]:
    """Fields of the descriptor that are places in a worker's scratch. queries: of an entry, and padded. sizes: top_k
    and the most clusters, or columns of samples, of a head.
    """
    (number, padded), (top_k, clusters) = queries, sizes
    return {
        "pool_at": layout.take(number * capacity * 8),
        "rows_at": layout.take(top_k * 8),
        "scores_at": layout.take(top_k * 4),
        "digits_at": layout.take(256 * 8),
        "owners_at": layout.take(top_k * 2),
        "left_at": layout.take(clusters * 4),
        "weights_at": layout.take(clusters * 4),
        "sampled_at": layout.take(clusters * 4),
        "counts_at": layout.take(number * 8),
        "bars_at": layout.take(number * 8),
        "bounds_at": layout.take(padded * BOUND_WORDS),  # of 4 bytes, for every 4 queries
        "steps_at": layout.take(2 * padded * 4),
        "tile_at": layout.take(4 * 64 * 4),
        "joined_at": layout.take(joined * 8),
        "own_at": layout.take(own),
    }


class _Arena:
    """Scratch memory of a pool's workers, shared by all steps: jobs of a pool never overlap. It only grows."""

    _all: weakref.WeakKeyDictionary[Pool, _Arena] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._scratch = aligned_empty((CACHE_LINE,), np.uint8)
        self._candidates = aligned_empty((CACHE_LINE,), np.uint8)

    @classmethod
    def of(cls, pool: Pool) -> _Arena:
        """The arena of `pool`."""
        with cls._lock:
            return cls._all.setdefault(pool, cls())

    def room(self, scratch: int, candidates: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Two arrays of at least so many bytes, to be kept by the caller: earlier ones may be replaced later."""
        with self._lock:
            if self._scratch.nbytes < scratch:
                self._scratch = aligned_empty((scratch,), np.uint8)
            if self._candidates.nbytes < candidates:
                self._candidates = aligned_empty((candidates,), np.uint8)
            return self._scratch, self._candidates


def _zeros(*shape: int, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
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
