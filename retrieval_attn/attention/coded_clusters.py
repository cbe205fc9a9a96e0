"""The estimate of what is not retrieved where a device has codes of the keys: it knows a score of each.

A query attends to all keys that the device names to the host. Of the other coded keys the device sums the weights by
cluster while the host works (`gpu/clusters/mass.py`). Tokens that came since have no codes: the host keeps the best of
them and estimates the others, by fewer clusters, for they are few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from retrieval_attn.cpu.clusters import MAX_CLUSTERS, ClusterTable
from retrieval_attn.cpu.host_attend import step_pieces
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.cpu.store import SequenceKV, cluster_table
from retrieval_attn.gpu.clusters.mass import MEAN_DTYPE, ClusterEntry, ClusterMass
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry
from retrieval_attn.gpu.codes.search import CodeRange
from retrieval_attn.gpu.codes.table import SharedTables
from retrieval_attn.index.base import DeviceSearch
from retrieval_attn.index.device import SPARE_TOKENS
from retrieval_attn.index.threads import single_blas
from retrieval_attn.offload.int8_rows import Int8RowMirror, ask_for_rows, rows_of
from retrieval_attn.offload.staging import sent
from retrieval_attn.offload.threads import ThreadPool


class CodedPieces(NamedTuple):
    """Tokens of a path as a step takes them, of which one piece may have codes.

    codes: of each key-value head, or none. table: the clusters by which the host estimates, entries: those by which the
    device does, of each head; None: neither.
    """

    pieces: list[SearchRange]
    codes: list[CodeRange | None]
    table: ClusterTable | None
    entries: list[ClusterEntry] | None


def take_apart(path: SequenceKV, start: int, stop: int, k: int) -> CodedPieces:
    """Tokens [start, stop) of a path, searched for the best k. Raises ConfigError outside the path."""
    plain = step_pieces(path, start, stop, clustered=False)
    coded = coded_pieces(plain)
    codes = head_codes(coded[0], k) if len(coded) == 1 else []
    if path.clusters is None or not codes or not all(codes):
        return CodedPieces(step_pieces(path, start, stop), codes, cluster_table(path, start, stop), None)
    piece = coded[0]
    late = path.clusters.late
    begun, ended = piece.first + piece.low, piece.first + piece.high
    if late is None or begun != start:  # nothing tells how many keys there are before the codes
        return CodedPieces(plain, codes, None, None)
    entries = _entries(path, piece)
    if ended == stop:
        return CodedPieces(plain, codes, None, entries)
    table = late.cover(ended, stop, path.parts)
    for number, one in enumerate(plain):
        if one is not piece:
            members = late.shared.members(segment_of(path, one), one.low, one.high, path.fmt)
            plain[number] = one._replace(members=members)
    return CodedPieces(plain, codes, table, entries)


def bring_clusters(path: SequenceKV, start: int, stop: int, k: int) -> None:
    """Make what `take_apart` will find on the device, and nothing else. Nothing for a path without codes there."""
    coded = coded_pieces(step_pieces(path, start, stop, clustered=False))
    if path.clusters is not None and len(coded) == 1 and all(head_codes(coded[0], k) or [None]):
        _entries(path, coded[0])


def join_ahead(path: SequenceKV) -> None:
    """Assign clusters to the coded keys in a sealed path's window, in a background thread.

    Otherwise the first step after a window's eviction does it: .3 s for 512 keys of 32 layers with 8 heads.
    """
    if path.clusters is None or path.clusters.shared.mean_values is None:
        return
    shared, fmt = path.clusters.shared, path.fmt
    coded = coded_pieces(step_pieces(path, path.clusters.start, len(path), clustered=False))
    spans = [(segment_of(path, one), one.low, one.high) for one in coded]

    def join() -> None:
        with single_blas():
            for segment, low, high in spans:
                shared.join_ahead(segment, low, high, fmt)

    _joiner().submit(join)


@functools.cache
def _joiner() -> ThreadPool:
    return ThreadPool(1, "retrieval_attn-join")


def ask_for_rows_of(path: SequenceKV, start: int, stop: int, k: int) -> None:
    """Have threads make the int8 rows that `reach_entries` will return for tokens [start, stop)."""
    coded = coded_pieces(step_pieces(path, start, stop, clustered=False))
    codes = head_codes(coded[0], k) if len(coded) == 1 else []
    if codes and codes[0] is not None:
        ask_for_rows(segment_of(path, coded[0]), codes[0][0].device)


def coded_pieces(pieces: Sequence[SearchRange]) -> list[SearchRange]:
    """The pieces whose keys may be coded on a device."""
    return [piece for piece in pieces if piece.indexes and isinstance(piece.indexes[0], DeviceSearch)]


def head_codes(piece: SearchRange, k: int) -> list[CodeRange | None]:
    """The codes of each key-value head of a piece; None: its search for the best k needs none."""
    stop = piece.high - piece.index_first
    if piece.low != piece.index_first:
        return [None for _ in piece.indexes or ()]
    found = [index.device_codes(k, stop) for index in piece.indexes or () if isinstance(index, DeviceSearch)]
    return [None if codes is None else (codes, stop) for codes in found]


def new_mass(
    entries: int, value_dim: int, device: torch.device, *, waits: bool = True, tables: SharedTables | None = None
) -> ClusterMass:
    """The device's estimate for `entries` key-value heads with any number of clusters; waits, tables: see
    there.
    """
    return ClusterMass(entries, MAX_CLUSTERS, value_dim, MEAN_DTYPE, device, waits=waits, tables=tables)


class _SegmentClusters:
    """Clusters of a segment on a device: members (kv_heads, capacity) uint8, filled for the tokens [first, first +
    length), and mean values (kv_heads, MAX_CLUSTERS, value_dim).
    """

    def __init__(self, mean_values: np.ndarray[Any, Any], first: int, device: torch.device) -> None:
        """mean_values: (kv_heads, clusters, value_dim)."""
        heads, clusters, value_dim = mean_values.shape
        self.mean_values = torch.zeros(heads, MAX_CLUSTERS, value_dim, dtype=MEAN_DTYPE, device=device)
        self.mean_values[:, :clusters] = sent(mean_values, device)
        self.first, self.length = first, 0
        self.members = torch.zeros(heads, 0, dtype=torch.uint8, device=device)
        self._entries: list[ClusterEntry] = []

    @property
    def entries(self) -> list[ClusterEntry]:
        """The entry of each head: the same objects until the members move to other memory."""
        if not self._entries:
            self._entries = [ClusterEntry(*one) for one in zip(self.members, self.mean_values, strict=True)]
        return self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of members, with room for more, and of mean values."""
        return self.members.nbytes + self.mean_values.nbytes

    def cut(self, stop: int) -> None:
        """Forget members from the segment's token `stop` on."""
        self.length = max(0, min(self.length, stop - self.first))

    def cover(self, ids: np.ndarray[Any, Any], stop: int) -> None:
        """Take members up to the segment's token `stop` out of ids (kv_heads, tokens) on the host."""
        length = stop - self.first
        if length <= self.length:
            return
        if length > self.members.shape[1]:
            grown = self.members.new_zeros(len(self.members), length + SPARE_TOKENS)
            grown[:, : self.length] = self.members[:, : self.length]
            self.members, self._entries = grown, []
        self.members[:, self.length : length] = sent(ids[:, self.first + self.length : stop], self.members.device)
        self.length = length


