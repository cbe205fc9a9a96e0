"""Teller: makes a row's text of its tokens, and tells its ticket, beside the steps."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from retrieval_attn.engine.request import Event, Finished, Reason, RequestHandle
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.runner.decode import TokenScore

__all__ = ["Detokenizer", "OutputQueue", "Summary"]


Telling = Callable[[], None]


class OutputQueue:
    """See the module. Everything is called by one thread. What is put here must not raise."""

    def __init__(self) -> None:
        self._put: list[Telling] = []
        self._sent: queue.SimpleQueue[list[Telling] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, telling: Telling) -> None:
        """To be called, behind all that were put before."""
        self._put.append(telling)

    def send(self) -> None:
        """Call what was put: at once, or behind what the thread has to call still."""
        if self._thread is not None:
            self.send_beside()
            return
        put, self._put = self._put, []
        for telling in put:
            telling()

    def send_beside(self) -> None:
        """Let the thread call what was put, as soon as it gets Python's lock. Quick."""
        if not self._put:
            return
        put, self._put = self._put, []
        self._sent.put(put)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieval_attn-outbox", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Call what is left, and end."""
        self.send()
        if self._thread is not None:
            self._sent.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            for telling in sent:
                telling()


Top = tuple[tuple[int, float], ...]


class Summary(NamedTuple):
    """Of a row at its end, as in `Finished`; began, first: on `time.perf_counter`."""

    tokens: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    began: float
    first: float
    prompt: Sequence[TokenScore] = ()


class Detokenizer:
    """See the module. `token` and `end` are called by the engine's thread, in that order; the outbox calls the rest."""

    def __init__(self, ticket: RequestHandle, outbox: OutputQueue, stream: TextStream) -> None:
        """stream: of the row."""
        self._ticket, self._outbox, self._stops = ticket, outbox, stream.has_stops
        self._stream, self._text = stream, ""
        self._failed: Exception | None = None

    def token(self, token: int, logprob: float | None, top: Top) -> bool:
        """Tell of a token; whether the text ends with it. Text is made of it later, unless a string may end it."""
        text = self._made(token) if self._stops else None
        self._outbox.put(functools.partial(self._tell, Event(token, text or "", logprob, top), made=text is not None))
        return self._stops and (self._stream.stopped or self._failed is not None)

    @property
    def stopped(self) -> bool:
        """The text has ended at a string."""
        return self._stops and self._stream.stopped

    def end(self, reason: Reason, error: BaseException | None, summary: Summary) -> None:
        """Tell of the end, with what text is left. Once."""
        self._outbox.put(functools.partial(self._tell_end, reason, error, summary))

    def _made(self, token: int) -> str:
        """The text that is certain with this token; what goes wrong ends the row."""
        try:
            return "" if self._failed is not None else self._stream.add(token)
        except Exception as error:
            self._failed = error
            self._ticket.cancel()
            return ""

    def _tell(self, event: Event, *, made: bool) -> None:
        if not made:
            event = event._replace(text=self._made(event.token))
        if self._failed is None:
            self._text += event.text
            self._ticket.put(event)

    def _tell_end(self, reason: Reason, error: BaseException | None, summary: Summary) -> None:
        rest = ""
        try:
            rest = self._stream.end()
        except Exception as failure:
            self._failed = self._failed or failure
        if self._failed is not None:
            reason, error = "error", error or self._failed
        if rest and reason != "error":
            self._text += rest
            self._ticket.put(Event(-1, rest))
        seconds = summary.first - summary.began, time.perf_counter() - summary.began
        counts = summary.prompt_tokens, summary.cached_tokens
        scores = tuple(summary.prompt)
        self._ticket.put(Finished(reason, self._text, tuple(summary.tokens), *counts, seconds, error, scores))
