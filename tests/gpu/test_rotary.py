"""Rotary embedding in one kernel against transformers' function, and which functions of a model are taken.

Triton's own interpreter runs the kernel on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_rotary.py
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from retrieval_attn.engine import rotary as engine_rotary
from retrieval_attn.engine.rotary import fused_rotary
from retrieval_attn.gpu import rotary
from tests.tiny_models import build_model, random_ids

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
TRITON = pytest.mark.parametrize("way", [pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])


def inputs(dim: int, tokens: int, rows: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Queries and keys as a layer makes them, and tables: rows 1 for both texts, or 2."""
    generator = torch.Generator().manual_seed(dim + tokens)
    q = torch.randn(2, tokens, 8, dim, generator=generator).transpose(1, 2)
    k = torch.randn(2, tokens, 12, dim, generator=generator)[:, :, 4:6].transpose(1, 2)
    angles = 100 * torch.randn(rows, tokens, dim // 2, generator=generator)
    angles = torch.cat([angles, angles], dim=-1)
    return [one.to(device, dtype) for one in (q, k, angles.cos(), angles.sin())]


@TRITON
@pytest.mark.parametrize("dtype", [torch.float16, *([] if INTERPRETED else [torch.bfloat16])])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 1), (96, 3), (128, 1), (256, 2)])
def test_it_rounds_as_the_function(
    way: str, dim: int, tokens: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for keys that are a part of a larger tensor, too."""
    if INTERPRETED:
        from retrieval_attn.gpu import rotary_triton

        monkeypatch.setattr(rotary, "kernels_for", lambda tensor, module: rotary_triton)
    given = inputs(dim, tokens, rows, dtype, "cpu" if INTERPRETED else "cuda")
    turned = rotary.rotate(*given)
    assert turned is not None
    for own, right in zip(turned, modeling_llama.apply_rotary_pos_emb(*given), strict=True):
        assert torch.equal(own, right)


def test_other_shapes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for a part of a head, or for half of it; of another dtype; no kernel."""
    assert rotary.rotate(*inputs(64, 1, 1, torch.float16)) is None
    monkeypatch.setattr(rotary, "kernels_for", lambda *given: pytest.fail("a kernel was asked for"))
    q, k, cos, sin = inputs(64, 3, 2, torch.float16)
    assert rotary.rotate(q, k, cos[..., :32], sin[..., :32]) is None
    assert rotary.rotate(q, k, cos.float(), sin.float()) is None
    assert rotary.rotate(q, k, cos[:, :1], sin[:, :1]) is None
    assert rotary.rotate(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0]) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU: numbers of calls of what stands for the kernel."""
    seen: list[int] = []
    llama = modeling_llama.apply_rotary_pos_emb

    def plainly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        seen.append(1)
        return llama(q, k, cos, sin)

    monkeypatch.setattr(engine_rotary, "rotate", plainly)
    return seen


def test_a_models_function_is_taken_and_put_back(calls: list[int]) -> None:
    model, ids = build_model("qwen2"), random_ids(1, 9)
    original = modeling_qwen2.apply_rotary_pos_emb
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with pytest.raises(KeyError), fused_rotary(model):
            assert torch.equal(model(input_ids=ids).logits, expected) and len(calls) == len(model.model.layers)
            with fused_rotary(model):  # another thread's, say
                pass
            assert modeling_qwen2.apply_rotary_pos_emb is not original
            raise KeyError("an interrupt, say")
    assert modeling_qwen2.apply_rotary_pos_emb is original


def test_a_function_that_turns_otherwise_stays(calls: list[int]) -> None:
    """Cohere's pairs lie side by side."""
    q, k, cos, sin = inputs(16, 3, 2, torch.float32)
    taken = engine_rotary._Fused(modeling_cohere.apply_rotary_pos_emb)
    for _ in range(2):
        for own, right in zip(taken(q, k, cos, sin), modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(own, right)
    assert len(calls) == 2
    taken(q, k, cos, sin, unsqueeze_dim=1)
    assert len(calls) == 2
