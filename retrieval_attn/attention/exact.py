"""Exact attention: new tokens of a layer attend to every earlier token. Prefill, and turns that are appended exactly.

`ExactPass` holds one layer's new keys on the device. Chunk by chunk, the queries attend to the tokens before the pass,
by the sources of a plan, and to the new ones up to their own (causal). After the last chunk, the tokens go to the
window, to the host and into the index. `WindowSource`, `PagedSource` and `UploadSource` attend to every key of their
ranges; the first two also serve steps with retrieval.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.attention.host_attention import shares_keys
from retrieval_attn.attention.layer_kv import LayerKV, PassTokens
from retrieval_attn.attention.sequence import Cutter, rows_by_path, stacked, unstacked
from retrieval_attn.attention.source import AttentionRequest, AttentionSource, SourcePlan, SourceResult, TokenRange
from retrieval_attn.cpu.budgets import LEVELS, SAMPLED_QUERIES
from retrieval_attn.cpu.segment import PathPart
from retrieval_attn.cpu.store import COPIED_TOKENS, SequenceKV, indexed_from, outgrows_codes
from retrieval_attn.errors import CacheMismatchError, MemoryPlanError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, Scoring, empty_partial, merge
from retrieval_attn.gpu.attention.window import sinks_of
from retrieval_attn.offload.clusters import drifted
from retrieval_attn.offload.queries import TrainingQueries
from retrieval_attn.offload.staging import TORCH_DTYPE
from retrieval_attn.offload.upload import UploadSpan
from retrieval_attn.offload.work import HostWork

FEW_QUERIES = 4
"""New tokens of a step on a CPU up to which `HostSource` attends to all keys faster than matrix products."""
QUERIES_AT_ONCE = 8192
"""Tokens of several rows that attend to a block together: more would need more memory than a chunk of a prompt."""


class WindowSource(AttentionSource[TokenRange]):
    """Sinks and recent tokens on the device.

    An exact pass reads them from the host like all other tokens, except sinks before forgotten tokens: only the window
    has their keys at the new positions.
    """

    batched = capturable = True

    def __init__(self, request: AttentionRequest, ranges: list[TokenRange]) -> None:
        super().__init__(request, ranges)
        sinks = sinks_of(request.held.window) if request.exact else ()
        self._sinks = [part.clone() for part in sinks]

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> TokenRange | None:
        if request.exact:
            return tokens if tokens.stop <= request.held.batch.forgotten.start else None
        found = request.held.in_window(tokens.rows[0], tokens.start, tokens.stop)
        return None if found is None else tokens.cut(*found)

    def finish(self) -> SourceResult:
        scale, softcap = self.scoring
        if self.request.exact:
            return SourceResult(attend(self.query, *self._sinks, scale=scale, softcap=softcap))
        return SourceResult(self.request.held.window.attend(self.query, scale=scale, softcap=softcap))


class PagedSource(AttentionSource[TokenRange]):
    """The first tokens, in GPU pages (`attention/paged_prefix.py`): for all rows of the batch the same ones."""

    batched = capturable = True

    def __init__(self, request: AttentionRequest, ranges: list[TokenRange]) -> None:
        super().__init__(request, ranges)
        assert request.held.batch.paged_prefix is not None
        self._prefix = request.held.batch.paged_prefix

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> TokenRange | None:
        exact = request.held.batch.paged_prefix
        if exact is None or tokens.start >= exact.tokens:
            return None
        return tokens.cut(tokens.start, min(tokens.stop, exact.tokens))

    @property
    def pages(self) -> tuple[int, ...]:
        """Identity of the tokens in pages: equal for the same pages."""
        return tuple(map(id, self._prefix.spans))

    def finish(self) -> SourceResult:
        given = self.request.paged
        if given is None:
            given = self._prefix.attend(self.request.held.number, self.query, self.scoring)
        return SourceResult(given)


class UploadSource(AttentionSource[TokenRange]):
    """Tokens on the host, for an exact pass and steps that attend to all: keys come to the device block by block
    (`offload/upload.py`).

    A block is attended to by all rows that share its sequence, and the partials of the blocks merge. The keys of one
    row that are all in its window, with the bits of the host, are read there.
    """

    uploads = True

    def __init__(self, request: AttentionRequest, ranges: list[TokenRange]) -> None:
        super().__init__(request, ranges)
        held, window = request.held, request.held.window
        self._like = window.buffers
        self._start = ranges[0].start
        stop = None if request.exact else ranges[0].stop  # of a step the window has the rest
        self._cut = functools.partial(UploadSpan.of, start=self._start, stop=stop)
        if not request.exact and held.device.type == "cpu" and window.batch == 1:  # segments would be copied together
            ranges = [
                one.cut(first + low, first + high)
                for one in ranges
                for _, low, high, first in one.host.parts(one.start, one.stop)
            ]
        self._spans = [(UploadSpan.of(one.host, one.stop, one.start), one.rows) for one in ranges]
        is_near = len(ranges) == window.batch == 1 and not held.batch.forgotten.tokens and window.valid is None
        is_near = is_near and request.exact
        is_near = is_near and window.sink_len + window.tail_len == held.columns - self._start
        is_near = is_near and window.buffers[0].dtype == TORCH_DTYPE[held.fmt]
        used = slice(*window.span)
        self._near = tuple(part[:, :, used] for part in window.buffers) if is_near else None

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> TokenRange | None:
        held = request.held
        many = held.device.type == "cuda" or request.num_queries > FEW_QUERIES
        return tokens if request.exact or (held.batch.attends_to_all and many) else None

    def finish(self) -> SourceResult:
        query = self.query
        at_once = max(1, QUERIES_AT_ONCE // query.shape[2])
        groups = [
            (one, rows[start : start + at_once]) for one, rows in self._spans for start in range(0, len(rows), at_once)
        ]
        asked = [(one, stacked(query, rows)[None]) for one, rows in groups]
        found = self._walk(asked, self.scoring, self._cut, last=self.last)
        if len(query) == 1:
            return SourceResult(found[0] if len(found) == 1 else merge(found))
        whole = empty_partial(query, self._like[1].shape[3])
        for done, (_, rows) in zip(found, groups, strict=True):
            whole.out[rows] = unstacked(done.out[0], len(rows))
            whole.lse[rows] = unstacked(done.lse[0], len(rows))
        return SourceResult(whole)

    def attend_spans(self, asked: Items[tuple[tuple[int, int], Tensor]], scoring: Scoring) -> list[Partial]:
        """Return the attention of queries (1, q_heads, n, head_dim) to tokens [start, stop) of the one row.

        No later queries of this pass follow: the next layer's keys, of the first span, are uploaded ahead.
        """
        [(whole, _)] = self._spans
        cuts = [functools.partial(UploadSpan.of, stop=stop, start=start) for (start, stop), _ in asked]
        spans = [(cut(whole.host), query) for cut, (_, query) in zip(cuts, asked, strict=True)]
        return self._walk(spans, scoring, cuts[0], last=True)

    def _walk(
        self, asked: Items[tuple[UploadSpan, Tensor]], scoring: Scoring, cut: Cutter, *, last: bool
    ) -> list[Partial]:
        """Attend with each query (1, q_heads, n, head_dim) to its span, block by block."""
        scale, softcap = scoring
        uploads = self.request.held.uploads
        if self._near is not None:  # a prompt of two parts, a short chat: nothing need come from the host
            uploads.clear()
            key, value = self._near
            spans = [(query, slice(one.start - self._start, one.stop - self._start)) for one, query in asked]
            return [
                attend(query, key[:, :, span], value[:, :, span], scale=scale, softcap=softcap) for query, span in spans
            ]
        found: list[Partial | None] = [None] * len(asked)
        for number, key, value in uploads.walk([one for one, _ in asked], self._like[0].dtype, last=last, cut=cut):
            part = attend(asked[number][1], key, value, scale=scale, softcap=softcap)
            before = found[number]
            found[number] = part if before is None else merge([before, part])
        assert all(part is not None for part in found), "a span has tokens"
        return [part for part in found if part is not None]

    @property
    def parts(self) -> list[PathPart]:
        """The one row's tokens on the host, in order."""
        return [part for one, _ in self._spans for part in one.host.parts(one.start, one.stop)]


