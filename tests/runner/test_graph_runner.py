"""Rows of a batch in one graph for each number of them, emulated: every row is as it would be alone."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.codes.search import MIN_CLASS
from retrieval_attn.runner import ready
from retrieval_attn.runner.graph.decode_graph import DecodeGraph
from retrieval_attn.runner.graph_runner import GraphPool, GraphRunner
from retrieval_attn.runner.rows import RowsFailedError
from tests.emulation import runtime as emulate
from tests.engine.audit import check_engine
from tests.engine.test_engine import CONFIG, alone, ids, llm_of, same
from tests.runner.graph_cases import DEVICE, FINER, ROARGRAPH, graph_step
from tests.runner.test_rows import Pair, feed, read
from tests.tiny_models import LAYERS, build_model

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs", "small_graphs")

ROWS = 8


class Rows:
    """Rows in a runner's graphs, each beside the same alone."""

    def __init__(self, model: Any, lengths: list[int], **options: Any) -> None:
        self.model, self.runner = model, GraphRunner(model, ROWS)
        self.pairs = [Pair(model, read(model, tokens, seed, **options)) for seed, tokens in enumerate(lengths)]

    def logits(self, pairs: list[Pair]) -> torch.Tensor:
        caches = [pair.row for pair in pairs]
        return graph_step(
            self.runner, caches, [pair.token for pair in pairs], [cache.get_seq_length() for cache in caches]
        )

    def steps(self, pairs: list[Pair], count: int) -> None:
        for _ in range(count):
            for pair, row in zip(pairs, self.logits(pairs), strict=True):
                pair.expect(row)

    def come_and_go(
        self, chance: random.Random, count: int, forks: dict[int, int], share: float = 0.8, crop: int = 5
    ) -> Iterator[int]:
        """So many steps with random members, `share` of all, some of which lose up to `crop` tokens; before each, its
        number. forks: at which steps a fork of which pair comes, with its tolerance.
        """
        for step in range(count):
            if step in forks:
                like = self.pairs[forks[step]]
                self.pairs.append(Pair(self.model, like.row.fork()))
                self.pairs[-1].token, self.pairs[-1].tolerance = 7 + step, like.tolerance
            yield step
            present = [pair for pair in self.pairs if chance.random() < share] or self.pairs
            chance.shuffle(present)
            self.steps(present, 1)
            if crop and chance.random() < 0.1:
                chance.choice(self.pairs).crop(chance.randint(1, crop))

    def check_books(self, *, host_reads_all: bool = True) -> None:
        """After the end: lengths, windows and estimated shares are as alone; of the host's work, all rows together.

        host_reads_all: the device reads no keys on the host.
        """
        self.runner.close()
        scanned = [0, 0]
        for pair in self.pairs:
            assert pair.row.get_seq_length() == pair.alone.get_seq_length()
            for number, cache in enumerate((pair.row, pair.alone)):
                scanned[number] += cache.stats().keys_scanned
            layers: Any = zip(pair.row.layers, pair.alone.layers, strict=True)
            for left, right in layers:
                assert left.graph is None
                if isinstance(left, StateLayer):
                    assert left.nbytes == right.nbytes
                    continue
                if isinstance(left, RetrievalLayer):  # others keep what no query sees a while longer
                    assert left.window is not None and right.window is not None
                    assert left.window.tail_len == right.window.tail_len
                assert left.tail.count == right.tail.count
                # a step that named another key estimated another share
                off = 1e-5 + pair.share_off / max(1, left.tail.count)
                assert left.tail.means() == pytest.approx(right.tail.means(), abs=off)
        assert (
            not host_reads_all or abs(scanned[0] - scanned[1]) <= 2 * LAYERS * len(self.pairs) * 100
        )  # in shares, rounded


@pytest.mark.parametrize("name", ["llama31", "gemma2", "gemma3", "gemma4", "gpt_oss", "qwen3_moe", "mistral_sliding"])
def test_rows_of_every_model_are_as_alone(name: str) -> None:
    """Of any length, below a window and across spills; sliding layers, soft cap, learned sinks, experts."""
    rows = Rows(build_model(name), [20, 60, 150, 700])
    rows.steps(rows.pairs[:3], 12)
    rows.steps(rows.pairs, 12)
    assert (rows.runner.replays, rows.runner.captures, rows.runner.reason) == (24, 1, "")
    rows.check_books()


