"""Coded keys that a device reads in host memory itself (`gpu/codes/reach.py`): where they lie for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from retrieval_attn.cache.coded_clusters import CodedPieces, coded_pieces, segment_of
from retrieval_attn.cpu.step.search_range import SearchRange
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.gpu.codes.reach import ReachEntry, RowShape
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.page_lock import lock_rest, locked_rows
from retrieval_attn.offload.transfer import TORCH_DTYPE

log = logging.getLogger(__name__)


def row_shape(fmt: Format, head_dim: int, value_dim: int) -> RowShape:
    """The rows of keys and values in a format."""
    return RowShape(TORCH_DTYPE[fmt], head_dim, value_dim)


def reach_entries(path: SequenceKV, one: CodedPieces, least: int, device: torch.device) -> list[ReachEntry] | None:
    """Of each key-value head, the coded keys of a path that was taken apart; none without codes.

    Page-locks what is not yet. None: the device cannot read them all, and the host must. least: as in `ReachEntry`.
    """
    coded = coded_pieces(one.pieces)
    if not coded:
        return []
    piece, dtype = coded[0], TORCH_DTYPE[path.fmt]
    if len(coded) > 1 or not one.codes or not all(one.codes):
        return None
    segment = segment_of(path, piece)
    if device.type != "cpu" and not lock_rest(segment):
        log.debug("%d tokens are not page-locked: the host attends to what is named of them", segment.length)
        return None
    keys, values = locked_rows(segment, piece.index_first, piece.high)
    if any(array.ctypes.data % row_shape(path.fmt, path.head_dim, path.value_dim).unit for array in (keys, values)):
        return None
    both = (torch.from_numpy(array).view(dtype) for array in (keys, values))
    return [ReachEntry(key, value, piece.high - piece.index_first, least) for key, value in zip(*both, strict=True)]


def late_pieces(pieces: Sequence[SearchRange]) -> list[SearchRange]:
    """Those that stay the host's."""
    coded = coded_pieces(pieces)
    return [piece for piece in pieces if not any(piece is one for one in coded)]
