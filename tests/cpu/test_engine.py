"""A layer's step: equal to search and attention done apart, for any threads, rows and kinds; named errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from retrieval_attn.cpu import host_attend
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.host_attend import HostPartial, attend_path, attend_paths, plan_paths, step_pieces
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.step import plan as engine_module
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.cpu.step.run import entry_at
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV, indexed_from
from retrieval_attn.errors import BackendError, ConfigError, ShapeError
from retrieval_attn.index.auto import notes
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.roargraph import index as graph_module
from retrieval_attn.index.sketch import build as sketch_module
from retrieval_attn.index.sketch import task as sketch_task
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.task import scans
from retrieval_attn_eval.bench.fidelity.captured_mass import exact_lse
from retrieval_attn_eval.bench.synthetic import SyntheticHead, synthetic_head
from tests.cpu.apart import attend_apart
from tests.cpu.reference import attention, best_ids, in_threads, look_at_share, normal, whole_numbers
from tests.cpu.test_pool import resident_bytes

BF16, F32 = Format.BFLOAT16, Format.FLOAT32
SCALE = 0.09
TOKENS, SINKS, DIM, GROUP = 3000, 4, 64, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, cpus=()) as made:
        yield made


def filled(pool: Pool, heads: int, count: int, dim: int, fmt: Format, seed: int = 0, reserve: int = 4096) -> SequenceKV:
    """A path of normal keys and values."""
    rng = np.random.default_rng(seed)
    path = SequenceKV(heads, dim, dim + 3, fmt, pool=pool).reserve(reserve)
    path.append(normal(rng, (heads, count, dim), fmt), normal(rng, (heads, count, dim + 3), fmt))
    return path


def same(one: HostPartial, other: HostPartial) -> bool:
    """Bit by bit."""
    return np.array_equal(one.out, other.out, equal_nan=True) and np.array_equal(one.lse, other.lse, equal_nan=True)


@pytest.mark.parametrize("n, top_k", [(1, 100), (3, 7), (1, 1), (2, 5000)])
def test_results_do_not_depend_on_the_threads(n: int, top_k: int) -> None:
    """Nor on how many parts the keys are cut into for them: breaks if sums follow the order of finding."""
    queries = np.random.default_rng(1).standard_normal((4, n, 32), dtype=np.float32)
    results = []
    for threads in (1, 2, 5):
        with Pool(threads, cpus=()) as pool:
            path = filled(pool, 2, 20_000, 32, BF16)
            for _ in range(3):
                results.append(attend_path(path, queries, 3, 19_990, top_k, scale=SCALE))
            path.threads = 1
            results.append(attend_path(path, queries, 3, 19_990, top_k, scale=SCALE))
    assert all(same(results[0], other) for other in results)


@pytest.mark.parametrize("dim", [128, 40])
def test_error_is_within_twice_that_of_torch_in_bfloat16(pool: Pool, dim: int) -> None:
    """Of the same attention over the same ids, against float64."""
    path = filled(pool, 1, 4000, dim, BF16)
    queries = np.random.default_rng(2).standard_normal((4, 1, dim)).astype(np.float32)
    queries = torch.from_numpy(queries).bfloat16().float().numpy()
    got = attend_path(path, queries, 0, 4000, 100, scale=SCALE)
    keys, values = (to_float32(array[0], BF16) for array in path.read(0, 4000))
    for head in range(4):
        ids = best_ids(queries[head].astype(np.float64) @ keys.T.astype(np.float64), 100)[0]
        taken = np.ones((1, 100), bool)
        exact = attention(queries[head], keys[ids], values[ids], taken, SCALE)
        k, v, q = (torch.from_numpy(array).bfloat16() for array in (keys[ids], values[ids], queries[head]))
        scores = (q @ k.T) * SCALE
        rough = (torch.softmax(scores, -1) @ v).float().numpy(), torch.logsumexp(scores, -1).float().numpy()
        for mine, right, torchs in zip((got.out[head], got.lse[head]), exact, rough, strict=True):
            allowed = 2 * np.abs(torchs - right).max()
            assert np.abs(mine - right).max() <= allowed and allowed > 0


def test_rows_of_a_batch_are_one_step(pool: Pool) -> None:
    """Different lengths and segments; the same bits as one by one."""
    paths = [filled(pool, 2, count, 32, F32, seed=count) for count in (900, 5000, 64)]
    paths[0] = filled(pool, 2, 900, 32, F32, reserve=900)
    more = normal(np.random.default_rng(3), (2, 700, 32), F32)
    paths[0].append(more, np.concatenate([more, more[..., :3]], axis=2))
    assert len(paths[0].segments) == 2
    queries = list(np.random.default_rng(4).standard_normal((3, 6, 1, 32), dtype=np.float32))
    ranges = [(2, 1500), (0, 4999), (64, 64)]
    together = attend_paths(paths, queries, ranges, 50, scale=SCALE)
    for path, own, (start, stop), got in zip(paths, queries, ranges, together, strict=True):
        assert same(got, attend_path(path, own, start, stop, 50, scale=SCALE))
    assert np.isneginf(together[2].lse).all() and (together[2].out == 0).all()
    with pytest.raises(ShapeError, match="as many queries"):
        attend_paths(paths, queries[:2], ranges, 50, scale=SCALE)
    with pytest.raises(ConfigError, match="within 0 .. 64"):
        attend_paths(paths, queries, [*ranges[:2], (0, 65)], 50, scale=SCALE)


@pytest.fixture(scope="module")
def heads() -> list[SyntheticHead]:
    """Two key-value heads whose queries lie outside the keys, as attention's do."""
    return [synthetic_head(TOKENS, head_dim=DIM, group=GROUP, train=512, decode=6, seed=seed) for seed in (0, 1)]