def test_rows_of_many_layers_are_as_alone() -> None:
    """More than the two that other models here have."""
    rows = Rows(build_model("llama", num_hidden_layers=5), [20, 150, 700], **DEVICE)
    rows.steps(rows.pairs, 6)
    assert (rows.runner.replays, rows.runner.reason) == (6, "")
    rows.check_books()


KINDS: dict[str, dict[str, Any]] = {
    "flat": {"index": "flat", "retrieve": 40},
    "int8": {"index": "flat", "host_dtype": "int8"},
    "without estimates": {"tail": False},
    "by heads": {"retrieve": "auto", "index": "sketch"},
    "sketch": {"index": "sketch", "retrieve": 40},
    "roargraph": ROARGRAPH,
    "device": DEVICE,
    "device, no estimates": {**DEVICE, "tail": False},
    "device, finer": {**FINER, "index_options": {"key_bytes": 16, "rescore": 36, "finer_bytes": 64}},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_rows_join_leave_and_lose_tokens(kind: str) -> None:
    """Steps with random members over several evictions; forks of rows, and rows that are cropped meanwhile."""
    number = list(KINDS).index(kind)
    q_heads, kv_heads, head_dim = ((8, 2, 64), (8, 1, 128))[number % 2]  # groups of 4, and of 8
    model = build_model(
        "llama",
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
    )
    rows = Rows(model, [50, 300, 900], **KINDS[kind])
    if kind == "int8":  # a difference of one rounding may make a number the next step
        for pair in rows.pairs:
            pair.tolerance = 1e-3
    for _ in rows.come_and_go(random.Random(kind), 24, dict.fromkeys((4, 9, 18), 1)):
        pass
    found = rows.runner
    assert found.replays == 24 and found.reason == ""
    # one for each size that there was, and once more where the codes grew; none for who joins or leaves
    assert found.captures <= 4
    if kind.startswith("device"):
        kinds = [kind for bucket in found._pool.graphs.values() for kind in bucket.decoder.graphs]  # type: ignore[union-attr]
        assert {kind.max_coded_keys for kind in kinds} == {MIN_CLASS}
    rows.check_books()


def test_the_device_is_told_where_codes_and_clusters_of_its_rows_lie() -> None:
    """Of each row, after every step: kernels read it. Breaks if a row that changed is not bound, or not uploaded."""
    rows = Rows(build_model("llama", head_dim=64, max_position_embeddings=8192), [300, 500, 900], **DEVICE)
    for _ in rows.come_and_go(random.Random(4), 14, {5: 1}):
        bucket: Any = None if rows.runner._pool is None else rows.runner._pool._graph
        for slot in [] if bucket is None else bucket.decoder.slots:
            for host in slot.hosts:
                codes, clusters = host._search, host._mass
                told = [
                    (at[0] + codes.table.data_ptr(), at[2], *of) if at[2] else None
                    for at, of in zip(codes.table.tolist(), clusters.table.tolist(), strict=True)
                ]
                assert any(told) or not any(codes.entries)
                assert told == [
                    None if one is None else (one[0].codes.data_ptr(), one[1], *map(torch.Tensor.data_ptr, of))
                    for one, of in zip(codes.entries, clusters.entries, strict=True)
                ]
                held = [None if row is None else row.layers[host._number].hosts[0] for row in bucket.rows[host.rows]]
                wanted = [None if one is None else one.segments[0].indexes[0].codes.device for one in held]
                named = [None if one is None else one[0] for one in codes.entries[:: codes.kv_heads]]
                assert all(mine is theirs for mine, theirs in zip(named, wanted, strict=True))
    rows.check_books()


def test_a_step_without_any_row_of_a_graph_ends_none() -> None:
    """Of a text that is too short to retrieve."""
    rows = Rows(build_model("llama", max_position_embeddings=8192), [20, 900], retrieve="auto", index="flat")
    short, long = rows.pairs
    rows.steps([long], 2)
    rows.steps([long, short], 2)
    rows.steps([short], 2)
    rows.steps([long, short], 2)
    assert (rows.runner.replays, rows.runner.reason) == (8, "")
    rows.check_books()


def test_a_row_for_which_nothing_was_measured_is_in_the_same_graph() -> None:
    """All its heads retrieve the same number of keys, and those of the other row do not."""
    rows = Rows(build_model("llama", max_position_embeddings=8192), [300, 900], retrieve="auto", index="flat")
    short, long = rows.pairs
    budgets = [pair.row.layers[0].hosts[0].budgets for pair in rows.pairs]  # type: ignore[union-attr]
    assert budgets[0] is None and budgets[1] is not None
    rows.steps([long], 2)
    rows.steps([long, short], 4)
    rows.steps([short], 2)
    assert (rows.runner.replays, rows.runner.captures, rows.runner.reason) == (8, 2, "")
    rows.check_books()


@pytest.mark.parametrize("index", ["flat", "sketch", "roargraph"])
def test_rows_with_other_numbers_by_heads_are_in_one_graph(index: str) -> None:
    """Each with its own, whoever else is there; one that attends to all is stepped beside it."""
    model = build_model("llama", num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192)
    rows = Rows(model, [900, 700, 800, 300], retrieve="auto", index=index)
    for number, pair in enumerate(rows.pairs):
        for cache in (pair.row, pair.alone):
            for layer in cache.layers:
                layer.hosts[0].budgets = HeadBudgets(((100, 400, 25, 200)[number], 25, 10, 50) * 2)  # type: ignore[union-attr]
    whole = Pair(model, read(model, 200, 9, retrieve="all"))
    rows.steps(rows.pairs[:1], 2)
    rows.pairs.append(whole)
    for _ in rows.come_and_go(random.Random(index), 16, {5: 1, 10: 3}):
        pass
    assert rows.runner.reason == "" and rows.runner.captures <= 4 and rows.runner.replays >= 17
    assert {id(cache) for cache in (pair.row for pair in rows.pairs)} & set(rows.runner._pool.rows)  # type: ignore[union-attr]
    assert whole.row in rows.runner._refusals and len(rows.runner._refusals) == 1
    rows.check_books()


def test_reading_for_a_batch_captures_no_step_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be captured in the reading's thread, while the batch is stepped, and never replayed."""
    llm = llm_of(CONFIG)
    llm.model = build_model("llama")
    bound: list[Any] = []
    real = ready.acquire
    monkeypatch.setattr(ready, "acquire", lambda *given: bound.append(given) or real(*given))  # type: ignore[func-returns-value]
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        engine.submit(Request((ids(300, 1), ids(9, 2)), 5)).result()
    assert not bound
    ra.Context(llm.model, llm.tokenizer, CONFIG).read(list(ids(300, 1)), progress=False)
    assert bound


def test_the_others_change_no_bit() -> None:
    """In a bucket of four, whoever has the other rows, wherever the row is."""
    model = build_model("llama", head_dim=64)
    for kind in ("flat", "device"):
        rows = Rows(model, [90, 200, 300, 40, 700], **KINDS[kind])
        one, *others = [pair.row for pair in rows.pairs]
        seen: list[list[torch.Tensor]] = []
        for company in (others[:3], others[1:], others[:2], others[2:]):
            runner, row, found = GraphRunner(model, 4), one.fork(), []
            graph_step(
                runner, [other.fork() for other in company[:1]], [5], [company[0].get_seq_length()]
            )  # takes a place
            present = [*company[:1], row, *company[1:]]
            present = [cache if cache is row else cache.fork() for cache in present]
            for token in range(10):
                places = [cache.get_seq_length() for cache in present]
                found.append(graph_step(runner, present, [token + 9] * len(present), places)[1].clone())
            assert set(runner._pool.graphs) == {1, 4}  # type: ignore[union-attr]
            seen.append(found)
        for found in seen[1:]:
            assert all(torch.equal(mine, first) for mine, first in zip(found, seen[0], strict=True))


def test_a_step_in_which_nothing_changes_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are windows told of their tokens: what is left for each row is to count one."""
    rows = Rows(build_model("llama"), [100, 200, 300])
    rows.steps(rows.pairs, 3)
    calls: list[str] = []
    for kind, name in ((LayerStep, "plan"), (DecodeGraph, "take"), (DecodeGraph, "upload_spans")):
        real = getattr(kind, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            calls.append(_name)
            return _real(*args, **options)

        monkeypatch.setattr(kind, name, counted)
    for _ in range(3):
        rows.logits(rows.pairs)
    assert calls == []
    for _ in range(8):  # a spill
        rows.logits(rows.pairs)
    assert "plan" in calls and calls.count("take") <= 3


def test_a_smaller_graph_takes_over_what_stays() -> None:
    """Not at once; rows beyond its end move."""
    rows = Rows(build_model("llama"), [40, 60, 80, 100, 120])
    rows.steps(rows.pairs, 2)
    last = rows.pairs[-1:]
    rows.steps(last, 36)
    assert set(rows.runner._pool.graphs) == {1, 8}  # type: ignore[union-attr]
    rows.steps(rows.pairs, 2)
    assert rows.runner.captures == 2
    rows.check_books()


@pytest.mark.parametrize("cause", ["search", "exchange"])
def test_a_replay_that_fails_is_made_again(
    cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eagerly, where the error is told of its row; the others have their token, and their graph after it."""
    rows = Rows(build_model("llama"), [100, 200, 300], **ROARGRAPH)
    rows.steps(rows.pairs, 2)
    bad = rows.pairs[1]
    before = rows.runner.replays
    if cause == "search":
        (host,) = bad.row.layers[1].hosts  # type: ignore[union-attr]
        graph = host.segments[0].indexes[1].search_arguments().graph
        good = graph.ids.copy()
        graph.ids[:] = -5
        with pytest.raises(RowsFailedError, match="row 1: BackendError") as caught:
            rows.logits(rows.pairs)
        assert list(caught.value.errors) == [1]
        graph.ids[:] = good
        left = [rows.pairs[0], rows.pairs[2]]
        for pair in left:
            pair.expect(caught.value.logits[rows.pairs.index(pair)])
    else:
        with monkeypatch.context() as patch:
            patch.setattr(GraphFailure.of(rows.runner), "failure", lambda *given: "no answer came")
            rows.steps(rows.pairs, 1)
        left = rows.pairs
    assert "the step runs again eagerly" in caplog.text
    rows.steps(left, 9)
    assert rows.runner.replays == before + 10 and rows.runner.captures == 1


class GraphFailure:
    """The replay of a runner's one graph."""

    @staticmethod
    def of(runner: GraphRunner) -> Any:
        (bucket,) = runner._pool.graphs.values()  # type: ignore[union-attr]
        (graph,) = bucket.decoder.graphs.values()
        return graph.replay


def test_replays_that_always_fail_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(build_model("llama"), [100, 200])
    rows.steps(rows.pairs, 1)
    replay = GraphFailure.of(rows.runner)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "failure", lambda *given: "no answer came")
        rows.steps(rows.pairs, 5)
    assert "3 replays failed" in rows.runner.reason and caplog.text.count("decoding eagerly") == 1
    rows.steps(rows.pairs, 2)


