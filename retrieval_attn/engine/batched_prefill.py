"""Batched prefill: short parts of several prompts, read in one forward that pauses between chunks.

A chunk is one layer of all of them: between two, the forward waits at a gate, as that of a `ChunkedPrefill` does.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, Rollback, require_same_weights
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.prefill_batch import Lanes, PrefillTokens, RowRead, read_together
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill, clear_frames, read_batch, settling, undo
from retrieval_attn.engine.gate import Gate, GatedRead, ReadCancelled, prefill_threads
from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.memory.reclaim import idle_device_bytes, reclaim
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.rope import counting_as
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import PromptState
from retrieval_attn.runner.prefill import finish_prefill
from retrieval_attn.runner.rows import RowsCache, RowsLayer, position_groups

__all__ = ["BatchedPrefill", "PackedCache", "PrefillRequest", "SHORT_TOKENS", "packable", "paused"]

log = logging.getLogger(__name__)


class PackedCache(RowsCache):
    """`past_key_values` of a forward of new tokens of several rows, one row's behind another's: input_ids (1, tokens).

    places: positions of each row's tokens.
    """

    def __init__(
        self, caches: Items[RetrievalCache], lengths: Items[int], on_cell: Callable[[], object] | None = None
    ) -> None:
        """lengths: new tokens of each. on_cell: called before each layer's attention; rows may be left out there
        (`leave_out`). Raises UnsupportedModelError, the layer named.
        """
        self.on_cell = on_cell
        self.lanes = Lanes()
        starts = [cache.get_seq_length() for cache in caches]
        self.places = [range(start, start + count) for start, count in zip(starts, lengths, strict=True)]
        super().__init__(caches, counts=lengths)

    def _layer(self, number: int) -> Any:
        layers: list[Any] = [cache.layers[number] for cache in self.caches]
        if not all(isinstance(layer, CacheLayer) for layer in layers):
            raise UnsupportedModelError(
                f"Layer {number} keeps a state; prompts of such models are not read side by side. Read each alone."
            )
        return PackedLayer(self, number, layers)

    def leave_out(self, row: int) -> None:
        """This row goes no further; unlike one that fails, its cache is not broken."""
        self.errors[row] = ReadCancelled()


class PackedLayer(RowsLayer):
    """One layer of all rows: takes what is new; full-attention layers read it together, others row by row."""

    packs = True
    _rows: PackedCache

    def _check_new(self, key_states: Tensor) -> None:
        """Require keys of (1, kv_heads, tokens, dim). Raises CacheMismatchError."""
        tokens = self._rows.spans[-1].stop
        if key_states.shape[0] != 1 or key_states.shape[2] != tokens:
            raise CacheMismatchError(
                f"A forward with a PackedCache is of {tokens} tokens in one row, got keys {tuple(key_states.shape)}."
            )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Each row's new tokens to its own: query (1, q_heads, tokens, head_dim), float32 of value_dim out."""
        if self._rows.on_cell is not None:
            self._rows.on_cell()
        key, value = self.take_pending(module)
        out: Tensor | None = None
        together: list[RowRead] = []
        for row, (layer, span) in enumerate(zip(self._layers, self._rows.spans, strict=True)):
            if row in self._rows.errors:
                continue
            own = self._rows.spec_of(row, layer.columns, spec)
            if isinstance(layer, RetrievalLayer) and layer.reads_plainly(self._rows.new_tokens(row)):
                together.append(RowRead(row, layer, own, span))
                continue
            if out is None:
                out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float32)
            try:
                layer.update(key[:, :, span], value[:, :, span])
                out[:, :, span] = layer.attend(
                    module, query[:, :, span], own, scale=scale, softcap=softcap, sink_logits=sink_logits
                )
            except Exception as error:
                self._rows.fail(row, error)
        if together:
            new, scoring = PrefillTokens(query, key, value), Scoring(scale, softcap)
            out, errors = read_together(together, module, new, scoring, sink_logits, self._rows.lanes, out)
            for row, problem in errors.items():
                self._rows.fail(row, problem)
        return query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float32) if out is None else out


