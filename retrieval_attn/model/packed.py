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
    library: Any = sys.modules.get("torchao.quantization")  # who has such weights has imported it
    kind = getattr(library, "Int4TilePackedTo4dTensor", None)
    weight: Any = getattr(module, "weight", None)
    if kind is None or type(module) is not nn.Linear or type(weight) is not kind or weight.act_pre_scale is not None:
        return None
    bias = None if module.bias is None else module.bias.detach()
    weights = PackedWeights(weight.qdata, weight.scale_and_zero, weight.shape[1], bias)
    whole = weight.ndim == 2 and weight.shape == weights.shape and weights.is_whole
    return weights if whole and weights.group == weight.block_size[-1] else None


def unpacked_bytes(model: nn.Module) -> int:
    """Bytes of the largest such matrix of a model as a bfloat16 copy; 0 where there is none."""
    found = (packed_weights(module) for module in modules_of(model))
    return max((2 * one.shape[0] * one.shape[1] for one in found if one is not None), default=0)
