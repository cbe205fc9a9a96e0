"""Continuous batching over one model: requests join the running batch at a step and leave it when they are done.

One thread schedules and steps (iteration-level scheduling, Orca). Long prompts are prefilled in chunks between steps.
Prompt prefixes are prefilled once and stay in a prefix cache (RadixAttention). On a GPU steps are graph replays
(`runner/graph_runner.py`) if possible, and eager otherwise.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.cpu.windows import compile_windows
from retrieval_attn.engine.background_saves import BackgroundSave, BackgroundSaves, ContextState, DiskCounts, DiskTier
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.detokenizer import OutputQueue
from retrieval_attn.engine.idle_prefixes import IdlePrefixes, most_device_bytes
from retrieval_attn.engine.ids import Ids, int32_row
from retrieval_attn.engine.limits import KEEP_SESSION_SECONDS, Limits
from retrieval_attn.engine.node import Node, Sizes
from retrieval_attn.engine.paged_prefix import PageAllocation, PagedKVPool
from retrieval_attn.engine.prefill_worker import PrefillWorker
from retrieval_attn.engine.prefix_handle import CROP_TOKENS, PrefixEntry, crop_end, text_mark
from retrieval_attn.engine.radix_cache import Lease, PrefixCacheStats, RadixCache
from retrieval_attn.engine.request import Reason, Request, RequestHandle
from retrieval_attn.engine.request_needs import RequestNeeds, State
from retrieval_attn.engine.running_request import RunningRequest
from retrieval_attn.engine.saved_text import ContextPrefetcher, SavedText, SavedTexts
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput, StepResult
from retrieval_attn.engine.stepper import Stepper
from retrieval_attn.engine.warm_up import DRAWS, WarmUp, WarmUpProgress, WarmUps
from retrieval_attn.errors import (
    ConfigError,
    EngineFullError,
    InputDataError,
    RetrievalAttentionError,
    StoreDamagedError,
    StoreError,
)
from retrieval_attn.gpu.memory import allocated_bytes
from retrieval_attn.memory.device_room import drop_layout, planned_rows, prefix_cache_device_bytes, share_layout
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.reclaim import register
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.image_embedding import ImageEncoder, PromptImages
from retrieval_attn.model.images import placed_images
from retrieval_attn.model.loading import load_image_encoder
from retrieval_attn.model.placement import input_device
from retrieval_attn.model.rope import length_rope
from retrieval_attn.model.weights import weight_state
from retrieval_attn.offload.staging import host_format
from retrieval_attn.offload.threads import with_device_memory
from retrieval_attn.runner.full_attention import release_full_kv
from retrieval_attn.sampling.grammar import GrammarCompiler
from retrieval_attn.sampling.sampler import require_known
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.saving.save import Saved, template_digest
from retrieval_attn.store import ContextStore, check_name
from retrieval_attn.template import PromptTemplate, Question

__all__ = ["Engine", "RequestAdmission", "default_limits", "retry_without_damaged"]

log = logging.getLogger(__name__)


class RequestAdmission:
    """The requests that one engine accepts. Thread-safe."""

    def __init__(
        self,
        loop: AnswerLoop,
        outputs: OutputQueue,
        saved: SavedTexts,
        tree: RadixCache | None,
        paged: PagedKVPool | None,
        empty: RetrievalCache,
        counts: Counts,
    ) -> None:
        """Store what requests share.

        Args:
            loop: answer loop of the model.
            outputs: output queue of the engine.
            saved: saved contexts that requests name.
            tree: prefix cache; None: off.
            paged: pages of paged prefixes; None: off.
            empty: cache without tokens, which checks lengths and says whether entries can be cropped.
            counts: counts of the engine.
        """
        self._loop, self._outputs, self._saved = loop, outputs, saved
        self._tree, self._exact, self._counts = tree, paged, counts
        self._require_room, self._crops = empty.require_room, empty.crops_anywhere
        self._encoder: ImageEncoder | None = None
        self._encoder_lock = threading.Lock()
        self._grammars = GrammarCompiler(loop.tokenizer, loop.vocabulary, loop.eos)

    def row(self, request: Request, handle: RequestHandle, before: RunningRequest | None = None) -> RunningRequest:
        """before: had the request until files of its saved context were found damaged. Raises ContextLengthError,
        AdmissionError, InputDataError for a logit bias of an unknown token, for images that the model does not read and
        for a grammar that cannot be enforced, ConfigError for one without llguidance, and for a saved context what
        `LLM.open` raises.
        """
        require_known(request.draw, self._loop.vocabulary)
        images = self._images_of(request)
        shared, held = 0, 0
        saved: SavedText | None = None
        if request.context is not None:
            saved = self._saved.find(request.context, lost=before is not None)
            held = saved.tokens - saved.forgotten_tokens
        elif before is None and request.prompt_logprobs is None:
            saved, shared = self._found_by_content(request.parts, request.namespace)
            if shared:
                self._counts.note_content_hit(shared)
        self._require_room(held + request.prompt_tokens + request.max_tokens)
        paged = self._exact is not None and saved is None and request.prompt_logprobs is None and images is None
        pages = PageAllocation(self._exact, request.parts) if self._exact is not None and paged else None
        grammar = request.grammar  # compiled here, in the submitting thread, while other rows decode
        matcher = None if grammar is None else self._grammars.matcher(grammar, request.stop_ids)
        return RunningRequest(
            request, handle, self._loop, self._outputs, saved, pages, before, self._crops, shared, matcher, images
        )

    def _images_of(self, request: Request) -> PromptImages | None:
        """Return the images of a prompt. Raises InputDataError if the model reads none; see `load_image_encoder`."""
        if not request.images:
            return None
        with self._encoder_lock:
            if self._encoder is None:
                self._encoder = load_image_encoder(unwrapped(self._loop.model), self._loop.tokenizer)
        return PromptImages(self._encoder, placed_images(request.ids, request.images), request.namespace)

    def _found_by_content(self, parts: Sequence[Sequence[int]], namespace: str | None) -> tuple[SavedText | None, int]:
        """Return the saved context that shares more tokens with a prompt than the prefix cache has of it, and the
        number of these; None and 0 if there is none.
        """
        if self._tree is None or self._exact is not None:
            return None, 0
        known: int | None = None
        ends = list(itertools.accumulate(map(len, parts)))
        for text, tokens in self._saved.matches(parts, namespace):
            if known is None:
                mark = text_mark(self._loop.model, weight_state(self._loop.model), ends[-1])
                ids = np.concatenate((mark, *map(int32_row, parts)))
                known = self._tree.match(ids, namespace, again=True).length - len(mark)
            end = tokens if tokens in ends or not self._crops else crop_end(tokens, ends)
            fits = end == text.tokens or (self._crops and text.tokens <= OPEN_FACTOR * end)
            if text.automatic:  # what the prefix cache has of it is not opened for a few more tokens
                fits = fits and text.tokens <= OPEN_FACTOR * (end - known)
            rope = length_rope(self._loop.model)
            same = rope is None or rope.factors(text.tokens) == rope.factors(ends[-1])
            if end < known + CROP_TOKENS:
                break
            if fits and same:
                return text, end
        return None, 0

    def whole_ids(
        self, document: Sequence[int], context: str | None, namespace: str | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield ids by which the tree may have a text now, with the number of marks before them.

        context: name of the saved context that it continues; None: also as the continuation of one that it does not
        name. Raises as `row` for a named one.
        """
        model = self._loop.model
        saved = None if context is None else self._saved.find(context)
        tokens = len(document) + (0 if saved is None else saved.tokens)
        mark = text_mark(model, weight_state(model), tokens).tolist()
        yield len(mark) + (saved is not None), [*mark, *(() if saved is None else saved.ids.tolist()), *document]
        if saved is None and document:
            for text, _ in self._saved.matches((document, document[-1:]), namespace):
                yield len(mark) + 1, [*mark, int(text.ids[0]), *document]

    def held_text(
        self, document: Sequence[int], context: str | None, namespace: str | None
    ) -> tuple[Lease, PrefixEntry]:
        """Return a lease on the node that holds a text, and an entry of this text alone.

        Raises InputDataError for a text that the prefix cache lacks, and as `row` for a named context.
        """
        tree = self._tree or RadixCache()
        for marks, ids in self.whole_ids(document, context, namespace):
            match = tree.match([*ids, 0], namespace, leased=True, again=True)
            assert match.lease is not None
            with match.lease:
                held = match.node.held
                if match.length == len(ids) and isinstance(held, PrefixEntry):
                    entry = with_device_memory(functools.partial(held.part, len(ids) - marks), time.sleep)
                    if entry is not None:
                        return tree.lease(match.node), entry
        raise InputDataError(
            f"The engine does not hold this text of {len(document):,} tokens: ask about it first, give it more "
            "prefix_cache_bytes, or read it with LLM.read(text, save=name)."
        )

    def context_ids(self, document: Sequence[int], context: str | None) -> Ids:
        """Return the token ids of a text with those of the saved context that it continues. Raises as `row`."""
        before = () if context is None else (self._saved.find(context).ids[1:],)
        return np.concatenate((*before, int32_row(document)))

    def job(self, number: str, row: RunningRequest) -> RequestNeeds:
        """The row as the scheduler sees it."""
        request, opened = row.request, row.opened_tokens
        # a row that may be read again has all of its text for itself then
        alone = self._tree is None or not row.leases_known
        known = 0 if self._tree is None or alone else row.sharing.known_tokens(self._tree)
        # one more than there are: a job's last one is not read but fed to a step, and here all of a prompt is read
        tokens = row.prompt_tokens + 1
        return RequestNeeds(number, tokens, request.max_tokens, 0, opened, known, request.owner, request.priority)


