"""Drafts in an engine: every answer is the one without them, in rows of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import DraftMode
from retrieval_attn.engine import stepper
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Finished, Request, RequestHandle
from retrieval_attn.engine.stepper import RowDrafts
from retrieval_attn.runner.drafts import BlockCosts, DraftLength
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.tiny_models import Loaded

CONFIG = ra.Config(window=64, sink=4, retrieve=16)
LINE = "def area(width, height): return width * height  # of a rectangle, in square metres\n"
DRAWN = SamplingParams(temperature=0.7, seed=3)


def llm_of(loaded: Loaded, drafts: DraftMode) -> Any:
    return SimpleNamespace(model=loaded[0], tokenizer=loaded[1], config=CONFIG.replace(drafts=drafts))


def requests_of(loaded: Loaded) -> list[Request]:
    """Greedy, drawn and penalized rows, with stop strings, log-probabilities and answers of one token."""
    prompt = tuple(loaded[1].encode(LINE * 12, add_special_tokens=False))
    never: Mapping[str, Any] = {"stop_ids": frozenset()}
    return [
        Request((prompt, (9,)), 50, **never),
        Request((prompt, prompt[:7]), 60, DRAWN, **never),
        Request((prompt, prompt[:12]), 50, SamplingParams(logprobs=3), **never),
        Request((prompt, prompt[:20]), 40, SamplingParams(repetition_penalty=1.05), **never),
        Request((prompt, prompt[:5]), 40, stop=("metres", "rect")),
        Request((prompt, prompt[:9]), 1),
        Request((prompt[:40],), 33, SamplingParams(1.2, top_k=5, seed=9), **never),
        Request((prompt, prompt[:3]), 64, min_tokens=20),
    ]


@contextmanager
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafts whatever they cost, so that many are wrong."""
    with monkeypatch.context() as patch:
        patch.setattr(BlockCosts, "extra", lambda *_: 0.001)
        patch.setattr(DraftLength, "choose", lambda _self, draft, most, *_: min(most, len(draft.tokens)))
        yield


def answers(llm: Any, requests: list[Request], **options: Any) -> tuple[list[Finished], list[Any], dict[str, Any]]:
    """Results, their events, and the counts of the engine."""
    with Engine(llm, **options) as engine:
        handles = [engine.submit(request) for request in requests]
        events = [list(handle) for handle in handles]
        return [handle.result() for handle in handles], events, engine.stats


