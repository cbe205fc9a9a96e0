"""Engine client: submits requests to an engine of this process, and saves contexts through it."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from retrieval_attn.engine.background_saves import SAVE_SECONDS, ContextState
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.engine.warm_up import WarmUpProgress
from retrieval_attn.errors import AdmissionError, ContextLengthError, InputDataError, RetrievalAttentionError
from retrieval_attn.server.failure import EngineLostError, ended_error
from retrieval_attn.server.ipc import ids_from, ids_of

HELD_TOKENS = 64
"""Tokens generated until the save begins: a running request keeps the text in the prefix cache. Cancelled then."""


def keep(
    engine: Engine, name: str, ids: tuple[int, ...], context: str | None = None, namespace: str | None = ""
) -> int:
    """Prefill a text and begin to save it; return the tokens of the whole context.

    Requests can name it then; `Engine.unsaved` has its state until it is durable. context: saved context that the text
    continues; then only the text is written. Raises as `Engine.submit` and `Engine.save`, and errors of the prefill.
    """
    request = Request(
        (ids, ids[-1:]), HELD_TOKENS, stop_ids=frozenset(), namespace=namespace, owner=namespace or "", context=context
    )
    try:
        ticket = engine.submit(request)
        try:
            for _ in ticket:
                break  # prefilled, and in the prefix cache as long as the request runs
            try:
                return engine.save(name, ids, namespace=namespace, context=context, wait=False).tokens
            except InputDataError as error:  # evicted by other requests
                raise AdmissionError(f"The text was prefilled, but evicted before it was saved: {error}") from error
        finally:
            ticket.cancel()
    except (ContextLengthError, AdmissionError) as error:
        if error.limit is not None and error.tokens is not None:  # without the tokens that are added here
            error.limit, error.tokens = error.limit - HELD_TOKENS - 1, error.tokens - HELD_TOKENS - 1
        raise


THREADS, KEEPERS, OPENERS = 4, 4, 4
"""Threads that ask an engine; that prefill and save contexts, separate from those of requests; and that submit requests
with saved contexts, which may block on the disk, or with grammars to compile.
"""

Item = Event | Finished
Put = Callable[[Item], None]
"""Receives the events of a request and then its end, in the event loop."""
Result = TypeVar("Result")


class EngineThreads:
    """Threads in which an engine does the commands of `EngineClient`."""

    def __init__(self, engine: Engine) -> None:
        """engine: used by the threads."""
        self._engine = engine
        self._threads = ThreadPoolExecutor(THREADS, "retrieval_attn-worker")
        self._keepers = ThreadPoolExecutor(KEEPERS, "retrieval_attn-keeper")
        self._openers = ThreadPoolExecutor(OPENERS, "retrieval_attn-opener")

    def submit(self, work: Callable[[], Result], *, opens: bool) -> Future[Result]:
        """Submit a request by `work`. opens: it names a saved context, or has a grammar."""
        return (self._openers if opens else self._threads).submit(work)

    def call(self, do: str, **arguments: Any) -> Future[Any]:
        """Call a command, see `EngineClient._call`."""
        blocking = {"keep": self._keepers, "cancel_save": self._openers}  # the second waits for a write to end
        return blocking.get(do, self._threads).submit(self._called, do, arguments)

    def _called(self, do: str, arguments: dict[str, Any]) -> Any:
        if do == "keep":
            return keep(self._engine, **{**arguments, "ids": ids_from(arguments["ids"])})
        if do == "cancel_save":
            return self._engine.cancel_save(**arguments)
        if do == "status":
            return self._engine.status(**arguments)
        if do == "unsaved":
            return self._engine.unsaved
        stats = self._engine.stats
        return {**stats, "shared": stats["shared"]._asdict()}


class Submitted(NamedTuple):
    """id: the engine's request id, for logs. cancel: cancels the request; does nothing after its end."""

    id: str
    cancel: Callable[[], None]


