"""The host store against a plain list of tokens, over appends, crops, forks and searches in any order."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrieval_attn.cpu import attend
from retrieval_attn.cpu import segment as segment_module
from retrieval_attn.cpu import store as store_module
from retrieval_attn.cpu.ahead import kernel_jobs
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV, held_memory
from retrieval_attn.errors import ConfigError, MemoryPlanError, ShapeError
from retrieval_attn.index import FlatIndex, register
from retrieval_attn.index import memory as memory_module
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.task.tasks import task_address
from tests.cpu.reference import attention, best_ids, in_threads, normal, whole_numbers

HEADS, DIM, VALUE_DIM = 2, 8, 5
F32, INT8 = Format.FLOAT32, Format.INT8


@register()
class CopyingIndex(FlatIndex):
    """An index that keeps its own copy and cannot forget: stale keys show, as they would in a graph."""

    kind = "test-copying"

    def insert(self, keys: npt.NDArray[Any]) -> None:
        super().insert(keys.copy())

    def truncate(self, length: int) -> bool:
        return False


@register()
class SlowIndex(CopyingIndex):
    """Another thread gets its turn in the middle of every insertion."""

    kind = "test-slow"

    def insert(self, keys: npt.NDArray[Any]) -> None:
        time.sleep(0.001)
        super().insert(keys)


@dataclass
class Model:
    """Tokens of a path as one array, grown by copying."""

    keys: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((HEADS, 0, DIM), np.float32))
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((HEADS, 0, VALUE_DIM), np.float32))

    def append(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> None:
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)

    def truncate(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :length], self.values[:, :length]

    def fork(self) -> Model:
        return Model(self.keys, self.values)


def tokens(rng: np.random.Generator, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    return whole_numbers(rng, (HEADS, count, DIM)), rng.standard_normal((HEADS, count, VALUE_DIM), dtype=np.float32)


def assert_attend(
    path: SequenceKV,
    keys: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    top_k: int | None,
    softcap: float | None = None,
) -> None:
    """Equal to attention over exactly the best top_k of [start, stop); keys and queries are whole numbers."""
    got = attend_path(path, queries, start, stop, top_k, scale=0.25, softcap=softcap)
    q_heads, n, _ = queries.shape
    group = q_heads // keys.shape[0]
    assert got.out.shape == (q_heads, n, values.shape[2]) and got.lse.shape == (q_heads, n)
    assert got.out.dtype == got.lse.dtype == np.float32
    for head in range(q_heads):
        mine, value = keys[head // group, start:stop], values[head // group, start:stop]
        ids = best_ids(queries[head] @ mine.T, stop - start if top_k is None else top_k)
        taken = np.zeros((n, stop - start + 1), bool)  # id -1 falls into a last column that is dropped
        np.put_along_axis(taken, ids, True, axis=1)
        out, lse = attention(queries[head], mine, value, taken[:, :-1], 0.25, softcap)
        np.testing.assert_allclose(got.out[head], out, atol=2e-6)
        np.testing.assert_allclose(got.lse[head], lse, atol=2e-6)
    assert got.cost.keys_scanned == q_heads * n * (stop - start)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segments of a few tokens, so that short sequences of operations cross all their borders."""
    monkeypatch.setattr(store_module, "MIN_TAIL_TOKENS", 4)
    monkeypatch.setattr(store_module, "COPIED_TOKENS", 3)
    yield


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "attend", "attend", "truncate", "fork", "build", "build", "drop", "reserve"]
        ),
        st.integers(0, 99),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    min_size=10,
    max_size=30,
)


