"""Float64 attention, written to be read: the oracle every kernel and merge is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Partial:
    """softmax(scale * q.k) v in float64, one score matrix at a time.

    query: (batch, q_heads, queries, head_dim); key, value: (batch, kv_heads, keys, ...), q_heads a multiple
    of kv_heads (query head h reads kv head h // group). mask: bool, broadcastable to (batch, q_heads,
    queries, keys), True = attend. softcap: scores become cap * tanh(score / cap) before the mask.
    sink_logits: (q_heads,), extra logit with value 0. A query without any key: out 0, lse -inf.
    Returns a Partial in float64.
    """
    group = query.shape[1] // key.shape[1]
    key64 = key.double().repeat_interleave(group, dim=1)
    value64 = value.double().repeat_interleave(group, dim=1)
    scores = query.double() @ key64.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink_logits is not None:
        extra = sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
        value64 = torch.cat([value64, torch.zeros_like(value64[:, :, :1])], dim=2)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1))
    return Partial(weights @ value64, lse)
