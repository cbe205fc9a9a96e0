"""Detokenize generated tokens and deliver events in a thread, in order, while the next step runs.

Detokenizing and waking a client's thread need the interpreter lock, which would delay the next step's launch. A graph
replay releases the lock; the thread delivers meanwhile.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable

from retrieval_attn.engine.request import Event, Finished, RequestHandle
from retrieval_attn.prompt.text_stream import TextStream

__all__ = ["Detokenizer", "OutputQueue"]


Telling = Callable[[], None]


class OutputQueue:
    """Delivers callbacks in order. Methods are called by the engine's thread alone; callbacks must not raise."""

    def __init__(self) -> None:
        self._put: list[Telling] = []
        self._sent: queue.SimpleQueue[list[Telling] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, telling: Telling) -> None:
        """Queue a callback."""
        self._put.append(telling)

    def flush(self) -> None:
        """Call all queued callbacks now, or after those that the thread still has to call."""
        if self._thread is not None:
            self.flush_async()
            return
        put, self._put = self._put, []
        for telling in put:
            telling()

    def flush_async(self) -> None:
        """Pass all queued callbacks to the thread. Returns at once."""
        if not self._put:
            return
        put, self._put = self._put, []
        self._sent.put(put)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieval_attn-output", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Call all queued callbacks and end the thread."""
        self.flush()
        if self._thread is not None:
            self._sent.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            for telling in sent:
                telling()


Top = tuple[tuple[int, float], ...]


class Detokenizer:
    """Turns a request's tokens into events. The engine's thread calls `token` and `end`; the output queue the rest."""

    def __init__(self, handle: RequestHandle, outputs: OutputQueue, stream: TextStream) -> None:
        """stream: incremental detokenizer of the request."""
        self._handle, self._outputs, self._stops = handle, outputs, stream.has_stops
        self._stream, self._text = stream, ""
        self._failed: Exception | None = None

    def token(self, token: int, logprob: float | None, top: Top) -> bool:
        """Queue one token for detokenization. Return True if a stop string matched.

        Without stop strings the text is made later, in the output thread.
        """
        text = self._made(token) if self._stops else None
        self._outputs.put(functools.partial(self._tell, Event(token, text or "", logprob, top), made=text is not None))
        return self._stops and (self._stream.stopped or self._failed is not None)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has matched."""
        return self._stops and self._stream.stopped

    def end(self, finished: Finished, began: float) -> None:
        """Queue the end of the answer, with the rest of its text. Called once.

        finished: without text and the seconds to the end. began: seconds of `time.perf_counter` at the submission.
        """
        self._outputs.put(functools.partial(self._tell_end, finished, began))

    def _made(self, token: int) -> str:
        """Return the text that is final with this token. An error ends the request."""
        try:
            return "" if self._failed is not None else self._stream.add(token)
        except Exception as error:
            self._failed = error
            self._handle.cancel()
            return ""

    def _tell(self, event: Event, *, made: bool) -> None:
        if not made:
            event = event._replace(text=self._made(event.token))
        if self._failed is None:
            self._text += event.text
            self._handle.put(event)

    def _tell_end(self, finished: Finished, began: float) -> None:
        reason, error, rest = finished.reason, finished.error, ""
        try:
            rest = self._stream.end()
        except Exception as failure:
            self._failed = self._failed or failure
        if self._failed is not None:
            reason, error = "error", error or self._failed
        if rest and reason != "error":
            self._text += rest
            self._handle.put(Event(-1, rest))
        seconds = finished.seconds[0], time.perf_counter() - began
        self._handle.put(finished._replace(reason=reason, text=self._text, seconds=seconds, error=error))
