"""Prefixes in pages: attended to exactly, by all rows over one together; answers are those of full attention."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache, Rollback
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.engine import paged_prefix
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.paged_prefix import PageAllocation, PagedKVPool
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import AdmissionError, CacheMismatchError, ConfigError, InputDataError
from retrieval_attn.gpu.shared import partials
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS
from retrieval_attn.runner.rows import step
from tests.engine.audit import check_engine
from tests.engine.test_batched_prefill import alone, loop_of, together
from tests.engine.test_engine import CONFIG, ids, llm_of, same
from tests.fuzz.engine_schedules import run, schedule_of, wrong
from tests.model.test_hybrid import new_model
from tests.runner.test_rows import BASE, GPU_TOLERANCE, TOLERANCE, feed
from tests.tiny_models import CONFIGS, LAYERS, build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled")


class Text:
    """A cache whose first parts lie in pages, beside one of full attention to the same tokens."""

    def __init__(self, model: Any, pool: PagedKVPool, **options: Any) -> None:
        self.model, self.pool, self.token = model, pool, 5
        self.cache = RetrievalCache(model, ra.Config(**{**BASE, **options}))
        self.full = RetrievalCache(model, ra.Config(**{**BASE, "retrieve": "all"}))

    def read(self, part: torch.Tensor, *, paged: bool) -> torch.Tensor:
        """Logits after ids (1, n), as those of full attention."""
        batch, part = self.cache.batch, part.to(self.model.device)
        if paged:
            spans = self.pool.take([part.shape[1]], None)
            assert spans is not None
            batch.paged_prefix = (batch.paged_prefix or PagedPrefix(self.pool.layers)).opened(spans[0])
        found = feed(self.model, self.cache, part)
        if paged:
            assert batch.paged_prefix is not None
            batch.paged_prefix = batch.paged_prefix.closed()
        self.expect(found, feed(self.model, self.full, part))
        return found

    def expect(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
        assert float((found - wanted).abs().max() / wanted.abs().max()) < tolerance
        assert int(found.argmax()) == int(wanted.argmax())
        self.token = int(wanted.argmax())

    def fork(self) -> Text:
        other = object.__new__(Text)
        vars(other).update(vars(self), cache=self.cache.fork(), full=self.full.fork())
        return other


def steps(model: Any, texts: list[Text], count: int) -> None:
    """Tokens of all rows together, each as of full attention alone."""
    for _ in range(count):
        fed = [text.token for text in texts]
        found = step(model, [text.cache for text in texts], fed, [text.cache.get_seq_length() for text in texts])
        for text, token, logits in zip(texts, fed, found, strict=True):
            text.expect(logits, feed(model, text.full, torch.tensor([[token]]).to(model.device)))


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build_model(request.param)


def test_every_model_attends_to_all_of_it(model: Any) -> None:
    """Spans below and above a page, over one another; rows over some of them, or none; own tokens go to the host, too.

    Sliding layers, soft caps, learned sinks, both sides of long RoPE's boundary.
    """
    options: dict[str, Any] = {"retrieve": "all"}
    pool = PagedKVPool(1000, 40)
    root = Text(model, pool, **options)
    root.read(random_ids(1, 150, 1), paged=True)
    deep = root.fork()
    deep.read(random_ids(1, 20, 2), paged=True)
    deeper = deep.fork()
    deeper.read(random_ids(1, 70, 3), paged=False)  # past its window: some lie on the host
    plain = Text(model, pool, **options)
    plain.read(random_ids(1, 90, 4), paged=False)
    texts = [root, root.fork(), deep, deep.fork(), deeper, plain]
    for seed, text in enumerate(texts[1:4]):
        text.read(random_ids(1, 3 + 8 * seed, 10 + seed), paged=False)
    steps(model, texts, 14)
    steps(model, [texts[4], texts[1], texts[3]], 14)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_layers_with_a_state_go_on(name: str) -> None:
    model = new_model(name)
    root = Text(model, PagedKVPool(1000, 40), retrieve="all")
    root.read(random_ids(1, 150, 1), paged=True)
    texts = [root.fork(), root.fork()]
    for seed, text in enumerate(texts):
        text.read(random_ids(1, 9 + seed, seed), paged=False)
    steps(model, texts, 5)


def test_all_rows_over_a_span_ask_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    root = Text(model, PagedKVPool(1000, 40), retrieve="all")
    root.read(random_ids(1, 150, 1), paged=True)
    texts = [root.fork() for _ in range(5)]
    for seed, text in enumerate(texts):
        text.read(random_ids(1, 9 + seed, seed), paged=False)
    asked: list[int] = []
    plain = partials.node_partial

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(query.shape[2])
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(partials, "node_partial", counted)
    steps(model, texts, 2)
    assert asked == [5] * 2 * LAYERS


def test_questions_read_together_ask_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they hold behind it: one text has 300 tokens of its own on the host, the other 40, two have none."""
    model = build_model("llama")
    loop = loop_of(model)
    root = Text(model, PagedKVPool(1000, 40))
    root.read(random_ids(1, 150, 1), paged=True)
    caches, known = [], [random_ids(1, 150, 1)]
    for seed, own in enumerate((300, 40, 0, 0)):
        text = root.fork()
        if own:
            text.read(random_ids(1, own, 7 + seed), paged=False)
        text.cache.batch.note_ids(torch.cat([*known, *([random_ids(1, own, 7 + seed)] if own else [])], dim=1))
        caches.append(text.cache)
    news = [random_ids(1, count, count)[0].tolist() for count in (20, 30, 9, 12)]
    wanted = [alone(loop, cache.fork(), new) for cache, new in zip(caches, news, strict=True)]
    asked: list[int] = []
    plain = partials.node_partial

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(query.shape[2])
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(partials, "node_partial", counted)
    found = together(loop, caches, news)
    assert asked == [20 + 30 + 9 + 12] * len(root.cache.layers)
    for logits, want in zip(found, wanted, strict=True):
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5


