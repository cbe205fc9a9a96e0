"""The kernels of `gpu/decode/kernels.py` in plain PyTorch: the expected results of the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import HostResult, Parts, WindowBuffers


def stage_queries(query: Tensor, target: Tensor, rows: Tensor | None) -> None:
    """Write queries as float32 to their rows of `target`."""
    flat = query.reshape(target.shape)
    if rows is None:
        target.copy_(flat)
    else:
        target.index_copy_(0, rows, flat.float())


def window_partials(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowBuffers,
    scale: float,
    softcap: float | None,
    reach: int | None,
    splits: int,
) -> Parts:
    """Store the new keys and values and attend to the window, as one part."""
    batch, q_heads, _, dim = query.shape
    rows, kv_heads, slots = window.key.shape[:3]
    tokens, group = batch // rows, q_heads // kv_heads
    low, high = window.span[:, :1, None], window.span[:, 1:, None]  # (rows, 1, 1)
    row = torch.arange(rows, device=query.device)[:, None]
    place = high[:, :, 0].long() + torch.arange(tokens, device=query.device)  # (rows, tokens)
    window.key[row, :, place] = key.reshape(rows, tokens, kv_heads, dim)
    window.value[row, :, place] = value.reshape(rows, tokens, kv_heads, -1)
    slot = torch.arange(slots, device=query.device)[None, None]
    seen = (slot >= low) & (slot <= place[:, :, None])
    if reach is not None:
        seen = seen & (slot > place[:, :, None] - reach)
    if window.valid is not None:
        seen = seen & (window.valid[:, None] | (slot >= high))
    seen = seen[:, None].repeat_interleave(group, 2)  # (rows, 1, tokens * group, slots)
    grouped = query.float().reshape(rows, tokens, kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
    scores = grouped @ window.key.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)  # finite: the new token is always seen
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights / total) @ window.value.float()
    shape = batch, q_heads, 1
    out, lse = (one.unflatten(2, (tokens, group)).transpose(1, 2) for one in (out, top + torch.log(total)))
    return Parts(out.reshape(*shape, -1), lse.reshape(shape))


def merge_parts(
    parts: Parts,
    host: HostResult | None,
    sink_logits: Tensor | None,
    dtype: torch.dtype,
    rest: tuple[Tensor, Tensor] | None,
    paged: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Merge all parts and count what is estimated."""
    out, lse = parts
    batch, q_heads, _, value_dim = out.shape
    others = [one for one in (paged, rest) if one is not None]  # the host's comes last
    if host is not None:
        others.append((host.out, host.lse) if host.rows is None else (host.out[host.rows], host.lse[host.rows]))
    for own_out, own_lse in others:
        out = torch.cat([out, own_out.reshape(batch, q_heads, 1, value_dim)], dim=2)
        lse = torch.cat([lse, own_lse.reshape(batch, q_heads, 1)], dim=2)
    top = lse.amax(dim=2, keepdim=True)
    if sink_logits is not None:
        top = torch.maximum(top, sink_logits.float().view(1, -1, 1))
    top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weights = torch.exp(lse - top)
    total = weights.sum(dim=2, keepdim=True)
    if host is not None and host.estimated is not None:
        share, tally = host.estimated
        own = (share if host.rows is None else share[host.rows]).view(batch, q_heads) * weights[:, :, -1]
        own = own if rest is None else own + weights[:, :, -2]
        tally[:, 0] += (own / torch.where(total == 0, 1, total)[:, :, 0]).flatten()
        tally[:, 1] += 1
    if sink_logits is not None:
        total = total + torch.exp(sink_logits.float().view(1, -1, 1) - top)
    total = torch.where(total == 0, torch.ones_like(total), total)
    # an empty part's out is 0 by contract; were it not, its weight 0 would still have to meet a finite number
    mixed = ((weights / total).unsqueeze(-1) * out).sum(dim=2, keepdim=True)
    return mixed.to(dtype)
