"""Which columns of a batch are real tokens: bookkeeping for padded rows.

A column counts positions of the padded batch from 0; a row's own tokens are its real columns, in order.
Without padding everywhere the answer is None, and no code downstream builds or copies a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.errors import CacheMismatchError


class Padding:
    """The 2-D attention mask of one forward, copied to the CPU at most once for all layers."""

    def __init__(self, mask: Tensor) -> None:
        """mask: (batch, columns) bool, True = real token."""
        self._mask = mask
        self._cpu: Tensor | None = None

    def columns(self, start: int, stop: int, seen: Tensor | None) -> Tensor | None:
        """Real tokens among columns [start, stop) as (batch, stop - start) CPU bool; None when all are.

        seen: what an earlier forward said of columns [0, start), or None if all were real.
        Raises CacheMismatchError when the mask is too short or contradicts `seen`.
        A forward of a single column is taken to be real without reading the mask: a lone padded token has
        nothing to generate from, and reading would stall the device at every decoding step.
        """
        if self._mask.shape[1] < stop:
            raise CacheMismatchError(
                f"attention_mask covers {self._mask.shape[1]} tokens, but the cache holds {start} and "
                f"{stop - start} more arrive; pass a mask over all {stop} columns, or a fresh cache."
            )
        if stop - start == 1:
            return None
        if self._cpu is None:
            self._cpu = self._mask.to("cpu", torch.bool)
        before = self._cpu[:, :start]
        agrees = bool(before.all()) if seen is None else torch.equal(before, seen[:, :start])
        if not agrees:
            raise CacheMismatchError(
                f"attention_mask marks other padding in the first {start} columns than the cache was filled with; "
                "pass the mask of the earlier turns unchanged, or a fresh cache."
            )
        part = self._cpu[:, start:stop]
        return None if bool(part.all()) else part


def join(seen: Tensor | None, columns: int, new: Tensor | None, count: int, batch: int) -> Tensor | None:
    """Append `new` (batch, count) to `seen` (batch, columns); None stands for all real."""
    if seen is None and new is None:
        return None
    left = seen if seen is not None else torch.ones(batch, columns, dtype=torch.bool)
    right = new if new is not None else torch.ones(batch, count, dtype=torch.bool)
    return torch.cat([left, right], dim=1)
