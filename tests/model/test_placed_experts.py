"""Models with experts in host memory: moves between requests, copies during prefill, and the plan that decides."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig

import retrieval_attn as ra
from retrieval_attn.gpu import expert_blocks
from retrieval_attn.gpu.expert_blocks import ExpertBlocks, PlacedExperts
from retrieval_attn.memory.routed import fewest_on_host
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.model.expert_loading import ExpertsConfig, ExpertsQuantizer, FloatsQuantizer, ReadConfig
from retrieval_attn.model.experts import has_packed_experts
from retrieval_attn.model.identity import weights_digest
from retrieval_attn.model.loading import load_model
from retrieval_attn.model.placed_experts import BUFFER, expert_buffer
from retrieval_attn.model.quantization import held_bytes, int4_config
from retrieval_attn.model.weights import weight_state
from retrieval_attn.runner.ready import move_experts
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.model.test_models import ALL, TOLERANCE, worst
from tests.model.test_packed_experts import FAMILIES, build, logits_of, pack, unpack
from tests.runner.graph_cases import CONFIG, Decoded
from tests.tiny_models import random_ids

GIB = 1 << 30


def blocks_of(model: nn.Module) -> list[ExpertBlocks]:
    """Blocks of the first matrix of each layer."""
    buffer = expert_buffer(model)
    assert buffer is not None
    return [layer[0] for layer in buffer.layers]


def visit(model: nn.Module, seed: int) -> None:
    """Count random visits that make most experts of host memory the hottest."""
    for layer in blocks_of(model):
        generator = torch.Generator().manual_seed(seed)
        layer.counts.copy_(torch.randint(0, 10000, layer.counts.shape, generator=generator, dtype=torch.int32))


def test_moves_change_no_weights() -> None:
    """Neither for cached keys nor for saved contexts; another number in an expert does for these."""
    model = pack(build("gpt_oss"), "placed")
    state, digest = weight_state(model), weights_digest(model)
    moved = 0
    for seed in range(4):
        visit(model, seed)
        moved += move_experts(model)
    assert moved and weight_state(model) == state and weights_digest(model) == digest
    other = pack(build("gpt_oss"), "placed")
    assert weights_digest(other) == digest
    blocks_of(other)[1].block(3)[0] ^= 1
    blocks_of(other)[1].take_sample()
    assert weights_digest(other) != digest


@pytest.mark.parametrize("name", FAMILIES)
def test_moved_experts_give_the_same_logits(name: str) -> None:
    """For a step, a question and a chunk; with the bytes of two experts swapped they differ."""
    model = pack(build(name), "placed")
    texts = [random_ids(1, tokens, seed=tokens) for tokens in (1, 5, 90)]
    expected = [logits_of(model, ids) for ids in texts]
    moved = 0
    for seed in range(4):
        visit(model, seed)
        moved += move_experts(model)
        for ids, logits in zip(texts, expected, strict=True):
            assert worst(logits_of(model, ids), logits) <= TOLERANCE
    assert moved
    blocks = blocks_of(model)[0]
    blocks.host[[0, 1]] = blocks.host[[1, 0]]
    assert worst(logits_of(model, texts[2]), expected[2]) > 100 * TOLERANCE


def test_a_layer_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks a prompt has, since prefill walks it layer by layer."""
    model, copied = pack(build("gpt_oss"), "placed"), []
    real = ExpertBlocks.block

    def noted(self: ExpertBlocks, expert: int) -> torch.Tensor:
        if self.is_on_host(expert):
            copied.append((id(self), expert))
        return real(self, expert)

    monkeypatch.setattr(ExpertBlocks, "block", noted)
    ra.enable(model, ALL, prefill_chunk=128)
    with torch.no_grad():
        logits = model(random_ids(1, 512), past_key_values=ra.RetrievalCache(model, ALL), use_cache=True).logits
    ra.disable(model)
    assert 0 < len(copied) == len(set(copied))
    assert worst(logits[:, -1:], logits_of(model, random_ids(1, 512))[:, -1:]) <= TOLERANCE


def test_a_read_goes_on_during_moves() -> None:
    """The thread that moves experts may wait for the one that reads; products in place have the same logits."""
    model, ids = pack(build("gpt_oss"), "placed"), random_ids(1, 150)
    expected, buffer = logits_of(model, ids), expert_buffer(model)
    assert buffer is not None
    began, over = threading.Event(), threading.Event()

    def settle() -> None:
        began.set()
        assert over.wait(60)

    blocks_of(model)[0].counts.copy_(torch.tensor([0, 9000, 9000, 9000]))
    mover = threading.Thread(target=buffer.move_hottest, args=(9, settle))
    mover.start()
    try:
        assert began.wait(60)
        assert worst(logits_of(model, ids), expected) <= TOLERANCE
    finally:
        over.set()
        mover.join()
    assert worst(logits_of(model, ids), expected) <= TOLERANCE and blocks_of(model)[0].is_on_host(0)