def _entries(path: SequenceKV, piece: SearchRange) -> list[ClusterEntry] | None:
    """The clusters of a piece's coded keys on the device of the codes; None where the path has none for a device."""
    assert path.clusters is not None and piece.indexes
    shared, segment = path.clusters.shared, segment_of(path, piece)
    if shared.mean_values is None:
        return None
    ((codes, _), *_) = [one for one in head_codes(piece, 1) if one is not None]
    device = codes.device
    held = shared.on_devices.setdefault(segment, {})
    known: _SegmentClusters | None = held.get(device)
    if known is None or known.first != piece.index_first:
        known = held[device] = _SegmentClusters(shared.mean_values, piece.index_first, device)
    known.cover(shared.members(segment, piece.index_first, piece.high, path.fmt), piece.high)
    return known.entries


def segment_of(path: SequenceKV, piece: SearchRange) -> Segment:
    """The segment of a path that a piece lies in."""
    return next(segment for segment in path.segments if segment.keys is piece.keys)


def reach_entries(path: SequenceKV, one: CodedPieces, least: int) -> list[GatherEntry] | None:
    """Return the coded keys of each key-value head of a path that was split by `take_apart`; [] without codes.

    None: they have no such rows, or none yet, and the host must attend to them. least: as in `GatherEntry`.
    """
    coded = coded_pieces(one.pieces)
    if not coded:
        return []
    piece = coded[0]
    if len(coded) > 1 or not one.codes or not all(one.codes):
        return None
    segment, coded_keys = segment_of(path, piece), one.codes[0]
    assert coded_keys is not None
    ask_for_rows(segment, coded_keys[0].device)
    rows = rows_of(segment)
    if not isinstance(rows, Int8RowMirror) or piece.index_first < rows.first:
        return None
    return rows.entries(segment, piece.index_first, piece.high, least)


def late_pieces(pieces: Sequence[SearchRange]) -> list[SearchRange]:
    """Those that stay the host's."""
    coded = coded_pieces(pieces)
    return [piece for piece in pieces if not any(piece is one for one in coded)]
