"""Codes in host memory on their way to the device: those of one layer come while the layer before it computes.

Scanned where they lie, codes keep the device waiting for the bus, and the bus waits while the device does anything
else. Which codes the next layer needs is known before its queries are: so a step has memory for two layers, which take
turns in it, and what it computes costs no time in addition to the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.gpu.codes.table import SharedTables, new_table
from retrieval_attn.gpu.decode.kernels import kernels_for

TURNS = 2
"""Layers whose codes there is room for."""
STAGED_LAYERS = TURNS + 1
"""The same, with what a question on the text takes."""
BRING_WORDS = 3
"""Words of a row of a table: words from the table itself to the codes, and to where they belong; how many words."""
WORD = 8
"""Bytes of a word."""
ALIGNED = 256
"""Alignment of the codes of a head in bytes."""


class Source(NamedTuple):
    """Codes in host memory: where they begin, on a multiple of 16, and how many bytes count."""

    address: int
    nbytes: int


class Staged(Protocol):
    """A search some of whose codes are brought before it runs. staged: it awaits `place` after it is bound."""

    staged: bool

    def sources(self) -> list[Source | None]:
        """Return the source of each entry; None: its codes are on the device, or it has none."""

    def place(self, addresses: Sequence[int | None]) -> None:
        """Search the codes of these entries there; None: where they are."""


class StreamedCodes:
    """The codes of one search to copy to the device, and their addresses there."""

    def __init__(self, entries: int, device: torch.device, tables: SharedTables | None = None) -> None:
        """tables: where its table lies, which are then uploaded behind `settle`; None: in memory of its own, and the
        device must be done with it before the next `settle`.
        """
        self._table, self._writer = new_table(entries, BRING_WORDS, device, tables, waits=False)
        self._sources: list[Source | None] = [None] * entries

    def find(self, search: Staged) -> int:
        """Note what there is to bring now; returns its bytes."""
        self._sources = search.sources()
        return sum(_room(one) for one in {*self._sources} if one is not None)

    def settle(self, search: Staged, memory: int) -> None:
        """Have it brought to `memory`, an address, and the search find it there. Rows over one text share its codes."""
        places: dict[Source, int] = {}
        rows, here = [], self._table.data_ptr()
        for one in self._sources:
            row = [0] * BRING_WORDS
            if one is not None and one not in places:
                places[one] = memory
                row = [(one.address - here) // WORD, (memory - here) // WORD, 2 * -(-one.nbytes // (2 * WORD))]
                memory += _room(one)
            rows.append(row)
        self._writer.write(rows)
        search.place([None if one is None else places[one] for one in self._sources])

    def bring(self) -> None:
        """Bring them, by the current stream; nothing without kernels, which find codes where they lie."""
        kernels = kernels_for(self._table, "codes.codes_triton")
        if kernels is not None:
            kernels.bring(self._table)


def _room(source: Source) -> int:
    return -(-source.nbytes // ALIGNED) * ALIGNED


class CodeTurns:
    """Device memory for the codes of layers that take turns, of all steps that never run at the same time."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory (TURNS, at least `nbytes`) uint8. That of an earlier call stays valid: between two steps it holds
        nothing. Raises torch.OutOfMemoryError.
        """
        if self._memory is None or self._memory.shape[1] < nbytes:
            self._memory = None  # before more is taken
            self._memory = torch.empty(TURNS, -(-nbytes // ALIGNED) * ALIGNED, dtype=torch.uint8, device=device)
        return self._memory


class CodeStreamer:
    """See the module: the searches of a captured step, in the order in which they are recorded.

    A search's number is what `add` returned; None: it is not one of these, and nothing is done.
    """

    def __init__(self, turns: CodeTurns, tables: SharedTables) -> None:
        """tables: to be uploaded behind `settle`."""
        self._turns, self._tables = turns, tables
        self._staged: list[tuple[Staged, StreamedCodes]] = []
        self._moved: set[int] = set()
        self._memory: Tensor | None = None
        self._under_way: dict[int, Any] = {}

    def add(self, search: Staged, entries: int, device: torch.device) -> int:
        """The next search of the step; returns its number."""
        self._device, search.staged = device, True
        self._staged.append((search, StreamedCodes(entries, device, self._tables)))
        return len(self._staged) - 1

    def moved(self, number: int | None) -> None:
        """A search is bound to other codes, to which `settle` gives a place."""
        self._moved.update(() if number is None else (number,))

    def settle(self) -> None:
        """Give the codes of searches that were bound a place. Raises torch.OutOfMemoryError."""
        most = max((self._staged[number][1].find(self._staged[number][0]) for number in self._moved), default=0)
        memory = self._turns.take(most, self._device) if self._moved else self._memory
        if memory is not self._memory:
            self._memory, self._moved = memory, set(range(len(self._staged)))
            for search, brought in self._staged:
                brought.find(search)
        while self._moved and memory is not None:
            number = self._moved.pop()
            search, brought = self._staged[number]
            brought.settle(search, memory[number % TURNS].data_ptr())

    def begin_step(self) -> None:
        """Record: nothing is under way."""
        self._under_way = {}

    def wait(self, number: int | None, runtime: Runtime) -> None:
        """Record: what follows finds the codes of a search in their place."""
        if number is not None:
            self._begin(number, runtime)
            runtime.after(self._under_way[number])

    def follow(self, number: int | None, runtime: Runtime) -> None:
        """Record: what a search needed is not needed any more, and those behind it have its place."""
        if number is not None:
            for later in range(number + 1, min(number + 1 + TURNS, len(self._staged))):
                self._begin(later, runtime)

    def _begin(self, number: int, runtime: Runtime) -> None:
        if number not in self._under_way:
            self._under_way[number] = runtime.parallel(self._staged[number][1].bring)
