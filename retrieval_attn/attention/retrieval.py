"""RetrievalLayer: a full-attention layer with sinks and window on the device and all tokens on the host.

`LayerKV` stores its tokens. `SOURCES` are the ways to them: each forward attends by a `SourcePlan`, an exact one as
part of an `ExactPass`, which also samples the queries that an index trains on.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from torch import Tensor, nn

from retrieval_attn.attention.device_codes import DeviceCodeSource
from retrieval_attn.attention.exact import ExactPass, PagedSource, PassMark, UploadSource, WindowSource
from retrieval_attn.attention.host_attention import HostSource
from retrieval_attn.attention.layer import CacheLayer, RetrievedParts
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.sequence import Batch
from retrieval_attn.attention.source import (
    AttentionRequest,
    AttentionSource,
    SourcePlan,
    SourceResult,
    TailMass,
    TokenRange,
)
from retrieval_attn.config import Config
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.attention.window import Slide, WindowCache
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.staging import host_format
from retrieval_attn.offload.traffic import LayerStats, traffic
from retrieval_attn.offload.work import HostWork

SOURCES: list[type[AttentionSource]] = [WindowSource, PagedSource, DeviceCodeSource, UploadSource, HostSource]
"""Kinds of sources in the order in which they are asked; their partials are merged in this order, too."""


def register_source(kind: type[AttentionSource], *, before: type[AttentionSource]) -> None:
    """Add a kind of source, which is asked before another one."""
    SOURCES.insert(SOURCES.index(before), kind)


log = logging.getLogger(__name__)

FEW_TOKENS = 256
"""Tokens of one forward up to which no warning about prefill without chunks is logged."""
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_whole_prompts(model: nn.Module | None, tokens: int, chunk: int) -> None:
    """Log, once for a model, that a long prompt comes through its layers whole and not in chunks of `chunk` tokens."""
    if tokens <= max(chunk, FEW_TOKENS) or model is None or model in _warned:
        return
    _warned.add(model)
    log.warning(
        "%s reads %d tokens at once, and the activations of all of them have to fit the device's memory. Call "
        "retrieval_attn.enable(model), or generate within `with retrieval_attn.prefill_by_layer(model):`, and it reads "
        "layer by layer in chunks of %d tokens.",
        type(model).__name__,
        tokens,
        chunk,
    )


DECODE_TOKENS = 8
"""Maximum new tokens of a forward that always retrieves: speculative steps are decoding."""


class RetrievalLayer(CacheLayer):
    """See the module. held: its tokens, None before the first ones. q_heads: of the model's layer, 0 before the first.

    exact_part: the next token's attention to pages, if a step of several rows has computed it already.
    """

    def __init__(
        self,
        config: Config,
        index: IndexChoice,
        model: nn.Module | None = None,
        number: int = 0,
        batch: Batch | None = None,
    ) -> None:
        """index: of all layers of the cache. model: the model the layer belongs to; without it training queries stay at
        their own positions. number: of the layer in the model. batch: the rows, shared with the other layers; None:
        rows of its own.
        """
        super().__init__(config, batch)
        self.number = number
        self.exact_part: Partial | None = None
        self.held: LayerKV | None = None
        self._model = None if model is None else weakref.ref(model)
        self.index = index
        self._work: HostWork | None = None
        self._pass: ExactPass | None = None
        self.q_heads = 0

    # -- what is held --------------------------------------------------------------------------------

    @property
    def window(self) -> WindowCache | None:
        return None if self.held is None else self.held.window

    @property
    def hosts(self) -> list[SequenceKV]:
        """The path of each row; rows that share one have the same object. Empty before the first tokens."""
        return [] if self.held is None else self.held.hosts

    def _new_host(self, key: Tensor, value_dim: int) -> SequenceKV:
        host = SequenceKV(
            key.shape[1],
            key.shape[3],
            value_dim,
            host_format(self.config.host_dtype, key.dtype),
            index=self.index.spec,
            threads=self.config.threads,
            layer=self.number,
        )
        return host

    def hold(self, key: Tensor, value: Tensor) -> LayerKV:
        """Return the layer's keys and values; create them for tokens of this shape if these are the first."""
        if self.held is None:
            self.batch.start(key.shape[0])
            self.index.decide(self._announced or key.shape[2], key.shape[0])
            for sequence in self.batch.sequences:
                sequence.kv[self.number] = self._new_host(key, value.shape[3])
            self.held = LayerKV(self.config, self.batch, self.number, self.stats, key, value)
        return self.held

    # -- attention -----------------------------------------------------------------------------------

    def attends_exactly(self, total: int) -> bool:
        """Decide how `total` new tokens attend: to every earlier key (True), or to the window and to retrieved keys.

        The first tokens, tokens of a pass under way, tokens that go to pages, and questions unless `question_attention`
        is "retrieval" or they have few tokens.
        """
        if self._pass is not None or not self.columns or self._goes_to_pages:
            return True
        chosen = self.batch.question_attention or self.config.question_attention
        return chosen == "exact" and total > DECODE_TOKENS

    @property
    def _goes_to_pages(self) -> bool:
        return self.batch.paged_prefix is not None and self.batch.paged_prefix.reading is not None

    def request(self, held: LayerKV, num_queries: int, *, exact: bool) -> AttentionRequest:
        """Return the request of a forward of `num_queries` new tokens per row."""
        paged, self.exact_part = None if exact else self.exact_part, None
        return AttentionRequest(held, self.config, self.index.spec, self.q_heads, num_queries, exact, paged)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        self.finish_index()
        self.q_heads = query.shape[1]
        held, new, scoring = self.hold(key, value), key.shape[2], Scoring(scale, softcap)
        total = self._announced if self._announced is not None else new
        if not self.attends_exactly(total):
            return self._decode(held, query, key, value, spec, scoring)
        if self._pass is None:
            if self._announced is None:
                warn_of_whole_prompts(alive(self._model), new, self.config.prefill_chunk)
            self.stats.wait_seconds += traffic(held.device).make_room(self._alone)
            self._pass = self._begin_pass(held, total)
        valid = self.batch.note_padding(spec.padding, self._expected_offset(), new)
        part = self._pass.step(query, key, value, valid, scoring)
        if self._announced is None:
            self.end_pass()
        return part

    def _begin_pass(self, held: LayerKV, total: int) -> ExactPass:
        """Start a pass of `total` tokens, which attends to all tokens that are held now."""
        held.flush()
        return ExactPass(SourcePlan(self.request(held, total, exact=True), SOURCES), total)

    def _decode(
        self, held: LayerKV, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scoring: Scoring
    ) -> Partial:
        """Store the tokens in the window, and attend by the sources of a request with retrieval: one merge."""
        new = key.shape[2]
        held.append(key, value, self.batch.note_padding(spec.padding, self.columns, new))
        self._note_stored(new)
        plan = SourcePlan(self.request(held, new, exact=False), SOURCES)
        results = plan.attend(query, scoring)
        if held.window.room == 0:  # it is full, or has grown for many tokens
            held.spill()
        found = merge([one.partial for one in results])
        retrieving = [source.retrieves for source in plan.sources]
        retrieved = SourceResult.merged(list(itertools.compress(results, retrieving)))
        if retrieved is not None and retrieved.estimated is not None:
            self.tail.add(retrieved.estimated, retrieved.partial.lse, found.lse)
        if self.on_attention is not None:
            static = merge([one.partial for one, chosen in zip(results, retrieving, strict=True) if not chosen])
            ranges = [one for source in plan.sources if source.retrieves for one in source.ranges]
            estimated = None if retrieved is None else retrieved.estimated
            self._parts = RetrievedParts(static, None if retrieved is None else retrieved.partial, estimated, ranges)
        return found

    def _expected_offset(self) -> int:
        return self.columns + (self._pass.new.filled if self._pass is not None else 0)

    # -- passes: prefill and exact append ------------------------------------------------------------

    def end_pass(self, between: Callable[[], object] = lambda: None) -> None:
        done, self._pass = self._pass, None
        exact = self.batch.paged_prefix
        if done is not None and exact is not None and self._goes_to_pages:
            exact.write(self.number, *done.new.new)
            assert self.held is not None
            self.held.take_paged(done.new.total)
            self._note_stored(done.new.total)
        elif done is not None:
            self._work = done.host_work(may_copy=self.index.make_room_to_copy)
            self._finish_pass(done, self._work, between=between)
        super().end_pass()

    def mark(self) -> object:
        if not self.attends_exactly(self._announced or 0):
            return None
        return _RetrievalMark(self.columns, None if self._pass is None else self._pass.mark())

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, _RetrievalMark) or self.columns != mark.columns:
            return False
        self._pending = None
        if self._pass is not None and mark.done is not None:
            self._pass.restore(mark.done)
        else:
            self._pass = None
        return True

    def finish_index(self) -> None:
        """Keys that are still being copied or indexed must be ready before anything else happens to the layer.

        Raises what went wrong with them, with the layer named.
        """
        work = self._work
        if work is not None:
            work.finish()
            self._work = None  # not before: who asks meanwhile, in another thread, is told that keys are on their way

    def check_index(self) -> bool:
        if self._work is None:
            return True
        self._work.check()
        return self._work.done

    def abandon(self) -> None:
        if self._work is not None:
            self._work.abandon()

    # -- rows, called by the cache -------------------------------------------------------------------

    def select(self, rows: Items[int]) -> None:
        if self.held is not None:
            self.held.select(list(rows))

    def drop_newest(self, count: int) -> None:
        if self.held is None or not count:
            return
        if count == self.columns:
            self.held = None
        else:
            self.held.drop_newest(count)

    def fork(self, batch: Batch, *, copied: bool = True) -> RetrievalLayer:
        """An independent continuation that shares all host memory and index with this layer."""
        other = RetrievalLayer(self.config, self.index)
        other.__dict__.update(self.__dict__)
        other.graph = None
        other.batch, other.stats, other.tail = batch, LayerStats(), TailMass()
        other.held = None if self.held is None else self.held.fork(batch, other.stats, copied=copied)
        return other

    def spill(self, *, flush: bool = True) -> None:
        """The tail is full: everything beyond the window moves to the host. flush: see `LayerKV.spill`."""
        if self.held is not None:
            self.held.spill(flush=flush)

    def reset(self) -> None:
        self.abandon()
        super().reset()
        self._work = self._pass = self.held = None

    def decodes_plainly(self) -> bool:
        """Return True if `begin_token` can serve a token: on a CPU, without codes, by sources with `batched`."""
        watched = self.on_attention is not None or self.graph is not None
        if watched or self.held is None or self.attends_exactly(1):
            return False
        if self.held.device.type != "cpu" or self.index.spec.keeps_device_keys:
            return False
        return self._covering(self.held, batched=False) is None

    def _covering(
        self, held: LayerKV, *, batched: bool = True, capturable: bool = True
    ) -> type[AttentionSource] | None:
        """Return a source that lacks the ability and covers keys that a token of the first row retrieves from."""
        host, (start, stop) = held.first_row()
        request = AttentionRequest(held, self.config, self.index.spec, self.q_heads, 1, exact=False)
        for kind in SOURCES if stop > start else ():
            lacks = (not batched and not kind.batched) or (not capturable and not kind.capturable)
            if lacks and kind.covers(request, TokenRange(host, [0], start, stop)) is not None:
                return kind
        return None

    def require_capturable(self) -> None:
        kind = None if self.held is None else self._covering(self.held, capturable=False)
        if kind is not None:
            raise CaptureError(f"layer {self.number}: {kind.__name__} attends to its keys, and no captured step does")

    def reads_plainly(self, new: int) -> bool:
        """Return True if `begin_read` can serve `new` tokens of one row as a pass of their own."""
        watched = self.on_attention is not None or self._pass is not None
        if watched or self._announced is not None or self.batch.valid is not None or self._goes_to_pages:
            return False
        return self.attends_exactly(new)

    def begin_read(self, module: nn.Module, query: Tensor, spec: MaskSpec, scoring: Scoring) -> SourcePlan:
        """Start a pass of the pending tokens; the caller attends, then calls `send_read` and `end_read`.

        Returns the sources of the earlier tokens.
        """
        self.invalidate_graph()
        key, value = self._take(module, query, spec)
        self.finish_index()
        self.q_heads = query.shape[1]
        self._pass = self._begin_pass(self.hold(key, value), key.shape[2])
        self._pass.take(query, key, value, None, scoring)
        return self._pass.plan

    def send_read(self, make: Callable[..., HostWork]) -> None:
        """Hand the pass to a host work that the caller begins. make: has the parameters of `HostWork`."""
        assert self._pass is not None
        self._work = self._pass.host_work(make, may_copy=self.index.make_room_to_copy)

    def slide_of(self, tokens: slice) -> Slide | None:
        """See `LayerKV.slide_of`."""
        assert self.held is not None
        return self.held.slide_of(tokens)

    def end_read(self, *, slid: bool = False) -> None:
        """Move the tokens to their places and request the rest of the work, after it has begun to copy.

        slid: the window has them already, see `slide_of`. Raises the errors of the work so far.
        """
        assert self._pass is not None and self._work is not None
        self._work.check()
        done, self._pass = self._pass, None
        self._finish_pass(done, self._work, slid=slid)
        CacheLayer.end_pass(self)

    def _finish_pass(
        self, done: ExactPass, work: HostWork, *, slid: bool = False, between: Callable[[], object] = lambda: None
    ) -> None:
        done.finish(work, alive(self._model), alive(self._owner), slid=slid, between=between)
        self._note_stored(done.new.total)

    def begin_token(self, module: nn.Module, q_heads: int, spec: MaskSpec) -> LayerKV:
        """Count one token of one row, in a layer that `decodes_plainly`; the caller writes it and attends.

        The caller calls `spill` if the window is then full. Raises as `CacheLayer.attend` does.
        """
        self._start(1)
        self._belong_to(module)
        self._require_mask(module, spec)
        self.finish_index()
        self.q_heads = q_heads
        assert self.held is not None
        self.held.begin_column()
        self._note_stored(1)
        return self.held


def alive(reference: weakref.ref[nn.Module] | None) -> nn.Module | None:
    """Return the module of a weak reference; None without a reference or if the module is gone."""
    return None if reference is None else reference()


class _RetrievalMark(NamedTuple):
    """How far a layer is: columns stored, and how far a pass under way is (None: there is none)."""

    columns: int
    done: PassMark | None
