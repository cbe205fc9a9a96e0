"""The Triton kernels behind `delta.py`.

The convolution is a kernel of its own: the heads of values that share a query and a key would each shift its inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.delta import UNIT_EPS, Asked, DeltaRule, States
from retrieval_attn.gpu.products_triton import begin, overlap

CHANNELS = 128
"""Of the convolution, of one program."""


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _convolve_kernel(
    mixed, inputs, taps, bias, out, channels, length,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr, KERNEL: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program per C channels of a row: silu of the newest inputs by their taps, and inputs moved on by one.

    inputs (rows, channels, length), L at least length.
    """
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * C + tl.arange(0, C)
    place, inside = tl.arange(0, L), channel < channels
    begin(OVERLAP)
    newest = tl.load(mixed + row * channels + channel, mask=inside, other=0.0)
    at = (row * channels + channel)[:, None] * length + place[None, :]
    # each thread's numbers of a channel lie one place on: all are read before one of them is written
    later = (place < length - 1)[None, :]
    moved = tl.load(inputs + at + 1, mask=inside[:, None] & later, other=0.0)
    moved = tl.where(later, moved, newest[:, None].to(moved.dtype))
    tap = place - (length - KERNEL)  # of the inputs that are kept, the last ones count
    used = (tap >= 0) & (place < length)
    factor = tl.load(taps + channel[:, None] * KERNEL + tap[None, :], mask=inside[:, None] & used[None, :], other=0.0)
    kept = tl.sum(tl.where(used[None, :], moved.to(tl.float32) * factor.to(tl.float32), 0.0), axis=1)
    if HAS_BIAS:
        kept += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, _silu(kept).to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    tl.store(inputs + at, moved, mask=inside[:, None] & (place < length)[None, :])


@triton.jit
def _delta_kernel(
    kept, gate, strength, fading, log_decay, shift, norm, memory, out, eps, unit_eps, k_heads, v_heads,
    OVERLAP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program per head of values of a row: its state (K, V) fades, learns key and value, and answers the query."""
    row, head = tl.program_id(0).to(tl.int64) // v_heads, tl.program_id(0) % v_heads
    shared = head // (v_heads // k_heads)
    at_key, at_value = tl.arange(0, K), tl.arange(0, V)
    weight = tl.load(norm + at_value).to(tl.float32)
    speed = tl.exp(tl.load(log_decay + head).to(tl.float32))
    moved = tl.load(shift + head).to(tl.float32)
    begin(OVERLAP)
    at = memory + (row * v_heads + head) * K * V + at_key[:, None] * V + at_value[None, :]
    state = tl.load(at)
    kept += row * (2 * k_heads * K + v_heads * V)
    query = tl.load(kept + shared * K + at_key).to(tl.float32)
    key = tl.load(kept + (k_heads + shared) * K + at_key).to(tl.float32)
    value = tl.load(kept + 2 * k_heads * K + head * V + at_value).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + unit_eps) * tl.rsqrt(K * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + unit_eps)
    fade = tl.load(fading + row * v_heads + head).to(tl.float32) + moved
    # softplus, as torch: of large numbers they themselves
    fade = tl.where(fade > 20, fade, tl.log(1 + tl.exp(tl.minimum(fade, 20.0))))
    learn = 1 / (1 + tl.exp(-tl.load(strength + row * v_heads + head).to(tl.float32)))
    state *= tl.exp(-speed * fade)
    change = (value - tl.sum(state * key[:, None], axis=0)) * learn
    state += key[:, None] * change[None, :]
    tl.store(at, state)
    answer = tl.sum(state * query[:, None], axis=0)
    # rounded before the norm, as modules round: the answer is to be the one that they give
    answer = answer.to(out.dtype.element_ty).to(tl.float32)
    answer *= tl.rsqrt(tl.sum(answer * answer, axis=0) / V + eps) * weight
    place = (row * v_heads + head) * V + at_value
    answer *= _silu(tl.load(gate + place).to(tl.float32))
    tl.store(out + place, answer.to(out.dtype.element_ty))


def delta_step(asked: Asked, rule: DeltaRule, states: States) -> Tensor:
    """See `delta.delta_step`."""
    mixed, gate, strength, fading = (one.contiguous() for one in asked)
    (rows, channels), length = mixed.shape, states.inputs.shape[2]
    kept, out = mixed.new_empty(rows, channels), mixed.new_empty(rows, rule.v_heads * rule.v_dim)
    options = overlap(mixed.device)
    _convolve_kernel[(triton.cdiv(channels, CHANNELS), rows)](
        mixed, states.inputs, rule.taps, mixed if rule.tap_bias is None else rule.tap_bias, kept, channels, length,
        HAS_BIAS=rule.tap_bias is not None, KERNEL=rule.taps.shape[1], L=triton.next_power_of_2(length), C=CHANNELS,
        num_warps=4, **options,
    )  # fmt: skip
    _delta_kernel[(rows * rule.v_heads,)](
        kept, gate, strength, fading, rule.log_decay, rule.shift, rule.norm, states.memory, out, rule.eps, UNIT_EPS,
        rule.k_heads, rule.v_heads, K=rule.k_dim, V=rule.v_dim, num_warps=8, **options,
    )  # fmt: skip
    return out
