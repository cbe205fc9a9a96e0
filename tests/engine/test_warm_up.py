"""Who comes to an engine that was warmed up waits for no capture, and finds it as if nobody had been there."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.engine import warm_up
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.request import Request
from retrieval_attn.engine.stepper import Stepper
from retrieval_attn.errors import ConfigError, ContextLengthError, EngineFullError
from retrieval_attn.gpu.codes import search
from retrieval_attn.runner.graph import decode_graph as bucket_graph
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.emulation.runtime import EmulatedRuntime
from tests.engine.audit import check_engine
from tests.engine.test_engine import CONFIG, alone, ids, llm_of, same
from tests.runner.graph_cases import DEVICE
from tests.runner.test_host_row_gather import REACHED
from tests.waiting import WAIT_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("compiled", "one_thread")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of steps and of draws, as they come."""
    found: list[Any] = []
    real = EmulatedRuntime.capture

    def capture(self: EmulatedRuntime, record: Any) -> Any:
        found.append(record)
        return real(self, record)

    monkeypatch.setattr(EmulatedRuntime, "capture", capture)
    return found


def asked(lengths: list[int], draw: SamplingParams, tokens: int) -> list[Request]:
    return [Request((ids(length, length), ids(9, 5)), tokens, draw, stop_ids=frozenset()) for length in lengths]


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 3),
        (DEVICE, 3),
        (REACHED, 30),
        ({"paged_prefix_tokens": 128}, 3),
        ({**REACHED, "paged_prefix_tokens": 128}, 30),
    ],
    ids=["own", "device", "rows", "pages", "rows and pages"],
)
def test_nothing_is_captured_after_it(
    options: dict[str, Any], tokens: int, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows of any length and number, also as many as there may be, in every way to draw; of answers nothing changes.
    tokens: of the last answers, in the course of which the host gets keys that the device has no codes of.
    """
    monkeypatch.setattr(search, "MIN_CLASS", 128)  # else all rows of such a model are of one class
    engine_options = {name: value for name, value in options.items() if name == "paged_prefix_tokens"}
    llm = llm_of(CONFIG.replace(**{name: value for name, value in options.items() if name not in engine_options}))
    lengths = [700, 20, 60, 300, 128]
    with Engine(llm, limits=replace(default_limits(llm.model, llm.config), rows=4), **engine_options) as engine:
        counted: list[int] = []  # what graphs take beside tensors is known once all of them are there
        monkeypatch.setattr(warm_up, "lower_cap_for_graphs", lambda device: counted.append(len(captures)))
        engine.warm_up(tokens=1000, progress=False)
        made = len(captures)
        assert made > 5 and engine.stats["steps"] == 0 and counted == [made]
        runner = engine._stepper._runner
        assert (runner.reason, runner._pool is not None and not runner._pool.rows) == ("", True)
        for draw in warm_up.DRAWS:
            count = tokens if draw is warm_up.DRAWS[-1] else 3
            requests = asked(lengths, draw, count)
            answers = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
            assert all(len(answer.tokens) == count for answer in answers)
        assert len(captures) == made and runner.replays > 15
        check_engine(engine)
    if not engine_options:
        for request, answer in list(zip(requests, answers, strict=True))[:3]:
            assert same(answer, alone(llm, request))


@pytest.mark.usefixtures("emulated_graphs")
def test_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, no page, no node; the next step takes the smallest graph."""
    seen: list[weakref.ref[RetrievalCache]] = []
    real = RetrievalCache.fork

    def fork(self: RetrievalCache, *args: Any, **kwargs: Any) -> RetrievalCache:
        made = real(self, *args, **kwargs)
        seen.extend((weakref.ref(self), weakref.ref(made)))
        return made

    monkeypatch.setattr(RetrievalCache, "fork", fork)
    sizes: list[int] = []
    step = bucket_graph.DecodeGraph.step

    def stepped(self: Any, *args: Any, **options: Any) -> Any:
        sizes.append(self.size)
        return step(self, *args, **options)

    llm = llm_of()
    limits = replace(default_limits(llm.model, llm.config), rows=3)
    with Engine(llm, limits=limits, paged_prefix_tokens=128) as engine:
        engine.warm_up(progress=False)
        assert seen and not [one for one in seen if one() is not None]
        assert engine._exact is not None and engine._exact.free_pages and not engine._exact.counts.held
        check_engine(engine)
        assert engine._tree is not None and engine._tree.sizes == Sizes()
        monkeypatch.setattr(bucket_graph.DecodeGraph, "step", stepped)
        engine.submit(Request((ids(300, 1),), 4, stop_ids=frozenset())).result()
    assert sizes and set(sizes) == {1}


def test_without_graphs_it_reads_and_steps() -> None:
    with Engine(llm_of()) as engine:
        engine.warm_up(rows=3, draws=(SamplingParams(logprobs=3),), progress=False)
        assert engine.stats["steps"] == 0
        assert len(engine.submit(Request((ids(60, 1),), 3, stop_ids=frozenset())).result().tokens) == 3


def test_what_is_refused() -> None:
    engine = Engine(llm_of())
    with pytest.raises(ConfigError, match="1 .. "):
        engine.warm_up(rows=0)
    with pytest.raises(ConfigError, match="at least 1"):
        engine.warm_up(tokens=0)
    with pytest.raises(ContextLengthError):
        engine.warm_up(tokens=1 << 40)
    engine.close()
    with pytest.raises(EngineFullError, match="closed"):
        engine.warm_up()


class Gate:
    """Blocks the warm-up of an engine before its first step of two rows, until it is opened.

    Attributes:
        events: rows of each step of the warm-up, and "decode" for each step of requests.
        texts: text that the warm-up holds in each step of requests.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[int | str] = []
        self.texts: list[Any] = []
        self.reached, self._opened = threading.Event(), threading.Event()
        rehearse, decode = Stepper.rehearse, Stepper.decode

        def rehearsed(stepper: Stepper, cache: Any, logits: Any, rows: int, *args: Any, **options: Any) -> None:
            if rows == 2 and not self._opened.is_set():
                self.reached.set()
                assert self._opened.wait(WAIT_SECONDS)
            self.events.append(rows)
            rehearse(stepper, cache, logits, rows, *args, **options)

        def decoded(stepper: Stepper, rows: Any, *args: Any) -> Any:
            if rows:
                self.events.append("decode")
                self.texts.extend(run.text for run in engine._warm_ups._runs)
            return decode(stepper, rows, *args)

        monkeypatch.setattr(Stepper, "rehearse", rehearsed)
        monkeypatch.setattr(Stepper, "decode", decoded)

    def open(self) -> None:
        """Let the warm-up go on."""
        self._opened.set()


def wait_until_warm(engine: Engine) -> None:
    """Wait for the end of all warm-ups."""
    wait_until(lambda: not engine.warming)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_graphs")
def test_requests_go_before_a_background_warm_up(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for one piece at most, the text is freed meanwhile, and in the end nothing is left to capture."""
    caplog.set_level(logging.INFO, "retrieval_attn.engine.warm_up")
    monkeypatch.setattr(search, "MIN_CLASS", 128)  # else all rows of such a model are of one class
    monkeypatch.setattr(warm_up, "IDLE_SECONDS", 0.0)
    counted: list[int] = []
    monkeypatch.setattr(warm_up, "lower_cap_for_graphs", lambda device: counted.append(len(captures)))
    llm = llm_of(CONFIG.replace(drafts=False, **REACHED))
    with Engine(llm) as engine:
        gate = Gate(engine, monkeypatch)
        engine.warm_up(rows=4, tokens=1000, progress=False, background=True)
        assert gate.reached.wait(WAIT_SECONDS)
        ways = 4
        assert gate.events == [1] * ways and str(engine.warming) == f"{ways} of {3 * ways} graphs"
        request = asked([700], SamplingParams(), 6)[0]
        ticket = engine.submit(request)
        gate.open()
        answer = ticket.result()
        assert len(answer.tokens) == 6
        wait_until_warm(engine)
        steps = gate.events.count("decode")
        batches = [2, 4] * ways
        assert gate.events == [*[1] * ways, 2, *["decode"] * steps, *batches[1:]] and steps >= 6
        assert gate.texts and not any(gate.texts)
        assert counted == [made := len(captures)]
        together = [engine.submit(one) for one in asked([700, 20, 300, 90], SamplingParams(temperature=1.0), 6)]
        assert all(len(one.result().tokens) == 6 for one in together)
        assert len(captures) == made
        check_engine(engine)
    assert same(answer, alone(llm, request))
    first, others = (record.getMessage() for record in caplog.records if " graphs after " in record.getMessage())
    piece = r"\w+ x {} [\d.]+ \+ [\d.]+"
    alone_first = 3  # rows whose keys the host and the device read may be captured later
    assert first.startswith(f"{alone_first} of {3 * ways} graphs") and others.startswith(
        f"{3 * ways} of {3 * ways} graphs"
    )
    assert len(re.findall(piece.format(1), first)) == first.count(" + ") - 1 == alone_first
    assert len(re.findall(piece.format("[24]"), others)) == 2 * ways


@pytest.mark.usefixtures("emulated_graphs")
def test_a_background_warm_up_waits_until_no_request_came_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is closed meanwhile does not finish it."""
    monkeypatch.setattr(warm_up, "IDLE_SECONDS", 3600.0)
    engine = Engine(llm_of(CONFIG.replace(drafts=False)))
    gate = Gate(engine, monkeypatch)
    gate.open()
    engine.warm_up(rows=8, progress=False, background=True)
    for number in range(3):
        engine.submit(Request((ids(60, number),), 2, stop_ids=frozenset())).result()
    assert set(gate.events) == {1, "decode"} and str(engine.warming) == "2 of 8 graphs"
    engine.close()
    assert engine.warming is None and set(gate.events) == {1, "decode"}


def test_an_error_in_the_background_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_up, "IDLE_SECONDS", 0.0)
    rehearse = Stepper.rehearse

    def fail(stepper: Stepper, cache: Any, logits: Any, rows: int, *args: Any, **__: Any) -> None:
        if rows > 1:
            raise MemoryError("no room")
        rehearse(stepper, cache, logits, rows, *args)

    monkeypatch.setattr(Stepper, "rehearse", fail)
    with Engine(llm_of()) as engine, caplog.at_level(logging.WARNING):
        engine.warm_up(rows=4, progress=False, background=True)
        wait_until_warm(engine)
        assert "warm-up ends after 2 of 6 graphs" in caplog.text and "no room" in caplog.text
        assert len(engine.submit(Request((ids(60, 1),), 3, stop_ids=frozenset())).result().tokens) == 3
        with pytest.raises(MemoryError):
            engine.warm_up(rows=4, progress=False)


@pytest.mark.usefixtures("emulated_graphs")
def test_a_background_warm_up_ends_if_requests_have_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its pieces and the steps of requests would replace each other's graphs."""
    monkeypatch.setattr(warm_up, "IDLE_SECONDS", 0.0)
    with Engine(llm_of(CONFIG.replace(drafts=False))) as engine:
        gate = Gate(engine, monkeypatch)
        engine.warm_up(rows=8, progress=False, background=True)
        assert gate.reached.wait(WAIT_SECONDS)
        ticket = engine.submit(Request((ids(60, 1),), 2, stop_ids=frozenset()))
        decode = Stepper.decode

        def decoded(stepper: Stepper, *args: Any) -> Any:
            found = decode(stepper, *args)
            stepper._runner._key = ("another",)
            return found

        monkeypatch.setattr(Stepper, "decode", decoded)
        gate.open()
        ticket.result()
        wait_until_warm(engine)
        assert [one for one in gate.events if one != "decode"] == [1, 1, 2]
