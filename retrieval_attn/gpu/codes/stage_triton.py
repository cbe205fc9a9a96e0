"""The Triton kernel behind `stage.py`. Imported only where there is Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.codes.streamer import BRING_WORDS

PROGRAMS = 16
"""Of all entries together. Eight keep a bus of 51 GB/s busy (H100; 41.7 with half as many words each); more than that
takes would stand in the way of what a step computes meanwhile."""
NUMBERS = 2048
"""Words that a program has on their way: eight loads of 16 bytes of each of its threads."""


@triton.jit
def _bring_kernel(table, WORDS: tl.constexpr, N: tl.constexpr):
    """Copy what the rows of a table name, see `BRING_WORDS`."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    words = table + tl.program_id(0) * WORDS
    # multiples of 16 bytes beside the table, which begins on one: then the compiler loads 16 bytes at once
    source = table + tl.multiple_of(tl.load(words), 2)
    target = table + tl.multiple_of(tl.load(words + 1), 2)
    count = tl.multiple_of(tl.load(words + 2), 2)
    for start in range(program * N, count, programs * N):
        at = start + tl.arange(0, N)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def bring(table: Tensor) -> None:
    """Copy what table (entries, BRING_WORDS) int64 names."""
    entries = len(table)
    _bring_kernel[(entries, max(1, PROGRAMS // entries))](table, WORDS=BRING_WORDS, N=NUMBERS, num_warps=4)