def require_same(found: list[Finished], wanted: list[Finished]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.error is None
        assert (one.tokens, one.text, one.reason) == (other.tokens, other.text, other.reason)


@pytest.mark.parametrize("options", [{}, {"paged_prefix_tokens": 512}, {"prefix_cache_bytes": 0}], ids=str)
def test_answers_are_those_without_drafts(
    loaded: Loaded, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(loaded)
    wanted, known, stats = answers(llm_of(loaded, False), requests, **options)
    assert stats["drafted_tokens"] == 0
    with eager_drafts(monkeypatch):
        found, events, stats = answers(llm_of(loaded, True), requests, **options)
    require_same(found, wanted)
    assert 50 < stats["accepted_tokens"] < stats["drafted_tokens"]
    for one, other in zip(events, known, strict=True):
        assert [event[:2] for event in one] == [event[:2] for event in other]
        for event, before in zip(one, other, strict=True):
            assert event.logprob == pytest.approx(before.logprob, abs=1e-4)
            assert [token for token, _ in event.top] == [token for token, _ in before.top]


def test_the_engines_own_choice_of_drafts(loaded: Loaded) -> None:
    """One row at a time: right drafts make the answers shorter in steps."""
    requests = requests_of(loaded)[:3]
    wanted = [answers(llm_of(loaded, False), [one])[0][0] for one in requests]
    with Engine(llm_of(loaded, True)) as engine:
        require_same([engine.submit(one).result() for one in requests], wanted)
        stats = engine.stats
    assert stats["steps"] + stats["accepted_tokens"] == sum(len(one.tokens) for one in wanted)
    assert stats["accepted_tokens"] > 20


def test_grammars_choose_among_drafts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="grammars need retrieval-attn[grammar]")
    schema = {"type": "array", "items": {"enum": ["width", "height"]}, "minItems": 9, "maxItems": 9}
    grammar = GrammarSpec("json_schema", json.dumps(schema))
    prompt = tuple(loaded[1].encode('["width","height","width","height","width"]\n' * 12, add_special_tokens=False))
    requests = [
        Request((prompt, (9 + n,)), 70, draw, grammar=grammar) for n, draw in enumerate([DRAWN, SamplingParams()])
    ]
    wanted, _, _ = answers(llm_of(loaded, False), requests)
    with eager_drafts(monkeypatch):
        found, _, stats = answers(llm_of(loaded, True), requests)
    require_same(found, wanted)
    assert stats["accepted_tokens"] > 5


def require_kept_answers(loaded: Loaded, folder: Path) -> int:
    """Continue an answer of the prefix cache, and a context that is saved and opened, with drafts as without.

    Returns the accepted drafts. Without drafts there must be none.
    """
    tokenizer, found, accepted = loaded[1], [], 0
    document = tokenizer.encode(LINE * 12, add_special_tokens=False)
    for drafts in (False, True):
        with Engine(llm_of(loaded, drafts), store=folder / str(drafts), cache_generated=True) as engine:
            first = engine.submit(Request((tuple(document),), 150, stop_ids=frozenset())).result()
            turn = (*document, *first.tokens, *document[:9])
            second = engine.submit(Request((turn,), 40, stop_ids=frozenset())).result()
            engine.save("text", document)
            third = engine.submit(Request((tuple(document[:9]),), 40, context="text")).result()
            accepted = engine.stats["accepted_tokens"]
            assert drafts or not accepted
        assert second.cached_tokens > len(document) + 100
        found.append([first, second, third])
    require_same(found[1], found[0])
    return accepted


def test_kept_answers_and_saved_contexts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A follow-up turn continues the answer in the prefix cache; a context that is saved and opened, too."""
    with eager_drafts(monkeypatch):
        require_kept_answers(loaded, tmp_path)


def test_wrong_drafts_that_stay_are_noticed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(loaded)[:2]
    wanted, _, _ = answers(llm_of(loaded, False), requests)
    with eager_drafts(monkeypatch):
        monkeypatch.setattr(RetrievalCache, "crop", lambda *_: None)
        found, _, _ = answers(llm_of(loaded, True), requests)
    with pytest.raises(AssertionError):
        require_same(found, wanted)


def test_a_failed_search_ends_its_row_alone(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose block fails ends with the error; the row in the same step has its answer."""
    requests = requests_of(loaded)[:2]
    wanted, _, _ = answers(llm_of(loaded, False), requests)
    real, calls = stepper.GraphRunner.advance, list[int]()

    def advance(self: Any, caches: Any, *args: Any, **named: Any) -> Any:
        if named.get("drafts", {}).get(0) and not calls:
            calls.append(1)
            monkeypatch.setattr(type(caches[0].layers[2]), "attend", failing(caches[0].layers[2]))
        return real(self, caches, *args, **named)

    def failing(bad: Any) -> Any:
        attend = type(bad).attend

        def wrapped(self: Any, *args: Any, **named: Any) -> Any:
            if self is bad:
                raise RuntimeError("an injected error")
            return attend(self, *args, **named)

        return wrapped

    with eager_drafts(monkeypatch):
        monkeypatch.setattr(stepper.GraphRunner, "advance", advance)
        with Engine(llm_of(loaded, True)) as engine:
            handles: list[RequestHandle] = [engine.submit(one) for one in requests]
            found = [handle.result() for handle in handles]
    assert calls and sorted(one.reason for one in found) == ["error", "length"]
    for one, other in zip(found, wanted, strict=True):
        assert one.reason == "error" or one.tokens == other.tokens


def test_rows_wait_little_for_the_drafts_of_others() -> None:
    drafting = RowDrafts.__new__(RowDrafts)
    drafting.costs = BlockCosts()
    assert drafting._extra(1, 0, 15) == pytest.approx(15 * 0.15)
    assert drafting._extra(2, 0, 1) == pytest.approx(2 * 0.15)
    assert drafting._extra(2, 1, 1) == drafting._extra(4, 0, 3) == float("inf")
