"""Search and attention of all heads of a layer by one call through the pool of worker threads.

`LayerStep` turns pieces of host memory into the descriptor that the compiled step runs on, keeps every array behind it
alive, and turns error words into exceptions. What a step computes is in `step.py`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import check_score_options
from retrieval_attn.cpu.pool import Pool, raise_if_unusable
from retrieval_attn.cpu.step import descriptor as words
from retrieval_attn.cpu.step.attend_task import attend_task
from retrieval_attn.cpu.step.descriptor import callback_address, compile_step, run_step, task_address
from retrieval_attn.cpu.step.given_task import given_task
from retrieval_attn.cpu.step.index_words import IndexWords
from retrieval_attn.cpu.step.search_tasks import coded_task, graph_task, scan_task, sketch_task
from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.scan import BOUND_WORDS
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.sketch.index import SketchIndex

PART_TOKENS = 2048
"""Fewest tokens of an exact scan that are worth a task of their own."""
CODED_TOKENS = 8192
"""The same of a scan of codes."""
MOST_GIVEN_PARTS = 4
"""Tasks that the candidates of one query, which a device names, are cut into at most."""
TASKS_PER_THREAD = 4
MOST_LISTS_BYTES = 256 << 20
"""Most memory for candidates of one step; beyond it the caller takes another way."""

_MESSAGES = {words.BAD_ID: "its index returned a token that is not among those searched; build the index again"}


class Piece(NamedTuple):
    """Tokens [low, high) of arrays of one sequence, which are its tokens first + low, ... .

    keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim) as stored in one format, C-contiguous.
    indexes: one per head, whose first keys are those of token index_first <= low, covering all tokens; or None: the
    tokens are scanned exactly. version: another number after the indexes have changed.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    low: int
    high: int
    first: int
    indexes: tuple[KeyIndex, ...] | None = None
    index_first: int = 0
    version: int = 0

    @property
    def most(self) -> int:
        """Largest `high` that the arrays and indexes allow."""
        covered = self.keys.shape[1] if not self.indexes else self.index_first + len(self.indexes[-1])
        return min(int(self.keys.shape[1]), covered)


def has_compiled_search(index: KeyIndex, named: bool = False) -> bool:
    """Whether a step can search this index: an exact one, which a scan replaces, a sketch or a graph.

    named: also one whose candidates a device names. Where a graph with a range (`beta`) is too small to be one, its own
    search has to cut what a scan finds.
    """
    if type(index) is RoarGraphIndex:
        return index.options.beta is None or bool(index.search_arguments())
    return type(index) in (FlatIndex, SketchIndex) or (named and type(index) is DeviceIndex)


class StepCost(NamedTuple):
    """What one step cost: seconds of wall clock by phase (by the share of the threads' time), (query, key) pairs whose
    score was computed, and bytes of keys, codes and values read, once for queries that are scanned together.
    """

    search_seconds: float
    attend_seconds: float
    keys_scanned: int
    bytes_read: int


class StepBuffers(NamedTuple):
    """Memory that a step reads and writes, from outside: it keeps its place however often the step is planned.

    1-D and C-contiguous, at least as long as named. queries: rows * q_heads * positions * head_dim float32; out: the
    same with value_dim; lse: rows * q_heads * positions float32; meters: workers of the pool * METER_WORDS int64;
    descriptor: WORDS int64, which begins as zeros. candidates: (rows * q_heads * positions, room) int32, where a device
    names keys for pieces whose index is its own, as ids of that index, -1 where there is none; None: it names none.
    """

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]
    descriptor: npt.NDArray[np.int64]
    candidates: npt.NDArray[np.int32] | None = None


