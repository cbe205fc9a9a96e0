"""Short prompts of several rows, read side by side in one forward: `ShortRead`, `read_together`.

The model's linear parts see the tokens of all rows one behind the other (Yu et al. 2022, "Orca", section 4.2: selective
batching); each row's layers take and attend to its own, as if it were alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.reading import PausedRead, ReadCancelled, read_batch, undo
from retrieval_attn.batch.rows import RowsCache, RowsLayer, position_groups
from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.layer import CacheLayer
from retrieval_attn.cache.past import Past, attend_together
from retrieval_attn.cache.retrieval import RetrievalLayer, begin_past
from retrieval_attn.cache.rollback import Rollback
from retrieval_attn.engine.attention import using_retrieval
from retrieval_attn.engine.decode import PromptState
from retrieval_attn.engine.prefill import finish_prefill
from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError
from retrieval_attn.model.hooks import KVView, MaskSpec

__all__ = ["SHORT_TOKENS", "ShortRead", "packable", "read_together"]

log = logging.getLogger(__name__)

SHORT_TOKENS = 512
"""A longer part of a prompt fills a forward by itself."""


def packable(cache: RetrievalCache) -> bool:
    """Whether rows with such a cache can be read side by side: none of its layers keeps a state."""
    return all(isinstance(layer, CacheLayer) for layer in cache.layers)


class ShortRead:
    """A short read that waits to be done with others; to who drives it, a `PausedRead` without a thread.

    It is `ready` once all of its cells are granted. One that could not be done with others goes on as a PausedRead.
    """

    def __init__(self, loop: AnswerLoop, cache: RetrievalCache, ids: Items[int]) -> None:
        """As `PausedRead`, and raises as that does."""
        self.batch = read_batch(loop, cache, ids)
        self.cache, self.ids, self.loop = cache, ids, loop
        self._granted, self._total = 0, len(cache.layers)
        self._state: PromptState | None = None
        self._error: BaseException | None = None
        self._alone: PausedRead | None = None

    @property
    def ready(self) -> bool:
        """It `waits`, and all of it is granted."""
        return self.waits and self._granted >= self._total

    @property
    def waits(self) -> bool:
        """Nothing is done, and it can be done with others."""
        return not self.done and self._alone is None

    @property
    def done(self) -> bool:
        """All is read, or there is an `error`."""
        if self._alone is not None:
            return self._alone.done
        return self._state is not None or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """What ended it early, ReadCancelled too."""
        return self._error if self._alone is None else self._alone.error

    @property
    def cells_done(self) -> int:
        """All or none, as long as it is not read alone."""
        if self._alone is not None:
            return self._alone.cells_done
        return self._total if self._state is not None else 0

    def go(self, cells: int) -> None:
        """See `PausedRead.go`."""
        self._granted += cells
        if self._alone is not None:
            self._alone.go(cells)

    def wait(self, timeout: float | None = None) -> bool:
        """See `PausedRead.wait`."""
        return True if self._alone is None else self._alone.wait(timeout)

    def result(self, timeout: float | None = None) -> PromptState:
        """See `PausedRead.result`."""
        if self._alone is not None:
            return self._alone.result(timeout)
        if self._error is not None:
            raise self._error
        if self._state is None:
            raise TimeoutError(f"the read has {self._total} cells left, {self._granted} of them granted")
        return self._state

    def cancel(self) -> None:
        """See `PausedRead.cancel`."""
        if self._alone is not None:
            self._alone.cancel()
        elif not self.done:
            self._error = ReadCancelled()

    def read(self, logits: Tensor) -> None:
        """It was read; logits (vocabulary,) float32 of its next token."""
        ids = self.batch.ids
        self.cache.batch.note_ids(ids)
        position = torch.tensor([ids.shape[1] - 1], device=ids.device)
        self._state = PromptState(ids, logits[None], position)

    def fail(self, error: BaseException) -> None:
        """It alone went wrong."""
        self._error = error

    def go_alone(self) -> None:
        """Begin anew as a PausedRead, with what was granted; the cache is as it was."""
        self._alone = PausedRead(self.loop, self.cache, self.ids)
        if self._granted:  # who rode along may have had nothing yet
            self._alone.go(self._granted)


@torch.no_grad()
def read_together(reads: Items[ShortRead]) -> None:
    """Do these reads of one model, by one forward where its positions allow it. A row that fails does so by itself.

    Where a forward of several fails as a whole, out of memory for one, each is read alone.
    """
    starts = torch.tensor([read.cache.get_seq_length() for read in reads])
    lasts = starts + torch.tensor([len(read.ids) for read in reads]) - 1
    for rows in position_groups(reads[0].loop.model, lasts):
        _read([reads[row] for row in rows])


def _read(reads: Items[ShortRead]) -> None:
    before = [Rollback(read.cache) if read.cache.get_seq_length() else None for read in reads]
    packed = PackedCache([read.cache for read in reads], [len(read.ids) for read in reads])
    try:
        logits = _forward(reads[0].loop.model, packed, reads)
        for read in reads:
            if read.cache.batch.broken is None:
                finish_prefill(read.cache)
    except Exception as error:
        log.info("%d prompts are read one by one: %s: %s", len(reads), type(error).__name__, error)
        for read, mark in zip(reads, before, strict=True):
            undo(read.cache, mark)
            read.go_alone()
        return
    finally:
        packed.finish()
    for row, (read, found) in enumerate(zip(reads, logits, strict=True)):
        if row in packed.errors:
            read.fail(packed.errors[row])
        else:
            read.read(found)


def _forward(model: Any, packed: PackedCache, reads: Items[ShortRead]) -> Tensor:
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
    with using_retrieval(model, reads[0].cache.config.prefill_chunk):
        logits: Tensor = model(**arguments, return_dict=True).logits[0]
    return (logits if len(logits) == len(lasts) else logits[lasts]).float()


class PackedCache(RowsCache):
    """`past_key_values` of a forward of new tokens of several rows, one row's behind another's: input_ids (1, tokens).

    spans: where each row's tokens lie among them. places: their positions.
    """

    def __init__(self, caches: Items[RetrievalCache], lengths: Items[int]) -> None:
        """lengths: new tokens of each. Raises UnsupportedModelError, the layer named."""
        self.spans = [slice(*span) for span in pairwise(accumulate(lengths, initial=0))]
        starts = [cache.get_seq_length() for cache in caches]
        self.places = [range(start, start + count) for start, count in zip(starts, lengths, strict=True)]
        super().__init__(caches)

    def _layer(self, number: int) -> Any:
        layers: list[Any] = [cache.layers[number] for cache in self.caches]
        if not all(isinstance(layer, CacheLayer) for layer in layers):
            raise UnsupportedModelError(
                f"Layer {number} keeps a state; prompts of such models are not read side by side. Read each alone."
            )
        return PackedLayer(self, number, layers)

    def new_tokens(self, row: int) -> int:
        """How many a row has in this forward."""
        return len(self.places[row])


class PackedLayer(RowsLayer):
    """One layer of all rows: takes what is new, attends row by row."""

    packs = True
    _rows: PackedCache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note the new keys and values (1, kv_heads, tokens, dim) and return handles. Raises CacheMismatchError."""
        tokens = self._rows.spans[-1].stop
        if key_states.shape[0] != 1 or key_states.shape[2] != tokens:
            raise CacheMismatchError(
                f"A forward with a PackedCache is of {tokens} tokens in one row, got keys {tuple(key_states.shape)}."
            )
        self._pending = (key_states, value_states)
        return KVView(self, key_states), KVView(self, value_states)

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
        key, value = self._take_pending(module)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float32, device=query.device)
        try:
            self._attend_to_pasts(query, value.shape[3], scale, softcap)
            for row, (layer, span) in enumerate(zip(self._layers, self._rows.spans, strict=True)):
                if row in self._rows.errors:
                    continue
                try:
                    layer.update(key[:, :, span], value[:, :, span])
                    own = self._rows.spec_of(row, layer.columns, spec)
                    out[:, :, span] = layer.attend(
                        module, query[:, :, span], own, scale=scale, softcap=softcap, sink_logits=sink_logits
                    )
                except Exception as error:
                    self._rows.fail(row, error)
        finally:
            for layer in self._layers:
                if isinstance(layer, RetrievalLayer):
                    layer.past = None  # it was for this query
        return out

    def _attend_to_pasts(self, query: Tensor, value_dim: int, scale: float, softcap: float | None) -> None:
        """Questions over one text attend to it together, before each attends to itself."""
        asked: list[tuple[Past, Tensor]] = []
        for row, (layer, span) in enumerate(zip(self._layers, self._rows.spans, strict=True)):
            if row not in self._rows.errors and isinstance(layer, RetrievalLayer):
                try:
                    past = begin_past(layer, self._rows.new_tokens(row))
                except Exception as error:
                    self._rows.fail(row, error)
                    continue
                if past is not None:
                    asked.append((past, query[:, :, span]))
        attend_together([past for past, _ in asked], [own for _, own in asked], value_dim, scale, softcap)
