"""Attention to the newest keys of a layer, which have no codes yet: the best k of them, and an estimate of the others.

What the host does for the few queries of a step (`cpu/step/estimate.py`), for the many of a question, where keys and
values lie on the device. These keys are few: all get their scores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.codes.candidates import StoredRows, best_places, numbers_of

SCORES_AT_ONCE = 1 << 24
"""Scores at once."""


class LateClusters(NamedTuple):
    """members (heads, tokens) int64: the cluster of each token. means (heads, head_dim, clusters) float32."""

    members: Tensor
    means: Tensor


def attend_late(
    queries: Tensor, rows: StoredRows, k: int, clusters: LateClusters | None, scale: float, softcap: float | None
) -> Partial:
    """Attention of queries (heads, n, head_dim) float32 to the best k of `rows`, and to the others as to their means.

    clusters: of these rows; None: the others are left out. out (heads, n, value_dim), lse (heads, n), float32; without
    rows 0 and -inf. An estimated key has its own value: that is the mean value of those left in its cluster, summed.
    """
    heads, n, _ = queries.shape
    keys, values = numbers_of(rows.keys), numbers_of(rows.values)
    tokens = keys.shape[1]
    out = queries.new_zeros(heads, n, values.shape[2])
    lse = torch.full((heads, n), -torch.inf, dtype=torch.float32, device=queries.device)
    if not tokens:
        return Partial(out, lse)
    at_once = max(1, SCORES_AT_ONCE // (heads * tokens))
    for start in range(0, n, at_once):
        own = queries[:, start : start + at_once]
        scores = own @ keys.transpose(1, 2)
        logits = _logits(scores, scale, softcap)
        if k < tokens:
            places = best_places(scores.flatten(0, 1), k).view(heads, -1, k)
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, places, True)
            others = torch.full_like(logits, -torch.inf)
            if clusters is not None:
                means = _logits(own @ clusters.means, scale, softcap)
                others = means.gather(2, clusters.members[:, None].expand(-1, means.shape[1], -1))
            logits = torch.where(kept, logits, others)
        here = slice(start, start + own.shape[1])
        lse[:, here] = logits.logsumexp(dim=2)
        out[:, here] = logits.softmax(dim=2) @ values
    return Partial(out, lse)


def _logits(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = products * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
