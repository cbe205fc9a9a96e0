"""Teller: makes a row's text of its tokens, and tells its ticket, beside the steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

from retrieval_attn.engine.output_queue import OutputQueue
from retrieval_attn.engine.request import Event, Finished, Reason
from retrieval_attn.engine.request_handle import RequestHandle
from retrieval_attn.engine.text import TextStream
from retrieval_attn.runner.decode import TokenScore

__all__ = ["Summary", "Detokenizer"]

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