def test_experts_move_once_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the counts of its tokens, which a read, a question and each step add to."""
    monkeypatch.setattr(expert_blocks, "CERTAIN", 0.0)
    model = pack(build("qwen3_moe"), "placed")
    for layer in blocks_of(model):
        layer.counts[0] = -100000
    context = ra.Context(model, number_tokenizer(97), CONFIG)
    context.read(random_ids(1, 300)[0].tolist(), progress=False)
    assert all(layer.is_on_host(0) for layer in blocks_of(model))
    assert all(int(layer.counts[1:].sum()) > 200 for layer in blocks_of(model))


def test_memory_of_a_loaded_model() -> None:
    """Experts in host memory are not counted, and the buffer of a layer is."""
    model = pack(build("gpt_oss"), "placed")
    placed = [one for layer in expert_buffer(model).layers for one in layer]  # type: ignore[union-attr]
    whole = held_bytes(unpack(model)) - sum(4 * one.shape[0] * one.shape[1] for one in placed)
    own = sum(one.card.nbytes + one.table.nbytes + one.counts.nbytes for one in placed)
    assert held_bytes(model) == whole + own  # the copy has the buffer, too
    assert getattr(model, BUFFER).nbytes == 3 * sum(one.layout.nbytes for one in placed[:2])
    other = pack(build("gpt_oss"), "tiles")
    assert expert_buffer(other) is None and move_experts(other) == 0


def gpt_oss_120b(folder: Path) -> str:
    """The config of GPT-OSS-120B, as its checkpoint has it."""
    config = GptOssConfig(num_hidden_layers=36, num_local_experts=128, dtype="bfloat16", max_position_embeddings=131072)
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(saved))
    return str(folder)


def test_the_plan_puts_experts_into_host_memory(tmp_path: Path) -> None:
    """GPT-OSS-120B's shape with 128K tokens in 24 GiB, with codes of its keys on the GPU; all of it fits 80 GiB."""
    source = gpt_oss_120b(tmp_path)
    found = ra.plan(source, context=131072, gpu_memory="24GiB", host_memory="64GiB")
    routed = found.shape.routed
    assert found.fits and routed is not None and found.device_bytes <= 24 * GIB, found
    assert found.config.index == "device-auto"
    assert 20 <= routed.count - routed.on_host <= 45
    expert = 13_512_960
    assert routed.host_bytes == expert * 36 * routed.on_host
    assert next(one.bytes for one in found.host if one.name == "experts") == routed.host_bytes
    one_more = found.device_bytes + expert * 35
    assert one_more > 24 * GIB - (1 << 28), "another expert of each layer would fit"
    assert f"{routed.on_host} of 128 in each of 36 layers" in str(found)
    assert not ra.plan(source, context=131072, gpu_memory="24GiB", host_memory="40GiB").fits
    whole = ra.plan(source, context=131072, gpu_memory="80GiB", host_memory="64GiB")
    assert whole.fits and whole.shape.routed is not None and not whole.shape.routed.on_host
    assert not any(one.name == "experts" for one in whole.host)
    for one, other in zip(found.speeds, whole.speeds, strict=True):
        assert one.retrieval_ms is not None and other.retrieval_ms is not None
        bus = 1000 * routed.bus_bytes / (38e9 if one.gpu == "H100 SXM" else 19e9)
        assert 0.8 * bus < one.retrieval_ms - other.retrieval_ms <= bus, (one, other, bus)


def test_other_experts_stay_in_gpu_memory(tmp_path: Path) -> None:
    """Those in 16 bits, of a model that several GPUs share, and of one that fits."""
    source = gpt_oss_120b(tmp_path)
    two = ra.plan(source, context=131072, gpu_memory="48GiB", host_memory="64GiB", gpus=2)
    assert two.shape.routed is not None and not two.shape.routed.on_host
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(source).routed is None
    assert not ra.plan(source, context=131072, gpu_memory="24GiB", host_memory="512GiB").fits
    quantized = model_shape(source, None, "int4").routed
    assert quantized is not None and quantized.count == 128
    assert fewest_on_host(quantized, 0) == 128 and fewest_on_host(quantized, 1 << 50) == 1


def test_loading_allocates_no_experts_ahead() -> None:
    """transformers would allocate all experts on the GPU, in 16 bits, before it loads the first one."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = build("qwen3_moe")
    weights = dict(model.named_parameters())
    expert = next(name for name in weights if name.endswith("down_proj") and "experts" in name)
    device = torch.device("cpu")
    sizes = {
        count: ExpertsQuantizer(
            ExpertsConfig(int4_config(device), device="cpu", host_experts=count), pre_quantized=False
        ).param_element_size(model, expert, weights[expert])
        for count in (0, 2)
    }
    assert sizes[0] > 0 and sizes[2] == 0
    read = FloatsQuantizer(ReadConfig(device="cpu", host_experts=2), pre_quantized=True)
    assert read.param_element_size(model, expert, weights[expert]) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_a_card_reads_experts_in_host_memory(name: str, tmp_path: Path) -> None:
    """Prompts by copies, questions and captured steps in place; a replay is as before once experts have moved."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    build(name).save_pretrained(tmp_path)
    options: dict[str, Any] = {"device": "cuda", "quantization": "int4", "attn_implementation": "eager"}
    model = load_model(tmp_path, **options, host_experts=2)
    held = list(filter(has_packed_experts, model.modules()))
    assert held and all(type(one.down_proj.held) is PlacedExperts for one in held)
    assert all(layer.seen.is_cuda and not layer.host.is_cuda for layer in blocks_of(model))
    whole = unpack(model)
    for tokens in (1, 5, 60, 200):
        ids = random_ids(2, tokens, seed=tokens).cuda()
        expected = logits_of(whole, ids).float()
        for seed in range(3):
            visit(model, seed)
            move_experts(model)
            assert float((logits_of(model, ids).float() - expected).norm() / expected.norm()) < 0.03
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == 12 and replayed.difference(eager) <= 0.1
    ra.disable(model)
