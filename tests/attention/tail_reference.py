"""Attention with an estimate of what is not retrieved, in float64 from its definition, and a watch that compares.

Of the keys between sinks and window a query attends to some: to its best ones, or to those that the device named.
Every other key i of the host's has its own value, and the mean weight of its cluster's samples and mean key. Where the
device estimates, a cluster's mass is the sum of its keys' own weights, and its mean value is that of when the context
was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from retrieval_attn.attention import device_codes, retrieval
from retrieval_attn.attention.device_codes import DeviceCodeSource, HostGather
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.sequence import stacked
from retrieval_attn.attention.source import SourcePlan, SourceResult
from retrieval_attn.cpu.clusters import KeyClusters
from retrieval_attn.cpu.step.attend_task import PRIOR, STEEPNESS
from retrieval_attn.cpu.store import SequenceKV, indexed_from
from retrieval_attn.index.formats import Format, to_float32

Floats = npt.NDArray[np.float64]
Kept = npt.NDArray[np.bool_]
Owners = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Logits of one query's keys, and what each of them counts with: values (n, value_dim)."""

    logits: Floats
    values: Floats

    def attention(self) -> tuple[Floats, float]:
        """out (value_dim,) and lse; 0 and -inf without keys."""
        top = self.logits.max(initial=-np.inf)
        if np.isneginf(top):
            return np.zeros(self.values.shape[1]), -np.inf
        weights = np.exp(self.logits - top)
        return weights @ self.values / weights.sum(), float(top + np.log(weights.sum()))


class Scoring(NamedTuple):
    scale: float
    softcap: float | None

    def logits(self, products: Floats) -> Floats:
        logits = products * self.scale
        return logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap)


def together(*parts: Rows) -> Rows:
    return Rows(np.concatenate([one.logits for one in parts]), np.concatenate([one.values for one in parts]))


def by_means(
    query: Floats,
    rows: tuple[Floats, Floats],
    owners: Owners,
    kept: Kept,
    scoring: Scoring,
    samples: Floats | None,
    shifts: Floats | None,
) -> Rows:
    """All of rows (keys, values): those `kept` with their own scores, others as their cluster's keys weigh on average.

    That is the mean of exp(score) over samples (head_dim, clusters, number) below all scores that are kept, of which
    the mean key is PRIOR more. Values are off by shifts (clusters, value_dim) for each key of the cluster.
    """
    keys, values = rows[0], rows[1].copy()
    logits = scoring.logits(keys @ query)
    least = logits[kept].min(initial=np.inf)
    for cluster in np.unique(owners[~kept]):
        own = owners == cluster
        some = scoring.logits(keys[own].mean(axis=0) @ query) + np.log(PRIOR)
        weight, count = np.float64(some), float(PRIOR)
        for sample in [] if samples is None else scoring.logits(query @ samples[:, cluster]):
            inside = np.clip((least - sample) * STEEPNESS, 0, 1)
            if inside > 0:
                weight, count = np.logaddexp(weight, sample + np.log(inside)), count + inside
        logits[own & ~kept] = weight - np.log(count)
        if shifts is not None:
            values[own & ~kept] += shifts[cluster] * own.sum() / (own & ~kept).sum()
    return Rows(logits, values)


def by_masses(
    query: Floats, rows: tuple[Floats, Floats], means: Floats, owners: Owners, kept: Kept, scoring: Scoring
) -> Rows:
    """The same where a key that is not `kept` has its own score and its cluster's mean value (clusters, value_dim)."""
    keys, values = rows
    return Rows(scoring.logits(keys @ query), np.where(kept[:, None], values, means[owners]))


def samples_of(shared: KeyClusters | None, head: int) -> Floats | None:
    """(head_dim, clusters, number) of a head; None without samples."""
    if shared is None or shared.samples is None:
        return None
    samples = shared.samples.to_float32()[head].astype(np.float64)
    return samples.reshape(len(samples), shared.clusters, -1)


def best(query: Floats, keys: Floats, k: int) -> Kept:
    kept = np.zeros(len(keys), bool)
    kept[np.argsort(-(keys @ query), kind="stable")[:k]] = True
    return kept


