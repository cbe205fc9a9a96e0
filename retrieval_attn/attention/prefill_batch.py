"""Prefill of several caches in one layer: one attention, one copy to the host, one host work for all.

Shared-prefix attention attends once to tokens that rows have in common, with the queries of all rows and without a
mask (Juravsky et al. 2024, "Hydragen", section 3.2: inter-sequence batching; section 3.4: a tree of prefixes). A row
gets the same result as alone in its layer. An error with one row's tokens is raised for that row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.attention.exact import PagedSource, UploadSource, WindowSource
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.source import AttentionSource, Source, SourcePlan
from retrieval_attn.cpu.segment import PathPart
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, Scoring, empty_partial, merge, sink_logit_partial
from retrieval_attn.gpu.attention.window import slide_together
from retrieval_attn.index.formats import Format
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.packed_work import PackedWork
from retrieval_attn.offload.staging import host_format, sent
from retrieval_attn.offload.traffic import traffic

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
    plans: Items[SourcePlan], queries: Items[Tensor], value_dim: int, scale: float, softcap: float | None
) -> Partial:
    """Attend to the tokens before a pass of several rows. Returns one row's result after another.

    plans: of each row's exact pass. queries: of each row, (1, q_heads, new, head_dim).
    """
    counts, scoring = [one.shape[2] for one in queries], Scoring(scale, softcap)

    def asked(rows: Items[int]) -> Tensor:
        return torch.cat([queries[row] for row in rows], dim=2) if len(rows) > 1 else queries[rows[0]]

    def attend_by(source: AttentionSource, rows: Items[int]) -> tuple[list[int], Partial]:
        source.begin(asked(rows), scoring)
        return list(rows), source.finish().partial

    sinks, paged, uploads = _by_row(plans, WindowSource), _by_row(plans, PagedSource), _by_row(plans, UploadSource)
    levels = [
        [attend_by(one, [row]) for row, one in sinks.items()],
        [attend_by(paged[rows[0]], rows) for rows in _alike(list(paged), lambda row: paged[row].pages)],
    ]
    runs = runs_of([uploads[row].parts if row in uploads else [] for row in range(len(plans))])
    levels += [[] for _ in range(1 + max((run.level for run in runs), default=-1))]
    by_walker: dict[int, list[Run]] = {}
    for run in runs:
        by_walker.setdefault(run.rows[0], []).append(run)
    for walker, own in by_walker.items():
        spans = [((run.start, run.stop), asked(sorted(run.rows))) for run in own]
        for run, part in zip(own, uploads[walker].attend_spans(spans, scoring), strict=True):
            levels[2 + run.level].append((sorted(run.rows), part))
    parts = [in_order(_completed(level, queries, value_dim), counts) for level in levels if level]
    return merge(parts or [in_order(_completed([], queries, value_dim), counts)])


def _by_row(plans: Items[SourcePlan], kind: type[Source]) -> dict[int, Source]:
    """Return the sources of a kind, by row."""
    return {row: one for row, plan in enumerate(plans) for one in plan.sources if isinstance(one, kind)}


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
    """Join results of groups of rows in the order of rows, one row's queries after the other; each row is in one group.

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


LAYERS_LEAVING = 4
"""Layers whose few tokens may be on their way to the host before the next one waits."""


class RowRead(NamedTuple):
    """A row of a pack: its number, its layer, and its new tokens among those of all."""

    row: int
    layer: RetrievalLayer
    spec: MaskSpec
    span: slice


