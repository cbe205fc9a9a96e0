"""Decode steps of a changing batch, as CUDA graph replays if possible.

The graphs of the batch are a `GraphPool`. Its buffers are shared with graphs of sequences that have another index,
which wait for the next such batch. Sequences that no graph serves are stepped eagerly (`runner/rows.py`) until the
cause has changed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.host_attention import shares_keys
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import has_position
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import Runtime
from retrieval_attn.memory.reclaim import idle_device_bytes, reclaim
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.placement import input_device
from retrieval_attn.offload.threads import foreground
from retrieval_attn.runner.decode import note_eager
from retrieval_attn.runner.drafts import DRAFTED_TOKENS
from retrieval_attn.runner.graph.decode_graph import BATCHED
from retrieval_attn.runner.graph.decoder import attending
from retrieval_attn.runner.graph.pages import prefix_of
from retrieval_attn.runner.graph.pool import BlockGraphs, GraphPool
from retrieval_attn.runner.graph.sequence_slot import StepClock, fit_buffers, new_buffers
from retrieval_attn.runner.graph.signature import cache_batch_key, look_at, refusal_of
from retrieval_attn.runner.graph.slot import ordinary_tensors, window_of
from retrieval_attn.runner.graph.support import runtime_for
from retrieval_attn.runner.rows import RowsFailedError, require_rows
from retrieval_attn.runner.rows import step as eager_step
from retrieval_attn.sampling.sampler import SampledToken, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams

log = logging.getLogger(__name__)


KEPT_POOLS = 3
"""Graphs of other shapes and indexes that are kept: those of short prompts, say. They take .03 GiB each on a GPU."""


RETRY_STEPS = 256
"""Steps between two checks of a refused cache. A sequence that joins may cost the batch a capture."""


class EagerFallbacks:
    """Sequences that fall back to eager steps until the cause changes. Caches are weak references."""

    def __init__(self) -> None:
        # state at the refusal, and step of the next check
        self._caches: weakref.WeakKeyDictionary[RetrievalCache, tuple[object, int]] = weakref.WeakKeyDictionary()
        self._step = 0

    def __contains__(self, cache: RetrievalCache) -> bool:
        return cache in self._caches

    def __len__(self) -> int:
        return len(self._caches)

    def count_step(self) -> None:
        """Count a step."""
        self._step += 1

    def note(self, cache: RetrievalCache, situation: object) -> None:
        """Refuse a cache. situation: everything that may change the refusal; equal if nothing has changed."""
        self._caches[cache] = situation, self._step + RETRY_STEPS

    def stands(self, cache: RetrievalCache, situation: Callable[[], object]) -> bool:
        """Return whether a cache is still refused. situation: called once in RETRY_STEPS steps."""
        known = self._caches.get(cache)
        if known is None:
            return False
        before, until = known
        if self._step < until:
            return True
        now = situation()
        if now == before:
            self.note(cache, now)
            return True
        del self._caches[cache]
        return False


FAILURES = 3
"""Consecutive failed replays after which all steps are eager."""


class Stepped(NamedTuple):
    """Result of a step; sequences by their number.

    Attributes:
        choices: tokens sampled in a graph; None: logits are not finite.
        apart: sequences that were not sampled, in order.
        logits: float32 (rows apart, vocabulary), undefined for sequences in `errors`; None: no such sequences.
        errors: errors by sequence.
        blocks: by sequence with drafts, float32 (tokens, vocabulary) after its token and each draft.
        drawn: by sequence with drafts in a graph, the tokens sampled after its token and each draft.
    """

    choices: Mapping[int, SampledToken | None]
    apart: Sequence[int]
    logits: Tensor | None
    errors: Mapping[int, Exception]
    blocks: Mapping[int, Tensor] = {}
    drawn: Mapping[int, Sequence[SampledToken | None]] = {}


class _Replayed(NamedTuple):
    """Sequences served by a graph, in order, the result of `GraphPool.replay`, and the tokens sampled in a block."""

    rows: list[int]
    choices: dict[int, SampledToken | None]
    undrawn: Tensor | None
    drawn: list[SampledToken | None] | None = None


class GraphRunner:
    """Runs decode steps of a batch. One thread at a time. reason: why all steps are eager; "" if they are not."""

    def __init__(self, model: PreTrainedModel, rows: int, clock: StepClock | None = None) -> None:
        """rows: largest batch. clock: gets the seconds of steps. Memory is allocated at the first step."""
        self._model, self._most = unwrapped(model), 1 << max(0, rows - 1).bit_length()
        self._runtime: Runtime | None = None
        self._pool: GraphPool | None = None
        self._key: tuple[Any, ...] = ()
        self._waiting: dict[tuple[Any, ...], GraphPool] = {}  # without sequences, the last used one last
        self._refusals, self._clock = EagerFallbacks(), clock or StepClock()
        self._failures, self._tokens, self._joined, self.reason = 0, 0, False, ""
        self._block_sampler: Sampler | None = None
        self._gone: list[int] = []
        self._turn = threading.Lock()

    @property
    def replays(self) -> int:
        """Steps that were replays of the present graphs."""
        return 0 if self._pool is None else sum(one.decoder.replays for one in self._pool.graphs.values())

    @property
    def captures(self) -> int:
        """Captures of the present graphs."""
        return 0 if self._pool is None else self._pool.captures

    @property
    def is_ahead(self) -> bool:
        """Whether the next step of the same sequences was launched early."""
        return self._pool is not None and self._pool.is_ahead

    def block_room(self, cache: RetrievalCache) -> int:
        """Return the new tokens that a captured step of this cache alone may have now; 0 if there is no such step."""
        with self._turn:
            return 0 if self._pool is None else self._pool.block_room(cache)

    @property
    def blocks(self) -> BlockGraphs:
        """Graphs of steps of several tokens."""
        return BlockGraphs() if self._pool is None else self._pool.blocks

    def commit_drafts(self, cache: RetrievalCache, count: int) -> None:
        """Count `count` drafts of a captured step, those that the text has."""
        with self._turn:
            if count and self._pool is not None and id(cache) in self._pool.rows:
                self._pool.commit_drafts(cache, count)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of the sequences that graphs were captured for last; equal for sequences that share them."""
        return self._key

    @torch.no_grad()
    def advance(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None = None,
        launched: Callable[[], None] | None = None,
        *,
        overlap: bool = False,
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Stepped:
        """Append one token to each cache and sample the next tokens of sequences in a graph.

        Args:
            caches: sequences of the step.
            inputs: token and position of each.
            draws: sampling parameters, without penalties and bias. None for a sequence, or for all: logits are
                returned.
            launched: called when a graph was launched, which then mostly runs without the interpreter lock. It must be
                quick
                and not raise. A failed replay may call it again; a step without a replay never does.
            overlap: the next call is likely for the same sequences and sampled tokens, so that its step may be launched
                early.
            drafts: by sequence, tokens that are appended behind its token; None: none. A step with drafts is eager, and
                the caller crops wrong ones. A single sampled cache with `block_room` has a captured step, after which
                the caller commits right ones; if it fails, the step is one without drafts.
        """
        require_rows(caches, inputs)
        block: Sequence[int] = ()
        if drafts and len(caches) == 1 and draws is not None and draws[0] is not None:
            block = drafts[0] if self.block_room(caches[0]) > len(drafts[0]) else ()
        if drafts and not block:
            every = range(len(caches))
            first, failed, verified = _eager(self._model, self._clock, caches, inputs, every, drafts)
            return Stepped({}, every, first, failed, verified)
        replayed = self._replayed(caches, inputs, draws, launched, overlap, block) or _Replayed([], {}, None)
        graphed, found, undrawn, drawn = replayed
        if drawn is not None:
            return Stepped({0: drawn[0]}, (), None, {}, drawn={0: drawn})
        choices, served = {graphed[number]: choice for number, choice in found.items()}, set(graphed)
        eager = [row for row in range(len(caches)) if row not in served]
        logits, errors = None, dict[int, Exception]()
        if eager:
            logits, errors, _ = _eager(self._model, self._clock, caches, inputs, eager)
        if undrawn is None:
            return Stepped(choices, eager, logits, errors)
        rows = [row for row in graphed if row not in choices]
        apart = sorted([*rows, *eager])
        return Stepped(choices, apart, _in_order(apart, (undrawn, rows), (logits, eager)), errors)

    def expect(self, tokens: int) -> None:
        """Let later captures serve sequences of up to `tokens` tokens."""
        self._tokens = max(self._tokens, tokens)

    def clear(self) -> None:
        """Detach all sequences and keep the graphs."""
        with self._turn:
            if self._pool is not None:
                self._pool.clear()

    def close(self) -> None:
        """Give all caches windows of their own, and free graphs and buffers."""
        with self._turn:
            self._drop_pool()

    @ordinary_tensors
    def _replayed(
        self,
        caches: Sequence[RetrievalCache],
        inputs: Sequence[tuple[int, int]],
        draws: Sequence[SamplingParams | None] | None,
        launched: Callable[[], None] | None,
        overlap: bool = False,
        block: Sequence[int] = (),
    ) -> _Replayed | None:
        """Replay a graph of some sequences, or with drafts `block` of a single one; None: no graph serves any."""
        with self._turn:
            self._drop_collected()
            self._refusals.count_step()
            if self._pool is not None:
                self._pool.detach_absent(caches)
            self._joined = False
            rows = [row for row, cache in enumerate(caches) if not self.reason and self._serves(cache)]
            try:
                rows = self._arranged(caches, rows)
                if not rows or self._pool is None:
                    return None
                asked = None if draws is None else [draws[row] for row in rows]
                own = [caches[row] for row in rows], [inputs[row] for row in rows]
                if block and asked is not None and asked[0] is not None:
                    drawn = self._replayed_block(caches[0], (inputs[0][0], *block), inputs[0][1], asked[0], launched)
                    if drawn is not None:
                        self._failures = 0
                        return _Replayed(rows, {}, None, drawn)
                found = self._pool.replay(
                    *own, asked, launched, self._clock, overlap=overlap and len(rows) == len(caches)
                )
            except CaptureError as error:
                self._end(str(error), caches)
                return None
            except BackendError as error:  # whose fault it is shows when the rows are stepped eagerly
                self._failures += 1
                log.warning("a graph replay of %d sequences failed; the step runs again eagerly: %s", len(rows), error)
                if self._failures == FAILURES:
                    self._end(f"{FAILURES} replays failed, the last because {error}", caches)
                return None
            except Exception as error:
                log.warning("decode graphs failed unexpectedly; all further steps run eagerly", exc_info=True)
                self._end(f"{type(error).__name__}: {error}", caches)
                return None
            except BaseException:
                self._drop_pool()  # somewhere between two layers
                raise
            self._failures = 0
            return _Replayed(rows, *found)

    def _replayed_block(
        self,
        cache: RetrievalCache,
        tokens: Sequence[int],
        position: int,
        draw: SamplingParams,
        launched: Callable[[], None] | None,
    ) -> list[SampledToken | None] | None:
        """Replay a step of a token and its drafts, and sample after each. Return None if no such step can be captured.

        position: of the first token. Raises BackendError if host or exchange failed; no token was appended.
        """
        pool, began = self._pool, time.perf_counter()
        assert pool is not None
        if len(tokens) > pool.block_room(cache):
            return None
        foreground.note()
        logits = pool.launch_block(cache, tokens, position)
        if logits is None:
            return None
        try:
            if launched is not None:
                launched()
            found = self._sample_block(draw, logits, position)
        except BaseException:
            pool.undo()
            raise
        host_seconds = pool.confirm()
        self._clock.device += time.perf_counter() - began
        self._clock.host += host_seconds
        return found

    def _sample_block(self, draw: SamplingParams, logits: Tensor, position: int) -> list[SampledToken | None]:
        """Sample after each token of a block that begins at `position`."""
        if self._block_sampler is None:
            self._block_sampler = Sampler(DRAFTED_TOKENS, logits.device)
        count = len(logits)
        return self._block_sampler([draw] * count, logits, range(position + 1, position + 1 + count))

    @ordinary_tensors
    def capture_block(self, cache: RetrievalCache, draws: Sequence[SamplingParams], count: int) -> None:
        """Capture the step of `count` tokens of a cache that had a step, and undo it. draws: how to sample."""
        position = cache.get_seq_length()
        if self._pool is None or count > self.block_room(cache):
            return
        with self._turn:
            logits = self._pool.launch_block(cache, [0] * count, position)
            if logits is not None:
                for draw in draws:
                    self._sample_block(draw, logits, position)
            self._pool.undo()

    def _serves(self, cache: RetrievalCache) -> bool:
        """Return whether a graph can serve this cache. The first cache sets the shape of the pool."""
        if self._pool is not None and id(cache) in self._pool.rows:
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
        """Return why no graph can serve a cache, "" for a reason that is not logged. None: one can."""
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
        reason = refusal_of(self._model, cache)
        if reason is not None:
            return reason
        model = look_at(self._model)
        for layer in _layers(cache):
            layer.finish_index()
            if window_of(layer).valid is not None:
                return "the sequence has padding"
        key = id(self._runtime), id(default_pool()), model.signature, cache_batch_key(cache), _batch_key(cache)
        prefix = prefix_of(cache)
        elsewhere = self._pool is not None and prefix is not None and self._pool.pages not in (None, prefix.layers)
        if self._pool is not None and (key != self._key or elsewhere):
            if self._pool.rows or self._joined:
                different = "use pages of several engines" if elsewhere else "differ in shapes or options"
                return f"the sequences of the batch {different}"
            self._set_aside(model.signature, prefix)
        if self._pool is None:
            try:
                self._pool = self._waiting.pop(key, None) or self._new_pool(cache, self._runtime)
            except torch.OutOfMemoryError:
                return f"{input_device(self._model)} has no memory for the windows of {self._most} sequences"
            self._key = key
        if prefix is not None:
            self._pool.pages = prefix.layers
        return None

    def _set_aside(self, signature: tuple[Any, ...], prefix: PagedPrefix | None) -> None:
        """Keep the graphs of the present pool for its next batch, unless the model or the pages are others by then."""
        assert self._pool is not None
        pool, self._pool = self._pool, None
        pool.clear()
        self._waiting[self._key] = pool
        pages = None if prefix is None else prefix.layers
        self._waiting = {
            key: one
            for key, one in self._waiting.items()
            if key[2] == signature and (pages is None or one.pages in (None, pages))
        }
        while len(self._waiting) > KEPT_POOLS:
            del self._waiting[next(iter(self._waiting))]

    def _new_pool(self, like: RetrievalCache, runtime: Runtime) -> GraphPool:
        """Make a pool over the window buffers of others, or over new ones; idle texts yield their room to these."""
        buffers = next((one.buffers for one in self._waiting.values() if fit_buffers(like, one.buffers)), None)
        if buffers is None:
            self._waiting.clear()
            try:
                buffers = new_buffers(like, self._most, BATCHED.undo_steps)
            except torch.OutOfMemoryError:
                if not reclaim(device=idle_device_bytes())[1]:
                    raise
                buffers = new_buffers(like, self._most, BATCHED.undo_steps)
        return GraphPool(self._model, like, runtime, self._most, buffers)

    def _arranged(self, caches: Sequence[RetrievalCache], rows: list[int]) -> list[int]:
        """Return the sequences with a slot, in order. Raises CaptureError."""
        pool = self._pool
        if pool is None:
            return []
        before = set(pool.rows)
        while rows:
            try:
                problems = pool.arrange([caches[row] for row in rows], self._gone_by, self._tokens)
            except CaptureError as error:
                problems = {number: error for number, row in enumerate(rows) if id(caches[row]) not in before}
                problems = problems or pool.misfits([caches[row] for row in rows], self._gone_by)
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
        """Step a cache eagerly until the situation changes. Raises CaptureError for graph=True."""
        if reason and cache.config.graph is True:
            raise CaptureError(f'this step cannot run as a graph: {reason}. Use graph="auto" or graph=False.')
        self._refusals.note(cache, self._situation())
        if reason:
            note_eager(self._model, reason)

    def _situation(self) -> tuple[Any, ...]:
        """Return what refusals depend on: hooks, weights and adapters of the model, and occupied slots."""
        rows = 0 if self._pool is None else len(self._pool.rows)
        return *look_at(self._model), self._key, self._pool is None, rows > 0 or self._joined, rows < self._most

    def _end(self, reason: str, caches: Sequence[RetrievalCache]) -> None:
        """Free all graphs for good. Raises CaptureError for graph=True."""
        self.reason = reason
        self._drop_pool()
        for cache in caches:
            self._refuse(cache, reason)

    def _drop_pool(self) -> None:
        """Free all graphs and buffers."""
        self._waiting.clear()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.clear()

    def _gone_by(self, key: int) -> Any:
        """Make the callback of a collected cache, which may run at any time and in any thread."""
        runner = weakref.ref(self)

        def gone(_: object) -> None:
            self = runner()
            if self is None or sys.is_finalizing():
                return
            self._gone.append(key)
            if self._turn.acquire(blocking=False):  # else the next step does it
                try:
                    self._drop_collected()
                finally:
                    self._turn.release()

        return gone

    def _drop_collected(self) -> None:
        while self._gone:
            key = self._gone.pop()
            if self._pool is not None and key in self._pool.rows and self._pool.rows[key].cache is None:
                self._pool.drop_slot(key)


def _in_order(order: Sequence[int], *parts: tuple[Tensor | None, Sequence[int]]) -> Tensor:
    """Join logits of parts of the sequences in the order of `order`."""
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
    drafts: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> tuple[Tensor, dict[int, Exception], dict[int, Tensor]]:
    """Step these sequences eagerly, with drafts by sequence behind their tokens.

    Returns logits after each token, in order, errors by sequence, and by sequence with drafts all its logits.
    """
    blocks = [(inputs[row][0], *drafts.get(row, ())) for row in rows]
    tokens, counts = [token for block in blocks for token in block], [len(block) for block in blocks]
    places = [inputs[row][1] + n for row, count in zip(rows, counts, strict=True) for n in range(count)]
    errors: dict[int, Exception] = {}
    try:
        logits = eager_step(model, [caches[row] for row in rows], tokens, places, clock, counts)
    except RowsFailedError as error:
        logits, errors = error.logits, {rows[row]: one for row, one in error.errors.items()}
    if len(tokens) == len(rows):
        return logits, errors, {}
    parts = logits.split(counts)
    verified = {row: part for row, part in zip(rows, parts, strict=True) if len(part) > 1 and row not in errors}
    return torch.cat([part[:1] for part in parts]), errors, verified


def _batch_key(cache: RetrievalCache) -> tuple[Any, ...]:
    """Return what sequences of a graph must have in common apart from shapes: how many keys they retrieve, and how."""
    found: list[Any] = [cache.config.estimates, cache.config.threads]
    for layer in _layers(cache):
        if isinstance(layer, RetrievalLayer):
            by_heads = shares_keys(layer.config, layer.hosts[0])
            found.append("by heads" if by_heads else layer.config.retrieve_count(1))
    return tuple(found)


def _layers(cache: RetrievalCache) -> list[Any]:
    return [layer for _, layer in attending(cache)]
