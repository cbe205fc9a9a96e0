"""One token of a layer that keeps a state: a short convolution, the gated delta rule, a gated norm of what it gives.

Two kernels in place of some 50 of transformers' modules (Qwen3.5's `GatedDeltaNet`), which advance the states where
they lie, as Triton kernels (`delta_triton.py`). (Yang et al., "Gated Delta
Networks: Improving Mamba2 with Delta Rule", equation 10.)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from retrieval_attn.gpu.decode.kernels import step_kernels

UNIT_EPS = 1e-6
"""What is added to the sum of squares of a query or a key before it is divided by its root."""


class DeltaRule(NamedTuple):
    """Learned parameters of a gated delta rule layer, without its projections.

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
        """Channels of the convolution."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def is_whole(self) -> bool:
        """Whether the sizes are what kernels take: heads of 16 to 128 numbers, a power of two."""
        dims = self.k_dim, self.v_dim
        whole = all(16 <= dim <= 128 and dim & (dim - 1) == 0 for dim in dims) and self.v_heads % self.k_heads == 0
        alike = self.log_decay.shape == self.shift.shape == (self.v_heads,) and self.norm.shape == (self.v_dim,)
        return whole and alike and self.taps.ndim == 2 and len(self.taps) == self.channels and self.taps.is_contiguous()


class Asked(NamedTuple):
    """Outputs of the projections of a token, rows contiguous: mixed (rows, channels), gate (rows, v_heads * v_dim), and
    for each head of values strength and fading (rows, v_heads).
    """

    mixed: Tensor
    gate: Tensor
    strength: Tensor
    fading: Tensor


class States(NamedTuple):
    """States of a layer, contiguous: inputs (rows, channels, at least kernel), the newest last, and memory, float32
    (rows, v_heads, k_dim, v_dim).
    """

    inputs: Tensor
    memory: Tensor


def delta_step(asked: Asked, rule: DeltaRule, states: States) -> Tensor:
    """Compute the input of the output projection, (rows, v_heads * v_dim) in the dtype of `asked`; advance `states`."""
    found: Tensor = step_kernels(asked.mixed, "delta_triton").delta_step(asked, rule, states)
    return found
