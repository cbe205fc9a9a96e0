"""Decoder layers with weights of 4 bits: taken by kernels where they are torchao's, and kept as modules where not.

The kernels' stand-ins are plain PyTorch here, and so is torch's own product, but for tests on a GPU, which have
torchao's own weights; `tests/gpu/test_packed_weights.py` has the kernels.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import retrieval_attn as ra
from retrieval_attn.gpu import packed
from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.model.fused import attention_parts as fused_attending
from retrieval_attn.model.fused import layers as module
from retrieval_attn.model.fused import unpacking
from retrieval_attn.model.fused.layers import fused_layers
from retrieval_attn.model.quantization import held_bytes, int4_config, packed_weights
from tests.model.packed_weights import multiplied, quantise
from tests.model.test_fused_layers import launches_of, taken, trials_of
from tests.runner.graph_cases import CONFIG, Decoded
from tests.tiny_models import LAYERS, build_model, random_ids

pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cuda") is not None:
        return
    monkeypatch.setattr(module, "_runs_kernels", lambda model: True)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", multiplied)


def quantised(name: str) -> Any:
    """A tiny model that retrieves, bfloat16, the linear modules of its layers in 4 bits."""
    model = build_model(name).to(torch.bfloat16)
    for one in model.model.layers.modules():
        if isinstance(one, nn.Linear):
            quantise(one)
    return ra.enable(model, CONFIG.replace(prefill_chunk=4096))


@pytest.fixture
def llama() -> Any:
    return quantised("llama")


def test_prompts_are_read_by_copies(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of many rows never meet torch's product, short ones and steps do; the numbers stay."""
    ids = random_ids(1, 300)
    seen: list[int] = []

    def noted(numbers: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(numbers))
        return multiplied(numbers, *rest)

    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", noted)
    cache = ra.RetrievalCache(llama)
    with torch.no_grad():
        own = llama(ids, past_key_values=cache).logits
        assert not seen
        llama(ids[:, :5], past_key_values=cache)
        assert set(seen) == {5} and len(seen) == 7 * LAYERS
        monkeypatch.setattr(unpacking, "FROM_ROWS", 1000)
        expected = llama(ids, past_key_values=ra.RetrievalCache(llama)).logits
    assert set(seen) == {5, 300}
    assert float((own - expected).norm() / expected.norm()) < 0.01
    ra.disable(llama)
    assert all("forward" not in one.__dict__ for one in llama.modules())


