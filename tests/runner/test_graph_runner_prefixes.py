"""Rows over prefixes in pages, in emulated graphs: every row is as it would be alone, whatever the tree."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.paged_prefix import PagedKVPool
from retrieval_attn.engine.request import Request
from retrieval_attn.gpu.shared.plan import LEVELS, SharedPlan
from retrieval_attn.runner import graph_runner as bucket
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import DecodeSteps
from retrieval_attn.runner.graph.decode_graph import DecodeGraph
from retrieval_attn.runner.graph_runner import GraphRunner
from tests.engine.audit import check_engine
from tests.engine.test_engine import CONFIG, ids, llm_of, same
from tests.engine.test_paged_prefix import requests_of, with_engine
from tests.fuzz.engine_schedules import run, schedule_of, wrong
from tests.runner.graph_cases import DEVICE, graph_step
from tests.runner.test_graph_runner import KINDS, Rows
from tests.runner.test_rows import BASE, TOLERANCE, Pair, feed
from tests.tiny_models import build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")


def read_on(
    cache: RetrievalCache, model: Any, tokens: int, seed: int, pool: PagedKVPool | None = None
) -> RetrievalCache:
    """The cache with so many tokens more, in pages of the pool if there is one."""
    batch = cache.batch
    if pool is not None:
        spans = pool.take([tokens], None)
        assert spans is not None
        batch.paged_prefix = (batch.paged_prefix or PagedPrefix(pool.layers)).opened(spans[0])
    feed(model, cache, random_ids(1, tokens, seed).to(model.device))
    if batch.paged_prefix is not None:
        batch.paged_prefix = batch.paged_prefix.closed()
    return cache


def trees(model: Any, pool: PagedKVPool, **options: Any) -> list[RetrievalCache]:
    """Rows over one span, over two, over a span of their own, and over none; with keys on the host, and without."""

    def new() -> RetrievalCache:
        return RetrievalCache(model, ra.Config(**{**BASE, **options}))

    root = read_on(new(), model, 150, 1, pool)
    deep = read_on(root.fork(), model, 70, 2, pool)
    other = read_on(new(), model, 64, 3, pool)
    found = [(root, 9), (root, 300), (deep, 5), (deep, 120), (other, 40), (new(), 90)]
    return [read_on(before.fork(), model, tokens, 10 + tokens) for before, tokens in found]


def rows_of(model: Any, caches: list[RetrievalCache]) -> Rows:
    rows = Rows(model, [])
    rows.pairs = [Pair(model, cache) for cache in caches]
    return rows


@pytest.mark.parametrize("name", ["llama31", "gemma2", "gemma3", "gemma4", "gpt_oss", "mistral_sliding"])
def test_rows_of_every_model_are_as_alone(name: str) -> None:
    """Sliding layers have no pages; soft cap, learned sinks. Before there is anything on the host, and after."""
    model = build_model(name)
    rows = rows_of(model, trees(model, PagedKVPool(1000, 40)))
    short = [rows.pairs[0], rows.pairs[2]]
    rows.steps(short, 8)
    rows.steps(rows.pairs, 18)
    rows.steps(short, 3)
    assert (rows.runner.replays, rows.runner.reason) == (29, "")
    rows.check_books()


@pytest.mark.parametrize("name", ["llama31", "gemma2"])
def test_rows_over_pages_of_int8_are_as_alone(name: str) -> None:
    """And alone they are within int8's error of pages in the model's dtype."""
    model, caches = build_model(name), {}
    for int8 in (True, False):
        caches[int8] = trees(model, PagedKVPool(1000, 40, int8=int8))
    for packed, plain in zip(caches[True], caches[False], strict=True):
        got, right = (feed(model, one.fork(), torch.tensor([[5]])) for one in (packed, plain))
        error = float((got - right).abs().max() / right.abs().max())
        assert error < 0.02 and (error > 0) == (packed.batch.paged_prefix is not None)
    halves = [one[0].batch.paged_prefix.nbytes for one in (caches[True], caches[False])]  # type: ignore[union-attr]
    head_dim = caches[False][0].batch.paged_prefix.layers.any_layer.dims[0]  # type: ignore[union-attr]
    assert halves[0] * 4 * head_dim == halves[1] * (head_dim + 4)
    rows = rows_of(model, caches[True])
    rows.steps(rows.pairs, 18)
    assert (rows.runner.replays, rows.runner.reason) == (18, "")
    rows.check_books()


@pytest.mark.parametrize("kind", ["flat", "device", "sketch"])
def test_rows_join_leave_and_lose_tokens(kind: str) -> None:
    """Thirty steps with random members; forks, crops; no graph for who joins or leaves."""
    number = list(KINDS).index(kind)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": (64, 128)[number % 2]}
    model = build_model("llama", max_position_embeddings=8192, **heads)
    pool = PagedKVPool(1000, 40)
    rows = rows_of(model, trees(model, pool, **KINDS[kind]))
    for _ in rows.come_and_go(random.Random(kind), 30, {5: 1, 15: 3}, share=0.6, crop=4):
        pass
    rows.steps(rows.pairs[5:6], 34)  # without pages
    captures = rows.runner.captures
    rows.steps(rows.pairs[:1], 2)
    rows.steps(rows.pairs[5:6], 2)
    assert rows.runner.replays == 68 and rows.runner.reason == ""
    assert captures <= 5 and rows.runner.captures <= captures + 1
    rows.check_books()


@pytest.mark.parametrize("wrong", ["", "tokens", "rows", "order"])
def test_the_list_says_what_is_attended_to(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token less of a span, a row that is not named, pages in another order: no row is as alone then."""
    model = build_model("llama")
    rows = rows_of(model, trees(model, PagedKVPool(1000, 40))[:3])
    rows.steps(rows.pairs, 2)
    real = SharedPlan.write

    def written(plan: SharedPlan, nodes: Any) -> None:
        if wrong == "tokens":
            nodes = [one._replace(tokens=one.tokens - 1) for one in nodes]
        elif wrong == "rows":
            nodes = [one._replace(rows=one.rows[1:]) for one in nodes]
        elif wrong == "order":
            nodes = [one._replace(pages=one.pages[::-1]) for one in nodes]
        real(plan, nodes)

    monkeypatch.setattr(SharedPlan, "write", written)
    present = rows.pairs[1:]
    found = rows.logits(present)
    wanted = torch.stack([feed(model, pair.alone, torch.tensor([[pair.token]])) for pair in present])
    off = float((found - wanted).abs().max() / wanted.abs().max())
    assert (off < TOLERANCE) == (not wrong)  # NaN where a page was not written


