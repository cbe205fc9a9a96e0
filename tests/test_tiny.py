"""The first file to run: the core idea in seconds, on any CPU."""

from __future__ import annotations

import torch

import retrieval_attn as ra
from tests.tiny_models import random_ids, tiny_model


def test_a_model_reads_and_generates_what_full_attention_does() -> None:
    """Greedy tokens of retrieval over all keys equal those of transformers' own attention."""
    model = tiny_model("llama")
    ids = random_ids(1, 80)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    ra.enable(model, sink=4, window=16, spill=4, retrieve="all")
    try:
        assert torch.equal(model.generate(ids, **options), expected)
    finally:
        ra.disable(model)


def test_the_device_part_does_not_grow_with_the_context() -> None:
    """80 or 800 tokens: the same device bytes, and all keys on the host."""
    model = tiny_model("llama")
    sizes = []
    for tokens in (80, 800):
        cache = ra.RetrievalCache(model, sink=4, window=16, spill=4)
        with torch.no_grad():
            ra.enable(model, cache.config)
            model(input_ids=random_ids(1, tokens), past_key_values=cache)
            ra.disable(model)
        sizes.append((cache.device_nbytes, cache.host_nbytes))
    assert sizes[0][0] == sizes[1][0]
    per_token = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert sizes[1][1] >= 800 * per_token
