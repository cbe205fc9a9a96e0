"""RetrievalLayer: a full-attention layer with sinks and window on the device and all tokens on the host.

`LayerKV` stores its tokens. `Reading` attends to new tokens exactly and samples the queries that an index trains on.
`HostAttention` answers a generated token's queries from the host.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.attention.exact import ExactPass
from retrieval_attn.attention.host_attention import HostAttention
from retrieval_attn.attention.layer import CacheLayer, RetrievedParts
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.layer_uploads import LayerUploads
from retrieval_attn.attention.sequence import Batch, rows_by_path
from retrieval_attn.attention.tail_mass import TailMass
from retrieval_attn.config import Config
from retrieval_attn.cpu.budgets import SAMPLED_QUERIES
from retrieval_attn.cpu.store import COPIED_TOKENS, SequenceKV, indexed_from
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.build import SampledAttention
from retrieval_attn.offload.clusters import drifted
from retrieval_attn.offload.queries import TrainingQueries
from retrieval_attn.offload.staging import host_format
from retrieval_attn.offload.traffic import LayerStats, traffic
from retrieval_attn.offload.work import HostWork

log = logging.getLogger(__name__)

FEW_TOKENS = 256
"""Tokens of one forward up to which no warning about prefill without chunks is logged."""
DRIFT_SHARE = 8
"""Clusters are rebuilt if a turn adds at least 1/N of the clustered tokens."""
METRIC_QUERIES = 256
"""Queries of each head in whose metric clusters are made."""
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ReadingMark(NamedTuple):
    """How far a reading was."""

    done: tuple[int, Tensor | None]
    sampled: tuple[int, ...]


class Reading:
    """A pass under way over what a layer holds."""

    def __init__(self, held: LayerKV, total: int, spec: IndexSpec, config: Config) -> None:
        """Bring the layer's past to its device: `total` new tokens attend to it exactly.

        spec: the index that the keys will get.
        """
        self._held, self._budgets = held, config.retrieve == "auto"
        self._scoring: tuple[float, float | None] = 1.0, None
        self._first = held.columns == 0
        self.done = ExactPass(total, held.past())
        count = spec.training_queries(total)
        # else no query is ever asked for
        anew = held.retrieves_after(total) and (self._first or _may_begin_anew(held, total))
        self._sample = TrainingQueries(total, count) if spec.trains and anew else None
        # of its own: clusters are the same whatever the index trains on
        self._metric_sample = TrainingQueries(total, METRIC_QUERIES) if config.estimates and anew else None

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float, softcap: float | None
    ) -> Partial:
        """See `ExactPass.step`; keeps the sampled queries of the chunk."""
        self._take_sample(query, scale, softcap)
        return self.done.step(query, key, value, valid, scale, softcap)

    def take(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> None:
        """Store tokens without padding as `step` does; the caller attends with their queries."""
        self._take_sample(query, scale, softcap)
        self.done.take(key, value, None)

    def _take_sample(self, query: Tensor, scale: float, softcap: float | None) -> None:
        for sample in (self._sample, self._metric_sample):
            if sample is not None:
                sample.take(query, self.done.filled)
        self._scoring = scale, softcap

    def host_work(self, make: Callable[..., HostWork] = HostWork) -> HostWork:
        """Return the work, not started, of copying the pass to the host. Raises CacheMismatchError without all tokens.

        make: takes what `HostWork` takes.
        """
        done = self.done
        if done.filled != done.total:
            raise CacheMismatchError(f"A pass announced {done.total} tokens and brought {done.filled}.")
        return self._held.host_work(*done.new, done.valid, make)

    def finish(self, work: HostWork, model: nn.Module | None, module: nn.Module | None) -> None:
        """Store the pass in host memory, window, sinks and index by `work`, which continues while a GPU computes.

        model, module: the model and its attention layer, as far as they are known: they move training queries.
        """
        held, done = self._held, self.done
        work.start_copy()
        held.take_pass(done, work)
        for host, (row, *_) in rows_by_path(held.hosts):
            start, stop = held.ranges[row]
            if stop <= start:
                continue
            if not self._first and 2 * indexed_from(host, start) >= stop - start:
                work.extend(host, stop)
                turn = done.new_of(row, 0)
                if DRIFT_SHARE * turn.shape[1] >= stop - start and drifted(host, turn):
                    self._cluster(work, host, (start, stop), self._moved(self._metric_sample, model, module, row), row)
                else:
                    work.clusters.extend(host, (start, stop))
                continue
            where = model, module, row
            if self._metric_sample is not None:
                queries = self._moved(self._metric_sample, *where)
                self._cluster(work, host, (start, stop), queries, row)
                if self._budgets and queries is not None and queries.shape[1]:
                    work.budgets.add(host, (start, stop), self._sampled_attention(queries, row))
            work.index(host, (start, stop), self._moved(self._sample, *where), functools.partial(done.keys_of, row))
        work.shares = [one.turn for one in (self._sample, self._metric_sample) if one is not None]
        work.start_build()

    def _cluster(
        self, work: HostWork, host: SequenceKV, span: tuple[int, int], queries: Tensor | None, row: int
    ) -> None:
        """All tokens of span get clusters, past ones and new ones. queries: in whose metric."""
        keys, values = self.done.keys_of(row), self.done.values_of(row)
        work.clusters.add(host, span, (keys[:, slice(*span)], values[:, slice(*span)]), queries)

    def _sampled_attention(self, queries: Tensor, row: int) -> SampledAttention:
        """Some of a row's queries (q_heads, m, head_dim), each as the next token's, over sinks and window."""
        window, (scale, softcap) = self._held.window, self._scoring
        places = torch.linspace(0, queries.shape[1] - 1, min(SAMPLED_QUERIES, queries.shape[1]), device=queries.device)
        chosen = queries[:, places.long()]
        asked = chosen.to(window.buffers[0].dtype).expand(len(self._held.hosts), *chosen.shape)
        # one by one: queries of one call would see only the tokens up to their own
        parts = [window.attend(one, scale=scale, softcap=softcap) for one in asked.split(1, dim=2)]
        out, lse = (torch.cat([part[field][row] for part in parts], dim=1) for field in (0, 1))
        return SampledAttention(chosen, out, lse, scale, softcap)

    def _moved(
        self, sample: TrainingQueries | None, model: nn.Module | None, module: nn.Module | None, row: int
    ) -> Tensor | None:
        """A sample of one row where decoding will happen, see `TrainingQueries.on_device`; None without a sample."""
        if sample is None or module is None:
            return None
        valid = self.done.valid
        return sample.on_device(model, module, row, None if valid is None else valid[row])

    def mark(self) -> ReadingMark:
        """Return the state that `restore` needs to undo later chunks."""
        samples = tuple(0 if one is None else one.mark() for one in (self._sample, self._metric_sample))
        return ReadingMark(self.done.mark(), samples)

    def restore(self, mark: ReadingMark) -> None:
        """Restore the state of `mark`."""
        self.done.restore(mark.done)
        for sample, sampled in zip((self._sample, self._metric_sample), mark.sampled, strict=True):
            if sample is not None:
                sample.restore(sampled)


def _may_begin_anew(held: LayerKV, total: int) -> bool:
    """Return whether `total` more tokens may need a new index or new clusters of any row, see `Reading.finish`."""
    for host, (row, *_) in rows_by_path(held.hosts):
        start, stop = held.ranges[row]
        indexed = indexed_from(host, start) - COPIED_TOKENS  # a short last segment may be copied, without its index
        if 2 * indexed < held.columns + total - start or DRIFT_SHARE * total >= stop - start:
            return True
    return False


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
        self._reading: Reading | None = None
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
            self.batch.add_layer(self.number, lambda: self._new_host(key, value.shape[3]))
            self.held = LayerKV(self.config, self.batch, self.number, self.stats, key, value)
        return self.held

    # -- attention -----------------------------------------------------------------------------------

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        self.finish_index()
        self.q_heads = query.shape[1]
        held, new = self.hold(key, value), key.shape[2]
        total = self._announced if self._announced is not None else new
        if self._reading is None and self.columns > 0 and not self._appends_exactly(total):
            return self._decode(held, query, key, value, spec, Scoring(scale, softcap))
        if self._reading is None:
            if self._announced is None:
                warn_of_whole_prompts(alive(self._model), new, self.config.prefill_chunk)
            self.stats.wait_seconds += traffic(held.device).make_room(self._alone)
            self._reading = Reading(held, total, self.index.spec, self.config)
        valid = self.batch.note_padding(spec.padding, self._expected_offset(), new)
        part = self._reading.step(query, key, value, valid, scale, softcap)
        if self._announced is None:
            self.end_pass()
        return part

    def _decode(
        self, held: LayerKV, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scoring: Scoring
    ) -> Partial:
        """Sinks and window exactly on the device, the middle through the index on the host, one merge."""
        new = key.shape[2]
        held.append(key, value, self.batch.note_padding(spec.padding, self.columns, new))
        self._note_stored(new)
        uploads = LayerUploads(self.batch, self.number, held.device)
        host = HostAttention(held, query, scoring, self.index.spec, uploads)
        host.begin(self.config)  # the device searches before it attends to the window, while the host prepares
        static = held.window.attend(query, scale=scoring.scale, softcap=scoring.softcap)
        exact = _paged_part(self, query, scoring)
        if exact is not None:
            static = merge([static, exact])
        parts = [static]
        if held.retrieves:
            parts.append(host.attend(self.config, value.shape[3], self.stats))
        if held.window.room == 0:  # it is full, or has grown for many tokens
            held.spill()
        found = merge(parts)
        if host.rest is not None:
            self.tail.add(host.rest, parts[-1].lse, found.lse)
        if self.on_attention is not None:
            self._parts = RetrievedParts(static, parts[1] if held.retrieves else None, host.rest, host.paths)
        return found

    def _expected_offset(self) -> int:
        return self.columns + (self._reading.done.filled if self._reading is not None else 0)

    # -- passes: prefill and exact append ------------------------------------------------------------

    def end_pass(self) -> None:
        reading, self._reading = self._reading, None
        exact = self.batch.exact
        if reading is not None and exact is not None and exact.reading is not None:
            exact.write(self.number, *reading.done.new)
            assert self.held is not None
            self.held.take_paged(reading.done.total)
            self._note_stored(reading.done.total)
        elif reading is not None:
            self._work = reading.host_work()
            self._finish_reading(reading, self._work)
        super().end_pass()

    def _appends_exactly(self, total: int) -> bool:
        """Whether `total` tokens after earlier ones attend to all of these exactly."""
        exact = self.batch.exact
        if exact is not None and exact.reading is not None:  # its keys go to pages, however few
            return True
        return self.config.question_attention == "exact" and total > DECODE_TOKENS

    def mark(self) -> object:
        if self._reading is not None:
            return _RetrievalMark(self.columns, self._reading.mark())
        decodes = self.columns > 0 and not self._appends_exactly(self._announced or 0)
        return None if decodes else _RetrievalMark(self.columns, None)

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, _RetrievalMark) or self.columns != mark.columns:
            return False
        self._pending = None
        if self._reading is not None and mark.reading is not None:
            self._reading.restore(mark.reading)
        else:
            self._reading = None
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
        self._work = self._reading = self.held = None

    def decodes_plainly(self) -> bool:
        """Return True if `begin_token` can serve a token: on a CPU without codes, callbacks or a captured step."""
        watched = self.on_attention is not None or self.graph is not None
        if watched or self._reading is not None or self.held is None or not self.columns or self._appends_exactly(1):
            return False
        return self.held.device.type == "cpu" and not self.index.spec.cls.keeps_device_keys

    def reads_plainly(self, new: int) -> bool:
        """Return True if `begin_read` can serve `new` tokens of one row as a pass of their own."""
        watched = self.on_attention is not None or self._reading is not None
        if watched or self._announced is not None or self.batch.valid is not None:
            return False
        exact = self.batch.exact
        to_pages = exact is not None and exact.reading is not None
        return not to_pages and (not self.columns or self._appends_exactly(new))

    def begin_read(self, module: nn.Module, query: Tensor, spec: MaskSpec, scoring: Scoring) -> ExactPass:
        """Start a pass of the pending tokens; the caller attends, then calls `send_read` and `end_read`."""
        self.invalidate_graph()
        key, value = self._take(module, query, spec)
        self.finish_index()
        self.q_heads = query.shape[1]
        self._reading = Reading(self.hold(key, value), key.shape[2], self.index.spec, self.config)
        self._reading.take(query, key, value, *scoring)
        return self._reading.done

    def send_read(self, make: Callable[..., HostWork]) -> None:
        """Hand the pass to a host work that the caller begins. make: has the parameters of `HostWork`."""
        assert self._reading is not None
        self._work = self._reading.host_work(make)

    def end_read(self) -> None:
        """Move the tokens to their places and request the rest of the work, after it has begun to copy.

        Raises the errors of the work so far.
        """
        assert self._reading is not None and self._work is not None
        self._work.check()
        reading, self._reading = self._reading, None
        self._finish_reading(reading, self._work)
        CacheLayer.end_pass(self)

    def _finish_reading(self, reading: Reading, work: HostWork) -> None:
        reading.finish(work, alive(self._model), alive(self._owner))
        self._note_stored(reading.done.total)

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


def _paged_part(layer: RetrievalLayer, query: Tensor, scoring: Scoring) -> Partial | None:
    """Over tokens in pages: as who steps several rows has it already, or made here; None without any."""
    given, layer.exact_part = layer.exact_part, None
    exact = layer.batch.exact
    if given is not None or exact is None or not exact.tokens:
        return given
    return exact.attend(layer.number, query, scoring)


class _RetrievalMark(NamedTuple):
    """How far a layer is: columns stored, and how far a reading under way is (None: there is none)."""

    columns: int
    reading: ReadingMark | None
