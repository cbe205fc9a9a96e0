"""Calls of plain transformers: a RetrievalCache gives the tokens of eager attention, or refuses by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.tokenization_utils_base import BatchEncoding

import retrieval_attn as ra
from retrieval_attn.errors import CacheMismatchError, ConfigError, InputDataError, UnsupportedModelError
from retrieval_attn.template import checked_ids
from tests.tiny_models import handed_out, random_ids, tiny_model

ALL = ra.Config(sink=4, window=16, retrieve="all", threads=1)
IDS = random_ids(1, 90)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def model() -> Iterator[Any]:
    """With eager attention; restored afterwards."""
    yield from handed_out(tiny_model("llama"))


@pytest.fixture
def enabled(model: Any) -> Iterator[Any]:
    ra.enable(model, ALL)
    yield model
    ra.disable(model)


def eager(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """What `generate` gives with full attention."""
    ra.disable(model)
    try:
        found: Tensor = model.generate(ids, **{**GREEDY, **options})
    finally:
        ra.enable(model, ALL)
    return found


def test_a_deep_copy_is_a_fork(enabled: Any) -> None:
    """The recipe of transformers for prompts with a common beginning."""
    cache = ra.RetrievalCache(enabled, ALL)
    with torch.no_grad():
        enabled(IDS[:, :80], past_key_values=cache)
    other = torch.cat([IDS[:, :80], IDS[:, 5:15]], dim=1)
    for ids in (IDS, other):
        got = enabled.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(got, eager(enabled, ids))
    assert cache.get_seq_length() == 80
    held = copy.deepcopy({"cache": cache, "same": cache})
    assert held["cache"] is held["same"] is not cache


@pytest.mark.parametrize("copied", [copy.copy, pickle.dumps], ids=["copy", "pickle"])
def test_other_copies_name_fork(model: Any, copied: Any) -> None:
    with pytest.raises(InputDataError, match=r"Call cache\.fork\(\)"):
        copied(ra.RetrievalCache(model, ALL))


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("options", [{}, {"negative_prompt_ids": random_ids(1, 40)}], ids=["last token", "negative"])
def test_guidance_gives_the_tokens_of_eager(enabled: Any, given: bool, options: dict[str, Any]) -> None:
    """The second forward of each token has a RetrievalCache of its own."""
    cache = {"past_key_values": ra.RetrievalCache(enabled, ALL)} if given else {}
    got = enabled.generate(IDS, guidance_scale=4.0, **options, **cache, **GREEDY)
    expected = eager(enabled, IDS, guidance_scale=4.0, **options)
    assert torch.equal(got, expected) and not torch.equal(expected, eager(enabled, IDS))


def test_guidance_without_enable_says_what_to_call(model: Any) -> None:
    model.set_attn_implementation("retrieval")
    with pytest.raises(CacheMismatchError, match=r"call retrieval_attn\.enable\(model\).*guidance_scale"):
        model.generate(IDS, guidance_scale=1.5, past_key_values=ra.RetrievalCache(model, ALL), **GREEDY)


@pytest.mark.parametrize("name", ["static", "dynamic", "offloaded"])
def test_caches_of_transformers_are_refused_by_name(enabled: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cache_implementation='{name}'.*Leave it out"):
        enabled.generate(IDS, cache_implementation=name, **GREEDY)


def test_what_a_checkpoint_says_of_caches_is_for_full_attention(enabled: Any) -> None:
    """Gemma 2 asks for a cache of transformers' own in its generation_config.json."""
    expected = eager(enabled, IDS)
    before, enabled.generation_config = enabled.generation_config, GenerationConfig(cache_implementation="static")
    try:
        for cache in ({}, {"past_key_values": ra.RetrievalCache(enabled, ALL)}):
            assert torch.equal(enabled.generate(IDS, **cache, **GREEDY), expected)
    finally:
        enabled.generation_config = before


def test_a_static_cache_without_enable_is_refused(model: Any) -> None:
    model.set_attn_implementation("retrieval")
    with pytest.raises(CacheMismatchError, match=r"StaticCache.*RetrievalCache\(model\)"):
        model.generate(IDS, cache_implementation="static", **GREEDY)


def test_continuous_batching_is_refused_by_name(enabled: Any) -> None:
    """Before anything of it runs, and only while the model is enabled."""
    for call in (lambda: enabled.generate_batch([[5, 6, 7]]), enabled.init_continuous_batching):
        with pytest.raises(UnsupportedModelError, match=r"continuous batching.*LLM\.generate"):
            call()
    ra.disable(enabled)
    assert "init_continuous_batching" not in vars(enabled)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["enabled", "attention"])
@pytest.mark.parametrize("tokens", [90, 600])
def test_gradients_through_a_cache_are_refused(model: Any, training: bool, way: str, tokens: int) -> None:
    """The forward is right; asking for gradients says why there are none."""
    ids = random_ids(1, tokens)
    with torch.no_grad():
        expected = model(ids).logits
    if way == "enabled":
        ra.enable(model, ALL.replace(prefill_chunk=128))
    else:
        model.set_attn_implementation("retrieval")
    model.train(training)
    try:
        cache = ra.RetrievalCache(model, ALL)
        found = model(ids, labels=ids, past_key_values=cache)
        assert float((found.logits.detach() - expected).abs().max()) < 1e-4
        with pytest.raises(UnsupportedModelError, match=r"keeps no gradients.*torch\.no_grad"):
            found.loss.backward()
    finally:
        model.eval()
        model.zero_grad()
        ra.disable(model)


def test_training_without_a_cache_goes_on(enabled: Any) -> None:
    enabled.train()
    try:
        enabled(IDS, labels=IDS, use_cache=False).loss.backward()
        assert all(one.grad is not None for one in enabled.parameters())
    finally:
        enabled.eval()
        enabled.zero_grad()


def test_what_a_tokenizer_returns_is_no_list_of_ids() -> None:
    with pytest.raises(InputDataError, match=r'got a BatchEncoding.*pass its \["input_ids"\]'):
        checked_ids(BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1]}), 97)  # type: ignore[arg-type]


@pytest.mark.timeout(200)
def test_a_compiled_forward_runs_the_decoder_eagerly(enabled: Any) -> None:
    """One graph break: nothing of the cache is traced, and the tokens are those of eager attention."""
    expected = eager(enabled, IDS)
    enabled.forward = torch.compile(enabled.forward, backend="eager")
    try:
        assert torch.equal(enabled.generate(IDS, **GREEDY), expected)
    finally:
        del enabled.forward
        torch._dynamo.reset()