def test_no_key_of_it_is_on_the_host_or_in_a_window() -> None:
    model = build_model("llama")
    text = Text(model, PagedKVPool(1000, 40))
    text.read(random_ids(1, 200, 1), paged=True)
    assert text.cache.host_nbytes == 0 and text.cache.index_kinds() == {}
    page = sum(text.pool.layers.layer(number).nbytes for number in range(LAYERS)) // 40
    assert text.cache.device_nbytes - text.full.device_nbytes == 4 * page
    layers: Any = text.cache.layers
    assert [layer.window.span for layer in layers] == [(4, 4)] * LAYERS
    text.read(random_ids(1, 60, 2), paged=False)
    assert all(layer.held.ranges == [(200, 236)] and layer.window.sink_len == 0 for layer in layers)


@pytest.mark.parametrize("exact", [True, False])
def test_few_tokens_and_searched_ones(exact: bool) -> None:
    """Turns that are read like generated tokens, after a prefix that was not, and behind own tokens that were."""
    text = Text(
        build_model("llama"),
        PagedKVPool(1000, 40),
        retrieve="all",
        question_attention="exact" if exact else "retrieval",
    )
    for seed, (tokens, paged) in enumerate([(5, True), (100, True), (3, True), (4, False), (60, False), (2, False)]):
        text.read(random_ids(1, tokens, seed), paged=paged)
    steps(text.model, [text], 3)


def test_a_crop_stays_behind_it() -> None:
    text = Text(build_model("llama"), PagedKVPool(1000, 40), retrieve="all")
    text.read(random_ids(1, 100, 1), paged=True)
    text.read(random_ids(1, 80, 2), paged=False)
    with pytest.raises(CacheMismatchError, match="in pages that others may attend to"):
        text.cache.crop(-80)
    for cache in (text.cache, text.full):
        cache.crop(-60)
    text.token = 9
    steps(text.model, [text], 4)


def test_a_read_that_failed_leaves_it_as_it_was() -> None:
    text = Text(build_model("llama"), PagedKVPool(1000, 40), retrieve="all")
    text.read(random_ids(1, 100, 1), paged=True)
    before = Rollback(text.cache)
    prefix = text.cache.batch.paged_prefix
    spans = text.pool.take([50], None)
    assert prefix is not None and spans is not None
    text.cache.batch.paged_prefix = prefix.opened(spans[0])
    feed(text.model, text.cache, random_ids(1, 50, 2))
    assert before.undo() and text.cache.batch.paged_prefix is prefix
    text.read(random_ids(1, 30, 3), paged=False)
    steps(text.model, [text], 2)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_on_a_gpu(name: str) -> None:
    """Each row's layer gets its part of what one kernel computed for all."""
    model = build_model(name).to("cuda")
    pool = PagedKVPool(1000, 40)
    root = Text(model, pool, retrieve="all")
    root.read(random_ids(1, 150, 1), paged=True)
    deep = root.fork()
    deep.read(random_ids(1, 70, 2), paged=True)
    plain = Text(model, pool, retrieve="all")
    plain.read(random_ids(1, 90, 4), paged=False)
    texts = [root, root.fork(), deep, deep.fork(), plain]
    for seed, text in enumerate(texts[1:4]):
        text.read(random_ids(1, 3 + 8 * seed, 10 + seed), paged=False)
    steps(model, texts, 10)


