"""`auto`: the index that fits the keys. A scan where it is as fast as a graph, else the graph if it finds enough.

Where a scan stops being the faster one is measured once per machine (`crossover`). Whether the graph finds
enough is measured for every head: some training queries are held out, and the graph must find what a scan
finds for them (DESIGN section 6: recall is measured at build time and the kind picked per head).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import KeyIndex, check_training, register
from retrieval_attn.index.crossover import crossover
from retrieval_attn.index.flat import FlatIndex, search_exact
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.roargraph import RoarGraphIndex

EXACT_BELOW = 4096
"""So few keys are scanned as they are stored: codes would save nothing."""
GRAPH_FROM = 16384
"""Fewer keys are scanned on any machine: measuring where a graph wins would cost more than it could give."""
HELD_OUT = 16
"""Queries of each query head that the graph is judged by; they are not trained on."""
JUDGED_K = 100


@register
class AutoIndex(KeyIndex):
    """Not an index itself (and abstract): `build` returns a `flat` or a `roargraph` one, whose `note` says why.

    Options: recall, the least share of the exact best 100 that a graph must find for held-out queries (default
    .9); scan_below, fewer keys than this are scanned (default: measured on this machine, once).
    """

    kind: ClassVar[str] = "auto"
    trains: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"recall", "scan_below", "seed"})

    @classmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> KeyIndex:
        """See KeyIndex.build. Without training queries every length is scanned. Raises ConfigError, ShapeError."""
        least = options.pop("recall", 0.9)
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise ConfigError(f"recall={least!r} must be a number from 0 to 1")
        below = options.pop("scan_below", None)
        if below is not None and (isinstance(below, bool) or not isinstance(below, int) or below < 0):
            raise ConfigError(f"scan_below={below!r} must be a whole number >= 0, or None to measure it")
        check_rows("keys", keys, fmt, 2)
        queries, _ = check_training(queries, None, fmt.dim_of(keys), len(keys))
        if queries is None or queries.shape[1] < 4 * HELD_OUT:
            return _scan(keys, fmt, f"flat: {len(keys):,} keys and no queries to train on")
        if len(keys) < EXACT_BELOW:
            return _scan(keys, fmt, f"flat: only {len(keys):,} keys")
        if below is None:
            below = crossover(fmt.dim_of(keys)) if len(keys) >= GRAPH_FROM else GRAPH_FROM
        if len(keys) < below:
            return _scan(keys, fmt, f"flat: {len(keys):,} keys, and a scan is as fast as a graph up to {below:,} here")
        held = np.linspace(0, queries.shape[1] - 1, HELD_OUT).astype(np.int64)
        graph = RoarGraphIndex.build(keys, fmt, np.delete(queries, held, axis=1), **options)
        recall, share = _judge(graph, keys, fmt, queries[:, held])
        told = f"held-out recall@{JUDGED_K} {recall:.2f}, {100 * share:.1f} % of {len(keys):,} keys scored"
        if recall < least:
            return _scan(keys, fmt, f"flat: the graph's {told}, below {least}")
        graph.note = f"roargraph: {told}"
        return graph


def _scan(keys: npt.NDArray[Any], fmt: Format, note: str) -> FlatIndex:
    index = FlatIndex.build(keys, fmt, None, codes="none" if len(keys) < EXACT_BELOW else "int8")
    index.note = note
    return index


def _judge(
    graph: RoarGraphIndex, keys: npt.NDArray[Any], fmt: Format, held: npt.NDArray[np.float32]
) -> tuple[float, float]:
    """Recall of the graph for held-out queries (query heads, m, head_dim), and the share of keys that it scored."""
    flat = np.ascontiguousarray(held.reshape(-1, held.shape[-1]))
    k = min(JUDGED_K, len(keys))
    exact = search_exact(keys[None], flat[None], k, fmt)
    found = graph.search(flat, k)
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found.ids, exact.ids[0], strict=True))
    return hits / (k * len(flat)), found.keys_scanned / (len(flat) * len(keys))
