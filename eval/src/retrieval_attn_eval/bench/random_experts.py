"""Random experts in 4 bits, made in the form of a device: for models that are measured and never whole in 16 bits."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from retrieval_attn.testing import (
    FLOAT_GROUP,
    GROUP,
    BlockLayout,
    ExpertShape,
    ExpertWeights,
    PackedExperts,
    PackedWeights,
    PlacedExperts,
    empty_blocks,
    expert_parameters,
    matrix_shape,
    packed_shapes,
    quantized_experts,
    use_packed_experts,
)

__all__ = ["draw_experts", "experts_on_meta"]

DEVIATION = 0.02
_FLOAT_SCALE, _INT_SCALE = 2.0**-8, 2.0**-8
"""Scales by which random numbers of 4 bits have about DEVIATION."""


@contextlib.contextmanager
def experts_on_meta(model_class: type[Any]) -> Iterator[None]:
    """Within, models of a class of transformers are made with their experts on the meta device."""

    def made_on_meta(own: Any) -> Any:
        def init(module: nn.Module, *args: Any, **options: Any) -> None:
            with torch.device("meta"):
                own(module, *args, **options)

        return init

    with contextlib.ExitStack() as stack:
        for name, kind in inspect.getmembers(sys.modules[model_class.__module__], inspect.isclass):
            if name.endswith("Experts") and issubclass(kind, nn.Module):
                stack.enter_context(mock.patch.object(kind, "__init__", made_on_meta(kind.__init__)))
        yield


def draw_experts(model: Any, device: torch.device, dtype: torch.dtype, *, floats: bool, on_host: int = 0) -> None:
    """Give a model random experts in 4 bits in place of those on the meta device.

    dtype: of the model's inputs. floats: numbers are E2M1 as in MXFP4, on a GPU. on_host: experts of each layer in host
    memory; all of these are equal.
    """
    for module in model.modules():
        names = expert_parameters(module) or ()
        for name, weight in list(module._parameters.items()) if names else ():
            if weight is None:
                continue
            if name in names:
                shape = matrix_shape(module, name)
                made: Tensor = _drawn(shape, device, dtype, floats=floats, on_host=on_host, like=module)
            else:
                made = torch.zeros(weight.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
    use_packed_experts(model)


def _drawn(
    shape: ExpertShape, device: torch.device, dtype: torch.dtype, *, floats: bool, on_host: int, like: Any
) -> ExpertWeights:
    group = FLOAT_GROUP if floats else GROUP
    if on_host:
        blocks = empty_blocks(BlockLayout(shape, group, floats), device, on_host)
        block = blocks.layout.block(_random_weights(shape._replace(experts=1), group, device, floats=floats))
        blocks.card.copy_(block)
        blocks.host.copy_(block.cpu())
        return ExpertWeights(PlacedExperts(blocks, shape.experts), dtype=dtype, transposed=like.is_transposed)
    if device.type == "cpu":
        weight = torch.randn(shape, dtype=dtype) * DEVIATION
        weight = weight.transpose(1, 2) if like.is_transposed else weight
        return quantized_experts(weight, transposed=like.is_transposed, device=device)
    held = PackedExperts(_random_weights(shape, group, device, floats=floats), shape.experts)
    return ExpertWeights(held, dtype=dtype, transposed=like.is_transposed)


def _random_weights(shape: ExpertShape, group: int, device: torch.device, *, floats: bool) -> PackedWeights:
    word_shape, scale_shape = packed_shapes(shape, group)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, word_shape, dtype=torch.int32, device=device)
    scale = _FLOAT_SCALE if floats else _INT_SCALE
    scales = torch.tensor([scale, -8 * scale if floats else scale / 2], dtype=torch.bfloat16, device=device)
    return PackedWeights(words, scales.repeat(*scale_shape[:2], 1), shape.columns, floats=floats)
