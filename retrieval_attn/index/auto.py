"""`auto`: the index that fits the keys. A scan where it is as fast as a graph, else the graph if it finds enough.

Where a scan stops being the faster one is a constant, SCAN_BELOW. Whether a graph finds enough, or a
sketch that is scanned, is measured for every head: some training queries are held out, and the index must find what an
exact scan finds for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import MAX_KEYS, Alternatives, HeadShape, HostBytes, KeyIndex, Training, check_training
from retrieval_attn.index.flat import FlatIndex, FlatOptions, search_exact
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.roargraph.options import LIST_K, GraphOptions
from retrieval_attn.index.sketch.index import SketchIndex, SketchOptions
from retrieval_attn.index.spec import register

EXACT_BELOW = 4096
"""So few keys are scanned as they are stored: codes would save nothing."""
SKETCH_FROM = 16384
"""Fewer keys are scanned by codes of all their elements on any machine: what a sketch or a graph saves is less than
what it costs to score more keys again, and to measure."""
SCAN_BELOW = 262_144
"""Fewer keys are scanned: the scan of a sketch is faster than a graph. Both were timed on the machines at hand: the
times were equal at 94,477 to 298,518 keys on two cores, and at some 281,000 on the 16 cores of a machine with an H100
(docs/archive/log.md). A scan loses no keys, so the constant lies where a graph is clearly faster."""
MIN_SKETCH_RECALL = 0.95
"""Least recall of a sketch that is scanned in place of codes of all elements."""
HELD_OUT = 16
"""Queries of each query head that the graph is judged by; they are not trained on."""
JUDGED_K = 100
CODED = FlatOptions(codes="int8")


@dataclass(frozen=True)
class AutoOptions:
    """recall: the least share of the exact best 100 that a graph must find for held-out queries.

    Raises ConfigError for other values.
    """

    recall: float = 0.9

    def __post_init__(self) -> None:
        least = self.recall
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise ConfigError(f"recall={least!r} must be a number from 0 to 1")


def _kinds(options: AutoOptions, tokens: int | None) -> Alternatives:
    """See KeyIndex.possible_kinds: what `AutoIndex.make` may choose."""
    many = MAX_KEYS if tokens is None else tokens
    kinds: list[tuple[int, str, dict[str, Any]]] = [
        (max(EXACT_BELOW, SCAN_BELOW), "roargraph", {}),
        (SKETCH_FROM, "sketch", {}),
        (EXACT_BELOW, "flat", {"codes": "int8"}),
        (0, "flat", {}),
    ]
    return tuple((kind, own) for least, kind, own in kinds if many >= least)


@register
class AutoIndex(KeyIndex):
    """Not an index itself (and abstract): `make` returns a `flat`, `sketch` or `roargraph` one; its `note` says why."""

    kind: ClassVar[str] = "auto"
    trains: ClassVar[bool] = True
    Options = AutoOptions
    possible_kinds: ClassVar[Callable[[Any, int | None], Alternatives]] = staticmethod(_kinds)

    @classmethod
    def list_length(cls, options: AutoOptions, num_keys: int) -> int:
        """See KeyIndex.list_length: those of a graph, where one may be made."""
        return LIST_K if num_keys >= max(SKETCH_FROM, SCAN_BELOW) else 0

    @classmethod
    def host_bytes(cls, options: AutoOptions, head: HeadShape) -> tuple[HostBytes, ...]:
        graph = RoarGraphIndex.bytes_for(GraphOptions(), head, cls.training_queries(MAX_KEYS))
        return (graph,) + FlatIndex.host_bytes(CODED, head) + SketchIndex.host_bytes(SketchOptions(), head)

    @classmethod
    def prepare(cls, options: AutoOptions, fmt: Format) -> bool:
        """See KeyIndex.prepare: nothing but the kinds of `possible_kinds`."""
        return True

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: AutoOptions, training: Training) -> KeyIndex:
        """See KeyIndex.make. Without training queries every length is scanned. Raises ShapeError."""
        check_rows("keys", keys, fmt, 2)
        queries, lists = check_training(training.queries, training.lists, fmt.dim_of(keys), len(keys))
        if queries is None or queries.shape[1] < 4 * HELD_OUT:
            return _flat(keys, fmt, f"{len(keys):,} keys and no queries to train on")
        if len(keys) < EXACT_BELOW:
            return _flat(keys, fmt, f"only {len(keys):,} keys")
        why = f"{len(keys):,} keys, and a scan is as fast as a graph up to {SCAN_BELOW:,}"
        if len(keys) < min(SCAN_BELOW, SKETCH_FROM):
            return _flat(keys, fmt, why)
        held = _HeldOut(keys, fmt, queries)
        if len(keys) < SCAN_BELOW:
            return _scan(keys, fmt, held, why)
        others = None if lists is None else np.delete(lists, held.places, axis=1)
        graph = RoarGraphIndex.build(keys, fmt, held.others, lists=others)
        recall, share = held.judge(graph)
        judged = f"held-out recall@{JUDGED_K} {recall:.2f}, {100 * share:.1f} % of {len(keys):,} keys scored"
        if recall < options.recall:
            return _scan(keys, fmt, held, f"the graph's {judged}, below {options.recall}")
        graph.note = f"roargraph: {judged}"
        return graph


class _HeldOut:
    """Training queries that an index is judged by, and the others, which it trains on."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32]) -> None:
        """queries: (query heads, m, head_dim), m at least HELD_OUT."""
        self.places = np.linspace(0, queries.shape[1] - 1, HELD_OUT).astype(np.int64)
        self.others = np.delete(queries, self.places, axis=1)
        self._queries = np.ascontiguousarray(queries[:, self.places].reshape(-1, queries.shape[-1]))
        self._k = min(JUDGED_K, len(keys))
        self._exact = search_exact(keys[None], self._queries[None], self._k, fmt).ids[0]

    def judge(self, index: KeyIndex) -> tuple[float, float]:
        """Recall of the index for the held-out queries, and the share of keys that it scored."""
        found = index.search(self._queries, self._k)
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found.ids, self._exact, strict=True))
        return hits / self._exact.size, found.keys_scanned / (len(self._queries) * len(index))


def _scan(keys: npt.NDArray[Any], fmt: Format, held: _HeldOut, why: str) -> KeyIndex:
    """A sketch if it finds enough, else a scan of all elements' codes."""
    if len(keys) < SKETCH_FROM:
        return _flat(keys, fmt, why)
    sketch = SketchIndex.build(keys, fmt, held.others)
    recall, _ = held.judge(sketch)
    if recall < MIN_SKETCH_RECALL:
        return _flat(keys, fmt, f"{why}; a sketch finds {recall:.2f} of the best {JUDGED_K}")
    sketch.note = f"sketch: {why}; held-out recall@{JUDGED_K} {recall:.2f}"
    return sketch


def _flat(keys: npt.NDArray[Any], fmt: Format, why: str) -> FlatIndex:
    index = FlatIndex.build(keys, fmt, None, codes="none" if len(keys) < EXACT_BELOW else "int8")
    index.note = f"flat: {why}"
    return index