SHORT_TOKENS = 512
"""A longer part of a prompt fills a forward by itself."""


def packable(cache: RetrievalCache) -> bool:
    """Whether rows with such a cache can be read side by side: none of its layers keeps a state."""
    return all(isinstance(layer, CacheLayer) for layer in cache.layers)


class PrefillRequest:
    """A short read that waits to be done with others, by a `BatchedPrefill`.

    One that could not be done with others is `alone`: who drives it drives a `ChunkedPrefill` then. A read that is
    cancelled, or could not be done with others, leaves the cache as it was before.
    """

    def __init__(self, loop: AnswerLoop, cache: RetrievalCache, ids: Items[int]) -> None:
        """Take the arguments of `ChunkedPrefill`; raise its errors."""
        self.batch = read_batch(loop, cache, ids)
        self.cache, self.ids, self.loop = cache, ids, loop
        self.alone: ChunkedPrefill | None = None
        self._pack: BatchedPrefill | None = None
        self._state: PromptState | None = None
        self._error: BaseException | None = None

    @property
    def waits(self) -> bool:
        """Nothing has begun."""
        return not self.done and self.alone is None and self._pack is None

    @property
    def done(self) -> bool:
        """All is read, or there is an `error`."""
        if self.alone is not None:
            return self.alone.done
        return self._state is not None or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """The error that ended it early, ReadCancelled included; None without one."""
        return self._error if self.alone is None else self.alone.error

    def result(self, timeout: float | None = None) -> PromptState:
        """See `ChunkedPrefill.result`; with others, it must be done."""
        if self.alone is not None:
            return self.alone.result(timeout)
        if self._error is not None:
            raise self._error
        if self._state is None:
            raise TimeoutError("the prefill is not done: a BatchedPrefill runs it; wait for that")
        return self._state

    def cancel(self) -> None:
        """See `ChunkedPrefill.cancel`. The others go on."""
        if self.alone is None and self._pack is not None:
            self._pack.leave_out(self)
        if self.alone is not None:  # also if it became so meanwhile
            self.alone.cancel()
        elif not self.done:
            self._error = ReadCancelled()

    def begin(self, pack: BatchedPrefill) -> None:
        """It does not wait any more: `pack` reads it."""
        self._pack = pack

    def read(self, logits: Tensor) -> None:
        """It was read; logits (vocabulary,) float32 of its next token."""
        ids = self.batch.ids
        self.cache.batch.note_ids(ids)
        position = torch.tensor([ids.shape[1] - 1], device=ids.device)
        self._state, self._pack = PromptState(ids, logits[None], position), None

    def fail(self, error: BaseException) -> None:
        """It alone went wrong."""
        self._error, self._pack = error, None

    def go_alone(self) -> None:
        """Start again as a ChunkedPrefill; the cache is unchanged."""
        self._pack = None
        try:
            self.alone = ChunkedPrefill(self.loop, self.cache, self.ids)
        except Exception as error:
            self.fail(error)


def paused(read: ChunkedPrefill | PrefillRequest | None) -> ChunkedPrefill | None:
    """Return the prefill if it is driven by itself; None for none, and for one of a batch."""
    return read.alone if isinstance(read, PrefillRequest) else read


