"""Rows of a batch that choose their tokens in a graph, emulated: as from the step's logits; what is told beside it."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from retrieval_attn.engine.detokenizer import OutputQueue
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Event, Finished, Request, RequestHandle
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.runner.graph.slot import StepMemory
from retrieval_attn.runner.graph_runner import GraphRunner
from retrieval_attn.sampling.sampler import SampledToken, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.engine.audit import check_engine
from tests.engine.test_engine import alone, ids, llm_of, same
from tests.runner.graph_cases import graph_step
from tests.runner.test_rows import read
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")

ROWS = 8
DRAWS = [
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(1.1, top_k=9, top_p=0.9, min_p=0.01, seed=2**63 + 5),
    SamplingParams(logprobs=2),
    SamplingParams(0.9, seed=4, logprobs=7),
]


def check_draws(model: Any, draws: list[SamplingParams], steps: int = 24) -> None:
    """Steps with random members: tokens and log-probabilities are those that the same logits give a Chooser."""
    caches = [read(model, tokens, seed) for seed, tokens in enumerate([50, 90, 300, 30, 120])]
    mine, theirs = [cache.fork() for cache in caches], [cache.fork() for cache in caches]
    drawing, plain = GraphRunner(model, ROWS), GraphRunner(model, ROWS)
    chooser, chance = Sampler(ROWS, model.device), random.Random(5)
    tokens = [7] * len(caches)
    for step in range(steps):
        rows = list(range(len(caches)))
        if step % 4 == 0:
            rows = chance.sample(rows, chance.randint(1, len(rows)))
        places = [mine[row].get_seq_length() for row in rows]
        fed, asked = [tokens[row] for row in rows], [draws[row] for row in rows]
        logits = graph_step(plain, [theirs[row] for row in rows], fed, places)
        expected = chooser(asked, logits, [place + 1 for place in places])
        stepped = drawing.advance([mine[row] for row in rows], list(zip(fed, places, strict=True)), asked)
        assert (list(stepped.choices), stepped.apart, stepped.logits, stepped.errors) == (
            list(range(len(rows))), [], None, {},
        )  # fmt: skip
        for row, one, other in zip(rows, stepped.choices.values(), expected, strict=True):
            assert one is not None and other is not None
            assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
            tokens[row] = one.token
    assert drawing.reason == plain.reason == "" and drawing.replays == steps
    drawing.close()
    plain.close()


@pytest.mark.parametrize("draws", [[DRAWS[0]] * 5, DRAWS[:3] * 2, DRAWS], ids=["greedy", "drawn", "logprobs"])
def test_rows_choose_in_a_graph_what_they_would_outside(draws: list[SamplingParams]) -> None:
    check_draws(build_model("llama"), draws)


def check_mixture(model: Any) -> None:
    """Rows without a draw beside rows that choose in the graph: both as in a step of a runner where no row draws."""
    chance = random.Random(3)
    caches = [read(model, tokens, seed) for seed, tokens in enumerate([50, 90, 300, 30, 120])]
    mine, theirs = [cache.fork() for cache in caches], [cache.fork() for cache in caches]
    drawing, plain, chooser = GraphRunner(model, ROWS), GraphRunner(model, ROWS), Sampler(ROWS, model.device)
    tokens, mixed = [7] * len(caches), 0
    for step in range(20):
        rows = chance.sample(range(len(caches)), chance.randint(1, len(caches)))
        asked = [DRAWS[row] if chance.random() < 0.6 else None for row in rows]
        mixed += 0 < sum(draw is None for draw in asked) < len(asked)
        places, fed = [mine[row].get_seq_length() for row in rows], [tokens[row] for row in rows]
        logits = graph_step(plain, [theirs[row] for row in rows], fed, places)
        inputs = list(zip(fed, places, strict=True))
        stepped = drawing.advance([mine[row] for row in rows], inputs, asked, overlap=bool(step % 2))
        drawn = [number for number, draw in enumerate(asked) if draw is not None]
        apart = [number for number, draw in enumerate(asked) if draw is None]
        assert (list(stepped.choices), list(stepped.apart), stepped.errors) == (drawn, apart, {})
        if apart:
            assert stepped.logits is not None and torch.allclose(stepped.logits, logits[apart], atol=1e-5)
        expected = chooser(
            [SamplingParams() if draw is None else draw for draw in asked], logits, [one + 1 for one in places]
        )
        for number, choice in stepped.choices.items():
            other = expected[number]
            assert choice is not None and other is not None and choice.token == other.token
            tokens[rows[number]] = choice.token
        for number in apart:
            tokens[rows[number]] = chance.randrange(97)
    assert mixed > 5 and drawing.reason == plain.reason == "" and drawing.replays == 20
    drawing.close()
    plain.close()


def test_rows_without_a_draw_get_their_logits_back() -> None:
    check_mixture(build_model("llama"))


def check_penalties(model: Any) -> None:
    """Rows with and without such options together: each gets what it gets alone, and what an eager engine gives it."""
    llm = llm_of()
    llm.model = model
    options = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(0.9, seed=5),
        SamplingParams(0.9, presence_penalty=1.5, frequency_penalty=0.7, seed=6, logprobs=3),
        SamplingParams(logit_bias={5: 4.0, 11: -100.0}),
    ]
    asked = [Request((ids(300, 1), ids(5 + n, n)), 14, draw, stop_ids=frozenset()) for n, draw in enumerate(options)]
    asked.append(Request((ids(30, 7),), 14, SamplingParams(0.9, seed=1), stop_ids=frozenset(range(60)), min_tokens=6))
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        tickets = [engine.submit(request) for request in asked]
        found = [ticket.result() for ticket in tickets]
        replays = engine._stepper._runner.replays
    assert replays > 8 and [one.error for one in found] == [None] * len(asked)
    eager = llm_of()
    eager.model, eager.config = llm.model, llm.config.replace(graph=False)
    for request, one in zip(asked, found, strict=True):
        assert same(one, alone(llm, request)) and same(one, alone(eager, request)), request
    assert len(found[-1].tokens) >= 6 and not set(found[-1].tokens[:6]) & set(range(60))
    assert 11 not in found[4].tokens


def test_an_engine_applies_penalties_beside_its_graphs() -> None:
    check_penalties(build_model("llama"))


def test_the_next_step_takes_the_tokens_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is uploaded while the same rows go on with what they chose; another token is."""
    model = build_model("llama")
    caches, runner = [read(model, 60, 1), read(model, 90, 2)], GraphRunner(model, ROWS)
    placed: list[int] = []
    place = StepMemory.place

    def watched(memory: StepMemory, *given: torch.Tensor) -> None:
        placed.append(1)
        place(memory, *given)

    monkeypatch.setattr(StepMemory, "place", watched)

    def advance(rows: list[int], tokens: list[int]) -> list[SampledToken | None]:
        inputs = [(token, caches[row].get_seq_length()) for row, token in zip(rows, tokens, strict=True)]
        asked = [(SamplingParams(), SamplingParams(0.9, seed=1))[row] for row in rows]
        return list(runner.advance([caches[row] for row in rows], inputs, asked).choices.values())

    def tokens_of(choices: list[SampledToken | None]) -> list[int]:
        return [choice.token for choice in choices if choice is not None]

    tokens = tokens_of(advance([0, 1], [5, 6]))
    placed.clear()
    for _ in range(5):
        tokens = tokens_of(advance([0, 1], tokens))
    assert placed == []
    tokens = tokens_of(advance([1, 0], tokens[::-1]))[::-1]  # in another order, at the same places
    assert placed == []
    tokens = tokens_of(advance([0, 1], [tokens[0], (tokens[1] + 1) % 97]))
    assert len(placed) == 1
    advance([1], tokens[1:])
    advance([0], tokens[:1])  # another one's token would lie at another place
    assert len(placed) >= 2
    runner.close()


