"""Past: what the rows of one layer held before a pass, as far as the pass's queries attend to it.

The keys stay on the host. They visit the device block by block, for all rows that share a path at once
(`offload/upload.py`), and the partials of the blocks merge by log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from retrieval_attn.cache.layer_uploads import LayerUploads
from retrieval_attn.cache.rows import rows_by_path, stacked, unstacked
from retrieval_attn.cache.sequence import Batch, own_start
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.offload.transfer import to_device
from retrieval_attn.offload.upload import Stretch

QUERIES_AT_ONCE = 8192
"""Tokens of several rows that attend to a block together: more would need more memory than a chunk of a prompt."""


class Past:
    """The paths of layer `number` as they are now; what is appended to them later is not part of it.

    Where tokens are forgotten, the sinks before them come from the window, which has them turned. The first tokens may
    lie in pages (`cache/prefix.py`): queries of a chunk attend to them in one call.
    """

    def __init__(self, batch: Batch, number: int, like: Tensor, sinks: tuple[Tensor, Tensor]) -> None:
        """like: a key tensor of the layer: its device, its dtype. sinks: keys and values (batch, kv_heads, sinks, dim)
        of the window.
        """
        self._batch, self._number, self._like = batch, number, like
        start = own_start(batch)
        self._cut = functools.partial(Stretch.of, start=start)
        self._held = [(self._cut(host), rows) for host, rows in rows_by_path(batch.hosts(number)) if len(host)]
        self._paths = [(one, rows) for one, rows in self._held if one.stop > start]
        self._exact = batch.exact if batch.exact is not None and batch.exact.tokens else None
        turned = batch.forgotten.tokens > 0 and sinks[0].shape[2] > 0
        self._sinks = (sinks[0].clone(), sinks[1].clone()) if turned else None

    @property
    def empty(self) -> bool:
        """Whether no row held anything."""
        return not self._paths and self._exact is None

    def attend(self, query: Tensor, value_dim: int, scale: float, softcap: float | None, last: bool) -> Partial:
        """query (batch, q_heads, new, head_dim) over all past keys of its row: the partial, empty for rows without any.

        last: whether no further query of this pass will ask; the next layer's keys are then sent ahead.
        """
        parts = []
        if self._sinks is not None:
            parts.append(attend(query, *self._sinks, scale=scale, softcap=softcap))
        if self._exact is not None:
            parts.append(self._exact.attend(self._number, query, Scoring(scale, softcap)))
        if self._paths:
            parts.append(self._attend_paths(query, value_dim, scale, softcap, last))
        return merge(parts)

    def _attend_paths(self, query: Tensor, value_dim: int, scale: float, softcap: float | None, last: bool) -> Partial:
        """What lies on the host, behind what is forgotten."""
        at_once = max(1, QUERIES_AT_ONCE // query.shape[2])
        groups = [
            (one, rows[start : start + at_once]) for one, rows in self._paths for start in range(0, len(rows), at_once)
        ]
        found: list[Partial | None] = [None] * len(groups)
        queries = [stacked(query, rows)[None] for _, rows in groups]
        uploads = LayerUploads(self._batch, self._number, self._like.device)
        for number, key, value in uploads.walk([one for one, _ in groups], self._like.dtype, last=last, cut=self._cut):
            part = attend(queries[number], key, value, scale=scale, softcap=softcap)
            before = found[number]
            found[number] = part if before is None else merge([before, part])
        if len(query) == 1 and found and found[0] is not None:
            return found[0]
        whole = empty_partial(query, value_dim)
        for done, (_, rows) in zip(found, groups, strict=True):
            assert done is not None
            whole.out[rows] = unstacked(done.out[0], len(rows))
            whole.lse[rows] = unstacked(done.lse[0], len(rows))
        return whole

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for layers of caches of one sequence whose past is the same tokens in the same memory."""
        parts = [part for one, _ in self._paths for part in one.host.parts(one.start, one.stop)]
        spans = () if self._exact is None else self._exact.spans
        own = () if self._sinks is None else (id(self),)
        return (*((id(part.segment), part.low, part.high) for part in parts), *map(id, spans), *own)

    def rows_of(self, row: int, which: int) -> Tensor | None:
        """All past keys (which 0) or values (1) of a row (kv_heads, tokens, dim), on the device; None without any.

        Those of tokens that are forgotten, and of sinks before them, are as they are stored; those of tokens in pages
        are any.
        """
        for one, rows in self._held:
            if row in rows:
                return to_device(one.host.read(0, one.stop)[which], one.host.fmt, self._like)
        return None


def attend_together(
    pasts: Items[Past], queries: Items[Tensor], value_dim: int, scale: float, softcap: float | None
) -> Partial:
    """Each of queries (1, q_heads, new, head_dim) over its past; the answers one behind another.

    The keys of pasts that are alike visit the device once, and all queries over them attend to them in one call that
    needs no mask (Juravsky et al. 2024, "Hydragen", section 3.2: inter-sequence batching).
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, past in enumerate(pasts):
        groups.setdefault(past.likeness, []).append(number)
    found: list[tuple[list[int], Partial]] = []
    for members in groups.values():
        query = torch.cat([queries[number] for number in members], dim=2)
        past = pasts[members[0]]
        answer = empty_partial(query, value_dim) if past.empty else past.attend(query, value_dim, scale, softcap, True)
        found.append((members, answer))
    return in_order(found, [one.shape[2] for one in queries])


def in_order(groups: Items[tuple[Items[int], Partial]], counts: Items[int]) -> Partial:
    """What groups of rows got, for the queries of one row behind another's, with the rows in order, each in one group.

    groups: rows, ascending, and what they got. counts: queries of each row.
    """
    if len(groups) == 1:
        return groups[0][1]
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for rows, found in groups:
        own = [counts[row] for row in rows]
        parts.update(zip(rows, zip(found.out.split(own, 2), found.lse.split(own, 2), strict=True), strict=True))
    out, lse = zip(*(parts[row] for row in range(len(counts))), strict=True)
    return Partial(torch.cat(out, dim=2), torch.cat(lse, dim=2))
