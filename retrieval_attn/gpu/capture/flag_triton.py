"""Triton kernels: a graph asks the host, waits for its answer, fetches results. Imported only where there is Triton.

A replay's number is its flag: nothing has to be reset between replays, which would race with a late reader, and a
flag that an earlier replay left is no flag of this one. Who asks or waits is one warp of one program: what waits leaves
the multiprocessors to the work that runs during the host's search.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.capture.exchange import REPORT_SHIFT

FETCHED = 1024
"""Numbers that one program fetches: many programs, for a load over the bus takes a microsecond."""


@triton.jit
def _ask_kernel(request, head):
    # release, for the whole system: the host must not see the number before the queries that kernels before this one
    # wrote to its memory. A plain store promises no order across the bus.
    tl.atomic_xchg(request, tl.load(head).to(tl.int64), sem="release", scope="sys")


@triton.jit
def _wait_kernel(line, head, report, SHIFT: tl.constexpr):
    generation = tl.load(head)
    failed = tl.load(head + 1)
    polls = tl.load(head + 2)
    number = tl.load(line + 1).to(tl.int64)
    # volatile: else the compiler loads once, before the loop. No acquire: only later kernels read the results.
    seen = tl.load(line, volatile=True)
    count = tl.where(failed == generation, polls, 0)  # one that gave up is enough: the others look once
    while (seen != generation) & (count < polls):
        seen = tl.load(line, volatile=True)
        count += 1
    # the step goes on with what lies there, for a kernel that never ended would take the device with it; the host reads
    # the report and drops the token
    late = seen != generation
    tl.store(head + 1, generation, mask=late)
    tl.store(report, generation.to(tl.int64) * SHIFT + number, mask=late & (failed != generation))


@triton.jit
def _fetch_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    # volatile: from the host's memory, whatever a cache has of an earlier replay
    tl.store(target + at, tl.load(source + at, mask=inside, volatile=True), mask=inside)


def ask(request: Tensor, head: Tensor) -> None:
    """Write the replay's number to `request`, int64 in page-locked host memory, after all that was written before.

    head: int32 on the device: the replay's number, that of the last one in which a wait gave up, how often to look.
    """
    _ask_kernel[(1,)](request, head, num_warps=1)


def wait(line: Tensor, head: Tensor, report: Tensor) -> None:
    """Block later work until line[0] is the replay's number, or until the maximum number of polls.

    line: int32 (2,), the answer and the number of the call, page-locked. report: int64 in page-locked
    host memory, gets the replay's number * REPORT_SHIFT + the call's, of the first call that was waited for in vain.
    """
    _wait_kernel[(1,)](line, head, report, SHIFT=REPORT_SHIFT, num_warps=1)


def fetch(source: Tensor, target: Tensor) -> None:
    """Copy float32 source (count,), page-locked host memory that was written before the wait ended, to the device."""
    count = source.numel()
    _fetch_kernel[(triton.cdiv(count, FETCHED),)](source, target, count, BLOCK=FETCHED, num_warps=4)
