"""Answers that attend to all keys, see `Config.all_keys`: a fork whose windows have taken what the host has.

An index saves reading keys, and costs a token the search and the host's answer, in every layer. A GPU reads the keys
of a shorter text in less (`memory/all_keys.py` says which). They come for one answer and go with it: contexts keep
what they had, and their indexes. An exact question would have all of them visit the GPU anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.held import HeldTokens, take_all
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.engine.graph.registry import large_bytes, release_large
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.gpu.memory import bandwidth
from retrieval_attn.index.full import FULL_ROOM, kept_tokens
from retrieval_attn.memory.all_keys import tokens_read_sooner
from retrieval_attn.memory.chunk import ChunkSize
from retrieval_attn.memory.device_room import whole_device_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.upload import BLOCK_BYTES, BLOCKS, HEADROOM

log = logging.getLogger(__name__)
Found = TypeVar("Found")
Emit = Callable[[str], None] | None
"""Takes each piece of an answer's text."""


def with_all_keys(model: PreTrainedModel, cache: RetrievalCache, new: int) -> RetrievalCache | None:
    """A fork of `cache` with all keys beside the model; None where its answers are to retrieve.

    new: tokens that are still to come at most, the question's and the answer's.
    """
    if not _to_bring(cache):
        return None
    columns = cache.batch.columns
    slots = slots_for_all(model, cache, columns, new)
    if not slots or not _fits(model, cache, slots, new):
        return None
    fork = cache.fork()
    try:
        for one in _to_bring(fork):
            take_all(one, slots - cache.config.sink)
    except torch.OutOfMemoryError:  # what is free lies in pieces
        log.info("an answer retrieves: all keys of %d tokens found no room beside the model", columns)
        return None
    log.info("an answer attends to all keys of %d tokens, which are beside the model for it", columns)
    return fork


def over_all_keys(
    model: PreTrainedModel,
    cache: RetrievalCache,
    new: int,
    answers: Callable[[RetrievalCache, Emit], Found],
    emit: Emit,
) -> Found | None:
    """What `answers` gives with a fork from `with_all_keys`; None where there is none, or where memory ran out before
    any text was there: other answers may have taken what was free.
    """
    fork, said = with_all_keys(model, cache, new), False
    if fork is None:
        return None

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
    log.warning("an answer retrieves: over all keys of %d tokens it ran out of memory", cache.batch.columns)
    release_large(model)
    return None


def slots_for_all(model: PreTrainedModel, cache: RetrievalCache, columns: int, new: int = 0) -> int:
    """Slots of a window that holds so many tokens, and `new` that come; 0 where answers about them retrieve, as options
    say so or it is as soon.
    """
    config = cache.config
    plain = config.index == "auto" and not config.index_options and config.retrieve != "all"
    if not (config.all_keys and plain and config.estimates) or cache.in_batch:
        return 0
    try:
        shape = model_shape(model.config, None)
    except RetrievalAttentionError:  # what it needs is not known
        return 0
    if columns > tokens_read_sooner(shape.kv_layer_bytes, memory_speed(model)) or is_spread(model):
        return 0
    return config.sink + kept_tokens(columns + max(0, new - FULL_ROOM))


def make_way(model: PreTrainedModel) -> None:
    """Before a text is read: buffers that the next answer over all keys might use go, where less than twice as much is
    free.
    """
    held = large_bytes(model)
    free = whole_device_bytes(model) if held else None
    if free is not None and free < 2 * held:
        release_large(model)


def _to_bring(cache: RetrievalCache) -> list[HeldTokens]:
    """Of layers that retrieve now, what they hold; [] where rows are not one plain one, or somebody watches."""
    batch = cache.batch
    if len(batch.sequences) != 1 or batch.forgotten.tokens or batch.exact is not None or batch.valid is not None:
        return []
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    if any(layer.mass_heads or layer.audit is not None or layer.watch is not None for layer in layers):
        return []
    return [layer.held for layer in layers if layer.held is not None and layer.held.retrieves]


def memory_speed(model: PreTrainedModel) -> float:
    """Bytes per second of the memory of the GPU that a model runs on; 0 without one, or where that is not known."""
    device = input_device(model)
    return (bandwidth(device) or 0.0) if device.type == "cuda" else 0.0


def _fits(model: PreTrainedModel, cache: RetrievalCache, slots: int, new: int) -> bool:
    """Whether the GPU has room for the fork's windows, those of a captured step and its own memory, blocks under way,
    and a pass of the question.
    """
    shape = model_shape(model.config, None)
    windows = shape.full_layers * slots * shape.kv_layer_bytes
    waiting = release_large(model, slots)
    free = whole_device_bytes(model) or 0  # what waited for another number of slots is free now
    question = ChunkSize.of(shape, 1, hidden_on_host=False, absent=0).bytes(min(new, cache.config.prefill_chunk))
    needed = windows + max(0, windows - waiting) + question + BLOCKS * BLOCK_BYTES + HEADROOM
    if needed > free:
        log.info("an answer retrieves: all keys beside the model take %s, %s is free", *map(show_bytes, (needed, free)))
    return needed <= free