class EngineClient(ABC):
    """An engine, in this process or in another. Used in one event loop."""

    _closing = False

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """The reason why the engine cannot answer now; None if it can."""

    @property
    @abstractmethod
    def warming(self) -> WarmUpProgress | None:
        """Progress of the graphs that are captured while the engine is idle; None if all are."""

    @abstractmethod
    async def submit(self, request: Request, put: Put) -> Submitted:
        """Submit a request. Raises as `Engine.submit`, and EngineLostError."""

    @abstractmethod
    async def close(self, *, drain: bool) -> None:
        """Shut the engine down. drain: finish all requests first."""

    @abstractmethod
    async def _call(self, do: str, **arguments: Any) -> Any:
        """Return the plain values of a command: "keep", "unsaved", "cancel_save", "stats" or "status"."""

    async def keep(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str | None) -> int:
        """Prefill a text, from the start or after a saved context, and save it under a name. Return and raise as
        `keep`.
        """
        try:
            return int(await self._call("keep", name=name, ids=ids_of(ids), context=context, namespace=namespace))
        except RetrievalAttentionError as error:
            if self._closing:
                raise ended_error() from error
            raise

    async def unsaved(self) -> list[ContextState]:
        """Return the states of contexts that are not durable. Raises EngineLostError."""
        return [ContextState(*state) for state in await self._call("unsaved")]

    async def cancel_save(self, name: str) -> bool:
        """Cancel the write of a context, as `Engine.cancel_save`. Raises EngineLostError."""
        return bool(await self._call("cancel_save", name=name))

    async def stats(self) -> dict[str, Any]:
        """Return `Engine.stats` as plain values. Raises EngineLostError."""
        return dict(await self._call("stats"))

    async def status(self, namespace: str | None) -> dict[str, Any]:
        """Return `Engine.status`. Raises EngineLostError."""
        return dict(await self._call("status", namespace=namespace))


class Inbox:
    """Pass items of other threads to the event loop, with one wake-up for all queued items."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the one that runs."""
        self._loop = loop
        self._items: deque[tuple[Put, Item]] = deque()
        self._woken = False

    def add(self, put: Put, item: Item) -> None:
        """Queue an item, from any thread. Does nothing after the loop is closed."""
        self._items.append((put, item))
        if not self._woken:
            self._woken = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # first: later items wake the loop again, or are handed out below
        while self._items:
            put, item = self._items.popleft()
            put(item)


class LocalEngine(EngineClient):
    """An `EngineClient` for an engine in this process: without a GPU, and in tests."""

    def __init__(self, engine: Engine) -> None:
        """Call it in the event loop that uses it. engine: closed by `close`."""
        self._engine = engine
        self._inbox = Inbox(asyncio.get_running_loop())
        self._threads = EngineThreads(engine)

    @property
    def lost(self) -> str | None:
        died = self._engine.died
        return None if died is None else f"it ended with {type(died).__name__}, see the server's log"

    @property
    def warming(self) -> WarmUpProgress | None:
        return self._engine.warming

    async def submit(self, request: Request, put: Put) -> Submitted:
        opens = request.context is not None or request.grammar is not None
        work = functools.partial(self._submit, request, put)
        submitting = asyncio.wrap_future(self._threads.submit(work, opens=opens))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:  # its thread cannot be stopped: the request is cancelled once it is submitted
            submitting.add_done_callback(_cancel_submitted)
            raise

    def _submit(self, request: Request, put: Put) -> Submitted:
        if self._engine.died is not None:
            raise EngineLostError(f"The engine has ended ({self.lost}); start the server again.")
        ticket = self._engine.submit(request)
        ticket.listen(lambda item: self._inbox.add(put, item))
        return Submitted(ticket.id, ticket.cancel)

    async def _call(self, do: str, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self._threads.call(do, **arguments))

    async def close(self, *, drain: bool) -> None:
        self._closing = True
        await asyncio.to_thread(self._engine.close, drain=drain, save_seconds=SAVE_SECONDS)


def _cancel_submitted(submitting: asyncio.Future[Submitted]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
