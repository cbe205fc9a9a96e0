"""Measure one index on one head: what it finds (against float64 arithmetic), what it reads, how long it takes.

Answers are checked before anything is timed. A "search" is what one decoded token asks of one key-value head: one
query per query head of the group, in one call. Times are per query head. Warm: the same search again; cold: after
other data went through the caches, as between two tokens. Beside the wall clock stands the calling thread's CPU time:
on one thread it is the same on a quiet machine, and other processes do not count in it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.index import KeyIndex, SearchResult
from retrieval_attn.testing import kernel_threads
from retrieval_attn_eval.bench.heads import Head
from retrieval_attn_eval.bench.variants import Variant

FLUSH_BYTES = 96 << 20
"""Read between two cold searches: more than the last-level caches of most machines."""
WARM_REPEATS = 3


class WrongAnswer(RetrievalAttentionError):
    """An index returned something that no index may return; no times are shown."""


@dataclass
class Point:
    """One setting of one variant on all heads of one length. Lists have one entry per query head unless said.

    recall: share of the exact best k found; mass: share of the exact best k's attention weight that was found;
    captured: share of the attention over all indexed keys. scanned: (query, key) pairs scored, per query and key.
    key_bytes: bytes of keys read per query. warm_us, cold_us: microseconds per query head, one entry per search;
    warm_cpu_us, cold_cpu_us: the same in CPU time of the calling thread.
    """

    variant: str
    value: int | None
    keys: int
    recall: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    scanned: list[float] = field(default_factory=list)
    key_bytes: list[float] = field(default_factory=list)
    warm_us: list[float] = field(default_factory=list)
    cold_us: list[float] = field(default_factory=list)
    warm_cpu_us: list[float] = field(default_factory=list)
    cold_cpu_us: list[float] = field(default_factory=list)
    build_seconds: list[float] = field(default_factory=list)
    index_bytes: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.variant if self.value is None else f"{self.variant} {self.value}"


def points_of(variant: Variant, keys: int) -> dict[int | None, Point]:
    """An empty point for every value of the variant's knob."""
    return {value: Point(variant.name, value, keys) for value in variant.values or (None,)}


