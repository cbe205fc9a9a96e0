"""Rows of a batch that share a path: their tokens stand side by side when they ask it, row after row."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from retrieval_attn.cpu.store import SequenceKV


def rows_by_path(hosts: Items[SequenceKV]) -> list[tuple[SequenceKV, list[int]]]:
    """hosts: the path of each row. Each path once, in order, with its rows, ascending."""
    found: dict[int, tuple[SequenceKV, list[int]]] = {}
    for row, host in enumerate(hosts):
        found.setdefault(id(host), (host, []))[1].append(row)
    return list(found.values())


def stacked(query: Tensor, rows: Items[int]) -> Tensor:
    """query (batch, q_heads, new, head_dim) of these rows, ascending: (q_heads, rows * new, head_dim).

    A view for a batch of one row.
    """
    own = query if len(rows) == len(query) else query[list(rows)]  # indices would have to cross to the device
    return own.transpose(0, 1).flatten(1, 2)


def unstacked(part: Tensor, rows: int) -> Tensor:
    """What queries that `stacked` made got, (q_heads, rows * new, ...), by row: a view (rows, q_heads, new, ...)."""
    if rows == 1:  # mostly, and for every layer of a token: one operation in place of two
        return part.unsqueeze(0)
    return part.unflatten(1, (rows, part.shape[1] // rows)).transpose(0, 1)