def test_rows_whose_logits_are_not_finite_fail_alone() -> None:
    model = build_model("llama")
    caches, runner = [read(model, 30, seed, window=64) for seed in range(3)], GraphRunner(model, ROWS)
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = torch.nan
    for draw in (SamplingParams(), SamplingParams(0.8, top_k=5, seed=1, logprobs=2)):
        forks = [cache.fork() for cache in caches]
        stepped = runner.advance(forks, [(token, 30) for token in (5, 96, 6)], [draw] * 3)
        assert [choice is None for choice in stepped.choices.values()] == [False, True, False]
    assert runner.replays == 2
    runner.close()


def test_a_replay_says_when_it_was_launched() -> None:
    """Once, before its host part is over."""
    model = build_model("llama")
    cache, runner, seen = read(model, 200, 1), GraphRunner(model, ROWS), []
    for step in range(4):
        runner.advance([cache], [(5, 200 + step)], [SamplingParams()], lambda: seen.append(runner.replays))
    assert seen == [0, 1, 2, 3]
    runner.close()


def requests() -> list[Request]:
    document = ids(300, 1)
    found = [Request((document, ids(5 + n, n)), 9 + n, DRAWS[n % 5], stop_ids=frozenset({3})) for n in range(6)]
    return [*found, Request((ids(40, 9),), 30, SamplingParams(0.9, seed=1), stop=("1", "22"), stop_ids=frozenset())]


