"""PackedCache: one forward over new tokens of several rows, which go through the layers one row's behind another's.

The model's linear parts see the tokens of all rows (Yu et al. 2022, "Orca", section 4.2: selective batching); each
row's layers take and attend to its own, as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.prefill_batch import Lanes, PrefillTokens, RowRead, read_together
from retrieval_attn.attention.retrieval import RetrievalLayer, reads_plainly
from retrieval_attn.engine.gate import ReadCancelled
from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.model.hooks import KVView, MaskSpec
from retrieval_attn.runner.rows import RowsCache, RowsLayer

__all__ = ["PackedCache"]


class PackedCache(RowsCache):
    """`past_key_values` of a forward of new tokens of several rows, one row's behind another's: input_ids (1, tokens).

    spans: where each row's tokens lie among them. places: their positions.
    """

    def __init__(
        self, caches: Items[RetrievalCache], lengths: Items[int], on_cell: Callable[[], object] | None = None
    ) -> None:
        """lengths: new tokens of each. on_cell: called before each layer's attention; rows may be left out there
        (`leave_out`). Raises UnsupportedModelError, the layer named.
        """
        self.on_cell = on_cell
        self.lanes = Lanes()
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

    def leave_out(self, row: int) -> None:
        """This row goes no further; unlike one that fails, its cache is not broken."""
        self.errors[row] = ReadCancelled()

    def new_tokens(self, row: int) -> int:
        """How many a row has in this forward."""
        return len(self.places[row])


class PackedLayer(RowsLayer):
    """One layer of all rows: takes what is new; full-attention layers read it together, others row by row."""

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
        if self._rows.on_cell is not None:
            self._rows.on_cell()
        key, value = self._take_pending(module)
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float32, device=query.device)
        together: list[RowRead] = []
        for row, (layer, span) in enumerate(zip(self._layers, self._rows.spans, strict=True)):
            if row in self._rows.errors:
                continue
            own = self._rows.spec_of(row, layer.columns, spec)
            if isinstance(layer, RetrievalLayer) and reads_plainly(layer, self._rows.new_tokens(row)):
                together.append(RowRead(row, layer, own, span))
                continue
            try:
                layer.update(key[:, :, span], value[:, :, span])
                out[:, :, span] = layer.attend(
                    module, query[:, :, span], own, scale=scale, softcap=softcap, sink_logits=sink_logits
                )
            except Exception as error:
                self._rows.fail(row, error)
        if together:
            new, scoring = PrefillTokens(query, key, value), Scoring(scale, softcap)
            errors = read_together(together, module, new, scoring, sink_logits, self._rows.lanes, out)
            for row, problem in errors.items():
                self._rows.fail(row, problem)
        return out