def test_a_step_in_which_nothing_changes_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a spill: the list says who lies over what, not how long a row is."""
    model = build_model("llama")
    rows = rows_of(model, trees(model, PagedKVPool(1000, 40)))
    rows.steps(rows.pairs, 2)
    written: list[int] = []
    real = SharedPlan.write

    def counted(plan: SharedPlan, nodes: Any) -> None:
        written.append(len(nodes))
        real(plan, nodes)

    monkeypatch.setattr(SharedPlan, "write", counted)
    rows.steps(rows.pairs, 12)
    assert written == []
    rows.steps(rows.pairs[1:], 1)  # all layers have one list
    assert written == [3] and rows.runner.captures == 1


def test_a_row_over_many_spans() -> None:
    """More than a list has room for at first: one graph more, for it and for all after it."""
    model, pool = build_model("llama"), PagedKVPool(1000, 40)
    cache = read_on(RetrievalCache(model, ra.Config(**BASE)), model, 70, 1, pool)
    first = read_on(cache.fork(), model, 30, 2)
    for seed in range(LEVELS):
        cache = read_on(cache, model, 20, seed, pool)
    rows = rows_of(model, [first, read_on(cache, model, 30, 3)])
    rows.steps(rows.pairs[:1], 2)
    rows.steps(rows.pairs, 2)
    rows.steps(rows.pairs[:1], 34)
    kinds = {size: set(one.decoder.graphs) for size, one in rows.runner._pool.graphs.items()}  # type: ignore[union-attr]
    assert {size: {kind.prefix_depth for kind in one} for size, one in kinds.items()} == {1: {4, 8}, 2: {8}}
    rows.check_books()


def test_who_is_gone_leaves_no_pages() -> None:
    """What a graph attended to last keeps nobody's prefix."""
    model, pool = build_model("llama"), PagedKVPool(1000, 40)
    rows = rows_of(model, trees(model, pool))
    rows.steps(rows.pairs, 3)
    assert pool.free_pages == 40 - 3 - 2 - 1
    del rows.pairs[2:5]
    gc.collect()
    assert pool.free_pages == 40 - 3
    rows.steps(rows.pairs, 3)
    rows.runner.close()


