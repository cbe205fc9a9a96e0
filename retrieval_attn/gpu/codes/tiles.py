"""QueryTiles: the queries of a step's rows by the codes that they search, so that a kernel reads codes once for many.

Rows over one text search the same codes. A tile is so many of their queries that one matrix product serves all of them
(Hydragen's inter-sequence batching, section 3.2, for the scan of codes). Tiles are data: one graph serves rows over
whatever texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from retrieval_attn.gpu.codes.table import SharedTables, new_table

__all__ = ["QueryTiles"]


class QueryTiles:
    """Tables int64 (1 + tiles, width): how many tiles there are, and of each the numbers of its queries, -1: no more.

    tables: one for each width. Queries over the same codes are in tiles of the largest width, the last of them in one
    of the least width that holds them.
    """

    def __init__(
        self,
        entries: int,
        members: int,
        widths: tuple[int, ...],
        device: torch.device,
        shared: SharedTables | None = None,
    ) -> None:
        """entries: key-value heads of all rows. members: queries of each. widths: of tiles, rising, powers of 2.
        shared: where the tables lie, see `CodeSearch`.
        """
        self._members, self._widths = members, widths
        # as many as there are where no two entries share codes
        sizes = [(1 + entries * -(-members // width), width) for width in widths]
        taken = [new_table(*size, device, shared) for size in sizes]
        self.tables = tuple(table for table, _ in taken)
        self._writers = [writer for _, writer in taken]
        self.write([])

    def write(self, groups: Sequence[Sequence[int]]) -> None:
        """groups: entries that search the same codes, those without codes left out."""
        made: list[list[list[int]]] = [[] for _ in self._widths]
        for group in groups:
            for number, queries in self._tiles([e * self._members + i for e in group for i in range(self._members)]):
                made[number].append(queries)
        for table, writer, tiles in zip(self.tables, self._writers, made, strict=True):
            width = table.shape[1]
            rows = [[len(tiles)] + [-1] * (width - 1), *tiles]
            writer.write(rows + [[-1] * width] * (len(table) - len(rows)))

    def _tiles(self, queries: list[int]) -> Iterator[tuple[int, list[int]]]:
        """The tiles of queries over the same codes: number of the width, and the queries, filled up."""
        widest = self._widths[-1]
        for first in range(0, len(queries), widest):
            some = queries[first : first + widest]
            number = next(number for number, width in enumerate(self._widths) if len(some) <= width)
            yield number, some + [-1] * (self._widths[number] - len(some))