def retry_without_damaged(
    row: RunningRequest, error: BaseException, intake: RequestAdmission, enter: Callable[[RunningRequest], None]
) -> bool:
    """Whether another row has the request from now on, which reads what this one found in damaged files. Once."""
    kind = StoreError if row.request.context is None else StoreDamagedError
    if not isinstance(error, kind) or row.context is None or row.before is not None:
        return False
    try:
        enter(intake.row(row.request, row.handle, row))
    except RetrievalAttentionError as refusal:
        log.warning("request %s cannot begin again: %s", row.handle.id, refusal)
        return False
    row.ended = True
    return True


OPEN_FACTOR = 8
"""Largest ratio of a saved context's tokens to those that a prompt shares with it: a longer one takes more memory and
time to open than the shared tokens take to prefill.
"""
ROWS = 16
"""Rows of a step, unless limits say otherwise."""
HOST_SHARE = 0.75
"""Share of the host memory that is free at start, for the KV of requests and of the prefix cache together. The rest is
for hidden states of a prefill and for building indexes."""
INTER_TOKEN_SECONDS = 0.05
SHOWN, HEAD_TOKENS = 100, 40
"""Entries in a list of `Engine.status`, and token ids of the start of each."""
READ_TOKENS = 2048
"""Of a prompt, in a layer, between two steps at most: 8,192 behind 128K others take longer than rows should wait."""
WIDE_CHUNKS = 2
"""Such chunks in one forward on a GPU, if both are granted: a prefill of 24K tokens of an 8B model took 5.2 s, its
kernels 1.3 s (H200, these in chunks of 8,192). More need more memory."""


