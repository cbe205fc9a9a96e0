"""Drafts of a row that is alone in captured steps, emulated: every answer is the one without them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from retrieval_attn.engine import stepper
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.engine.stepper import Stepper
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.runner.drafts import BLOCKS, BlockCosts, Draft, DraftLength, LookupDrafter
from retrieval_attn.runner.graph.pool import BlockGraphs, GraphPool
from retrieval_attn.runner.graph_runner import GraphRunner
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.engine.audit import check_engine
from tests.engine.test_drafts import DRAWN, answers, llm_of, requests_of, require_kept_answers, require_same
from tests.runner.test_drafts import Script
from tests.tiny_models import Loaded

pytestmark = pytest.mark.usefixtures("compiled", "emulated_graphs", "small_graphs")


@contextmanager
def many_drafts(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Iterator[None]:
    """Draft at every token, whatever it costs; one proposal in five is cut by a wrong token."""
    chance, propose = random.Random(seed), LookupDrafter.propose

    def proposed(self: LookupDrafter, most: int) -> Draft:
        tokens, certainty = propose(self, most)
        if tokens and chance.random() < 0.2:
            tokens[chance.randrange(len(tokens))] ^= 1
        return Draft(tokens, certainty)

    with monkeypatch.context() as patch:
        patch.setattr(LookupDrafter, "propose", proposed)
        patch.setattr(BlockCosts, "has_plain", True)
        patch.setattr(BlockCosts, "extra", lambda *_: 0.001)
        patch.setattr(BlockCosts, "spent", lambda *_: 0.001)
        patch.setattr(BlockCosts, "seconds", lambda *_: 1.0)
        patch.setattr(
            DraftLength, "choose", lambda _self, draft, most, *_: max((n - 1 for n in BLOCKS if n <= most), default=0)
        )
        yield


def one_by_one(llm: Any, requests: list[Request], **options: Any) -> tuple[list[Finished], list[Any], dict[str, Any]]:
    """Answer requests in turn: results, events, and the counts of the engine."""
    with Engine(llm, **options) as engine:
        found, events = [], []
        for request in requests:
            handle = engine.submit(request)
            events.append(list(handle))
            found.append(handle.result())
            check_engine(engine)
        return found, events, engine.stats


@pytest.mark.parametrize("options", [{}, {"paged_prefix_tokens": 512}, {"prefix_cache_bytes": 0}], ids=str)
def test_answers_are_those_without_drafts(
    loaded: Loaded, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn rows, stop strings, log-probabilities, short answers; a penalized row has no drafts."""
    requests = requests_of(loaded)
    wanted, known, stats = one_by_one(llm_of(loaded, False), requests, **options)
    assert stats["drafted_tokens"] == 0
    with many_drafts(monkeypatch):
        found, events, stats = one_by_one(llm_of(loaded, True), requests, **options)
    require_same(found, wanted)
    assert 50 < stats["accepted_tokens"] < stats["drafted_tokens"]
    for one, other in zip(events, known, strict=True):
        assert [event[:2] for event in one] == [event[:2] for event in other]
        for event, before in zip(one, other, strict=True):
            assert event.logprob == pytest.approx(before.logprob, abs=1e-4)
            assert [token for token, _ in event.top] == [token for token, _ in before.top]


