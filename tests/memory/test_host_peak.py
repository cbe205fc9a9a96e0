"""Memory of a CPU while a prompt is read: activations of a chunk, windows of sliding layers."""

from __future__ import annotations

from typing import Any

import torch

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.sliding import CROP_ROOM, SlidingLayer
from retrieval_attn.config import Config
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.prefill import HOST_CHUNK
from tests.memory.live_bytes import LiveBytes
from tests.tiny_models import build_model, random_ids

TOKENS, WIDE = 8 * HOST_CHUNK, 4096


def read(model: Any, tokens: int) -> tuple[RetrievalCache, LiveBytes]:
    """Return the cache of a prompt, and the bytes of the tensors that its prefill made."""
    config = Config(threads=1)
    cache = RetrievalCache(model, config)
    with torch.no_grad(), using_retrieval(model, config.prefill_chunk), LiveBytes(model.parameters()) as live:
        model(input_ids=random_ids(1, tokens), past_key_values=cache, logits_to_keep=1)
    return cache, live


def test_activations_are_those_of_one_chunk() -> None:
    """A feed-forward part makes some tensors of its width for each token of a chunk."""
    peaks = []
    for width in (64, WIDE):
        model = build_model("gemma3", intermediate_size=width, max_position_embeddings=2 * TOKENS)
        peaks.append(read(model, TOKENS)[1].peak)
    assert peaks[1] - peaks[0] < 5 * 4 * WIDE * HOST_CHUNK, f"{(peaks[1] - peaks[0]) / TOKENS:.0f} bytes per token"


def test_sliding_windows_keep_no_room_of_a_prompt() -> None:
    model = build_model("gemma3", max_position_embeddings=2 * TOKENS)
    cache, _ = read(model, TOKENS)
    sliding = [layer for layer in cache.layers if isinstance(layer, SlidingLayer)]
    assert sliding
    for layer in sliding:
        assert layer.window is not None
        assert layer.window.buffers[0].shape[2] <= layer.keep + CROP_ROOM
