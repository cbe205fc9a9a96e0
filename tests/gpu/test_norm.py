"""RMS norm in one kernel against transformers' module, and which modules of a model are taken.

Triton's own interpreter runs the kernel on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_norm.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from retrieval_attn.gpu import products as norm
from retrieval_attn.model.fused import norms
from retrieval_attn.model.fused.norms import fused_norms
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.tiny_models import CONFIGS, build_model, random_ids

TRITON = pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]  # interpreted, bfloat16 is cut off


@pytest.mark.parametrize("way", ["torch", TRITON])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 100, 128, 4096])
@pytest.mark.parametrize("from_one", [False, True])
def test_it_rounds_as_the_module(
    way: str, from_one: bool, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows apart from each other, too: the module's numbers, but where the order of the sum turns a rounding."""
    if way == "triton" and INTERPRETED:
        from retrieval_attn.gpu import products_triton as norm_triton

        monkeypatch.setattr(norm, "kernels_for", lambda tensor, module: norm_triton)
    device = "cuda" if way == "triton" and not INTERPRETED else "cpu"
    module: Any = (Gemma3RMSNorm if from_one else LlamaRMSNorm)(dim, 1e-5).to(device, dtype)
    torch.nn.init.normal_(module.weight, 0.0 if from_one else 1.0, 0.3)
    hidden = (3 * torch.randn(5, 14, dim, generator=torch.Generator().manual_seed(dim))).to(device, dtype)[:, ::2]
    with torch.no_grad():
        right, own = module(hidden), norm.rms_norm(hidden, module.weight, 1e-5, from_one)
    assert own.dtype == dtype and own.shape == right.shape
    torch.testing.assert_close(own, right, rtol=(8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps, atol=0)
    if dtype != torch.float32:
        assert float((own == right).float().mean()) > 0.99
    assert norm.rms_norm(hidden[:0], module.weight, 1e-5, from_one).shape == (0, 7, dim)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_runs_kernels", lambda model: True)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str) -> None:
    """Gemma's norms, which add 1 to their weights, too; no family's logits change, and all is put back."""
    model, ids = build_model(name), random_ids(1, 9)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with fused_norms(model) as taken:
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    assert taken > 0
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_modules_that_are_watched_or_different_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook, a forward of its own, a weight of another dtype than what comes; an error puts all back."""
    model: Any = build_model("qwen2")
    parts = [module for module in model.modules() if type(module).__name__ == "Qwen2RMSNorm"]
    with fused_norms(model) as taken:
        assert taken == len(parts)
    parts[0].register_forward_hook(lambda *given: None)
    parts[1].forward = own = lambda hidden: hidden
    with pytest.raises(KeyError), fused_norms(model) as taken:
        assert taken == len(parts) - 2 and parts[1].forward is own
        half = torch.ones(1, 1, parts[2].weight.shape[0], dtype=torch.bfloat16)
        assert parts[2](half).dtype == torch.float32
        raise KeyError("an interrupt, say")
    assert parts[1].forward is own and "forward" not in parts[2].__dict__
    monkeypatch.setattr(norms, "rms_norm", lambda hidden, weight, eps, from_one: 2 * hidden)
    with fused_norms(model) as taken:
        assert taken == 0


def test_a_cpu_gains_nothing() -> None:
    with fused_norms(build_model("qwen2")) as taken:
        assert taken == 0
