"""Full attention for one answer (`Config.full_attention`): a fork whose KV cache lies in GPU pages.

An index saves reads of keys and costs each token a search and a host round trip per layer. Below a break-even length
(`memory/device.py`), which int8 doubles, a GPU reads all keys faster. The pages are filled for an answer and kept for
the next one on the same text; the context keeps its KV cache and index on the host.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.paged_prefix import PagedLayers, PagedPrefix, PagedSpan
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.config import FullAttention
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.gpu.memory import bandwidth
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, pages_for
from retrieval_attn.index.flat import kept_tokens
from retrieval_attn.memory.device import ChunkSize, device_kv_bytes, full_attention_breakeven
from retrieval_attn.memory.device_room import whole_device_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.upload import BLOCK_BYTES, BLOCKS, HEADROOM
from retrieval_attn.runner.graph.pool import retire

log = logging.getLogger(__name__)


class FullKVPages:
    """GPU pages with the KV cache of one text. For one thread at a time."""

    def __init__(self, pages: int, *, int8: bool) -> None:
        self.layers = PagedLayers(pages, int8=int8)
        self._users: weakref.WeakSet[PagedPrefix] = weakref.WeakSet()
        self._of: tuple[weakref.ref[RetrievalCache], int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.layers.nbytes_per_page * self.layers.pages

    @property
    def in_use(self) -> bool:
        """Whether an answer attends to the pages."""
        return bool(self._users)

    def held(self, cache: RetrievalCache) -> int:
        """Return the number of leading tokens of `cache` in the pages."""
        if self._of is None:
            return 0
        known, rewritten, tokens = self._of
        return tokens if known() is cache and rewritten == cache.batch.rewritten else 0

    def has_room(self, tokens: int) -> bool:
        """Return whether `tokens` tokens fit."""
        return self.layers.pages >= pages_for(tokens)

    def take(self, cache: RetrievalCache, tokens: int, bring: Callable[[PagedSpan, int], None]) -> PagedPrefix:
        """Return the first tokens of `cache` as a paged prefix.

        bring: copies the tokens from a number on, which are missing in the pages.
        """
        span = PagedSpan(np.arange(pages_for(tokens), dtype=np.int32), tokens, lambda pages: None)
        held = self.held(cache)
        if held < tokens:
            self._of = None
            bring(span, held)
            self._of = weakref.ref(cache), cache.batch.rewritten, tokens
        prefix = PagedPrefix(self.layers, (span,))
        self._users.add(prefix)
        return prefix


_kept: weakref.WeakKeyDictionary[PreTrainedModel, FullKVPages] = weakref.WeakKeyDictionary()


def kept_pages(model: PreTrainedModel) -> FullKVPages | None:
    """Return the pages that a model keeps."""
    return _kept.get(model)


def release_full_kv(model: PreTrainedModel) -> None:
    """Release the kept pages and the graphs captured over them."""
    pages = _kept.pop(model, None)
    if pages is not None:
        retire(model, pages.layers)


Found = TypeVar("Found")
Emit = Callable[[str], None] | None
"""Receives each piece of an answer's text."""

_turn = threading.Lock()
"""Serializes the copies of answers in several threads."""


class ExpectedTokens(NamedTuple):
    """Tokens still to come at most. tokens: of a question and its answer. rows: answers in the batch."""

    tokens: int = 0
    rows: int = 1


ALONE = ExpectedTokens()
"""One answer of unknown length."""


def attach_full_kv(
    model: PreTrainedModel, cache: RetrievalCache, ahead: ExpectedTokens = ALONE, mode: FullAttention | None = None
) -> RetrievalCache | None:
    """Fork `cache` with its whole KV cache in GPU pages. Returns None if its keys stay on the host.

    ahead: expected tokens of the fork, if it is repeated for as many rows. mode: see `forms_for_all`.
    """
    ends = {one.tail_start for one in _to_bring(cache)}
    if len(ends) != 1:  # nothing lies on the host alone
        return None
    (tokens,) = ends
    with _turn:
        pages = _pages(model, cache, tokens, ahead, mode)
        if pages is None:
            return None
        fork = cache.fork()
        held = _to_bring(fork)

        def bring(span: PagedSpan, first: int) -> None:
            for one in held:
                one.bring_to_pages(pages.layers, span, first)

        try:
            prefix = pages.take(cache, tokens, bring)
        except torch.OutOfMemoryError:  # what is free lies in pieces
            release_full_kv(model)
            log.info("an answer retrieves: all keys of %d tokens found no room beside the model", tokens)
            return None
        fork.batch.paged_prefix = prefix
        for one in held:
            one.keep_the_rest(ahead.tokens)
    form = " in int8" if pages.layers.int8 else ""
    log.info("an answer attends to all keys, of which those of %d tokens are beside the model%s", tokens, form)
    return fork