@pytest.mark.parametrize(
    "kind, fmt, options",
    [("flat", F32, {}), ("test-copying", F32, {}), ("flat", INT8, {}), ("flat", INT8, {"codes": "int8"})],
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(operations=operations)
def test_any_sequence_of_operations(
    kind: str, fmt: Format, options: dict[str, str], small_segments: None, operations: list[tuple[str, int, int, int]]
) -> None:
    """Every path answers as its own list of tokens would, whatever its forks do; what is read is what was stored.

    Breaks if a fork's memory is overwritten, if an index returns keys of forgotten tokens or misses new ones,
    if results of segments are merged in the wrong order, if positions shift at a segment's border, if a copy between
    segments loses the step behind a row of int8, or if a row's width is taken for its dim.
    """
    rng = np.random.default_rng(0)

    def asked(n: int) -> npt.NDArray[np.float32]:
        queries = whole_numbers(rng, (2 * HEADS, n, DIM))
        if fmt is INT8:
            queries[..., 0] = 0  # the number that makes a step 1 must not drown the others
        return queries

    made = SequenceKV(HEADS, DIM, VALUE_DIM, fmt, index=IndexSpec.of(kind, options)).reserve(6)
    paths = [(made, Model())]
    for name, which, a, b in operations:
        path, model = paths[which % len(paths)]
        length = len(path)
        start, stop = sorted((a * length // 20, b * length // 20))
        if name == "append":
            keys, values = tokens(rng, a)
            if fmt is INT8:
                keys[..., 0] = 127  # the largest of each row: a step is exactly 1, and keys are stored as they are
            new = from_float32(keys, fmt), from_float32(values, fmt)
            path.append(*new)
            model.append(keys, to_float32(new[1], fmt))
        elif name == "truncate":
            path.truncate(length - a % (length + 1))
            model.truncate(len(path))
        elif name == "fork" and len(paths) < 4:
            paths.append((path.fork(), model.fork()))
        elif name == "drop" and len(paths) > 1:
            paths.pop(which % len(paths))
        elif name == "build":
            path.build_index(start, stop)
        elif name == "reserve":
            path.reserve(a)
        elif name == "attend":
            top_k = None if which % 4 == 0 else 1 + which % 7
            assert_attend(path, model.keys, model.values, asked(1 + which % 3), start, stop, top_k)
        for path, model in paths:
            assert path.nbytes == len(path) * HEADS * (fmt.row_bytes(DIM) + fmt.row_bytes(VALUE_DIM))
            keys, values = path.read(0, len(path))
            np.testing.assert_array_equal(to_float32(keys, fmt), model.keys)
            np.testing.assert_array_equal(to_float32(values, fmt), model.values)
    for path, model in paths:
        for top_k in (3, None):
            assert_attend(path, model.keys, model.values, asked(2), 0, len(path), top_k)


def test_a_crop_into_an_earlier_segment_leaves_forks_alone(small_segments: None) -> None:
    """Breaks if a fork freezes the last segment only: the other path crops past it and writes on in a shared one."""
    rng = np.random.default_rng(0)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32).reserve(6), Model()
    for count in (6, 1):
        new = tokens(rng, count)
        path.append(*new)
        model.append(*new)
    fork = path.fork()
    path.truncate(5)
    path.append(*tokens(rng, 1))
    np.testing.assert_array_equal(fork.read(0, 7)[0], model.keys)
    np.testing.assert_array_equal(fork.read(0, 7)[1], model.values)


@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16])
def test_real_sizes(fmt: Format, compiled: None, nan_empty: None) -> None:
    """One long segment and its tail, groups of 1, 4 and 8, soft-cap, top_k above the number of keys."""
    rng = np.random.default_rng(1)
    keys = whole_numbers(rng, (2, 5000, 64))
    values = normal(rng, (2, 5000, 64), fmt)
    stored = keys if fmt is F32 else (keys.view(np.uint32) >> 16).astype(np.uint16)
    path = SequenceKV(2, 64, 64, fmt).reserve(4100)
    path.append(stored[:, :3000], values[:, :3000])
    path.build_index(4, 2900)
    path.append(stored[:, 3000:], values[:, 3000:])
    assert len(path.segments) == 2 and path.nbytes == 2 * 5000 * 128 * fmt.bytes
    for q_heads, n, top_k, softcap in ((2, 1, 100, None), (8, 3, 100, 5.0), (16, 1, 6000, None), (8, 1, None, 5.0)):
        queries = whole_numbers(rng, (q_heads, n, 64), 1)
        assert_attend(path, keys, to_float32(values, fmt), queries, 4, 4990, top_k, softcap)


def test_forks_hold_memory_once() -> None:
    """A second continuation of 2,000 tokens costs its own tokens only; reads are views."""
    rng = np.random.default_rng(2)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32).reserve(3000)
    path.append(*tokens(rng, 2000))
    token_bytes = HEADS * (DIM + VALUE_DIM) * 4
    forks = [path.fork() for _ in range(3)]
    for fork in (path, *forks):
        fork.append(*tokens(rng, 10))
    assert held_memory([path, *forks]).host == (2000 + 4 * 10) * token_bytes
    assert [fork.nbytes for fork in forks] == [2010 * token_bytes] * 3
    assert np.shares_memory(path.read(0, 2000)[0], forks[2].read(0, 2000)[0])
    assert not np.shares_memory(path.read(2000, 2010)[0], forks[2].read(2000, 2010)[0])


