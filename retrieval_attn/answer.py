"""Answer: text, tokens and costs of one question. Stream: its pieces while a thread generates it."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal, Self


@dataclass(frozen=True)
class HeadShare:
    """A query head of a layer, and its share of something, 0 .. 1."""

    layer: int
    head: int
    share: float


@dataclass(frozen=True)
class Stats:
    """Cost of one answer, summed over layers. Seconds are wall clock.

    context_tokens: tokens the question could attend to. prefill_seconds: reading the question.
    keys_scanned, host_bytes_read, host_seconds: work of the host's search and attention; search_seconds and
    attend_seconds are its two phases.
    host_bytes, device_bytes: memory held by the cache.
    tail_share: share of attention's weight over keys that was estimated from clusters (`Config.tail`), mean over heads,
    layers and tokens, those of a question among them that went through retrieval. Captured steps that ran ahead and
    were discarded count, too, and so do drafts that were not accepted. None if nothing is estimated.
    tail_share_most: the head whose mean is largest.
    indexes: kinds of the indexes that were searched, and how many heads have each; {} if all keys were on the device of
    the model. `Context.index_notes` says why a head has its index. all_keys: the dtype that all keys were there in,
    "int8" among them (`Config.full_attention`); None where they were retrieved.
    decoded: "graph" where every token after the first was a replay of a captured step, "eager", or "eager: " and why
    nothing was captured.
    drafted_tokens, accepted_tokens: drafts that steps verified, and those of them that the text has (`Config.drafts`).
    passes, pass_bytes: with full_attention="exact" and keys on the host, forwards that attended to all keys after the
    question, and bytes of keys and values that one read from there, on average. agreement: share of tokens for which
    retrieval chose the token of full attention, of those it drafted before the first wrong one of a block; None: none.
    """

    context_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    index_seconds: float
    host_seconds: float
    keys_scanned: int
    host_bytes_read: int
    host_bytes: int
    device_bytes: int
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
    tail_share: float | None = None
    tail_share_most: HeadShare | None = None
    indexes: Mapping[str, int] = field(default_factory=dict)
    all_keys: str | None = None
    decoded: str = "eager"
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    passes: int = 0
    pass_bytes: int = 0
    agreement: float | None = None

    @property
    def seconds_per_token(self) -> float:
        """Decoding seconds per token after the first, which comes from the prefill; 0.0 for a single token."""
        return self.decode_seconds / (self.new_tokens - 1) if self.new_tokens > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "seconds_per_token": self.seconds_per_token}


@dataclass(frozen=True)
class Answer:
    """One answer. tokens: generated ids without the end-of-sequence token."""

    text: str
    tokens: list[int] = field(repr=False)
    finish_reason: Literal["stop", "length"]
    stats: Stats = field(repr=False)

    def __str__(self) -> str:
        return self.text


Work = Callable[[Callable[[str], None], threading.Event], Answer]
"""Makes an answer: calls the first argument with each piece of text, and stops soon once the second is set."""

JOIN_SECONDS = 30.0
"""A stream that is collected as garbage waits so long for its worker: who collects it may hold what that waits for."""


class Stream(Iterator[str]):
    """Pieces of one answer, while a thread generates it.

    However the loop over it is left (break, an exception, `close()`, the end of a `with` block, garbage collection or
    the end of the program), generating stops at the next token. An error of the generating thread is raised in the
    loop. answer: the whole `Answer` with its costs once the text has ended by itself, None before and after `close()`.
    The thread starts with the first piece that is asked for.
    """

    def __init__(self, work: Work) -> None:
        """See `Context.stream`, which makes it."""
        self.answer: Answer | None = None
        self._worker = _Worker(work)
        # also runs before the interpreter ends, which must not find the thread inside compiled code
        self._collected = weakref.finalize(self, self._worker.stop, JOIN_SECONDS)

    def __next__(self) -> str:
        try:
            item = self._worker.next()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, str):
            return item
        self.close()
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # its traceback names this frame
        self.answer = item or self.answer
        raise StopIteration

    def close(self) -> None:
        """Stop generating and wait for the thread, which ends at its next token. Calling it again changes nothing."""
        self._worker.stop()
        self._collected.detach()  # not before: a second Ctrl-C may end the wait

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """The thread, and what it has made so far. It knows nothing of the stream, which can thus be collected."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._made: queue.SimpleQueue[str | Answer | BaseException] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def next(self) -> str | Answer | BaseException | None:
        """Wait for the next piece, the answer at the end, or what went wrong; None after `stop`."""
        if self._cancelled.is_set():
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieval_attn-stream", daemon=True)
            self._thread.start()
        made = self._made.get()
        return None if self._cancelled.is_set() else made

    def stop(self, seconds: float | None = None) -> None:
        """Cancel the work and wait for the thread, at most `seconds` seconds."""
        self._cancelled.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._made.put(self._work(self._made.put, self._cancelled))
        except BaseException as error:
            self._made.put(error)
