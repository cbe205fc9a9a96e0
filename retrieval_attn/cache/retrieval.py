"""RetrievalLayer: a full-attention layer with sinks and window on the device and all tokens on the host.

What it holds is `cache/held.py`; how new tokens are read exactly `cache/reading.py`; how a generated token asks the
host `cache/host_part.py`. Here these come together.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrieval_attn.cache.exact import ExactPass
from retrieval_attn.cache.held import HeldTokens
from retrieval_attn.cache.host_part import HostPart, Scoring
from retrieval_attn.cache.layer import CacheLayer
from retrieval_attn.cache.reading import Reading, ReadingMark, warn_of_whole_prompts
from retrieval_attn.cache.sequence import Batch, distinct, distinct_rows
from retrieval_attn.config import Config
from retrieval_attn.cpu.store import HostPath, held_bytes
from retrieval_attn.gpu.attention.merge import Partial, merge
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.codes.search import CodeShape
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.queries import TrainingQueries
from retrieval_attn.offload.stats import LayerStats
from retrieval_attn.offload.traffic import traffic
from retrieval_attn.offload.transfer import host_format
from retrieval_attn.offload.work import HostWork


class RetrievalLayer(CacheLayer):
    """See the module. held: its tokens, None before the first ones.

    mass_heads: query heads for which every eager decode step also computes exact attention's denominator.
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
        self.mass_heads = 0
        self.held: HeldTokens | None = None
        self._model = None if model is None else weakref.ref(model)
        self._index = index
        self._work: HostWork | None = None
        self._reading: Reading | None = None

    # -- what is held --------------------------------------------------------------------------------

    @property
    def window(self) -> WindowCache | None:
        """See `CacheLayer`."""
        return None if self.held is None else self.held.window

    @property
    def hosts(self) -> list[HostPath]:
        """The path of each row; rows that share one have the same object. Empty before the first tokens."""
        return [] if self.held is None else self.held.hosts

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Per row, the tokens of its host path that retrieval covers: those between sinks and tail."""
        return [] if self.held is None else self.held.ranges

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for keys, values and indexes, shared paths counted once."""
        self.finish_index()
        return held_bytes(self.hosts)

    @property
    def coded_indexes(self) -> dict[int, KeyIndex]:
        """Indexes that keep codes of keys in device memory, each once, by identity."""
        self.finish_index()
        indexes = [index for host in self.hosts for one in host.segments for index in one.indexes]
        return {id(index): index for index in indexes if index.keeps_device_keys}

    @property
    def coded_nbytes(self) -> int:
        """Bytes of device memory for codes of keys, each index's once."""
        return sum(index.device_nbytes for index in self.coded_indexes.values())

    def index_kinds(self) -> Counter[str]:
        """Kinds of the indexes over this layer's host keys, and how many heads have each."""
        self.finish_index()
        kinds: Counter[str] = Counter()
        for host in distinct(self.hosts):
            kinds.update(host.index_kinds)
        return kinds

    def index_notes(self) -> list[str]:
        """Why each head has the index it has, where something chose it."""
        self.finish_index()
        return [note for host in distinct(self.hosts) for note in host.index_notes]

    def code_shape(self, head_dim: int) -> CodeShape | None:
        """What a captured step searches codes on the device by; None where the index has none there."""
        k = self.config.retrieve
        shape = None if isinstance(k, float | str) else self._index.spec.code_shape(head_dim, k)
        return None if shape is None else CodeShape(*shape)

    def _new_host(self, key: Tensor, value_dim: int) -> HostPath:
        return HostPath(
            key.shape[1],
            key.shape[3],
            value_dim,
            host_format(self.config.host_dtype, key.dtype),
            index=self._index.spec,
            threads=self.config.threads,
            layer=self.number,
        )

    def _hold(self, key: Tensor, value: Tensor) -> HeldTokens:
        """What is held; made for tokens like these if they are the first."""
        if self.held is None:
            self.batch.start(key.shape[0])
            self._index.decide(self._announced or key.shape[2], key.shape[0])
            self.batch.add_layer(self.number, lambda: self._new_host(key, value.shape[3]))
            self.held = HeldTokens(self.config, self.batch, self.number, self.stats, key, value)
        return self.held

    # -- attention -----------------------------------------------------------------------------------

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        self.finish_index()
        held, new = self._hold(key, value), key.shape[2]
        total = self._announced if self._announced is not None else new
        if self._reading is None and self.columns > 0 and not self._appends_exactly(total):
            return self._decode(held, query, key, value, spec, Scoring(scale, softcap))
        if self._reading is None:
            if self._announced is None and self._model is not None:
                warn_of_whole_prompts(self._model(), new, self.config.prefill_chunk)
            self._reading = self._open_reading(held, total)
        valid = self.batch.note_padding(spec.padding, self._expected_offset(), new)
        part = self._reading.step(query, key, value, valid, scale, softcap)
        if self._announced is None:
            self.end_pass()
        return part

    def _decode(
        self, held: HeldTokens, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scoring: Scoring
    ) -> Partial:
        """Sinks and window exactly on the device, the middle through the index on the host, one merge."""
        new = key.shape[2]
        held.append(key, value, self.batch.note_padding(spec.padding, self.columns, new))
        self._note_stored(new)
        static = held.window.attend(query, scale=scoring.scale, softcap=scoring.softcap)
        if not held.retrieves:
            return static
        host = HostPart(held, query, scoring)
        retrieved = host.attend(self.config, value.shape[3], self.stats)
        if self.mass_heads:
            host.measure_mass(self.mass_heads, static.lse, retrieved.lse, self.stats)
        return merge([static, retrieved])

    def _expected_offset(self) -> int:
        return self.columns + (self._reading.done.filled if self._reading is not None else 0)

    # -- passes: prefill and exact append ------------------------------------------------------------

    def end_pass(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and self.held is not None:
            self._finish_reading(self.held, reading)
        super().end_pass()

    def _appends_exactly(self, total: int) -> bool:
        """Whether so many tokens after others attend to all of them exactly."""
        return self.config.exact_append and total > self.config.decode_tokens

    def _open_reading(self, held: HeldTokens, total: int) -> Reading:
        """Bring this layer's past to its device: the pass attends to it exactly, one layer at a time."""
        self.stats.wait_seconds += traffic(held.device).make_room()
        spec = self._index.spec
        count = spec.training_queries(total, self.config.train_queries)
        sample = TrainingQueries(total, count) if spec.trains else None
        return Reading(ExactPass(total, held.past()), sample)

    def _finish_reading(self, held: HeldTokens, reading: Reading) -> None:
        """Move a finished pass to its places: host, window, sinks, index."""
        done = reading.complete()
        first = self.columns == 0
        work = self._work = held.host_work(*done.new, done.valid)
        work.start_copy()
        held.take_pass(done, work)
        module = None if self._owner is None else self._owner()
        model = None if self._model is None else self._model()
        for row, host in distinct_rows(held.hosts):
            start, stop = held.ranges[row]
            if stop <= start:
                continue
            if not first and 2 * host.indexed_tokens >= stop - start:
                work.extend(host, stop)
            else:
                queries = reading.training_queries(model, module, row)
                work.index(host, (start, stop), queries, functools.partial(done.keys_of, row))
        work.start_build()
        self._note_stored(done.total)

    def mark(self) -> object:
        if self._reading is not None:
            return _Mark(self.columns, self._reading.mark())
        decodes = self.columns > 0 and not self._appends_exactly(self._announced or 0)
        return None if decodes else _Mark(self.columns, None)

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, _Mark) or self.columns != mark.columns:
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
        work, self._work = self._work, None
        if work is not None:
            try:
                work.finish()
            except BaseException:
                self._work = work  # what failed, or was interrupted, is not forgotten
                raise

    def check_index(self) -> None:
        if self._work is not None:
            self._work.check()

    def abandon(self) -> None:
        if self._work is not None:
            self._work.abandon()

    # -- rows, called by the cache -------------------------------------------------------------------

    def select(self, rows: Items[int]) -> None:
        if self.held is not None:
            self.held.select(list(rows))

    def snapshot(self) -> dict[str, Any]:
        state = super().snapshot()
        return {**state, "held": None if self.held is None else self.held.fork(self.batch, state["stats"])}

    def drop_newest(self, count: int) -> None:
        if self.held is None or not count:
            return
        if count == self.columns:
            self.held = None
        else:
            self.held.drop_newest(count)

    def fork(self, batch: Batch) -> RetrievalLayer:
        """An independent continuation that shares all host memory and index with this layer."""
        other = RetrievalLayer(self.config, self._index)
        other.__dict__.update(self.__dict__)
        other.graph = None
        other.batch, other.stats = batch, LayerStats()
        other.held = None if self.held is None else self.held.fork(batch, other.stats)
        return other

    def share(self, number: int) -> RetrievalLayer:
        """A layer of the same batch with this number and these tokens; it belongs to the module that uses it first."""
        other = self.fork(self.batch)
        other.number, other._owner = number, None
        copies = {id(host): host.fork() for host in distinct(self.hosts)}
        for sequence in self.batch.sequences:
            sequence.kv[number] = copies[id(sequence.kv[self.number])]
        if other.held is not None:
            other.held = other.held.fork(self.batch, other.stats, number)
        return other

    def spill(self) -> None:
        """The tail is full: everything beyond the window moves to the host."""
        if self.held is not None:
            self.held.spill()

    def reset(self) -> None:
        self.abandon()
        super().reset()
        self._work = self._reading = self.held = None


class _Mark(NamedTuple):
    """How far a layer is: columns stored, and how far a reading under way is (None: there is none)."""

    columns: int
    reading: ReadingMark | None
