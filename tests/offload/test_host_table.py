"""An input embedding in host memory: which models have one, the same answers, and what is counted."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.shape import model_shape, with_embedding
from retrieval_attn.model.placement import input_device, is_host_table, mark_host_table
from retrieval_attn.model.quantization import held_bytes
from retrieval_attn.offload.managed import move_table
from tests.memory.test_plan import llama3_8b, tiny
from tests.runner.graph_cases import CONFIG, Decoded
from tests.tiny_models import build_model, random_ids

TABLE = 128256 * 4096 * 2


def test_auto_moves_it_where_weights_take_half_of_the_gpu() -> None:
    shape = model_shape(llama3_8b())
    for limit, moved in ((shape.weight_bytes * 2, 0), (shape.weight_bytes * 2 - 1, TABLE)):
        found = with_embedding(shape, "auto", limit)
        assert found.host_table_bytes == moved and found.weight_bytes == shape.weight_bytes - moved
    assert with_embedding(shape, "device", 1).host_table_bytes == 0
    assert with_embedding(shape, "host", 1 << 50).host_table_bytes == TABLE


def test_a_table_that_the_output_has_too_stays() -> None:
    shape = model_shape(tiny(tie_word_embeddings=True))
    assert with_embedding(shape, "auto", 1) == shape
    with pytest.raises(ConfigError, match="multiplies by the same table"):
        with_embedding(shape, "host", 1)


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_is_no_place_is_refused(gpus: int) -> None:
    """By the plan and by a model on a CPU, where nothing is planned; several GPUs keep the table."""
    with pytest.raises(ConfigError, match="embedding must be one of auto, device, host; got 'gpu'"):
        ra.plan(tiny(), context=64, gpus=gpus, embedding="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="embedding must be one of"):
        ra.LLM("bundled", device="cpu", embedding=1)
    with pytest.raises(ConfigError, match="needs a model on one GPU"):
        ra.plan(tiny(), context=64, gpus=2, embedding="host")


def test_the_plan_tells_both_sides() -> None:
    """One GPU only: what several share lies where transformers put it."""
    moved, whole = (ra.plan(llama3_8b(), embedding=place) for place in ("auto", "device"))
    assert whole.device_bytes - moved.device_bytes == moved.host_bytes - whole.host_bytes == TABLE
    assert moved.full_attention.floor_ms == whole.full_attention.floor_ms
    assert ra.plan(llama3_8b(), gpus=2).shape.host_table_bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_cannot_move_stays_and_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A model on the CPU; one whose output has the same table (Gemma)."""
    model: Any = build_model(name)
    weight = model.get_input_embeddings().weight
    with caplog.at_level(logging.WARNING):
        assert not move_table(model)
    assert model.get_input_embeddings().weight is weight
    assert "the input embedding stays on the GPU: " in caplog.text


def test_a_mark_is_of_one_place() -> None:
    """Copied or moved, a table is as others again."""
    model: Any = build_model("llama")
    weight, whole = model.get_input_embeddings().weight, held_bytes(model)
    mark_host_table(weight)
    assert is_host_table(weight) and held_bytes(model) == whole - weight.nbytes
    assert model_shape(model).host_table_bytes == weight.nbytes
    assert not is_host_table(copy.deepcopy(model).get_input_embeddings().weight)
    model.get_input_embeddings().half()
    assert not is_host_table(model.get_input_embeddings().weight)


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_decoders")
def test_a_gpu_reads_its_rows() -> None:
    """The table leaves the GPU; logits and steps, eager and as a graph, stay as they were to the bit."""
    model: Any = build_model("llama")
    wide = torch.nn.Embedding(1 << 16, model.config.hidden_size)
    with torch.no_grad():
        wide.weight[: model.config.vocab_size] = model.get_input_embeddings().weight
    model.set_input_embeddings(wide)
    model = model.to("cuda", torch.bfloat16)
    other = ra.enable(copy.deepcopy(model), CONFIG)
    values = model.get_input_embeddings().weight.detach().cpu()
    held = torch.cuda.memory_allocated()
    assert move_table(model)
    assert torch.cuda.memory_allocated() <= held - values.nbytes
    table = model.get_input_embeddings().weight
    assert table.device.type == "cuda" and is_host_table(table) and torch.equal(table.cpu(), values)
    assert input_device(model) == model.device == table.device
    ra.enable(model, CONFIG)
    ids = random_ids(2, 40).cuda()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
        assert torch.equal(copy.deepcopy(model)(ids).logits, other(ids).logits)
    assert Decoded(model, True).difference(Decoded(other, True)) == 0
    assert not is_host_table(copy.deepcopy(model).get_input_embeddings().weight)
