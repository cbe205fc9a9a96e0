"""The sample of prompt queries that indexes train on, kept while a layer reads.

Queries come after RoPE, at their own positions; decoding asks from the end of the context on. So each sampled
query is moved there (DESIGN section 6: queries left where they were cost recall), to a place of its own among
the positions where decoding will happen: all of them at one position would train positional heads for the
first few answered tokens only.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.index.synthetic import train_positions
from retrieval_attn.rotation import Rotation

log = logging.getLogger(__name__)

SPAN = 1024
"""Positions after the end of the context that the sample is spread over: a question and its answer."""


class TrainingQueries:
    """Queries of up to `count` of `total` new columns, for every row and query head of one layer."""

    def __init__(self, total: int, count: int, seed: int = 0) -> None:
        self._columns = train_positions(total, count, seed)
        rng = np.random.default_rng(seed)
        # evenly in the logarithm: recall at 2 % of the keys scored was .817, against .778 for evenly in the offset
        self._offsets = np.exp(rng.uniform(0, np.log(SPAN), len(self._columns))).astype(np.int64)
        self._total = total
        self._taken: list[Tensor] = []

    def take(self, query: Tensor, start: int) -> None:
        """Keep the sampled ones of query (batch, q_heads, new, head_dim), the columns from `start` on."""
        low, high = np.searchsorted(self._columns, (start, start + query.shape[2]))
        if low < high:
            rows = torch.from_numpy(self._columns[low:high] - start).to(query.device)
            self._taken.append(query.detach()[:, :, rows].float())

    def finish(
        self, model: nn.Module | None, module: nn.Module, row: int, valid: Tensor | None
    ) -> np.ndarray[Any, Any]:
        """The sample of one row, moved to where decoding happens: (q_heads, m, head_dim) float32.

        valid: (columns,) CPU bool, real tokens of the row, or None. A model without rotary embedding, or with one
        that cannot be undone, gives its queries as they are. `take` must have seen all columns.
        """
        columns = torch.from_numpy(self._columns)
        queries = torch.cat([piece[row] for piece in self._taken], dim=1)
        offsets = torch.from_numpy(self._offsets)
        if valid is not None:
            real = valid[columns]
            columns, offsets, queries = columns[real], offsets[real], queries[:, real.to(queries.device)]
        moved = self._moved(model, module, queries, columns.to(queries.device), offsets.to(queries.device))
        return np.ascontiguousarray(moved.cpu().numpy())

    def _moved(
        self, model: nn.Module | None, module: nn.Module, queries: Tensor, columns: Tensor, offsets: Tensor
    ) -> Tensor:
        if model is None:
            return queries
        try:
            # rotations add: only the distance counts, so padded columns may stand for positions
            return Rotation.of(model, module).move(queries, columns, self._total + offsets)
        except UnsupportedModelError as error:
            _say_unmoved(type(module).__name__, str(error))
            return queries


@functools.cache
def _say_unmoved(attention: str, reason: str) -> None:
    """Once per kind of layer and reason: the index still works, with less recall for its size."""
    log.warning("%s: indexes train on queries at their own positions: %s", attention, reason)