class BatchedPrefill(GatedRead):
    """Reads several short parts in a thread, as many chunks as it is granted. Let it end, or cancel all of its reads.

    reads: those that it reads. tokens: new ones of all of them. Where a forward of several fails as a whole, out of
    memory for one, each goes on alone.
    """

    def __init__(self, waiting: Items[PrefillRequest], tokens: int) -> None:
        """Begin; no chunk runs before `go`. waiting: reads of one model that wait, at least one. The first one, and of
        the others those that may share its forward and fit, are read: `tokens` new tokens in all.
        """
        self.reads = _fitting(waiting, tokens)
        self.tokens = sum(len(read.ids) for read in self.reads)
        model = self.reads[0].loop.model
        self.gate = Gate(len(self.reads[0].cache.layers), settling(model))
        self._befores: dict[int, Rollback | None] = {}
        self._packed: PackedCache | None = None
        for read in self.reads:
            read.begin(self)
        self._over = prefill_threads.start(self._run)

    def leave_out(self, read: PrefillRequest) -> None:
        """This one is cancelled between two chunks, and its cache as before; without the last one, all is over."""
        with self.gate.held():
            if not self.done and not read.done:
                row = self.reads.index(read)
                if self._packed is not None:
                    self._packed.leave_out(row)
                undo(read.cache, self._befores.get(row))
                read.fail(ReadCancelled())
            over = all(other.done for other in self.reads)
            if over:
                self.gate.cancel()
        if over:
            self._over.wait()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._mark()
            if not all(read.done for read in self.reads):
                self._read()
        except BaseException as error:  # none is left waiting
            clear_frames(error)
            again = [(row, read) for row, read in enumerate(self.reads) if not read.done]
            if again:
                log.info("%d prompts are read one by one: %s: %s", len(again), type(error).__name__, error)
            if isinstance(error, torch.OutOfMemoryError):
                reclaim(device=idle_device_bytes())
            for row, read in again:
                undo(read.cache, self._befores.get(row))
                read.go_alone()
        finally:
            if self._packed is not None:
                self._packed.finish()
            self._packed, self._befores = None, {}
            self.gate.end()

    def _mark(self) -> None:
        """Where caches are now; those that cannot be read fail by themselves."""
        for row, read in enumerate(self.reads):
            try:
                self._befores[row] = Rollback(read.cache) if read.cache.get_seq_length() else None
            except Exception as error:
                read.fail(error)

    @torch.no_grad()
    def _read(self) -> None:
        reads = self.reads
        for read in reads:
            require_same_weights(read.cache)
        packed = PackedCache([read.cache for read in reads], [len(read.ids) for read in reads], self.gate.enter)
        for row, read in enumerate(reads):
            if read.done:
                packed.leave_out(row)
        self._packed = packed
        logits = _forward(reads[0].loop.model, packed, reads)
        for read in reads:
            if read.cache.rope is not None:
                length = max(read.batch.ids.shape[1], read.cache.prompt_length)
                read.cache.batch.factors = read.cache.rope.factors(length)
        for row, read in enumerate(reads):
            if row not in packed.errors:
                finish_prefill(read.cache)
        for row, (read, found) in enumerate(zip(reads, logits, strict=True)):
            if not read.done:
                if row in packed.errors:
                    read.fail(packed.errors[row])
                else:
                    read.read(found)
        self.gate.settle()


def _fitting(waiting: Items[PrefillRequest], tokens: int) -> list[PrefillRequest]:
    """The first, and those behind it that may share its forward and fit."""
    found: list[PrefillRequest] = []
    for read in waiting:
        if not found or len(read.ids) <= tokens:
            found.append(read)
            tokens -= len(read.ids)
    lasts = torch.tensor([max(read.batch.ids.shape[1], read.cache.prompt_length) - 1 for read in found])
    groups = position_groups(found[0].loop.model, lasts)
    return [found[row] for row in next(rows for rows in groups if 0 in rows)]


def _forward(model: Any, packed: PackedCache, reads: Items[PrefillRequest]) -> Tensor:
    """Logits (rows, vocabulary) float32 after the last token of each."""
    ids = torch.cat([read.batch.ids[:, read.cache.get_seq_length() :] for read in reads], dim=1)
    places = torch.cat([torch.arange(stop.start, stop.stop) for stop in packed.places]).to(ids.device)
    lasts = torch.tensor([span.stop - 1 for span in packed.spans], device=ids.device)
    arguments: dict[str, Any] = {"input_ids": ids, "past_key_values": packed, "use_cache": True}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        arguments["position_ids"] = places[None]
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = lasts
    length = max(read.cache.prompt_length for read in reads)
    with using_retrieval(model, reads[0].cache.config.prefill_chunk), counting_as(length):
        logits: Tensor = model(**arguments, return_dict=True).logits[0]
    return (logits if len(logits) == len(lasts) else logits[lasts]).float()
