"""A search as a step's planner sees it: what is asked of an index, and how its tasks are made."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.scan import BOUND_WORDS, score_columns
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty

SCAN_TOKENS = 2048
"""Fewest tokens of an exact scan that are worth a task of their own."""
CODED_TOKENS = 8192
"""The same of a scan of codes."""
CALL_FAILED = 2
"""Error code of a task: a Python function raised an exception."""

CandidateFunction = Callable[[npt.NDArray[np.float32], int, int], tuple[npt.NDArray[Any], int]]
"""(queries (m, head_dim), limit, threads) -> candidate ids below limit (m, c), -1 for none; scores computed."""
_CALL = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)


class SearchRequest(NamedTuple):
    """A search of one entry of a step: `queries` queries (`padded` to a multiple of 4) for their best `k` keys each.

    The index's first key is token `first` of the array; `visible` of its keys take part, behind the first `hidden`,
    which do not. candidates: int32
    (queries, room) ids that a device names before the step runs, -1 where there is none; None: it names none. named:
    how many at least, all of which are attended to; 0: the best of them are.
    """

    fmt: Format
    queries: int
    padded: int
    k: int
    first: int
    visible: int
    candidates: npt.NDArray[np.int32] | None = None
    named: int = 0
    hidden: int = 0


class CompiledSearch(NamedTuple):
    """The tasks of one search.

    task: address of the function, see `tasks.task_address`. index_at: address of what it reads of the index. by_query:
    each query has `max_parts` tasks at most, which write to as many lists; else parts of at least `part_tokens` tokens
    serve all queries together, and with `first_task` one task that they wait for comes before. kept: candidates that a
    list has by their codes, scored again when all are in; 0: candidates come with their scores. capacity: candidates of
    a query that a task has room for. scratch: bytes of each worker. alive: what has to live as long as the plan.
    """

    task: int
    index_at: int = 0
    by_query: bool = False
    max_parts: int = 1
    part_tokens: int = SCAN_TOKENS
    first_task: bool = False
    kept: int = 0
    capacity: int = 0
    scratch: int = 0
    alive: tuple[Any, ...] = ()
    python: PythonSearch | None = None


class PythonSearch:
    """A Python function that selects the candidates of a search, as C code calls it.

    ids: (queries, room) int32, the candidates of the last call, -1 where there are fewer. scanned: number of scores
    that it computed.
    """

    def __init__(self, function: CandidateFunction, queries: int, head_dim: int, room: int) -> None:
        self._function, self._shape = function, (queries, head_dim)
        self.ids = np.full((queries, max(1, room)), -1, np.int32)
        self.scanned = np.zeros(1, np.int64)
        self._error: BaseException | None = None
        self._called = _CALL(self._call)
        self.address = ctypes.cast(self._called, ctypes.c_void_p).value
        """Address of a C function int64 f(int64 queries_at, int64 limit, int64 threads)."""

    def _call(self, queries_at: int, limit: int, threads: int) -> int:
        try:
            numbers = (ctypes.c_float * math.prod(self._shape)).from_address(queries_at)
            queries = np.ctypeslib.as_array(numbers).reshape(self._shape)
            found, self.scanned[0] = self._function(queries, limit, threads)
            self.ids[:, found.shape[1] :] = -1
            self.ids[:, : found.shape[1]] = found
        except BaseException as error:  # C code cannot pass it on: its caller takes it
            self._error = error
            return CALL_FAILED
        return 0

    def take_error(self) -> BaseException | None:
        """Return the exception of the function's last call, once; None if it raised none."""
        error, self._error = self._error, None
        return error


class ScratchLayout:
    """Places in a piece of scratch memory, each on a cache line of its own."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        """Offset of the next `nbytes` bytes."""
        place = self.nbytes
        self.nbytes += -(-nbytes // CACHE_LINE) * CACHE_LINE
        return place


def scratch_offsets(
    layout: ScratchLayout, queries: int, padded: int, top_k: int, capacity: int, joined: int, own: int
) -> dict[str, int]:
    """Return offsets of a worker's scratch arrays that searches use, by the descriptor's fields.

    padded: queries rounded up to a multiple of 4. joined: candidates of all lists. own: bytes of the kind's search.
    """
    return {
        "pool_at": layout.take(queries * capacity * 8),
        "rows_at": layout.take(top_k * 8),
        "counts_at": layout.take(queries * 8),
        "bars_at": layout.take(queries * 8),
        "bounds_at": layout.take(padded * BOUND_WORDS),  # of 4 bytes, for every 4 queries
        "steps_at": layout.take(2 * padded * 4),
        "tile_at": layout.take(padded * score_columns(padded) * 4),
        "joined_at": layout.take(joined * 8),
        "own_at": layout.take(own),
    }


def range_parts(parts: int, k: int, tokens: int, part_tokens: int) -> int:
    """Return the tasks that a scan of `tokens` tokens is cut into, at most `parts`."""
    return max(1, min(parts, -(-tokens // max(part_tokens, 4 * k))))


def task_lists(search: CompiledSearch, queries: int, k: int, tokens: int, parts: int) -> int:
    """Return the number of candidate lists of a search for `queries` queries over `tokens` tokens, at most `parts`."""
    if search.by_query:
        return max(1, min(parts // queries, search.max_parts))
    return range_parts(parts, k, tokens, search.part_tokens)


def task_places(search: CompiledSearch, queries: int, lists: int) -> npt.NDArray[np.int64]:
    """Return the field `part` of each task of a search, without its first task."""
    return np.arange(lists * queries if search.by_query else lists)


@functools.cache
def word_places(dtype: np.dtype[Any]) -> dict[str, int]:
    """Return the place of each int64 field of a record type, in words of 8 bytes."""
    assert dtype.fields is not None
    return {name: field[1] // 8 for name, field in dtype.fields.items() if field[0] == np.int64}


def record(dtype: np.dtype[Any], **values: Any) -> npt.NDArray[Any]:
    """Return one record on a cache line as (1,); an array stands for its address. Raises KeyError for unknown fields.

    The caller keeps the arrays alive.
    """
    words = aligned_empty((dtype.itemsize // 8,), np.int64)
    words[:] = 0
    rows, places = words.view(dtype), word_places(dtype)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, (name, value.strides)
            value = address_of(value)
        if name in places:
            words[places[name]] = value
        else:
            rows[name] = value
    return rows


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    if array.dtype.names is not None:
        array = array.view(np.uint8)  # the interface of a record describes each field
    return int(array.__array_interface__["data"][0])  # half the time of `ctypes`
