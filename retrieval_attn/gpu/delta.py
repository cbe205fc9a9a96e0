"""One token of a layer that keeps a state: a short convolution, the gated delta rule, a gated norm of what it gives.

Two kernels in place of some 50 of transformers' modules (Qwen3.5's `GatedDeltaNet`), which advance the states where
they lie. Each has a Triton kernel (`delta_triton.py`) and the same in plain PyTorch. (Yang et al., "Gated Delta
Networks: Improving Mamba2 with Delta Rule", equation 10.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.products import rms_norm

UNIT_EPS = 1e-6
"""What is added to the sum of squares of a query or a key before it is divided by its root."""


class DeltaRule(NamedTuple):
    """What such a layer has learned, but for its projections.

    taps (channels, kernel) and tap_bias (channels,) or None: of the convolution of each channel. Channels are those of
    queries and keys, k_heads * k_dim each, and of values, v_heads * v_dim; v_heads / k_heads heads of values have one
    query and key. log_decay, shift (v_heads,): the state fades by exp(-exp(log_decay) * softplus(fading + shift)).
    norm (v_dim,), eps: of the RMS norm of what a head gives.
    """

    taps: Tensor
    tap_bias: Tensor | None
    log_decay: Tensor
    shift: Tensor
    norm: Tensor
    eps: float
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def is_whole(self) -> bool:
        """Whether the sizes are what kernels take: heads of 16 to 128 numbers, a power of two."""
        dims = self.k_dim, self.v_dim
        whole = all(16 <= dim <= 128 and dim & (dim - 1) == 0 for dim in dims) and self.v_heads % self.k_heads == 0
        alike = self.log_decay.shape == self.shift.shape == (self.v_heads,) and self.norm.shape == (self.v_dim,)
        return whole and alike and self.taps.ndim == 2 and len(self.taps) == self.channels and self.taps.is_contiguous()


class Asked(NamedTuple):
    """What the projections of a token gave, rows contiguous: mixed (rows, channels), gate (rows, v_heads * v_dim), and
    for each head of values strength and fading (rows, v_heads).
    """

    mixed: Tensor
    gate: Tensor
    strength: Tensor
    fading: Tensor


class States(NamedTuple):
    """Of a layer, contiguous: inputs (rows, channels, at least kernel), the newest last, and memory, float32
    (rows, v_heads, k_dim, v_dim).
    """

    inputs: Tensor
    memory: Tensor


def delta_step(asked: Asked, rule: DeltaRule, states: States) -> Tensor:
    """What the output's projection is given, (rows, v_heads * v_dim) of the dtype of `asked`; advances `states`."""
    kernels = kernels_for(asked.mixed, "delta_triton")
    if kernels is not None:
        found: Tensor = kernels.delta_step(asked, rule, states)
        return found
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
