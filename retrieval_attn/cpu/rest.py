"""The estimate of what was not retrieved as one more partial, by NumPy: where heads are not searched in steps.

`step/estimate.py` says what is estimated, and does the same inside a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import Partial
from retrieval_attn.cpu.clusters import ClusterTable
from retrieval_attn.cpu.step.estimate import PRIOR, STEEPNESS
from retrieval_attn.index.formats import Format, to_float32


class Attended(NamedTuple):
    """Keys of a segment that were attended to: values (kv_heads, tokens, value_dim) as stored, members (kv_heads,
    tokens) uint8, ids (kv_heads, n, k) int32, -1 for none.
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
    """Estimated attention of queries (kv_heads, n, head_dim) to the table's keys but for those attended to.

    scoring: scale and soft cap. least: (kv_heads, n), the lowest inner product that was attended to, inf for none. out
    (kv_heads, n, value_dim) and lse (kv_heads, n), float32; 0 and -inf where nothing is left.
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
