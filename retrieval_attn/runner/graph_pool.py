"""BucketGroup: rows of one shape that decode in graphs: their window buffers, their buckets, and who is where."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.gpu.codes.search import size_class
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode_graph import DecodeGraph
from retrieval_attn.runner.graph.decoder import StepKind, attending
from retrieval_attn.runner.graph.host import HostResources
from retrieval_attn.runner.graph.pages import levels_for
from retrieval_attn.runner.graph.slot import slot_buffers
from retrieval_attn.runner.graph_slot import GraphSlot, GroupBuffers, StateBuffers, StepCosts
from retrieval_attn.runner.rows import StepClock
from retrieval_attn.sampling.sampler import SampledToken
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["GraphPool"]

SHRINK_AFTER = 32
"""Steps for which a smaller graph would have done before it is taken: rows come and go."""


class GraphPool:
    """See the module. buckets: by their size. rows: who is in a graph, by the id of the cache. pages: where prefixes
    of rows lie; None: no row had any so far.
    """

    def __init__(self, model: PreTrainedModel, like: RetrievalCache, runtime: Runtime, most: int) -> None:
        """like: a cache of the shape. most: rows at most, a power of 2. Raises torch.OutOfMemoryError."""
        self._model, self._prefill_chunk, self._runtime = model, like.config.prefill_chunk, runtime
        layers = attending(like)
        windows = [slot_buffers(layer, most) for _, layer in layers]
        self.buffers = GroupBuffers(windows, StateBuffers.of(like, most))
        self.buckets: dict[int, DecodeGraph] = {}
        self.rows: dict[int, GraphSlot] = {}
        self._most, self._resources = most, HostResources(runtime, default_pool())
        self._costs = StepCosts(len(layers))
        self._bucket: DecodeGraph | None = None
        self._changed: set[int] = set()
        self._smaller = 0  # steps in a row that a smaller bucket would have served
        self._retrieves, self._max_coded_keys, self._levels = False, 0, 0
        self.pages: PagedLayers | None = None

    def arrange(
        self, caches: Sequence[RetrievalCache], gone: Callable[[int], Callable[[Any], None]], tokens: int = 0
    ) -> dict[int, Exception]:
        """Be for these caches, as far as there are places: others leave, new ones join, full windows spill.

        gone: what to call for a cache, by its id, once nobody has it. tokens: of the longest that is expected.
        Returns why caches, by their number, are not in.
        Raises CaptureError where they cannot be together.
        """
        self.leave_absent(caches)
        problems: dict[int, Exception] = {}
        joining: list[tuple[int, RetrievalCache]] = []
        for number, cache in enumerate(caches):
            row = self.rows.get(id(cache))
            if row is None:
                joining.append((number, cache))
            elif row.room == 0 and not row.stale:
                self._try(number, id(cache), row.make_room, problems)
                self._changed.add(row.place)
        room = self._most - len(self.rows)
        problems.update((number, CaptureError(f"{self._most} rows are in the graph")) for number, _ in joining[room:])
        joining = joining[:room]
        bucket = self._take_bucket(len(self.rows) + len(joining), caches[0])
        for number, cache in joining:
            row = GraphSlot(cache, self._costs, gone(id(cache)))
            self.rows[id(cache)] = row
            place = self._free_place(bucket.size)
            self._try(number, id(cache), functools.partial(row.attach, self.buffers, place), problems)
            self._changed.add(place)
        for number, cache in enumerate(caches):
            row = self.rows.get(id(cache))
            if row is not None and row.stale:
                self._changed.add(row.place)
                self._try(number, id(cache), functools.partial(row.attach, self.buffers, row.place), problems)
        self._plan(bucket, tokens)
        return problems

    def misfits(
        self, caches: Sequence[RetrievalCache], gone: Callable[[int], Callable[[Any], None]]
    ) -> dict[int, Exception]:
        """Why some of these, by their number, cannot even be in a graph by themselves."""
        found: dict[int, Exception] = {}
        for number, cache in enumerate(caches):
            try:
                found.update((number, problem) for problem in self.arrange([cache], gone).values())
            except CaptureError as error:
                found[number] = error
        return found

    def replay(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None = None,
        launched: Callable[[], None] | None = None,
        clock: StepClock | None = None,
        *,
        ahead: bool = False,
    ) -> tuple[dict[int, SampledToken | None], Tensor | None]:
        """One token in each cache, all of which `arrange` took in. Returns the choices of rows with a draw, by number
        (None: not finite), and the logits (rows, vocabulary) float32 of the rows without one, in order; None if each
        row has a draw.

        inputs: token and position of each. draws: of each row, or None for a row that has none; None: no row has.
        launched: as in `Replay`. clock: is told the seconds. ahead: the same rows are likely to be asked for next, so
        that their step may begin before; without effect unless each row has a draw. Raises CaptureError where no graph
        can be captured, BackendError where the host or the exchange failed: the tokens then did not happen.
        """
        bucket = self._bucket
        assert bucket is not None
        places = [self.rows[id(cache)].place for cache in caches]
        asked = [None] * len(places) if draws is None else draws
        drawn = {number: draw for number, draw in enumerate(asked) if draw is not None}
        apart = [place for number, place in enumerate(places) if number not in drawn]
        by_place, ahead = {places[number]: draw for number, draw in drawn.items()}, ahead and not apart
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if not bucket.is_captured:  # the model itself runs
                stack.enter_context(using_retrieval(self._model, self._prefill_chunk))
            try:
                logits = bucket.step(dict(zip(places, inputs, strict=True)), by_place or None, launched, ahead=ahead)
                choices = bucket.choices(list(by_place)) if by_place else []
                found = logits[torch.tensor(apart, device=logits.device)] if apart else None
            except BaseException:
                bucket.undo()
                raise
        work = bucket.commit()  # at last: what raises before did not happen
        if clock is not None:
            clock.device += time.perf_counter() - began
        retrieving = 0 if work is None else sum(row.retrieves for row in self.rows.values())
        if work is not None and retrieving:
            if clock is not None:
                clock.host += float(work[1].sum()) / 1e9
            self._costs.add(*work, retrieving)
        if ahead and None not in choices:
            bucket.launch_next(by_place)
        return dict(zip(drawn, choices, strict=True)), found

    def leave_absent(self, caches: Sequence[RetrievalCache]) -> None:
        """Let all others go."""
        wanted = {id(cache) for cache in caches}
        for key in [key for key in self.rows if key not in wanted]:
            self.leave(key)

    def leave(self, key: int) -> None:
        """Give the cache with this id its windows back, if there is still somebody who has it."""
        row = self.rows.pop(key)
        if row.place >= 0:
            self._changed.add(row.place)
        row.leave()

    def let_go(self, key: int) -> None:
        """Nobody has this cache any more: nothing keeps what the host searched for it."""
        row = self.rows.pop(key, None)
        if row is not None and row.place >= 0 and self._bucket is not None:
            self._bucket.forget(row.place)
            self._changed.add(row.place)

    def clear_slot(self) -> None:
        """Let all go; the next step takes the smallest bucket that has room for it."""
        for key in list(self.rows):
            self.leave(key)
        for bucket in self.buckets.values():
            bucket.forget()
        self._bucket, self._smaller = None, 0

    def _try(self, number: int, key: int, do: Callable[[], None], problems: dict[int, Exception]) -> None:
        """Do something for a row; one that fails leaves."""
        try:
            do()
        except Exception as error:
            problems[number] = error
            self.leave(key)

    def _take_bucket(self, rows: int, like: RetrievalCache) -> DecodeGraph:
        """The bucket of the next step. Rows beyond the end of one that is smaller than the last move."""
        needed, size = 1 << max(0, rows - 1).bit_length(), 0 if self._bucket is None else self._bucket.size
        self._smaller = self._smaller + 1 if needed < size else 0
        if size < needed or self._smaller > SHRINK_AFTER:
            size, self._smaller = needed, 0
            if self._bucket is not None:
                self._bucket.add_tail()
                self._bucket.forget()
            for row in self.rows.values():
                if row.place >= size:
                    row.attach(self.buffers, self._free_place(size))
            if size not in self.buckets:
                own = self.buffers.rows(0, size)
                self.buckets[size] = DecodeGraph(self._model, like, self._runtime, own, self._resources)
            self._bucket = self.buckets[size]
            self._changed = set(range(size))
        assert self._bucket is not None
        return self._bucket

    def _free_place(self, size: int) -> int:
        """A place of a bucket that nobody has, in the half with fewer rows: host and device work on one each."""
        taken = {row.place for row in self.rows.values()}
        halves = range(size // 2), range(size // 2, size)
        free = [[place for place in half if place not in taken] for half in halves]
        return max(free, key=len)[0]

    def _plan(self, bucket: DecodeGraph, tokens: int) -> None:
        """Tell the bucket of its rows, if something changed."""
        rows = list(self.rows.values())
        if not self._changed or not rows:
            return
        # never less than before: what a search is recorded for may decide which keys a few more are
        self._retrieves |= any(row.retrieves for row in rows)
        coded = max(row.coded_keys for row in rows)
        self._max_coded_keys = max(self._max_coded_keys, size_class(max(coded, tokens)) if coded else 0)
        levels = levels_for([row.prefix for row in rows])  # steps of rows without pages do not pay for any
        self._levels = max(self._levels, levels)
        kind = StepKind(self._retrieves, False, self._max_coded_keys, self._levels if levels else 0)
        changed, self._changed = {place for place in self._changed if place < bucket.size}, set(range(bucket.size))
        bucket.take(rows, kind, changed)
        self._changed = set()
