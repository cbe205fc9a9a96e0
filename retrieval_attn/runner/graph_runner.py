"""BucketRunner: steps of a batch whose rows come and go, as replays of graphs where they can be captured.

There is a graph for 1, 2, 4, ... rows; a step takes the smallest that has room for its rows. All graphs read and write
the same window buffers. A row of these is a page of constant size: it holds all that a sequence has on the device but
for codes of its keys, so admission by pages is exact. A row joins by copies of its windows and leaves the same way.
Caches that no graph serves are stepped eagerly beside it (`runner/rows.py`), until what refused them has changed.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.host_attention import retrieved_keys
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import has_position
from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.errors import BackendError, CaptureError, RowsFailedError
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.placement import input_device
from retrieval_attn.runner.decode import note_eager
from retrieval_attn.runner.graph.decoder import attending
from retrieval_attn.runner.graph.memory import ordinary_tensors
from retrieval_attn.runner.graph.pages import NO_KERNELS, is_recordable, prefix_of
from retrieval_attn.runner.graph.registry import runtime_for
from retrieval_attn.runner.graph.signature import cache_batch_key, look_at
from retrieval_attn.runner.graph.slot import window_of
from retrieval_attn.runner.graph.support import cache_refusal
from retrieval_attn.runner.graph_pool import GraphPool
from retrieval_attn.runner.rows import StepClock, require_rows
from retrieval_attn.runner.rows import step as eager_step
from retrieval_attn.sampling.sampler import SampledToken
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["EagerFallbacks", "GraphRunner", "RETRY_STEPS", "Stepped"]

log = logging.getLogger(__name__)


RETRY_STEPS = 256
"""Steps from one look at what refused a cache to the next. A row that joins may cost the others a capture."""


@dataclass(frozen=True)
class _Refused:
    """situation: as it was then. until: the step at which it is looked at again."""

    situation: object
    until: int


class EagerFallbacks:
    """See the module. No cache is kept alive."""

    def __init__(self) -> None:
        self._caches: weakref.WeakKeyDictionary[RetrievalCache, _Refused] = weakref.WeakKeyDictionary()
        self._step = 0

    def __contains__(self, cache: RetrievalCache) -> bool:
        return cache in self._caches

    def __len__(self) -> int:
        return len(self._caches)

    def count_step(self) -> None:
        """A step begins."""
        self._step += 1

    def note(self, cache: RetrievalCache, situation: object) -> None:
        """No graph serves this cache as things are. situation: all that may change that; equal while nothing did."""
        self._caches[cache] = _Refused(situation, self._step + RETRY_STEPS)

    def stands(self, cache: RetrievalCache, situation: Callable[[], object]) -> bool:
        """Whether a cache that was refused still is. situation: as it is now; asked once in RETRY_STEPS steps."""
        known = self._caches.get(cache)
        if known is None:
            return False
        if self._step < known.until:
            return True
        now = situation()
        if now == known.situation:
            self.note(cache, now)
            return True
        del self._caches[cache]
        return False


FAILURES = 3
"""Replays in a row that fail before there are no more."""


class Stepped(NamedTuple):
    """What came of a step. Rows by their number in it.

    choices: of rows that chose in a graph; None: the logits are not finite. apart: the others, in order. logits:
    float32 (rows apart, vocabulary), those of rows in `errors` without meaning; None: there are none apart.
    """

    choices: Mapping[int, SampledToken | None]
    apart: Sequence[int]
    logits: Tensor | None
    errors: Mapping[int, Exception]


class GraphRunner:
    """See the module. One thread at a time. reason: why there are no graphs, once that is known of all; "" else."""

    def __init__(self, model: PreTrainedModel, rows: int, clock: StepClock | None = None) -> None:
        """rows: most rows of a graph. clock: of steps. Nothing is captured, no memory taken, before the first step."""
        self._model, self._most = unwrapped(model), 1 << max(0, rows - 1).bit_length()
        self._runtime: Runtime | None = None
        self._group: GraphPool | None = None
        self._key: tuple[Any, ...] = ()
        self._refusals, self._clock = EagerFallbacks(), clock or StepClock()
        self._failures, self._tokens, self._joined, self.reason = 0, 0, False, ""
        self._gone: list[int] = []
        self._turn = threading.Lock()

    @property
    def replays(self) -> int:
        """Steps that were replays of the graphs that there are."""
        return 0 if self._group is None else sum(one.decoder.replays for one in self._group.buckets.values())

    @property
    def captures(self) -> int:
        """Graphs that there are."""
        return 0 if self._group is None else sum(one.decoder.captures for one in self._group.buckets.values())

    def step(self, caches: Sequence[RetrievalCache], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits (rows, vocabulary) float32 after one new token in each cache, which hold it then.

        As `rows.step`, and raises as that does; CaptureError, too, for a cache with graph=True that no graph serves.
        Caches of the step before that are not in this one get windows of their own again.
        """
        stepped = self.advance(caches, list(zip(tokens, positions, strict=True)))
        assert stepped.logits is not None
        if stepped.errors:
            raise RowsFailedError(stepped.errors, stepped.logits)
        return stepped.logits

    @torch.no_grad()
    def advance(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None = None,
        launched: Callable[[], None] | None = None,
        *,
        ahead: bool = False,
    ) -> Stepped:
        """The same for token and position of each row; rows of a graph that have a draw choose their tokens in it.

        draws: of each row, without penalties or bias; None for a row, or for all: its logits are returned. launched:
        called when a graph was launched, which then leaves Python's lock to others for most of its time; more than once
        where a replay failed, never where there was none. Must be quick and not raise. ahead: the next call is likely
        to be for the same rows and what they chose; if it is not, nothing is wrong.
        """
        require_rows(caches, inputs)
        graphed, found, undrawn = self._replayed(caches, inputs, draws, launched, ahead) or ([], {}, None)
        choices, served = {graphed[number]: choice for number, choice in found.items()}, set(graphed)
        eager = [row for row in range(len(caches)) if row not in served]
        logits, errors = _eager(self._model, self._clock, caches, inputs, eager) if eager else (None, {})
        if undrawn is None:
            return Stepped(choices, eager, logits, errors)
        rows = [row for row in graphed if row not in choices]
        apart = sorted([*rows, *eager])
        return Stepped(choices, apart, _in_order(apart, (undrawn, rows), (logits, eager)), errors)

    def expect(self, tokens: int) -> None:
        """Rows may get so long: graphs that are captured from now on serve them."""
        self._tokens = max(self._tokens, tokens)

    def clear_slot(self) -> None:
        """Nobody is in a graph, as before the first step; the graphs stay."""
        with self._turn:
            if self._group is not None:
                self._group.clear_slot()

    def close(self) -> None:
        """Give all caches windows of their own, and let go of graphs and buffers."""
        with self._turn:
            self._drop_group()

    @ordinary_tensors
    def _replayed(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None,
        launched: Callable[[], None] | None,
        ahead: bool = False,
    ) -> tuple[list[int], dict[int, SampledToken | None], Tensor | None] | None:
        """The rows that a graph served, in order, and what `GraphPool.replay` found; None: none."""
        with self._turn:
            self._let_go()
            self._refusals.count_step()
            if self._group is not None:
                self._group.leave_absent(caches)
            self._joined = False
            rows = [row for row, cache in enumerate(caches) if not self.reason and self._serves(cache)]
            try:
                rows = self._arranged(caches, rows)
                if not rows or self._group is None:
                    return None
                asked = None if draws is None else [draws[row] for row in rows]
                own = [caches[row] for row in rows], [inputs[row] for row in rows]
                found = self._group.replay(*own, asked, launched, self._clock, ahead=ahead and len(rows) == len(caches))
            except CaptureError as error:
                self._end(str(error), caches)
                return None
            except BackendError as error:  # whose fault it is shows when the rows are stepped eagerly
                self._failures += 1
                log.warning("a step of %d rows is made again, eagerly: %s", len(rows), error)
                if self._failures == FAILURES:
                    self._end(f"{FAILURES} replays failed, the last because {error}", caches)
                return None
            except Exception as error:
                log.warning("graphs of rows end by an error that nobody expected", exc_info=True)
                self._end(f"{type(error).__name__}: {error}", caches)
                return None
            except BaseException:
                self._drop_group()  # somewhere between two layers
                raise
            self._failures = 0
            return rows, *found

    def _serves(self, cache: RetrievalCache) -> bool:
        """Whether a graph may have this cache: its shape is that of the group, which it may begin."""
        if self._group is not None and id(cache) in self._group.rows:
            return has_position(cache.batch, cache.max_positions)
        try:
            if self._refusals.stands(cache, self._situation):
                return False
            reason = self._refusal(cache)
        except CaptureError as error:
            reason = str(error)
        except Exception:  # of keys on their way: who steps it eagerly is told
            return False
        if reason is None:
            self._joined = True
            return True
        self._refuse(cache, reason)
        return False

    def _refusal(self, cache: RetrievalCache) -> str | None:
        """Why no graph may have it, "" for none that is to be told; None: one may."""
        if cache.config.graph is False:
            return ""
        if self._runtime is None:
            try:
                self._runtime = runtime_for(self._model)
            except BackendError as error:
                return str(error)
        if self._runtime is None:
            return "" if cache.config.graph == "auto" else f"the model runs on {input_device(self._model)}"
        cache.require_room(1)
        model = look_at(self._model)
        reason = cache_refusal(cache) or model.reason
        if reason is not None:
            return reason
        for layer in _layers(cache):
            layer.finish_index()
            if window_of(layer).valid is not None:
                return "a row of a batch has padding"
        key = id(self._runtime), id(default_pool()), model.signature, cache_batch_key(cache), _batch_key(cache)
        prefix = prefix_of(cache)
        if prefix is not None and not is_recordable(prefix):
            return NO_KERNELS
        elsewhere = self._group is not None and prefix is not None and self._group.pages not in (None, prefix.layers)
        if self._group is not None and (key != self._key or elsewhere):
            if self._group.rows or self._joined:
                different = "have pages of several engines" if elsewhere else "differ in shapes or options"
                return f"rows of a batch {different}"
            self._drop_group()
        if self._group is None:
            try:
                self._group, self._key = GraphPool(self._model, cache, self._runtime, self._most), key
            except torch.OutOfMemoryError:
                return f"there is no memory for the windows of {self._most} rows on {input_device(self._model)}"
        if prefix is not None:
            self._group.pages = prefix.layers
        return None

    def _arranged(self, caches: Sequence[RetrievalCache], rows: list[int]) -> list[int]:
        """Those of the rows that the group has now, in order. Raises CaptureError."""
        group = self._group
        if group is None:
            return []
        before = set(group.rows)
        while rows:
            try:
                problems = group.arrange([caches[row] for row in rows], self._gone_by, self._tokens)
            except CaptureError as error:
                problems = {number: error for number, row in enumerate(rows) if id(caches[row]) not in before}
                problems = problems or group.misfits([caches[row] for row in rows], self._gone_by)
                if not problems:
                    raise
            for number, problem in problems.items():
                if isinstance(problem, CaptureError):
                    self._refuse(caches[rows[number]], str(problem))
            if not problems:
                break
            rows = [row for number, row in enumerate(rows) if number not in problems]
        return rows

    def _refuse(self, cache: RetrievalCache, reason: str) -> None:
        """This cache is stepped eagerly until that has changed. Raises CaptureError where a graph was demanded."""
        if reason and cache.config.graph is True:
            raise CaptureError(f'this step cannot run as a graph: {reason}. Use graph="auto" or graph=False.')
        self._refusals.note(cache, self._situation())
        if reason:
            note_eager(self._model, reason)

    def _situation(self) -> tuple[Any, ...]:
        """What may change about who is refused: hooks, weights and adapters of the model, and who is in the graphs."""
        rows = 0 if self._group is None else len(self._group.rows)
        return *look_at(self._model), self._key, self._group is None, rows > 0 or self._joined, rows < self._most

    def _end(self, reason: str, caches: Sequence[RetrievalCache]) -> None:
        """No graph any more. Raises CaptureError where one was demanded."""
        self.reason = reason
        self._drop_group()
        for cache in caches:
            self._refuse(cache, reason)

    def _drop_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.clear_slot()

    def _gone_by(self, key: int) -> Any:
        """What to call once nobody has the cache with this id: at any time, in any thread."""
        runner = weakref.ref(self)

        def gone(_: object) -> None:
            self = runner()
            if self is None or sys.is_finalizing():
                return
            self._gone.append(key)
            if self._turn.acquire(blocking=False):  # else the next step does it
                try:
                    self._let_go()
                finally:
                    self._turn.release()

        return gone

    def _let_go(self) -> None:
        while self._gone:
            key = self._gone.pop()
            if self._group is not None and key in self._group.rows and self._group.rows[key].cache is None:
                self._group.let_go(key)


