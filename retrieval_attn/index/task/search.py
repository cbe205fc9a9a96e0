"""A search as a step's planner sees it: what is asked of an index, and how its tasks are made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.formats import Format
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty

SCAN_TOKENS = 2048
"""Fewest tokens of an exact scan that are worth a task of their own."""
CODED_TOKENS = 8192
"""The same of a scan of codes."""


class SearchRequest(NamedTuple):
    """A search of one entry of a step: `queries` queries (`padded` to a multiple of 4) for their best `k` keys each.

    The index's first key is token `first` of the array; `visible` of its keys take part, behind the first `hidden`,
    which do not: only with a kind that says it `hides_first_keys`. candidates: int32
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


class SearchedInSteps:
    """Methods of an index that a step's planner calls; the base class has no compiled search."""

    hides_first_keys: ClassVar[bool] = False
    """Whether a compiled search can leave out the first keys, see `SearchRequest`."""
    keeps_device_keys: ClassVar[bool] = False
    """Whether keys are coded on the device; callers then leave a layer's keys there until its indexes are built."""

    @abstractmethod
    def __len__(self) -> int:
        """Keys in the index."""

    def behind(self, first: int) -> SearchedInSteps | None:
        """Return a search of the keys from `first` on, as the index is now and as it grows; its ids count from there.

        None: there is no such search, and an index that hides no keys is not asked then.
        """
        return None

    def compiled_search(self, request: SearchRequest) -> CompiledSearch | None:
        """The tasks that search this index inside a step of the thread pool; None: it has none, and the step's caller
        takes `search_heads` instead. Where a scan of the stored keys is the better search it is `exact_search`.
        """
        return None

    def search_batch_key(self, k: int, visible: int) -> Hashable | None:
        """Indexes that give the same here, but for None, give the same `compiled_search` for the best k of `visible`
        keys.

        None: what that returns is this index's alone.
        """
        return None

    def device_codes(self, k: int, visible: int) -> Any:
        """The codes on a device that name candidates for the best k of `visible` keys; None: they name none."""
        return None


class ScratchLayout:
    """Places in a piece of scratch memory, each on a cache line of its own."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        """Offset of the next `nbytes` bytes."""
        place = self.nbytes
        self.nbytes += -(-nbytes // CACHE_LINE) * CACHE_LINE
        return place


def record(dtype: np.dtype[Any], count: int, **values: Any) -> npt.NDArray[Any]:
    """`count` equal records on a cache line; an array stands for its address. Raises ValueError for unknown fields.

    The caller keeps the arrays alive.
    """
    rows = aligned_empty((count,), dtype)
    rows[:] = np.zeros((), dtype)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, (name, value.strides)
            value = address_of(value)
        rows[name] = value
    return rows


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])  # half the time of `ctypes`
