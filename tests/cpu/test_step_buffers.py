"""A step whose queries and results lie in memory from outside, as a captured graph needs it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from retrieval_attn.cpu.host_attend import attend_paths, plan_paths
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.step.plan import LayerStep, StepBuffers
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.task import descriptor as words
from tests.cpu.test_engine import filled

HEADS, Q_HEADS, DIM, VALUE_DIM = 2, 6, 16, 19


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, cpus=()) as made:
        yield made


def path_of(pool: Pool, tokens: int, seed: int) -> SequenceKV:
    return filled(pool, HEADS, tokens, DIM, Format.FLOAT32, seed)


def buffers_for(pool: Pool, rows: int) -> StepBuffers:
    """NaN where nothing was written."""
    flat = rows * Q_HEADS
    return StepBuffers(
        np.full(flat * DIM, np.nan, np.float32),
        np.full(flat * VALUE_DIM, np.nan, np.float32),
        np.full(flat, np.nan, np.float32),
        np.zeros(pool.workers * words.METER_WORDS, np.int64),
        np.zeros(words.WORDS, np.int64),
    )


def test_results_land_in_the_given_buffers_across_plans(pool: Pool) -> None:
    """Breaks if a plan moves queries, results or the descriptor: their addresses are baked into a graph."""
    buffers = buffers_for(pool, 2)
    step = LayerStep(pool, Format.FLOAT32, buffers=buffers)
    address, function = step.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(step.callback)
    rng = np.random.default_rng(3)
    shared, other = path_of(pool, 700, 1), path_of(pool, 900, 2)
    # two sequences on one path (two positions of one row), then one row each, then longer ranges
    for paths, n, stop in (([shared], 2, 650), ([shared, other], 1, 650), ([shared, other], 1, 690)):
        ranges = [(3, stop)] * len(paths)
        assert plan_paths(step, paths, ranges, (Q_HEADS, n), 20, scale=0.3)
        queries = rng.standard_normal((len(paths), Q_HEADS, n, DIM), dtype=np.float32)
        buffers.queries[:] = queries.ravel()
        worker = threading.Thread(target=function, args=(step.address,))
        worker.start()
        worker.join()
        step.raise_error()
        for row, part in enumerate(attend_paths(paths, list(queries), ranges, 20, scale=0.3)):
            np.testing.assert_array_equal(buffers.out.reshape(len(paths), Q_HEADS, n, VALUE_DIM)[row], part.out)
            np.testing.assert_array_equal(buffers.lse.reshape(len(paths), Q_HEADS, n)[row], part.lse)
        assert step.address == address
        assert step.cost(1.0).keys_scanned > 0 and buffers.descriptor[words.NANOSECONDS] > 0


def test_forgetting_lets_go_of_the_keys(pool: Pool) -> None:
    """A decoder that waits for its next context must not hold the last one's memory."""
    import gc
    import weakref

    step = LayerStep(pool, Format.FLOAT32, buffers=buffers_for(pool, 1))
    path = path_of(pool, 300, 1)
    assert plan_paths(step, [path], [(0, 300)], (Q_HEADS, 1), 20, scale=0.3)
    held = weakref.ref(path.segments[0])
    keys = weakref.ref(path.segments[0].keys)
    step.forget()
    del path
    gc.collect()
    assert held() is None and keys() is None


def test_buffers_that_are_too_small_are_named(pool: Pool) -> None:
    step = LayerStep(pool, Format.FLOAT32, buffers=buffers_for(pool, 1))
    path = path_of(pool, 300, 1)
    with pytest.raises(ShapeError, match=r"the buffer queries must be 1-D.*room for 192 numbers"):
        plan_paths(step, [path, path], [(0, 300)] * 2, (Q_HEADS, 1), 20, scale=0.3)