def trained_path(pool: Pool, heads: list[SyntheticHead], kind: str, options: dict[str, Any]) -> SequenceKV:
    """Tokens of `heads`, an index over all but the sinks and the last 500."""
    path = SequenceKV(2, DIM, DIM, BF16, index=IndexSpec.of(kind, options), pool=pool)
    keys = from_float32(np.stack([head.keys for head in heads]), BF16)
    path.append(keys, normal(np.random.default_rng(5), keys.shape, BF16))
    path.build_index(SINKS, TOKENS - 500, np.concatenate([head.train_rotated for head in heads]))
    return path


def graph_path(pool: Pool, heads: list[SyntheticHead]) -> SequenceKV:
    """See `trained_path`, of a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "EXACT_BELOW", 0)
        return trained_path(pool, heads, "roargraph", {"beam": 48})


def apart(path: SequenceKV, queries: npt.NDArray[np.float32], stop: int, top_k: int) -> HostPartial:
    """The way of kinds that have no compiled search."""
    return attend_apart(path, queries, SINKS, stop, top_k, SCALE)


def assert_close(one: HostPartial, other: HostPartial) -> None:
    np.testing.assert_allclose(one.out, other.out, atol=5e-6)
    np.testing.assert_allclose(one.lse, other.lse, atol=5e-6)


def test_graph_step_finds_what_the_index_finds(pool: Pool, heads: list[SyntheticHead]) -> None:
    """Same keys, same attention, same count; one query position, which starts from no earlier search."""
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    path = graph_path(pool, heads)
    got = attend_path(path, queries, SINKS, TOKENS - 500, 20, scale=SCALE)
    again = graph_path(pool, heads)
    expected = apart(again, queries, TOKENS - 500, 20)
    assert_close(got, expected)
    assert got.cost.keys_scanned == expected.cost.keys_scanned < 2 * GROUP * TOKENS * 0.6
    assert got.cost.search_seconds > 0 and got.cost.attend_seconds > 0


@pytest.mark.parametrize("n, top_k", [(1, 20), (3, 1)])
@pytest.mark.parametrize("kind, options", [("flat", {"codes": "int8"}), ("sketch", {"key_bytes": 12})])
def test_coded_scan_finds_what_the_index_finds(
    heads: list[SyntheticHead], n: int, top_k: int, kind: str, options: dict[str, Any]
) -> None:
    """The same keys get an exact score, however many parts the codes are scanned in."""
    queries = np.concatenate([head.decode for head in heads])[:, :n]
    results = []
    for threads in (1, 5):
        with Pool(threads, cpus=()) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setattr(scans if kind == "flat" else sketch_task, "CODED_TOKENS", 300)
            path = trained_path(pool, heads, kind, options)
            assert path.index_kinds == {kind: 2}
            results += [attend_path(path, queries, SINKS, stop, top_k, scale=SCALE) for stop in (TOKENS - 500, TOKENS)]
            assert results[-1].cost.keys_scanned == 2 * GROUP * n * (TOKENS - SINKS)
            wrong = queries.copy()
            wrong[1, 0, 3] = np.nan
            got = attend_path(path, wrong, SINKS, TOKENS, top_k, scale=SCALE)
            assert np.isnan(got.lse[1, 0]) and np.isnan(got.lse).sum() == 1
            expected = apart(path, queries, TOKENS - 500, top_k)
    assert same(results[0], results[2]) and same(results[1], results[3])
    assert_close(results[0], expected)


@pytest.mark.parametrize("n", [1, 3])
def test_few_leaves_of_a_sketch_are_looked_at_as_the_index_does(heads: list[SyntheticHead], n: int) -> None:
    """Four queries together, whatever the number of threads and parts."""
    queries = np.concatenate([head.decode for head in heads])[:, :n]
    results = []
    for threads in (1, 5):
        with Pool(threads, cpus=()) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sketch_task, "CODED_TOKENS", 300)
            patch.setattr(sketch_module, "MIN_LEAVES", 32)
            look_at_share(patch, 0.06)
            path = trained_path(pool, heads, "sketch", {"key_bytes": 16})
            results.append(attend_path(path, queries, SINKS, TOKENS - 500, 20, scale=SCALE))
            expected = apart(path, queries, TOKENS - 500, 20)
            scanned = results[-1].cost.keys_scanned
            assert scanned == expected.cost.keys_scanned < 2 * GROUP * n * (TOKENS - 500 - SINKS) * 0.8
    assert same(results[0], results[1])
    assert_close(results[0], expected)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("flat", {"codes": "none"}),
        ("flat", {"codes": "int8"}),
        ("sketch", {"key_bytes": 12}),
        ("roargraph", {"beam": 48}),
    ],
    ids=["scan", "codes", "sketch", "graph"],
)
def test_rows_of_several_largest_numbers_are_as_alone(
    pool: Pool, heads: list[SyntheticHead], kind: str, options: dict[str, Any]
) -> None:
    """The same bits in one step. Breaks if a row is searched for the largest number of all."""
    path = graph_path(pool, heads) if kind == "roargraph" else trained_path(pool, heads, kind, options)
    queries = np.concatenate([head.decode for head in heads])[:, :3]
    budgets = tuple(HeadBudgets((most, 3) * GROUP) for most in (4, 200, 30))
    spans = [(SINKS, TOKENS - 500), (SINKS, TOKENS), (SINKS, TOKENS - 450)]
    step = LayerStep(pool, BF16)
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 0)):
        asked = tuple(budgets[row] for row in order)
        assert plan_paths(step, [path] * 3, [spans[row] for row in order], (len(queries), 1), asked, scale=SCALE)
        for place, row in enumerate(order):
            step.queries[place] = queries[:, row : row + 1]
        step.run()
        for place, row in enumerate(order):
            alone = attend_path(path, queries[:, row : row + 1], *spans[row], budgets[row], scale=SCALE)
            assert np.array_equal(step.out[place], alone.out) and np.array_equal(step.lse[place], alone.lse)


def test_a_sketch_that_finds_too_few_gets_an_exact_answer(pool: Pool, heads: list[SyntheticHead]) -> None:
    """Nearly all keys are missing from the leaves: fewer candidates than are scored again, so all keys are scanned."""
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    paths = [
        trained_path(pool, heads, kind, options)
        for kind, options in (("sketch", {"key_bytes": 16}), ("flat", {"codes": "none"}))
    ]
    for index in cast("Any", paths[0].segments[0]).indexes:
        ids = index._search.ids
        index._search = index._search._replace(ids=np.where(ids % 100 == 0, ids, -1).astype(np.int32), whole=0)
    got, exact = (attend_path(path, queries, SINKS, TOKENS - 500, 20, scale=SCALE) for path in paths)
    assert same(got, exact)


def test_tail_after_the_graph_is_scanned_then_inserted(pool: Pool, heads: list[SyntheticHead]) -> None:
    """Up to tail_tokens: what a scan of the tail finds beside the graph; beyond them the index takes them."""
    path, whole = graph_path(pool, heads), trained_path(pool, heads, "flat", {})
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    got = attend_path(path, queries, SINKS, TOKENS, 20, scale=SCALE)
    exact = attend_path(whole, queries, SINKS, TOKENS, 20, scale=SCALE)
    assert indexed_from(path, 0) == TOKENS - 500 - SINKS
    assert got.cost.keys_scanned >= 2 * GROUP * 500
    # the newest 500 alone give at most what everything gives, and all of it is seen
    newest = attend_path(whole, queries, TOKENS - 500, TOKENS, 20, scale=SCALE)
    assert (got.lse >= newest.lse - 1e-5).all() and (got.lse <= exact.lse + 1e-5).all()
    assert np.exp(got.lse - exact.lse).mean() > 0.9
    path.tail_tokens = 499
    attend_path(path, queries, SINKS, TOKENS, 20, scale=SCALE)
    assert indexed_from(path, 0) == TOKENS - SINKS
    assert_close(attend_path(path, queries, SINKS, TOKENS, 20, scale=SCALE), apart(path, queries, TOKENS, 20))


def test_ranges_that_the_graph_cannot_answer_are_scanned(pool: Pool, heads: list[SyntheticHead]) -> None:
    """Tokens before it, a begin far inside it, an end far inside it, many wanted, a query that is not finite."""
    path, exact = graph_path(pool, heads), trained_path(pool, heads, "flat", {})
    queries = np.concatenate([head.decode for head in heads])[:, 1:2]
    for start, stop, top_k in ((1300, 2500, 10), (SINKS, 900, 10), (SINKS, 2500, 1000), (0, 3, 10)):
        got = attend_path(path, queries, start, stop, top_k, scale=SCALE)
        assert same(got, attend_path(exact, queries, start, stop, top_k, scale=SCALE)), (start, stop, top_k)
    wrong = queries.copy()
    wrong[1, 0, 3] = np.nan
    got = attend_path(path, wrong, SINKS, 2500, 10, scale=SCALE)
    assert np.isnan(got.out[1]).all() and np.isnan(got.lse[1]).all()
    assert np.isfinite(got.out[[0, 2, 3]]).all() and got.cost.keys_scanned >= 2500 - SINKS
    got = attend_path(path, queries, 0, 2500, 10, scale=SCALE)  # the sinks join what the graph finds
    assert np.isfinite(got.lse).all()


def test_heads_of_different_kinds(pool: Pool, heads: list[SyntheticHead]) -> None:
    """One head exact, one by a graph: each as in a path of its own kind, in the step and apart."""
    path, exact = graph_path(pool, heads), trained_path(pool, heads, "flat", {})
    graph = graph_path(pool, heads)
    segment = path.segments[0]
    flat = FlatIndex(segment.keys[0, SINKS : TOKENS - 500], BF16)
    segment.take_index(SINKS, (flat, *segment.indexes[1:]))
    assert path.index_kinds == {"flat": 1, "roargraph": 1}
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    got = attend_path(path, queries, SINKS, TOKENS - 500, 20, scale=SCALE)
    ours, exacts = (attend_path(p, queries, SINKS, TOKENS - 500, 20, scale=SCALE) for p in (graph, exact))
    assert np.array_equal(got.out[:GROUP], exacts.out[:GROUP]) and np.array_equal(got.out[GROUP:], ours.out[GROUP:])
    assert_close(apart(path, queries, TOKENS - 500, 20), got)


def test_notes_and_extension(pool: Pool, heads: list[SyntheticHead]) -> None:
    """Notes of indexes are collected once each; `extend_index` inserts ahead of time."""
    path = graph_path(pool, heads)
    for index in path.segments[0].indexes:
        notes[index] = "because"
    assert path.index_notes == ["because"]
    before = path.index_seconds
    path.extend_index(TOKENS - 100)
    assert indexed_from(path, 0) == TOKENS - 100 - SINKS and path.index_seconds > before
    empty = SequenceKV(1, 4, 4, F32)
    empty.extend_index(0)
    assert empty.index_notes == [] and empty.index_kinds == {} and indexed_from(empty, 0) == 0


def test_captured_mass(pool: Pool) -> None:
    """exp(lse - exact_lse) is the retrieved keys' share of full attention's weight."""
    path = filled(pool, 2, 1500, 32, F32)
    queries = np.random.default_rng(6).standard_normal((4, 2, 32)).astype(np.float32) * 3
    got = attend_path(path, queries, 5, 1400, 30, scale=0.3)
    lse = exact_lse(path, queries, 5, 1400, [3, 0], scale=0.3)
    for row, head in enumerate((3, 0)):
        scores = queries[head].astype(np.float64) @ path.read(5, 1400)[0][head // 2].T * 0.3
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        share = np.sort(weights, axis=1)[:, -30:].sum(axis=1) / weights.sum(axis=1)
        np.testing.assert_allclose(np.exp(got.lse[head] - lse[row]), share, rtol=1e-5)
    assert np.isneginf(exact_lse(path, queries, 5, 5, range(4), scale=0.3)).all()
    with pytest.raises(ConfigError, match="heads"):
        exact_lse(path, queries, 5, 1400, [4], scale=0.3)


def step_of(path: SequenceKV, pool: Pool, top_k: int = 20, **options: Any) -> tuple[LayerStep, list[SearchRange]]:
    pieces = step_pieces(path, SINKS, len(path) - 10)
    assert pieces is not None
    step = LayerStep(pool, path.fmt, **options)
    assert step.plan([pieces], 4, 1, top_k, scale=SCALE)
    return step, pieces


def test_a_callback_on_a_foreign_thread_runs_the_step(pool: Pool) -> None:
    """Through one pointer, as a CUDA host function would; queries and results lie in the step's own arrays."""
    path = filled(pool, 2, 5000, 32, BF16)
    step, _ = step_of(path, pool)
    queries = np.random.default_rng(7).standard_normal((4, 1, 32), dtype=np.float32)
    step.queries[0] = queries
    library = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    callback, descriptor = ctypes.c_void_p(step.callback), ctypes.c_void_p(step.address)
    assert library.pthread_create(ctypes.byref(thread), None, callback, descriptor) == 0
    library.pthread_join(thread, None)
    step.raise_error()
    expected = attend_path(path, queries, SINKS, 4990, 20, scale=SCALE)
    assert np.array_equal(step.out[0], expected.out) and np.array_equal(step.lse[0], expected.lse)
    step.extend([4995])
    step.run()
    assert np.array_equal(step.out[0], attend_path(path, queries, SINKS, 4995, 20, scale=SCALE).out)
    for high in (SINKS - 1, path.segments[0].capacity + 1):
        with pytest.raises(ConfigError, match=f"high={high}"):
            step.extend([high])


