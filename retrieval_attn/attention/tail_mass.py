"""The share of a head's attention that is estimated and not attended to, summed while a layer decodes.

A step of the host says which share of its partial's weights stands for keys that it did not attend to
(`cpu/step/estimate.py`). Sinks and window weigh against that partial by their lse, so the share of the whole is known
for every head and token, without reading a key more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

AT_ONCE = 128
"""Tokens of one forward each that are summed at once: a few numbers per token cost what beginning an operation does."""
NUMBERS_AT_ONCE = 1024
"""Shares that wait to be summed, at most."""


class TailMass:
    """Sum of estimated attention shares of one layer. count: rows times tokens that were added."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensor | None = None  # (q_heads,) float64, on the device of what was added
        self._host_sums: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # of one shape

    def __copy__(self) -> TailMass:
        """Return a copy of the sums so far; later additions to one do not change the other."""
        other = object.__new__(TailMass)
        other.__dict__.update(self.__dict__, _waiting=self._waiting.copy())
        return other

    def add(self, rest: Tensor, host_lse: Tensor, lse: Tensor) -> None:
        """Some tokens of some rows more. All (batch, q_heads, new) float32 on one device, not written to any more.

        rest: the share of the host's weights that is estimated; host_lse: of the host's partial; lse: of all keys.
        """
        if self._waiting and self._waiting[0][0].shape != rest.shape:
            self._sum_waiting()
        self._waiting.append((rest, host_lse, lse))
        self.count += rest.shape[0] * rest.shape[2]
        if len(self._waiting) >= AT_ONCE or len(self._waiting) * rest.numel() >= NUMBERS_AT_ONCE:
            self._sum_waiting()

    @torch.no_grad()
    def _sum_waiting(self) -> None:
        if self._waiting:
            rest, host_lse, lse = (torch.stack(some) for some in zip(*self._waiting, strict=True))
            shares = torch.exp(host_lse - lse).mul_(rest).sum(dim=(0, 1, 3), dtype=torch.float64)
            self._sums = shares if self._sums is None else self._sums + shares
            self._waiting.clear()

    @torch.no_grad()
    def add_sums(self, sums: Tensor, count: int) -> None:
        """Add sums that were computed elsewhere: (q_heads,) sums of the shares of `count` rows times tokens."""
        if count:
            sums = sums.double().cpu()
            self._host_sums = sums if self._host_sums is None else self._host_sums + sums
            self.count += count

    def means(self) -> npt.NDArray[np.float64]:
        """(q_heads,): the mean over what was added, of each head; of no head if nothing was."""
        self._sum_waiting()
        sums = [some.cpu().numpy() for some in (self._sums, self._host_sums) if some is not None]
        return np.sum(sums, axis=0) / self.count if sums and self.count else np.empty(0)


def mean_share(layers: Mapping[int, TailMass]) -> float | None:
    """Mean over the heads of all layers and what was added to each; None if nothing was. layers: by their numbers."""
    sums = [(tail.means().sum() * tail.count, len(tail.means()) * tail.count) for tail in layers.values()]
    count = sum(number for _, number in sums)
    return float(sum(total for total, _ in sums) / count) if count else None


def largest_share(layers: Mapping[int, TailMass]) -> tuple[int, int, float] | None:
    """Layer, query head and mean of the head whose mean is largest, the first of equals; None if nothing was added."""
    found = [
        (number, int(means.argmax()), float(means.max()))
        for number, tail in layers.items()
        if len(means := tail.means())
    ]
    return max(found, key=lambda one: one[2], default=None)