def _in_order(order: Sequence[int], *parts: tuple[Tensor | None, Sequence[int]]) -> Tensor:
    """Logits of the rows `order` from those of parts of them, which say their rows."""
    place = {row: number for number, row in enumerate(order)}
    given = [(logits, [place[row] for row in rows]) for logits, rows in parts if logits is not None]
    together = given[0][0].new_empty(len(order), given[0][0].shape[1])
    for logits, places in given:
        together[places] = logits
    return together


def _eager(
    model: PreTrainedModel,
    clock: StepClock,
    caches: Sequence[RetrievalCache],
    inputs: Sequence[tuple[int, int]],
    rows: Sequence[int],
) -> tuple[Tensor, Mapping[int, Exception]]:
    """Logits of these of the rows after an eager step, in order, and the errors of those that failed."""
    tokens, positions = zip(*(inputs[row] for row in rows), strict=True)
    try:
        return eager_step(model, [caches[row] for row in rows], tokens, positions, clock), {}
    except RowsFailedError as error:
        return error.logits, {rows[row]: one for row, one in error.errors.items()}


def _batch_key(cache: RetrievalCache) -> tuple[Any, ...]:
    """What rows must agree in beside shapes: how many keys they attend to, and how."""
    found: list[Any] = [cache.config.estimates, cache.config.threads]
    for layer in _layers(cache):
        if isinstance(layer, RetrievalLayer):
            count = retrieved_keys(layer.config, layer.hosts[0], 1)
            found.append("by heads" if isinstance(count, HeadBudgets) else count)
    return tuple(found)


def _layers(cache: RetrievalCache) -> list[Any]:
    return [layer for _, layer in attending(cache)]
