"""Attention from plain float32 score matrices: the backend that takes every call, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial

# Queries are taken in blocks whose score matrix stays under this many elements (256 MiB of float32).
MAX_SCORES = 1 << 26


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention of `query` over `key`, whatever the dtype; arguments and layout as in flash.attend.

    Scores, softmax and the weighted sum are float32. A query without any key gets out 0, lse -inf.
    """
    batch, q_heads, queries, _ = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    group = q_heads // kv_heads
    key32 = key.float().unsqueeze(2)  # (batch, kv_heads, 1, keys, head_dim)
    value32 = value.float().unsqueeze(2)
    out = torch.empty(batch, q_heads, queries, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, q_heads, queries, dtype=torch.float32, device=query.device)
    block = max(1, MAX_SCORES // max(1, batch * q_heads * keys))
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        rows = query[:, :, start:stop].float().reshape(batch, kv_heads, group, stop - start, -1)
        scores = (rows @ key32.transpose(3, 4)).mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap).mul_(softcap)
        scores = scores.reshape(batch, q_heads, stop - start, keys)
        if causal:
            position = torch.arange(keys - queries + start, keys - queries + stop, device=query.device)[:, None]
            scores.masked_fill_(torch.arange(keys, device=query.device) > position, -torch.inf)
        elif mask is not None:
            part = mask.expand(*mask.shape[:-2], queries, keys)[..., start:stop, :]
            scores = scores.masked_fill(~part, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
        weights = torch.exp_(scores - top)
        total = weights.sum(dim=-1, keepdim=True)
        lse[:, :, start:stop] = (top + torch.log(total)).squeeze(-1)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
        mixed = weights.reshape(batch, kv_heads, group, stop - start, keys) @ value32
        out[:, :, start:stop] = mixed.reshape(batch, q_heads, stop - start, value_dim)
    return Partial(out, lse)
