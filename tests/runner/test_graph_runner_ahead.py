"""Steps of a batch that are launched before they are asked for, emulated: nobody gets anything else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import BackendError
from retrieval_attn.runner.graph.decode_graph import DecodeGraph, GraphSampler
from retrieval_attn.runner.graph_runner import GraphRunner
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.emulation.runtime import EmulatedRuntime
from tests.engine.audit import check_engine
from tests.engine.test_engine import CONFIG, alone, ids, llm_of, same
from tests.model.test_hybrid import new_model
from tests.runner.graph_cases import DEVICE
from tests.runner.test_graph_runner import ROWS
from tests.runner.test_host_row_gather import REACHED
from tests.runner.test_rows import read
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("emulated_graphs", "compiled")

ROOMY = {**REACHED, "window": 128}
"""Windows that take more tokens than most tests have: until they move to the host, it has no part in steps."""
DRAWS = [
    SamplingParams(logprobs=3), SamplingParams(temperature=0.8, seed=3, logprobs=1), SamplingParams(logprobs=2),
    SamplingParams(temperature=1.2, top_k=9, seed=5, logprobs=2),
]  # fmt: skip
"""Tokens of a small model say little: log-probabilities are compared."""


class Answers:
    """Rows that choose their tokens in a runner's graphs."""

    def __init__(self, model: Any, lengths: list[int], ahead: bool, **options: Any) -> None:
        self.runner, self.ahead = GraphRunner(model, ROWS), ahead
        self.caches = [read(model, tokens, seed, **options) for seed, tokens in enumerate(lengths)]
        self.draws = [DRAWS[number % len(DRAWS)] for number in range(len(lengths))]
        self.tokens = [[7 + number] for number in range(len(lengths))]

    def step(self, members: list[int]) -> list[Any]:
        caches = [self.caches[number] for number in members]
        inputs = [(self.tokens[number][-1], self.caches[number].get_seq_length()) for number in members]
        draws = [self.draws[number] for number in members]
        stepped = self.runner.advance(caches, inputs, draws, overlap=self.ahead)
        assert not stepped.apart and not stepped.errors
        choices = [stepped.choices[place] for place in range(len(members))]
        for number, choice in zip(members, choices, strict=True):
            assert choice is not None
            self.tokens[number].append(choice.token)
        return choices

    def fork(self, number: int) -> None:
        self.caches.append(self.caches[number].fork())
        self.tokens.append([*self.tokens[number]])
        self.draws.append(self.draws[number])

    @property
    def bucket(self) -> DecodeGraph:
        assert self.runner._pool is not None and self.runner._pool._graph is not None
        return self.runner._pool._graph


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of steps, in order: launched, and so ahead, undone."""
    seen: list[str] = []
    launch, undo, launch_next = DecodeGraph._launch, DecodeGraph.undo, DecodeGraph.launch_next

    def launched(self: DecodeGraph, *given: Any, **named: Any) -> Any:
        seen.append("launched")
        return launch(self, *given, **named)

    def undone(self: DecodeGraph) -> None:
        seen.append("undone")
        undo(self)

    def gone_ahead(self: DecodeGraph, *given: Any) -> None:
        launch_next(self, *given)
        if self.in_flight:
            seen[-1] = "ahead"

    monkeypatch.setattr(DecodeGraph, "launch_next", gone_ahead)
    monkeypatch.setattr(DecodeGraph, "_launch", launched)
    monkeypatch.setattr(DecodeGraph, "undo", undone)
    return seen


def both(lengths: list[int], **options: Any) -> tuple[Answers, Answers]:
    model = build_model("llama", max_position_embeddings=8192)
    return Answers(model, lengths, True, **options), Answers(model, lengths, False, **options)


def test_who_comes_and_goes() -> None:
    """Random members, forks, crops and spills: each step is that of a runner that launches nothing ahead."""
    rows, others = both([400, 500, 700, 900], **ROOMY)
    chance, ahead = random.Random(3), 0
    for step in range(90):
        if step in (20, 50):
            for one in (rows, others):
                one.fork(step // 20)
        count = len(rows.caches)
        members = [number for number in range(count) if chance.random() < 0.9] or [0]
        if chance.random() < 0.2:
            chance.shuffle(members)
        ahead += rows.runner._pool is not None and bool(rows.bucket.in_flight)
        assert rows.step(members) == others.step(members)
        if chance.random() < 0.1:
            cropped = chance.randrange(count)
            for one in (rows, others):
                one.caches[cropped].crop(one.caches[cropped].get_seq_length() - 2)
    assert ahead > 50 and rows.runner.replays == others.runner.replays == 90
    assert rows.runner.reason == others.runner.reason == ""
    caches: list[tuple[Any, Any]] = list(zip(rows.caches, others.caches, strict=True))
    assert all(left.get_seq_length() == right.get_seq_length() for left, right in caches)
    rows.runner.close()
    others.runner.close()
    for left, right in caches:
        layers: list[tuple[Any, Any]] = list(zip(left.layers, right.layers, strict=True))
        for pair in layers:
            spans = [layer.window.span for layer in pair]
            assert spans[0][1] - spans[0][0] == spans[1][1] - spans[1][0]
            keys = [layer.window.buffers[0][:, :, slice(*layer.window.span)] for layer in pair]
            torch.testing.assert_close(keys[0], keys[1])


def test_the_same_rows_wait_for_one_launch_a_step(launches: list[str]) -> None:
    """And one who leaves costs the others nothing."""
    rows, _ = both([400, 500, 700], **ROOMY)
    for _ in range(6):
        rows.step([0, 1, 2])
    assert launches == ["launched", *["ahead"] * 6]
    for _ in range(3):
        rows.step([0, 2])
        left = [int(row is not None) for row in rows.bucket.rows]
        assert rows.bucket.decoder.memory.stored.tolist() == left, "nobody's row grows longer"
    assert launches == ["launched", *["ahead"] * 9]
    rows.step([0, 1, 2])
    assert launches[10:] == ["undone", "launched", "ahead"]
    rows.runner.clear()
    assert launches[13:] == ["undone"] and rows.runner.replays == 10


def test_the_next_step_is_launched_before_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as windows take the tokens of both. What the first one chose is not written over."""
    rows, others = both([400, 500], **ROOMY)
    seen: list[str] = []
    launch, wait = DecodeGraph._launch, EmulatedRuntime.wait

    def launched(self: DecodeGraph, *given: Any, **named: Any) -> Any:
        if self is rows.bucket:
            seen.append("launched")
        return launch(self, *given, **named)

    def waited(self: EmulatedRuntime, mark: None) -> None:
        seen.append("over")
        wait(self, mark)

    others.step([0, 1])
    rows.step([0, 1])
    monkeypatch.setattr(DecodeGraph, "_launch", launched)
    monkeypatch.setattr(EmulatedRuntime, "wait", waited)
    room = min(row.room for row in rows.bucket.rows if row is not None)
    for left in range(room, 0, -1):
        del seen[:]
        chosen = rows.step([0, 1])
        assert seen == (["launched", "over"] if left > 1 else ["over"]), left
        assert chosen == others.step([0, 1])
    assert not rows.bucket.in_flight


