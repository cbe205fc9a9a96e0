"""PausedRead: reads a prompt into a cache in a thread of its own, cell by cell, as others grant it time.

A cell is a chunk of one layer, or the end of a layer's pass of several. Between two of them the thread waits at a gate:
nothing of a model is held there but the prompt's hidden states, so that steps of other rows run meanwhile. What is
computed is what `Context.read` computes.
"""

from __future__ import annotations

import functools
import logging
import threading
import traceback
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from retrieval_attn.answer_loop import AnswerLoop, PromptRows
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.rollback import Rollback
from retrieval_attn.engine.gate import Gate, GatedRead
from retrieval_attn.errors import InputDataError
from retrieval_attn.model.placement import devices
from retrieval_attn.runner.decode import PromptState
from retrieval_attn.runner.prefill import abandon

log = logging.getLogger(__name__)


def read_batch(loop: AnswerLoop, cache: RetrievalCache, ids: Items[int], scored: int | None = None) -> PromptRows:
    """What a read of `ids` after what a cache holds gives to a forward. Raises as `ChunkedPrefill`."""
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
    """Reads token ids into a cache, as many cells as it is granted. Use the cache when `done` without `error`.

    A read that is cancelled, or fails, leaves the cache as it was before. One that nobody refers to is cancelled.
    """

    def __init__(
        self, loop: AnswerLoop, cache: RetrievalCache, ids: Items[int], scored: int | None = None
    ) -> None:  # fmt: skip
        """Begin; no cell runs before `go`. cache: of one sequence, whose ids it knows, or empty. ids: what follows.
        scored: see `PromptRows`.

        Raises InputDataError for no ids or those of images, ContextLengthError, CacheMismatchError; here, before there
        is a thread.
        """
        batch = read_batch(loop, cache, ids, scored)
        chunks = -(-len(ids) // cache.config.prefill_chunk)
        ends = sum(isinstance(layer, CacheLayer) for layer in cache.layers) if chunks > 1 else 0
        cells = chunks * len(cache.layers) + ends
        self._gate, self._end = Gate(cells, settling(loop.model), chunks if ends else 0), _End()
        self.cache = cache
        self._thread = threading.Thread(
            target=_run, args=(loop, cache, batch, self._gate, self._end), name="retrieval_attn-read", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._gate.cancel)

    def result(self, timeout: float | None = None) -> PromptState:
        """Wait for the end, which must have been granted: the logits of the last token and what goes with them.

        Raises what went wrong, ReadCancelled, or TimeoutError.
        """
        if not self.wait_done(timeout):
            raise TimeoutError(f"the read has {self.cells_left} cells left, {self._gate.granted} of them granted")
        if self.error is not None:
            raise self.error
        assert self._end.state is not None
        return self._end.state

    def cancel(self) -> None:
        """End before the next cell, and wait for that: no thread is left, and the cache is as before. Safe at any time.

        A read that is done stays done.
        """
        self._gate.cancel()
        self._thread.join()

    @property
    def finishing(self) -> bool:
        """All cells are done, and nobody need wait: its thread brings to the host and indexes what is under way."""
        return self._gate.finishing and not self.done

    @property
    def error(self) -> BaseException | None:
        """What ended it early, ReadCancelled too."""
        return self._end.error


class _End:
    """How a read ended; its thread holds no reference to the read itself."""

    state: PromptState | None = None
    error: BaseException | None = None


def _run(loop: AnswerLoop, cache: RetrievalCache, batch: PromptRows, gate: Gate, end: _End) -> None:
    """The thread."""
    before: Rollback | None = None
    try:
        before = Rollback(cache) if cache.get_seq_length() else None
        cache.on_chunk, cache.on_end = gate.enter, functools.partial(gate.enter, end=True)
        try:
            state = loop.read_whole(cache, batch, read_done=gate.finish)
        finally:
            cache.on_chunk = cache.on_end = None
        cache.batch.note_ids(batch.ids)
    except BaseException as error:  # raised to who waits
        undo(cache, before)
        let_go(error)
        end.error = error
    else:
        end.state = state
    finally:
        gate.end()


def settling(model: PreTrainedModel) -> Callable[[], None] | None:
    """Waits until CUDA devices have computed what this thread gave them of a model; None: there are none.

    Cells are timed, and so is the step that comes next: by how long launching takes, far too many would be granted.
    """
    streams = [device for device in devices(model) if device.type == "cuda"]
    if not streams:
        return None

    def settle() -> None:
        for device in streams:
            torch.cuda.current_stream(device).synchronize()

    return settle


def undo(cache: RetrievalCache, before: Rollback | None) -> None:
    """The cache is as before the read; threads that copy or index for it have ended."""
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


def let_go(error: BaseException | None) -> None:
    """The frames that an error has come through hold activations; it keeps the lines."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
