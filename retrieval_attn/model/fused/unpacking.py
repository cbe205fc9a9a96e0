"""Many rows with weights of 4 bits: multiplied by a copy of one matrix at a time in bfloat16.

Torch's own product is made for the few rows of a step: it unpacks a matrix again for each 16 of them. A prompt's chunk
has thousands, and for these a copy and a product of whole numbers is far less work. The copy is gone with the product;
the memory plan counts one (`memory/weights.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrieval_attn.model.quantization import packed_weights

FROM_ROWS = 32
"""Rows from which a copy is made: on an H100 one of 14,336 x 4,096 and its product take 117 us, torch's product 88 for
17 rows, 136 for 32 and 31,800 for a chunk of 8,192 (1,280 by a copy).
"""


class UnpackedLinear:
    """`forward` of a linear module; fewer rows, and numbers that autograd follows, go the module's own way."""

    def __init__(self, module: nn.Linear) -> None:
        self._module, self._own = module, module.forward

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        rows = input.numel() // max(1, input.shape[-1])
        followed = torch.is_grad_enabled() and input.requires_grad
        weights = None if rows < FROM_ROWS or followed else packed_weights(self._module)
        if weights is None:
            return self._own(input)
        product = functional.linear(input.to(weights.dtype), weights.matrix, weights.bias)
        return product.to(input.dtype)
