"""New tokens of several caches in one layer, side by side: one attention, one copy to the host, one host work for all.

What a row gets is what its layer would give it alone. An error with one row's tokens is that row's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.attention.prior_kv import PriorKV
from retrieval_attn.attention.retrieval import RetrievalLayer, begin_read, end_read, send_read
from retrieval_attn.attention.shared_prefix import attend_together, in_order
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, merge, sink_logit_partial
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.index.formats import Format
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.packed_work import PackedWork
from retrieval_attn.offload.staging import sent
from retrieval_attn.offload.traffic import traffic
from retrieval_attn.offload.transfer import host_format

LAYERS_LEAVING = 4
"""Layers whose few tokens may be on their way to the host before the next one waits."""


class RowRead(NamedTuple):
    """A row of a pack: its number, its layer, and its new tokens among those of all."""

    row: int
    layer: RetrievalLayer
    spec: MaskSpec
    span: slice


class PrefillTokens(NamedTuple):
    """Of all rows, side by side: query (1, q_heads, tokens, head_dim), key and value (1, kv_heads, tokens, dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def of(self, span: slice) -> PrefillTokens:
        """Some of them, views."""
        return PrefillTokens(*(part[:, :, span] for part in self))


class Lanes:
    """How tokens of rows side by side become a batch of rows of about one length, and back; kept for all layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

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
            return attend(*new.of(spans[0]), scale=scoring.scale, softcap=scoring.softcap, causal=True)
        there, back = self._places(spans, new.query.device)
        rows = PrefillTokens(*(_batched(part, there, len(spans)) for part in new))
        found = attend(*rows, scale=scoring.scale, softcap=scoring.softcap, causal=True)
        out, lse = (part.transpose(0, 1).flatten(1, 2)[None].index_select(2, back) for part in found)
        return Partial(out, lse)

    def _places(self, spans: Items[slice], device: torch.device) -> tuple[Tensor, Tensor]:
        """Which token stands at each place of the batch, and at which place each token stands."""
        key = (device, *((span.start, span.stop) for span in spans))
        if key not in self._kept:
            counts = np.array([span.stop - span.start for span in spans])
            most = int(counts.max())
            starts = np.array([span.start for span in spans])
            there = starts[:, None] + np.minimum(np.arange(most)[None], counts[:, None] - 1)
            back = np.flatnonzero(np.arange(most)[None] < counts[:, None])
            self._kept[key] = sent(there.reshape(-1), device), sent(back, device)
        return self._kept[key]


def _batched(part: Tensor, there: Tensor, rows: int) -> Tensor:
    """part (1, heads, tokens, dim): (rows, heads, tokens of the longest, dim)."""
    return part[0].index_select(1, there).unflatten(1, (rows, -1)).transpose(0, 1)


def read_together(
    rows: Items[RowRead],
    module: nn.Module,
    new: PrefillTokens,
    scoring: Scoring,
    sink_logits: Tensor | None,
    lanes: Lanes,
    out: Tensor,
) -> dict[int, Exception]:
    """Store the new tokens of these rows and attend to all they hold. Layers that `reads_plainly`.

    out (1, q_heads, tokens, value_dim) float32: written where the rows' tokens are. Returns what went wrong with a row.
    """
    errors: dict[int, Exception] = {}
    waited = traffic(new.key.device).make_room(earlier=LAYERS_LEAVING)
    pasts: dict[int, PriorKV] = {}

    def begin(one: RowRead) -> None:
        own = new.of(one.span)
        one.layer.stats.wait_seconds += waited / len(rows)
        one.layer.update(own.key, own.value)
        pasts[one.row] = begin_read(one.layer, module, own.query, one.spec, scoring).past

    begun = _each(rows, begin, errors)
    if begun:
        _attend([one.span for one in begun], [pasts[one.row] for one in begun], new, scoring, sink_logits, lanes, out)
        _store(begun, new, errors)
    return errors


def _attend(
    spans: Items[slice],
    pasts: Items[PriorKV],
    new: PrefillTokens,
    scoring: Scoring,
    sink_logits: Tensor | None,
    lanes: Lanes,
    out: Tensor,
) -> None:
    """Each row's tokens to what it held and to themselves."""
    own = lanes.attend(new, spans, scoring)
    parts = [own]
    if not all(past.empty for past in pasts):
        asked = [new.query[:, :, span] for span in spans]
        parts.insert(0, attend_together(pasts, asked, new.value.shape[3], *scoring))
    if sink_logits is not None:
        parts.append(sink_logit_partial(sink_logits, own.out, new.value.shape[3]))
    found = merge(parts).out
    if found.shape == out.shape:
        out.copy_(found)
        return
    for span, answer in zip(spans, found.split([span.stop - span.start for span in spans], 2), strict=True):
        out[:, :, span] = answer


def _store(rows: Items[RowRead], new: PrefillTokens, errors: dict[int, Exception]) -> None:
    """The new tokens go to windows and, together, to the host."""
    works: dict[Format, PackedWork] = {}

    def send(one: RowRead) -> None:
        fmt = host_format(one.layer.config.host_dtype, new.key.dtype)
        work = works.setdefault(fmt, PackedWork(fmt, new.key.device))
        send_read(one.layer, work.row(one.span))

    sent_rows = _each(rows, send, errors)
    for work in works.values():
        work.start_copy(new.key, new.value)
    ended = _each(sent_rows, lambda one: end_read(one.layer), errors)
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