def test_many_forks_leave_no_chain() -> None:
    """Beam search forks at every step: 600 steps of one token must not become 600 segments to search."""
    rng = np.random.default_rng(3)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32), Model()
    for _ in range(600):
        path = path.fork()
        new = tokens(rng, 1)
        path.append(*new)
        model.append(*new)
    assert len(path.segments) <= 3
    np.testing.assert_array_equal(path.read(0, 600)[0], model.keys)


def test_crop_and_ask_again_stays_in_place() -> None:
    """An unshared path with a flat index reuses its segment after a crop into the indexed part."""
    rng = np.random.default_rng(4)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32), Model()
    for _ in range(5):
        path.truncate(min(len(path), 50))
        model.truncate(50)
        new = tokens(rng, 100 - len(path))
        path.append(*new)
        model.append(*new)
        assert_attend(path, model.keys, model.values, whole_numbers(rng, (2, 1, DIM)), 2, 90, 5)
    assert len(path.segments) == 1


def test_an_index_that_cannot_forget_is_left_behind() -> None:
    """After a crop into what a copying index covers, other tokens go to a new segment: no stale keys."""
    rng = np.random.default_rng(11)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32, index=IndexSpec.of("test-copying")), Model()
    for crop in (0, 350, 300):
        path.truncate(crop)
        model.truncate(crop)
        new = tokens(rng, 400 - crop)
        path.append(*new)
        model.append(*new)
        path.build_index(0, 390)
        assert_attend(path, model.keys, model.values, whole_numbers(rng, (4, 2, DIM)), 0, 390, 9)
    assert [segment.length for segment in path.segments] == [400, 100]


def test_crop_of_a_fork_leaves_the_other_alone() -> None:
    """Both paths share the segment; one crops and goes on, the other keeps all its tokens and its index."""
    rng = np.random.default_rng(12)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32), Model()
    new = tokens(rng, 1000)
    path.append(*new)
    model.append(*new)
    path.build_index(0, 900)
    fork, forked = path.fork(), model.fork()
    fork.truncate(500)
    forked.truncate(500)
    for one, its in ((fork, forked), (path, model)):
        new = tokens(rng, 100)
        one.append(*new)
        its.append(*new)
    for one, its in ((fork, forked), (path, model)):
        assert_attend(one, its.keys, its.values, whole_numbers(rng, (4, 1, DIM)), 0, len(one) - 10, 9)


def test_nan_is_not_lost_between_segments(small_segments: None) -> None:
    """With room for all keys a NaN key takes part, as in full attention: it must not rank below padding."""
    rng = np.random.default_rng(13)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32).reserve(20)
    keys, values = tokens(rng, 40)
    keys[0, 5] = np.nan
    path.append(keys[:, :20], values[:, :20])
    path.append(keys[:, 20:], values[:, 20:])
    assert len(path.segments) == 2
    for top_k in (40, 100, None):
        got = attend_path(path, np.ones((2, 1, DIM), np.float32), 0, 40, top_k, scale=1.0)
        assert np.isnan(got.out[0]).all() and np.isnan(got.lse[0]).all()
        assert np.isfinite(got.out[1]).all() and np.isfinite(got.lse[1]).all()


def attend_often(path: SequenceKV, model: Model, queries: npt.NDArray[np.float32]) -> None:
    for stop in range(150, 400, 50):
        assert_attend(path, model.keys, model.values, queries, 0, stop, 9)


def test_forks_in_two_threads_extend_one_index() -> None:
    """Both insert the same tokens lazily: breaks if they are inserted twice, which shifts later ids."""
    rng = np.random.default_rng(5)
    for _ in range(3):
        path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32, index=IndexSpec.of("test-slow")), Model()
        new = tokens(rng, 400)
        path.append(*new)
        model.append(*new)
        path.build_index(0, 100)
        fork = path.fork()
        queries = whole_numbers(rng, (2, 1, DIM))
        in_threads(*[functools.partial(attend_often, one, model, queries) for one in (path, fork)])


