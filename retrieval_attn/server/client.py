"""Engine client: submits requests to an engine of this process, and saves contexts through it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.errors import AdmissionError, InputDataError
from retrieval_attn.server.failure import EngineLostError, ended_error

__all__ = ["EngineClient", "Item", "KEEPERS", "LocalEngine", "OPENERS", "Put", "Submitted", "WrittenContext", "keep"]

HELD_TOKENS = 64
"""While so many are generated, the tree cannot give the text up; they are cancelled when it is saved."""


class WrittenContext(NamedTuple):
    """A saved context as it was written: its digest, its tokens, and the bytes that this save wrote."""

    digest: str
    tokens: int
    nbytes: int


def keep(
    engine: Engine, name: str, ids: tuple[int, ...], context: str | None = None, namespace: str | None = ""
) -> WrittenContext:
    """Wait until a text was read and saved. context: a saved one that it continues; then only the text is written.

    Raises as `Engine.submit` and `Engine.save`, and what goes wrong with the reading.
    """
    request = Request(
        (ids, ids[-1:]), HELD_TOKENS, stop_ids=frozenset(), namespace=namespace, owner=namespace or "", context=context
    )
    ticket = engine.submit(request)
    try:
        for _ in ticket:
            break  # it is read, and its beginning is in the tree while the request is there
        try:
            saved = engine.save(name, ids, namespace=namespace, context=context, wait=False).wait()
        except InputDataError as error:  # it was given up: texts of other requests took its room
            raise AdmissionError(f"The text was read, and could not be kept to save it: {error}") from error
        return WrittenContext(saved.digest, saved.tokens, saved.nbytes)
    finally:
        ticket.cancel()


KEEPERS = 4
"""Threads that wait for texts that are read to be saved: threads of their own, so that no request waits for them."""

Item = Event | Finished
Put = Callable[[Item], None]
"""Takes what becomes of a request, in the event loop: events, then its end."""
OPENERS = 4
"""Threads that submit requests about saved contexts, which may wait for a disk: others never wait behind them."""


class Submitted(NamedTuple):
    """id: the engine's, for logs. cancel: nobody wants the answer any more; nothing happens if it has ended."""

    id: str
    cancel: Callable[[], None]


class EngineClient(Protocol):
    """Used in one event loop."""

    @property
    def lost(self) -> str | None:
        """Why the engine cannot answer now; None: it can."""

    async def submit(self, request: Request, put: Put) -> Submitted:
        """Take a request in. Raises as `Engine.submit`, and EngineLostError."""

    async def keep(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str | None) -> WrittenContext:
        """Read a text, behind a saved context or from the start, and save it under a name. Raises as `Engine.submit`
        and `Engine.save`, and what goes wrong with the reading.
        """

    async def stats(self) -> dict[str, Any]:
        """Of the engine, as plain values; see `Engine.stats`. Raises EngineLostError."""

    async def close(self, *, drain: bool) -> None:
        """End it: once all are answered, or at once."""


class Inbox:
    """Items from other threads, for functions in the event loop: one wake-up for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the one that runs."""
        self._loop = loop
        self._items: deque[tuple[Put, Item]] = deque()
        self._woken = False

    def add(self, put: Put, item: Item) -> None:
        """Any thread. Does nothing once the loop is closed: nobody is there any more."""
        self._items.append((put, item))
        if not self._woken:
            self._woken = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False  # first: what is added from here on wakes again, or is taken below
        while self._items:
            put, item = self._items.popleft()
            put(item)


class LocalEngine:
    """An `EngineClient` of an engine in this process: for tests, and for machines without a GPU."""

    def __init__(self, engine: Engine) -> None:
        """In the event loop that uses it. engine: closed with this."""
        self._engine = engine
        self._inbox = Inbox(asyncio.get_running_loop())
        self._keepers = ThreadPoolExecutor(KEEPERS, "retrieval_attn-keeper")
        self._openers = ThreadPoolExecutor(OPENERS, "retrieval_attn-opener")
        self._closing = False

    @property
    def lost(self) -> str | None:
        """See `EngineClient`."""
        died = self._engine.died
        return None if died is None else f"it ended with {type(died).__name__}; the server's log says more"

    async def submit(self, request: Request, put: Put) -> Submitted:
        """See `EngineClient`."""
        pool = None if request.context is None else self._openers
        submitting = asyncio.get_running_loop().run_in_executor(pool, self._submit, request, put)
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

    async def keep(self, name: str, ids: tuple[int, ...], context: str | None, namespace: str | None) -> WrittenContext:
        """See `EngineClient`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._keepers, keep, self._engine, name, ids, context, namespace)
        except Exception as error:
            if self._closing:
                raise ended_error() from error
            raise

    async def stats(self) -> dict[str, Any]:
        """See `EngineClient`."""
        return plain_stats(self._engine)

    async def close(self, *, drain: bool) -> None:
        """See `EngineClient`."""
        self._closing = True
        await asyncio.to_thread(self._engine.close, drain=drain)
        self._keepers.shutdown(wait=False)
        self._openers.shutdown(wait=False)


def _cancel_submitted(submitting: asyncio.Future[Submitted]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def plain_stats(engine: Engine) -> dict[str, Any]:
    """Numbers alone."""
    stats = engine.stats
    return {**stats, "shared": stats["shared"]._asdict()}
