"""`auto`: the index that fits the keys. A scan where it is as fast as a graph, else the graph if it finds enough.

Where a scan stops being the faster one is measured once per machine (`crossover`). Whether a graph finds enough, or a
sketch that is scanned, is measured for every head: some training queries are held out, and the index must find what an
exact scan finds for them (DESIGN section 6: recall is measured at build time and the kind picked per head).
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
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.sketch.index import SketchIndex

EXACT_BELOW = 4096
"""So few keys are scanned as they are stored: codes would save nothing."""
SKETCH_FROM = 16384
"""Fewer keys are scanned by codes of all their elements on any machine: what a sketch or a graph saves is less than
what it costs to score more keys again, and to measure."""
SKETCH_LEAST = 0.95
"""Least recall of a sketch that is scanned in place of codes of all elements."""
HELD_OUT = 16
"""Queries of each query head that the graph is judged by; they are not trained on."""
JUDGED_K = 100


@register
class AutoIndex(KeyIndex):
    """Not an index itself (and abstract): `build` returns a `flat`, `sketch` or `roargraph` one, whose `note` says why.

    Options: recall, the least share of the exact best 100 that a graph must find for held-out queries (default
    .9); scan_below, fewer keys than this are scanned (default: measured on this machine, once).
    """

    kind: ClassVar[str] = "auto"
    trains: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"recall", "scan_below", "seed", "lists"})

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
        queries, lists = check_training(queries, options.pop("lists", None), fmt.dim_of(keys), len(keys))
        if queries is None or queries.shape[1] < 4 * HELD_OUT:
            return _flat(keys, fmt, f"{len(keys):,} keys and no queries to train on")
        if len(keys) < EXACT_BELOW:
            return _flat(keys, fmt, f"only {len(keys):,} keys")
        if below is None:
            below = crossover(fmt.dim_of(keys)) if len(keys) >= SKETCH_FROM else SKETCH_FROM
        if len(keys) < min(below, SKETCH_FROM):
            return _flat(keys, fmt, f"{len(keys):,} keys, and a scan is as fast as a graph up to {below:,} here")
        held = _HeldOut(keys, fmt, queries)
        if len(keys) < below:
            why = f"{len(keys):,} keys, and a scan is as fast as a graph up to {below:,} here"
            return _scan(keys, fmt, held, why)
        if lists is not None:
            options["lists"] = np.delete(lists, held.places, axis=1)
        graph = RoarGraphIndex.build(keys, fmt, held.others, **options)
        recall, share = held.judge(graph)
        told = f"held-out recall@{JUDGED_K} {recall:.2f}, {100 * share:.1f} % of {len(keys):,} keys scored"
        if recall < least:
            return _scan(keys, fmt, held, f"the graph's {told}, below {least}")
        graph.note = f"roargraph: {told}"
        return graph


class _HeldOut:
    """Training queries that an index is judged by, and the others, which it trains on."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32]) -> None:
        """queries: (query heads, m, head_dim), m at least HELD_OUT."""
        self.places = np.linspace(0, queries.shape[1] - 1, HELD_OUT).astype(np.int64)
        self.others = np.delete(queries, self.places, axis=1)
        self._asked = np.ascontiguousarray(queries[:, self.places].reshape(-1, queries.shape[-1]))
        self._k = min(JUDGED_K, len(keys))
        self._exact = search_exact(keys[None], self._asked[None], self._k, fmt).ids[0]

    def judge(self, index: KeyIndex) -> tuple[float, float]:
        """Recall of the index for the held-out queries, and the share of keys that it scored."""
        found = index.search(self._asked, self._k)
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found.ids, self._exact, strict=True))
        return hits / self._exact.size, found.keys_scanned / (len(self._asked) * len(index))


def _scan(keys: npt.NDArray[Any], fmt: Format, held: _HeldOut, why: str) -> KeyIndex:
    """A sketch if it finds enough, else a scan of all elements' codes."""
    if len(keys) < SKETCH_FROM:
        return _flat(keys, fmt, why)
    sketch = SketchIndex.build(keys, fmt, held.others)
    recall, _ = held.judge(sketch)
    if recall < SKETCH_LEAST:
        return _flat(keys, fmt, f"{why}; a sketch finds {recall:.2f} of the best {JUDGED_K}")
    sketch.note = f"sketch: {why}; held-out recall@{JUDGED_K} {recall:.2f}"
    return sketch


def _flat(keys: npt.NDArray[Any], fmt: Format, why: str) -> FlatIndex:
    index = FlatIndex.build(keys, fmt, None, codes="none" if len(keys) < EXACT_BELOW else "int8")
    index.note = f"flat: {why}"
    return index
