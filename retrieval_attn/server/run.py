"""Lifecycle of a server: loading the model, serving, and shutdown by signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import InputDataError, RetrievalAttentionError
from retrieval_attn.model.images import ImageReader
from retrieval_attn.model.loading import load, load_image_reader
from retrieval_attn.saving.save import template_digest
from retrieval_attn.server.access import AllowedHosts, Keys
from retrieval_attn.server.admission import Admission
from retrieval_attn.server.answer_parts import AnswerFormat
from retrieval_attn.server.app import make_app
from retrieval_attn.server.bodies import Bodies
from retrieval_attn.server.client import EngineClient, Item, LocalEngine
from retrieval_attn.server.connections import Connections, LimitedProtocol, max_connections
from retrieval_attn.server.contexts import Contexts
from retrieval_attn.server.engine_process import Child
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.metrics import Metrics
from retrieval_attn.server.page import page_response
from retrieval_attn.server.prompts import TEXT_ONLY, Prompts
from retrieval_attn.server.protocol import MAX_MESSAGES
from retrieval_attn.server.remote import RemoteEngine
from retrieval_attn.server.service import Service
from retrieval_attn.server.settings import EngineSpec, Facts, Settings
from retrieval_attn.server.stored_responses import StoredResponses
from retrieval_attn.server.streaming import FailureReply
from retrieval_attn.server.token_texts import TokenTexts
from retrieval_attn.store import ContextStore
from retrieval_attn.template import NO_TEMPLATE, PromptTemplate

log = logging.getLogger(__name__)

NO_PROCESSOR = "This server's model has no image processor (preprocessor_config.json); send messages without images."
PACE_TOKENS = 2048
MOST_FIXED = 16
"""Maximum ratio of a token's time in the measured prefill to its time in a long one."""
KEEP_ALIVE_SECONDS = 75
END_SECONDS = 10
"""Time after the drain for the engine's last step and the last responses."""


@dataclass(frozen=True)
class Started:
    """A running engine, its tokenizer and the facts of its model. images: their reader, or why they are refused."""

    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    facts: Facts
    images: ImageReader | str = TEXT_ONLY


async def started(spec: EngineSpec, child: Child | None = None) -> Started:
    """Load the model and start the engine. child: its process; None: this one. Raises as `EngineSpec.load`."""
    if child is None:
        llm, engine = await asyncio.to_thread(spec.load)
        facts = spec.facts(llm)
        images = await asyncio.to_thread(_image_reader, spec.model, llm.tokenizer, facts)
        return Started(LocalEngine(engine), llm.tokenizer, facts, images)
    remote = RemoteEngine(spec, child)
    facts, tokenizer = await asyncio.gather(remote.start(), asyncio.to_thread(load, AutoTokenizer, spec.model))
    images = await asyncio.to_thread(_image_reader, spec.model, tokenizer, facts)
    return Started(remote, tokenizer, facts, images)


def _image_reader(model: str, tokenizer: PreTrainedTokenizerBase, facts: Facts) -> ImageReader | str:
    """Return the reader of a model's images, or the sentence with which they are refused."""
    try:
        found = load_image_reader(model, tokenizer) if facts.has_vision else None
    except RetrievalAttentionError as error:
        log.warning("messages with images are refused: %s", error)
        return NO_PROCESSOR if isinstance(error, InputDataError) else str(error)  # its own sentence has paths
    return found or TEXT_ONLY


def service_for(started: Started, settings: Settings, keys: Keys, store: str | Path | None) -> Service:
    """Make the state of the routes. store: folder of saved contexts, the same as the engine's, and of responses, which
    without it are in memory.
    """
    tokenizer, client = started.tokenizer, started.client
    answer_format = AnswerFormat.of(tokenizer)
    if tokenizer.chat_template:
        log.info(answer_format.description)
    template = PromptTemplate.of(tokenizer)
    digest = template_digest(template.opening, template.middle, template.closing)
    if template.stops:
        log.warning("%s", NO_TEMPLATE)
    return Service(
        settings,
        keys,
        Prompts(
            tokenizer,
            started.facts.vocabulary,
            started.facts.positions,
            reason=started.facts.positions_reason,
            parse_special=settings.parse_special,
            images=started.images,
        ),  # fmt: skip
        TokenTexts(tokenizer),
        client,
        Contexts(ContextStore(store), client, digest),
        Admission(settings.waiting_requests, settings.waiting_tokens, settings.wait_seconds),
        Metrics(),
        int(time.time()),
        Bodies(settings.body_bytes, settings.held_body_bytes, max(MAX_MESSAGES, started.facts.positions)),
        AllowedHosts(settings.allowed_hosts, settings.cors) if settings.allowed_hosts or not keys else None,
        started.facts.sampling,
        answer_format,
        StoredResponses(settings.response_bytes, None if store is None else Path(store) / "responses"),
    )