DRIFT_SHARE = 8
"""Clusters are rebuilt if a turn adds at least 1/N of the clustered tokens."""
GROWTH, CODED_GROWTH = 2.0, 1.5
"""A turn builds a new index if a text has more than these times the tokens that its index covers. CODED_GROWTH: where
new tokens would lie in another segment than those with codes, so that the host attends to them in each step."""
MERGED_TOKENS = 512
"""Minimum new tokens to continue or copy a segment. Engines keep no entry of fewer: each question would copy again."""
METRIC_QUERIES = 256
"""Queries of each head in whose metric clusters are made, and of which some tell what keys usually weigh."""


class PassMark(NamedTuple):
    """How far a pass was."""

    new: tuple[int, Tensor | None]
    sampled: tuple[int, ...]


class ExactPass:
    """A pass of one layer. new: its tokens. plan: the sources of all tokens before them."""

    def __init__(self, plan: SourcePlan, total: int) -> None:
        """Begin a pass of `total` tokens. plan: of an exact request."""
        request = plan.request
        held, spec, config = request.held, request.spec, request.config
        self.new, self.plan = PassTokens(held, total), plan
        self._held, self._config = held, config
        self._scoring = Scoring(1.0)
        self._first = held.columns == 0
        count = spec.training_queries(total)
        # else no query is ever asked for
        anew = held.retrieves_after(total) and (self._first or _needs_new_index(held, total))
        self._may_merge = anew and not self._first and not held.batch.forgotten.tokens
        self._sample = TrainingQueries(total, count) if spec.trains and anew else None
        # of its own: clusters are the same whatever the index trains on
        self._metric_sample = TrainingQueries(total, METRIC_QUERIES) if config.estimates and anew else None

    def step(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scoring: Scoring) -> Partial:
        """Store a chunk and attend with its queries; valid (batch, chunk) its real tokens."""
        start = self.new.filled
        self.take(query, key, value, valid, scoring)
        own = self._attend_new(query, start)
        if not self.plan.sources:
            return own
        new = self.new
        past = [one.partial for one in self.plan.attend(query, scoring, last=new.filled == new.total)]
        if new.valid is not None:  # a query that is no token sees nothing
            here = new.valid[:, None, start : new.filled].to(query.device)
            whole = merge(past)
            past = [Partial(whole.out.where(here[..., None], 0.0), whole.lse.where(here, -torch.inf))]
        return merge([*past, own])

    def take(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scoring: Scoring) -> None:
        """Store a chunk and sample its queries, without attention."""
        for sample in (self._sample, self._metric_sample):
            if sample is not None:
                sample.take(query, self.new.filled)
        self._scoring = scoring
        self.new.take(key, value, valid)

    def _attend_new(self, query: Tensor, start: int) -> Partial:
        """Attend with the queries of the newest chunk, from token `start` on, to the pass's keys up to their own."""
        new, (scale, softcap) = self.new, self._scoring
        key, value = (tensor[:, :, : new.filled] for tensor in new.new)
        if new.valid is None:
            return attend(query, key, value, scale=scale, causal=True, softcap=softcap)
        whole = empty_partial(query, value.shape[3])
        for row in range(len(query)):
            here, real = new.real(row, start, new.filled), new.real(row, 0, new.filled)
            one = slice(row, row + 1)
            own = (key[one][:, :, real], value[one][:, :, real])
            part = attend(query[one][:, :, here], *own, scale=scale, causal=True, softcap=softcap)
            whole.out[one, :, here] = part.out
            whole.lse[one, :, here] = part.lse
        return whole

    def host_work(
        self, make: Callable[..., HostWork] = HostWork, *, may_copy: Callable[[int, int], bool] = lambda *_: False
    ) -> HostWork:
        """Return the work, not started, of copying the pass to the host. Raises CacheMismatchError without all tokens.

        make: takes what `HostWork` takes. may_copy: see `IndexChoice.make_room_to_copy`.
        """
        new = self.new
        if new.filled != new.total:
            raise CacheMismatchError(f"A pass announced {new.total} tokens and brought {new.filled}.")
        work = self._held.host_work(*new.new, new.valid, make)
        if not self._first and not self._held.batch.forgotten.tokens:
            for host, (row, *_) in rows_by_path(self._held.hosts):
                more, start = new.count(row), self._held.ranges[row][0]
                if not _splits_codes(host, more):
                    continue
                held, columns = len(host), self._held.columns + new.total
                # codes that outgrow their memory take more to spare, see `DeviceCodes.write`
                room, copied = (more + held // 16, 0), (columns, held * host.token_bytes)
                outgrown = outgrows_codes(host, held + more) and self._may_merge and self._has_room(may_copy, *copied)
                if not outgrown and self._has_room(may_copy, *room) and work.continue_first(host):
                    continue
                lacks = self._may_merge and _lacks_index(host, start, held + more, more)
                if lacks and self._has_room(may_copy, *copied):
                    with contextlib.suppress(MemoryPlanError):  # new tokens are scanned then
                        work.merge(host)
        return work

    def _has_room(self, may_copy: Callable[[int, int], bool], tokens: int, layer_bytes: int) -> bool:
        """Return what `may_copy` said in the first layer of this pass. See `host_work`."""
        batch, columns = self._held.batch, self._held.columns + self.new.total
        if batch.copies[0] != columns:
            batch.copies = columns, {}
        if tokens not in batch.copies[1]:
            batch.copies[1][tokens] = may_copy(tokens, layer_bytes)
        return batch.copies[1][tokens]

    def finish(
        self, work: HostWork, model: nn.Module | None, module: nn.Module | None, *, slid: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Store the pass in host memory, window, sinks and index by `work`, which continues while a GPU computes.

        model, module: the model and its attention layer, as far as they are known: they move training queries. slid:
        see `LayerKV.take_pass`. between: see `CacheLayer.end_pass`.
        """
        held, new = self._held, self.new
        work.start_copy()
        held.take_pass(new, work, slid=slid)
        for host, (row, *_) in rows_by_path(held.hosts):
            start, stop = held.ranges[row]
            if stop <= start:
                continue
            more = new.count(row)
            if not self._first and not (host.takes_index and _lacks_index(host, start, stop, more)):
                work.extend(host, stop)
                if DRIFT_SHARE * more >= stop - start and drifted(host, new.new_of(row, 0)):
                    queries = self._moved(self._metric_sample, model, module, row)
                    self._cluster(work, host, (start, stop), queries, row, between)
                else:
                    work.clusters.extend(host, (start, stop), functools.partial(new.new_of, row, 0))
                continue
            where = model, module, row
            if self._metric_sample is not None:
                queries = self._moved(self._metric_sample, *where)
                self._cluster(work, host, (start, stop), queries, row, between)
                if queries is not None and queries.shape[1] and self._can_share(host, stop - start):
                    work.budgets.add(host, (start, stop), self._sampled_attention(queries, row), self._scoring)
            work.index(host, (start, stop), self._moved(self._sample, *where), functools.partial(new.rows_of, row, 0))
        work.shares = [one.turn for one in (self._sample, self._metric_sample) if one is not None]
        work.start_build()

    def _can_share(self, host: SequenceKV, keys: int) -> bool:
        """Return whether heads get numbers of their own among `keys` keys: an index on the host searches them, and they
        are more than a head may get, so that no number attends to all.
        """
        return keys > LEVELS[-1] and shares_keys(self._config, host)

    def _cluster(
        self, work: HostWork, host: SequenceKV, span: tuple[int, int], queries: Tensor | None, row: int,
        between: Callable[[], object],
    ) -> None:  # fmt: skip
        """All tokens of span get clusters, past ones and new ones. queries: in whose metric."""
        keys, values = self.new.rows_of(row, 0), self.new.rows_of(row, 1)
        kv = keys[:, slice(*span)], values[:, slice(*span)]
        work.clusters.add(host, span, kv, queries, *self._scoring, between=between)

    def _sampled_attention(self, queries: Tensor, row: int) -> list[Tensor]:
        """Some of a row's queries (q_heads, m, head_dim), and out and lse of each as the next token's over sinks and
        window.
        """
        window, (scale, softcap) = self._held.window, self._scoring
        places = torch.linspace(0, queries.shape[1] - 1, min(SAMPLED_QUERIES, queries.shape[1]), device=queries.device)
        chosen = queries[:, places.long()]
        asked = chosen.to(window.buffers[0].dtype).expand(len(self._held.hosts), *chosen.shape)
        # one by one: queries of one call would see only the tokens up to their own
        parts = [window.attend(one, scale=scale, softcap=softcap) for one in asked.split(1, dim=2)]
        out, lse = (torch.cat([part[field][row] for part in parts], dim=1) for field in (0, 1))
        return [chosen, out, lse]

    def _moved(
        self, sample: TrainingQueries | None, model: nn.Module | None, module: nn.Module | None, row: int
    ) -> Tensor | None:
        """A sample of one row where decoding will happen, see `TrainingQueries.on_device`; None without a sample."""
        if sample is None or module is None:
            return None
        valid = self.new.valid
        return sample.on_device(model, module, row, None if valid is None else valid[row])

    def mark(self) -> PassMark:
        """Return the state that `restore` needs to undo later chunks."""
        samples = tuple(0 if one is None else one.mark() for one in (self._sample, self._metric_sample))
        return PassMark(self.new.mark(), samples)

    def restore(self, mark: PassMark) -> None:
        """Restore the state of `mark`."""
        self.new.restore(mark.new)
        for sample, sampled in zip((self._sample, self._metric_sample), mark.sampled, strict=True):
            if sample is not None:
                sample.restore(sampled)


def _lacks_index(host: SequenceKV, start: int, stop: int, more: int, less: int = 0) -> bool:
    """Return whether indexes cover too little of a path's tokens [start, stop), of which `more` are being appended.

    less: indexed tokens that are not counted.
    """
    if outgrows_codes(host, stop):
        return True
    growth = CODED_GROWTH if _splits(host, more) else GROWTH
    return growth * (indexed_from(host, start) - less) < stop - start


def _splits(host: SequenceKV, more: int) -> bool:
    """Return whether `more` new tokens lie in another segment than earlier ones, of a kind with codes on a device."""
    if not host.segments or not host.spec.keeps_codes(host.head_dim):
        return False
    return not host.appends_in_place(more)


def _splits_codes(host: SequenceKV, more: int) -> bool:
    """Return whether `more` new tokens split the codes and are enough for a prefix cache entry.

    False for a path with a hole: its tokens cannot be copied.
    """
    return more >= MERGED_TOKENS and _splits(host, more) and not any(segment.is_hole for segment in host.segments)


def _needs_new_index(held: LayerKV, total: int) -> bool:
    """Return whether `total` more tokens may need a new index or new clusters of any row, see `ExactPass.finish`."""
    for host, (row, *_) in rows_by_path(held.hosts):
        start, stop = held.ranges[row]
        # a short last segment may be copied, without its index
        lacks_index = _lacks_index(host, start, held.columns + total, total, COPIED_TOKENS)
        if lacks_index or DRIFT_SHARE * total >= stop - start:
            return True
    return False
