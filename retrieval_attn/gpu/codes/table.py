"""Tables of addresses and lengths, which the host writes and the kernels of a layer read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TableWriter:
    """Writes the rows of a table (entries, words) int64 on a device.

    waits: until the rows are there. Otherwise a write is queued behind the device's work, and the device must be done
    with the last one before the next.
    """

    def __init__(self, table: Tensor, *, waits: bool = True) -> None:
        self._table, self._waits = table, waits
        self._rows: Tensor | None = None
        self._written: Tensor | None = None

    def write(self, rows: Sequence[Sequence[int]]) -> None:
        """Write as many rows as the table has."""
        numbers = torch.tensor(rows, dtype=torch.int64).view(self._table.shape)
        if self._waits:
            if self._written is None or not torch.equal(numbers, self._written):  # a copy takes longer than to see that
                self._table.copy_(numbers)
                self._written = numbers
            return
        if self._rows is None:
            self._rows = _page_locked(numbers) if self._table.is_cuda else numbers
        self._rows.copy_(numbers)
        self._table.copy_(self._rows, non_blocking=True)


def _page_locked(like: Tensor) -> Tensor:
    """Memory for numbers like these; ordinary memory where page-locked memory is refused: copies then wait."""
    try:
        return torch.empty_like(like, pin_memory=True)
    except RuntimeError:
        return torch.empty_like(like)
