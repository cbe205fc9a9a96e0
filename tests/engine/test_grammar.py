"""Grammars of requests: masks, ends, rows of all kinds in one batch, and what is freed."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.llm import LLM
from retrieval_attn.runner.graph.decode_graph import GraphSampler
from retrieval_attn.sampling import sampler
from retrieval_attn.sampling.grammar import MAX_ERROR, GrammarCompiler, GrammarSpec, TokenMatcher
from retrieval_attn.sampling.sampler import DrawMode, MaskedParams, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.waiting import WAIT_SECONDS

pytest.importorskip("llguidance", reason="grammars need retrieval-attn[grammar]")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
RECORD = GrammarSpec("json_schema", json.dumps(SCHEMA))
DATE = GrammarSpec("regex", "[0-9]{4}-[0-9]{2}")
CHOICE = GrammarSpec("choice", json.dumps(["yes", "no", 'neither "of" them']))
DRAWN = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", device="cpu", dtype="float32", window=64, sink=4, retrieve=16)


@pytest.fixture
def compiler(llm: LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, 4096, {1})


def ids(llm: LLM, text: str) -> list[int]:
    found: list[int] = llm.tokenizer.encode(text, add_special_tokens=False)
    return found


def allowed(matcher: TokenMatcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist())


def requests_of(llm: LLM) -> list[Request]:
    """Rows with and without a grammar, greedy and drawn, with penalties and log-probabilities."""
    prompt = tuple(ids(llm, "The sky is blue. " * 30))
    return [
        Request((prompt, (9,)), 60, DRAWN, grammar=RECORD),
        Request((prompt, (10,)), 20, DRAWN),
        Request((prompt, (11,)), 60, SamplingParams(), grammar=RECORD),
        Request((prompt, (12,)), 20, SamplingParams()),
        Request((prompt, (13,)), 20, SamplingParams(1.5, top_p=0.9, seed=5, logprobs=2), grammar=DATE),
        Request((prompt, (14,)), 20, SamplingParams(0.9, frequency_penalty=1.0, seed=6), grammar=CHOICE),
        Request((prompt, (15,)), 20, DRAWN, grammar=DATE, stop_ids=frozenset()),
    ]


def check(found: list[Finished]) -> None:
    """Require answers of the grammars of `requests_of`."""
    for one in (found[0], found[2]):
        value = json.loads(one.text)
        assert one.reason == "stop" and list(value) == ["name", "age"] and 0 <= value["age"] <= 99
    for one in (found[4], found[6]):
        assert one.reason == "stop" and re.fullmatch("[0-9]{4}-[0-9]{2}", one.text)
    assert found[5].text in json.loads(CHOICE.text)


def answers(llm: LLM, requests: list[Request]) -> list[Finished]:
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        return [ticket.result() for ticket in [engine.submit(request) for request in requests]]


def texts(found: list[Finished]) -> list[tuple[str, str]]:
    return [(one.text, one.reason) for one in found]


def test_a_batch_of_all_kinds_answers_as_each_alone(llm: LLM) -> None:
    requests = requests_of(llm)
    together = answers(llm, requests)
    check(together)
    assert texts(together) == texts([answers(llm, [request])[0] for request in requests])


@pytest.mark.usefixtures("emulated_graphs")
def test_rows_with_a_grammar_choose_in_the_graph(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of an eager engine; only the row with a penalty gets its logits back."""
    requests = requests_of(llm)
    eager = LLM("bundled", device="cpu", dtype="float32", window=64, sink=4, retrieve=16, graph=False)
    apart: list[int] = []
    choose = Sampler.__call__

    def counted(self: Sampler, params: Any, *rest: Any) -> Any:
        apart.append(len(params))
        return choose(self, params, *rest)

    expected = answers(eager, requests)
    monkeypatch.setattr(Sampler, "__call__", counted)
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        assert engine._stepper._runner.replays > 10
    check(found)
    assert texts(found) == texts(expected)
    assert sum(apart) <= len(requests) + len(found[5].tokens)  # each first token, and the row with a penalty


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("rows", [1, 2])
def test_steps_with_a_grammar_are_launched_early(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs while the token before is told; only the choice waits for its mask."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "window": 1024}
    llm, eager = LLM("bundled", **options), LLM("bundled", graph=False, **options)
    requests = requests_of(llm)[:rows]
    expected, early, resume = answers(eager, requests), [0], GraphSampler.resume

    def counted(self: GraphSampler, step: Any, launched: Any) -> None:
        early[0] += step.drawing is None
        resume(self, step, launched)

    monkeypatch.setattr(GraphSampler, "resume", counted)
    found = answers(llm, requests)
    assert texts(found) == texts(expected) and json.loads(found[0].text)["name"]
    assert early[0] > len(found[0].tokens) // 2


def test_without_the_mask_no_answer_is_valid(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests would see it."""

    def unmasked(self: Any, scores: Tensor) -> Tensor:
        return scores

    monkeypatch.setattr(sampler._Masks, "applied", unmasked)
    found = answers(llm, requests_of(llm))
    assert all(one.error is not None or not one.text.startswith("{") for one in (found[0], found[2]))
    with pytest.raises((AssertionError, ValueError)):
        check(found)


def test_the_end_is_allowed_exactly_where_the_grammar_accepts_it(llm: LLM, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(GrammarSpec("regex", "ab+"))
    (a,), (b,) = ids(llm, "a"), ids(llm, "b")
    assert a in allowed(matcher) and 1 not in allowed(matcher)
    assert not matcher.accept(a) and 1 not in allowed(matcher) and b in allowed(matcher)
    assert not matcher.accept(b) and allowed(matcher) >= {1, b}
    exact = compiler.matcher(GrammarSpec("regex", "ab"))
    assert [exact.accept(a), exact.accept(b)] == [False, True]
    others = compiler.matcher(GrammarSpec("regex", "ab+"), frozenset({7, 40}))
    assert not allowed(others) & {1, 7, 40}
    assert not others.accept(a) and not others.accept(b) and allowed(others) & {1, 7, 40} == {7, 40}
    none = compiler.matcher(GrammarSpec("regex", "ab+"), frozenset())
    assert not none.accept(a) and not none.accept(b) and 1 not in allowed(none)
    assert not matcher.accept(a) and matcher.error and not allowed(matcher)  # "aba"


def test_a_grammar_begins_after_the_thinking(llm: LLM, compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(replace(DATE, after="</think>"))
    assert len(allowed(matcher)) > 4000
    for token in ids(llm, "Is it {this}?\n</think>\n\n2024-0"):
        assert token in allowed(matcher) and not matcher.accept(token)
    assert allowed(matcher) == {
        token for token in range(4096) if re.fullmatch("[0-9]", str(llm.tokenizer.decode([token])))
    }
    assert matcher.accept(ids(llm, "7")[0])


LARK, GBNF = ('start: "yes" | "no"', 'root ::= "yes" | "no"')


@pytest.mark.parametrize("spec", [CHOICE, GrammarSpec("grammar", LARK), GrammarSpec("grammar", GBNF)], ids=str)
def test_grammars_in_larks_form_begin_after_the_thinking(
    llm: LLM, compiler: GrammarCompiler, spec: GrammarSpec
) -> None:
    """They were refused: only other kinds are JSON inside llguidance."""
    word = json.loads(CHOICE.text)[0] if spec is CHOICE else "yes"
    matcher = compiler.matcher(replace(spec, after="</think>"))
    tokens = ids(llm, "Is it {this}?\n</think>\n\n" + word)
    for number, token in enumerate(tokens):
        assert token in allowed(matcher)
        assert not matcher.accept(token) or number == len(tokens) - 1
    assert ids(llm, "z")[0] not in allowed(matcher)


@pytest.mark.parametrize("text", ['{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'])
def test_a_schema_that_no_text_satisfies_is_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(InputDataError, match="no text satisfies it"):
        compiler.matcher(GrammarSpec("json_schema", text))


def test_errors_tell_no_parser_state(compiler: GrammarCompiler) -> None:
    """llguidance appends the answer's tokens and its whole grammar."""
    options = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(500)]
    matcher = compiler.matcher(GrammarSpec("json_schema", json.dumps({"anyOf": options})))
    while matcher.mask.any():
        matcher.accept(min(allowed(matcher)))
    assert "items" in matcher.error and "<state>" not in matcher.error and len(matcher.error) <= MAX_ERROR


def test_states_are_freed_when_requests_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished, cancelled and failed ones."""
    made: list[TokenMatcher] = []
    matcher = GrammarCompiler.matcher

    def kept(self: GrammarCompiler, *given: Any) -> TokenMatcher:
        made.append(found := matcher(self, *given))
        if len(made) == 7:  # its tokens are not those of the grammar
            monkeypatch.setattr(found, "accept", lambda _: TokenMatcher.accept(found, 0))
        return found

    monkeypatch.setattr(GrammarCompiler, "matcher", kept)
    endless = GrammarSpec("regex", "[a-z ]*")
    prompts = (5, 6), (5, 7)
    with Engine(llm) as engine:
        tickets = [engine.submit(request) for request in requests_of(llm)]
        long = engine.submit(Request((prompts[0],), 4000, DRAWN, grammar=endless, stop_ids=frozenset()))
        next(iter(long))
        long.cancel()
        lost = engine.submit(Request((prompts[1],), 4000, DRAWN, grammar=endless, stop_ids=frozenset()))
        assert long.result().reason == "cancelled" and isinstance(lost.result().error, InputDataError)
        check([ticket.result() for ticket in tickets])
    assert len(made) == 7 and all(one._matcher is None for one in made)


def test_a_preempted_row_continues_its_grammar(llm: LLM) -> None:
    """A batch request loses the only slot to interactive ones."""
    limits = replace(default_limits(llm.model, llm.config), rows=1)
    request = Request(((5, 6, 7),), 60, DRAWN, grammar=RECORD, priority="batch")
    (expected,) = answers(llm, [request])
    with Engine(llm, limits=limits) as engine:
        ticket = engine.submit(request)
        next(iter(ticket))
        others = [engine.submit(Request(((5, n),), 12, DRAWN, grammar=DATE)) for n in range(3)]
        found = ticket.result()
        assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", other.result().text) for other in others)
    assert (found.text, found.reason) == (expected.text, expected.reason) and found.reason == "stop"


def test_other_rows_decode_while_a_grammar_is_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    compile_spec = GrammarCompiler._compile

    def slow(self: GrammarCompiler, spec: GrammarSpec) -> Any:
        entered.set()
        assert leave.wait(WAIT_SECONDS)
        return compile_spec(self, spec)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    found: list[Finished] = []
    with Engine(llm) as engine:
        work = threading.Thread(
            target=lambda: found.append(engine.submit(Request(((5, 6),), 20, DRAWN, grammar=DATE)).result())
        )
        work.start()
        assert entered.wait(WAIT_SECONDS)
        assert len(engine.submit(Request(((8, 9),), 20, DRAWN, stop_ids=frozenset())).result().tokens) == 20
        leave.set()
        work.join(WAIT_SECONDS)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", found[0].text)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[GrammarSpec] = []
    compile_spec = GrammarCompiler._compile

    def counted(self: GrammarCompiler, spec: GrammarSpec) -> Any:
        count.append(spec)
        return compile_spec(self, spec)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    one, other = compiler.matcher(DATE), compiler.matcher(GrammarSpec("regex", DATE.text))
    one.accept(min(allowed(one)))
    assert len(count) == 1 and allowed(one) != set() and other._matcher is not one._matcher
    assert allowed(other) == allowed(compiler.matcher(DATE))


def test_without_the_extra(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with Engine(llm) as engine:
        with pytest.raises(ConfigError, match=r"retrieval-attn\[grammar\]"):
            engine.submit(Request(((5, 6),), grammar=DATE))
        assert engine.submit(Request(((5, 6),), 2)).result().error is None


def test_wrong_grammars() -> None:
    with pytest.raises(ConfigError, match="kind"):
        GrammarSpec("xml", "a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="non-empty"):
        GrammarSpec("regex", "")
    with pytest.raises(ConfigError, match="min_tokens"):
        Request(((5,),), 9, min_tokens=3, grammar=DATE)


class FixedMask:
    """A matcher that always allows the same tokens."""

    error = ""

    def __init__(self, tokens: list[int], width: int) -> None:
        bits = np.zeros((width + 31) // 32 * 32, np.uint8)
        bits[tokens] = 1
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("width", [97, 128])
def test_masked_rows_choose_as_from_the_allowed_scores(width: int) -> None:
    """Other rows choose as without masks, and logits that are not finite stay visible in excluded tokens."""
    torch.manual_seed(1)
    logits, kinds = torch.randn(6, width), [SamplingParams(), DRAWN, SamplingParams(1.2, top_k=5, top_p=0.8, seed=9)]
    tokens = [3, 40, 64, 96]
    some: Any = FixedMask(tokens, width)
    params = [*kinds, *(MaskedParams.of(one, some) for one in kinds)]
    made = Sampler(6)
    found = [one.token for one in made(params, logits, [5] * 6) if one is not None]
    assert made.mode == DrawMode(sample=True, filters=True, masked=True)
    excluded = torch.full_like(logits[3:], -torch.inf)
    excluded[:, tokens] = logits[3:, tokens]
    expected = [one.token for one in Sampler(3)(kinds, logits[:3], [5] * 3) if one is not None]
    expected += [one.token for one in Sampler(3)(kinds, excluded, [5] * 3) if one is not None]
    assert found == expected and set(found[3:]) <= set(tokens)
    logits[4, 5] = torch.nan
    assert [one is None for one in made(params, logits, [5] * 6)] == [False] * 4 + [True, False]
    assert [one.token for one in made(kinds, logits[:3], [5] * 3) if one is not None] == expected[:3]
    assert not made.mode.masked
