"""Answers that attend to all keys, see `Config.full_attention`: a fork whose keys lie in pages beside the model.

An index saves reading keys, and costs a token the search and the host's answer, in every layer. A GPU reads the keys
of a shorter text in less (`memory/all_keys.py` says which), and rounded to int8 those of one twice as long. They come
for an answer, and wait for the next one on the same text; contexts keep what they had, and their indexes. An exact
question would have all of them visit the GPU anyway.
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
from retrieval_attn.attention.layer_kv import LayerKV, bring_to_pages, keep_the_rest
from retrieval_attn.attention.paged_prefix import PagedLayers, PagedPrefix, PagedSpan
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.gpu.memory import bandwidth
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, pages_for
from retrieval_attn.index.full import kept_tokens
from retrieval_attn.memory.all_keys import device_kv_bytes, full_attention_breakeven
from retrieval_attn.memory.chunk import ChunkSize
from retrieval_attn.memory.device_room import whole_device_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.upload import BLOCK_BYTES, BLOCKS, HEADROOM
from retrieval_attn.runner.graph.registry import retire

log = logging.getLogger(__name__)


class FullKVPages:
    """See the module. For one thread at a time."""

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
        """Whether an answer attends to them."""
        return bool(self._users)

    def held(self, cache: RetrievalCache) -> int:
        """How many of the first tokens of `cache`, as it is now, lie there."""
        if self._of is None:
            return 0
        known, rewritten, tokens = self._of
        return tokens if known() is cache and rewritten == cache.batch.rewritten else 0

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens have room there."""
        return self.layers.pages >= pages_for(tokens)

    def take(self, cache: RetrievalCache, tokens: int, bring: Callable[[PagedSpan, int], None]) -> PagedPrefix:
        """The first `tokens` tokens of `cache`, as a prefix; bring: puts those from one on there, that are missing."""
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
    """Those that the model keeps."""
    return _kept.get(model)


def keep(model: PreTrainedModel, pages: FullKVPages) -> None:
    """Keep these, and no others: their memory is free once no answer uses them."""
    let_go(model)
    _kept[model] = pages


def let_go(model: PreTrainedModel) -> None:
    """Keep none: neither pages nor steps that were captured over them."""
    pages = _kept.pop(model, None)
    if pages is not None:
        retire(model, pages.layers)


Found = TypeVar("Found")
Emit = Callable[[str], None] | None
"""Takes each piece of an answer's text."""

_turn = threading.Lock()
"""Answers in several threads: one brings its keys at a time."""


class ExpectedTokens(NamedTuple):
    """What is still to come at most. tokens: of a question and its answer. rows: answers side by side."""

    tokens: int = 0
    rows: int = 1


ALONE = ExpectedTokens()
"""One answer, of which nothing is known."""


def attach_full_kv(
    model: PreTrainedModel, cache: RetrievalCache, ahead: ExpectedTokens = ALONE
) -> RetrievalCache | None:
    """A fork of `cache` with all keys beside the model; None where its answers are to retrieve. ahead: in the fork, if
    it is repeated for as many rows.
    """
    ends = {one.tail_start for one in _to_bring(cache)}
    if len(ends) != 1:  # nothing lies on the host alone
        return None
    (tokens,) = ends
    with _turn:
        pages = _pages(model, cache, tokens, ahead)
        if pages is None:
            return None
        fork = cache.fork()
        held = _to_bring(fork)

        def bring(span: PagedSpan, first: int) -> None:
            for one in held:
                bring_to_pages(one, pages.layers, span, first)

        try:
            prefix = pages.take(cache, tokens, bring)
        except torch.OutOfMemoryError:  # what is free lies in pieces
            let_go(model)
            log.info("an answer retrieves: all keys of %d tokens found no room beside the model", tokens)
            return None
        fork.batch.exact = prefix
        for one in held:
            keep_the_rest(one, ahead.tokens)
    form = " in int8" if pages.layers.int8 else ""
    log.info("an answer attends to all keys, of which those of %d tokens are beside the model%s", tokens, form)
    return fork


