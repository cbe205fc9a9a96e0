"""`auto`: the index that fits the keys. A scan where it is as fast as a graph, else the graph if it finds enough.

Where a scan stops being the faster one is a constant, SCAN_BELOW. Whether a graph finds enough, or a
sketch that is scanned, is measured for every head: some training queries are held out, and the index must find what an
exact scan finds for them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import (
    MAX_KEYS,
    TRAIN_QUERIES,
    Alternatives,
    HeadShape,
    IndexMemory,
    KeyIndex,
    Training,
    TrainingNeeds,
    check_training,
)
from retrieval_attn.index.flat import FlatIndex, FlatOptions, search_exact
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.roargraph.graph import LIST_K, GraphOptions
from retrieval_attn.index.roargraph.index import RoarGraphIndex, graph_bytes
from retrieval_attn.index.sketch.index import SketchIndex, SketchOptions
from retrieval_attn.index.spec import IndexSpec, register

notes: weakref.WeakKeyDictionary[KeyIndex, str] = weakref.WeakKeyDictionary()
"""Why `auto` chose the kind of an index; empty for other indexes."""
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
    """Return the kinds that `AutoIndex.build` may choose, see `KindFacts`."""
    many = MAX_KEYS if tokens is None else tokens
    kinds: list[tuple[int, str, dict[str, Any]]] = [
        (max(EXACT_BELOW, SCAN_BELOW), "roargraph", {}),
        (SKETCH_FROM, "sketch", {}),
        (EXACT_BELOW, "flat", {"codes": "int8"}),
        (0, "flat", {}),
    ]
    return tuple((kind, own) for least, kind, own in kinds if many >= least)


def _memory(options: AutoOptions, head: HeadShape) -> IndexMemory:
    graph = graph_bytes(GraphOptions(), head, AutoIndex.training.queries(MAX_KEYS))
    others = IndexSpec.of("flat", {"codes": "int8"}).host_bytes(head) + IndexSpec.of("sketch").host_bytes(head)
    return IndexMemory((graph, *others))


@register(memory=_memory, possible_kinds=_kinds)
class AutoIndex(KeyIndex):
    """Not an index itself (and abstract): `build` returns a `flat`, `sketch` or `roargraph` one, `notes` has why."""

    kind: ClassVar[str] = "auto"
    Options = AutoOptions
    training: ClassVar[TrainingNeeds] = TrainingNeeds(TRAIN_QUERIES, LIST_K, max(SKETCH_FROM, SCAN_BELOW))

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: AutoOptions, training: Training) -> KeyIndex:
        """Build the kind that fits; without training queries every length is scanned. Raises ShapeError."""
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
        graph = RoarGraphIndex.build(keys, fmt, GraphOptions(), Training(held.others, others))
        recall, share = held.judge(graph)
        judged = f"held-out recall@{JUDGED_K} {recall:.2f}, {100 * share:.1f} % of {len(keys):,} keys scored"
        if recall < options.recall:
            return _scan(keys, fmt, held, f"the graph's {judged}, below {options.recall}")
        return _noted(graph, judged)


class _HeldOut:
    """Training queries that an index is judged by, and the others, which it trains on."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32]) -> None:
        """queries: (query heads, m, head_dim), m at least HELD_OUT."""
        self.places = np.linspace(0, queries.shape[1] - 1, HELD_OUT).astype(np.int64)
        self.others = np.delete(queries, self.places, axis=1)
        self._queries = np.ascontiguousarray(queries[:, self.places].reshape(-1, queries.shape[-1]))
        self._k = min(JUDGED_K, len(keys))
        self._exact = search_exact(np.ascontiguousarray(keys), self._queries, self._k, fmt).ids

    def judge(self, index: KeyIndex) -> tuple[float, float]:
        """Recall of the index for the held-out queries, and the share of keys that it scored."""
        found = index.search(self._queries, self._k)
        hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found.ids, self._exact, strict=True))
        return hits / self._exact.size, found.keys_scanned / (len(self._queries) * len(index))


def _scan(keys: npt.NDArray[Any], fmt: Format, held: _HeldOut, why: str) -> KeyIndex:
    """A sketch if it finds enough, else a scan of all elements' codes."""
    if len(keys) < SKETCH_FROM:
        return _flat(keys, fmt, why)
    sketch = SketchIndex.build(keys, fmt, SketchOptions(), Training(held.others))
    recall, _ = held.judge(sketch)
    if recall < MIN_SKETCH_RECALL:
        return _flat(keys, fmt, f"{why}; a sketch finds {recall:.2f} of the best {JUDGED_K}")
    return _noted(sketch, f"{why}; held-out recall@{JUDGED_K} {recall:.2f}")


def _flat(keys: npt.NDArray[Any], fmt: Format, why: str) -> KeyIndex:
    options = FlatOptions("none" if len(keys) < EXACT_BELOW else "int8")
    return _noted(FlatIndex.build(keys, fmt, options, Training()), why)


def _noted(index: KeyIndex, why: str) -> KeyIndex:
    notes[index] = f"{index.kind}: {why}"
    return index
