"""Answering a workload's requests in one way, through the public API, and noting when each token comes."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import retrieval_attn as ra
from retrieval_attn.errors import AdmissionError, ContextLengthError, EngineFullError, RetrievalAttentionError
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.testing import ProgressBar, available_host_bytes, default_limits
from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.cache_use import CacheCounts, engine_counts
from retrieval_attn_eval.bench.serve.call import Call, chains
from retrieval_attn_eval.bench.serve.filled import Filled
from retrieval_attn_eval.bench.serve.tree_room import Room, tree_bytes

__all__ = ["WAYS", "Drive", "Served", "collections_are_short"]

WAYS = ("one", "static", "engine", "tree-off")
"""One after the other; in batches, each of which ends before the next one begins; as they come; so without the tree."""

WARM_TOKENS = 8192
"""A text of 128K takes some 15 s to read, and compiles what its beginning does."""

SPARE = 16
"""One part in so many more than texts need by `plan`: codes that outgrow their memory take as much to spare."""


@contextmanager
def collections_are_short() -> Iterator[None]:
    """Within, garbage collections leave alone what is there now, as in a server: to visit modules and model takes .3 s,
    beside a GPU's libraries every second or two, and all rows wait. Where some was frozen before, all stays frozen.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@dataclass(frozen=True)
class Served:
    """What an engine needs of an `LLM`."""

    model: Any
    tokenizer: Any
    config: ra.Config


