"""The tables of a step: which tasks search which ranges of tokens, and what their indexes gave to do so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.step.piece import Piece
from retrieval_attn.index.flat_task import exact_search
from retrieval_attn.index.formats import Format
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.task.descriptor import ENTRY, RANGE, TASK
from retrieval_attn.index.task.search import SCAN_TOKENS, CompiledSearch, SearchRequest


class StepRequest(NamedTuple):
    """What a step is planned for, beside its pieces. parts: tasks that an entry should have at least."""

    q_heads: int
    positions: int
    top_k: int
    scale: float
    softcap: float
    parts: int

    def parts_of(self, piece: Piece, tokens: int = SCAN_TOKENS) -> int:
        """Tasks that a scanned piece is cut into. The more, the more candidates are joined; results are the same."""
        return max(1, min(self.parts, -(-(piece.high - piece.low) // max(tokens, 4 * self.top_k))))

    def signature(self, piece: Piece, last: bool) -> tuple[int, ...]:
        """What a plan depends on of a piece, which the plan keeps alive (so ids stay taken)."""
        parts = self.parts_of(piece)
        fixed = id(piece.keys), id(piece.values), piece.low, piece.first, parts, 0 if last else piece.high
        if piece.indexes is None:
            return fixed
        # a search that sees few of the indexed keys needs a longer pool, so its length matters, though not to the token
        return *fixed, id(piece.indexes), piece.index_first, piece.version, (piece.most - piece.high) // 256


@dataclass(frozen=True)
class Tables:
    """entries, ranges, tasks: arrays of ENTRY, RANGE and TASK. searches: of the ranges."""

    entries: npt.NDArray[Any]
    ranges: npt.NDArray[Any]
    tasks: npt.NDArray[Any]
    searches: list[CompiledSearch]

    @property
    def lists(self) -> int:
        """Most candidate lists of an entry."""
        return int(self.entries["lists"].max())

    def most(self, name: str) -> int:
        """The largest of a number of all searches."""
        return max((getattr(search, name) for search in self.searches), default=0)


def make_tables(
    rows: Sequence[Sequence[Piece]],
    request: StepRequest,
    fmt: Format,
    sizes: tuple[int, int, int],
    candidates: npt.NDArray[np.int32] | None,
) -> Tables | None:
    """Tables for the pieces of each row; None if one of their indexes has no compiled search.

    sizes: key-value heads, queries of an entry, and queries padded. candidates: (entries * queries, room), see
    `StepBuffers`.
    """
    heads, queries, padded = sizes
    entries = np.zeros(len(rows) * heads, ENTRY)
    ranges: list[tuple[int, ...]] = []
    searches: list[CompiledSearch] = []
    tasks: list[tuple[int, int, tuple[int, ...]]] = []
    for row, own in enumerate(rows):
        for head in range(heads):
            entry = row * heads + head
            lists = count = 0
            first_range = len(ranges)
            own_candidates = None if candidates is None else candidates[entry * queries : (entry + 1) * queries]
            for piece in own:
                search: CompiledSearch | None = exact_search(fmt)
                if piece.indexes is not None and piece.low == piece.index_first:
                    visible = piece.high - piece.index_first
                    search = piece.indexes[head].compiled_search(
                        SearchRequest(fmt, queries, padded, request.top_k, piece.index_first, visible, own_candidates)
                    )
                if search is None:
                    return None
                number = len(ranges)
                if search.by_query:
                    parts = max(1, min(request.parts // queries, search.max_parts))
                    for i in range(parts * queries):
                        tasks.append((-1, entry, (entry, number, i, parts, lists + i // queries)))
                    count += parts * queries
                else:
                    if search.first_task:
                        tasks.append((-1, entry, (entry, number, -1, 1, 0)))
                        count += 1
                    parts = request.parts_of(piece, search.part_tokens)
                    for part in range(parts):
                        # all heads' first parts first: what they find lets later parts drop most of their keys
                        tasks.append((part, entry, (entry, number, part, parts, lists + part)))
                    count += parts
                lists += parts
                keys, values = (array.ctypes.data + head * array.strides[0] for array in (piece.keys, piece.values))
                tokens = piece.low, piece.high, piece.first
                ranges.append((search.task, keys, values, *tokens, search.index_at, search.kept))
                searches.append(search)
            entries[entry] = lists, first_range, len(own), count
    ordered = [task for _, _, task in sorted(tasks)]
    return Tables(entries, _records(ranges, RANGE), _records(ordered, TASK), searches)


def _records(rows: list[tuple[int, ...]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array = aligned_empty((len(rows),), dtype)
    array[:] = rows
    return array
