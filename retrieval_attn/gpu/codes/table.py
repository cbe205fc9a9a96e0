"""Tables of addresses and lengths, which the host writes and the kernels of a layer read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import BackendError

CHUNK_WORDS = 1 << 16
"""Of the memory that shared tables lie in, at least: a step of 16 rows and 32 layers has 25 thousand."""
ALIGNED_WORDS = 16
"""Alignment of a shared table in words: kernels are compiled for aligned addresses."""


Entry = TypeVar("Entry")


class BoundEntries(ABC, Generic[Entry]):
    """Device memory that a layer's kernels read, by key-value heads of all rows. entries: None: nothing is bound.

    `bind` writes where the memory is, a recorded `run` reads that, and `forget` releases the memory.
    """

    def __init__(self, count: int) -> None:
        self.entries: list[Entry | None] = [None] * count

    @abstractmethod
    def bind(self, entries: Sequence[Entry | None]) -> None:
        """Bind the entry of key-value head h of row b, at b * kv_heads + h; None: nothing for its queries.

        Raises BackendError for entries that the kernels do not read.
        """

    def bind_nothing(self) -> None:
        """Bind nothing to any head."""
        self.bind([None] * len(self.entries))

    def forget(self, own: slice = slice(None)) -> None:
        """Release these entries; `bind` sets others before the next `run`."""
        self.entries[own] = [None] * len(self.entries[own])


class Writer(Protocol):
    """Writes rows of a table (entries, words) int64 on a device."""

    def write(self, rows: Sequence[Sequence[int]], first: int = 0) -> None:
        """Write these rows, from row `first` on."""


class SharedTables:
    """Tables of all layers of a step: what was written to any of them goes to the device by one copy, in `upload`.

    For one thread at a time.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def take(self, entries: int, words: int, device: torch.device) -> tuple[Tensor, Writer]:
        """A new table (entries, words) of zeros, and what writes it. It lives as long as these tables."""
        size = -(-entries * words // ALIGNED_WORDS) * ALIGNED_WORDS
        chunk = next((one for one in self._chunks if one.table.device == device and one.room >= size), None)
        if chunk is None:
            chunk = _Chunk(max(size, CHUNK_WORDS), device)
            self._chunks.append(chunk)
        first = len(chunk.table) - chunk.room
        chunk.room -= size
        return chunk.table[first : first + entries * words].view(entries, words), _SharedWriter(chunk, first, words)

    def upload(self) -> None:
        """Have the device see what was written, before anything that is launched behind this on the current stream."""
        for chunk in self._chunks:
            chunk.upload()


class _Chunk:
    """Memory of several tables. table: (words,) int64 on the device. room: free words at its end."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.table, self.room = torch.zeros(words, dtype=torch.int64, device=device), words
        rows = torch.zeros(words, dtype=torch.int64)
        self._rows = _page_locked(rows).zero_() if self.table.is_cuda else rows
        self._words = self._rows.numpy()
        self._written = (words, 0)  # what the device has not: from which word, to which
        self._copied: torch.cuda.Event | None = None

    def write(self, first: int, words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Write words from `first` on."""
        own = self._words[first : first + len(words)]
        if np.array_equal(own, words):
            return
        if self._copied is not None:
            self._copied.synchronize()  # it reads the rows as they are when it runs
            self._copied = None
        own[:] = words
        self._written = min(self._written[0], first), max(self._written[1], first + len(words))

    def upload(self) -> None:
        """See `SharedTables`."""
        (first, stop), self._written = self._written, (len(self._words), 0)
        if first < stop:
            self.table[first:stop].copy_(self._rows[first:stop], non_blocking=True)
            if self.table.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(self.table.device))


class _SharedWriter:
    """A `Writer` of a table that begins at word `first` of a chunk. The device has the rows after the next upload."""

    def __init__(self, chunk: _Chunk, first: int, words: int) -> None:
        self._chunk, self._first, self._width = chunk, first, words

    def write(self, rows: Sequence[Sequence[int]], first: int = 0) -> None:
        self._chunk.write(self._first + first * self._width, np.array(rows, np.int64).reshape(-1))


class TableWriter:
    """Writes the rows of a table (entries, words) int64 on a device, all of them at once.

    waits: until the rows are there. Otherwise a write is queued behind the device's work, and the device must be done
    with the last one before the next.
    """

    def __init__(self, table: Tensor, *, waits: bool = True) -> None:
        self._table, self._waits = table, waits
        self._rows: Tensor | None = None
        self._written: Tensor | None = None

    def write(self, rows: Sequence[Sequence[int]], first: int = 0) -> None:
        """Write as many rows as the table has. Raises BackendError for fewer."""
        if first or len(rows) != len(self._table):
            raise BackendError(
                f"all {len(self._table)} rows of this table must be written at once, got {len(rows)} rows from row "
                f"{first}; use a table of `SharedTables` to write some"
            )
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


def new_table(
    entries: int, words: int, device: torch.device, shared: SharedTables | None, *, waits: bool = True
) -> tuple[Tensor, Writer]:
    """A new table (entries, words) of zeros, and what writes it. shared: where it lies; None: in memory of its own, and
    waits: see `TableWriter`.
    """
    if shared is not None:
        return shared.take(entries, words, device)
    table = torch.zeros(entries, words, dtype=torch.int64, device=device)
    return table, TableWriter(table, waits=waits)


def _page_locked(like: Tensor) -> Tensor:
    """Memory for numbers like these; ordinary memory where page-locked memory is refused: copies then wait."""
    try:
        return torch.empty_like(like, pin_memory=True)
    except RuntimeError:
        return torch.empty_like(like)
