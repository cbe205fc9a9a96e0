"""A model's RMS norms as one kernel each, while a step of one token is recorded.

A module is taken if its class is called an RMS norm, nobody watches or has replaced its `forward`, and for numbers of
its own shape `gpu/norm.py` gives what it gives, but for one rounding. Gemma's, which add 1 to the weight, do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.engine.graph.support import watchers_of
from retrieval_attn.gpu.norm import rms_norm
from retrieval_attn.model.layers import modules_of

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
            known: dict[Any, bool] = {}
            for module in modules_of(model):
                if is_rms_norm(module) and _same(module, known):
                    stack.callback(module.__dict__.pop, "forward")
                    module.__dict__["forward"] = _Fused(module)
                    taken += 1
        yield taken


def _runs_kernels(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


class _Fused:
    """`forward` of one norm."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._eps = module, eps_of(module)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self._module.weight
        if hidden_states.dtype != weight.dtype:  # weights of another precision decide the answer's
            other: Tensor = type(self._module).forward(self._module, hidden_states)
            return other
        return rms_norm(hidden_states, weight, self._eps)


def eps_of(module: nn.Module) -> float:
    """What an RMS norm adds to the mean of squares."""
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it is called what is fused, and its `forward` is its class's own and not watched."""
    watched = watchers_of(module) or "forward" in module.__dict__
    named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm)
    weight = getattr(module, "weight", None)
    return named and not watched and isinstance(weight, Tensor) and weight.ndim == 1 and len(module._parameters) == 1


def _same(module: nn.Module, known: dict[Any, bool]) -> bool:
    """Whether both ways give the same numbers; modules of one class, size and eps are compared once."""
    weight: Any = module.weight
    kind = type(module), weight.shape, weight.dtype, weight.device, eps_of(module)
    if kind not in known:
        generator = torch.Generator(weight.device).manual_seed(0)
        numbers = torch.randn(ROWS, weight.shape[0], generator=generator, device=weight.device).to(weight.dtype)
        with torch.no_grad():
            own, fused = module(numbers), rms_norm(numbers, weight, eps_of(module))
        rounding = 4 * torch.finfo(weight.dtype).eps
        known[kind] = own.dtype == fused.dtype and torch.allclose(own, fused, rtol=rounding, atol=rounding)
    return known[kind]
