"""A pass of new tokens through one layer: exact attention, and the sample of queries that its index trains on."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.attention.exact import ExactPass
from retrieval_attn.attention.layer_kv import LayerKV, retrieves_after
from retrieval_attn.attention.rows import rows_by_path
from retrieval_attn.config import Config
from retrieval_attn.cpu.budgets import SAMPLED_QUERIES
from retrieval_attn.cpu.store import COPIED_TOKENS, SequenceKV, indexed_from
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.budgets import SampledAttention
from retrieval_attn.offload.clusters import drifted
from retrieval_attn.offload.queries import TrainingQueries
from retrieval_attn.offload.work import HostWork

log = logging.getLogger(__name__)

FEW_TOKENS = 256
"""So many are nothing to warn of, and layers that read in chunks take them as they are."""
DRIFT_SHARE = 8
"""Clusters are looked at anew when a turn is at least one of so many parts of what they stand for."""
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
        count = spec.training_queries(total, config.train_queries)
        # else no query is ever asked for
        anew = retrieves_after(held, total) and (self._first or _may_begin_anew(held, total))
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
        """As `step`, of real tokens whose queries somebody else attends with."""
        self._take_sample(query, scale, softcap)
        self.done.take(key, value, None)

    def _take_sample(self, query: Tensor, scale: float, softcap: float | None) -> None:
        for sample in (self._sample, self._metric_sample):
            if sample is not None:
                sample.take(query, self.done.filled)
        self._scoring = scale, softcap

    def host_work(self, make: Callable[..., HostWork] = HostWork) -> HostWork:
        """What brings the pass to the host; nothing has begun. Raises CacheMismatchError if tokens are missing.

        make: takes what `HostWork` takes.
        """
        done = self.done
        if done.filled != done.total:
            raise CacheMismatchError(f"A pass announced {done.total} tokens and brought {done.filled}.")
        return self._held.host_work(*done.new, done.valid, make)

    def finish(self, work: HostWork, model: nn.Module | None, module: nn.Module | None) -> None:
        """Move the pass to its places, host, window, sinks and index, by `work`, which goes on beside a GPU.

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
        """What `restore` needs to forget the chunks that follow."""
        samples = tuple(0 if one is None else one.mark() for one in (self._sample, self._metric_sample))
        return ReadingMark(self.done.mark(), samples)

    def restore(self, mark: ReadingMark) -> None:
        """As it was when `mark` was made."""
        self.done.restore(mark.done)
        for sample, sampled in zip((self._sample, self._metric_sample), mark.sampled, strict=True):
            if sample is not None:
                sample.restore(sampled)


def _may_begin_anew(held: LayerKV, total: int) -> bool:
    """Whether so many tokens more could be enough for a new index or new clusters of any row, see `Reading.finish`."""
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