class PrefillTokens(NamedTuple):
    """Tokens of all rows joined: query (1, q_heads, tokens, head_dim), key and value (1, kv_heads, tokens, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def of(self, spans: Items[slice]) -> list[PrefillTokens]:
        """Return the tokens of each span, views. spans: ascending, without common tokens."""
        edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), self.query.shape[2]]
        sizes = [stop - start for start, stop in pairwise(edges)]
        if sizes == [0, self.query.shape[2], 0]:
            return [self]
        parts = (part.split(sizes, dim=2)[1::2] for part in self)
        return [PrefillTokens(*one) for one in zip(*parts, strict=True)]


class Lanes:
    """How tokens of rows side by side become a batch of rows of about one length, and back; kept for all layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._indices: dict[Hashable, Tensor] = {}

    def attend(self, new: PrefillTokens, spans: Items[slice], scoring: Scoring) -> Partial:
        """Each row's queries over its own keys up to their own: a call for rows of up to twice the same length.

        spans: the tokens of each row among `new`; what is returned has one row's behind another's. A shorter row is
        filled up behind its end, where no query of it sees.
        """
        classes: dict[int, list[int]] = {}
        for row, span in enumerate(spans):
            classes.setdefault((span.stop - span.start - 1).bit_length(), []).append(row)
        found = [(rows, self._attend(new, [spans[row] for row in rows], scoring)) for rows in classes.values()]
        return in_order(found, [span.stop - span.start for span in spans])

    def _attend(self, new: PrefillTokens, spans: Items[slice], scoring: Scoring) -> Partial:
        """The tokens of these rows, one row's behind another's."""
        if len(spans) == 1:
            return attend(*new.of(spans)[0], scale=scoring.scale, softcap=scoring.softcap, causal=True)
        (_, heads, _, _), device, rows = new.query.shape, new.query.device, len(spans)
        there, back = self._places(spans, heads, device)
        kv_there, _ = self._places(spans, new.key.shape[1], device)
        padded = (_batched(part, index, rows) for part, index in zip(new, (there, kv_there, kv_there), strict=True))
        found = attend(*padded, scale=scoring.scale, softcap=scoring.softcap, causal=True)
        out = found.out.reshape(-1, found.out.shape[3]).index_select(0, back)
        lse = found.lse.reshape(-1).index_select(0, back)
        return Partial(out.view(1, heads, -1, out.shape[1]), lse.view(1, heads, -1))

    def _places(self, spans: Items[slice], heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token of each place of the batch, and the place of each token, for each head.

        (rows * heads * places of a row,), counted in (tokens, heads); (heads * tokens,), counted in (rows, heads,
        places). Of one dimension: along a middle one a CPU copies an index at a time.
        """
        key = (device, heads, *((span.start, span.stop) for span in spans))
        if key not in self._kept:
            counts = np.array([span.stop - span.start for span in spans])
            most, every = int(counts.max()), np.arange(heads)[:, None]
            starts = np.array([span.start for span in spans])
            tokens = starts[:, None] + np.minimum(np.arange(most)[None], counts[:, None] - 1)
            row, place = np.nonzero(np.arange(most)[None] < counts[:, None])
            there, back = tokens[:, None] * heads + every, (row * heads + every) * most + place
            self._kept[key] = sent(there.reshape(-1), device), sent(back.reshape(-1), device)
        return self._kept[key]

    def index(self, device: torch.device, layout: Hashable, make: Callable[[], np.ndarray]) -> Tensor:
        """Return an index of `slide_together` on the device."""
        key = (device, layout)
        if key not in self._indices:
            self._indices[key] = sent(make(), device)
        return self._indices[key]


def _batched(part: Tensor, there: Tensor, rows: int) -> Tensor:
    """part (1, heads, tokens, dim): (rows, heads, tokens of the longest, dim). there: see `Lanes._places`."""
    tokens = part.transpose(1, 2).reshape(-1, part.shape[3])  # a view, as linear layers write keys
    return tokens.index_select(0, there).view(rows, part.shape[1], -1, part.shape[3])


def read_together(
    rows: Items[RowRead],
    module: nn.Module,
    new: PrefillTokens,
    scoring: Scoring,
    sink_logits: Tensor | None,
    lanes: Lanes,
    out: Tensor | None,
) -> tuple[Tensor | None, dict[int, Exception]]:
    """Store the new tokens of these rows and attend to all they hold. Layers that `reads_plainly`.

    out (1, q_heads, tokens, value_dim) float32: written where the rows' tokens are; None: of all tokens, made here.
    Returns it, None if no row has got that far, and what went wrong with a row.
    """
    errors: dict[int, Exception] = {}
    own_tokens = dict(zip((one.row for one in rows), new.of([one.span for one in rows]), strict=True))
    waited = traffic(new.key.device).make_room(earlier=LAYERS_LEAVING)
    plans: dict[int, SourcePlan] = {}

    def begin(one: RowRead) -> None:
        own = own_tokens[one.row]
        one.layer.stats.wait_seconds += waited / len(rows)
        one.layer.update(own.key, own.value)
        plans[one.row] = one.layer.begin_read(module, own.query, one.spec, scoring)

    begun = _each(rows, begin, errors)
    if begun:
        asked = [own_tokens[one.row].query for one in begun]
        found = _attend(
            [one.span for one in begun], asked, [plans[one.row] for one in begun], new, scoring, sink_logits, lanes
        )
        out = _written(found, [one.span for one in begun], new, out)
        _store(begun, new, lanes, errors)
    return out, errors


def _attend(
    spans: Items[slice],
    queries: Items[Tensor],
    plans: Items[SourcePlan],
    new: PrefillTokens,
    scoring: Scoring,
    sink_logits: Tensor | None,
    lanes: Lanes,
) -> Tensor:
    """Each row's tokens to what it held and to themselves: one row's results behind another's."""
    own = lanes.attend(new, spans, scoring)
    parts = [own]
    if any(plan.sources for plan in plans):
        parts.insert(0, attend_together(plans, queries, new.value.shape[3], *scoring))
    if sink_logits is not None:
        parts.append(sink_logit_partial(sink_logits, own.out, new.value.shape[3]))
    return merge(parts).out


def _written(found: Tensor, spans: Items[slice], new: PrefillTokens, out: Tensor | None) -> Tensor:
    """Write results of the tokens of these spans, one span's behind another's, to `out`, zeros if it is None."""
    if out is None and found.shape[2] == new.query.shape[2]:
        return found
    if out is None:
        out = found.new_zeros(*found.shape[:2], new.query.shape[2], found.shape[3])
    for span, answer in zip(spans, found.split([span.stop - span.start for span in spans], 2), strict=True):
        out[:, :, span] = answer
    return out


def _store(rows: Items[RowRead], new: PrefillTokens, lanes: Lanes, errors: dict[int, Exception]) -> None:
    """The new tokens go to windows and, together, to the host."""
    works: dict[Format, PackedWork] = {}

    def send(one: RowRead) -> None:
        fmt = host_format(one.layer.config.host_dtype, new.key.dtype)
        work = works.setdefault(fmt, PackedWork(fmt, new.key.device))
        one.layer.send_read(work.row(one.span))

    sent_rows = _each(rows, send, errors)
    for work in works.values():
        work.start_copy(new.key, new.value)
    slides = {one.row: slide for one in sent_rows if (slide := one.layer.slide_of(one.span)) is not None}
    if len(slides) < 2:  # a window of its own slides by one operation
        slides = {}
    else:
        index = functools.partial(lanes.index, new.key.device)
        slide_together(list(slides.values()), new.key, new.value, index)
    ended = _each(sent_rows, lambda one: one.layer.end_read(slid=one.row in slides), errors)
    for work in works.values():
        work.start_build()
    _each(ended, lambda one: one.layer.check_index(), errors)


def _each(rows: Items[RowRead], do: Callable[[RowRead], object], errors: dict[int, Exception]) -> list[RowRead]:
    """Do it for each; those with which nothing went wrong."""
    done: list[RowRead] = []
    for one in rows:
        try:
            do(one)
        except Exception as error:
            errors[one.row] = error
        else:
            done.append(one)
    return done
