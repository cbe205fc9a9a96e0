"""Run: a server from its start to its end: model, engine, socket, and the signals that end it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from retrieval_attn.engine.saving import template_digest
from retrieval_attn.model.loading import load
from retrieval_attn.server.admission import Admission
from retrieval_attn.server.app import make_app
from retrieval_attn.server.child import Child
from retrieval_attn.server.client import EngineClient, LocalEngine
from retrieval_attn.server.contexts import Contexts
from retrieval_attn.server.form import TokenTexts
from retrieval_attn.server.keys import Keys
from retrieval_attn.server.metrics import Metrics
from retrieval_attn.server.prompts import Prompts
from retrieval_attn.server.remote import RemoteEngine
from retrieval_attn.server.service import Service
from retrieval_attn.server.settings import Settings
from retrieval_attn.server.spec import EngineSpec, Facts
from retrieval_attn.store import ContextStore
from retrieval_attn.template import PromptTemplate

__all__ = ["Started", "serve", "service_for", "started"]

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
END_SECONDS = 10
"""From the end of the drain: for the engine's last step, and for clients to be told."""


@dataclass(frozen=True)
class Started:
    """An engine that answers, and what is known of its model."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    facts: Facts


async def started(spec: EngineSpec, child: Child | None = None) -> Started:
    """Load the model and start its engine. child: a process for it; None: in this one. Raises as `EngineSpec.load`."""
    if child is None:
        llm, engine = spec.load()
        return Started(LocalEngine(engine), llm.tokenizer, spec.facts(llm))
    remote = RemoteEngine(spec, child)
    return Started(remote, tokenizer=load(AutoTokenizer, spec.model), facts=await remote.start())


def service_for(started: Started, settings: Settings, keys: Keys, store: str | Path | None) -> Service:
    """What routes need. store: folder of saved contexts, the engine's."""
    tokenizer, client = started.tokenizer, started.client
    template = PromptTemplate.of(tokenizer)
    digest = template_digest(template.opening, template.middle, template.closing)
    return Service(
        settings,
        keys,
        Prompts(tokenizer, started.facts.vocabulary, started.facts.positions),
        TokenTexts(tokenizer),
        client,
        Contexts(ContextStore(store), client, digest),
        Admission(settings.waiting_requests, settings.waiting_tokens, settings.wait_seconds),
        Metrics(),
        int(time.time()),
    )


class _Server(uvicorn.Server):
    """Signals are `serve`'s. What is under way when the drain is over is told so, by the end of its engine."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_seconds: float) -> None:
        """client: ended with the drain."""
        super().__init__(config)
        self._client, self._drain_seconds = client, drain_seconds
        self._closing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing."""
        yield

    def end(self) -> None:
        """A signal came: the first begins the drain, the second ends it, the third waits for nobody."""
        if not self.should_exit:
            self.should_exit = True
            log.info("draining: answers under way are finished, new requests are refused")
            asyncio.get_running_loop().call_later(self._drain_seconds, self._close)
        elif self._closing is None:
            self._close()
        else:
            self.force_exit = True

    def _close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._client.close(drain=False))

    async def closed(self) -> None:
        """Wait for the engine's end, or make one."""
        self._close()
        assert self._closing is not None
        await self._closing


async def serve(
    spec: EngineSpec, sock: socket.socket, settings: Settings, keys: Keys, child: Child | None = None
) -> None:
    """Answer until SIGTERM or SIGINT; then answer what is under way, for at most `drain_seconds`, and end the engine.

    What is not answered then ends with an error that says so; a second signal does not wait that long. sock: listens;
    child: see `started`. Raises what loading the model raises.
    """
    found = await started(spec, child)
    client = found.client
    app: FastAPI = make_app(service_for(found, settings, keys, spec.store))
    gc.freeze()  # modules and model live to the end: no collection visits them while answers wait
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds) + END_SECONDS,
    )
    server = _Server(config, client, settings.drain_seconds)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.end)
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("listening on %s", url, extra={"fields": {"url": url, "model": settings.name}})
    try:
        await server.serve(sockets=[sock])
    finally:
        began = time.perf_counter()
        await server.closed()
        log.info("ended", extra={"fields": {"seconds": round(time.perf_counter() - began, 3)}})
