"""Host rows of a captured layer that the device gathers itself: keys that its codes named, over the bus.

It does if all rows of the batch have int8 rows (`offload/int8_rows.py`). The host then attends to the keys that have no
codes yet; if no row of the batch has such keys, the step is recorded without a host call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from retrieval_attn.attention.coded_clusters import CodedPieces, late_pieces, reach_entries
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.host_attend import NamedPieces
from retrieval_attn.cpu.step.tables import StepBuffers
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry, RowShape
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
    """Return whether the device gathers the int8 rows of selected keys of such a layer (`offload/int8_rows.py`).

    Not without estimates: a query then attends to the best of named and late keys together, which one reader selects.
    """
    if layer.window is None or not (layer.index.spec.host_reads.rows and layer.config.estimates):
        return False
    return RowShape(*(one.shape[3] for one in layer.window.buffers)).readable


def gather_entries(
    paths: Sequence[SequenceKV | None],
    apart: Sequence[CodedPieces],
    rows_of: Sequence[Sequence[int]],
    kv_heads: int,
    least: int,
) -> list[GatherEntry | None] | None:
    """Return the int8 rows of each key-value head of a batch; None if some row lacks them, so the host attends.

    paths: of a step's rows; None: a free row. apart: their tokens. rows_of: rows of the batch that each stands for.
    least: as in `GatherEntry`.
    """
    entries: list[GatherEntry | None] = [None] * (kv_heads * sum(map(len, rows_of)))
    for path, one, members in zip(paths, apart, rows_of, strict=True):
        found = [] if path is None else reach_entries(path, one, least)
        if found is None:
            return None
        for row in members:
            entries[row * kv_heads : row * kv_heads + len(found)] = found
    return entries


def uncoded_only(apart: Sequence[CodedPieces]) -> list[NamedPieces]:
    """Return the keys without codes, to which the host attends if the device gathers the selected rows."""
    return [NamedPieces(late_pieces(one.pieces), one.table, 0) for one in apart]


def clear_costs(buffers: StepBuffers) -> None:
    """Clear the costs and the status of the host's last step: no step runs for a while."""
    buffers.meters[:] = 0
    buffers.descriptor[[STATUS, NANOSECONDS]] = 0
