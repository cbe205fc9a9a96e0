"""Search and attention of all heads of a layer by one call through the pool of worker threads.

`LayerStep` turns pieces of host memory into the descriptor that the compiled step runs on, keeps every array behind it
alive, and turns error words into exceptions. What a step computes is in `run.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import check_score_options
from retrieval_attn.cpu.budgets import HeadBudgets, budget_counts, budgets_of
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.pool import Pool, raise_if_unusable
from retrieval_attn.cpu.step.attend_task import attend_task
from retrieval_attn.cpu.step.planned import PlannedRows, TaskTable, compile_places
from retrieval_attn.cpu.step.run import BAD_ID, callback_address, compile_step, entry_at, run_step, run_task_address
from retrieval_attn.cpu.step.tables import (
    Arena,
    Needs,
    SearchRange,
    StepBuffers,
    StepRequest,
    StepShape,
    memory_in,
    own_memory,
    scratch_places,
    zeros,
)
from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.task.search import CALL_FAILED, ScratchLayout
from retrieval_attn.index.task.tasks import ATTEND_TIME, BYTES, LIST_HEAD, SCANNED, SEARCH_TIME, STEP

TASKS_PER_THREAD = 4
MAX_LISTS_BYTES = 256 << 20
"""Most memory for candidates of one step; beyond it the caller takes another way."""

_MESSAGES = {
    BAD_ID: "its index returned a token that is not among those searched; build the index again",
    CALL_FAILED: "the search of its index raised the exception above",
}


class StepCost(NamedTuple):
    """Costs of one step: seconds of wall clock by phase (by the share of the threads' time), (query, key) pairs whose
    score was computed, and bytes of keys, codes and values read, counted once for queries that are scanned together.
    """

    search_seconds: float
    attend_seconds: float
    keys_scanned: int
    bytes_read: int


def total_cost(costs: Iterable[StepCost]) -> StepCost:
    """Return the sum of the costs of several steps."""
    sums = [sum(column) for column in zip(StepCost(0.0, 0.0, 0, 0), *costs, strict=True)]
    return StepCost(float(sums[0]), float(sums[1]), int(sums[2]), int(sums[3]))


class Rest(NamedTuple):
    """Treatment of the keys that are not among the best of a step.

    clusters: of each row, by which they are estimated, and whose pieces have members then; None: they are left out.
    named: minimum keys that are named in the buffers' candidates, and each query attends to all of its own.
    """

    clusters: Sequence[ClusterTable | None]
    named: int = 0


class LayerStep:
    """The step of one layer, for one sequence or several of equal shape.

    `plan` says what to search, `run` runs it; between two runs pieces may grow at their end (`extend`). Not for two
    threads at once; two steps of one pool take turns.
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
        """A step without a plan. layer: named in errors, may be set again. Compiles the step for `fmt`, or loads it.

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
        self._planned: PlannedRows | None = None
        self._budgets: tuple[HeadBudgets, ...] | None = None  # as they were placed
        self._counts: npt.NDArray[np.int64] | None = None
        self._arena: tuple[Any, ...] = ()
        self._ready = False
        compile_step()
        compile_places()

    def _set(self, **values: Any) -> None:
        """Write fields of the descriptor; an array stands for its address."""
        for name, value in values.items():
            self._step[name] = value.ctypes.data if isinstance(value, np.ndarray) else value

    @property
    def rows(self) -> list[tuple[SearchRange, ...]]:
        """The pieces of each row as they were planned last; none without a plan."""
        return self._planned.pieces if self._ready and self._planned is not None else []

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

        Cheap if nothing but the end of the last pieces changed since the last plan. Else what differs is planned: a row
        whose pieces are searched like those of an earlier one in its place gets other addresses alone, wherever they
        lie: in another layer, or in another context. Returns False, without a plan, if a search calls Python code in a
        step with external buffers, or the candidates would need more than MAX_LISTS_BYTES. Raises ShapeError for arrays
        that do not fit together, ConfigError for numbers.
        """
        check_score_options(scale, softcap)
        budgets, most = budgets_of(top_k, len(rows))
        top_k = max(most, default=1)
        if top_k < 1 or positions < 0 or (threads is not None and threads < 1):
            raise ConfigError(f"top_k={top_k}, positions={positions}, threads={threads} must be at least 1")
        threads = self.pool.threads if threads is None else min(threads, self.pool.threads)
        dims = _dims_of(rows, self._fmt)
        parts = -(-TASKS_PER_THREAD * threads // (len(rows) * dims[0])) if threads > 1 else 1
        keep = _rounded_top_k(rows, top_k)
        tables, named = ([None] * len(rows), 0) if rest is None else rest
        candidates = None if self._buffers is None else self._buffers.candidates
        room = 0 if not named or candidates is None else candidates.shape[1]
        numbers = keep + room, float(scale), float(softcap or 0.0), parts, keep, named
        request = StepRequest(q_heads, positions, *numbers, calls_python=self._buffers is None)
        self._ready = False
        planned = self._planned_for(request, len(rows), dims)
        if not planned.take(rows, [min(keep, number) for number in most], tables) or not self._write(planned):
            return False
        places = planned.places
        assert places is not None
        if budgets != self._budgets:
            self._counts = budget_counts(budgets, q_heads, positions) if budgets else None
            places.place_budgets(self._counts)
            self._budgets = budgets
        self._set(width=threads, entries=len(places.entries), tasks=places.count)
        self._ready = True
        self.extend([row[-1].high if row else 0 for row in rows])
        return True

    def _planned_for(self, request: StepRequest, rows: int, dims: tuple[int, int, int]) -> PlannedRows:
        """Return the last plan if it is for such a request; otherwise an empty one."""
        known = self._planned
        if known is not None and (known.request, len(known), known.shape[:3]) == (request, rows, dims):
            return known
        if request.q_heads < 1 or request.q_heads % dims[0]:
            raise ShapeError(f"q_heads={request.q_heads} must be a multiple of the {dims[0]} key-value heads")
        queries = request.q_heads // dims[0] * request.positions
        shape = StepShape(*dims, self._fmt, queries, -(-queries // TILE_QUERIES) * TILE_QUERIES)
        candidates = None if self._buffers is None else self._buffers.candidates
        self._planned = PlannedRows(request, rows, shape, candidates)
        return self._planned

    def _write(self, planned: PlannedRows) -> bool:
        """Bring places and memory up to date; False: the rows need too much."""
        if not planned.is_written:
            if not planned.fit():
                needs, clusters = planned.needs()
                # room that there is stays, where it can: rows come and go
                tries = (needs.joined(planned.room), max(clusters, planned.clusters)), (needs, clusters)
                if not any(self._lay_out(planned, *one) for one in tries):
                    return False
            planned.write()
        if not self._arena:
            self._arena = Arena.of(self.pool).room(*self._room)
            self._set(scratch_at=self._arena[0], lists_at=self._arena[1])
        return True

    def _lay_out(self, planned: PlannedRows, needs: Needs, clusters: int) -> bool:
        """Make the step's memory, with room for rows that need so much; False: that is too much."""
        request, shape, rows = planned.request, planned.shape, len(planned)
        entries, list_words = rows * shape.heads, LIST_HEAD + max(request.top_k, needs.kept)
        lists_bytes = entries * shape.queries * needs.lists * list_words * 8
        if lists_bytes > MAX_LISTS_BYTES:
            return False
        joined, layout = needs.lists * list_words, ScratchLayout()
        sizes = (shape.queries, shape.padded), (request.top_k, clusters)
        offsets = scratch_places(layout, *sizes, needs.capacity, joined, needs.scratch)
        stride, workers = layout.nbytes + CACHE_LINE, self.pool.workers
        memory_of = own_memory if self._buffers is None else functools.partial(memory_in, self._buffers)
        dims = shape.head_dim, shape.value_dim
        memory = memory_of((rows, request.q_heads, request.positions), dims, workers)
        self.queries, self.out, self.lse, self.rest, self._meters = memory
        places = planned.make_places(needs, clusters)
        self._own = {
            "tiles_at": zeros(entries, shape.padded, shape.head_dim, dtype=np.float32),
            "floors_at": zeros(entries, shape.queries),
            "pending_at": zeros(entries, CACHE_LINE // 8),
        }
        self._set(
            **offsets,
            **self._own,
            queries_at=self.queries,
            out_at=self.out,
            lse_at=self.lse,
            rest_at=self.rest,
            entries_at=places.entries,
            ranges_at=places.ranges,
            tasks_at=places.tasks,
            meters_at=self._meters,
            queries=shape.queries,
            padded=shape.padded,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            top_k=request.top_k,
            keep=request.keep,
            scale=request.scale,
            softcap=request.softcap,
            lists=needs.lists,
            list_words=list_words,
            joined=joined,
            workers=workers,
            scratch_stride=stride,
            capacity=needs.capacity,
        )
        self._room, self._arena, self._budgets = (workers * stride, lists_bytes), (), None
        return True

    def forget(self, row: int | None = None) -> None:
        """Drop the plan with its keys, values and indexes; `plan` makes another at the same address.
        row: drop only this row's; the next plan of the others takes less.

        Until then a run through `callback` does nothing: `out` and `lse` stay as they are. Tables that hold nothing of
        what was searched stay: the next plan may be like this one.
        """
        if self._planned is not None:
            self._planned.forget(row)
        self._ready, self._arena = False, ()
        self._set(entries=0, tasks=0)

    def extend(self, highs: Sequence[int]) -> None:
        """The last piece of each row now ends before token highs[row] of its arrays (0 for a row without pieces).

        Raises ConfigError for a token outside the arrays.
        """
        assert self._planned is not None
        self._planned.extend(highs)

    def run(self) -> StepCost:
        """Run the step on what lies in `queries` now; `out` and `lse` hold its results.

        Without the GIL. Raises BackendError if a head cannot be searched (named), or the pool is closed.
        """
        if not self._ready:
            raise ConfigError("a step without a plan cannot run; call plan first")
        began = time.perf_counter()
        run_step(self.address)
        seconds = time.perf_counter() - began
        self.raise_error()
        return self.cost(seconds)

    def cost(self, seconds: float) -> StepCost:
        """Return the cost of the last run, here or through `callback`, that took `seconds` of wall clock."""
        meters = self._meters.sum(axis=0)
        search, attend = float(meters[SEARCH_TIME]), float(meters[ATTEND_TIME])
        share = search / max(1.0, search + attend)
        return StepCost(seconds * share, seconds * (1 - share), int(meters[SCANNED]), int(meters[BYTES]))

    def raise_error(self) -> None:
        """Raise what the last run, here or through `callback`, left as its status; BackendError names the head."""
        status = int(self._step["status"][0])
        raise_if_unusable(status)
        if status:
            assert self._planned is not None and self._planned.places is not None
            failure = _failure(self._step, self._planned.places, self._planned.shape.heads)
            raise BackendError(f"layer {self.layer}, {failure}") from self._planned.python_error()

    def row_costs(self, cost: StepCost) -> list[StepCost]:
        """Divide the `cost` of the last run among the rows; seconds are shared evenly."""
        assert self._planned is not None
        rows = len(self._planned)
        counted = self._own["pending_at"].reshape(rows, -1, CACHE_LINE // 8)[:, :, 1:3].sum(axis=1)
        shared = cost.search_seconds / rows, cost.attend_seconds / rows
        return [StepCost(*shared, scanned, nbytes) for scanned, nbytes in counted.tolist()]


def _dims_of(rows: Sequence[Sequence[SearchRange]], fmt: Format) -> tuple[int, int, int]:
    """Key-value heads, head_dim and value_dim of the first piece. Raises ShapeError."""
    piece = next((row[0] for row in rows if row), None)
    if piece is None:
        raise ShapeError("a step needs at least one piece of one row")
    return len(piece.keys), fmt.dim_of(piece.keys), fmt.dim_of(piece.values)


def _failure(step: npt.NDArray[Any], places: TaskTable, heads: int) -> str:
    """Which head failed, and why, by the status of a step."""
    status, searches = int(step["status"][0]), int(step["tasks"][0])
    task, code = status >> 32, status & 0xFFFFFFFF
    if task < searches:
        entry, query = int(places.tasks["entry"][task]), None
    else:
        entry, query = entry_at(task - searches, *(int(step[name][0]) for name in ("entries", "queries", "width")))
    where = f"sequence {entry // heads}, key-value head {entry % heads}"
    if query is not None:
        where += f", query {query} of its group"
    return f"{where}: {_MESSAGES.get(code, f'unknown error {code}')}"


def _rounded_top_k(rows: Sequence[Sequence[SearchRange]], top_k: int) -> int:
    """top_k, but no more than there are tokens: rounded up, for they come one by one and each number is a plan."""
    tokens = max((sum(piece.high - piece.low for piece in row) for row in rows), default=0)
    return int(min(top_k, max(1, -(-tokens // 256)) * 256))
