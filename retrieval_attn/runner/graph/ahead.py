"""The kernels of a captured step and of questions, launched over zeros before there is either.

Triton compiles a kernel, or loads it, at its first launch: for dtypes, for numbers that are 1 or divisible by 16, for
addresses that are. So each is launched as it will be, with the shapes of a layer that was read, over memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrieval_attn.attention.coded_clusters import new_mass
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.gpu.codes.candidates import MAX_SLOTS, Candidates, StoredRows, attend_candidates, slots_for
from retrieval_attn.gpu.codes.host_row_gather import HostRowGather, RowShape
from retrieval_attn.gpu.codes.search import (
    CodeSearch,
    CodeShape,
    EstimatedLogits,
    QuestionSearch,
    SearchScratch,
    size_class,
)
from retrieval_attn.gpu.codes.streamer import StreamedCodes
from retrieval_attn.gpu.decode.kernels import (
    HostResult,
    Parts,
    WindowBuffers,
    merge_parts,
    split_count,
    stage_queries,
    window_partials,
)
from retrieval_attn.gpu.shared.partials import empty_pages, plan_shape, shared_partials
from retrieval_attn.gpu.shared.plan import SharedPlan
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.transfer import TORCH_DTYPE, host_format, pack
from retrieval_attn.runner.graph.host import code_shape, split_microbatches
from retrieval_attn.runner.graph.host_row_gather import device_reads, estimated_logits_of
from retrieval_attn.runner.graph.slot import window_of

SLOTS = 16
"""Of the window: few, for memory that is taken beside a reading stays taken."""


class LayerLaunches:
    """See the module: for a layer that holds tokens, as far as it retrieves."""

    def __init__(self, layer: RetrievalLayer, processors: int, forms: Sequence[bool] = ()) -> None:
        """processors: multiprocessors of the layer's device. forms: in which an answer may have all keys in pages,
        whether int8, see `runner/full_attention.py`; none: it retrieves.
        """
        self._key, self._value = window_of(layer).buffers
        self._processors, self._q_heads, self._forms = processors, layer.q_heads, tuple(forms)
        batch, self._kv_heads, _, self._dim = self._key.shape
        self._rows = sorted({part.stop - part.start for part in split_microbatches(layer, batch, self._dim)})
        self._step_codes, self._reads = code_shape(layer, self._dim), device_reads(layer)
        self._host_reads = layer.index.spec.host_reads
        ranges = [] if layer.held is None else layer.held.ranges
        self._keys = max((stop - start for start, stop in ranges), default=0)
        k = layer.config.retrieve_count(self._keys)
        estimated = layer.config.estimates
        codes = None if k is None else layer.index.spec.code_shape(self._dim, k, estimated)
        self._question_codes = None if codes is None else CodeShape(*codes)
        self._estimates = estimated
        self._k, self._fmt = k or 0, host_format(layer.config.host_dtype, self._key.dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        """Of layers with the same shape one needs to launch."""
        sizes = self._key.shape, self._value.shape, self._key.dtype, self._key.device
        codes = self._step_codes, self._reads, self._host_reads, self._question_codes, self._k, self._fmt
        return *sizes, self._q_heads, self._processors, self._forms, size_class(self._keys), *codes

    def works(self, graphs: bool) -> list[Callable[[], None]]:
        """What to call, in any order. graphs: steps are captured."""
        question = [self.search_question, self.attend_candidates]
        step = [self.attend, self.attend_to_all, self.search_step, self.reach_named]
        return [*step, *question] if graphs else question

    def attend(self) -> None:
        """Stage queries, attend to a window, merge with the host's part."""
        query, value_dim = self._query(), self._value.shape[3]
        parts = self._window_parts(query, self._key.shape[2])
        for rows in self._rows:
            count, places = rows * self._q_heads, self._places(rows)
            stage_queries(query[:rows], self._zeros(count, self._dim), places)
            estimated = self._zeros(count), self._zeros(count, 2)
            host = HostResult(self._zeros(count, value_dim), self._zeros(count), places, estimated)
            rest = (host.out, host.lse) if self._estimates and self._step_codes is not None else None
            merge_parts(Parts(parts.out[:rows], parts.lse[:rows]), host, None, query.dtype, rest)

    def attend_to_all(self) -> None:
        """Attend to a window and to pages with all keys before it, beside which there is no part of the host."""
        query, value_dim = self._query(), self._value.shape[3]
        for int8 in self._forms if len(query) == 1 else ():
            rows = (query.new_zeros(1, self._kv_heads, 1, dim) for dim in (self._dim, value_dim))
            pool = empty_pages(2, *(pack(one, Format.INT8) if int8 else one for one in rows))
            plan = SharedPlan(plan_shape(pool, 1, self._q_heads, exact=query.element_size() > 2), query.device)
            part = shared_partials(query, pool, plan, scale=1.0)
            merge_parts(self._window_parts(query, self._key.shape[2]), None, None, query.dtype, None, part)

    def search_step(self) -> None:
        """Search codes as a step does."""
        codes, device = self._step_codes, self._key.device
        if codes is None:
            return
        for rows in self._rows:
            count = rows * self._q_heads
            search = CodeSearch(rows, self._q_heads, self._kv_heads, codes, device)
            if self._host_reads.codes:
                StreamedCodes(len(search.entries), device).bring()
            self._run(search, self._query()[:rows], count, self._places(rows))
            if self._reads:
                search.told = self._told(count, codes)
                self._run(search, self._query()[:rows], count, None)

    def reach_named(self) -> None:
        """Attend to named keys as a step does whose device reads them."""
        codes, shape = self._step_codes, RowShape(self._dim, self._value.shape[3])
        if codes is None or not self._reads:
            return
        for rows in self._rows:
            ids = torch.full((rows * self._q_heads, codes.room), -1, dtype=torch.int32, device=self._key.device)
            told = self._told(len(ids), codes)
            HostRowGather(rows * self._kv_heads, shape, ids.device).run(
                self._query()[:rows], ids, Scoring(1.0), _at_once, None if told is None else told.products
            )

    def _told(self, queries: int, codes: CodeShape) -> EstimatedLogits | None:
        return estimated_logits_of(queries, codes.room, codes.named, self._host_reads.key_share, self._key.device)

    def search_question(self) -> None:
        """Search codes as a question does."""
        codes, device = self._question_codes, self._key.device
        if codes is None:
            return
        search = QuestionSearch(self._kv_heads, self._q_heads // self._kv_heads, codes, device)
        self._run(search, self._zeros(1, self._q_heads, 1, self._dim), self._q_heads, None)

    def attend_candidates(self) -> None:
        """Attend to named keys as a long question does."""
        codes, fmt = self._question_codes, self._fmt
        k = codes.room if codes is not None and self._estimates else self._k
        if codes is None or slots_for(codes.room, k) > MAX_SLOTS:
            return
        keys, values = (
            torch.zeros(self._kv_heads, 1, fmt.width(dim), dtype=TORCH_DTYPE[fmt], device=self._key.device)
            for dim in (self._dim, self._value.shape[3])
        )
        ids = torch.zeros(self._q_heads, codes.room, dtype=torch.int32, device=self._key.device)
        queries = self._zeros(self._kv_heads, self._q_heads // self._kv_heads, self._dim)
        attend_candidates(queries, StoredRows(keys, values), Candidates(ids, 0, 1, k), 1.0, None)

    def _window_parts(self, query: Tensor, slots: int) -> Parts:
        """Attention to a window, cut as one of so many slots is."""
        batch, heads = self._key.shape[:2]
        key, value = (like.new_zeros(batch, heads, SLOTS, like.shape[3]) for like in (self._key, self._value))
        window = WindowBuffers(key, value, key.new_zeros(batch, 4, dtype=torch.int32)[:, :2])
        new_key, new_value = (like.new_zeros(batch, heads, 1, like.shape[3]) for like in (key, value))
        splits = split_count(batch, heads, slots, self._processors)
        return window_partials(query, new_key, new_value, window, scale=1.0, splits=splits)

    def _run(self, search: CodeSearch, query: Tensor, count: int, places: Tensor | None) -> None:
        """Run a search to which nothing is bound."""
        ids = torch.empty(count, search.shape.room, dtype=torch.int32, device=query.device)
        scratch = SearchScratch(count, size_class(self._keys), search.shape.picked_room, query.device, has_memory=False)

        search.run(query, ids, places, scratch, _at_once)
        if self._estimates:
            mass = new_mass(len(search.entries), self._value.shape[3], query.device)
            mass.run(search, query, ids, places, scratch, Scoring(1.0), _at_once)

    def _query(self) -> Tensor:
        return self._key.new_zeros(len(self._key), self._q_heads, 1, self._dim)

    def _zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.float32, device=self._key.device)

    def _places(self, rows: int) -> Tensor | None:
        """As `HostRows` has them."""
        return None if rows == 1 else torch.arange(rows * self._q_heads, device=self._key.device)


def _at_once(function: Callable[..., None], *arguments: object) -> None:
    function(*arguments)