@pytest.mark.parametrize("kind", ["test-copying", "flat"])
def test_nobody_changes_the_index_of_a_sealed_segment(kind: str) -> None:
    """Everything is found all the same, from any start to any stop; forks that go on index what is theirs alone."""
    rng = np.random.default_rng(15)
    path, model = SequenceKV(HEADS, DIM, VALUE_DIM, F32, index=IndexSpec.of(kind)), Model()
    path.tail_tokens = 50
    new = tokens(rng, 300)
    path.append(*new)
    model.append(*new)
    path.build_index(10, 150)
    path.segments[0].sealed = True
    fork = path.fork()
    more = tokens(rng, 280)
    fork.append(*more)
    model.append(*more)
    (sealed,), heads = path.segments, path.segments[0].indexes
    fork.extend_index(580)
    fork.build_index(0, 570)
    queries = whole_numbers(rng, (2, 1, DIM))
    for start in (0, 10, 90, 149, 150, 200, 299, 320):
        for stop in (start + 1, 140, 150, 151, 299, 300, 500, 580):
            if start < stop:
                assert_attend(fork, model.keys, model.values, queries, start, stop, 9)
    assert sealed.indexes is heads and sealed.indexed == (10, 150) and fork.segments[0] is sealed
    assert fork.segments[1].indexed[1] > 0


def test_thread_count_is_used_and_restored() -> None:
    """The same answer, and the caller's count afterwards, also when the call fails."""
    rng = np.random.default_rng(6)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32, threads=1)
    path.append(*tokens(rng, 3000))
    before = numba.get_num_threads()
    queries = rng.standard_normal((4, 2, DIM), dtype=np.float32)
    for top_k in (7, None):
        one = attend_path(path, queries, 0, 3000, top_k, scale=1.0)
        path.threads = before
        most = attend_path(path, queries, 0, 3000, top_k, scale=1.0)
        path.threads = 1
        np.testing.assert_array_equal(one.out, most.out)
        np.testing.assert_array_equal(one.lse, most.lse)
        assert numba.get_num_threads() == before


def test_jobs_compile_what_attend_runs() -> None:
    """After it, the first token must not wait for a compiler."""
    for job in kernel_jobs(F32, IndexSpec.of("flat"), retrieve_all=True):
        job.run()
    before = task_address.cache_info().misses, len(attend._attend_range_heads.overloads)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32)
    path.append(*tokens(np.random.default_rng(10), 100))
    for top_k in (3, None):
        attend_path(path, np.ones((4, 1, DIM), np.float32), 0, 90, top_k, scale=1.0)
    assert (task_address.cache_info().misses, len(attend._attend_range_heads.overloads)) == before
    assert min(before) > 0


def test_empty_paths_and_ranges() -> None:
    """Nothing to attend to is an empty partial, not an error; n of 0 too."""
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32)
    queries = np.ones((4, 3, DIM), np.float32)
    path.build_index(0, 0)
    keys, values = path.read(0, 0)
    path.append(keys, values)
    assert len(path) == 0 and path.nbytes == held_memory([path]).host == 0 and path.segments == ()
    for top_k in (5, None):
        got = attend_path(path, queries, 0, 0, top_k, scale=1.0)
        assert (got.out == 0).all() and got.out.shape == (4, 3, VALUE_DIM) and np.isneginf(got.lse).all()
        assert (got.cost.keys_scanned, got.cost.bytes_read) == (0, 0)
    path.append(*tokens(np.random.default_rng(7), 10))
    assert attend_path(path, queries[:, :0], 0, 10, 5, scale=1.0).out.shape == (4, 0, VALUE_DIM)
    path.truncate(0)
    assert len(path) == 0 and path.fork().fork().segments == ()


def test_costs_are_counted() -> None:
    """bytes_read: keys once per group, then the values of the winners; without a search everything."""
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32)
    path.append(*tokens(np.random.default_rng(8), 500))
    queries = np.ones((6, 1, DIM), np.float32)
    got = attend_path(path, queries, 0, 400, 10, scale=1.0)
    assert got.cost.keys_scanned == 6 * 400
    assert got.cost.bytes_read == HEADS * 400 * DIM * 4 + 6 * 10 * VALUE_DIM * 4
    got = attend_path(path, queries, 100, 500, None, scale=1.0)
    assert (got.cost.keys_scanned, got.cost.bytes_read) == (6 * 400, HEADS * 400 * (DIM + VALUE_DIM) * 4)
    assert path.index_seconds == 0
    path.build_index(0, 400, np.ones((6, 3, DIM), np.float32))
    assert path.index_seconds > 0 and path.fork().index_seconds == 0


