"""Linear modules whose weights torchao holds in 4 bits, in the layout of torch's own kernel on CUDA."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.model.layers import modules_of


def packed_weights(module: nn.Module) -> PackedWeights | None:
    """Those of a module, as they lie in it; None where it is no linear one, or holds them in another way.

    None too for weights before which inputs are multiplied by a scale of their own (AWQ in torchao).
    """
    kind = _kind()
    weight: Any = getattr(module, "weight", None)
    if kind is None or type(module) is not nn.Linear or type(weight) is not kind or weight.act_pre_scale is not None:
        return None
    bias = None if module.bias is None else module.bias.detach()
    weights = PackedWeights(weight.qdata, weight.scale_and_zero, weight.shape[1], bias)
    whole = weight.ndim == 2 and weight.shape == weights.shape and weights.is_whole
    return weights if whole and weights.group == weight.block_size[-1] else None


def packed_modules(root: nn.Module) -> list[tuple[Any, PackedWeights]]:
    """The linear modules in `root` that hold such weights, with these; without a walk where no module can."""
    if not may_be_packed():
        return []
    found = ((module, packed_weights(module)) for module in modules_of(root))
    return [(module, weights) for module, weights in found if weights is not None]


def may_be_packed() -> bool:
    """Whether any module of the process can hold such weights."""
    return _kind() is not None


def _kind() -> Any:
    library: Any = sys.modules.get("torchao.quantization")  # who has such weights has imported it
    return getattr(library, "Int4TilePackedTo4dTensor", None)


def unpacked_bytes(model: nn.Module) -> int:
    """Bytes of the largest such matrix of a model as a bfloat16 copy; 0 where there is none."""
    sizes = (weights.shape for _, weights in packed_modules(model))
    return max((2 * rows * columns for rows, columns in sizes), default=0)