def members_of(shared: KeyClusters, path: SequenceKV, start: int, stop: int, joined: bool) -> Owners:
    """(kv_heads, tokens): the cluster of each token [start, stop) of a path. joined: its probe told it; clusters that
    a read made tell by values, too.
    """
    known = [shared.known(segment)[:, low:high] for segment, low, high, _ in path.parts(start, stop)]
    members = np.concatenate(known, axis=1).astype(np.int64)
    if not joined:
        return members
    keys = to_float32(path.read(start, stop)[0], path.fmt)
    scores = keys.astype(np.float64) @ shared.probes.transpose(0, 2, 1) + shared.offsets[:, None]
    own = np.take_along_axis(scores, members[:, :, None], axis=2)[:, :, 0]
    top = scores.max(axis=2)
    near = 2e-2 if path.fmt is Format.INT8 else 1e-3  # it joined before its numbers were rounded
    assert (own >= top - near * (1 + np.abs(top))).all(), "a key belongs to the cluster whose probe it meets best"
    return members


def middle_rows(
    path: SequenceKV, span: tuple[int, int], queries: Floats, k: int, scoring: Scoring, part: Any
) -> list[list[Rows]]:
    """For queries (q_heads, n, head_dim): what each counts of the path's tokens span[0] .. span[1].

    part: a `Named` part where the device named keys, else None.
    """
    start, stop = span
    assert path.clusters is not None, "nothing estimates what is left out"
    keys, values = (to_float32(array, path.fmt).astype(np.float64) for array in path.read(start, stop))
    group = len(queries) // path.num_kv_heads
    ended = start
    if part is not None:
        piece = part._over.pieces[0]
        assert piece.first + piece.index_first == start and piece.indexes
        ended = piece.first + piece.high
        coded = members_of(path.clusters.shared, path, start, ended, False)
    shared = path.clusters.shared if part is None else path.clusters.shared.late
    assert shared is not None
    if ended < stop:
        owners = members_of(shared, path, ended, stop, part is not None)
    found = []
    for head, own in enumerate(queries):
        kv, rows = head // group, []
        for number, query in enumerate(own):
            counted = []
            if part is not None:
                ids = part.named[head, number]
                kept = np.zeros(ended - start, bool)
                kept[ids[ids >= 0]] = True
                assert k <= kept.sum() < len(kept), "some are named, some are not"
                means = path.clusters.shared.mean_values
                assert means is not None
                first = keys[kv, : ended - start], values[kv, : ended - start]
                counted.append(by_masses(query, first, means[kv].astype(np.float64), coded[kv], kept, scoring))
            if ended < stop:
                late = keys[kv, ended - start :], values[kv, ended - start :]
                kept = best(query, late[0], k)
                shifts = None if shared.value_shifts is None else shared.value_shifts[kv].astype(np.float64)
                samples = samples_of(shared, kv)
                counted.append(by_means(query, late, owners[kv], kept, scoring, samples, shifts))
            rows.append(together(*counted))
        found.append(rows)
    return found