class _Wanted(NamedTuple):
    """What is asked of a step, beside its pieces."""

    q_heads: int
    positions: int
    top_k: int
    scale: float
    softcap: float

    parts: int

    def parts_of(self, piece: Piece, tokens: int = PART_TOKENS) -> int:
        """Tasks that a scanned piece is cut into. The more, the more candidates are joined; results are the same."""
        return max(1, min(self.parts, -(-(piece.high - piece.low) // max(tokens, 4 * self.top_k))))


class LayerStep:
    """The step of one layer, for one sequence or several of equal shape.

    `plan` says what to search, `run` runs it; between two runs pieces may grow at their end (`extend`). Not for two
    threads at once; two steps of one pool take turns. rows: the pieces of each row as they were planned last.
    """

    def __init__(self, pool: Pool, fmt: Format, *, layer: int = 0, buffers: StepBuffers | None = None) -> None:
        """A step without a plan. layer: named in errors. Compiles the step for `fmt`, or loads it.

        buffers: where queries are read and results written (page-locked memory that a device copies from and to);
        None: memory of its own, new at every plan that changes shapes.
        """
        self._pool = pool
        self._buffers = buffers
        self._fmt = fmt
        self._layer = layer
        self._words = _zeros(words.WORDS) if buffers is None else buffers.descriptor
        self._address = int(self._words.ctypes.data)
        self._words[words.TASK] = task_address()
        self._words[words.ATTEND] = attend_task(fmt)
        self._words[words.POOL] = pool.address
        self._words[words.WIDTH] = pool.threads
        self._plan: tuple[Any, ...] = ()
        self._kept: list[Any] = []
        self.rows: list[list[Piece]] = []
        compile_step()

    @property
    def pool(self) -> Pool:
        """The pool that it runs on."""
        return self._pool

    @property
    def named(self) -> bool:
        """Whether a device names candidates for it."""
        return self._buffers is not None and self._buffers.candidates is not None

    @property
    def address(self) -> int:
        """Address of the descriptor: what `step.run_step` and the C function `callback` take. It never changes."""
        return self._address

    @property
    def callback(self) -> int:
        """Address of a C function void f(void *descriptor) that runs the step on the calling thread and the pool."""
        return callback_address()

    @property
    def queries(self) -> npt.NDArray[np.float32]:
        """What the next step reads: (rows, kv_heads * group, n, head_dim) float32, to be written to."""
        return self._queries

    @property
    def out(self) -> npt.NDArray[np.float32]:
        """What the last step wrote: (rows, kv_heads * group, n, value_dim) float32. The next one overwrites it."""
        return self._out

    @property
    def lse(self) -> npt.NDArray[np.float32]:
        """(rows, kv_heads * group, n) float32, natural logarithms; -inf where there was no token. See `out`."""
        return self._lse

    def plan(
        self,
        rows: Sequence[Sequence[Piece]],
        q_heads: int,
        positions: int,
        top_k: int,
        *,
        scale: float,
        softcap: float | None = None,
        threads: int | None = None,
    ) -> bool:
        """Prepare steps over the pieces of each row (in order of their tokens) for (rows, q_heads, positions) queries.

        Each query attends to its top_k best keys. threads: at most this many of the pool's. Cheap if nothing but the
        end of the last pieces changed since the last plan. Returns False, without a plan, if the candidates would need
        more than MOST_LISTS_BYTES. Raises ShapeError for arrays that do not fit together, ConfigError for numbers.
        """
        check_score_options(scale, softcap)
        if top_k < 1 or positions < 0 or (threads is not None and threads < 1):
            raise ConfigError(f"top_k={top_k}, positions={positions}, threads={threads} must be at least 1")
        threads = self._pool.threads if threads is None else min(threads, self._pool.threads)
        entries = len(rows) * next((len(piece.keys) for row in rows for piece in row), 1)
        parts = -(-TASKS_PER_THREAD * threads // entries) if threads > 1 else 1
        kept = _rounded_top_k(rows, top_k)
        wanted = _Wanted(q_heads, positions, kept, float(scale), float(softcap or 0.0), parts)
        plan = (wanted, tuple(tuple(_signature(piece, wanted, piece is row[-1]) for piece in row) for row in rows))
        if plan != self._plan:
            self._plan = ()
            if not self._build(rows, wanted):
                return False
            self._plan = plan
        self._words[words.WIDTH] = threads
        self.rows = [list(row) for row in rows]
        self.extend([row[-1].high if row else 0 for row in rows])
        return True

    def _build(self, rows: Sequence[Sequence[Piece]], wanted: _Wanted) -> bool:
        first = next((piece for row in rows for piece in row), None)
        if first is None:
            raise ShapeError("a step needs at least one piece of one row")
        heads, dim, value_dim = len(first.keys), self._fmt.dim_of(first.keys), self._fmt.dim_of(first.values)
        for piece in (piece for row in rows for piece in row):
            _check_piece(piece, self._fmt, (heads, dim, value_dim))
        if wanted.q_heads < 1 or wanted.q_heads % heads:
            raise ShapeError(f"q_heads={wanted.q_heads} must be a multiple of the {heads} key-value heads")
        entries, queries = len(rows) * heads, wanted.q_heads // heads * wanted.positions
        padded = -(-queries // TILE_QUERIES) * TILE_QUERIES
        graphs = IndexWords(queries, padded, wanted.top_k)
        named = None if self._buffers is None else self._buffers.candidates
        pieces, tasks, table = _tables(rows, heads, queries, wanted, graphs, self._fmt, named)
        lists = int(table[:, words.ENTRY_LISTS].max())
        list_words = words.LIST_HEAD + max(wanted.top_k, graphs.kept)
        if entries * queries * lists * list_words * 8 > MOST_LISTS_BYTES:
            return False
        longest = max((piece.high - piece.low for row in rows for piece in row), default=0)
        capacity = max(
            min(2 * wanted.top_k + 64, 2 * longest + 1), wanted.top_k + 1, 2 * graphs.kept + 64, graphs.named
        )
        layout = {
            words.SCAN_AT: queries * capacity * 8,
            words.ROWS_AT: wanted.top_k * 8,
            words.SCORES_AT: wanted.top_k * 4,
            words.DIGITS_AT: 256 * 8,
            words.COUNTS_AT: queries * 8,
            words.BARS_AT: queries * 8,
            words.BOUNDS_AT: padded * BOUND_WORDS,  # of 4 bytes, for every 4 queries
            words.STEPS_AT: 2 * padded * 4,
            words.JOINED_AT: lists * list_words * 8,
            words.TILE_AT: 4 * 64 * 4,
            words.PLANES_AT: graphs.planes,
            words.FOUND_AT: wanted.top_k * 4,
            words.GRAPH_POOL_AT: graphs.pool * 8,
            words.VISITED_AT: graphs.visited * 8,
            words.FRESH_AT: graphs.fresh * 4,
            words.SURVIVORS_AT: graphs.fresh * 8,
            words.NUMBERS_AT: graphs.numbers * 8,
            words.PROJECTED_AT: TILE_QUERIES * graphs.numbers * 4,
            words.SAMPLE_AT: TILE_QUERIES * graphs.sample * 4,
        }
        stride = 0
        for word, nbytes in layout.items():
            self._words[word] = stride
            stride += -(-nbytes // CACHE_LINE) * CACHE_LINE
        stride += CACHE_LINE
        workers = self._pool.workers
        arena = _Arena.of(self._pool)
        scratch, candidates = arena.room(workers * stride, entries * queries * lists * list_words * 8)
        shape = (len(rows), wanted.q_heads, wanted.positions)
        self._place(shape, dim, value_dim)
        arrays: dict[int, npt.NDArray[Any]] = {
            words.QUERIES_AT: self._queries,
            words.TILES_AT: _floats(entries, padded, dim),
            words.OUT_AT: self._out,
            words.LSE_AT: self._lse,
            words.ENTRIES_AT: table,
            words.PIECES_AT: pieces,
            words.TASKS_AT: tasks,
            words.LISTS_AT: candidates,
            words.FLOORS_AT: _zeros(entries, queries),
            words.PENDING_AT: _zeros(entries, CACHE_LINE // 8),
            words.METERS_AT: self._meters,
            words.SCRATCH_AT: scratch,
        }
        numbers = {
            words.ENTRIES: entries,
            words.QUERIES: queries,
            words.PADDED: padded,
            words.HEAD_DIM: dim,
            words.VALUE_DIM: value_dim,
            words.TOP_K: wanted.top_k,
            words.SCALE: _bits(wanted.scale),
            words.SOFTCAP: _bits(wanted.softcap),
            words.TASKS: len(tasks),
            words.LISTS: lists,
            words.LIST_WORDS: list_words,
            words.JOINED: lists * list_words,
            words.WORKERS: workers,
            words.SCRATCH_STRIDE: stride,
            words.CAPACITY: capacity,
            words.GRAPH_POOL: graphs.pool,
            words.VISITED: graphs.visited,
            words.FRESH: graphs.fresh,
            words.SAMPLE: graphs.sample,
        }
        for word, array in arrays.items():
            self._words[word] = array.ctypes.data
        for word, number in numbers.items():
            self._words[word] = number
        self._tables = table, pieces, tasks
        self._heads = heads
        ends = (table[:, words.ENTRY_PIECE] + table[:, words.ENTRY_PIECES] - 1).reshape(len(rows), heads)
        self._lasts = list(ends)  # per row, its last piece of each head
        self._kept = [arrays, [list(row) for row in rows], graphs]
        return True

    def _place(self, shape: tuple[int, int, int], dim: int, value_dim: int) -> None:
        """Where queries, results and meters lie: in the buffers from outside, or in memory of this step's own."""
        meters = self._pool.workers, words.METER_WORDS
        if self._buffers is None:
            self._queries, self._out = _floats(*shape, dim), _floats(*shape, value_dim)
            self._lse, self._meters = _floats(*shape), _zeros(*meters)
            return
        given, float32 = self._buffers, np.dtype(np.float32)
        self._queries = _view("queries", given.queries, (*shape, dim), float32)
        self._out = _view("out", given.out, (*shape, value_dim), float32)
        self._lse = _view("lse", given.lse, shape, float32)
        self._meters = _view("meters", given.meters, meters, np.dtype(np.int64))

    def forget(self) -> None:
        """Drop the plan and let go of the keys, values and indexes in it; `plan` makes another at the same address.

        Until then a run through `callback` does nothing: `out` and `lse` stay as they are.
        """
        self._plan, self._kept, self.rows = (), [], []
        self._words[words.ENTRIES] = self._words[words.TASKS] = 0

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
                self._tables[1][last, words.HIGH] = high

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
        search, attend = float(meters[words.SEARCH_TIME]), float(meters[words.ATTEND_TIME])
        share = search / max(1.0, search + attend)
        return StepCost(seconds * share, seconds * (1 - share), int(meters[words.SCANNED]), int(meters[words.BYTES]))

    def raise_error(self) -> None:
        """Raise what the last run, here or through `callback`, left as its status; BackendError names the head."""
        status = int(self._words[words.STATUS])
        raise_if_unusable(status)
        if status == 0:
            return
        task, code = status >> 32, status & 0xFFFFFFFF
        searches = int(self._words[words.TASKS])
        if task < searches:
            entry, query = int(self._tables[2][task, words.TASK_ENTRY]), None
        else:
            entry, query = divmod(task - searches, int(self._words[words.QUERIES]))
        where = f"layer {self._layer}, sequence {entry // self._heads}, key-value head {entry % self._heads}"
        if query is not None:
            where += f", query {query} of its group"
        raise BackendError(f"{where}: {_MESSAGES.get(code, f'unknown error {code}')}")


def _signature(piece: Piece, wanted: _Wanted, last: bool) -> tuple[int, ...]:
    """What a plan depends on of a piece, which the plan keeps alive (so ids stay taken)."""
    parts = wanted.parts_of(piece)
    fixed = id(piece.keys), id(piece.values), piece.low, piece.first, parts, 0 if last else piece.high
    if piece.indexes is None:
        return fixed
    # a search that sees few of the indexed keys needs a longer pool, so its length matters, though not to the token
    return *fixed, id(piece.indexes), piece.index_first, piece.version, (piece.most - piece.high) // 256


def _rounded_top_k(rows: Sequence[Sequence[Piece]], top_k: int) -> int:
    """top_k, but no more than there are tokens: rounded up, for they come one by one and each number is a plan."""
    tokens = max((sum(piece.high - piece.low for piece in row) for row in rows), default=0)
    return int(min(top_k, max(1, -(-tokens // 256)) * 256))


def _check_piece(piece: Piece, fmt: Format, dims: tuple[int, int, int]) -> None:
    heads, dim, value_dim = dims
    keys, values = piece.keys, piece.values
    tokens = keys.shape[1]
    if keys.shape != (heads, tokens, fmt.width(dim)) or values.shape != (heads, tokens, fmt.width(value_dim)):
        raise ShapeError(f"pieces must be {heads} heads of {dim} and {value_dim}, got {keys.shape} and {values.shape}")
    for array in (keys, values):
        if array.dtype != fmt.dtype or not array.flags.c_contiguous or not array.flags.aligned:
            raise ShapeError(f"pieces must be C-contiguous {fmt.dtype}, got {array.dtype} of strides {array.strides}")
    if piece.indexes is not None and (len(piece.indexes) != heads or not 0 <= piece.index_first <= piece.low):
        raise ShapeError(f"a piece of {heads} heads needs as many indexes, from token {piece.low} on or earlier")
    if (
        not 0 <= piece.low <= piece.high <= piece.most
        or piece.first + tokens >= 2**32 - 1
        or piece.first + piece.low < 0
    ):
        raise ShapeError(f"tokens [{piece.low}, {piece.high}) must lie in 0 .. {tokens}, all ids below 2**32 - 1")


def _tables(
    rows: Sequence[Sequence[Piece]],
    heads: int,
    queries: int,
    wanted: _Wanted,
    graphs: IndexWords,
    fmt: Format,
    named: npt.NDArray[np.int32] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tables of pieces, of tasks and of entries, as `step` reads them."""
    pieces: list[tuple[int, ...]] = []
    table = _zeros(len(rows) * heads, words.ENTRY_WORDS)
    tasks: list[tuple[int, int, tuple[int, ...]]] = []
    for row, own in enumerate(rows):
        for head in range(heads):
            entry = row * heads + head
            lists = count = 0
            table[entry, words.ENTRY_PIECE] = len(pieces)
            table[entry, words.ENTRY_PIECES] = len(own)
            for piece in own:
                keys, values = (array.ctypes.data + head * array.strides[0] for array in (piece.keys, piece.values))
                graph = codes = sketch = given = 0
                if piece.indexes is not None and piece.low == piece.index_first:
                    described = piece.indexes[head], piece.index_first, piece.high - piece.index_first
                    graph, codes, sketch = (find(*described) for find in (graphs.graph, graphs.codes, graphs.sketch))
                    ids = None if named is None else named[entry * queries : (entry + 1) * queries]
                    given = graphs.given(*described, ids)
                if graph:
                    tasks += [(-1, entry, (entry, len(pieces), query, queries, lists)) for query in range(queries)]
                    lists, count = lists + 1, count + queries
                elif given:
                    parts = max(1, min(wanted.parts // queries, MOST_GIVEN_PARTS))
                    for i in range(parts * queries):
                        tasks.append((-1, entry, (entry, len(pieces), i, parts, lists + i // queries)))
                    lists, count = lists + parts, count + parts * queries
                else:
                    if sketch:
                        tasks.append((-1, entry, (entry, len(pieces), -1, 1, 0)))
                        count += 1
                    parts = wanted.parts_of(piece, CODED_TOKENS if codes or sketch else PART_TOKENS)
                    for part in range(parts):
                        # all heads' first parts first: what they find lets later parts drop most of their keys
                        tasks.append((part, entry, (entry, len(pieces), part, parts, lists)))
                        lists, count = lists + 1, count + 1
                searches = (graph, graph_task), (codes, coded_task), (sketch, sketch_task), (given, given_task)
                found, task = next((one for one in searches if one[0]), (0, scan_task))
                pieces.append((task(fmt), keys, values, piece.low, piece.high, piece.first, found))
            table[entry, words.ENTRY_LISTS], table[entry, words.ENTRY_TASKS] = lists, count
    ordered = [task for _, _, task in sorted(tasks)]
    shaped = np.array(ordered, np.int64).reshape(len(ordered), words.TASK_WORDS)
    return np.array(pieces, np.int64).reshape(len(pieces), words.PIECE_WORDS), shaped, table


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


def _zeros(*shape: int) -> npt.NDArray[np.int64]:
    array = aligned_empty(shape, np.int64)
    array[...] = 0
    return array


def _floats(*shape: int) -> npt.NDArray[np.float32]:
    array = aligned_empty(shape, np.float32)
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


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))
