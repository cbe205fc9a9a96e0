"""Coded keys whose rows a device reads in host memory itself (`gpu/codes/host_row_gather.py`): where they lie for
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrieval_attn.attention.coded_clusters import CodedPieces, coded_pieces, segment_of
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry
from retrieval_attn.offload.int8_rows import Int8RowMirror, ask_for_rows


def reach_entries(path: SequenceKV, one: CodedPieces, least: int) -> list[GatherEntry] | None:
    """Of each key-value head, the coded keys of a path that was taken apart; none without codes.

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
    if not isinstance(segment.rounded, Int8RowMirror) or piece.index_first < segment.rounded.first:
        return None
    return segment.rounded.entries(segment, piece.index_first, piece.high, least)


def late_pieces(pieces: Sequence[SearchRange]) -> list[SearchRange]:
    """Those that stay the host's."""
    coded = coded_pieces(pieces)
    return [piece for piece in pieces if not any(piece is one for one in coded)]
