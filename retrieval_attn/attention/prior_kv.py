"""PriorKV: keys and values that the rows of one layer held before a prefill pass, as its queries attend to them.

The keys stay on the host. They visit the device block by block, for all rows that share a path at once
(`offload/upload.py`), and the partials of the blocks merge by log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items

from torch import Tensor

from retrieval_attn.attention.layer_uploads import Cutter, LayerUploads
from retrieval_attn.attention.sequence import Batch, retrieval_start, rows_by_path, stacked, unstacked
from retrieval_attn.cpu.segment import PathPart
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, Scoring, empty_partial, merge
from retrieval_attn.gpu.attention.window import WindowCache, sinks_of
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.staging import TORCH_DTYPE, to_device
from retrieval_attn.offload.upload import UploadSpan

QUERIES_AT_ONCE = 8192
"""Tokens of several rows that attend to a block together: more would need more memory than a chunk of a prompt."""


class PriorKV:
    """The paths of layer `number` as they are now; what is appended to them later is not part of it.

    Where tokens are forgotten, the sinks before them come from the window, which has them turned. The first tokens may
    lie in pages (`attention/paged_prefix.py`): queries of a chunk attend to them in one call.
    """

    def __init__(self, batch: Batch, number: int, window: WindowCache, columns: int, fmt: Format) -> None:
        """window: of the layer, with the last of its `columns` columns. fmt: of its rows on the host."""
        self._batch, self._number, self._like = batch, number, window.tail()[0]
        sinks = sinks_of(window)
        start = retrieval_start(batch)
        self._cut = functools.partial(UploadSpan.of, start=start)
        self._held = [(self._cut(host), rows) for host, rows in rows_by_path(batch.hosts(number)) if len(host)]
        self._paths = [(one, rows) for one, rows in self._held if one.stop > start]
        self._exact = batch.exact if batch.exact is not None and batch.exact.tokens else None
        turned = batch.forgotten.tokens > 0 and sinks[0].shape[2] > 0
        self._sinks = (sinks[0].clone(), sinks[1].clone()) if turned else None
        # all of one row's tokens, where sinks and tail hold them as the host does
        self._start = start
        near = len(self._paths) == 1 and window.batch == 1 and not batch.forgotten.tokens and window.valid is None
        near = near and window.sink_len + window.tail_len == columns - start
        used = slice(*window.span)
        held = tuple(part[:, :, used] for part in window.buffers)
        self._near = held if near and held[0].dtype == TORCH_DTYPE[fmt] else None

    @property
    def empty(self) -> bool:
        """Whether no row held anything."""
        return not self._paths and self._exact is None

    def attend(self, query: Tensor, value_dim: int, scale: float, softcap: float | None, last: bool) -> Partial:
        """query (batch, q_heads, new, head_dim) over all past keys of its row: the partial, empty for rows without any.

        last: whether no further query of this pass will ask; the next layer's keys are then sent ahead.
        """
        parts = [
            part
            for part in (self.attend_sinks(query, scale, softcap), self.attend_exact(query, scale, softcap))
            if part is not None
        ]
        if self._paths:
            parts.append(self._attend_paths(query, value_dim, scale, softcap, last))
        return merge(parts)

    def attend_sinks(self, query: Tensor, scale: float, softcap: float | None) -> Partial | None:
        """The part of sinks that were turned; None without such."""
        return None if self._sinks is None else attend(query, *self._sinks, scale=scale, softcap=softcap)

    def attend_exact(self, query: Tensor, scale: float, softcap: float | None) -> Partial | None:
        """The part of tokens in pages; None without such."""
        return None if self._exact is None else self._exact.attend(self._number, query, Scoring(scale, softcap))

    def _attend_paths(self, query: Tensor, value_dim: int, scale: float, softcap: float | None, last: bool) -> Partial:
        """Attend to the tokens on the host after the forgotten ones."""
        at_once = max(1, QUERIES_AT_ONCE // query.shape[2])
        groups = [
            (one, rows[start : start + at_once]) for one, rows in self._paths for start in range(0, len(rows), at_once)
        ]
        asked = [(one, stacked(query, rows)[None]) for one, rows in groups]
        found = self._walk(asked, scale, softcap, last, self._cut)
        if len(query) == 1 and found:
            return found[0]
        whole = empty_partial(query, value_dim)
        for done, (_, rows) in zip(found, groups, strict=True):
            whole.out[rows] = unstacked(done.out[0], len(rows))
            whole.lse[rows] = unstacked(done.lse[0], len(rows))
        return whole

    def attend_spans(
        self, asked: Items[tuple[tuple[int, int], Tensor]], scale: float, softcap: float | None
    ) -> list[Partial]:
        """asked: tokens [start, stop) of the one row's path, which there are, and what asks them (1, q_heads, n,
        head_dim). Nothing else is asked in this pass: the next layer's keys, of the first span, are sent ahead.
        """
        [(path, _)] = self._paths
        cuts = [functools.partial(UploadSpan.of, stop=stop, start=start) for (start, stop), _ in asked]
        stretches = [(cut(path.host), query) for cut, (_, query) in zip(cuts, asked, strict=True)]
        return self._walk(stretches, scale, softcap, True, cuts[0])

    def _walk(
        self, asked: Items[tuple[UploadSpan, Tensor]], scale: float, softcap: float | None, last: bool, cut: Cutter
    ) -> list[Partial]:
        """Attend with each query (1, q_heads, n, head_dim) to its stretch, block by block."""
        uploads = LayerUploads(self._batch, self._number, self._like.device)
        if self._near is not None:  # a prompt of two parts, a short chat: nothing need come from the host
            uploads.clear()
            key, value = self._near
            spans = [(query, slice(one.start - self._start, one.stop - self._start)) for one, query in asked]
            return [
                attend(query, key[:, :, span], value[:, :, span], scale=scale, softcap=softcap) for query, span in spans
            ]
        found: list[Partial | None] = [None] * len(asked)
        for number, key, value in uploads.walk([one for one, _ in asked], self._like.dtype, last=last, cut=cut):
            part = attend(asked[number][1], key, value, scale=scale, softcap=softcap)
            before = found[number]
            found[number] = part if before is None else merge([before, part])
        assert all(part is not None for part in found), "a stretch has tokens"
        return [part for part in found if part is not None]

    @property
    def pages(self) -> tuple[int, ...]:
        """Identity of the tokens in pages: equal for the same pages; () without pages."""
        return () if self._exact is None else tuple(map(id, self._exact.spans))

    @property
    def parts(self) -> list[PathPart]:
        """Where the one row's tokens behind those lie on the host, in order."""
        return [part for one, _ in self._paths for part in one.host.parts(one.start, one.stop)]

    def rows_of(self, row: int, which: int) -> Tensor | None:
        """All past keys (which 0) or values (1) of a row (kv_heads, tokens, dim), on the device; None without any.

        Those of tokens that are forgotten, and of sinks before them, are as they are stored; those of tokens in pages
        are any.
        """
        for one, rows in self._held:
            if row in rows:
                return to_device(one.host.read(0, one.stop)[which], one.host.fmt, self._like)
        return None
