"""Two kernels with other numbers of arguments, for tests. Imported only where there is Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _one_kernel(out, NUMBER: tl.constexpr):
    tl.store(out, NUMBER * 1.0)


@triton.jit
def _many_kernel(out, one, two, four, eight, NUMBER: tl.constexpr):
    tl.store(out + 1, NUMBER * (one + two + four + eight) * 1.0)


def launch(out: Tensor, number: int) -> None:
    """Write number and 15 * number. Each number is a kernel of its own; all of one kind have the same launcher."""
    _one_kernel[(1,)](out, number, num_warps=1)
    _many_kernel[(1,)](out, 1, 2, 4, 8, number, num_warps=1)
