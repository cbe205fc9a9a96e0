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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from retrieval_attn.engine.background_saves import SAVE_SECONDS
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Event, Finished, RequestHandle
from retrieval_attn.server.client import KEEPERS, OPENERS, keep, plain_stats
from retrieval_attn.server.ipc import Plain, frame_of, ids_from, item_of, plain_error, receive_frame, request_from

THREADS = 4
"""That submit requests, and answer about the engine."""
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
        self._threads = ThreadPoolExecutor(THREADS, "retrieval_attn-worker")
        self._keepers = ThreadPoolExecutor(KEEPERS, "retrieval_attn-keeper")
        self._openers = ThreadPoolExecutor(OPENERS, "retrieval_attn-opener")
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
                if frame["do"] == "submit":
                    self._submitting[frame["id"]] = False
                self._pool(frame).submit(self._answer, frame)
        self._engine.close(drain=drain, save_seconds=SAVE_SECONDS)
        self._outgoing.put(None)
        self._writer.join()

    def _pool(self, frame: Plain) -> ThreadPoolExecutor:
        if frame["do"] == "keep":
            return self._keepers
        opens = frame["do"] == "submit" and any(frame["request"][name] is not None for name in ("context", "grammar"))
        return self._openers if opens else self._threads

    def _answer(self, frame: Plain) -> None:
        try:
            self._outgoing.put({"id": frame["id"], "ok": self._done(frame)})
        except BaseException as error:
            self._outgoing.put({"id": frame["id"], "error": plain_error(error)})

    def _done(self, frame: Plain) -> Any:
        if frame["do"] == "submit":
            return self._submit(frame)
        if frame["do"] == "keep":
            return keep(self._engine, frame["name"], ids_from(frame["ids"]), frame["context"], frame["namespace"])
        if frame["do"] == "unsaved":
            return self._engine.unsaved
        if frame["do"] == "cancel_save":
            return self._engine.cancel_save(frame["name"])
        if frame["do"] == "status":
            return self._engine.status(frame["namespace"])
        return plain_stats(self._engine)

    def _submit(self, frame: Plain) -> str:
        number = frame["id"]
        try:
            ticket = self._engine.submit(request_from(frame["request"]))
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