def test_a_head_that_cannot_be_searched_is_named(pool: Pool, heads: list[SyntheticHead]) -> None:
    """An index that names a token outside its range: an error with layer and head, never a wrong row."""
    path = graph_path(pool, heads)
    queries = np.concatenate([head.decode for head in heads])[:, :1]
    path.layer = 17
    index: Any = path.segments[0].indexes[1]
    graph = index.search_arguments().graph
    graph.ids[:] = -5
    with pytest.raises(BackendError, match="layer 17, sequence 0, key-value head 1, query 0 of its group: .*build"):
        attend_path(path, queries, SINKS, TOKENS - 500, 20, scale=SCALE)


def test_closed_pools_and_missing_plans_are_named(pool: Pool) -> None:
    """A path on a pool that was closed, and a step that was not told what to do."""
    mine = Pool(2)
    path = filled(mine, 2, 100, 32, F32)
    queries = np.ones((4, 1, 32), np.float32)
    attend_path(path, queries, 0, 90, 5, scale=SCALE)
    mine.close()
    with pytest.raises(BackendError, match="closed"):
        attend_path(path, queries, 0, 90, 5, scale=SCALE)
    with pytest.raises(ConfigError, match="plan first"):
        LayerStep(pool, F32).run()


def test_bad_plans_are_named(pool: Pool) -> None:
    """Shapes, layouts, ranges and numbers, before anything is compiled against them."""
    keys, values = np.zeros((2, 50, 16), np.float32), np.zeros((2, 50, 8), np.float32)
    step = LayerStep(pool, F32)
    good = SearchRange(keys, values, 0, 50, 0)
    assert step.plan([[good]], 4, 1, 5, scale=1.0)
    wrong = [
        good._replace(values=values[:, :40]),
        good._replace(keys=keys[..., :8]),
        good._replace(keys=keys.astype(np.float64)),
        good._replace(high=51),
        good._replace(low=20, high=10),
        good._replace(first=2**32 - 10),
        good._replace(indexes=()),
    ]
    for piece in wrong:
        with pytest.raises(ShapeError):
            step.plan([[piece]], 4, 1, 5, scale=1.0)
    for q_heads, positions, top_k, threads in ((3, 1, 5, None), (4, -1, 5, None), (4, 1, 0, None), (4, 1, 5, 0)):
        with pytest.raises((ShapeError, ConfigError)):
            step.plan([[good]], q_heads, positions, top_k, scale=1.0, threads=threads)
    with pytest.raises(ShapeError, match="at least one piece"):
        step.plan([[]], 4, 1, 5, scale=1.0)


