"""AttentionSource: one way for the queries of a layer to reach some of its keys, and the plan that chooses the ways.

The keys of a layer are in GPU pages, in sinks and window, on the host with or without codes on the device, or being
uploaded. Each such place is a source. In an eager forward a source's `covers` is the one place that decides which
tokens it attends to; `SourcePlan` asks the registered kinds in order until all tokens are covered. The layer's
attention is one merge of the partials of its sources. Captured steps plan by `HostStep.plan` (`runner/graph/host.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.sequence import rows_by_path, unstacked
from retrieval_attn.config import Config
from retrieval_attn.cpu.step.plan import StepCost
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.traffic import LayerStats


@dataclass(slots=True, eq=False)
class TokenRange:
    """Real tokens [start, stop) of the sequence `host` of one layer, for the rows of a batch that share it."""

    host: SequenceKV
    rows: list[int]
    start: int
    stop: int

    def cut(self, start: int, stop: int) -> TokenRange:
        """Return tokens [start, stop) of the same sequence and rows."""
        return TokenRange(self.host, self.rows, start, stop)


class AttentionRequest(NamedTuple):
    """A forward of one layer, before its queries are known.

    Attributes:
        held: keys and values of the layer. Of a step with retrieval they include the new tokens; of an exact pass, not.
        config, spec: options of the layer, and of its indexes.
        q_heads, num_queries: query heads, and new tokens of each row.
        exact: the queries attend to every earlier key (see `RetrievalLayer.attends_exactly`). False: to the window and
            to retrieved keys.
        paged: attention to pages that the batched step has computed for this layer already, or None.
    """

    held: LayerKV
    config: Config
    spec: IndexSpec
    q_heads: int
    num_queries: int
    exact: bool
    paged: Partial | None = None

    def token_ranges(self) -> list[TokenRange]:
        """Return all tokens of each sequence that the queries attend to, without forgotten ones."""
        held, found = self.held, []
        forgotten = held.batch.forgotten
        for host, rows in rows_by_path(held.hosts):
            tokens = held.batch.real(rows[0], held.columns)
            spans = ((0, forgotten.start), (forgotten.stop, tokens)) if forgotten.tokens else ((0, tokens),)
            found += [TokenRange(host, rows, start, stop) for start, stop in spans if stop > start]
        return found


class SourceResult(NamedTuple):
    """Attention of all rows to the keys of one source: (batch, q_heads, new, ...), on the queries' device.

    Rows without keys there have out 0 and lse -inf. estimated: share of the weights that stands for keys without
    attention, float32, 0 in such rows; None if those keys are left out. cost: None for sources on the device.
    """

    partial: Partial
    estimated: Tensor | None = None
    cost: StepCost | None = None

    @classmethod
    def merged(cls, results: Items[SourceResult]) -> SourceResult | None:
        """Merge results over disjoint keys, without their costs. Returns None for none."""
        if len(results) < 2:
            return results[0] if results else None
        found, whole = merge([one.partial for one in results]), None
        for partial, estimated, _ in results:
            if estimated is None:
                return cls(found)
            share = torch.exp(partial.lse - found.lse).nan_to_num_().mul_(estimated)
            whole = share if whole is None else whole.add_(share)
        return cls(found, whole)


class RangeResult(NamedTuple):
    """Attention to one range: out (q_heads, rows * new, value_dim), lse and estimated (q_heads, rows * new)."""

    tokens: TokenRange
    partial: Partial
    estimated: Tensor | None = None


Range = TypeVar("Range", bound=TokenRange)


class AttentionSource(ABC, Generic[Range]):
    """A way to reach keys, bound to the ranges that it covers: `begin` with queries, then `finish`, again and again.

    A new kind is one subclass and one call of `retrieval.register_source`.

    Attributes:
        retrieves: attends to a choice of the keys of its ranges. False: to all.
        uploads: takes, or drops, blocks that an earlier layer may have sent ahead. Without such a source the plan drops
            them.
        batched: `attention/decode_batch.py` computes the same for a token of several caches at once.
        capturable: a captured step (`runner/graph/`) computes the same.
    """

    retrieves: ClassVar[bool] = False
    batched: ClassVar[bool] = False
    capturable: ClassVar[bool] = False
    uploads: ClassVar[bool] = False

    def __init__(self, request: AttentionRequest, ranges: list[Range]) -> None:
        """Bind to ranges, at least one, that `covers` returned for this request."""
        self.request, self.ranges = request, ranges

    @classmethod
    @abstractmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> Range | None:
        """Return the part of `tokens` that this source attends to, or None. No source before it covers any of them.

        Must be cheap: it is called for each layer of each token. The source is asked again for what is left.
        """

    def begin(self, query: Tensor, scoring: Scoring, *, last: bool = True) -> None:
        """Take the queries (batch, q_heads, new, head_dim), and launch work that runs until `finish`.

        last: no later queries of this pass follow; blocks of the next layer may be uploaded.
        """
        self.query, self.scoring, self.last = query, scoring, last

    @abstractmethod
    def finish(self) -> SourceResult:
        """Return the attention of the queries to the ranges. Raises BackendError with the layer named."""

    def assembled(self, found: Items[RangeResult], value_dim: int, cost: StepCost | None = None) -> SourceResult:
        """Return the result of all rows from those of all ranges."""
        batch, q_heads, new, _ = self.query.shape
        if len(found) == 1 and len(found[0].tokens.rows) == batch:
            _, (out, lse), estimated = found[0]
            device = self.query.device
            share = None if estimated is None else unstacked(estimated, batch).to(device)
            return SourceResult(
                Partial(unstacked(out, batch).to(device), unstacked(lse, batch).to(device)), share, cost
            )
        out = torch.zeros(batch, q_heads, new, value_dim, dtype=torch.float32, device=self.query.device)
        lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device)
        share = None if any(one.estimated is None for one in found) else torch.zeros_like(lse)
        for tokens, partial, estimated in found:
            for target, own in ((out, partial.out), (lse, partial.lse), (share, estimated)):
                if target is not None and own is not None:
                    rows = unstacked(own, len(tokens.rows)).to(target.device)
                    if len(rows) == batch:
                        target.copy_(rows)  # indices would have to cross to the device
                    else:
                        target[tokens.rows] = rows
        return SourceResult(Partial(out, lse), share, cost)


Source = TypeVar("Source", bound=AttentionSource)


class SourcePlan:
    """Sources that together attend to all tokens of a request, in the order of their kinds."""

    def __init__(self, request: AttentionRequest, kinds: Items[type[AttentionSource]]) -> None:
        """Ask the kinds in order. Raises BackendError if no kind covers some of the tokens."""
        self.request = request
        self.sources: list[AttentionSource] = []
        left = request.token_ranges()
        for kind in kinds:
            waiting, left, covered = left[::-1], [], []
            while waiting:
                tokens = waiting.pop()
                found = kind.covers(request, tokens)
                if found is None:
                    left.append(tokens)
                    continue
                covered.append(found)
                if found.stop < tokens.stop:
                    waiting.append(tokens.cut(found.stop, tokens.stop))
                if found.start > tokens.start:
                    waiting.append(tokens.cut(tokens.start, found.start))
            if covered:
                self.sources.append(kind(request, covered))
            if not left:
                break
        if left:
            raise BackendError(
                f"layer {request.held.number}: no attention source covers tokens {left[0].start} to {left[0].stop}; "
                "register one whose `covers` returns them"
            )
        if request.held.batch.uploads and not any(source.uploads for source in self.sources):
            request.held.uploads.clear()  # the layer before may have sent keys ahead

    def attend(self, query: Tensor, scoring: Scoring, *, last: bool = True) -> list[SourceResult]:
        """Return the results of the sources for queries (batch, q_heads, new, head_dim), and count their costs."""
        for source in self.sources:
            source.begin(query, scoring, last=last)
        results = []
        for source in self.sources:
            began = time.perf_counter()
            result = source.finish()
            if result.cost is not None:
                count_cost(self.request.held.stats, result.cost, time.perf_counter() - began)
            results.append(result)
        return results


def count_cost(stats: LayerStats, cost: StepCost, seconds: float) -> None:
    """Add the cost of attention on the host, which took `seconds` of wall clock in all, to a layer's counters."""
    stats.host_seconds += seconds
    stats.keys_scanned += cost.keys_scanned
    stats.bytes_read += cost.bytes_read
    stats.search_seconds += cost.search_seconds
    stats.attend_seconds += cost.attend_seconds


