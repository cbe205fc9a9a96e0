"""Where tests of kernels compute: in plain PyTorch, on a GPU, or in Triton's own interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_decode_kernels import INTERPRETED


def place_of(way: str, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> str:
    """The device for "torch" or "triton".

    Interpreted, the kernels that `modules` choose run on the CPU, but for float64: the exact answer is plain PyTorch's.
    """
    if way == "torch":
        return "cpu"
    if not INTERPRETED:
        return "cuda"

    def interpreted(tensor: Tensor, module: str) -> Any:
        exact = tensor.dtype == torch.float64
        return None if exact else importlib.import_module(f"retrieval_attn.gpu.{module}")

    for module in modules:
        monkeypatch.setattr(module, "kernels_for", interpreted)
    return "cpu"
