"""A model's RMS norms as one kernel each, while a step of one token is recorded.

A module is replaced if its class is called an RMS norm, its `forward` is neither hooked nor replaced, and for numbers
of its own shape `gpu/products.py` returns the same but for one rounding: by its weight, or by 1 + weight (Gemma,
Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.gpu.products import rms_norm
from retrieval_attn.model.layers import modules_of
from retrieval_attn.runner.graph.support import watchers_of

ROWS = 4
"""Of the numbers on which a module is compared."""


@contextmanager
def fused_norms(model: PreTrainedModel) -> Iterator[int]:
    """Norms of a model on a GPU are one kernel each within; gives how many are. Outside they are as they were.

    Not for two threads at once. Nothing happens where Triton does not run: plain PyTorch gains nothing.
    """
    with ExitStack() as stack:
        taken = 0
        if _runs_kernels(model):
            known: dict[Any, bool | None] = {}
            for module in modules_of(model):
                counted = _known_counting(module, known) if is_rms_norm(module) else None
                if counted is not None:
                    stack.callback(module.__dict__.pop, "forward")
                    module.__dict__["forward"] = _Fused(module, counted)
                    taken += 1
        yield taken


def _runs_kernels(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


class _Fused:
    """`forward` of one norm."""

    def __init__(self, module: nn.Module, from_one: bool) -> None:
        self._module, self._eps, self._from_one = module, eps_of(module), from_one

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self._module.weight
        if hidden_states.dtype != weight.dtype:  # weights of another precision decide the answer's
            other: Tensor = type(self._module).forward(self._module, hidden_states)
            return other
        return rms_norm(hidden_states, weight, self._eps, self._from_one)


def eps_of(module: nn.Module) -> float:
    """Return the number that an RMS norm adds to the mean of squares."""
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is called what is fused, and its `forward` is its class's own and not watched."""
    watched = watchers_of(module) or "forward" in module.__dict__
    named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    weight = getattr(module, "weight", None)
    return named and not watched and isinstance(weight, Tensor) and weight.ndim == 1 and len(module._parameters) == 1


def _known_counting(module: nn.Module, known: dict[Any, bool | None]) -> bool | None:
    """See `counts_from_one`; modules of one class, size and eps are compared once."""
    weight: Any = module.weight
    kind = type(module), weight.shape, weight.dtype, weight.device, eps_of(module)
    if kind not in known:
        known[kind] = counts_from_one(module)
    return known[kind]


def counts_from_one(module: nn.Module) -> bool | None:
    """Whether an RMS norm multiplies by 1 + weight, and not by its weight; None: `rms_norm` gives neither."""
    weight: Any = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    numbers = torch.randn(ROWS, weight.shape[0], generator=generator, device=weight.device).to(weight.dtype)
    rounding = 4 * torch.finfo(weight.dtype).eps
    with torch.no_grad():
        own = module(numbers)
        for from_one in (False, True):
            fused = rms_norm(numbers, weight, eps_of(module), from_one)
            if own.dtype == fused.dtype and torch.allclose(own, fused, rtol=rounding, atol=rounding):
                return from_one
    return None
