"""Prefill a prompt in a thread, chunk by chunk, between decode steps of the running batch.

A chunk is a prompt chunk in one layer, the end of a layer's pass over several of them, or an image in one layer of the
vision tower, which comes first. Chunks of one layer that are granted together are one forward. Between two chunks the
thread blocks at a gate and holds only the prompt's hidden states, so that decode steps run meanwhile. The result equals
that of `Context.read`.
"""

from __future__ import annotations

import functools
import logging
import traceback
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from retrieval_attn.answer_loop import AnswerLoop, PromptRows
from retrieval_attn.attention.cache import RetrievalCache, Rollback
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.engine.gate import Gate, GatedRead, prefill_threads
from retrieval_attn.errors import InputDataError
from retrieval_attn.model.placement import devices
from retrieval_attn.offload.threads import telling
from retrieval_attn.runner.decode import PromptState
from retrieval_attn.runner.prefill import abandon

log = logging.getLogger(__name__)


def read_batch(loop: AnswerLoop, cache: RetrievalCache, ids: Items[int], scored: int | None = None) -> PromptRows:
    """Make the batch of a prefill of `ids` after the tokens of a cache. Raises as `ChunkedPrefill`."""
    if not len(ids):
        raise InputDataError("A read needs at least one token; give a non-empty list of token ids.")
    cache.require_room(len(ids))
    sequences = cache.batch.sequences
    before = sequences[0].token_ids if sequences else ()
    if len(sequences) > 1 or len(before) != cache.batch.columns:
        raise InputDataError(
            f"A read continues one sequence whose ids are known, the cache has {len(sequences)} sequences of "
            f"{cache.batch.columns} tokens and {len(before)} ids; say them with cache.batch.note_ids."
        )
    return replace(loop.batch([list(ids)], before=before), scored=scored)


class ChunkedPrefill(GatedRead):
    """Prefills token ids into a cache, as many chunks as are granted. Use the cache once it is `done` without `error`.

    A cancelled or failed prefill leaves the cache as it was. A prefill without references is cancelled.
    """

    def __init__(
        self, loop: AnswerLoop, cache: RetrievalCache, ids: Items[int], scored: int | None = None, *,
        chunk_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """Start the thread; no chunk runs before `go`.

        Args:
            loop: answer loop of the model.
            cache: empty, or one sequence with known ids.
            ids: tokens to prefill after those of the cache.
            scored: number of log-probabilities per prompt token, see `PromptRows`. None: no scores.
            chunk_tokens: tokens of a chunk that is granted; a forward takes several of them, up to the cache's
                `prefill_chunk`, if they are granted at once. None: `prefill_chunk`.

        Raises:
            InputDataError: no ids, or a cache of images.
            ContextLengthError, CacheMismatchError: the cache cannot take the tokens.
        """
        batch = read_batch(loop, cache, ids, scored)
        unit = min(chunk_tokens or cache.config.prefill_chunk, cache.config.prefill_chunk)
        layer_chunks = -(-len(ids) // unit)
        ends = sum(isinstance(layer, CacheLayer) for layer in cache.layers) if layer_chunks > 1 else 0
        images, start = cache.batch.images, cache.get_seq_length()
        pictured = 0 if images is None else images.chunks(start, start + len(ids))
        chunks = pictured + layer_chunks * len(cache.layers) + ends
        self.gate = Gate(chunks, settling(loop.model), layer_chunks if ends else 0, unit, pictured)
        self._end = _End()
        self.cache = cache
        self._over = prefill_threads.start(functools.partial(_run, loop, cache, batch, self.gate, self._end))
        weakref.finalize(self, self.gate.cancel)

    def result(self, timeout: float | None = None) -> PromptState:
        """Wait for the end and return the state after the prompt. All chunks must have been granted.

        Raises the error of the prefill, ReadCancelled, or TimeoutError.
        """
        if not self.wait_done(timeout):
            raise TimeoutError(f"the read has {self.gate.chunks_left} chunks left, {self.gate.granted} of them granted")
        if self.error is not None:
            raise self.error
        assert self._end.state is not None
        return self._end.state

    def cancel(self) -> None:
        """Stop before the next chunk and wait for the thread; the cache is as before. Any number of calls is safe.

        A prefill that is done stays done.
        """
        self.gate.cancel()
        self._over.wait()

    @property
    def finishing(self) -> bool:
        """Whether all chunks are done and the thread still copies to the host and indexes."""
        return self.gate.finishing and not self.done

    @property
    def error(self) -> BaseException | None:
        """The error of the prefill, ReadCancelled included. None: none so far."""
        return self._end.error


class _End:
    """Result of a prefill; its thread holds no reference to the prefill itself."""

    state: PromptState | None = None
    error: BaseException | None = None


def _run(loop: AnswerLoop, cache: RetrievalCache, batch: PromptRows, gate: Gate, end: _End) -> None:
    """Run the prefill thread."""
    before: Rollback | None = None
    try:
        before = Rollback(cache) if cache.get_seq_length() else None
        cache.on_chunk, cache.on_image = gate.enter, functools.partial(gate.enter, kind="image")
        cache.on_end = gate.enter_end if gate.has_ends else None
        try:
            with telling(gate.stalled):
                state = loop.read_whole(cache, batch, read_done=gate.finish)
        finally:
            cache.on_chunk = cache.on_end = cache.on_image = None
        cache.batch.note_ids(batch.ids)
    except BaseException as error:  # raised to who waits
        undo(cache, before)
        clear_frames(error)
        end.error = error
    else:
        end.state = state
    finally:
        gate.end()


def settling(model: PreTrainedModel) -> Callable[[], None] | None:
    """Return a function that waits until the CUDA devices of a model have executed this thread's launches; None without
    any.

    Chunks and decode steps are timed. The time of launches alone would make the engine grant far too many chunks.
    """
    streams = [device for device in devices(model) if device.type == "cuda"]
    if not streams:
        return None

    def settle() -> None:
        for device in streams:
            torch.cuda.current_stream(device).synchronize()

    return settle


def undo(cache: RetrievalCache, before: Rollback | None) -> None:
    """Reset a cache to its state before a prefill whose copies and index builds have ended."""
    if before is not None:
        if not before.undo():
            cache.batch.broken = "a read was cancelled or failed and could not be undone"
        return
    abandon(cache)
    for layer in cache.layers:
        try:
            if isinstance(layer, CacheLayer):
                layer.finish_index()
        except Exception as error:  # what failed is forgotten
            log.debug("a read that is undone had failed: %s", error)
    cache.reset()


def clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, which hold activations. Its lines stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
