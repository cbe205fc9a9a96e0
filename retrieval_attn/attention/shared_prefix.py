"""Pasts of several rows of one layer, attended to together as far as they are the same tokens in the same memory.

Each run of tokens that rows have in common visits the device once, and the queries of all rows over it attend in one
call that needs no mask (Juravsky et al. 2024, "Hydragen", section 3.2: inter-sequence batching; section 3.4: a tree of
prefixes). Every row goes on by itself from where its tokens are no other's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.attention.prior_kv import PriorKV
from retrieval_attn.cpu.segment import PathPart
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge

LEAST_SHARED = 256
"""Fewer tokens in common cost more in calls than they save."""

Group = tuple[list[int], Partial]
"""Rows, ascending, and what their queries got, one row's behind another's."""


class Run(NamedTuple):
    """Tokens [start, stop) of the paths of these rows. level: runs that the rows have before."""

    start: int
    stop: int
    rows: list[int]
    level: int


def attend_together(
    pasts: Items[PriorKV], queries: Items[Tensor], value_dim: int, scale: float, softcap: float | None
) -> Partial:
    """Each of queries (1, q_heads, new, head_dim) over its past, of one row; the answers one behind another."""
    counts = [one.shape[2] for one in queries]

    def asked(rows: Items[int]) -> Tensor:
        return torch.cat([queries[row] for row in rows], dim=2) if len(rows) > 1 else queries[rows[0]]

    sinks = [([row], past.attend_sinks(queries[row], scale, softcap)) for row, past in enumerate(pasts)]
    pages = [
        (rows, pasts[rows[0]].attend_exact(asked(rows), scale, softcap))
        for rows in _alike(range(len(pasts)), lambda row: pasts[row].pages)
    ]
    levels = [[(rows, part) for rows, part in level if part is not None] for level in (sinks, pages)]
    runs = runs_of([past.parts for past in pasts])
    levels += [[] for _ in range(1 + max((run.level for run in runs), default=-1))]
    by_walker: dict[int, list[Run]] = {}
    for run in runs:
        by_walker.setdefault(run.rows[0], []).append(run)
    for walker, own in by_walker.items():
        spans = [((run.start, run.stop), asked(sorted(run.rows))) for run in own]
        for run, part in zip(own, pasts[walker].attend_spans(spans, scale, softcap), strict=True):
            levels[2 + run.level].append((sorted(run.rows), part))
    parts = [in_order(_completed(level, queries, value_dim), counts) for level in levels if level]
    return merge(parts or [in_order(_completed([], queries, value_dim), counts)])


def runs_of(paths: Items[list[PathPart]]) -> list[Run]:
    """The runs of tokens that cover the paths, each read once; of one row's, the earlier ones first.

    Of a run's rows the first one ends there, where one does: it asks for nothing behind it.
    """
    ends = [path[-1].first + path[-1].high if path else 0 for path in paths]
    found: list[Run] = []

    def walk(rows: list[int], start: int, level: int) -> None:
        for group in _alike(rows, lambda row: _place(paths[row], start)):
            stop = min(_common(paths[group[0]], paths[row], start) for row in group)
            if len(group) > 1 and stop - start < LEAST_SHARED:
                found.extend(Run(start, ends[row], [row], level) for row in group)
                continue
            found.append(Run(start, stop, sorted(group, key=lambda row: ends[row] > stop), level))
            walk([row for row in group if ends[row] > stop], stop, level + 1)

    for rows in _alike([row for row, path in enumerate(paths) if path], lambda row: _start(paths[row])):
        walk(rows, _start(paths[rows[0]]), 0)
    return found


def in_order(groups: Items[Group], counts: Items[int]) -> Partial:
    """What groups of rows got, for the queries of one row behind another's, with the rows in order, each in one group.

    counts: queries of each row.
    """
    if len(groups) == 1:
        return groups[0][1]
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for rows, found in groups:
        own = [counts[row] for row in rows]
        parts.update(zip(rows, zip(found.out.split(own, 2), found.lse.split(own, 2), strict=True), strict=True))
    out, lse = zip(*(parts[row] for row in range(len(counts))), strict=True)
    return Partial(torch.cat(out, dim=2), torch.cat(lse, dim=2))


def _completed(groups: list[Group], queries: Items[Tensor], value_dim: int) -> list[Group]:
    """With what rows get that are in none of the groups: nothing."""
    known = {row for rows, _ in groups for row in rows}
    missing = [row for row in range(len(queries)) if row not in known]
    if not missing:
        return groups
    tokens = sum(queries[row].shape[2] for row in missing)
    return [*groups, (missing, empty_partial(queries[0][:, :, :1].expand(-1, -1, tokens, -1), value_dim))]


def _alike(rows: Items[int], what: Callable[[int], Hashable]) -> list[list[int]]:
    """Rows by what they are, each group ascending."""
    found: dict[Hashable, list[int]] = {}
    for row in rows:
        found.setdefault(what(row), []).append(row)
    return list(found.values())


def _start(path: list[PathPart]) -> int:
    return path[0].first + path[0].low


def _place(path: list[PathPart], token: int) -> tuple[int, int]:
    """Which segment holds a token of the path, and where."""
    part = next(part for part in path if part.first + part.high > token)
    return id(part.segment), token - part.first


def _common(one: list[PathPart], other: list[PathPart], start: int) -> int:
    """Up to which token both paths, which share the place of token `start`, go through the same memory."""
    stop = start
    behind = ([part for part in path if part.first + part.high > start] for path in (one, other))
    for mine, yours in zip(*behind, strict=False):
        if mine.segment is not yours.segment or mine.first != yours.first:
            break
        stop = mine.first + min(mine.high, yours.high)
        if mine.high != yours.high:
            break
    return stop