class Oracle:
    """Exact answers of one head for its decode queries, in float64."""

    def __init__(self, head: Head, k: int, queries: npt.NDArray[np.float32] | None = None) -> None:
        """queries: (group, d, head_dim) instead of the head's decode queries."""
        self.head = head
        self.queries = head.decode if queries is None else queries
        self.k = min(k, len(head.keys))

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """(group, d, n) inner products."""
        keys = self.head.plain_keys().astype(np.float64)
        found: npt.NDArray[np.float64] = self.queries.astype(np.float64) @ keys.T
        return found

    @cached_property
    def best(self) -> npt.NDArray[np.int64]:
        """(group, d, k) ids, best first."""
        some = np.argpartition(-self.scores, self.k - 1, axis=-1)[..., : self.k]
        order = np.argsort(-np.take_along_axis(self.scores, some, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(some, order, axis=-1)

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """(group, d, n) attention over the indexed keys, each row summing to 1."""
        logits = self.head.scale * self.scores
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found: npt.NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
        return found

    def check(self, found: SearchResult, what: str) -> None:
        """Raise WrongAnswer unless ids are distinct, best first, and scores are those of the keys they name."""
        ids = found.ids.reshape(*self.queries.shape[:2], -1).astype(np.int64)
        scores = found.scores.reshape(ids.shape)
        if ids.shape[2] != self.k or ids.min() < 0 or ids.max() >= self.scores.shape[2]:
            raise WrongAnswer(f"{what}: needed {self.k} ids of {self.scores.shape[2]} keys, got {ids.shape}")
        if (np.diff(np.sort(ids, axis=2), axis=2) == 0).any():
            raise WrongAnswer(f"{what}: a key was returned twice for one query")
        if (np.diff(scores, axis=2) > 0).any():
            raise WrongAnswer(f"{what}: keys are not ordered best first")
        right = np.take_along_axis(self.scores, ids, axis=2)
        norms = np.linalg.norm(self.queries.astype(np.float64), axis=2)[..., None]
        sizes = np.linalg.norm(self.head.plain_keys().astype(np.float64), axis=1)[ids]
        error = np.abs(scores - right) / np.maximum(norms * sizes, 1e-30)
        if not error.max() <= 1e-5:
            raise WrongAnswer(f"{what}: scores differ from the keys' inner products by {error.max():.1e} of |q||k|")

    def judge(self, found: SearchResult, point: Point) -> None:
        """Add recall, mass and captured of every query head to `point`, means over the decoded tokens."""
        ids = found.ids.reshape(*self.queries.shape[:2], -1)
        exact_mass = np.take_along_axis(self.weights, self.best, axis=2).sum(axis=2)
        for head in range(len(ids)):
            hits, mass, captured = [], [], []
            for token, row in enumerate(ids[head]):
                common = np.intersect1d(row, self.best[head, token])
                hits.append(len(common) / self.k)
                mass.append(self.weights[head, token, common].sum() / exact_mass[head, token])
                captured.append(self.weights[head, token, row].sum())
            point.recall.append(float(np.mean(hits)))
            point.mass.append(float(np.mean(mass)))
            point.captured.append(float(np.mean(captured)))


def measure_head(
    variant: Variant,
    oracle: Oracle,
    points: dict[int | None, Point],
    *,
    lists: npt.NDArray[np.int32] | None,
    tokens: int,
    threads: int,
) -> None:
    """Build the variant on the oracle's head and add what it does to points[value], one for each knob value.

    tokens: decoded tokens that are timed (0: none). Raises WrongAnswer before anything of this head is timed.
    """
    head = oracle.head
    started = time.perf_counter()
    with kernel_threads(threads):
        index = variant.build(head, lists)
        built = time.perf_counter() - started
        for value, point in points.items():
            if value is not None:
                variant.turn(index, value)
            _judge(variant, index, oracle, point)
            point.build_seconds.append(built)
            point.index_bytes.append(index.memory.host)
            if tokens:
                _time(index, oracle, point, tokens)


def _judge(variant: Variant, index: KeyIndex, oracle: Oracle, point: Point) -> None:
    head, group = oracle.head, oracle.queries.shape[0]
    found = index.search(np.ascontiguousarray(oracle.queries.reshape(-1, oracle.queries.shape[2])), oracle.k)
    oracle.check(found, f"{point.label} on {head.name}")
    before = len(point.recall)
    oracle.judge(found, point)
    if variant.name == "flat" and min(point.recall[before:]) < 0.999:
        raise WrongAnswer(f"flat on {head.name} found {min(point.recall[before:]):.4f} of the exact best keys")
    pairs = found.keys_scanned / max(1, oracle.queries.shape[0] * oracle.queries.shape[1])
    known = variant.kind != "hnswlib"
    point.scanned += [pairs / len(head.keys) if known else float("nan")] * group
    point.key_bytes += [pairs * variant.bytes_per_key(head) if known else float("nan")] * group


def _time(index: KeyIndex, oracle: Oracle, point: Point, tokens: int) -> None:
    group, decoded, _ = oracle.queries.shape
    for token in np.linspace(0, decoded - 1, min(tokens, decoded)).astype(int):
        queries = np.ascontiguousarray(oracle.queries[:, token])
        _flush()
        wall, cpu = [], []
        for _ in range(1 + WARM_REPEATS):
            started, worked = time.perf_counter(), time.thread_time()
            index.search(queries, oracle.k)
            cpu.append((time.thread_time() - worked) * 1e6 / group)
            wall.append((time.perf_counter() - started) * 1e6 / group)
        point.cold_us.append(wall[0])
        point.cold_cpu_us.append(cpu[0])
        point.warm_us.append(statistics.median(wall[1:]))
        point.warm_cpu_us.append(statistics.median(cpu[1:]))


_other_data: list[npt.NDArray[np.uint8]] = []


def _flush() -> None:
    """Read other data, so that the caches hold nothing of the index."""
    if not _other_data:
        _other_data.append(np.ones(FLUSH_BYTES, np.uint8))
    _other_data[0].sum(dtype=np.uint8)
