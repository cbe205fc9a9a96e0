"""What retrieval finds of a context while it decodes, against exact arithmetic over every key: recall and weight.

The queries are those of a few decode steps of the model itself. For a sample of layers and query heads the exact best
keys come from brute force; what the layer answered must be the attention over the keys its index finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrieval_attn import RetrievalCache
from retrieval_attn.testing import SequenceKV, attend_path, to_float32, using_retrieval
from retrieval_attn_eval.bench.method import Retrieval, forward_logits
from retrieval_attn_eval.bench.source import Source

STEPS = 4
LAYERS = 4
HEADS = 4
TOLERANCE = 2e-2
"""Largest difference between what a layer answers and attention over the keys it found, relative to the largest."""

FloatArray = npt.NDArray[np.float32]


@dataclass
class Quality:
    """Means over layers, heads and steps. recall: share of the exact best k found; mass: share of their weight found;
    captured: share of all attention that sinks, window and found keys have. scanned: share of the keys scored.

    error: largest relative difference between a layer's answer and attention over the keys that its index finds.
    """

    recall: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    scanned: list[float] = field(default_factory=list)
    error: float = 0.0


def judge(method: Retrieval, source: Source) -> Quality | None:
    """Quality of the method's cache on row 0; None where the context has nothing to retrieve."""
    cache, config = method.cache, method.config
    stop = source.tokens - min(source.tokens, config.window)
    start = min(config.sink, stop)
    if stop <= start:
        return None
    queries = _queries(method)
    found = Quality()
    for number in np.unique(np.linspace(0, source.distinct - 1, LAYERS).astype(int)):
        layer: Any = cache.layers[number]
        path, own = layer.hosts[0], queries[number]
        k = config.retrieve_count(stop - start)
        scale = own.shape[2] ** -0.5
        _judge_layer(path, own, (start, stop), k or stop - start, source.tokens, scale, found)
    return found


def _queries(method: Retrieval) -> list[FloatArray]:
    """Queries of row 0 of STEPS eager decode steps: per layer (q_heads, steps, head_dim)."""
    cache: RetrievalCache = method.cache.fork()
    taken: list[list[torch.Tensor]] = [[] for _ in cache.layers]
    layers: list[Any] = list(cache.layers)
    for layer, own in zip(layers, taken, strict=True):
        layer.attend = _noting(layer.attend, own)
    device = method.model.device
    with using_retrieval(method.model, method.config.prefill_chunk):
        for step in range(STEPS):
            ids = torch.full((method._batch, 1), 1 + step, device=device)
            forward_logits(method.model, cache, ids, torch.full_like(ids, method.position + step))
    return [np.ascontiguousarray(torch.cat(own, dim=2)[0].float().cpu().numpy()) for own in taken]


def _noting(attend: Any, taken: list[torch.Tensor]) -> Any:
    def noted(module: Any, query: torch.Tensor, *given: Any, **more: Any) -> Any:
        taken.append(query.detach().clone())
        return attend(module, query, *given, **more)

    return noted


def _judge_layer(
    path: SequenceKV, queries: FloatArray, span: tuple[int, int], k: int, tokens: int, scale: float, found: Quality
) -> None:
    start, stop = span
    q_heads, steps, dim = queries.shape
    group = q_heads // path.num_kv_heads
    path = path.fork()
    path.clusters = None  # what is judged is what was found, not the estimate of the others
    # one step at a time: heads of a group look at keys together, and tokens of an answer do not
    ids, outs, scanned = [], [], 0
    for step in range(steps):
        asked = np.ascontiguousarray(queries[:, step : step + 1])
        own_ids, scores = _search(path, asked, span, k)
        ids.append(own_ids)
        scanned += scores
        outs.append(attend_path(path, asked, start, stop, k, scale=scale).out.copy())
    found.scanned.append(scanned / (q_heads * steps * (stop - start)))
    chosen_ids, out = np.concatenate(ids, axis=1), np.concatenate(outs, axis=1)
    stored_keys, stored_values = path.read(0, tokens)
    largest = float(np.abs(out).max())
    for head in np.unique(np.linspace(0, q_heads - 1, HEADS).astype(int)):
        own = slice(head // group, head // group + 1)
        keys = _plain(path, stored_keys[own])[0]
        # one column per step
        logits = (keys @ queries[head].T).astype(np.float64) * scale
        values = stored_values[own]
        for step in range(steps):
            chosen = chosen_ids[head, step]
            _judge_query(logits[:, step], chosen[chosen >= 0], span, k, found)
            wanted = _attended(path, logits[:, step], values, chosen[chosen >= 0])
            error = float(np.abs(out[head, step] - wanted).max()) / largest
            found.error = max(found.error, error if error == error else np.inf)


def _judge_query(
    logits: npt.NDArray[np.float64], chosen: npt.NDArray[np.int64], span: tuple[int, int], k: int, found: Quality
) -> None:
    start, stop = span
    weights = np.exp(logits - logits.max())
    k = min(k, stop - start)
    best = start + np.argpartition(-logits[start:stop], k - 1)[:k]
    common = np.intersect1d(chosen, best)
    found.recall.append(len(common) / k)
    found.mass.append(float(weights[common].sum() / weights[best].sum()))
    near = weights[:start].sum() + weights[stop:].sum()
    found.captured.append(float((near + weights[chosen].sum()) / weights.sum()))


def _attended(
    path: SequenceKV, logits: npt.NDArray[np.float64], values: npt.NDArray[Any], chosen: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Attention over the chosen keys, by definition."""
    weights = np.exp(logits[chosen] - logits[chosen].max())
    picked = _plain(path, np.ascontiguousarray(values[:, chosen]))[0].astype(np.float64)
    result: npt.NDArray[np.float64] = weights @ picked / weights.sum()
    return result


def _plain(path: SequenceKV, rows: npt.NDArray[Any]) -> FloatArray:
    return np.ascontiguousarray(to_float32(rows, path.fmt))


def _search(path: SequenceKV, queries: FloatArray, span: tuple[int, int], k: int) -> tuple[npt.NDArray[np.int64], int]:
    """Ids (q_heads, steps, k) that the path's indexes find, -1 where there are fewer, and scores computed."""
    heads, (q_heads, steps, dim) = path.num_kv_heads, queries.shape
    grouped = queries.reshape(heads, q_heads // heads * steps, dim)
    ids: list[npt.NDArray[np.int64]] = []
    scores: list[FloatArray] = []
    first = scanned = 0
    for segment in path.segments:
        low, high = max(span[0] - first, 0), min(span[1] - first, segment.length)
        if low < high:
            for hit in segment.search(grouped, k, low, high):
                ids.append(np.where(hit.ids < 0, -1, hit.ids.astype(np.int64) + first))
                scores.append(np.where(hit.ids < 0, -np.inf, hit.scores))
                scanned += hit.keys_scanned
        first += segment.length
    together, ranked = np.concatenate(ids, axis=-1), np.concatenate(scores, axis=-1)
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(together, order, axis=-1).reshape(q_heads, steps, -1), scanned


def average(values: Sequence[float]) -> float | None:
    """The mean; None for nothing."""
    return float(np.mean(values)) if values else None
