"""The share of exact attention's weight that sinks, window and retrieved keys have, for some heads of each layer."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch

from retrieval_attn import RetrievalCache
from retrieval_attn.testing import AttentionRecord, RetrievalLayer, exact_lse, stacked, to_queries, unstacked
from retrieval_attn_eval.bench.fidelity.head_error import observe

__all__ = ["CapturedMass"]


class CapturedMass:
    """Sums the captured share over the eager steps of a cache. Reads all keys of the measured heads."""

    def __init__(self, cache: RetrievalCache, heads: int) -> None:
        """Measure `heads` query heads of each layer per step, in turn."""
        self._heads = heads
        self._sums: defaultdict[int, float] = defaultdict(float)  # by number of the layer
        self._counts: defaultdict[int, int] = defaultdict(int)
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, RetrievalLayer):
                observe(layer, partial(self._add, number))

    def mean(self) -> float | None:
        """Return the mean share over heads, layers and tokens; None if nothing was measured."""
        count = sum(self._counts.values())
        return sum(self._sums.values()) / count if count else None

    def _add(self, number: int, record: AttentionRecord) -> None:
        if record.parts is None or record.parts.retrieved is None:
            return
        static, retrieved = record.parts.static.lse, record.parts.retrieved.lse
        if record.parts.estimated is not None:
            retrieved = retrieved + torch.log1p(-record.parts.estimated)
        static, retrieved = static.cpu(), retrieved.cpu()
        q_heads, first = record.query.shape[1], self._counts[number]
        chosen = [(first + i) % q_heads for i in range(min(self._heads, q_heads))]
        on_host = torch.from_numpy(to_queries(record.query))
        for one in record.parts.candidates:
            queries = stacked(on_host, one.rows).contiguous().numpy()
            exact = exact_lse(
                one.host, queries, one.start, one.stop, chosen, scale=record.scale, softcap=record.softcap
            )
            middle = unstacked(torch.from_numpy(exact), len(one.rows))
            near = static[one.rows][:, chosen]
            share = torch.logaddexp(near, retrieved[one.rows][:, chosen]) - torch.logaddexp(near, middle)
            self._sums[number] += float(share.exp().sum())
            self._counts[number] += share.numel()
