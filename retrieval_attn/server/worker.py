"""Worker: an engine that does what frames say, in the process that has it.

Each command has an `id`, and gets one frame back with it, `ok` or `error`; what becomes of requests goes into frames of
its own, `items`.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from retrieval_attn.engine.background_saves import SAVE_SECONDS
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Event, Finished, RequestHandle
from retrieval_attn.server.client import EngineThreads
from retrieval_attn.server.ipc import Plain, frame_of, item_of, plain_error, receive_frame, request_from

WATCH_SECONDS = 0.25
DIED = 3
"""Exit status of a process whose engine has ended."""


class Worker:
    """Does what the frames of one socket say, until it is closed."""

    def __init__(self, sock: socket.socket, engine: Engine, on_warm: Callable[[], object] | None = None) -> None:
        """engine: this one's from now on. on_warm: called once, when all graphs are captured."""
        self._sock, self._engine, self._on_warm = sock, engine, on_warm
        self._outgoing: queue.SimpleQueue[Plain | tuple[int, Event | Finished] | None] = queue.SimpleQueue()
        self._tickets: dict[int, RequestHandle] = {}
        self._submitting: dict[int, bool] = {}
        """Requests that a thread is about to submit; True: cancelled meanwhile."""
        self._lock = threading.Lock()
        self._threads = EngineThreads(engine)
        self._writer = threading.Thread(target=self._write, name="retrieval_attn-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._watch, name="retrieval_attn-watch", daemon=True).start()

    def run(self) -> None:
        """Until the server says "close", or has gone."""
        drain = False
        while (frame := receive_frame(self._sock)) is not None:
            if frame["do"] == "close":
                drain = bool(frame["drain"])
                break
            if frame["do"] == "cancel":
                self._cancel(frame["id"])
            elif frame["do"] == "ping":
                warming = self._engine.warming
                self._outgoing.put({"id": frame["id"], "ok": warming})
                if warming is None and self._on_warm is not None:
                    self._on_warm()
                    self._on_warm = None
            else:
                self._begun(frame).add_done_callback(functools.partial(self._reply, frame["id"]))
        self._engine.close(drain=drain, save_seconds=SAVE_SECONDS)
        self._outgoing.put(None)
        self._writer.join()

    def _begun(self, frame: Plain) -> Future[Any]:
        """Begin a command in a thread."""
        if frame["do"] != "submit":
            return self._threads.call(**{name: value for name, value in frame.items() if name != "id"})
        number, request = frame["id"], frame["request"]
        self._submitting[number] = False
        opens = any(request[name] is not None for name in ("context", "grammar"))
        return self._threads.submit(functools.partial(self._submit, number, request), opens=opens)

    def _reply(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        told = {"ok": done.result()} if error is None else {"error": plain_error(error)}
        self._outgoing.put({"id": number, **told})

    def _submit(self, number: int, request: Plain) -> str:
        try:
            ticket = self._engine.submit(request_from(request))
        except BaseException:
            del self._submitting[number]
            raise
        with self._lock:
            self._tickets[number] = ticket
            is_cancelled = self._submitting.pop(number)
        ticket.listen(functools.partial(self._tell, number))
        if is_cancelled:
            ticket.cancel()
        return ticket.id

    def _cancel(self, number: int) -> None:
        """Cancel a request, also one that a thread has not submitted yet; nothing happens if it has ended."""
        with self._lock:
            ticket = self._tickets.get(number)
            if ticket is None and number in self._submitting:
                self._submitting[number] = True
        if ticket is not None:
            ticket.cancel()

    def _tell(self, number: int, item: Event | Finished) -> None:
        if isinstance(item, Finished):
            self._tickets.pop(number, None)
        self._outgoing.put((number, item))

    def _write(self) -> None:
        """All that is there at a time, items in one frame."""
        while (first := self._outgoing.get()) is not None:
            found: list[Plain | tuple[int, Event | Finished] | None] = [first]
            while not self._outgoing.empty():
                found.append(self._outgoing.get())
            items = [[one[0], *item_of(one[1])] for one in found if isinstance(one, tuple)]
            frames = [frame_of(one) for one in found if isinstance(one, dict)]
            try:
                self._sock.sendall(b"".join([*frames, frame_of({"items": items})] if items else frames))
            except OSError:
                return  # the server has gone, which `run` finds out
            if found[-1] is None:
                return

    def _watch(self) -> None:
        """An engine that ended in the middle of its work cannot be used again; the server starts another process."""
        while self._engine.died is None:
            time.sleep(WATCH_SECONDS)
        os._exit(DIED)