def answer_with_full_attention(
    model: PreTrainedModel, fork: RetrievalCache, answers: Callable[[RetrievalCache, Emit], Found], emit: Emit
) -> Found | None:
    """Call `answers` with a fork of `attach_full_kv`. Returns None if memory ran out before the first piece of text.

    Other answers may have taken the memory that was free.
    """
    said, tokens = False, fork.batch.columns

    def noted(text: str) -> None:
        nonlocal said
        said = True
        if emit is not None:
            emit(text)

    try:
        return answers(fork, None if emit is None else noted)
    except torch.OutOfMemoryError:
        if said:
            raise
    log.warning("an answer retrieves: over all keys of %d tokens it ran out of memory", tokens)
    release_full_kv(model)
    return None


def forms_for_all(
    model: PreTrainedModel, cache: RetrievalCache, tokens: int, mode: FullAttention | None = None
) -> list[bool]:
    """Return the formats in which full attention is allowed for a text, True for int8, preferred ones first.

    An empty list means retrieval: by the options, or because it is as fast. mode: `Config.full_attention` of the
    answer; None: the cache's.
    """
    config = cache.config
    mode = config.full_attention if mode is None else mode
    plain = config.index == "auto" and not config.index_options and config.retrieve != "all"
    speed = memory_speed(model)
    retrieves = mode == "never" or not (plain and config.estimates)
    if speed is None or retrieves or cache.in_batch or is_spread(model):
        return []
    try:
        shape = model_shape(model.config, None)
    except RetrievalAttentionError:  # what it needs is not known
        return []
    forms = [True] if config.host_dtype == "int8" else [False, True]
    if mode == "exact":  # in the format of the host
        return forms[:1]
    if mode == "always":
        return forms
    return [int8 for int8 in forms if tokens <= full_attention_breakeven(shape, speed, int8=int8)]


def release_if_needed(model: PreTrainedModel) -> None:
    """Before a prefill, release kept pages if less than twice their size is free."""
    kept = kept_pages(model)
    free = None if kept is None or kept.in_use else whole_device_bytes(model)
    if kept is not None and free is not None and free < 2 * kept.nbytes:
        release_full_kv(model)


def memory_speed(model: PreTrainedModel) -> float | None:
    """Return bytes per second of a GPU's memory, 0 if unknown. None: the model runs on no GPU."""
    device = input_device(model)
    return (bandwidth(device) or 0.0) if device.type == "cuda" else None


def _to_bring(cache: RetrievalCache) -> list[LayerKV]:
    """Return the KV of layers that retrieve; [] if the batch is not one plain sequence, or a hook watches."""
    batch = cache.batch
    if len(batch.sequences) != 1 or batch.forgotten.tokens or batch.paged_prefix is not None or batch.valid is not None:
        return []
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    if any(layer.on_attention is not None for layer in layers):
        return []
    return [layer.held for layer in layers if layer.held is not None and layer.held.retrieves]


def _pages(
    model: PreTrainedModel, cache: RetrievalCache, tokens: int, ahead: ExpectedTokens, mode: FullAttention | None
) -> FullKVPages | None:
    """Return pages for the first tokens: kept ones, or new ones if they fit. None: the keys stay on the host."""
    forms, kept = forms_for_all(model, cache, cache.batch.columns, mode), kept_pages(model)
    if kept is not None and kept.held(cache) and kept.layers.int8 in forms and kept.has_room(tokens):
        return kept  # what is missing goes behind what others may attend to
    missing = 0
    for int8 in forms:
        kept = kept_pages(model)  # those before may have been dropped for these
        if kept is not None and not kept.in_use and kept.layers.int8 == int8 and kept.has_room(tokens):
            return kept
        for pages in (pages_for(kept_tokens(tokens)), pages_for(tokens)):  # if there is room, for longer texts as well
            missing = _missing_bytes(model, cache, pages, ahead, int8=int8)
            if not missing:
                made = FullKVPages(pages, int8=int8)
                release_full_kv(model)
                _kept[model] = made
                return made
    if missing:
        log.info("an answer retrieves: all keys beside the model take %s more than is free", show_bytes(missing))
    return None


def _missing_bytes(
    model: PreTrainedModel, cache: RetrievalCache, pages: int, ahead: ExpectedTokens, *, int8: bool
) -> int:
    """Return by how many bytes the GPU is too small, 0 if the answer fits.

    Counted are the pages of all layers in place of kept ones that no answer uses, windows of a fork and of a captured
    step, transfer blocks, and the prefill of the question.
    """
    shape, config = model_shape(model.config, None), cache.config
    slots = ahead.rows * (config.sink + kept_tokens(config.window + ahead.tokens))
    windows = 2 * shape.full_layers * slots * shape.kv_layer_bytes
    chunk = ChunkSize.of(shape, ahead.rows, hidden_on_host=False, absent=0)
    question = chunk.bytes(min(ahead.tokens, config.prefill_chunk))
    needed = shape.full_layers * pages * PAGE_TOKENS * device_kv_bytes(shape, int8=int8) + windows + question
    needed += BLOCKS * BLOCK_BYTES + HEADROOM
    kept = kept_pages(model)
    free, waiting = whole_device_bytes(model) or 0, 0 if kept is None or kept.in_use else kept.nbytes
    if waiting and needed <= free + waiting:
        release_full_kv(model)
        free = whole_device_bytes(model) or 0
    return max(0, needed - free)