def test_an_engine_tells_beside_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and their pieces are those of each request alone, from a thread of its own; all are told at the end."""
    llm = llm_of()
    llm.model = build_model("llama")
    threads: list[str] = []
    put = RequestHandle.put

    def watched(ticket: RequestHandle, item: Event | Finished) -> None:
        threads.append(threading.current_thread().name)
        put(ticket, item)

    monkeypatch.setattr(RequestHandle, "put", watched)
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        tickets = [engine.submit(request) for request in requests()]
        events = [list(ticket) for ticket in tickets]
        found = [ticket.result() for ticket in tickets]
        replays = engine._stepper._runner.replays
    assert replays > 8 and "retrieval_attn-output" in threads
    assert not any(thread.name == "retrieval_attn-output" for thread in threading.enumerate())
    for request, one, told in zip(requests(), found, events, strict=True):
        assert same(one, alone(llm, request)), request
        assert "".join(event.text for event in told) == one.text
        assert [event.token for event in told if event.token >= 0] == list(one.tokens)
        assert all(len(event.top) == request.draw.logprobs for event in told if event.token >= 0)
    assert found[-1].reason == "stop" and "1" not in found[-1].text


@pytest.mark.parametrize("graph", ["auto", False])
def test_text_that_cannot_be_made_ends_its_request_alone(
    graph: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = llm_of()
    llm.config = llm.config.replace(graph=graph)
    asked = [Request((ids(30, n),), 12, stop_ids=frozenset()) for n in range(3)]
    add, calls = TextStream.add, dict[int, int]()

    def failing(stream: TextStream, token: int) -> str:
        number = list(calls).index(id(stream)) if id(stream) in calls else len(calls)
        calls[id(stream)] = calls.get(id(stream), 0) + 1
        if number == 1 and calls[id(stream)] == 4:
            raise ValueError("no such token")
        return add(stream, token)

    monkeypatch.setattr(TextStream, "add", failing)
    with Engine(llm, prefix_cache_bytes=0) as engine:
        tickets = [engine.submit(request) for request in asked]
        found = [ticket.result() for ticket in tickets]
        again = engine.submit(asked[0]).result()
        check_engine(engine)
    assert sorted(one.reason for one in found) == ["error", "length", "length"]
    assert [str(one.error) for one in found if one.error is not None] == ["no such token"]
    assert again.reason == "length" and all(len(one.tokens) == 12 for one in found if one.error is None)


def test_the_output_queue_keeps_the_order() -> None:
    """At once while there is no thread; behind what the thread has to tell once there is."""
    outputs, told = OutputQueue(), list[int]()
    gate = threading.Event()
    outputs.put(lambda: told.append(0))
    outputs.flush()
    assert told == [0]
    outputs.put(gate.wait)  # type: ignore[arg-type]
    outputs.flush_async()
    for number in range(1, 50):
        outputs.put(lambda number=number: told.append(number))  # type: ignore[misc]
        (outputs.flush, outputs.flush_async)[number % 2]()
    assert told == [0]
    outputs.put(lambda: told.append(50))
    gate.set()
    outputs.close()
    assert told == list(range(51))


def test_events_are_told_in_the_order_of_their_tokens() -> None:
    """Whatever was told by the engine's thread, and what by the outputs."""
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=0) as engine:
        for _ in range(3):  # each ends with nobody beside it, and begins anew without graphs
            ticket = engine.submit(Request((ids(50, 3),), 10, stop_ids=frozenset()))
            events = list(ticket)
            assert [event.token for event in events if isinstance(event, Event)] == list(ticket.result().tokens)