def test_what_a_step_cannot_hold_takes_several(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of too many queries, or more memory than allowed: the same answer by smaller steps."""
    path = filled(pool, 2, 3000, 16, F32)
    queries = whole_numbers(np.random.default_rng(8), (4, 40, 16))
    expected = attend_path(path, queries, 0, 3000, 9, scale=SCALE)
    ran: list[int] = []
    run = LayerStep.run

    def counted(step: LayerStep) -> Any:
        ran.append(step.out.shape[2])
        return run(step)

    monkeypatch.setattr(LayerStep, "run", counted)
    for module, name, value, most in (
        (engine_module, "MAX_LISTS_BYTES", 20_000, 20),
        (host_attend, "MAX_STEP_QUERIES", 1, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            path.steps.clear()
            assert_close(attend_path(path, queries, 0, 3000, 9, scale=SCALE), expected)
        assert max(ran) <= most and sum(ran) == 40
        ran.clear()
    monkeypatch.setattr(engine_module, "MAX_LISTS_BYTES", 100)
    path.steps.clear()
    with pytest.raises(ConfigError, match="retrieve fewer keys"):
        attend_path(path, queries, 0, 3000, 9, scale=SCALE)


def test_paths_in_two_threads_share_a_pool(pool: Pool) -> None:
    """Their steps use the same scratch in turn: breaks if one writes candidates while the other reads."""
    paths = [filled(pool, 2, 3000, 32, F32, seed=seed) for seed in (0, 1)]
    queries = np.random.default_rng(9).standard_normal((4, 1, 32), dtype=np.float32)
    expected = [attend_path(path, queries, 0, 2990, 30, scale=SCALE) for path in paths]

    def often(i: int) -> None:
        for _ in range(100):
            assert same(attend_path(paths[i], queries, 0, 2990, 30, scale=SCALE), expected[i])

    in_threads(lambda: often(0), lambda: often(1))


def test_thousands_of_steps_in_constant_memory(pool: Pool) -> None:
    """While the path grows by a token each: neither plans nor scratch pile up."""
    path = filled(pool, 2, 200, 16, BF16, reserve=5000)
    rng = np.random.default_rng(10)
    queries = rng.standard_normal((4, 1, 16), dtype=np.float32)
    token = normal(rng, (2, 1, 16), BF16), normal(rng, (2, 1, 19), BF16)

    def grow(steps: int) -> None:
        for _ in range(steps):
            path.append(*token)
            attend_path(path, queries, 4, len(path), 10, scale=SCALE)

    grow(500)
    before = resident_bytes()
    grow(3000)
    assert resident_bytes() - before < 2 << 20


@pytest.mark.parametrize("entries", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [1, 2, 3, 16])
def test_attend_tasks_take_turns(entries: int, width: int) -> None:
    """Each query once; threads are at entries of their own, and go on to others when all queries of these are done."""
    queries = 4
    turns = [entry_at(turn, entries, queries, width) for turn in range(entries * queries)]
    assert sorted(turns) == [(entry, query) for entry in range(entries) for query in range(queries)]
    for first in range(0, entries, width):
        others = min(width, entries - first)
        block = turns[first * queries : (first + others) * queries]
        assert block == [(first + i, query) for query in range(queries) for i in range(others)]
