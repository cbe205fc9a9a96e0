"""Of a captured layer's host rows, what the device reads itself: keys that its codes named, over the bus.

It does where all of them have rows for it (`offload/int8_rows.py`). The host then has only the keys that have no codes
yet; where no row of the batch has such keys, the step is recorded without a host call.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import CodedPieces, late_pieces, reach_entries
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.host_attend import NamedPieces
from retrieval_attn.cpu.step.tables import StepBuffers
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry, HostRowGather, RowShape
from retrieval_attn.gpu.codes.search import EstimatedLogits
from retrieval_attn.gpu.codes.table import SharedTables
from retrieval_attn.gpu.decode.kernels import HostResult
from retrieval_attn.index.task.tasks import NANOSECONDS, STATUS


class Reads(enum.IntEnum):
    """Reader of the host memory of some rows in a step."""

    HOST = 0
    """The host, all of it."""
    BOTH = 1
    """The device what is named, the host what has no codes."""
    DEVICE = 2
    """The device, all of it: there is no host call."""


def device_reads(layer: RetrievalLayer) -> bool:
    """Whether a device is to read what it names of such a layer, where there are rows for it. Not without estimates:
    then a query attends to the best of named and late keys together, which one reader must tell.
    """
    if layer.window is None or not (layer.index.spec.host_reads.rows and layer.config.estimates):
        return False
    return RowShape(*(one.shape[3] for one in layer.window.buffers)).readable


def estimated_logits_of(
    queries: int, room: int, least: int, share: float, device: torch.device
) -> EstimatedLogits | None:
    """Where a search tells of what it names, `least` keys of each query and `room` at most; None: all are read."""
    best = math.ceil(share * least)
    return None if best >= least else EstimatedLogits(torch.full((queries, room), torch.inf, device=device), best)


class GatheredRows:
    """See the module, for the rows of one `HostStep`. part: the device's results in place of the host's.

    ids: (rows * q_heads, room) int32, where the search names keys, in the order of queries. told: what it tells of
    them; None: nothing, and all keys are read.
    """

    def __init__(
        self,
        heads: int,
        sizes: tuple[int, int],
        shape: RowShape,
        tally: Tensor,
        named: tuple[int, float],
        tables: SharedTables,
    ) -> None:
        """heads: key-value heads of a row. sizes: rows, and keys that a query may have named. tally: as in
        `HostResult`.
        named: keys that a search names at least, and the share of them that are read. tables: see `HostRowGather`.
        """
        least, share = named
        (rows, room), device = sizes, tally.device
        self._reach, self._heads, self._least = HostRowGather(rows * heads, shape, device, tables), heads, least
        self._tally, self._nothing = tally, torch.zeros_like(tally[:, 0])
        self.ids = torch.full((len(tally), room), -1, dtype=torch.int32, device=device)
        self.told = estimated_logits_of(len(tally), room, least, share, device)
        self.found: Partial | None = None

    def bind(self, paths: Sequence[SequenceKV | None], apart: Sequence[CodedPieces], rows_of: list[list[int]]) -> bool:
        """Take the coded keys of a planned step; whether the device reads all of them. paths: None: a free row."""
        entries: list[GatherEntry | None] = [None] * len(self._reach.entries)
        for path, one, members in zip(paths, apart, rows_of, strict=True):
            found = [] if path is None else reach_entries(path, one, self._least)
            if found is None:
                self.forget()
                return False
            for row in members:
                entries[row * self._heads : row * self._heads + len(found)] = found
        self._reach.bind(entries)
        return True

    def bind_nothing(self) -> None:
        """No row has any keys."""
        self._reach.bind([None] * len(self._reach.entries))

    def forget(self, row: int | None = None) -> None:
        """Release keys and values, or those of one row, until the next plan."""
        self._reach.forget(slice(None) if row is None else slice(row * self._heads, (row + 1) * self._heads))

    def run(self, query: Tensor, scoring: Scoring, opaque: Callable[..., None]) -> None:
        """Record: attend query (rows, q_heads, 1, head_dim) to what `ids` name."""
        told = None if self.told is None else self.told.products
        self.found = self._reach.run(query, self.ids, scoring, opaque, told)

    @property
    def part(self) -> HostResult:
        """The recorded result of `run`, in the form of a result from the host."""
        assert self.found is not None
        return HostResult(self.found.out, self.found.lse, None, (self._nothing, self._tally))


def uncoded_only(apart: Sequence[CodedPieces]) -> list[NamedPieces]:
    """Return the keys without codes, to which the host attends if the device reads the selected rows."""
    return [NamedPieces(late_pieces(one.pieces), one.table, 0) for one in apart]


def clear_costs(buffers: StepBuffers) -> None:
    """Clear the costs and the status of the host's last step: no step runs for a while."""
    buffers.meters[:] = 0
    buffers.descriptor[[STATUS, NANOSECONDS]] = 0