def answer_with_full_attention(
    model: PreTrainedModel, fork: RetrievalCache, answers: Callable[[RetrievalCache, Emit], Found], emit: Emit
) -> Found | None:
    """What `answers` gives with a fork from `attach_full_kv`; None where memory ran out before any text was there:
    other answers may have taken what was free.
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
    let_go(model)
    return None


def forms_for_all(model: PreTrainedModel, cache: RetrievalCache, tokens: int) -> list[bool]:
    """Forms in which answers may have all keys of so many tokens beside the model, whether int8, the preferred first;
    [] where they retrieve, as options say so or it is as soon.
    """
    config = cache.config
    plain = config.index == "auto" and not config.index_options and config.retrieve != "all"
    speed = memory_speed(model)
    retrieves = config.full_attention == "never" or not (plain and config.estimates)
    if speed is None or retrieves or cache.in_batch or is_spread(model):
        return []
    try:
        shape = model_shape(model.config, None)
    except RetrievalAttentionError:  # what it needs is not known
        return []
    forms = [True] if config.host_dtype == "int8" else [False, True]
    if config.full_attention == "always":
        return forms
    return [int8 for int8 in forms if tokens <= full_attention_breakeven(shape, speed, int8=int8)]


def release_if_needed(model: PreTrainedModel) -> None:
    """Before a text is read: pages that the next answer over all keys might find its keys in go, where less than twice
    as much is free.
    """
    kept = kept_pages(model)
    free = None if kept is None or kept.in_use else whole_device_bytes(model)
    if kept is not None and free is not None and free < 2 * kept.nbytes:
        let_go(model)


def memory_speed(model: PreTrainedModel) -> float | None:
    """Bytes per second of the memory of the GPU that a model runs on; 0 where that is not known, None without one."""
    device = input_device(model)
    return (bandwidth(device) or 0.0) if device.type == "cuda" else None


def _to_bring(cache: RetrievalCache) -> list[LayerKV]:
    """Of layers that retrieve now, what they hold; [] where rows are not one plain one, or somebody watches."""
    batch = cache.batch
    if len(batch.sequences) != 1 or batch.forgotten.tokens or batch.exact is not None or batch.valid is not None:
        return []
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    if any(layer.mass_heads or layer.audit is not None or layer.watch is not None for layer in layers):
        return []
    return [layer.held for layer in layers if layer.held is not None and layer.held.retrieves]


def _pages(model: PreTrainedModel, cache: RetrievalCache, tokens: int, ahead: ExpectedTokens) -> FullKVPages | None:
    """Pages for so many first tokens: those that have them, or others, where they fit; None: the answer retrieves."""
    forms, kept = forms_for_all(model, cache, cache.batch.columns), kept_pages(model)
    if kept is not None and kept.held(cache) and kept.layers.int8 in forms and kept.has_room(tokens):
        return kept  # what is missing goes behind what others may attend to
    missing = 0
    for int8 in forms:
        kept = kept_pages(model)  # those before may have been let go for these
        if kept is not None and not kept.in_use and kept.layers.int8 == int8 and kept.has_room(tokens):
            return kept
        for pages in (pages_for(kept_tokens(tokens)), pages_for(tokens)):  # if there is room, for longer texts as well
            missing = _missing_bytes(model, cache, pages, ahead, int8=int8)
            if not missing:
                made = FullKVPages(pages, int8=int8)
                keep(model, made)
                return made
    if missing:
        log.info("an answer retrieves: all keys beside the model take %s more than is free", show_bytes(missing))
    return None


def _missing_bytes(
    model: PreTrainedModel, cache: RetrievalCache, pages: int, ahead: ExpectedTokens, *, int8: bool
) -> int:
    """What the GPU has too little room by, 0 for none: for so many pages in all layers in place of those that are kept,
    if no answer uses them; for the windows of a fork and of a captured step, blocks under way, and a pass of the
    question.
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
        let_go(model)
        free = whole_device_bytes(model) or 0
    return max(0, needed - free)
