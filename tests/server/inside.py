"""A server over an engine that a test can look into, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from retrieval_attn.engine.engine import Engine
from retrieval_attn.server.access import Address, Keys, listening
from retrieval_attn.server.app import make_app
from retrieval_attn.server.client import LocalEngine
from retrieval_attn.server.run import Started, http_config, service_for
from retrieval_attn.server.service import Service
from retrieval_attn.server.settings import Facts, Settings
from retrieval_attn.store import OS_DISK, ContextStore, Disk
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.fuzz.engine_schedules import CONFIG
from tests.tiny_models import tiny_model
from tests.waiting import WAIT_SECONDS, comes_true


class Inside:
    """A server in a thread of this process."""

    def __init__(
        self,
        folder: Path,
        keys: Keys | None = None,
        *,
        send_bytes: int = 0,
        disk: Disk = OS_DISK,
        loaded: tuple[Any, Any] | None = None,
        **limits: Any,
    ) -> None:
        """loaded: model and tokenizer; None: a tiny model whose tokens are numbers. send_bytes: of a connection's
        buffer in the kernel; 0: the system's. disk: of the engine's store. limits: of `Settings`.
        """
        self._keys = keys or Keys(())
        self.model: Any = tiny_model("llama") if loaded is None else loaded[0]
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        tokenizer = number_tokenizer(vocabulary) if loaded is None else loaded[1]
        llm: Any = SimpleNamespace(model=self.model, tokenizer=tokenizer, config=CONFIG)
        self.engine = Engine(llm, store=ContextStore(folder, disk=disk))
        self.service: Service | None = None
        self.app: FastAPI | None = None
        self._tokenizer, self._folder = tokenizer, folder
        self._settings = Settings(name="tiny", **limits)
        self._sock = listening(Address("127.0.0.1", 0))
        if send_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self.address: tuple[str, int] = self._sock.getsockname()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()

    async def _serve(self) -> None:
        facts = Facts(self.model.get_input_embeddings().weight.shape[0], 4096)
        started = Started(LocalEngine(self.engine), self._tokenizer, facts)
        self.service = service_for(started, self._settings, self._keys, self._folder)
        self.app = make_app(self.service)
        config = http_config(self.app, self._settings, lambda: None if self.service is None else self.service.metrics)
        config.timeout_graceful_shutdown = 5
        self._server = uvicorn.Server(config)
        await self._server.serve(sockets=[self._sock])

    def client(self) -> httpx.Client:
        """Of its address."""
        return httpx.Client(base_url=f"http://{self.address[0]}:{self.address[1]}", timeout=60)

    def wait_until_it_serves(self) -> None:
        """Until it answers."""
        while self._server is None or not self._server.started:
            time.sleep(0.01)

    def end(self) -> None:
        """Stop it, and its engine."""
        self.wait_until_it_serves()
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()
        self.engine.close(drain=False)
        self._sock.close()

    def wait_for(self, holds: Callable[[list[Any]], bool], seconds: float = WAIT_SECONDS) -> bool:
        """Whether something comes to hold for the protocols of all open connections."""
        assert self._server is not None
        connections = self._server.server_state.connections
        return comes_true(lambda: holds(list(connections)), seconds=seconds, pause=0.02)

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


def body_of(tokens: int, seed: int = 0, **options: Any) -> bytes:
    prompt = random.Random(seed).choices(range(3, 97), k=200)
    given = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 1, "seed": seed, **options}
    return json.dumps(given).encode()


def sent(address: tuple[str, int], body: bytes, receive_bytes: int = 0) -> socket.socket:
    """A connection on which a request was sent. receive_bytes: of its buffer; 0: the system's."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect(address)
    sock.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return sock
