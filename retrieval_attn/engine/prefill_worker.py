"""Prefill prompts of an engine, or open their saved contexts, between decode steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from retrieval_attn.config import Config
from retrieval_attn.engine.batched_prefill import BatchedPrefill, PrefillRequest, paused
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.gate import ChunkKind
from retrieval_attn.engine.node import Node
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request_needs import State
from retrieval_attn.engine.running_request import RunningRequest
from retrieval_attn.engine.scheduler import Scheduler

__all__ = ["Progress", "PrefillWorker"]

CLAIM_SECONDS = 0.002
"""Between two looks, where all that is left to do is read by requests that wait for another, or opened in a thread."""


END_SECONDS = 0.005
"""That steps wait for the end of a read, which takes no time where nothing is under way any more."""
ALONE_TOKENS, BESIDE_TOKENS = 2048, 512
"""Of short prompts that are read by one forward, where nothing decodes meanwhile and where rows wait for it."""
MAX_LACKING_SECONDS = 30.0
"""Longest wait for GPU memory of other requests; then the text gets what fits, in smaller codes and chunks."""
MAX_WAITING = 64
"""Waiting requests whose cached texts are evicted last."""
CHUNK_SHARE = 1 / 8
"""Share of the time between tokens that a chunk may take in a forward with more than BESIDE_TOKENS tokens while
sequences decode."""


class Fail(Protocol):
    """Ends a request with its error and adds its number to a list."""

    def __call__(self, number: str, error: BaseException, failed: list[str]) -> None: ...


class Progress(NamedTuple):
    """Result of the prefills of a round.

    Attributes:
        chunks: completed chunks by request.
        done: requests whose prompt is prefilled.
        chunk_seconds: mean duration of a chunk.
        next_kinds: kinds of the next chunks of requests in `chunks`.
    """

    chunks: dict[str, int]
    done: tuple[str, ...]
    chunk_seconds: float
    next_kinds: Mapping[str, ChunkKind]


class PrefillWorker:
    """Runs the prefills of an engine. Belongs to the engine's thread."""

    def __init__(
        self,
        rows: Mapping[str, RunningRequest],
        scheduler: Scheduler,
        changed: threading.Condition,
        config: Config,
        tree: RadixCache | None,
        fail: Fail,
        counts: Counts,
    ) -> None:
        """Store the engine's records.

        Args:
            rows: all requests by number.
            scheduler: scheduler of the engine.
            changed: lock of the scheduler.
            config: options of new caches.
            tree: prefix cache; None: off.
            fail: ends a request with its error.
            counts: counts of the engine.
        """
        self._rows, self._scheduler, self._changed, self._fail = rows, scheduler, changed, fail
        self._config, self._tree = config, tree
        self._counts = counts
        self._evicted = 0  # entries of the prefix cache, when known tokens were renewed
        self._packs = False  # the first read makes ready what any may need, which takes a while
        self._pack: BatchedPrefill | None = None
        self._pack_chunk_seconds = 0.0  # of the last one
        self._token_seconds = 0.0  # in a chunk, of the last one that was not small

    def made_ready(self) -> None:
        """Note that kernels are compiled, so that short prompts share a forward from the first one on."""
        self._packs = True

    def waited_for(self) -> dict[Node, int]:
        """Return the nodes that MAX_WAITING requests without a lease continue, with positions in the queue.

        An admitted request may wait for GPU memory before it takes its lease.
        """
        found: dict[Node, int] = {}
        if self._tree is None:
            return found
        with self._changed:
            rows = dict(self._rows)
            states = {key: self._scheduler.state(key) for key in rows}
        waiting = [
            row
            for key, row in rows.items()
            if states[key] is State.WAITING or (states[key] is State.READING and row.sharing.lease is None)
        ]
        for position, row in enumerate(waiting[:MAX_WAITING]):
            found.setdefault(row.sharing.cached_node(self._tree), position)
        return found

    def go_on(self, granted: Mapping[str, int], failed: list[str], *, alone: bool) -> Progress:
        """Run granted chunks; fewer if a chunk of another kind comes first.

        Args:
            granted: chunks by request.
            failed: gets the numbers of failed requests.
            alone: whether no sequence decodes in this round.
        """
        began = time.perf_counter()
        chunks: dict[str, int] = {}
        done: list[str] = []
        next_kinds: dict[str, ChunkKind] = {}
        busy = False
        with self._changed:
            reading = [number for number in self._rows if self._scheduler.state(number) is State.READING]
        granted = self._passed_on(granted, reading)
        for number in reading:
            if number in failed:
                continue
            row = self._rows[number]
            try:
                self._advance(row)
                read = paused(row.read)
                if row.read is None or row.has_to_wait or number not in granted:
                    continue
                busy = True
                if read is not None:
                    before = read.gate.chunks_done
                    if read.gate.next_kind != "image" or self._scheduler.next_kind(number) == "image":
                        if alone or not (
                            read.gate.is_stalled or read.gate.granted
                        ):  # else what was granted is to be done yet
                            read.go(min(granted[number], read.gate.chunks_alike), alone=alone)
                        read.wait(or_stalled=not alone)
                    chunks[number] = read.gate.chunks_done - before
                    if read.finishing:
                        read.wait_done(END_SECONDS)
                    self._advance(row)
                    going_on = paused(row.read)
                    next_kinds[number] = "chunk" if going_on is None else going_on.gate.next_kind
            except Exception as error:
                self._fail(number, error, failed)
        chunks |= self._read_together([one for one in reading if one not in failed], granted, failed, alone=alone)
        for number in reading:
            if number not in failed:
                self._note_shared(number, self._rows[number])
                if self._rows[number].is_read:
                    done.append(number)
                    self._counts.add_request(self._rows[number].cached_by_tier)
        if reading and not busy and alone and not done:
            time.sleep(CLAIM_SECONDS)
        total = sum(chunks.values())
        seconds = (time.perf_counter() - began) / total if total else 0.0
        return Progress(chunks, tuple(done), seconds, next_kinds)

    def _advance(self, row: RunningRequest) -> None:
        self._packs = self._packs or (row.read is not None and row.read.done)
        can_wait = self._others_run(row) and row.lacking_seconds < MAX_LACKING_SECONDS
        tokens = self._scheduler.limits.chunk_tokens
        row.advance(self._config, self._tree, packs=self._packs, can_wait=can_wait, chunk_tokens=tokens)

    def _others_run(self, row: RunningRequest) -> bool:
        """Return whether another request holds GPU memory that it frees when it ends."""
        return any(
            one is not row and (one.is_read or one.read is not None) and one.cache is not None
            for one in list(self._rows.values())
        )

    def _read_together(
        self, reading: Sequence[str], granted: Mapping[str, int], failed: list[str], *, alone: bool
    ) -> dict[str, int]:
        """Run a batched prefill of short prompts with the chunks granted to all of them.

        Prompts without a grant join, because they cost little more. Returns the chunks, counted for one of the prompts.
        """
        short = {
            number: read
            for number in reading
            if isinstance(read := self._rows[number].read, PrefillRequest) and paused(read) is None
        }
        room = sum(granted.get(number, 0) for number in short)
        if self._pack is not None and self._pack.done:  # all were cancelled
            self._pack = None
        if not room:
            return {}
        if self._pack is None:
            waiting = [short[number] for number in sorted(short, key=lambda number: number not in granted)]
            self._pack = BatchedPrefill(waiting, min(self._tokens_together(alone=alone), self._config.prefill_chunk))
        before = self._pack.gate.chunks_done
        self._go(self._pack, room, alone=alone)
        chunks = self._pack.gate.chunks_done - before
        members = [number for number, read in short.items() if read in self._pack.reads]
        if self._pack.done:
            self._pack = None
        for number in members:
            try:
                self._advance(self._rows[number])
            except Exception as error:
                self._fail(number, error, failed)
        return {number: chunks for number in members[:1]}

    def _tokens_together(self, *, alone: bool) -> int:
        """Return the tokens of the next batched prefill.

        While sequences decode it must be short, as predicted by the last batch that was not small: on a GPU a chunk has
        fixed costs beyond those of its tokens.
        """
        if alone:
            return ALONE_TOKENS
        if not self._token_seconds:
            return BESIDE_TOKENS
        fitting = int(CHUNK_SHARE * self._scheduler.limits.inter_token_seconds / self._token_seconds)
        return min(max(fitting, BESIDE_TOKENS), ALONE_TOKENS)

    def _go(self, pack: BatchedPrefill, chunks: int, *, alone: bool) -> None:
        """Run chunks as long as those of the last batch, or as many longer ones as take that time; at least one."""
        if pack.gate.chunks_done == 0:
            pack.wait()  # what is done once, before the first chunk
            began = time.perf_counter()
            pack.go(1)
            pack.wait()
            seconds = time.perf_counter() - began
            if not alone and seconds > self._pack_chunk_seconds:
                chunks = int(chunks * self._pack_chunk_seconds / seconds)
            chunks -= 1
        chunks = min(chunks, pack.gate.chunks_left)
        if chunks > 0:
            began, before = time.perf_counter(), pack.gate.chunks_done
            pack.go(chunks)
            pack.wait()
            self._pack_chunk_seconds = (time.perf_counter() - began) / max(pack.gate.chunks_done - before, 1)
            if pack.tokens >= BESIDE_TOKENS // 2:
                self._token_seconds = self._pack_chunk_seconds / pack.tokens

    def _note_shared(self, number: str, row: RunningRequest) -> None:
        """Tell the scheduler which prompt tokens are in the prefix cache and need no reserved memory."""
        if row.shared_tokens > row.noted_tokens and not row.changes_factors:
            row.noted_tokens = tokens = row.shared_tokens
            with self._changed:
                self._scheduler.set_cached(number, tokens)
                if tokens <= self._scheduler.limits.chunk_tokens:
                    return
                for other, waiting in self._rows.items():  # no long ones any more, which would be read one by one
                    leases = waiting.leases_known and self._scheduler.state(other) is State.WAITING
                    if leases and waiting.sharing.shares_prefix_with(row.sharing, tokens):
                        self._scheduler.set_known(other, tokens)

    def renew_known(self) -> None:
        """After an eviction, tell the scheduler what requests without a lease still find in the prefix cache."""
        if self._tree is None or (evicted := self._tree.stats.evicted) == self._evicted:
            return
        self._evicted = evicted
        with self._changed:
            rows = [(number, self._rows[number]) for number in self._scheduler.knowing if number in self._rows]
        for number, row in rows:
            known = row.sharing.known_tokens(self._tree)
            with self._changed:
                self._scheduler.set_known(number, known)

    def _passed_on(self, granted: Mapping[str, int], reading: Sequence[str]) -> dict[str, int]:
        """Pass the chunks of requests that wait for another's prefill to that request, whatever its priority.

        Chunks of a request that waits for its saved context or for pages go to the next prefill.
        """
        readers = {id(claim): number for number in reading if (claim := self._rows[number].sharing.claim) is not None}
        read = [
            number for number in reading if self._rows[number].read is not None and not self._rows[number].has_to_wait
        ]
        found: dict[str, int] = {}
        for number, chunks in granted.items():
            claim = self._rows[number].sharing.claim if number in self._rows else None
            reader = None if claim is None else claim.owner
            to = number if reader is None else readers.get(id(reader), number)
            if read and to in self._rows and self._rows[to].has_to_wait:
                to = read[0]
            found[to] = found.get(to, 0) + chunks
        return found
