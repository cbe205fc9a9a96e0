"""The gated delta rule of `gpu/delta.py` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.gpu.delta import UNIT_EPS, Asked, DeltaRule, States
from retrieval_attn.gpu.products import rms_norm


def delta_step(asked: Asked, rule: DeltaRule, states: States) -> Tensor:
    """Advance the states by one token per row and return the gated, normed output."""
    rows, memory = len(asked.mixed), states.memory
    seen = torch.cat((states.inputs, asked.mixed[..., None].to(states.inputs.dtype)), dim=-1)
    states.inputs.copy_(seen[..., 1:])
    kept = (seen[..., -rule.taps.shape[1] :] * rule.taps).sum(-1)
    kept = functional.silu(kept if rule.tap_bias is None else kept + rule.tap_bias)
    query, key, value = kept.split([rule.k_heads * rule.k_dim] * 2 + [rule.v_heads * rule.v_dim], dim=-1)
    query, key = (
        _unit(one.view(rows, rule.k_heads, rule.k_dim).to(memory.dtype)).repeat_interleave(
            rule.v_heads // rule.k_heads, dim=1
        )
        for one in (query, key)
    )
    value = value.view(rows, rule.v_heads, rule.v_dim).to(memory.dtype)
    rate = functional.softplus(asked.fading.to(memory.dtype) + rule.shift) * rule.log_decay.to(memory.dtype).exp()
    memory.mul_(torch.exp(-rate)[..., None, None])
    change = (value - (memory * key[..., None]).sum(-2)) * asked.strength.sigmoid().to(memory.dtype)[..., None]
    memory.add_(key[..., None] * change[:, :, None])
    out = (memory * query[..., None]).sum(-2) * rule.k_dim**-0.5
    normal = rms_norm(out.to(asked.mixed.dtype), rule.norm, rule.eps)
    return (normal * functional.silu(asked.gate.view(normal.shape).to(memory.dtype))).to(normal.dtype).flatten(1)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + UNIT_EPS)