def test_huge_pages_are_asked_for_and_their_absence_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Large segments only; a system without them costs speed, which the user is told, once."""
    asked = []

    def refuse(memory: object) -> None:
        asked.append(memory)
        raise OSError("no huge pages here")

    monkeypatch.setattr(memory_module, "_madvise", refuse)
    memory_module._say_refused.cache_clear()
    for _ in range(2):
        segment_module.Segment(1, 20000, 128, 128, Format.BFLOAT16)
    assert len(asked) == 4
    segment_module.Segment(1, 20000, 128, 128, Format.BFLOAT16, expected=5)
    segment_module.Segment(1, 1000, 128, 128, Format.BFLOAT16)
    assert len(asked) == 4
    assert [record.message for record in caplog.records if "2 MiB" in record.message] == [
        "2 MiB pages are not available for host keys and values (no huge pages here): search will be slower"
    ]


def test_bad_input_is_named() -> None:
    """And leaves the path as it was."""
    rng = np.random.default_rng(9)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, F32)
    keys, values = tokens(rng, 6)
    path.append(keys, values)
    for bad_keys, bad_values in (
        (keys.astype(np.float64), values),
        (keys[:, :3], values),
        (keys[:1], values[:1]),
        (values, keys),
        (keys[..., ::2], values),
        (keys[0], values[0]),
    ):
        with pytest.raises(ShapeError):
            path.append(bad_keys, bad_values)
    queries = np.ones((4, 1, DIM), np.float32)
    wrong: list[Any] = [queries[:3], queries[..., :4], queries[0], queries.astype(np.float16), queries[:0]]
    for bad in wrong:
        with pytest.raises(ShapeError):
            attend_path(path, bad, 0, 6, 2, scale=1.0)
    for top_k in (0, -1, 0.5, True):
        with pytest.raises(ConfigError, match="top_k"):
            attend_path(path, queries, 0, 6, top_k, scale=1.0)  # type: ignore[arg-type]
    for scale, softcap in ((np.nan, None), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="scale|softcap"):
            attend_path(path, queries, 0, 6, 2, scale=scale, softcap=softcap)
    for start, stop in ((-1, 3), (4, 3), (0, 7)):
        for call in (path.read, path.build_index, lambda a, b: attend_path(path, queries, a, b, 2, scale=1.0)):
            with pytest.raises(ConfigError, match="within 0 .. 6"):
                call(start, stop)
    for length in (-1, 7):
        with pytest.raises(ConfigError, match="0 .. 6"):
            path.truncate(length)
    np.testing.assert_array_equal(path.read(0, 6)[0], keys)
    with pytest.raises(ConfigError, match="num_kv_heads=0"):
        SequenceKV(0, DIM, VALUE_DIM, F32)
    with pytest.raises(ConfigError, match="'flatt'"):
        SequenceKV(HEADS, DIM, VALUE_DIM, F32, index=IndexSpec.of("flatt"))
    with pytest.raises(ConfigError, match="no option m"):
        SequenceKV(HEADS, DIM, VALUE_DIM, F32, index=IndexSpec.of("flat", {"m": 3}))
    with pytest.raises(ConfigError, match="reserve_tokens=-1"):
        SequenceKV(HEADS, DIM, VALUE_DIM, F32).reserve(-1)


def test_memory_that_cannot_be_had_is_named() -> None:
    """A clear error before anything is written; the path stays usable."""
    path = SequenceKV(HEADS, 2**20, VALUE_DIM, F32).reserve(2**31 - 1)
    keys, values = np.zeros((HEADS, 1, 2**20), np.float32), np.zeros((HEADS, 1, VALUE_DIM), np.float32)
    with pytest.raises(MemoryPlanError, match="but the allocation failed"):
        path.append(keys, values)
    assert len(path) == 0
    path.reserve(1)
    path.append(keys, values)
    assert len(path) == 1


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell which pages are asked for")
@pytest.mark.parametrize(("sure", "huge"), [(1000, False), (None, True)])
def test_room_that_may_stay_empty_asks_for_no_large_pages(sure: int | None, huge: bool) -> None:
    """A large page per head and layer for a short text would be many times what the text needs."""
    path = SequenceKV(2, 64, 64, F32).reserve(20_000, sure)
    path.append(np.zeros((2, 1000, 64), np.float32), np.zeros((2, 1000, 64), np.float32))
    assert ("hg" in flags_at(path.parts(0, 1000)[0][0].keys.ctypes.data)) == huge


def flags_at(address: int) -> list[str]:
    """What the system was told of the memory there: "hg" where large pages are asked for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no memory there")