class Drive:
    """An engine for each way, made for it and closed after it."""

    def __init__(
        self, llm: Served, slots: int, *, read_first: bool, row_seconds: float, paged_prefix_tokens: int = 0,
        shared: tuple[int | None, int | None] = (None, None), holds_all: bool = True, store: str | None = None,
        send_seconds: float | None = None,
    ) -> None:  # fmt: skip
        """slots: rows of a step. read_first: all but the prompts' last parts is read before the clock starts.
        row_seconds: requests that are not answered then are cancelled. paged_prefix_tokens: of the engines.
        shared: bytes of their trees, on the host and on GPUs; None: what the calls' texts need, where it is more than
        an engine's own choice. holds_all: False: None is the engine's own choice, with which it may evict. store:
        folder with one for each way, in which its engine saves the texts that it evicts; None: it drops them.
        send_seconds: after which no request is sent; None: all are.
        """
        self._store = store
        self._llm, self._slots = llm, slots
        self._exact: dict[str, Any] = {"paged_prefix_tokens": paged_prefix_tokens}
        self._read_first, self._row_seconds, self._shared = read_first, row_seconds, shared
        self._holds_all, self._send_seconds = holds_all, send_seconds
        self.gave_up = ""  # what the last way's tree evicted for lack of room
        self.counts = CacheCounts()  # of the last way

    def warm(self, calls: Sequence[Call]) -> None:
        """Compile and allocate what steps of all slots need: two tokens for a few of the requests, of whose parts the
        first WARM_TOKENS are read.
        """
        some = [
            Call(
                replace(call.request, max_tokens=2, parts=tuple(part[:WARM_TOKENS] for part in call.request.parts)), 0.0
            )
            for call in calls[: min(2, self._slots)]
        ]
        with self._engine("engine", some) as engine:
            self._answers(engine, some, None, None)

    def serve(self, way: str, calls: Sequence[Call]) -> tuple[list[Answered | None], float | None, float]:
        """What became of each call, None of one that was not sent; the share of slots filled while a request waited
        (None: none did); CPU seconds.

        The engine is warmed up before the clock starts. Raises TimeoutError where it took more than the row's seconds.
        """
        gc.collect()  # caches of the way before this one
        self.gave_up = ""
        with self._engine(way, calls, self._store) as engine:
            if calls:
                longest = max(call.request.prompt_tokens + call.request.max_tokens for call in calls)
                draws = tuple(dict.fromkeys(call.request.draw for call in calls))
                engine.warm_up(tokens=longest, draws=draws, progress=False)
            if self._read_first and way != "tree-off":
                self._read(engine, calls)
            filled = Filled(engine, 1 if way == "one" else self._slots)
            batch = {"one": 1, "static": self._slots}.get(way)
            before = engine_counts(engine.stats)
            began = time.process_time()
            with collections_are_short(), filled:
                answers = self._answers(engine, calls, batch, filled)
            cpu_seconds = time.process_time() - began
            held = engine.stats["shared"]
            token_bytes = default_limits(self._llm.model, self._llm.config).token_bytes
            # requests that run hold more than the cache may keep
            held_bytes = min(filled.peak_bytes, filled.peak_bytes if self._shared[0] is None else self._shared[0])
            self.counts = engine_counts(engine.stats).since(before, held_bytes // token_bytes)
            if held.evicted:
                self.gave_up = (
                    f"its tree gave up {held.evicted} texts for lack of room, and has {show_bytes(held.host_nbytes)} "
                    f"on the host and {show_bytes(held.device_nbytes)} beside the model"
                )
            return answers, filled.share, cpu_seconds

    @contextmanager
    def _engine(self, way: str, calls: Sequence[Call], store: str | None = None) -> Iterator[ra.Engine]:
        options: dict[str, Any] = {**self._exact, "store": None if store is None else Path(store) / way}
        prefix_cache_bytes, device_bytes = self._shared
        usual = default_limits(self._llm.model, self._llm.config).sharing(device_bytes)
        rows, ahead = (1, 0) if way == "one" else (self._slots, usual.ahead)
        if way != "tree-off" and prefix_cache_bytes is None and not self._holds_all:
            limits = replace(usual, rows=rows, ahead=ahead, waiting=max(usual.waiting, len(calls)))
            with ra.Engine(self._llm, limits=limits, **options) as engine:
                yield engine
            return
        sized = calls if self._holds_all else ()
        needed = tree_bytes(sized, self._llm.model, self._llm.config, self._exact["paged_prefix_tokens"])
        texts = Room(*(size + size // SPARE for size in needed))
        if usual.prefix_cache_device_bytes is None:  # all of it is the host's
            texts = Room(sum(texts))
        elif device_bytes is None:
            usual = replace(usual, prefix_cache_device_bytes=max(usual.prefix_cache_device_bytes, texts.device))
        if way == "tree-off":
            prefix_cache_bytes = 0
        elif prefix_cache_bytes is None:
            prefix_cache_bytes = max(usual.host_bytes // 4, texts.host)
        # what the tree holds counts as the requests' memory: beside it they keep three quarters of what they would have
        host_bytes = max(usual.host_bytes, usual.host_bytes * 3 // 4 + prefix_cache_bytes)
        limits = replace(
            usual, rows=rows, ahead=ahead, waiting=max(usual.waiting, len(calls)),
            host_bytes=min(host_bytes, available_host_bytes()),
        )  # fmt: skip
        with ra.Engine(self._llm, limits=limits, prefix_cache_bytes=prefix_cache_bytes, **options) as engine:
            yield engine

    def _read(self, engine: ra.Engine, calls: Sequence[Call]) -> None:
        """Bring what requests begin with into the tree."""
        for parts in dict.fromkeys(call.request.parts[:-1] for call in calls):
            if parts:
                request = ra.Request((*parts, parts[-1][:1]), max_tokens=1, stop_ids=frozenset())
                if (error := engine.submit(request).result().error) is not None:
                    raise error

    def _answers(
        self, engine: ra.Engine, calls: Sequence[Call], batch: int | None, filled: Filled | None
    ) -> list[Answered | None]:
        """batch: most requests that are there at once, and nothing joins them before all are answered; None: as they
        come.
        """
        answers: list[Answered | None] = [None] * len(calls)
        waiting = chains(calls)
        began = time.perf_counter()
        deadline = began + self._row_seconds
        last = math.inf if self._send_seconds is None else began + self._send_seconds
        if filled is not None:
            filled.begin(began, [calls[chain[0]].arrival for chain in waiting])
        bar = ProgressBar(total=len(calls), desc="answering", unit="request", delay=2.0, leave=False)

        def submit(number: int, due: float) -> Any:
            try:
                return engine.submit(calls[number].request)
            except (AdmissionError, ContextLengthError, EngineFullError) as error:
                said = f"{type(error).__name__}: {error}"[:300]
                return Answered(due, (), (), calls[number].request.prompt_tokens, 0, said, refused=True)

        def listen(chain: Sequence[int], ticket: Any) -> None:
            due = began + calls[chain[0]].arrival
            for number in chain:
                if number != chain[0]:
                    if time.perf_counter() > last:
                        return
                    due = time.perf_counter() + calls[number].delay
                    time.sleep(calls[number].delay)
                    ticket = submit(number, due)
                answers[number] = ticket if isinstance(ticket, Answered) else _listened(ticket, due)
                with lock:
                    bar.update()

        lock = threading.Lock()
        threads: list[threading.Thread] = []
        with bar:
            for chain in waiting:
                due = began + calls[chain[0]].arrival
                if batch is not None and threads and (len(threads) == batch or due > time.perf_counter()):
                    _join(threads, deadline)
                    threads = []
                if due > last:
                    continue
                time.sleep(max(0.0, due - time.perf_counter()))
                ticket = submit(chain[0], due)
                if filled is not None:
                    filled.submitted += 1
                threads.append(threading.Thread(target=listen, args=(chain, ticket), daemon=True))
                threads[-1].start()
            _join(threads, deadline)
        assert self._send_seconds is not None or None not in answers, "every thread has ended"
        return answers


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.perf_counter()))
        if thread.is_alive():
            raise TimeoutError("requests were not answered within --timeout")


def _listened(ticket: Any, arrival: float) -> Answered:
    """Wait for a request's tokens, and note when they come."""
    times: list[float] = []
    try:
        for event in ticket:
            if event.token >= 0:
                times.append(time.perf_counter())
    except Exception as error:  # the row names it; other requests go on
        said = str(error).splitlines() if isinstance(error, RetrievalAttentionError) else [repr(error)]
        problem = f"{type(error).__name__}: {said[0] if said else ''}"[:300]
    else:
        problem = ""
    end = ticket.result()
    if not problem and end.reason != "length":
        problem = f"ended as {end.reason!r} after {len(end.tokens)} tokens"
    return Answered(arrival, tuple(times), tuple(end.tokens), end.prompt_tokens, end.cached_tokens, problem)
