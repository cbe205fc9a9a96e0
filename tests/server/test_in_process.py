"""The app over an engine that a test can look into: clients that go, that are slow, and an engine that dies."""

from __future__ import annotations

import json
import math
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval_attn.engine import warm_up
from retrieval_attn.sampling.sampler import Sampler
from tests.engine.audit import check_engine
from tests.engine.test_warm_up import Gate, wait_until_warm
from tests.server.inside import Inside, body_of, sent
from tests.waiting import wait_until

TRIES = 120


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    found = Inside(tmp_path, wait_seconds=math.inf)  # a slow machine refuses none of many requests
    yield found
    found.end()


def test_clients_that_go_leave_nothing_behind(inside: Inside) -> None:
    """At random times: while they wait, while their prompt is read, in streams; some are reset. The engine adds up."""
    draw = random.Random(5)
    with inside.client() as http:
        while http.get("/health").status_code != 200:
            pass
    for number in range(TRIES):
        options = {"stream": draw.random() < 0.5, "n": draw.choice((1, 1, 3))}
        with sent(inside.address, body_of(3000, number, **options)) as sock:
            if draw.random() < 0.3:
                reset = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # linger on, no time: the connection is cut, not ended
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            time.sleep(draw.choice((0, 0.001, 0.01, 0.03)))
    inside.wait_for_nobody()
    check_engine(inside.engine)
    with inside.client() as http:
        text = http.get("/metrics").text
        assert f"retrieval_attn:request_disconnected_total {TRIES}.0" in text, text
        assert http.post("/v1/completions", content=body_of(5), headers={"content-type": "application/json"}).is_success


def test_a_client_that_does_not_read_holds_nobody_up(inside: Inside) -> None:
    with sent(inside.address, body_of(3500, 1, stream=True, logprobs=20)), inside.client() as http:
        headers = {"content-type": "application/json"}
        found = [http.post("/v1/completions", content=body_of(20, one), headers=headers) for one in range(5)]
        assert all(one.is_success for one in found)
    inside.wait_for_nobody()
    check_engine(inside.engine)


def test_a_warm_up_in_the_background_is_shown(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health and /status say how far it is, while requests are answered; afterwards /health says no more of it."""
    monkeypatch.setattr(warm_up, "IDLE_SECONDS", 0.0)
    gate = Gate(inside.engine, monkeypatch)
    inside.wait_until_it_serves()
    with inside.client() as http:
        inside.engine.warm_up(rows=4, progress=False, background=True)
        assert gate.reached.wait(60)
        reply = http.get("/health")
        assert (reply.status_code, reply.json()) == (200, {"status": "ok", "warming": "2 of 6 graphs"})
        assert http.get("/status").json()["warming"] == "2 of 6 graphs"
        gate.open()
        headers = {"content-type": "application/json"}
        assert http.post("/v1/completions", content=body_of(5), headers=headers).is_success
        wait_until_warm(inside.engine)
        assert http.get("/health").json() == {"status": "ok"} and http.get("/status").json()["warming"] is None


def test_an_engine_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams end with an error event, and /health says 503 from then on."""
    inside = Inside(tmp_path)
    try:
        with inside.client() as http:
            headers = {"content-type": "application/json"}
            assert http.post("/v1/completions", content=body_of(5), headers=headers).is_success
            monkeypatch.setattr(Sampler, "__call__", lambda *given, **named: 1 // 0)
            lines = http.post("/v1/completions", content=body_of(5, stream=True), headers=headers).text.split("\n\n")
            assert "error" in json.loads(lines[-3].removeprefix("data: ")) and lines[-2] == "data: [DONE]"
            wait_until(lambda: bool(http.get("/health").status_code == 503))
            reply = http.post("/v1/completions", content=body_of(5), headers=headers)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_lost"
            assert "division" not in lines[-3], "what a client is told has nothing of the inside"
    finally:
        inside.end()
