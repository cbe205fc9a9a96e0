"""Products of several rows with weights of 4 bits: in a kernel, or by a copy of one matrix at a time in bfloat16.

Torch's own product is for the few rows of a step: it unpacks a matrix again for each 16 of them, as the kernel of
`gpu/packed_triton.py` does, which takes half of its time. A prefill chunk has thousands: a copy of the matrix and a
product in bfloat16 is far less work. The copy is freed after the product; the memory plan counts one
(`memory/weights.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrieval_attn.model.quantization import packed_weights

KERNEL_ROWS = 64
"""Rows up to which the kernel is used if there is Triton: short questions, and steps that are not captured."""
FROM_ROWS = 32
"""Rows from which a copy is made if there is no kernel: on an H100 one of 14,336 x 4,096 and its product take 117 us,
torch's product 88 for 17 rows, 136 for 32 and 31,800 for a chunk of 8,192 (1,280 by a copy).
"""


class _Own(threading.local):
    """Whether modules of this thread multiply in their own way."""

    modules = False


_own = _Own()


@contextmanager
def own_products() -> Iterator[None]:
    """Let linear modules multiply in their own way in this thread, for comparisons with kernels."""
    _own.modules = True
    try:
        yield
    finally:
        _own.modules = False


class UnpackedLinear:
    """`forward` of a linear module with packed weights. Inputs that autograd follows go the module's own way."""

    def __init__(self, module: nn.Linear) -> None:
        self._module, self._own = module, module.forward

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  as nn.Linear calls it
        rows = input.numel() // max(1, input.shape[-1])
        followed = torch.is_grad_enabled() and input.requires_grad
        weights = None if followed or _own.modules or not rows else packed_weights(self._module)
        if weights is not None and rows <= KERNEL_ROWS and weights.has_kernels:
            numbers = input.reshape(rows, -1).to(weights.dtype)
            return weights.product(numbers).view(*input.shape[:-1], -1).to(input.dtype)
        if weights is None or rows < FROM_ROWS:
            return self._own(input)
        product = functional.linear(input.to(weights.dtype), weights.matrix, weights.bias)
        return product.to(input.dtype)