class Named(HostGather):
    """Keeps the ids that the device named: (q_heads, positions, room)."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._named: list[npt.NDArray[np.int32]] = []

    def _send(self, number: int) -> None:
        super()._send(number)
        assert self._desk is not None
        chunk = self._chunks[number]
        heads, positions = len(self._queries), chunk.stop - chunk.start
        ids = self._desk.slots[number % 2]._ids[: heads * positions].numpy().copy()
        self._named.append(ids.reshape(heads, positions, -1))

    @property
    def named(self) -> npt.NDArray[np.int32]:
        return np.concatenate(self._named, axis=1)


class Watch:
    """What was compared. errors: of each call, the largest one in `out`, and of the middle's lse. steps: calls in which
    something lay between sinks and window; named: how often the device named keys, late: how often keys had come since.
    """

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.lse_errors: list[float] = []
        self.named = self.late = 0
        self.parts: list[tuple[LayerKV, list[Any]]] = []

    @property
    def steps(self) -> int:
        return len(self.errors)

    def check(self, atol: float) -> None:
        """All calls so far were as defined; the watch then begins anew."""
        assert self.steps, "no attention was compared"
        assert max(self.errors) <= atol, f"out: {max(self.errors):.2e} in {np.argmax(self.errors)} of {self.steps}"
        assert max(self.lse_errors) <= atol, f"the middle's lse: {max(self.lse_errors):.2e}"
        self.errors, self.lse_errors = [], []


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every eager step of retrieval layers is compared with the definition."""
    watch, attend = Watch(), CacheLayer.attend

    class Seen(SourcePlan):
        """The middle's rows as defined, found before anything moves."""

        def attend(self, query: Tensor, given: Any, *, last: bool = True) -> list[SourceResult]:
            results = super().attend(query, given, last=last)
            retrieving = [source for source in self.sources if source.retrieves]
            chosen = [one for one, source in zip(results, self.sources, strict=True) if source.retrieves]
            whole = SourceResult.merged(chosen)
            if self.request.exact or whole is None:
                return results
            found, scoring, new = whole.partial, Scoring(given.scale, given.softcap), query.shape[2]
            rows: list[Any] = [None] * len(query)
            for source, one in [(each, tokens) for each in retrieving for tokens in each.ranges]:
                k = self.request.config.retrieve_count(one.stop - one.start)
                assert k is not None
                queries = stacked(query.float(), one.rows).numpy().astype(np.float64)
                part = None
                if isinstance(source, DeviceCodeSource):
                    part = source._gathers[source.ranges.index(one)]
                watch.named += part is not None
                watch.late += bool(one.host.segments and one.stop > indexed_from(one.host, one.start) + one.start)
                counted = middle_rows(one.host, (one.start, one.stop), queries, k, scoring, part)
                for place, row in enumerate(one.rows):
                    rows[row] = [own[place * new : (place + 1) * new] for own in counted]
            watch.parts.append((self.request.held, rows))
            lses = [[[q.attention()[1] for q in head] for head in row] for row in rows if row is not None]
            lse = found.lse[[row is not None for row in rows]].numpy()
            watch.lse_errors.append(float(np.abs(lse - np.array(lses)).max()))
            empty = [row is None for row in rows]
            assert bool((found.lse[empty] == -torch.inf).all()) and not bool(found.out[empty].any())
            return results

    def compared(layer: CacheLayer, module: Any, query: Tensor, spec: Any, **options: Any) -> Tensor:
        static: list[Any] = []
        if isinstance(layer, retrieval.RetrievalLayer) and layer.held is not None:
            window = type(layer.held.window)
            own = window.attend

            def before(self: Any, query: Tensor, **scoring: Any) -> Any:
                static.append(static_rows(layer, self, query, scoring))
                return own(self, query, **scoring)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(window, "attend", before)
                out = attend(layer, module, query, spec, **options)
        else:
            out = attend(layer, module, query, spec, **options)
        if watch.parts:
            (_, rows), (near,) = watch.parts.pop(), static
            sinks = options["sink_logits"]
            logits = None if sinks is None else sinks.double().numpy()
            for row, head in np.ndindex(query.shape[:2]):
                for number in range(query.shape[2]):
                    parts = [near[row][head][number]]
                    if rows[row] is not None:
                        parts.append(rows[row][head][number])
                    if logits is not None:
                        parts.append(Rows(logits[head : head + 1], np.zeros((1, out.shape[3]))))
                    expected = together(*parts).attention()[0]
                    watch.errors.append(float(np.abs(out[row, head, number].numpy() - expected).max()))
        return out

    monkeypatch.setattr(device_codes, "HostGather", Named)
    monkeypatch.setattr(retrieval, "SourcePlan", Seen)
    monkeypatch.setattr(CacheLayer, "attend", compared)
    yield watch
    assert not watch.parts


def static_rows(layer: Any, window: Any, query: Tensor, scoring: dict[str, Any]) -> list[list[list[Rows]]]:
    """What each query (batch, q_heads, new, head_dim) counts of sinks and window, before it: exactly."""
    low, high = window.span
    keys, values = (one[:, :, low:high].double().numpy() for one in window.buffers)
    batch, q_heads, new, _ = query.shape
    valid = np.ones((batch, high - low), bool) if window.valid is None else window.valid.numpy()
    group, found = q_heads // keys.shape[1], []
    for row, (start, stop) in enumerate(layer.held.ranges):
        sinks = int(valid[row, : window.sink_len].sum())
        # each token is in one part: sinks, middle, or the tail that begins at the middle's end
        forgotten = layer.batch.forgotten
        assert sinks == (forgotten.start if forgotten.tokens else start) and stop == layer.batch.real(
            row, layer.held.tail_start
        )
        heads = []
        for head in range(q_heads):
            own = []
            for number in range(new):
                seen = valid[row].copy()
                seen[len(seen) - new + number + 1 :] = False
                products = keys[row, head // group, seen] @ query[row, head, number].double().numpy()
                logits = Scoring(scoring["scale"], scoring["softcap"]).logits(products)
                own.append(Rows(logits, values[row, head // group, seen]))
            heads.append(own)
        found.append(heads)
    return found