def test_drawn_rows_keep_their_noise(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of high temperature, whose next tokens are proposed: each is drawn with the noise of its position."""
    prompt = requests_of(loaded)[0].parts
    for draw in (SamplingParams(1.2, top_k=50, seed=9), SamplingParams(1.0, top_p=0.9, seed=4, logprobs=2)):
        request = Request(prompt, 60, draw, stop_ids=frozenset())
        wanted, known, _ = one_by_one(llm_of(loaded, False), [request])
        script = Script(list(wanted[0].tokens), random.Random(5))
        with many_drafts(monkeypatch):
            monkeypatch.setattr(stepper, "LookupDrafter", lambda _, script=script: script)
            found, events, stats = one_by_one(llm_of(loaded, True), [request])
        require_same(found, wanted)
        assert 20 < stats["accepted_tokens"] < stats["drafted_tokens"]
        for one, other in zip(events[0], known[0], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_rows_that_join_and_leave(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows have plain steps; the last one has drafts once it is in the first slot again."""
    requests = requests_of(loaded)
    wanted, _, _ = answers(llm_of(loaded, False), requests)
    sizes, launch_block = list[int](), GraphPool.launch_block

    def launched(self: GraphPool, cache: Any, tokens: list[int], position: Any) -> torch.Tensor | None:
        assert set(self.rows) >= {id(cache)}
        sizes.append(len(tokens))
        return launch_block(self, cache, tokens, position)

    monkeypatch.setattr(GraphPool, "launch_block", launched)
    long = Request(requests[1].parts, 150, DRAWN, stop_ids=frozenset())
    alone, _, _ = answers(llm_of(loaded, False), [long])
    with many_drafts(monkeypatch):
        found, _, stats = answers(llm_of(loaded, True), [*requests, long])
    require_same(found, [*wanted, *alone])
    assert stats["accepted_tokens"] > 20 and set(sizes) <= set(BLOCKS) and len(set(sizes)) > 1


def test_grammars_have_no_drafts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars and penalties change scores; answers too short to end have drafts once they may."""
    pytest.importorskip("llguidance", reason="grammars need retrieval-attn[grammar]")
    schema = {"type": "array", "items": {"enum": ["width", "height"]}, "minItems": 9, "maxItems": 9}
    grammar = GrammarSpec("json_schema", json.dumps(schema))
    prompt = tuple(loaded[1].encode('["width","height","width","height","width"]\n' * 12, add_special_tokens=False))
    changed = [
        Request((prompt, (9,)), 70, DRAWN, grammar=grammar),
        Request((prompt, (10,)), 40, SamplingParams(presence_penalty=0.5), stop_ids=frozenset()),
        Request((prompt, (11,)), 40, SamplingParams(logit_bias={5: 1.0}), stop_ids=frozenset()),
    ]
    late = Request((prompt, prompt[:9]), 60, min_tokens=30)
    wanted, _, _ = one_by_one(llm_of(loaded, False), [*changed, late])
    with many_drafts(monkeypatch):
        found, _, stats = one_by_one(llm_of(loaded, True), changed)
        assert stats["drafted_tokens"] == 0
        after, _, stats = one_by_one(llm_of(loaded, True), [late])
        assert stats["drafted_tokens"] > 0 and stats["steps"] > 30
    require_same([*found, *after], wanted)


def test_kept_answers_and_saved_contexts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A follow-up turn continues the answer in the prefix cache; a context that is saved and opened, too."""
    with many_drafts(monkeypatch):
        assert require_kept_answers(loaded, tmp_path) > 100


def test_drafts_that_are_not_counted_are_noticed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(loaded)[:2]
    wanted, _, _ = one_by_one(llm_of(loaded, False), requests)
    with many_drafts(monkeypatch):
        monkeypatch.setattr(GraphPool, "commit_drafts", lambda *_: None)
        found, _, _ = one_by_one(llm_of(loaded, True), requests)
    with pytest.raises(AssertionError):
        require_same(found, wanted)


def test_a_failed_search_in_a_block(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs again without drafts, and later blocks go on."""
    requests = requests_of(loaded)[:2]
    wanted, _, _ = one_by_one(llm_of(loaded, False), requests)
    confirm, failed = GraphPool.confirm, list[int]()

    def failing(self: GraphPool) -> float:
        if self.blocks.launched is not None and len(failed) < 2:
            failed.append(1)
            self.undo()
            raise BackendError("layer 1: the search failed")
        return confirm(self)

    monkeypatch.setattr(GraphPool, "confirm", failing)
    with many_drafts(monkeypatch):
        found, _, stats = one_by_one(llm_of(loaded, True), requests)
    require_same(found, wanted)
    assert failed == [1, 1] and stats["accepted_tokens"] > 20


def test_a_block_that_cannot_be_captured(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no more drafts, said once."""
    requests = requests_of(loaded)[:3]
    wanted, _, _ = one_by_one(llm_of(loaded, False), requests)

    def refused(*_: Any) -> torch.Tensor:
        raise CaptureError("no memory")

    monkeypatch.setattr(BlockGraphs, "launch", refused)
    with many_drafts(monkeypatch):
        found, _, stats = one_by_one(llm_of(loaded, True), requests)
    require_same(found, wanted)
    assert stats["drafted_tokens"] == 0 and caplog.text.count("no more drafts") == 1


def test_ended_rows_leave_no_plan_in_blocks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search plan of a block keeps the keys of its sequence; it is dropped with the sequence."""
    pools, launch_block = set[GraphPool](), GraphPool.launch_block

    def launched(self: GraphPool, cache: Any, tokens: list[int], position: Any) -> torch.Tensor | None:
        pools.add(self)
        return launch_block(self, cache, tokens, position)

    monkeypatch.setattr(GraphPool, "launch_block", launched)
    requests = requests_of(loaded)
    with many_drafts(monkeypatch), Engine(llm_of(loaded, True), prefix_cache_bytes=0) as engine:
        engine.submit(requests[0]).result()
        engine.submit(requests[5]).result()  # too short for a block
        (pool,) = pools
        graphs = list(pool.blocks.graphs.values())
        assert graphs and not any(ask for graph in graphs for asks in graph._asks for ask in asks)


def test_warm_up_captures_blocks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer captures any, of rows that choose as the warm-up did."""
    with many_drafts(monkeypatch), Engine(llm_of(loaded, True)) as engine:
        engine.warm_up(rows=1, progress=False)
        runner = engine._stepper._runner
        request = requests_of(loaded)[0]
        engine.submit(request).result()
        captures = runner.captures
        assert engine.stats["accepted_tokens"] > 15
        assert captures >= 1 + len(BLOCKS)
        engine.submit(request).result()
        assert runner.captures == captures


def test_by_default_drafts_wait_for_no_capture(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the warm-up captured is launched: an engine without one has no drafts."""
    for name, value in {"extra": lambda *_: 0.001, "spent": lambda *_: 0.001, "seconds": lambda *_: 1.0}.items():
        monkeypatch.setattr(BlockCosts, name, value)
    monkeypatch.setattr(BlockCosts, "has_plain", True)
    request = requests_of(loaded)[0]
    wanted, _, _ = one_by_one(llm_of(loaded, False), [request])
    found, _, stats = one_by_one(llm_of(loaded, "auto"), [request])
    require_same(found, wanted)
    assert stats["drafted_tokens"] == 0
    with Engine(llm_of(loaded, "auto")) as engine:
        engine.warm_up(rows=1, progress=False)
        captures = engine._stepper._runner.captures
        assert captures >= 1 + len(BLOCKS)
        require_same([engine.submit(request).result()], wanted)
        assert engine._stepper._runner.captures == captures and engine.stats["accepted_tokens"] > 15
        drafted = engine.stats["drafted_tokens"]
        # of another kind of step: nothing is retrieved, and no such blocks are captured
        short = Request((request.parts[0][:12] * 3,), 30, stop_ids=frozenset())
        assert engine.submit(short).result().error is None
        assert engine.stats["drafted_tokens"] == drafted and engine._stepper._runner.blocks.graphs
        assert engine._stepper._runner.captures == captures


def test_only_captured_blocks_are_ready() -> None:
    blocks = BlockGraphs()
    assert blocks.is_ready(4), "a step that waits for its capture is planned with it"
    blocks.captures = False
    assert not blocks.is_ready(4)


def test_steps_launched_early_are_used(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts wait for the token of a step that was launched early, and no step is discarded for them."""
    waits, undone = list[bool](), list[int]()
    advance, block = GraphRunner.advance, Stepper._step

    def noted(self: GraphRunner, *args: Any, drafts: Any = None, **named: Any) -> Any:
        if drafts:
            undone.append(int(self.is_ahead))
        return advance(self, *args, drafts=drafts, **named)

    def stepped(self: Stepper, fed: Any, failed: Any, overlap: bool, blocks: Any) -> Any:
        waits.append(not overlap and not blocks)
        return block(self, fed, failed, overlap, blocks)

    monkeypatch.setattr(GraphRunner, "advance", noted)
    monkeypatch.setattr(Stepper, "_step", stepped)
    prompt = requests_of(loaded)[0].parts[0]
    request = Request((prompt[:60], (9,)), 60, stop_ids=frozenset())  # all in the window: nothing on the host
    wanted, _, _ = one_by_one(llm_of(loaded, False), [request])
    waits.clear()
    with many_drafts(monkeypatch):
        found, _, stats = one_by_one(llm_of(loaded, True), [request])
    require_same(found, wanted)
    assert undone and not any(undone) and any(waits) and stats["accepted_tokens"] > 0
