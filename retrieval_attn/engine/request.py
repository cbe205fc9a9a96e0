"""Requests of an engine, their handles, events and results."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from retrieval_attn.engine.request_needs import PRIORITIES, Priority
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.model.images import Image, placed_images
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.sampling.sampler import TokenScore
from retrieval_attn.sampling.sampling_params import MAX_LOGPROBS, SamplingParams, is_encodable, is_int

__all__ = ["Event", "Finished", "Reason", "Request", "RequestHandle"]

Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt and its sampling.

    Raises InputDataError for an empty prompt or part, ConfigError for other wrong values.

    Attributes:
        parts: token ids in parts that are prefilled one after the other: a document and a question, or the turns of a
            chat. A plain list of ids is one part. Requests share the prefix that their prompts have in common.
        max_tokens: largest number of generated tokens.
        draw: sampling parameters.
        stop: strings at which an answer ends.
        stop_ids: tokens that end it; None: the model's.
        namespace: prefixes are shared within it, as by requests with one API key; None: by all requests.
        owner: account of fair queueing.
        context: name of a saved context of the engine's store that the prompt continues. It is opened once for all
            requests that name it, of any namespace. A prompt that begins with the tokens of a saved context continues
            it without naming it, if that was saved in the same namespace or in none.
        min_tokens: tokens before which neither a stop token nor a stop string ends the answer.
        prompt_logprobs: 0 to 20: return the log-probability of each prompt token, and of as many of the likeliest
            tokens in its place; the prompt is then prefilled without the prefix cache. None: do not.
        visible: special tokens that the text of the answer keeps, such as markers of tool calls.
        images: of the prompt, in order: `Image.ids` are among the ids of its parts. Not after a saved context.
        session: session that the prompt is a turn of: for a while the cached prompt of its last turn is evicted after
            those of no session. "": none.
        grammar: grammar of the answer, which ends when it is complete; needs the extra `grammar`. None: any text. An
            answer of `max_tokens` tokens may be incomplete.
    """

    parts: tuple[tuple[int, ...], ...]
    max_tokens: int = 128
    draw: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    namespace: str | None = ""
    owner: str = ""
    priority: Priority = "interactive"
    context: str | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    visible: frozenset[int] = frozenset()
    session: str = ""
    grammar: GrammarSpec | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        given: Sequence[Any] = self.parts
        pieces = [given] if all(isinstance(one, int) for one in given) else given
        if not pieces or not all(len(piece) for piece in pieces):
            raise InputDataError("A prompt, and each of its parts, needs at least one token id; got an empty one.")
        object.__setattr__(self, "parts", tuple(map(_plain_ids, pieces)))
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be an integer >= 1, got {self.max_tokens!r}.")
        if isinstance(self.stop, str) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(f"stop must be a tuple of non-empty strings, got {self.stop!r}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        if any(not is_encodable(one) for one in self.stop):
            raise ConfigError(f"stop must have valid Unicode, got a lone surrogate in {self.stop!r}.")
        if not is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens must be an integer in [0, {self.max_tokens}], the most tokens of the answer; got "
                f"{self.min_tokens!r}."
            )
        if self.grammar is not None and self.min_tokens:
            raise ConfigError(f"min_tokens must be 0 for an answer with a grammar, got {self.min_tokens!r}.")
        scored = self.prompt_logprobs
        if scored is not None and (not is_int(scored) or not 0 <= scored <= MAX_LOGPROBS or self.context is not None):
            raise ConfigError(
                f"prompt_logprobs must be None or an integer from 0 to {MAX_LOGPROBS}, for a prompt without a saved "
                f"context; got {scored!r} and context={self.context!r}."
            )
        if self.context is not None and not (isinstance(self.context, str) and self.context):
            raise ConfigError(f"context must be the name of a saved context, got {self.context!r}.")
        if self.images and (scored is not None or self.context is not None):
            raise ConfigError("A prompt with images takes neither prompt_logprobs nor context; leave them out.")
        if self.images:
            placed_images(self.ids, self.images)
        if self.priority not in PRIORITIES:
            raise ConfigError(f"priority must be one of {', '.join(PRIORITIES)}; got {self.priority!r}.")

    @property
    def ids(self) -> list[int]:
        """Token ids of the whole prompt."""
        return [token for part in self.parts for token in part]

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(map(len, self.parts))


def _plain_ids(piece: Sequence[Any]) -> tuple[int, ...]:
    """Return token ids as a tuple of int. A loop over 100K of them would hold up threads that launch kernels."""
    return tuple(piece) if set(map(type, piece)) == {int} else tuple(int(token) for token in piece)


class Event(NamedTuple):
    """One generated token.

    text: text that is final with it, possibly "". logprob, top: see `SamplingParams.logprobs`; top has pairs of a token
    id and its log-probability.
    """

    token: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Finished(NamedTuple):
    """Result of a request.

    Attributes:
        reason: "stop" (a stop token or string), "length", "cancelled" or "error".
        text, tokens: the answer, without a stop token.
        prompt_tokens: length of the prompt, with the saved context.
        cached_tokens: prompt tokens that were not prefilled for it.
        seconds: from submission to the first token, and to the end.
        error: the error if reason is "error".
        prompt: scores of the prompt tokens after the first, for `Request.prompt_logprobs`.
    """

    reason: Reason
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: tuple[float, float]
    error: BaseException | None = None
    prompt: tuple[TokenScore, ...] = ()


class RequestHandle:
    """Handle of a submitted request: events in order, and the result. For one reader; any thread may cancel."""

    def __init__(self, number: str, cancel: Callable[[], None]) -> None:
        """number: number of the request, for logs."""
        self.id = number
        self._cancel = cancel
        self._queue: queue.SimpleQueue[Event | Finished] = queue.SimpleQueue()
        self._finished: Finished | None = None
        self._listener: Callable[[Event | Finished], None] | None = None
        self._lock = threading.Lock()

    def put(self, item: Event | Finished) -> None:
        """Deliver an event or the result. Called by the engine."""
        with self._lock:
            if self._listener is None:
                self._queue.put(item)
            else:
                self._listener(item)

    def listen(self, listener: Callable[[Event | Finished], None]) -> None:
        """Deliver all items to `listener` in place of iteration, past ones first. At most once.

        A thread of the engine calls it and blocks meanwhile: it must be quick and not raise.
        """
        with self._lock:
            while not self._queue.empty():
                listener(self._queue.get())
            self._listener = listener

    def __iter__(self) -> Iterator[Event]:
        """Yield events until the end. Raises the error of the request."""
        while self._finished is None:
            item = self._queue.get()
            if isinstance(item, Event):
                yield item
                continue
            self._finished = item
        if self._finished.error is not None:
            raise self._finished.error

    def result(self) -> Finished:
        """Wait for the result; events are skipped. Never raises: `Finished.error` has the error."""
        while self._finished is None:
            item = self._queue.get()
            if isinstance(item, Finished):
                self._finished = item
        return self._finished

    def cancel(self) -> None:
        """Cancel the request, which soon ends as "cancelled". An ended request is not changed."""
        self._cancel()