AT_ONCE = 128
"""Tokens of one forward each that are summed at once: a few numbers per token cost what beginning an operation does."""
NUMBERS_AT_ONCE = 1024
"""Shares that wait to be summed, at most."""


class TailMass:
    """Sum of the estimated shares of one layer's attention while it decodes. count: rows times tokens that were added.

    A step of the host returns the share of its own weights that stands for keys without attention
    (`cpu/step/attend_task.py`). Weighed by the lse of the host's part and of the whole, it is the share of all
    attention.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: Tensor | None = None  # (q_heads,) float64, on the device of what was added
        self._host_sums: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # of one shape

    def __copy__(self) -> TailMass:
        """Return a copy of the sums so far; later additions to one do not change the other."""
        other = object.__new__(TailMass)
        other.__dict__.update(self.__dict__, _waiting=self._waiting.copy())
        return other

    def add(self, rest: Tensor, host_lse: Tensor, lse: Tensor) -> None:
        """Some tokens of some rows more. All (batch, q_heads, new) float32 on one device, not written to any more.

        rest: the share of the host's weights that is estimated; host_lse: of the host's partial; lse: of all keys.
        """
        if self._waiting and self._waiting[0][0].shape != rest.shape:
            self._sum_waiting()
        self._waiting.append((rest, host_lse, lse))
        self.count += rest.shape[0] * rest.shape[2]
        if len(self._waiting) >= AT_ONCE or len(self._waiting) * rest.numel() >= NUMBERS_AT_ONCE:
            self._sum_waiting()

    @torch.no_grad()
    def _sum_waiting(self) -> None:
        if self._waiting:
            rest, host_lse, lse = (torch.stack(some) for some in zip(*self._waiting, strict=True))
            shares = torch.exp(host_lse - lse).mul_(rest).sum(dim=(0, 1, 3), dtype=torch.float64)
            self._sums = shares if self._sums is None else self._sums + shares
            self._waiting.clear()

    @torch.no_grad()
    def add_sums(self, sums: Tensor, count: int) -> None:
        """Add sums that were computed elsewhere: (q_heads,) sums of the shares of `count` rows times tokens."""
        if count:
            sums = sums.double().cpu()
            self._host_sums = sums if self._host_sums is None else self._host_sums + sums
            self.count += count

    def means(self) -> npt.NDArray[np.float64]:
        """(q_heads,): the mean over what was added, of each head; of no head if nothing was."""
        self._sum_waiting()
        sums = [some.cpu().numpy() for some in (self._sums, self._host_sums) if some is not None]
        return np.sum(sums, axis=0) / self.count if sums and self.count else np.empty(0)


def mean_share(layers: Mapping[int, TailMass]) -> float | None:
    """Mean over the heads of all layers and what was added to each; None if nothing was. layers: by their numbers."""
    sums = [(tail.means().sum() * tail.count, len(tail.means()) * tail.count) for tail in layers.values()]
    count = sum(number for _, number in sums)
    return float(sum(total for total, _ in sums) / count) if count else None


def largest_share(layers: Mapping[int, TailMass]) -> tuple[int, int, float] | None:
    """Layer, query head and mean of the head whose mean is largest, the first of equals; None if nothing was added."""
    found = [
        (number, int(means.argmax()), float(means.max()))
        for number, tail in layers.items()
        if len(means := tail.means())
    ]
    return max(found, key=lambda one: one[2], default=None)