class Loaded(Protocol):
    """The attributes of an `LLM` that an engine uses."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def config(self) -> Config: ...


def default_limits(model: PreTrainedModel, config: Config) -> Limits:
    """For a machine that does nothing else."""
    shape, chunk = model_shape(model), min(config.prefill_chunk, READ_TOKENS)
    return Limits(
        rows=ROWS,
        host_bytes=int(available_host_bytes() * HOST_SHARE),
        token_bytes=max(1, HostSize(shape, config).token_bytes),
        inter_token_seconds=INTER_TOKEN_SECONDS,
        chunk_tokens=chunk,
        layers=shape.layers,
        prefix_cache_device_bytes=prefix_cache_device_bytes(model, read_config(model, config, chunk), ROWS + 2),
    )


def read_config(model: PreTrainedModel, config: Config, chunk_tokens: int) -> Config:
    """Return the config of prefills that are granted chunks of `chunk_tokens` tokens. Its `prefill_chunk` is the most
    that a forward has: WIDE_CHUNKS of them on a GPU.
    """
    wide = WIDE_CHUNKS if model.device.type == "cuda" else 1
    return config.replace(prefill_chunk=min(config.prefill_chunk, wide * chunk_tokens))


def _plain_text(node: Node, entry: PrefixEntry) -> dict[str, Any]:
    """Return the JSON values of an entry. KV pages count as GPU memory if windows are there, else as host memory."""
    sizes, marks = node.sizes, node.marks
    on_gpu = sizes.device > 0
    return {
        "number": node.number,
        "head": [int(one) for one in node.ids[:HEAD_TOKENS] if one >= 0],
        "start": max(0, node.start - marks),
        "tokens": node.end - marks,
        "namespace": node.namespace,
        "context": None if entry.opened is None or entry.opened.text.automatic else entry.opened.text.name,
        "gpu_bytes": sizes.device + sizes.pages if on_gpu else 0,
        "host_bytes": sizes.host if on_gpu else sizes.host + sizes.pages,
        "in_use": node.refs > 0,
        "idle_seconds": time.monotonic() - node.used,
    }


def _require_served(config: Config) -> None:
    if config.full_attention == "exact":
        raise ConfigError('full_attention="exact" is for Context.ask: requests of an engine retrieve.')
    if config.keeps_all:
        raise ConfigError(
            'index="full" gives each text a window of its own size, and an engine\'s rows have windows of one size: '
            "use window=..., as many tokens as rows have at most, or Engine(paged_prefix_tokens=...) for what "
            "they share."
        )


class Engine:
    """See the module. Use it in a `with` block, or call `close`.

    Load decides when something is computed, and not what: an answer is the one that its request gets alone. A prompt
    that continues part of a cached one retrieves from that one's index, up to the last common token: with
    `retrieve="all"` its answer is the same, else retrieval may differ a little (docs/server.md, "Prefix cache").
    """

    def __init__(
        self, llm: Loaded, *, limits: Limits | None = None, prefix_cache_bytes: int | None = None,
        prefix_cache_disk_bytes: int | None = None,
        store: ContextStore | str | Path | None = None, paged_prefix_tokens: int = 0,
        paged_prefix_pages: int | None = None, paged_prefix_int8: bool = False, cache_generated: bool = False,
        keep_session_seconds: float = KEEP_SESSION_SECONDS,
    ) -> None:  # fmt: skip
        """Start the engine's thread.

        Args:
            llm: an `LLM`.
            limits: limits of memory, batch size and latency; None: `default_limits`. `rows` is reduced if windows of so
                many rows leave a GPU no memory to read a text.
            prefix_cache_bytes: host memory of prefixes that no request uses now. 0: no prefix cache. None: all host
                memory of the limits that requests leave; requests take it back when they need it.
            prefix_cache_disk_bytes: files of idle prefixes in `store`. 0: none. None: half of the free disk.
            store: saved contexts that requests may name, as in `LLM.open`; idle prefixes that host memory has no room
                for are saved there, too (`DiskTier`). None: the user's store, to which no prefix is saved.
            paged_prefix_tokens: prefixes of prompts that end there or before are kept in GPU pages of 64 tokens without
                an index; requests with a common prefix attend to all of it together. 0: none.
            paged_prefix_pages: pages of all such prefixes. None: as many as all rows can need, in at most half of what
                windows leave of a GPU's free memory, or a quarter of the requests' host memory.
            paged_prefix_int8: store pages in int8: half the bytes of 16 bits, slower to attend to.
            cache_generated: keep answers, see `AnswerEntry`.
            keep_session_seconds: time after a turn of a session (`Request.session`) in which its cached prompt is
                evicted after those of no session. 0: sessions have no effect.

        Raises ConfigError.
        """
        _require_served(llm.config)
        self._loop, self._counts = AnswerLoop(unwrapped(llm.model), llm.tokenizer), Counts()
        release_full_kv(llm.model)  # rows retrieve, and have the room
        self._limits = default_limits(self._loop.model, llm.config) if limits is None else limits
        self._config = read_config(self._loop.model, llm.config, self._limits.chunk_tokens)
        self._template = PromptTemplate.of(llm.tokenizer)
        digest = template_digest(self._template.opening, self._template.middle, self._template.closing)
        self._saved = SavedTexts(self._loop, self._config, digest, store, self._counts, generated=cache_generated)
        self._empty = RetrievalCache(self._loop.model, self._config)
        planned = self._loop.model, self._config, self._limits.rows, self._empty.max_positions
        self._limits = replace(self._limits, rows=planned_rows(*planned))
        share_layout(self._loop.model, self._config, self._limits.rows, self._empty.max_positions)
        self._scheduler = Scheduler(self._limits)
        self._shared_bytes = self._limits.host_bytes if prefix_cache_bytes is None else prefix_cache_bytes
        self._tree = RadixCache(keep_session_seconds=keep_session_seconds) if self._shared_bytes else None
        if self._tree is not None:
            register(self._tree)
        self._answers = self._tree if cache_generated else None
        self._exact = PagedKVPool.of(
            paged_prefix_tokens, paged_prefix_pages, self._limits, self._loop.model, self._config, paged_prefix_int8
        )
        self._device_bytes = most_device_bytes(self._limits, self._loop.model, self._config, self._exact)
        self._outputs = OutputQueue()
        self._admission = RequestAdmission(
            self._loop, self._outputs, self._saved, self._tree, self._exact, self._empty, self._counts
        )
        self._saves = BackgroundSaves(self._saved)
        has_disk = store is not None and prefix_cache_disk_bytes != 0 and self._exact is None
        self._disk: DiskTier | None = None
        if has_disk and self._tree is not None:
            self._disk = DiskTier(self._tree, self._saved, self._saves, prefix_cache_disk_bytes)
        self._stepper = Stepper(self._loop.model, self._limits, self._outputs, self._fail, self._counts)
        self._expected = ContextPrefetcher(lambda: self._saved.store, self._limits.host_bytes)
        self._rows: dict[str, RunningRequest] = {}
        self._numbers, self._changed = itertools.count(), threading.Condition()
        self._prefills = PrefillWorker(
            self._rows, self._scheduler, self._changed, self._config, self._tree, self._fail, self._counts
        )
        self._warm_ups = WarmUps(self._loop, self._config, self._stepper, self._exact)
        self._idle = None if self._tree is None else IdlePrefixes(
            self._tree, self._disk, self._limits, self._shared_bytes, self._device_bytes, self._scheduler,
            self._changed, self._prefills.waited_for,
        )  # fmt: skip
        self._closing = self._replays = False  # replays: the next step likely is one
        self.died: BaseException | None = None  # what ended it in the middle of its work
        self._thread = threading.Thread(target=self._run, name="retrieval_attn-engine", daemon=True)
        self._thread.start()
        self._at_exit = functools.partial(self.close, drain=False)  # Python must not end inside a compiled function
        atexit.register(self._at_exit)

    def submit(self, request: Request) -> RequestHandle:
        """Take a request in. Any thread. Raises ContextLengthError or AdmissionError for one that never fits,
        EngineFullError if too many wait or the engine is closed, and for a saved context what `LLM.open` raises: what
        is found only when its layers are opened ends the request as its error.
        """
        handle = RequestHandle(str(next(self._numbers)), lambda: self._abort(handle))
        self._enter(self._admission.row(request, handle))
        return handle

    def _enter(self, row: RunningRequest) -> None:
        number = row.handle.id if row.before is None else str(next(self._numbers))
        job, context = self._admission.job(number, row), None if row.lost else row.context
        with self._changed:
            self._require_open()
            self._scheduler.submit(job, time.monotonic())
            self._rows[number] = row
            waits = len(self._rows) > self._limits.rows or self._scheduler.lacking_bytes
            if context is not None and waits:
                self._expected.add(number, context)
            self._changed.notify_all()

    def ask(self, text: str | Sequence[int], question: Question, *, raw: bool = False, **options: Any) -> RequestHandle:
        """Submit a question about a text, put as `Context.ask` puts it; equal texts are read once.

        options: of `Request`. Raises as `submit`, and InputDataError for a question that is empty.
        """
        template = self._template
        document = template.context_ids(text) if isinstance(text, str) else text
        return self.submit(Request((tuple(document), tuple(template.question_ids(question, raw))), **options))

    def ask_saved(self, name: str, question: Question, *, raw: bool = False, **options: Any) -> RequestHandle:
        """Submit a question about a saved context; otherwise as `ask`. It is opened once, and while requests use it."""
        asked = tuple(self._template.question_ids(question, raw))
        return self.submit(Request((asked,), context=name, **options))

    def save(
        self, name: str, text: str | Sequence[int], *, namespace: str | None = "", context: str | None = None,
        wait: bool = True,
    ) -> Saved:  # fmt: skip
        """Keep a text that was asked about under a name, as `Context.save` does; nothing is read for it.

        Requests can name it when this returns. wait: return when it is durable; else a thread writes it, and
        `unsaved` has its state. context: the saved one that the text, token ids then, continues. Raises InputDataError
        for a text that no request of the namespace asked about, or that was given up since.
        """
        check_name(name)
        document = self._template.context_ids(text) if isinstance(text, str) else text
        lease, entry = self._admission.held_text(document, context, namespace)
        try:
            entry.require_savable()
            unsaved = self._saved.unsaved(name, self._admission.context_ids(document, context), entry, entry.opened)
        except BaseException:
            lease.release()
            raise
        make = functools.partial(self._saved.saver, unsaved, entry.opened, namespace, lease.node.rebuild_seconds)
        saved = self._saves.add(BackgroundSave(unsaved, lease, make))
        if not wait:
            return saved
        try:
            return saved.wait()
        except BaseException:
            self._saves.cancel(name)
            raise

    @property
    def unsaved(self) -> list[ContextState]:
        """States of the saved contexts that are not durable."""
        return self._saves.states()

    def clean_store(self) -> None:
        """Remove what interrupted saves left in the store; log an error of it."""
        try:
            freed = self._saved.store.gc()
        except StoreError as error:
            log.warning("cannot remove the remains of interrupted saves: %s", error)
            return
        if freed.nbytes:
            log.info("removed %s bytes of interrupted saves and unnamed contexts", f"{freed.nbytes:,}")

    def cancel_save(self, name: str) -> bool:
        """Cancel the write of a context that is not durable, and forget it. Return whether there was one."""
        return self._saves.cancel(name)

    def warm_up(
        self, *, rows: int | None = None, tokens: int | None = None, draws: Sequence[SamplingParams] = DRAWS,
        progress: bool = True, background: bool = False,
    ) -> None:  # fmt: skip
        """Make now what the first requests would wait for: kernels, and the graphs of steps; leaves nothing behind.

        rows: of a step at most; None: as limits say. tokens: of the longest prompt and answer that is expected: graphs
        that are made for it serve shorter ones, too; None: they are made again as rows get longer. draws: one for each
        way in which requests will choose. Graphs are made for one shape of rows: with `index="auto"`, for the index
        that this number of tokens gets. It runs while there are no requests: one that is submitted meanwhile goes
        first, after at most one capture. progress: with a bar, if it takes longer than two seconds. background: return
        when steps of one row are ready, and capture the graphs of more rows later, while the engine is idle; `warming`
        says how many are left. Raises ConfigError for rows or tokens below 1 or beyond the limits or the model,
        EngineFullError if the engine is closed, and errors of prefill; in the background an error is logged.
        """
        self._empty.require_room(tokens or 1)
        warm_up = WarmUp.of(rows, tokens, draws, progress, most=self._limits.rows)
        with self._changed:
            self._require_open()
            done = self._warm_ups.add(warm_up, background=background)
            self._changed.notify_all()
        done.result()

    @property
    def warming(self) -> WarmUpProgress | None:
        """Return the progress of warm-ups; None if nothing is left to do."""
        return self._warm_ups.progress

    @property
    def stats(self) -> dict[str, Any]:
        """Return the engine's counts.

        waiting, rows: requests in the queue and running sequences, now. waiting_gpu_memory: admitted requests that
        wait for GPU memory of others, now. slot_utilization: share of slots in use, mean
        over the decode steps. shared: counts of the prefix cache. The rest is `Counts.plain`.
        """
        with self._changed:
            utilization = self._counts.rows / max(1, self._counts.steps * self._limits.rows)
            now = {
                "waiting": self._scheduler.waiting,
                "rows": self._scheduler.slots_in_use,
                "slot_utilization": utilization,
                "waiting_gpu_memory": sum(row.lacks_room for row in self._rows.values()),
            }
            return {
                **now,
                **self._counts.plain,
                **self._saves.counts,
                **(DiskCounts() if self._disk is None else self._disk.counts)._asdict(),
                "shared": PrefixCacheStats() if self._tree is None else self._tree.stats,
            }

    def status(self, namespace: str | None = None) -> dict[str, Any]:
        """Return requests, prefills and cached texts of now as JSON values.

        namespace: namespace of the requests and texts; None: all, with memory and counts of the whole engine.

        Keys: requests: number by state. prefills: a prompt's tokens, the completed share, and its saved context (or
        None), oldest first. texts: entries of the prefix cache, the last used first, `head` with token ids. memory:
        bytes in use and their limit by tier, and those of the prefix cache. counts: `stats`, generated tokens, and the
        clock in seconds.
        """
        with self._changed:
            rows = {key: row for key, row in self._rows.items() if namespace in (None, row.request.namespace)}
            states = {key: self._scheduler.state(key) for key in rows}
            prefills = [
                {"tokens": row.prompt_tokens, "done": self._scheduler.progress(key), "context": row.request.context}
                for key, row in rows.items()
                if states[key] is State.READING
            ]
        found: dict[str, Any] = {
            "requests": {one.value: list(states.values()).count(one) for one in State if one is not State.GONE},
            "prefills": prefills[:SHOWN],
            "texts": [
                _plain_text(node, entry) for node in ([] if self._tree is None else self._tree.latest(namespace, SHOWN))
                if isinstance(entry := node.held, PrefixEntry)  # not evicted meanwhile
            ],
        }  # fmt: skip
        if namespace is None:
            tokens = self._counts.rows + self._counts.accepted_tokens
            counts = {**self.stats, "tokens": tokens, "clock": time.monotonic()}
            found |= {"memory": self._memory(), "counts": counts | {"shared": counts["shared"]._asdict()}}
        return found

    def _memory(self) -> dict[str, dict[str, int | None]]:
        held, device = self._tree.sizes if self._tree is not None else Sizes(), input_device(self._loop.model)
        with self._changed:
            host = self._scheduler.host_bytes_in_use
        found: dict[str, dict[str, int | None]] = {
            "host": {
                "used": host, "limit": self._limits.host_bytes, "cache": held.host, "cache_limit": self._shared_bytes,
            }
        }  # fmt: skip
        if device.type == "cuda":
            used, limit = allocated_bytes(device)
            found["gpu"] = {"used": used, "limit": limit, "cache": held.device, "cache_limit": self._device_bytes}
        return found

    def close(self, *, drain: bool = True, save_seconds: float | None = None) -> None:
        """End: once all are answered, or at once, and those that are there end as "cancelled".

        save_seconds: longest wait for contexts that are not durable; None: until all are.
        """
        with self._changed:
            self._closing = True
            self._scheduler.drain()
            if not drain:
                for number in self._rows:
                    self._scheduler.abort(number)
            self._changed.notify_all()
        self._thread.join()
        if self._disk is not None:
            self._disk.close()
        self._saves.close(save_seconds)
        drop_layout(self._loop.model)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def _require_open(self) -> None:
        if self._closing or self.died is not None:
            raise EngineFullError("The engine is closed; make another.") from self.died

    def _abort(self, handle: RequestHandle) -> None:
        with self._changed:
            for number in [number for number, row in self._rows.items() if row.handle is handle]:
                self._scheduler.abort(number)
            self._changed.notify_all()

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        results, model = StepResult(), self._loop.model
        try:
            compile_windows(host_format(self._config.host_dtype, model.dtype))  # the first step would wait for it
            while True:
                with self._changed:
                    while self._scheduler.idle and not self._closing and (left := self._warm_ups.seconds_left) != 0:
                        self._changed.wait(left)
                    idle = self._scheduler.idle
                    if idle and self._closing:
                        return
                    plan = None if idle else self._scheduler.schedule(results, time.monotonic())
                if plan is not None:
                    self._warm_ups.pause()
                    results = self._do(plan)
                elif self._warm_ups.run_next():
                    self._prefills.made_ready()
        except BaseException as error:  # no caller must wait for a thread that has ended
            log.exception("the engine ends")
            with self._changed:
                self.died = error
                for row in self._rows.values():
                    row.finish("error", error)
                    row.leave()
                self._rows.clear()
        finally:
            self._warm_ups.close()
            self._outputs.close()
            self._stepper.close()
            self._expected.close()

    def _do(self, plan: SchedulerOutput) -> StepResult:
        failed: list[str] = []
        for number in plan.leave:
            row = self._rows[number]
            self._expected.remove(number)
            reason: Reason = "length" if len(row.tokens) >= row.request.max_tokens else "cancelled"
            if reason == "length" and (damage := row.damage()) is not None:
                self._fail(number, damage, failed)
            row.finish(reason)
            with self._changed:  # other threads look at all requests
                del self._rows[number]
            row.leave(self._answers)
        for number in plan.start:
            self._expected.remove(number)
        if not self._replays:
            self._outputs.flush()
        found = self._stepper.decode({number: self._rows[number] for number in plan.decode}, failed, not plan.read)
        self._replays = bool(found.replayed and found.tokens and not plan.read)
        if not self._replays:  # else the next replay, soon, leaves time for it
            self._outputs.flush()
        progress = self._prefills.go_on(dict(plan.read), failed, alone=not plan.decode)
        if self._idle is not None:
            self._idle.after_step(plan)
            self._prefills.renew_known()
        return StepResult(
            tuple(found.ended), tuple(found.tokens), tuple(failed), progress.chunks, progress.done, found.seconds,
            progress.chunk_seconds, progress.next_kinds,
        )  # fmt: skip

    def _fail(self, number: str, error: BaseException, failed: list[str]) -> None:
        """This request ends with its error, or begins again without what was damaged; the others go on."""
        row = self._rows[number]
        failed.append(number)
        if not retry_without_damaged(row, error, self._admission, self._enter):
            known = isinstance(error, RetrievalAttentionError | MemoryError | torch.OutOfMemoryError)
            log.warning("request %s failed: %s: %s", number, type(error).__name__, error, exc_info=not known and error)
            row.finish("error", error)