def http_config(app: ASGIApp, settings: Settings, metrics: Callable[[], Metrics | None]) -> uvicorn.Config:
    """Configure uvicorn with the limits of `LimitedProtocol`. metrics: count connections refused before the app."""

    def refused(status: int, reason: str) -> None:
        log.info("connection refused: %s", reason, extra={"fields": {"status": status}})
        if counts := metrics():
            counts.http("any", "none", status)

    limits = Connections(settings.connections, max_connections(), refused)
    return uvicorn.Config(
        app,
        http=cast(Any, functools.partial(LimitedProtocol, limits=limits)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.drain_seconds) + END_SECONDS,
    )


async def measure_pace(client: EngineClient, admission: Admission, vocabulary: int, tokens: int) -> None:
    """Time prefills of random tokens, which requests overtake: by them waits are estimated until some were served.

    The difference of two prefills gives the time of a token of a long prompt: each layer has fixed costs.
    """
    admission.expect(0.0, 0.0)
    few = max(1, tokens // 8)
    try:
        short, long = [await _prefill_seconds(client, vocabulary, count) for count in (few, tokens)]
    except Exception as error:  # of whatever kind: waits are estimated without it
        log.warning("the time of a prefill was not measured: %s", error)
        return
    each = long / tokens
    admission.expect(each, max(each / MOST_FIXED, (long - short) / max(1, tokens - few)))


async def _prefill_seconds(client: EngineClient, vocabulary: int, tokens: int) -> float:
    """Return the seconds of a prefill of random tokens. Raises the error of the request."""
    ids = tuple(random.Random(tokens).choices(range(vocabulary), k=tokens))
    ended: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()

    def put(item: Item) -> None:
        if isinstance(item, Finished) and not ended.done():
            ended.set_result(item)

    began = time.perf_counter()
    submitted = await client.submit(Request((ids,), 1, namespace="pace", priority="batch"), put)
    try:
        error = (await ended).error
    finally:
        submitted.cancel()
    if error is not None:
        raise error
    return time.perf_counter() - began


class _Server(uvicorn.Server):
    """A uvicorn server that answers 503 until `open` is called. `serve` handles its signals.

    Requests that still run at the end of the drain end with the engine.
    """

    def __init__(self, settings: Settings) -> None:
        self._app: ASGIApp | None = None
        self._service: Service | None = None
        super().__init__(
            http_config(self._answer, settings, lambda: None if self._service is None else self._service.metrics)
        )
        self._drain_seconds = settings.drain_seconds
        self._closing: asyncio.Task[None] | None = None

    def open(self, service: Service) -> None:
        """Start to answer requests."""
        self._app, self._service = make_app(service), service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `serve` handles signals."""
        yield

    def end(self) -> None:
        """Handle a signal: the first begins the drain, the second ends it, the third ends at once."""
        if not self.should_exit:
            self.should_exit = True
            log.info("draining: running requests finish, new requests are refused")
            asyncio.get_running_loop().call_later(self._drain_seconds, self._close)
        elif self._closing is None:
            self._close()
        else:
            self.force_exit = True

    async def closed(self) -> None:
        """Shut the engine down and wait for its end."""
        self._close()
        if self._closing is not None:
            await self._closing
        if self._service is not None:
            self._service.responses.close()

    def _close(self) -> None:
        if self._closing is None and self._service is not None:
            self._closing = asyncio.ensure_future(self._service.client.close(drain=False))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD"):
            await page_response()(scope, receive, send)
        elif scope["type"] == "http":
            failure = ApiError(503, "The model is loading; send this again later.", code="model_loading", retry_after=5)
            await FailureReply(failure)(scope, receive, send)


async def serve(
    spec: EngineSpec,
    sock: socket.socket,
    settings: Settings,
    keys: Keys,
    child: Child | None = None,
    *,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Answer until SIGTERM or SIGINT, then finish running requests for at most `drain_seconds` and end the engine.

    All requests but those of the page get 503 while the model loads. Requests that still run after the drain get an
    error; a second signal ends the drain. sock: a listening socket. child: see `started`. on_ready: called when the
    model is loaded. Raises as `EngineSpec.load`.
    """
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    measuring: asyncio.Task[None] | None = None
    try:
        service = service_for(found := await started(spec, child), settings, keys, spec.store)
        server.open(service)
        if spec.warm_tokens != 0:
            tokens = max(1, min(PACE_TOKENS, spec.warm_tokens or PACE_TOKENS, found.facts.positions - 1))
            measuring = asyncio.create_task(
                measure_pace(found.client, service.admission, found.facts.vocabulary, tokens)
            )
        gc.freeze()  # modules and model live to the end; garbage collection skips them
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end)
        log.info("listening on %s", url, extra={"fields": {"url": url, "model": settings.name}})
        on_ready()
        await serving
    finally:
        began = time.perf_counter()
        if measuring is not None:
            measuring.cancel()
        server.should_exit = True
        await serving
        await server.closed()
        log.info("shutdown complete", extra={"fields": {"seconds": round(time.perf_counter() - began, 3)}})