@pytest.mark.parametrize("what", ["token", "draw"])
def test_another_token_or_draw_is_another_step(what: str, launches: list[str]) -> None:
    rows, others = both([500, 600], **ROOMY)
    for number in range(4):
        assert rows.step([0, 1]) == others.step([0, 1])
        for one in (rows, others):
            if what == "token":
                one.tokens[1][-1] = 11 + number
            else:
                one.draws[1] = SamplingParams(temperature=5.0, seed=number, logprobs=1)
    assert launches.count("undone") == 3


def test_another_row_in_the_same_place_is_another() -> None:
    """With the same token at the same position: its keys are its own."""
    rows, others = both([500, 501], **ROOMY)
    for one in (rows, others):
        one.draws = [SamplingParams(logprobs=3)] * 2
        one.step([0])
        one.tokens[1] = one.tokens[0][-1:]
    assert rows.bucket.in_flight
    inputs = {0: (rows.tokens[1][-1], rows.caches[1].get_seq_length())}
    assert dict(rows.bucket.in_flight[0].inputs) == inputs
    assert rows.step([1]) == others.step([1])
    for _ in range(5):
        assert rows.step([1]) == others.step([1])


@pytest.mark.parametrize("options", [{"retrieve": 2}, DEVICE, {"graph": False}])
def test_not_where_the_host_has_a_part(options: dict[str, Any]) -> None:
    rows, others = both([900, 900], **options)
    for _ in range(3):
        if options.get("graph") is False:
            inputs = [(7, one.get_seq_length()) for one in rows.caches]
            assert len(rows.runner.advance(rows.caches, inputs, DRAWS[:2], overlap=True).apart) == 2
            assert rows.runner._pool is None
            continue
        assert rows.step([0, 1]) == others.step([0, 1])
        assert not rows.bucket.in_flight