# -- the engine ---------------------------------------------------------------------------------------------------


def with_engine(llm: Any, requests: list[Request], **options: Any) -> list[Finished]:
    with Engine(llm, **options) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
        for one in found:
            assert one.error is None
        return found


def requests_of(seed: int) -> list[Request]:
    """Two documents, with and without a second shared part."""
    chance = random.Random(seed)
    documents, turns = [ids(chance.randrange(100, 400), 10 * seed + n) for n in range(2)], ids(70, 3)
    shared = [(document, turns)[: chance.choice((1, 1, 2))] for document in documents for _ in range(4)]
    return [Request((*parts, ids(chance.randrange(1, 60), 99 + n)), 6) for n, parts in enumerate(shared)]


def test_tree_on_is_tree_off_is_alone_is_full_attention() -> None:
    requests = requests_of(1)
    llm = llm_of(CONFIG.replace(retrieve="all"))
    options: dict[str, Any] = {"paged_prefix_tokens": 1000}
    shared = with_engine(llm, requests, prefix_cache_bytes=1 << 26, **options)
    assert sum(one.cached_tokens > 0 for one in shared) >= 5
    apart = with_engine(llm, requests, prefix_cache_bytes=0, **options)
    assert not any(one.cached_tokens for one in apart)
    full = with_engine(llm, requests, prefix_cache_bytes=0)
    for request, *found in zip(requests, shared, apart, full, strict=True):
        alone = with_engine(llm, [request], **options)
        assert all(same(one, alone[0]) for one in found)


def test_requests_are_counted_as_the_host_stores_them() -> None:
    """As many bytes as a row of the store has; pages beside the model are counted by their own dtype."""
    limits = {}
    for dtype in ("auto", "int8"):
        llm = llm_of(CONFIG.replace(host_dtype=dtype))
        limits[dtype] = default_limits(llm.model, llm.config)
        small = replace(limits[dtype], host_bytes=1 << 22)
        with Engine(llm, limits=small, paged_prefix_tokens=400) as engine:
            assert engine._exact is not None
            assert engine._exact.layers.pages == (1 << 20) // (limits["auto"].token_bytes * PAGE_TOKENS)
    head_dim = llm.model.config.head_dim
    assert limits["int8"].token_bytes * 4 * head_dim == limits["auto"].token_bytes * (head_dim + 4)


def test_pages_are_int8_where_that_is_asked_for() -> None:
    """Twice the pages in as much memory, whatever the host has; answers are those that each gets alone."""
    llm = llm_of(CONFIG.replace(retrieve="all", host_dtype="int8"))
    limits = replace(default_limits(llm.model, llm.config), host_bytes=1 << 22)
    pages = []
    for int8 in (False, True):
        with Engine(llm, limits=limits, paged_prefix_tokens=400, paged_prefix_int8=int8) as engine:
            assert engine._exact is not None and engine._exact.layers.int8 == int8
            pages.append(engine._exact.layers.pages)
    assert pages[1] > 2 * pages[0]  # float32: a quarter
    requests, options = requests_of(1), {"paged_prefix_tokens": 1000, "limits": limits, "paged_prefix_int8": True}
    for request, found in zip(requests, with_engine(llm, requests, prefix_cache_bytes=1 << 26, **options), strict=True):
        assert same(found, with_engine(llm, [request], **options)[0])


@pytest.mark.parametrize("seed", [0, 6, 12])
def test_random_schedules(seed: int) -> None:
    """Requests that come, go and are cancelled at any time, and wait for others' pages."""
    llm = llm_of()
    schedule = schedule_of(seed, 8, llm.model.get_input_embeddings().weight.shape[0])
    assert schedule.paged_prefix_tokens
    llm = llm_of(CONFIG.replace(index=schedule.index))
    assert wrong(llm, run(llm, schedule), schedule.paged_prefix_tokens) == []


def test_what_lies_in_pages_cannot_be_saved(tmp_path: Path) -> None:
    """There are no keys on the host to save: zeros would be written."""
    text = ids(300, 1)
    with Engine(llm_of(), paged_prefix_tokens=400, prefix_cache_bytes=1 << 26, store=tmp_path) as engine:
        engine.submit(Request((text, ids(5, 2)), 1)).result()
        with pytest.raises(InputDataError, match="300 tokens of this cache are in pages of an engine"):
            engine.save("text", text)