def test_short_questions_run_in_kernels(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to KERNEL_ROWS rows, of any number of sequences; modules that kernels are compared with go their own way."""
    kernels: list[int] = []
    own: list[int] = []
    product = PackedWeights.product

    def counted(weights: PackedWeights, numbers: torch.Tensor) -> torch.Tensor:
        kernels.append(len(numbers))
        return product(weights, numbers)

    def noted(numbers: torch.Tensor, *rest: Any) -> torch.Tensor:
        own.append(len(numbers))
        return multiplied(numbers, *rest)

    monkeypatch.setattr(PackedWeights, "product", counted)
    monkeypatch.setattr(PackedWeights, "has_kernels", True)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", noted)
    expected, right = [], []
    with torch.no_grad():
        for rows, tokens in ((1, 1), (1, 40), (2, 32), (1, 65)):
            ids = random_ids(rows, tokens)
            expected.append(llama(ids, past_key_values=ra.RetrievalCache(llama)).logits)
        assert kernels == [rows for rows in (1, 40, 64) for _ in range(7 * LAYERS)] and not own
        kernels.clear()
        with unpacking.own_products():
            for rows, tokens in ((1, 1), (1, 40), (2, 32), (1, 65)):
                right.append(llama(random_ids(rows, tokens), past_key_values=ra.RetrievalCache(llama)).logits)
        assert own == [rows for rows in (1, 40, 64, 65) for _ in range(7 * LAYERS)]
        for one, other in zip(expected, right, strict=True):
            assert float((one - other).norm() / other.norm()) < 0.01
        own.clear()
        assert taken(llama, 3) == LAYERS and set(own) == {3} and not kernels


def test_the_copy_is_planned(llama: Any) -> None:
    shape = ra.plan(llama, context=100).shape
    largest = max(one.weight.numel() for one in llama.model.layers.modules() if isinstance(one, nn.Linear))
    assert shape.weight_bytes == held_bytes(llama) + 2 * largest and "a copy of one" in shape.weights_note


def test_what_autograd_follows_goes_the_modules_own_way(llama: Any) -> None:
    linear = llama.model.layers[0].mlp.up_proj
    numbers = torch.ones(200, llama.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    own = linear.forward.__wrapped__
    linear.forward._own = None  # the module's own is asked, not the copy
    with pytest.raises(TypeError, match="not callable"):
        linear(numbers)
    with torch.no_grad():
        assert torch.equal(linear(numbers), own(numbers.detach()))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3"])
def test_layers_are_taken_and_answer_alike(name: str, rows: int) -> None:
    """Biases (Qwen2), norms of heads (Qwen3), merged projections (Phi-3)."""
    model = quantised(name)
    ids = random_ids(rows, 5)
    assert taken(model, 17) == 0
    caches = [ra.RetrievalCache(model) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids, past_key_values=cache)
        expected = model(ids[:, :1], past_key_values=caches[0]).logits
        with fused_layers(model, rows) as count:
            own = model(ids[:, :1], past_key_values=caches[1]).logits
    assert count == LAYERS
    assert float((own - expected).norm() / expected.norm()) < 0.02
    parts: Any = module._parts(model.model.layers[0], rows)
    assert parts.feed is not None and parts.attending.query.kernels == parts.feed.gated.up.kernels == "packed_triton"


def test_another_order_of_numbers_is_seen(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that took the upper half of words first: every layer keeps its modules."""
    unpacked = packed.unpacked
    project = fused_attending.project

    def swapped(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(packed, "unpacked", lambda words: unpacked(words << 16 | (words >> 16 & 0xFFFF)))
            return project(*given)

    assert taken(llama) == LAYERS
    module._tried.clear()
    monkeypatch.setattr(fused_attending, "project", swapped)
    with caplog.at_level(logging.INFO, module.__name__):
        assert taken(llama) == 0
    assert "layers [0, 1] keep their modules: its key differs from that of its kernels" in caplog.text


def test_what_holds_its_weights_in_another_way_stays(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Inputs with a scale of their own, groups that are not where they should be, projections of two kinds."""
    first, second = llama.model.layers
    first.self_attn.o_proj.weight.act_pre_scale = torch.ones(64, dtype=torch.bfloat16)
    assert packed_weights(first.self_attn.o_proj) is None
    query = second.self_attn.q_proj
    own = packed_weights(query)
    assert own is not None
    query.weight = nn.Parameter(own.matrix)
    with caplog.at_level(logging.INFO, module.__name__):
        assert taken(llama) == 0
    assert "layers [0, 1] keep their modules: it is not made of a norm and projections of one known kind" in caplog.text
    second.mlp.gate_proj.weight.block_size = [1, 32]
    assert packed_weights(second.mlp.gate_proj) is None
    assert packed_weights(second.mlp) is None and packed_weights(query) is None


def test_plain_and_packed_matrices_in_one_layer(llama: Any) -> None:
    """An output that was left as it is (a mixed checkpoint)."""
    output = llama.model.layers[0].self_attn.o_proj
    own = packed_weights(output)
    assert own is not None
    output.weight = nn.Parameter(own.matrix)
    assert taken(llama) == taken(llama, 2) == LAYERS
    parts: Any = module._parts(llama.model.layers[0], 1)
    assert (parts.output.kernels, parts.attending.query.kernels) == ("products_triton", "packed_triton")


def test_weights_that_moved_are_tried_again(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of torchao's has no address of its own: those of its parts count."""
    trials = trials_of(monkeypatch)
    assert taken(llama) == taken(llama) == LAYERS and trials == [0, 1]
    weight = llama.model.layers[1].mlp.up_proj.weight
    weight.qdata = weight.qdata.clone()
    assert taken(llama) == LAYERS and trials == [0, 1, 1]


def test_kernels_of_each_number_of_rows_are_tried(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, up to 8 and up to 16: once each."""
    trials = trials_of(monkeypatch)
    for rows in (1, 2, 8, 9, 16, 1):
        assert taken(llama, rows) == LAYERS
    assert trials == [0, 1] * 3


def test_kernels_are_loaded_without_a_step(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = launches_of(monkeypatch)
    module.load_layer_kernels(llama)
    assert seen == ["project", "add_product", "gated", "add_product"]


def test_kernels_of_questions_are_loaded(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each matrix of a layer of each kind, as its questions of so many tokens launch them."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(
        PackedWeights, "product", lambda weights, numbers: found.append((len(numbers), weights.shape[0]))
    )
    module.load_question_kernels(llama, 8)
    assert not found  # without kernels there is nothing to load
    monkeypatch.setattr(PackedWeights, "has_kernels", True)
    module.load_question_kernels(llama, 8)
    layer = llama.model.layers[0].modules()
    assert sorted(found) == sorted((8, one.out_features) for one in layer if isinstance(one, nn.Linear))


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_decoders")
def test_short_questions_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of torchao, multiplied in the kernel: logits as by torch's own product, which is not called."""
    from torchao.quantization import quantize_

    model = build_model("llama").to("cuda", torch.bfloat16)
    quantize_(model.model.layers, int4_config(torch.device("cuda")))
    ra.enable(model, CONFIG.replace(prefill_chunk=4096))
    for tokens in (1, 8, 9, 17, 64):
        ids = random_ids(1, tokens).cuda()
        with torch.no_grad(), monkeypatch.context() as patch:
            with unpacking.own_products():
                right = model(ids, past_key_values=ra.RetrievalCache(model)).logits
            patch.setattr(torch.ops.aten, "_weight_int4pack_mm", None)
            own = model(ids, past_key_values=ra.RetrievalCache(model)).logits
        assert float((own - right).norm() / right.norm()) < 0.03


@pytest.mark.cuda
@pytest.mark.usefixtures("fresh_decoders")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3"])
def test_torchaos_own_weights_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised by torchao: all layers are taken, and steps as a graph give what the model's modules give."""
    from torchao.quantization import quantize_

    model = build_model(name).to("cuda", torch.bfloat16)
    quantize_(model.model.layers, int4_config(torch.device("cuda")))
    ra.enable(model, CONFIG.replace(prefill_chunk=4096))
    for rows in (1, 3, 16):
        assert taken(model, rows) == LAYERS
    ids = random_ids(2, 300).cuda()
    with torch.no_grad():
        copied = model(ids, past_key_values=ra.RetrievalCache(model)).logits
        first = model(ids[:, :1], past_key_values=ra.RetrievalCache(model)).logits
        with fused_layers(model, 2):
            fused = model(ids[:, :1], past_key_values=ra.RetrievalCache(model)).logits
        monkeypatch.setattr(unpacking, "FROM_ROWS", 1000)
        right = model(ids, past_key_values=ra.RetrievalCache(model)).logits
    assert float((copied - right).norm() / right.norm()) < 0.03
    assert float((fused - first).norm() / first.norm()) < 0.03
    decoded = Decoded(model, "auto")
    assert decoded.steps.replays or "longrope" in str(decoded.steps.reason)
