"""A step whose queries and results lie in memory from outside, as a captured graph needs it."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from retrieval_attn.cpu.host_attend import attend_paths, plan_paths
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.step import planned as planned_module
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.cpu.step.tables import StepBuffers
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.task import tasks as words
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


def coded_path(tokens: int, seed: int, capacity: int) -> SequenceKV:
    """Keys that a device has codes of, but for the last 40, which are scanned."""
    rng = np.random.default_rng(seed)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, Format.FLOAT32, index=IndexSpec.of("device", {"key_bytes": 16}))
    path.reserve(capacity)
    keys, values = (rng.standard_normal((HEADS, tokens, dim), np.float32) for dim in (DIM, VALUE_DIM))
    path.append(keys, values)
    path.build_index(4, tokens - 40)
    return path


@pytest.mark.parametrize("behind", [0, -1])
def test_nothing_behind_the_candidates_is_read(pool: Pool, behind: int) -> None:
    """The last query has all that it has room for, whatever lies behind them: 40, where k = 20 asks for 57."""
    path, rng = coded_path(700, 0, 800), np.random.default_rng(5)
    memory = np.full((Q_HEADS * 3 + 2, 40), behind, np.int32)
    memory[:-2] = rng.permuted(np.tile(np.arange(600, dtype=np.int32), (Q_HEADS * 3, 1)), axis=1)[:, :40]
    step = LayerStep(pool, Format.FLOAT32, buffers=buffers_for(pool, 3)._replace(candidates=memory[:-2]))
    assert plan_paths(step, [path], [(4, 660)], (Q_HEADS, 3), 20, scale=0.3)
    step.queries[0] = rng.standard_normal((Q_HEADS, 3, DIM), dtype=np.float32)
    cost = step.run()
    assert cost.keys_scanned == Q_HEADS * 3 * 40


def test_a_plan_moves_to_keys_that_are_searched_alike(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, and after `forget`: the bits of a plan of its own. Breaks if something of the last one stays."""
    made: list[object] = []
    make = planned_module.row_tables

    def noted(*given: Any) -> Any:
        made.append(given)
        return make(*given)

    monkeypatch.setattr(planned_module, "row_tables", noted)
    n, room, rng = 3, 40, np.random.default_rng(5)
    candidates = rng.integers(0, 600, (Q_HEADS * n, room)).astype(np.int32)
    buffers = buffers_for(pool, n)._replace(candidates=candidates)
    step = LayerStep(pool, Format.FLOAT32, buffers=buffers)
    buffers.queries[:] = rng.standard_normal(len(buffers.queries), dtype=np.float32)
    # searched otherwise: no tokens to scan, another beginning; the last ones are searched as earlier ones were
    cases = [(700, 4, 700), (700, 4, 700), (750, 4, 700), (750, 5, 700), (700, 4, 690), (700, 4, 650)]
    tables = [1, 1, 2, 3, 3, 3]
    for seed, ((tokens, start, stop), expected) in enumerate(zip(cases, tables, strict=True)):
        path = coded_path(tokens, seed, 800 + 100 * seed)
        assert plan_paths(step, [path], [(start, stop)], (Q_HEADS, n), 20, scale=0.3)
        assert len(made) == expected, (tokens, start, stop)
        step.run()
        got = step.out.copy(), step.lse.copy()
        own = LayerStep(pool, Format.FLOAT32, buffers=buffers._replace(descriptor=np.zeros_like(buffers.descriptor)))
        assert plan_paths(own, [path], [(start, stop)], (Q_HEADS, n), 20, scale=0.3)
        made.pop()
        buffers.out[:], buffers.lse[:] = np.nan, np.nan
        own.run()
        np.testing.assert_array_equal(got[0], own.out)
        np.testing.assert_array_equal(got[1], own.lse)
        if seed % 2:
            step.forget()


def test_a_moved_plan_lets_go_of_the_keys(pool: Pool) -> None:
    step = LayerStep(
        pool, Format.FLOAT32, buffers=buffers_for(pool, 1)._replace(candidates=np.zeros((Q_HEADS, 40), np.int32))
    )
    held: list[Any] = []
    for seed in range(2):
        path = coded_path(700, seed, 800)
        assert plan_paths(step, [path], [(4, 700)], (Q_HEADS, 1), 20, scale=0.3)
        held += [weakref.ref(path.segments[0].keys), weakref.ref(path.segments[0].indexes[0])]
        step.forget()
        del path
    gc.collect()
    assert not any(one() is not None for one in held)


def test_a_plan_keeps_what_rows_that_did_not_change_have(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come, grow, go and are forgotten between others: the bits of a plan made anew. Tables are made for
    a row that is searched as none was in its place.
    """
    made: list[int] = []
    numbers: dict[int, int] = {}
    make = planned_module.row_tables

    def noted(own: Any, *given: Any) -> Any:
        made.append(numbers[id(own[0].keys)])
        return make(own, *given)

    monkeypatch.setattr(planned_module, "row_tables", noted)
    paths, rng = [path_of(pool, 600 + 70 * seed, seed) for seed in range(5)], np.random.default_rng(7)
    candidates = rng.integers(0, 600, (3 * Q_HEADS, 40)).astype(np.int32)
    paths += [coded_path(700, 7, 800), coded_path(720, 8, 800)]
    numbers.update((id(path.segments[0].keys), number) for number, path in enumerate(paths))
    buffers = buffers_for(pool, 3)._replace(candidates=candidates)
    step = LayerStep(pool, Format.FLOAT32, buffers=buffers)
    buffers.queries[:] = rng.standard_normal(len(buffers.queries), dtype=np.float32)
    cases: list[tuple[list[tuple[int, int]], list[int]]] = [
        ([(0, 500), (1, 600), (2, 700)], [0, 1, 2]),
        ([(0, 500), (3, 600), (2, 700)], []),
        ([(0, 500), (3, 650), (4, 700)], []),
        ([(0, 500), (5, 690), (4, 700)], [5]),
        ([(6, 690), (5, 690), (4, 640)], [6]),
        ([(6, 690), (6, 690), (4, 640)], []),
    ]
    for number, (rows, expected) in enumerate(cases):
        own, spans = [paths[path] for path, _ in rows], [(4, stop) for _, stop in rows]
        made.clear()
        assert plan_paths(step, own, spans, (Q_HEADS, 1), 20, scale=0.3)
        assert made == expected, number
        step.run()
        got = step.out.copy(), step.lse.copy()
        other = LayerStep(pool, Format.FLOAT32, buffers=buffers._replace(descriptor=np.zeros_like(buffers.descriptor)))
        assert plan_paths(other, own, spans, (Q_HEADS, 1), 20, scale=0.3)
        buffers.out[:], buffers.lse[:] = np.nan, np.nan
        other.run()
        np.testing.assert_array_equal(got[0], other.out)
        np.testing.assert_array_equal(got[1], other.lse)
    made.clear()
    step.forget(1)
    assert plan_paths(step, own, spans, (Q_HEADS, 1), 20, scale=0.3) and not made
    step.run()
    np.testing.assert_array_equal(got[0], step.out)
    keys = weakref.ref(paths[6].segments[0].keys)
    step.forget(0)
    step.forget(1)
    del own, paths, other
    gc.collect()
    assert keys() is None
