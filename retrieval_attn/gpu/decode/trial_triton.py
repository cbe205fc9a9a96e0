"""A kernel that does next to nothing: can Triton compile and launch one here? Imported only where there is Triton.

Triton needs a C compiler beside the package, and a folder to keep what it made.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count_kernel(number):
    tl.store(number, tl.load(number) + 1)


def launch(device: torch.device) -> None:
    """Compile the kernel, or load it, and launch it. Raises whatever Triton raises."""
    with torch.cuda.device(device):
        _count_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=device), num_warps=1)
