"""A layer's search and attention head by head in NumPy, with the indexes' own searches: what a step must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import Partial, merge_partials
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.host_attend import HostPartial
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.step.attend_task import PRIOR, STEEPNESS
from retrieval_attn.cpu.step.plan import StepCost, total_cost
from retrieval_attn.cpu.store import SequenceKV, cluster_table
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format, to_float32
from tests.cpu.reference import attention


class Attended(NamedTuple):
    """Attended keys of a segment.

    values: (kv_heads, tokens, value_dim) in storage format. members: (kv_heads, tokens) uint8, cluster of each token.
    ids: (kv_heads, n, k) int32, -1 for none.
    """

    values: npt.NDArray[Any]
    members: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.int32]


def rest_partial(
    queries: npt.NDArray[np.float32],
    table: ClusterTable,
    attended: Iterable[Attended],
    fmt: Format,
    scoring: tuple[float, float | None],
    least: npt.NDArray[np.float32],
) -> Partial:
    """Estimate attention of queries (kv_heads, n, head_dim) to the table's keys without the attended ones.

    scoring: scale and soft cap. least: (kv_heads, n), lowest attended inner product, inf for none. Returns out
    (kv_heads, n, value_dim) and lse (kv_heads, n), float32; 0 and -inf if no key is left.
    """
    heads, n, _ = queries.shape
    left = np.repeat(table.counts[:, None], n, axis=1).astype(np.float64)
    sums = np.repeat(table.value_sums[:, None], n, axis=1).astype(np.float64)
    for values, members, ids in attended:
        for head, query in np.ndindex(heads, n):
            own = ids[head, query][ids[head, query] >= 0]
            owners = members[head, own]
            np.subtract.at(left[head, query], owners, 1)
            np.subtract.at(sums[head, query], owners, to_float32(values[head, own], fmt))
    scores = _logits(queries @ table.means, scoring)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # NaN gives NaN, as full attention does
        top = np.where(left > 0, scores, -np.inf).max(axis=2, keepdims=True)
        if table.samples is not None:
            sampled = _logits(queries @ table.samples.to_float32(), scoring).reshape(*scores.shape, table.sampled)
            lowest = np.where(np.isinf(least), np.inf, _logits(np.where(np.isinf(least), 0, least), scoring))
            inside = np.clip((lowest[:, :, None, None] - sampled) * STEEPNESS, 0, 1)
            sampled = np.where(inside > 0, sampled, -np.inf)
            top = np.maximum(top, np.where(left > 0, sampled.max(axis=3), -np.inf).max(axis=2, keepdims=True))
        shift = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(scores - shift)
        if table.samples is not None:
            found = inside * np.exp(sampled - shift[..., None])
            weights = (PRIOR * weights + found.sum(axis=3)) / (PRIOR + inside.sum(axis=3))
        weights = np.where(left > 0, weights, 0.0)
        total = (weights * left).sum(axis=2, keepdims=True)
        out = (weights[:, :, None] @ sums)[:, :, 0] / np.where(total == 0, 1.0, total)
        lse = (shift + np.log(total))[:, :, 0]
    return out.astype(np.float32), lse.astype(np.float32)


def _logits(products: npt.NDArray[np.float32], scoring: tuple[float, float | None]) -> npt.NDArray[np.float64]:
    scale, softcap = scoring
    logits = products.astype(np.float64) * scale
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


class Found(NamedTuple):
    """Keys found in a segment: ids (heads, n, k) from its first token on, -1 for none, and their inner products."""

    segment: Segment
    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    scanned: int


def _search(segment: Segment, queries: npt.NDArray[np.float32], k: int, low: int, high: int) -> Found:
    """The best k of tokens [low, high): by the index where it covers them from its first key on, else by a scan."""
    first, stop = segment.indexed
    first, stop = (first, min(stop, high)) if low <= first < high else (high, high)
    ids, scores, scanned = [], [], 0
    for head, own in enumerate(queries):
        parts = [(low, search_exact(segment.keys[head, low:first], own, k, segment.fmt))]
        if first < stop:
            parts.append((first, segment.indexes[head].search(own, k, limit=stop - first)))
        parts.append((stop, search_exact(segment.keys[head, stop:high], own, k, segment.fmt)))
        ids.append(np.concatenate([np.where(one.ids < 0, -1, one.ids + begin) for begin, one in parts], axis=1))
        scores.append(np.concatenate([one.scores for _, one in parts], axis=1))
        scanned += sum(one.keys_scanned for _, one in parts)
    return Found(segment, np.stack(ids).astype(np.int32), np.stack(scores), scanned)


def attend_apart(
    path: SequenceKV,
    queries: npt.NDArray[np.float32],
    start: int,
    stop: int,
    top_k: int,
    scale: float,
    softcap: float | None = None,
) -> HostPartial:
    """`attend_path` of queries (q_heads, n, head_dim) for their best top_k keys."""
    shape, fmt = queries.shape[:2], path.fmt
    grouped = queries.reshape(path.num_kv_heads, -1, queries.shape[2])
    found = [_search(segment, grouped, top_k, low, high) for segment, low, high, _ in path.parts(start, stop)]
    if not found:
        out = np.zeros((*shape, path.value_dim), np.float32)
        return HostPartial(out, np.full(shape, -np.inf, np.float32), total_cost(()), np.zeros(shape, np.float32))
    together, scores = (np.concatenate([one[i] for one in found], axis=-1) for i in (1, 2))
    order = np.argsort(np.where(together < 0, np.inf, -scores), axis=-1, kind="stable")
    np.put_along_axis(together, order[..., top_k:], np.int32(-1), axis=-1)
    chosen = np.split(together, np.cumsum([one.ids.shape[-1] for one in found])[:-1], axis=-1)
    out, lse = np.empty((*grouped.shape[:2], path.value_dim), np.float32), np.empty(grouped.shape[:2], np.float32)
    for head, query in np.ndindex(*lse.shape):
        rows = [
            [
                to_float32(array[head, own[head, query][own[head, query] >= 0]], fmt)
                for array in (one.segment.keys, one.segment.values)
            ]
            for one, own in zip(found, chosen, strict=True)
        ]
        keys, values = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        taken = np.ones((1, len(keys)), bool)
        own, top = attention(grouped[head, query : query + 1], keys, values, taken, scale, softcap)
        out[head, query], lse[head, query] = own[0], top[0]
    rest, table = np.zeros(shape, np.float32), cluster_table(path, start, stop)
    if table is not None and path.clusters is not None:
        shared = path.clusters.shared
        attended = [
            Attended(one.segment.values, shared.known(one.segment), ids) for one, ids in zip(found, chosen, strict=True)
        ]
        least = np.where(together < 0, np.float32(np.inf), scores).min(axis=2)
        estimate = rest_partial(grouped, table, attended, fmt, (scale, softcap), least)
        out, lse = merge_partials([(out, lse), estimate])
        rest = np.exp(estimate[1] - np.where(np.isneginf(lse), 0, lse)).reshape(shape)
    out, lse = out.reshape(*shape, path.value_dim), lse.reshape(shape)
    return HostPartial(out, lse, StepCost(0.0, 0.0, sum(one.scanned for one in found), 0), rest)
