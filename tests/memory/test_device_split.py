"""The plan for several GPUs: hand sums for Llama-3-8B, and what cannot be split."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError, UnsupportedModelError
from retrieval_attn.memory.device import DEVICE_RESERVE
from retrieval_attn.memory.plan import HOST_RESERVE, plan
from retrieval_attn.memory.shape import ModelShape, model_shape, part_of
from tests.memory.test_plan import llama3_8b
from tests.tiny_models import build_model, tiny_model

TABLE = 128256 * 4096 * 2


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Llama-3-8B in bfloat16: 32 layers, 32 query and 8 key-value heads, two tables of 128,256 rows."""
    return model_shape(llama3_8b())


def test_layers_are_whole_and_one_gpu_has_a_table(shape: ModelShape) -> None:
    """A layer is 218,112,000 parameters; 3 GPUs of 32 layers: 11 of them. One GPU has all."""
    assert part_of(shape, 1, "layers") is part_of(shape, 1, "heads") is shape
    part = part_of(shape, 3, "layers")
    assert part.layers == part.full_layers == 11
    assert part.weight_bytes == pytest.approx(11 * 218_112_000 * 2 + TABLE, abs=3000)  # the final norm is spread
    assert part.kv_layer_bytes == shape.kv_layer_bytes


def test_heads_are_divided_and_the_embedding_is_not(shape: ModelShape) -> None:
    part = part_of(shape, 2, "heads")
    assert (part.layers, part.q_heads, part.kv_heads, part.mlp_width) == (32, 16, 4, 7168)
    assert part.weight_bytes == TABLE + (shape.weight_bytes - TABLE) // 2
    assert part.hidden == shape.hidden


def test_two_gpus_hold_what_one_cannot(shape: ModelShape) -> None:
    """16 GiB cards: one is too small for the weights alone, two are enough either way."""
    config = llama3_8b()
    one = plan(config, gpu_memory="16GiB", host_memory="1TiB", embedding="device")
    hidden = next(item.bytes for item in one.host if item.name == "prefill: hidden states")
    assert not one.fits
    for split, processes in (("layers", 1), ("heads", 2)):
        two = plan(config, gpu_memory="16GiB", host_memory="1TiB", gpus=(2, split))
        assert two.fits, two.reasons
        assert two.device_bytes < one.device_bytes
        assert "prefill: hidden states" not in {item.name for item in two.host}
        assert two.host_bytes - (one.host_bytes - hidden) == (processes - 1) * HOST_RESERVE
        assert two.largest_context > 131072
        assert f"2 GPUs that share {split}" in str(two)
        assert "fullest GPU" in plan(config, gpu_memory="4GiB", host_memory="1TiB", gpus=(2, split)).reasons[0]
        kv = next(item.bytes for item in two.device if item.name == "prefill: KV of one layer")
        assert kv == 131072 * 4096 // (2 if split == "heads" else 1)
        assert two.decode_bytes > two.device[0].bytes + DEVICE_RESERVE


def test_heads_read_at_once_and_layers_in_turn(shape: ModelShape) -> None:
    one = plan(tiny_model("llama"))
    layers, heads = (plan(tiny_model("llama"), gpus=(2, split)) for split in ("layers", "heads"))
    assert layers.full_attention.floor_ms == one.full_attention.floor_ms
    assert heads.full_attention.floor_ms < one.full_attention.floor_ms


@pytest.mark.parametrize(
    ("gpus", "split", "words"),
    [
        (0, "layers", ">= 1"),
        (True, "heads", ">= 1"),
        (2, "experts", "layers, heads"),
        (33, "layers", "gpus=32"),
        (3, "heads", "32 query and 8 key-value heads"),
    ],
)
def test_what_cannot_be_split_is_refused(shape: ModelShape, gpus: int, split: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        part_of(shape, gpus, split)


@pytest.mark.parametrize("name", ["phi3", "gpt_oss"])
def test_models_whose_ranks_would_hold_all_heads(name: str) -> None:
    """Phi-3's plan gathers the heads, GPT-OSS has none for attention: every rank would keep every key."""
    with pytest.raises(ConfigError, match="all heads"):
        plan(tiny_model(name), gpus=(2, "heads"))
    assert ra.plan(tiny_model(name), gpus=2).gpus == 2


def shared_by(name: str, ranks: int) -> Any:
    """A model that says it is shared by so many ranks; nothing is computed with it."""
    model = build_model(name)
    model._device_mesh = SimpleNamespace(size=lambda: ranks)
    return model


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    """Two key-value heads: two ranks are right, three would get pieces of heads."""
    ra.RetrievalCache(shared_by("llama", 2))
    with pytest.raises(UnsupportedModelError, match="2 key-value heads, which 3 ranks"):
        ra.RetrievalCache(shared_by("llama", 3))


def test_ranks_that_hold_all_heads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ra.RetrievalCache(shared_by("phi3", 5))
        ra.RetrievalCache(shared_by("phi3", 5))
    own = [record.message for record in caplog.records if record.name.startswith("retrieval_attn")]
    assert [message.partition(":")[0] for message in own] == ["phi3"]