def test_not_where_states_would_move() -> None:
    """A state is of before the step or behind it, and others may look at it between two."""
    rows = Answers(new_model("qwen3_next"), [600, 700], True, **ROOMY)
    for _ in range(3):
        rows.step([0, 1])
        assert not rows.bucket.in_flight


def test_a_launch_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the step is asked for; what came before counts."""
    rows, others = both([400, 500], **ROOMY)
    assert rows.step([0, 1]) == others.step([0, 1])
    prepare = GraphSampler.prepare
    failed: list[bool] = []

    def fails(self: Any, *given: Any) -> bool:
        if self is rows.bucket.draw and not rows.bucket.in_flight and not failed and len(rows.tokens[0]) == 3:
            failed.append(True)
            raise BackendError("no")
        return prepare(self, *given)

    monkeypatch.setattr(GraphSampler, "prepare", fails)
    for _ in range(4):
        assert rows.step([0, 1]) == others.step([0, 1])
    assert rows.runner.reason == ""


def test_an_engine_launches_ahead(launches: list[str]) -> None:
    """Its answers are those that rows get alone, whoever comes and ends meanwhile."""
    llm = llm_of(CONFIG.replace(**ROOMY))
    llm.model = build_model("llama", max_position_embeddings=8192)
    requests = [
        Request((ids(600 + number, number),), 4 + 9 * number, SamplingParams(0.8 * (number % 2), seed=number))
        for number in range(5)
    ]
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
    steps = engine.stats["steps"]
    assert launches.count("ahead") > steps // 2 > 15 and launches.count("undone") < steps // 4
    for request, one in zip(requests, found, strict=True):
        assert one.error is None and same(one, alone(llm, request)), request


def test_questions_on_a_text_go_ahead_while_its_keys_have_codes(launches: list[str]) -> None:
    """A question pushes tokens of the text out of the window. Its own have no codes: once they follow, the host attends
    to them.
    """
    llm = llm_of(CONFIG.replace(**{**ROOMY, "window": 40}))
    llm.model = build_model("llama", max_position_embeddings=8192)
    text = ids(900, 3)
    answers = {}
    for tokens in (12, 70):
        requests = [Request((text, ids(16, number)), tokens, SamplingParams(seed=number)) for number in range(3)]
        del launches[:]
        with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
            found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
            check_engine(engine)
        answers[tokens] = launches.count("ahead"), launches.count("launched")
        for request, one in zip(requests, found, strict=True):
            assert one.error is None and same(one, alone(llm, request)), request
    (ahead, asked), (more_ahead, more_asked) = answers[12], answers[70]
    assert ahead >= 8 > asked, "but for the first step, and those that come with another row"
    assert more_ahead >= ahead and more_asked > 20