def test_pages_of_another_engine_are_stepped_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """A graph reads one memory. When nobody is in it any more, there are graphs for the other."""
    model = build_model("llama")
    rows = rows_of(model, [cache for _ in range(2) for cache in trees(model, PagedKVPool(1000, 40))[:2]])
    rows.steps(rows.pairs, 2)
    assert (rows.runner.replays, rows.runner.captures) == (2, 1)
    assert caplog.text.count("use pages of several engines") == 1
    other = rows_of(model, trees(model, PagedKVPool(1000, 40))[:1])
    graph_step(rows.runner, [rows.pairs[0].row], [5], [rows.pairs[0].row.get_seq_length()])
    graph_step(rows.runner, [other.pairs[0].row], [5], [other.pairs[0].row.get_seq_length()])
    assert rows.runner.replays == 1
    rows.runner.close()


def test_a_context_with_such_a_prefix_decodes_by_graphs() -> None:
    """A fork of a row, by itself, as eagerly: with its keys behind the prefix on the host, and with none there; of the
    pages of one engine and of another.
    """
    model = build_model("llama")
    for cache in [one for _ in range(2) for one in trees(model, PagedKVPool(1000, 40))]:
        place, graphed, found = cache.get_seq_length(), cache.fork(), []
        steps = DecodeSteps(model, graphed, True)
        with torch.no_grad(), using_retrieval(model, 64):
            for token in range(5, 9):
                step = steps.step(torch.tensor([token]), torch.tensor([place + token - 5]), None)
                found.append(step[0].clone())
                steps.confirm()
        assert steps.replays == 4
        steps.close()
        eager = cache.fork()
        wanted = [feed(model, eager, torch.tensor([[token]])) for token in range(5, 9)]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["auto", "device"])
def test_an_engine_decodes_by_graphs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents with and without a second part: answers are those of eager steps, and of each request alone."""
    llm = llm_of(CONFIG.replace(**options))
    requests = [*requests_of(1), Request((ids(30, 1),), 12)]
    runners: list[GraphRunner] = []
    eager: list[int] = []
    real, real_step = GraphRunner._replayed, bucket.eager_step

    def watched(runner: GraphRunner, *given: Any) -> Any:
        runners.append(runner)
        return real(runner, *given)

    def stepped(model: Any, caches: Any, *given: Any) -> torch.Tensor:
        eager.append(len(caches))
        return real_step(model, caches, *given)

    monkeypatch.setattr(GraphRunner, "_replayed", watched)
    monkeypatch.setattr(bucket, "eager_step", stepped)
    settings: dict[str, Any] = {"paged_prefix_tokens": 1000}
    with Engine(llm, prefix_cache_bytes=1 << 26, **settings) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
        assert runners[0].replays > 5 and runners[0].reason == "" and eager == []
        kinds = [kind for one in runners[0]._pool.graphs.values() for kind in one.decoder.graphs]  # type: ignore[union-attr]
        assert any(kind.prefix_depth for kind in kinds)
    monkeypatch.setattr(GraphRunner, "_replayed", lambda *given: None)
    for request, one, again in zip(requests, found, with_engine(llm, requests, **settings), strict=True):
        assert one.error is None and same(one, again)
        assert same(one, with_engine(llm, [request], prefix_cache_bytes=0, **settings)[0])


@pytest.mark.parametrize("seed", [4, 22])
def test_random_schedules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come, go, park and are cancelled at any time; what is alone steps eagerly."""
    replays: list[int] = []
    real = DecodeGraph.step

    def counted(bucket: DecodeGraph, *given: Any, **options: Any) -> torch.Tensor:
        replays.append(bucket.kind.prefix_depth)
        return real(bucket, *given, **options)

    monkeypatch.setattr(DecodeGraph, "step", counted)
    schedule = schedule_of(seed, 8, llm_of().model.get_input_embeddings().weight.shape[0])
    llm = llm_of(CONFIG.replace(index=schedule.index))
    found = run(llm, schedule)
    assert sum(levels > 0 for levels in replays) > 5
    monkeypatch.setattr(GraphRunner, "_replayed", lambda *given: None)
    assert wrong(llm, found, schedule.paged_prefix_tokens) == []
