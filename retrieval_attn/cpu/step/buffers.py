"""Memory of a step: from outside or its own, and what all steps of a pool share."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.pool import Pool
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.kernels.scan import BOUND_WORDS, score_columns
from retrieval_attn.index.memory import CACHE_LINE, aligned_empty
from retrieval_attn.index.task.descriptor import METER_WORDS
from retrieval_attn.index.task.search import ScratchLayout


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


class Memory(NamedTuple):
    """Where queries, results and meters of a step lie."""

    queries: npt.NDArray[np.float32]
    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float32]
    meters: npt.NDArray[np.int64]


def own_memory(shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> Memory:
    """New memory for queries of `shape` (rows, q_heads, positions). dims: head_dim and value_dim."""
    queries, out = (zeros(*shape, dim, dtype=np.float32) for dim in dims)
    lse, rest = (zeros(*shape, dtype=np.float32) for _ in range(2))
    return Memory(queries, out, lse, rest, zeros(workers, METER_WORDS))


def memory_in(buffers: StepBuffers, shape: tuple[int, int, int], dims: tuple[int, int], workers: int) -> Memory:
    """The same in buffers from outside. Raises ShapeError if they are too small."""
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
        "tile_at": layout.take(padded * score_columns(padded) * 4),
        "joined_at": layout.take(joined * 8),
        "own_at": layout.take(own),
    }


class Arena:
    """Scratch memory of a pool's workers, shared by all steps: jobs of a pool never overlap. It only grows."""

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
        """Two arrays of at least so many bytes, to be kept by the caller: earlier ones may be replaced later."""
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
