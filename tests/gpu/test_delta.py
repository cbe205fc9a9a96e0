"""One token of the gated delta rule against float64, and against transformers' own.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_delta.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from retrieval_attn.gpu import delta
from retrieval_attn.gpu.delta import Asked, DeltaRule, States, delta_step
from tests.gpu.places import place_of
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.gpu.test_products import SUMS_IN_FLOAT32, Numbers, changed

TRITON = pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]  # interpreted, bfloat16 is cut off
SHAPES = [(4, 12, 128, 128, 4, 4), (12, 12, 16, 64, 4, 6), (6, 24, 64, 16, 3, 3)]
"""Heads of keys and of values, their numbers, taps of the convolution, inputs that are kept."""


@pytest.fixture(params=["torch", TRITON])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to compute, after the kernels were chosen."""
    return place_of(request.param, monkeypatch, delta)


def case(device: str, dtype: torch.dtype, rows: int, shape: tuple[int, ...], bias: bool) -> tuple[Any, ...]:
    """What `delta_step` is given: states, too, which it changes."""
    k_heads, v_heads, k_dim, v_dim, taps, kept = shape
    numbers = Numbers(device, dtype)
    channels, out = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
    asked = Asked(
        numbers(rows, channels), numbers(rows, out), numbers(rows, v_heads, size=2.0), numbers(rows, v_heads, size=9.0)
    )
    rule = DeltaRule(
        numbers(channels, taps, size=0.5), numbers(channels, size=0.3) if bias else None, numbers(v_heads),
        numbers(v_heads, mean=1.0), numbers(v_dim, size=0.3, mean=1.0), 1e-6, k_heads, v_heads, k_dim, v_dim,
    )  # fmt: skip
    memory = numbers(rows, v_heads, k_dim, v_dim, size=0.1).float()
    assert rule.is_whole
    return asked, rule, States(numbers(rows, channels, kept), memory)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_no_noisier_than_modules(
    device: str, dtype: torch.dtype, rows: int, bias: bool, shape: tuple[int, ...]
) -> None:
    """Three tokens, one after the other: what is given and what is left behind. Of all heads and tokens together: the
    norm makes much of what a head that answers nearly nothing was rounded by.
    """
    given = case(device, dtype, rows, shape, bias)
    changes: tuple[Any, ...] = (Tensor.clone, lambda one: one.cpu().clone(), lambda one: one.cpu().double())
    own, modules, right = (_tokens(*changed(given, change)) for change in changes)
    for a, b, c in zip(own, modules, right, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape == c.shape
        noise = float((b.double() - c).norm() / c.norm())
        bound = 8 * SUMS_IN_FLOAT32 if dtype == torch.float32 else max(2 * noise, SUMS_IN_FLOAT32)
        assert float((a.double().cpu() - c).norm() / c.norm()) <= bound


def _tokens(asked: Asked, rule: DeltaRule, states: States) -> tuple[Tensor, Tensor, Tensor]:
    """What three tokens give, and what they leave behind."""
    out = [delta_step(Asked(*(one.roll(token, -1) for one in asked)), rule, states) for token in range(3)]
    return torch.stack(out), *states


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_transformers_rule(device: str, shape: tuple[int, ...]) -> None:
    """Against transformers' function for a token, its convolution and its norm, in float32."""
    asked, rule, states = case(device, torch.float32, 2, shape, True)
    seen = torch.cat((states.inputs, asked.mixed[..., None]), -1)
    kept = functional.conv1d(seen, rule.taps[:, None], rule.tap_bias, groups=rule.channels)[..., -1]
    sizes = [rule.k_heads * rule.k_dim] * 2 + [rule.v_heads * rule.v_dim]
    query, key, value = functional.silu(kept)[:, None].split(sizes, dim=-1)
    share = rule.v_heads // rule.k_heads
    query, key = (one.unflatten(-1, (rule.k_heads, rule.k_dim)).repeat_interleave(share, dim=2) for one in (query, key))
    fade = -rule.log_decay.exp() * functional.softplus(asked.fading + rule.shift)
    out, memory = torch_recurrent_gated_delta_rule(
        query, key, value.unflatten(-1, (rule.v_heads, rule.v_dim)), fade[:, None], asked.strength.sigmoid()[:, None],
        initial_state=states.memory.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    normal = out[:, 0] * torch.rsqrt(out[:, 0].pow(2).mean(-1, keepdim=True) + rule.eps) * rule.norm
    right = normal.flatten(1) * functional.silu(asked.gate)
    own = delta_step(asked, rule, states)
    torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.memory, memory, rtol=1e-5, atol=1e-6)
    assert torch.equal(states.inputs, seen[..., 1:])


def test_what_does_not_fit() -> None:
    _, rule, _ = case("cpu", torch.float32, 1, SHAPES[1], False)
    assert not rule._replace(k_dim=8).is_whole and not rule._replace(v_heads=14).is_whole
    assert not rule._replace(taps=rule.taps[1:]).is_whole and not rule._replace(taps=rule.taps.t()).is_whole
    assert not rule._replace(norm=rule.norm[1:]).is_whole and not rule._replace(v_dim=48).is_whole
