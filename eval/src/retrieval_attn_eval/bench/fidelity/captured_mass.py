"""The share of exact attention's weight that sinks, window and retrieved keys have, for some heads of each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrieval_attn import RetrievalCache
from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import (
    AttentionRecord,
    RetrievalLayer,
    attend_range_heads,
    kernel_threads,
    merge_partials,
    stacked,
    to_queries,
    unstacked,
)
from retrieval_attn_eval.bench.fidelity.head_error import observe

__all__ = ["CapturedMass", "exact_lse"]


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


def exact_lse(
    path: Any,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    heads: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
) -> npt.NDArray[np.float32]:
    """Log-sum-exp of all scores over tokens [start, stop) of a path: (heads, n) float32, of the named query heads.

    queries (q_heads, n, head_dim) float32. Reads every key of those heads. With the lse of retrieved attention,
    exp(lse - exact_lse) is the share of full attention's weight that the retrieved keys captured. An empty range gives
    -inf. Raises ShapeError, ConfigError.
    """
    group = queries.shape[0] // path.num_kv_heads
    if wrong := [head for head in heads if not 0 <= head < queries.shape[0]]:
        raise ConfigError(f"heads {wrong} must lie in 0 .. {queries.shape[0] - 1}")
    parts, found = path.parts(start, stop), np.full((len(heads), queries.shape[1]), -np.inf, np.float32)
    with kernel_threads(path.threads):
        for row, head in enumerate(heads if parts else ()):
            own, keys_of = np.ascontiguousarray(queries[head : head + 1]), slice(head // group, head // group + 1)
            partials = [
                # keys in place of values, which do not change the lse
                attend_range_heads(own, s.keys[keys_of], s.keys[keys_of], low, high, path.fmt, scale, softcap)
                for s, low, high, _ in parts
            ]
            found[row] = merge_partials(partials)[1][0]
    return found