def test_the_length_alone_decides_where_a_prefix_lies() -> None:
    """Of a prompt, parts that end beyond the limit are on the host, as all are without one; so is the last part."""
    pool = PagedKVPool(300, 40)
    llm = llm_of()
    lengths = {(100, 200, 5): [100, 200], (100, 201, 5): [100], (301, 5): [], (5,): []}
    for parts, paged in lengths.items():
        pages = PageAllocation(pool, [ids(length, 1) for length in parts])
        assert pages.take(0, None)
        assert [span.tokens for span in pages._spans.values()] == paged
    requests = requests_of(2)
    for limit in (100, 250):
        both = (with_engine(llm, requests, paged_prefix_tokens=limit, prefix_cache_bytes=size) for size in (1 << 26, 0))
        assert all(same(one, other) for one, other in zip(*both, strict=True))


def test_pages_are_given_back_and_waited_for() -> None:
    """With room for one document at a time, each is read once for who asks of it, and no page is lost."""
    llm = llm_of()
    documents = [ids(400, n) for n in range(3)]
    requests = [Request((documents[n % 3], ids(5, 50 + n)), 4) for n in range(9)]
    gc.disable()  # pages come back when nobody has them, not when a collector runs
    try:
        with Engine(llm, paged_prefix_tokens=400, paged_prefix_pages=8, prefix_cache_bytes=1 << 26) as engine:
            tickets = [engine.submit(request) for request in requests]
            found = [ticket.result() for ticket in tickets]
            check_engine(engine)
            engine.submit(Request(((5,),), 1)).result()  # the ticks after the last end have passed
            assert engine._exact is not None and engine._tree is not None
            engine._tree.evict(Sizes(1 << 60, pages=1 << 60))
            assert engine._exact.free_pages == 8
            # what the tree has needs no pages, and is not given up for them
            again = [engine.submit(requests[0]).result() for _ in range(2)]
            assert [one.cached_tokens for one in again] == [0, 400]
    finally:
        gc.enable()
    for request, one in zip(requests, found, strict=True):
        assert same(one, with_engine(llm, [request], paged_prefix_tokens=400, prefix_cache_bytes=0)[0])


def test_who_waits_for_pages_lets_others_read() -> None:
    """An interactive request comes before one of less priority, whose pages it needs: else both would wait forever."""
    llm = llm_of()
    limits = replace(default_limits(llm.model, llm.config), inter_token_seconds=0.001, promote_seconds=1000.0)
    with Engine(
        llm, limits=limits, paged_prefix_tokens=3_000, paged_prefix_pages=47, prefix_cache_bytes=1 << 26
    ) as engine:
        slow = engine.submit(Request((ids(3_000, 1), ids(5, 2)), 2, priority="batch"))
        while not engine.stats["shared"].reading:
            threading.Event().wait(0.001)
        fast = engine.submit(Request((ids(3_000, 3), ids(5, 4)), 2))
        assert [one.result().reason for one in (slow, fast)] == ["length"] * 2


def test_what_can_never_be_is_refused() -> None:
    llm = llm_of()
    with Engine(llm, paged_prefix_tokens=300, paged_prefix_pages=5) as engine:
        wide = Request((ids(65, 1), ids(65, 2), ids(65, 3), ids(5, 4)), 1)
        with pytest.raises(AdmissionError, match="take 6 pages of 64 tokens, the engine has 5"):
            engine.submit(wide)
        assert engine.submit(Request((ids(65, 1), ids(65, 2), ids(5, 4)), 1)).result().reason == "length"
    with pytest.raises(
        ConfigError, match="paged_prefix_tokens=300 take 5 pages of 64 tokens, got paged_prefix_pages=4"
    ):
        Engine(llm, paged_prefix_tokens=300, paged_prefix_pages=4)
    for given in (
        {"paged_prefix_tokens": -1},
        {"paged_prefix_tokens": 1.5},
        {"paged_prefix_tokens": 10, "paged_prefix_pages": True},
    ):
        options: Any = given
        with pytest.raises(ConfigError, match="whole number"):
            Engine(llm, **options)


def test_pages_that_circles_keep_come_back() -> None:
    """Where all wait, nothing else makes the garbage collector come."""
    pool = PagedKVPool(64, 1)
    circle: list[Any] = [pool.take([64], None)]
    circle.append(circle)
    gc.disable()
    try:
        del circle
        assert pool.take([64], None) is not None
    finally:
        gc.enable()


def test_a_long_collection_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes longer than the time between two is not begun again at once: the engine would never leave it."""
    calls: list[float] = []

    def collect() -> int:
        calls.append(time.monotonic())
        assert len(calls) < 3, "the engine's thread stays in the garbage collector"
        time.sleep(0.02)
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(paged_prefix, "COLLECT_SECONDS", 0.01)
    pool = PagedKVPool(64, 1)
    held = pool.take([64], None)
    assert held is not None
    assert pool.take([64], None) is None
    assert pool.take([64], None) is None
    assert len(calls) == 1
