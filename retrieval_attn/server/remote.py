"""RemoteEngine: an engine in a child process, which is restarted if it ends.

The engine then has its own interpreter lock, and a fault in a kernel ends its requests and not the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from typing import Any

from retrieval_attn.engine.background_saves import SAVE_SECONDS
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.engine.warm_up import WarmUpProgress
from retrieval_attn.server.client import EngineClient, Put, Submitted
from retrieval_attn.server.engine_process import Child
from retrieval_attn.server.failure import EngineLostError
from retrieval_attn.server.ipc import Plain, async_frame, error_from, frame_of, item_from, request_of
from retrieval_attn.server.settings import EngineSpec, Facts

log = logging.getLogger(__name__)

END_SECONDS = 20.0
PING, PING_SECONDS = 0, 1.0
"""Number of all pings, and the seconds between two."""
MAX_SILENT_PINGS = 60
"""Successive pings without a frame from the process, after which it counts as hung and is killed. They are counted and
not timed: a server that was suspended together with its engine does not kill it when both resume.
"""
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 60.0
"""Delay before the process is started again after a failed start; doubled each time."""
READ_BYTES = 1 << 24


class _EngineChild:
    """One process with its open requests. Used in one event loop."""

    def __init__(
        self, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.child, self._reader, self._writer = child, reader, writer
        self._numbers = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._puts: dict[int, Put] = {}
        self._silent_pings = 0
        self.is_closing = False
        self.warming: WarmUpProgress | None = None

    @classmethod
    async def start(cls, begun: Child) -> tuple[_EngineChild, Facts]:
        """Wait until a process has loaded its model. Raises its exception, or EngineLostError."""
        child = begun.process
        reader, writer = await asyncio.open_connection(sock=begun.sock, limit=READ_BYTES)
        process = cls(child, reader, writer)
        try:
            first = await async_frame(reader)
            if first is None:
                raise EngineLostError(f"The engine process ended with status {child.wait()} while loading.")
            if "error" in first:
                raise error_from(first["error"])
        except BaseException:
            await process.end()
            raise
        log.info("engine process is ready", extra={"fields": {"engine_pid": child.pid}})
        process.note_warming(first["warming"])
        return process, Facts(*first["ready"])

    async def read(self) -> None:
        """Dispatch frames until the process has ended. Kill a process that hangs."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._hand_out()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """Kill the process if it answers no ping; not while it shuts down."""
        while self._silent_pings < MAX_SILENT_PINGS:
            await asyncio.sleep(PING_SECONDS)
            if self.is_closing:
                return
            self._silent_pings += 1
            self.tell({"do": "ping", "id": PING})
        log.error(
            "engine process answered none of %d pings; killing it", MAX_SILENT_PINGS,
            extra={"fields": {"engine_pid": self.child.pid}},
        )  # fmt: skip
        self.child.kill()

    async def _hand_out(self) -> None:
        while (frame := await async_frame(self._reader)) is not None:
            self._silent_pings = 0
            if frame.get("id") == PING:
                self.note_warming(frame["ok"])
            for number, *plain in frame.get("items", ()):
                item = item_from(plain)
                put = self._puts.pop(number, None) if isinstance(item, Finished) else self._puts.get(number)
                if put is not None:
                    put(item)
            if "id" in frame and (reply := self._replies.pop(frame["id"], None)) and not reply.done():
                if "error" in frame:
                    self._puts.pop(frame["id"], None)
                    reply.set_exception(error_from(frame["error"]))
                else:
                    reply.set_result(frame["ok"])

    def note_warming(self, plain: list[int] | None) -> None:
        """Note the progress of a warm-up as a frame has it."""
        self.warming = None if plain is None else WarmUpProgress(*plain)

    def lose(self, error: EngineLostError) -> None:
        """Fail all open requests."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        puts, self._puts = list(self._puts.values()), {}
        self._replies.clear()
        for put in puts:
            put(Finished("error", "", (), 0, 0, (0.0, 0.0), error))

    async def ask(self, frame: Plain, put: Put | None = None) -> tuple[int, Any]:
        """Send a command. Return its number and the reply. put: receives the events of a request."""
        self._numbers += 1
        number = self._numbers
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        if put is not None:
            self._puts[number] = put
        try:
            self.tell({**frame, "id": number})
            return number, await reply
        except asyncio.CancelledError:  # the caller is gone
            self._puts.pop(number, None)
            self.tell({"do": "cancel", "id": number})
            raise

    def tell(self, frame: Plain) -> None:
        """Send a command without a reply; does nothing after the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame_of(frame))

    async def end(self) -> int:
        """Wait for the process to end; kill it after END_SECONDS. Return its status."""
        self._writer.close()
        try:
            return await asyncio.wait_for(asyncio.to_thread(self.child.wait), END_SECONDS)
        except TimeoutError:
            self.child.kill()
            return await asyncio.to_thread(self.child.wait)


class RemoteEngine(EngineClient):
    """An `EngineClient` for an engine in a child process."""

    def __init__(self, spec: EngineSpec, begun: Child | None = None) -> None:
        """Call `start` next. spec: of every started process. begun: the first one; None: `start` starts it."""
        self._spec, self._begun = spec, begun
        self._process: _EngineChild | None = None
        self._lost: str | None = "the engine is starting"
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> Facts:
        """Load the model. Raises as `EngineSpec.load`, and EngineLostError."""
        begun, self._begun = self._begun, None
        process, facts = await _EngineChild.start(begun or Child.start(self._spec))
        self._running = asyncio.create_task(self._run(process))
        self._process, self._lost = process, None
        return facts

    @property
    def lost(self) -> str | None:
        return self._lost

    @property
    def warming(self) -> WarmUpProgress | None:
        """See `EngineClient`; as of the last ping."""
        return None if self._process is None else self._process.warming

    async def submit(self, request: Request, put: Put) -> Submitted:
        process = self._there()
        number, name = await process.ask({"do": "submit", "request": request_of(request)}, put)
        return Submitted(name, lambda: process.tell({"do": "cancel", "id": number}))

    async def _call(self, do: str, **arguments: Any) -> Any:
        return (await self._there().ask({"do": do, **arguments}))[1]

    async def close(self, *, drain: bool) -> None:
        self._closing = True
        process = self._process
        if process is not None:
            process.is_closing = True
            process.tell({"do": "close", "drain": drain})
        if self._running is not None:
            if process is not None and not drain:
                seconds = END_SECONDS + SAVE_SECONDS
                await asyncio.wait({self._running}, timeout=seconds)
                if not self._running.done():
                    log.error("engine process did not end within %g s; killing it", seconds)
                    process.child.kill()
            if self._process is None:
                self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    def _there(self) -> _EngineChild:
        if self._process is None:
            raise EngineLostError(f"The engine is down ({self._lost}) and being restarted; send this again later.")
        return self._process

    async def _run(self, process: _EngineChild) -> None:
        """Serve one process after the other."""
        while True:
            try:
                await process.read()
            except Exception:
                log.exception("cannot read a frame of the engine process")
            self._process, self._lost = None, "its process has ended"
            status = await process.end()
            self._lost = f"its process ended with status {status}"
            process.lose(EngineLostError(f"The engine was lost: {self._lost}. Send this again."))
            if self._closing:
                return
            log.error("engine process ended; restarting it", extra={"fields": {"status": status}})
            process = await self._again()
            self._process, self._lost = process, None

    async def _again(self) -> _EngineChild:
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                return (await _EngineChild.start(Child.start(self._spec)))[0]
            except Exception as error:
                self._lost = "it could not be started, see the server's log"
                log.error("cannot start the engine process", exc_info=error)
            await asyncio.sleep(wait)
            wait = min(2 * wait, MAX_WAIT_SECONDS)