@pytest.mark.parametrize("where", ["_plan", "_select_graph", "replay"])
def test_whatever_goes_wrong_leaves_eager_steps(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At any time; one line says what it was."""
    rows = Rows(build_model("llama"), [100, 200, 300])
    rows.steps(rows.pairs[:2], 2)

    def failing(*given: Any, **options: Any) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(GraphPool, where, failing)
    rows.steps(rows.pairs, 12)
    assert rows.runner.reason == "RuntimeError: what nobody thought of"
    assert caplog.text.count("decoding eagerly, without a CUDA graph: RuntimeError") == 1
    rows.check_books()


def test_who_is_gone_leaves_no_memory() -> None:
    rows = Rows(build_model("llama"), [500, 400, 300])
    rows.steps(rows.pairs, 3)
    layers: Any = [pair.row.layers[0] for pair in rows.pairs]
    keys = [weakref.ref(layer.hosts[0].segments[0].keys.base) for layer in layers]
    del layers
    assert all(key() is not None for key in keys)
    del rows.pairs[0]
    gc.collect()
    assert keys[0]() is None and keys[1]() is not None
    rows.steps(rows.pairs, 3)
    rows.steps(rows.pairs[:1], 1)
    del rows.pairs[1]
    gc.collect()
    assert keys[2]() is None
    rows.runner.close()


def test_what_no_graph_serves_is_stepped_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """Other options, other windows, graph=False; more rows than there are places. The reason is told once."""
    model = build_model("llama")
    rows = Rows(model, [100, 200])
    changes: list[dict[str, Any]] = [{"graph": False}, {"retrieve": 9}, {"window": 40, "sink": 0}]
    rows.pairs += [Pair(model, read(model, 150 + 10 * i, i, **options)) for i, options in enumerate(changes)]
    rows.steps(rows.pairs[::-1], 1)  # who is first decides which shape has the graph
    rows.steps(rows.pairs, 10)
    assert rows.runner.replays == 11
    assert caplog.text.count("differ in shapes") == 1
    demanded = read(model, 100, 3, graph=True, retrieve=11)
    with pytest.raises(CaptureError, match="differ in shapes"):
        graph_step(rows.runner, [rows.pairs[4].row, demanded], [5, 5], [rows.pairs[4].row.get_seq_length(), 100])
    many = Rows(model, [60] * 10)
    many.steps(many.pairs, 3)
    assert many.runner.replays == 3


def test_a_row_past_the_positions_fails_alone() -> None:
    rows = Rows(build_model("llama", max_position_embeddings=300), [100, 298])
    rows.steps(rows.pairs, 2)
    with pytest.raises(RowsFailedError, match="row 1: ContextLengthError") as caught:
        rows.logits(rows.pairs)
    rows.pairs[0].expect(caught.value.logits[0])


def test_an_interrupt_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replay that was launched and not counted; nor of a step before."""
    rows = Rows(build_model("llama"), [100, 200])
    rows.steps(rows.pairs, 2)

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(emulate.EmulatedRuntime, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rows.logits(rows.pairs)
    rows.steps(rows.pairs, 10)
    assert [pair.row.get_seq_length() for pair in rows.pairs] == [112, 212]


def test_windows_that_cannot_be_had_leave_eager_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from retrieval_attn.runner import graph_runner as bucket_group

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("none")

    rows = Rows(build_model("llama"), [100, 200])
    monkeypatch.setattr(bucket_group, "new_buffers", full)
    rows.steps(rows.pairs, 3)
    assert rows.runner.replays == 0 and "no memory for the windows of 8 sequences" in caplog.text


@pytest.mark.parametrize("options", [{}, DEVICE], ids=["auto", "device"])
def test_an_engine_decodes_by_graphs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is the one that its request gets alone; parked rows and shared documents among them."""
    llm = llm_of(CONFIG.replace(**options))
    document = ids(300, 1)
    requests = [Request((document, ids(5 + number, number)), 4 + 3 * number) for number in range(6)]
    requests += [Request((ids(20 * number, number),), 12) for number in range(1, 5)]
    runners: list[GraphRunner] = []
    real = GraphRunner._replayed

    def watched(runner: GraphRunner, *given: Any) -> Any:
        runners.append(runner)
        return real(runner, *given)

    monkeypatch.setattr(GraphRunner, "_replayed", watched)
    replays = 0
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
        replays = runners[0].replays
    assert replays > 10 and runners[0].reason == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunner, "_replayed", lambda *given: None)  # eagerly
        for request, one in zip(requests, found, strict=True):
            assert one.error is None and same(one, alone(llm, request)), request


def test_errors_of_keys_on_their_way_are_told_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spill that fails, between two replays."""
    rows = Rows(build_model("llama"), [100, 200])
    rows.steps(rows.pairs, 1)
    bad: Any = rows.pairs[1].row.layers[1]

    def failing(*given: Any, **options: Any) -> None:
        raise BackendError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(bad.held, "spill", failing)
        with pytest.raises(RowsFailedError, match="row 1: BackendError: no memory"):
            for _ in range(9):
                rows.logits(rows.pairs)
    cache: RetrievalCache = rows.pairs[0].row
    assert cache.get_seq_length() > 101
    assert torch.isfinite(feed(rows.model, cache, torch.tensor([[5]]))).all()
    rows.runner.close()


def test_log_lines_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """The one line that a context's graph logs, too."""
    with caplog.at_level(logging.WARNING):
        model = build_model("llama")
        runner = GraphRunner(model, 2)
        caches = [read(model, 60, 0), read(model, 60, 0, retrieve=9)]
        graph_step(runner, caches, [5, 5], [60, 60])
    assert "decoding eagerly, without a CUDA graph: the sequences of the batch differ" in caplog.text
