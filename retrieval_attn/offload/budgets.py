"""BudgetBuild: how many keys each head of a path gets, measured once the path's index is built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from retrieval_attn.config import MEAN_RETRIEVE
from retrieval_attn.cpu.budgets import Sample, allocated, measured_errors
from retrieval_attn.cpu.host_attend import HostPartial, attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.offload.staging import brought_together


@dataclass(frozen=True)
class SampledAttention:
    """Sampled queries of a layer and their attention to sinks and window, on the device: queries (q_heads, n,
    head_dim), out (q_heads, n, value_dim), lse (q_heads, n), float32. scale, softcap: of scores.
    """

    queries: Tensor
    out: Tensor
    lse: Tensor
    scale: float
    softcap: float | None

    def on_host(self) -> Sample:
        """The same in host memory."""
        queries, out, lse = (
            np.ascontiguousarray(part.numpy()) for part in brought_together([self.queries, self.out, self.lse])
        )
        return Sample(queries, (out, lse), self.scale, self.softcap)


class BudgetBuild:
    """The budgets that one layer's pass asks for: `add`, then `run`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[SequenceKV, tuple[int, int], SampledAttention]] = []

    def add(self, host: SequenceKV, span: tuple[int, int], sample: SampledAttention) -> None:
        """The heads of `host`, whose tokens span[0] .. span[1] are retrieved, get budgets by `sample`."""
        self._jobs.append((host, span, sample))

    def run(self) -> None:
        """Measure and choose; the indexes are there. Raises ConfigError for a kind without a compiled search."""
        while self._jobs:
            host, (start, stop), taken = self._jobs.pop(0)
            sample = taken.on_host()

            def attend(
                k: int | None, path: SequenceKV = host, low: int = start, high: int = stop, given: Sample = sample
            ) -> HostPartial:
                scoring = {"scale": given.scale, "softcap": given.softcap}
                return attend_path(path, given.queries, low, high, k, **scoring)  # type: ignore[arg-type]

            budgets = allocated(measured_errors(sample, attend), MEAN_RETRIEVE)
            few, scoring = sample.queries[:, :1], {"scale": sample.scale, "softcap": sample.softcap}
            attend_path(host, few, start, stop, budgets, **scoring)  # type: ignore[arg-type]  # or say now that it cannot be
            host.budgets = budgets
