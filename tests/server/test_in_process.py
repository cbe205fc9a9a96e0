"""The app over an engine that a test can look into: clients that go, that are slow, and an engine that dies."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from retrieval_attn.batch import chooser
from retrieval_attn.batch.engine import Engine
from retrieval_attn.eval.bench.session.subject import number_tokenizer
from retrieval_attn.server.address import Address, listening
from retrieval_attn.server.app import make_app
from retrieval_attn.server.client import LocalEngine
from retrieval_attn.server.keys import Keys
from retrieval_attn.server.run import Started, http_config, service_for
from retrieval_attn.server.service import Service
from retrieval_attn.server.settings import Settings
from retrieval_attn.server.spec import Facts
from tests.tiny_models import tiny_model
from tools.engine_schedules import CONFIG

TRIES = 120


class Inside:
    """A server in a thread of this process."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        """limits: of `Settings`."""
        model = tiny_model("llama")
        tokenizer = number_tokenizer(model.get_input_embeddings().weight.shape[0])
        llm: Any = SimpleNamespace(model=model, tokenizer=tokenizer, config=CONFIG)
        self.engine = Engine(llm, store=folder)
        self.service: Service | None = None
        self._tokenizer, self._folder = tokenizer, folder
        self._settings = Settings(name="tiny", **limits)
        self._sock = listening(Address("127.0.0.1", 0))
        self.address: tuple[str, int] = self._sock.getsockname()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    async def _serve(self) -> None:
        facts = Facts(97, 4096)
        started = Started(LocalEngine(self.engine), self._tokenizer, facts)
        self.service = service_for(started, self._settings, Keys(), self._folder)
        config = http_config(make_app(self.service), self._settings, lambda: None)
        config.timeout_graceful_shutdown = 5
        self._server = uvicorn.Server(config)
        await self._server.serve(sockets=[self._sock])

    def client(self) -> httpx.Client:
        """Of its address."""
        return httpx.Client(base_url=f"http://{self.address[0]}:{self.address[1]}", timeout=60)

    def end(self) -> None:
        """Stop it, and its engine."""
        while self._server is None or not self._server.started:
            time.sleep(0.01)
        self._server.should_exit = True
        self._thread.join()
        self.engine.close(drain=False)
        self._sock.close()

    def wait_for_nobody(self) -> None:
        """Until no request is there."""
        end = time.monotonic() + 30
        while True:
            stats = self.engine.stats
            assert self.service is not None
            if not stats["rows"] and not stats["waiting"] and not self.service.admission.requests:
                return
            assert time.monotonic() < end, (stats, self.service.admission.requests)
            time.sleep(0.02)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    found = Inside(tmp_path)
    yield found
    found.end()


def body_of(tokens: int, seed: int = 0, **options: Any) -> bytes:
    prompt = random.Random(seed).choices(range(3, 97), k=200)
    given = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 1, "seed": seed, **options}
    return json.dumps(given).encode()


def sent(address: tuple[str, int], body: bytes) -> socket.socket:
    """A connection on which a request was sent."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    sock = socket.create_connection(address)
    sock.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return sock


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
    inside.engine.check()
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
    inside.engine.check()


def test_an_engine_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams end with an error event, and /health says 503 from then on."""
    inside = Inside(tmp_path)
    try:
        with inside.client() as http:
            headers = {"content-type": "application/json"}
            assert http.post("/v1/completions", content=body_of(5), headers=headers).is_success
            monkeypatch.setattr(chooser, "choose", lambda *given: 1 // 0)
            lines = http.post("/v1/completions", content=body_of(5, stream=True), headers=headers).text.split("\n\n")
            assert "error" in json.loads(lines[-3].removeprefix("data: ")) and lines[-2] == "data: [DONE]"
            end = time.monotonic() + 10
            while http.get("/health").status_code != 503:
                assert time.monotonic() < end
            reply = http.post("/v1/completions", content=body_of(5), headers=headers)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_lost"
            assert "division" not in lines[-3], "what a client is told has nothing of the inside"
    finally:
        inside.end()
