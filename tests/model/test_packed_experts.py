"""Models whose experts are in 4 bits, against the same models with copies of the same numbers.

Tiles are the form of a GPU, here in plain PyTorch; `tests/gpu/test_packed_experts.py` has the kernel.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.gpu import packed_experts
from retrieval_attn.gpu.expert_blocks import PlacedExperts
from retrieval_attn.gpu.packed_experts import PackedExperts, packed_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.model import experts as module
from retrieval_attn.model.experts import (
    ExpertWeights,
    StoredExperts,
    expert_parameters,
    has_packed_experts,
    matrix_shape,
    quantized_experts,
    tiled_experts,
    use_packed_experts,
)
from retrieval_attn.model.layers import experts_of_one_token
from retrieval_attn.model.loading import load_model
from retrieval_attn.model.quantization import held_bytes, unpacked_bytes
from tests.model.test_hybrid import new_model
from tests.model.test_models import ALL, TOLERANCE, decode_pieces, steps, worst
from tests.runner.graph_cases import CONFIG, Decoded
from tests.tiny_models import build_model, random_ids

CPU = torch.device("cpu")
FORMS: dict[str, Any] = {
    "tiles": tiled_experts, "stored": quantized_experts, "placed": functools.partial(tiled_experts, on_host=3),
}  # fmt: skip
SIZES: dict[str, Any] = {"hidden_size": 96, "attn_implementation": "eager"}


def build(name: str) -> Any:
    """A tiny model whose sizes can be packed."""
    if name == "mixtral":
        sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97}
        torch.manual_seed(7)
        config = MixtralConfig(
            hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2,
            max_position_embeddings=4096, sliding_window=None, **sizes,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if name.startswith("qwen3_5"):
        return new_model(name, hidden_size=96)
    return build_model(name, hidden_size=96)


FAMILIES = ["qwen3_moe", "gpt_oss", "gemma4_moe", "mixtral", "qwen3_5_moe_text"]


def pack(model: Any, form: str) -> Any:
    """Hold a model's experts in 4 bits, as a model that is loaded."""
    with torch.no_grad():
        for one in model.modules():
            for name in expert_parameters(one) or ():
                weight = FORMS[form](getattr(one, name).detach(), transposed=one.is_transposed, device=CPU)
                setattr(one, name, nn.Parameter(weight, requires_grad=False))
    use_packed_experts(model)
    return model


def unpack(model: Any) -> Any:
    """Return a copy of a model with whole weights, of the same numbers, multiplied by transformers' own loop."""
    whole = copy.deepcopy(model)
    for one in filter(has_packed_experts, whole.modules()):
        for name, weight in one._parameters.items():
            if type(weight) is ExpertWeights:
                setattr(one, name, nn.Parameter(weight.copies(0, len(weight)).contiguous(), requires_grad=False))
        one.config._experts_implementation = "eager"
    assert not any(map(has_packed_experts, whole.modules()))
    return whole


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


@pytest.fixture(params=[(name, form) for name in FAMILIES for form in FORMS], ids="-".join)
def packed(request: pytest.FixtureRequest) -> Iterator[Any]:
    name, form = request.param
    model = pack(build(name), form)
    yield model
    ra.disable(model)


@pytest.mark.parametrize("tokens", [1, 5, 90], ids=["step", "question", "chunk"])
def test_logits_are_those_of_the_same_numbers(packed: Any, tokens: int) -> None:
    """By one product for all experts, and by copies of a few at a time; other experts' numbers give other logits."""
    whole, ids = unpack(packed), random_ids(2 if tokens < 90 else 1, tokens, seed=tokens)
    expected = logits_of(whole, ids)
    assert worst(logits_of(packed, ids), expected) <= TOLERANCE
    swapped = next(filter(lambda one: "Experts" in type(one).__name__, whole.modules()))
    with torch.no_grad():
        swapped.down_proj[[0, 1, 2, 3]] = swapped.down_proj[[1, 0, 3, 2]]
    assert worst(logits_of(whole, ids), expected) > 100 * TOLERANCE


def test_any_other_function_gets_copies(packed: Any) -> None:
    """transformers' own ways to multiply experts; they find an index of one expert and all of them."""
    ids = random_ids(1, 20)
    expected = logits_of(packed, ids)
    for way in ("eager", "grouped_mm", "batched_mm"):
        packed.set_experts_implementation(way)
        assert worst(logits_of(packed, ids), expected) <= TOLERANCE
    packed.set_experts_implementation(module.PACKED)
    layer = next(filter(has_packed_experts, packed.modules()))
    hidden = torch.randn(3, 96, requires_grad=True)
    chosen, weights = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)
    layer(hidden, chosen, weights).sum().backward()
    assert hidden.grad is not None and float(hidden.grad.abs().sum()) > 0


def test_a_chunk_is_multiplied_by_any_number_of_copies(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert at a time, or all; experts without tokens are left out."""
    ids = random_ids(1, 80)
    expected = logits_of(packed, ids)
    monkeypatch.setattr(packed_experts, "COPIED_WEIGHTS", 1)
    assert worst(logits_of(packed, ids), expected) <= TOLERANCE
    layer = next(filter(has_packed_experts, packed.modules()))
    hidden, weights = torch.randn(70, 96), torch.ones(70, 1)
    chosen = torch.full((70, 1), 2)
    with torch.no_grad():
        few = torch.cat([layer(hidden[at : at + 7], chosen[:7], weights[:7]) for at in range(0, 70, 7)])
        torch.testing.assert_close(layer(hidden, chosen, weights), few, rtol=1e-4, atol=1e-5)


def test_retrieval_equals_eager_attention(packed: Any) -> None:
    """With the same packed experts, layer by layer too; verify says so."""
    ids = random_ids(1, 100)
    packed.set_attn_implementation("eager")
    expected = steps(packed, DynamicCache(config=packed.config), decode_pieces(ids, 92))
    for chunk in (4096, 37):
        ra.enable(packed, ALL, prefill_chunk=chunk)
        got = steps(packed, ra.RetrievalCache(packed, ALL), decode_pieces(ids, 92))
        ra.disable(packed)
        assert worst(got, expected) <= 2 * TOLERANCE
    report = ra.verify(packed)
    assert report.ok, report


def test_rows_are_as_alone(packed: Any) -> None:
    ids = random_ids(6, 12, seed=3)
    together = logits_of(packed, ids)
    for row in range(6):
        assert worst(logits_of(packed, ids[row : row + 1]), together[row : row + 1]) <= TOLERANCE


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_captured(name: str) -> None:
    """No value of the router is read on the CPU, and a replay multiplies the experts of its own token."""
    model = pack(build(name), "tiles")
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == 12
    assert replayed.difference(eager) <= 2e-5
    ra.disable(model)


def test_a_captured_step_keeps_the_function() -> None:
    """Copies of a token's experts are for weights that are not packed."""
    model = pack(build("qwen3_moe"), "tiles")
    with experts_of_one_token(model.to(torch.bfloat16), 1):
        assert model.config._experts_implementation == module.PACKED


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("torchao", reason="torchao is not installed")
    found = {}
    for name in FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        build(name).save_pretrained(found[name])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_quantized_while_they_are_loaded(name: str, folders: dict[str, Path]) -> None:
    """Those of the checkpoint, in their order; the bytes are what the numbers take."""
    model = load_model(folders[name], device="cpu", quantization="int4")
    whole = load_model(folders[name], device="cpu")
    held = list(filter(has_packed_experts, model.modules()))
    assert held and model.config.get_text_config()._experts_implementation == module.PACKED
    for one, other in zip(held, filter(expert_parameters, whole.modules()), strict=True):
        for parameter in expert_parameters(other) or ():
            found, exact = getattr(one, parameter), getattr(other, parameter).detach()
            assert type(found.held) is StoredExperts and found.shape == exact.shape
            errors = (found.copies(0, len(found)) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            assert float(errors.max()) < 0.1  # of each expert: those of a neighbour would be off by more than 1
    numbers = sum(
        weight.numel() for one in held for weight in one._parameters.values() if type(weight) is ExpertWeights
    )
    saved = held_bytes(whole) - held_bytes(model)
    assert saved >= numbers * (4 - 5 / 8)
    with pytest.raises(ValueError, match="not serializable|cannot be saved|save"):
        model.save_pretrained(folders[name].parent / "never")


def test_sizes_without_a_kernel_stay_whole(tmp_path: Path) -> None:
    """A hidden size of no whole groups: experts are loaded as they are, and counted so."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    build_model("qwen3_moe").save_pretrained(tmp_path)  # rows of 48
    model = load_model(tmp_path, device="cpu", quantization="int4")
    assert not any(map(has_packed_experts, model.modules()))
    assert "experts" not in ra.plan(str(tmp_path), context=100, quantization="int4").shape.weights_note


def test_experts_without_gates_are_packed() -> None:
    """Nemotron-H: one matrix and an activation before the second."""
    kinds: dict[str, Any] = {"layers_block_type": ["moe", "attention"], "num_hidden_layers": 2}
    sizes: dict[str, Any] = {"hidden_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "vocab_size": 97}
    torch.manual_seed(1)
    config = NemotronHConfig(
        **kinds, **sizes, num_experts_per_tok=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16
    )
    model = pack(AutoModelForCausalLM.from_config(config).eval(), "stored")
    ids = random_ids(1, 30)
    assert any(map(has_packed_experts, model.modules()))
    assert worst(logits_of(model, ids), logits_of(unpack(model), ids)) <= TOLERANCE


def test_the_weights_move_and_are_described() -> None:
    model = pack(build("qwen3_moe"), "tiles")
    weight = next(one for one in model.parameters() if type(one) is ExpertWeights)
    assert "PackedExperts" in repr(weight) and weight.to(torch.bfloat16).dtype == torch.bfloat16
    parts, made = weight.__tensor_flatten__()
    again = ExpertWeights.__tensor_unflatten__({name: getattr(weight, name) for name in parts}, made)
    assert torch.equal(again.copies(1, 2), weight.copies(1, 2)) and again.shape == weight.shape
    moved: Any = weight.to("meta")
    assert type(moved.held) is PackedExperts and moved.device.type == "meta"
    assert unpacked_bytes(model) == 2 * 4 * 64 * 96
    stored = pack(build("qwen3_moe"), "stored")
    with pytest.raises(ra.ConfigError, match="device='cuda:0'"):
        next(one for one in stored.parameters() if type(one) is ExpertWeights)._copied("cuda:0", None)
    with pytest.raises(IndexError, match="not in 0 .. 3"):
        packed_down: Any = next(filter(has_packed_experts, stored.modules())).down_proj
        packed_down.held.products(torch.ones(1, 32), torch.tensor([[4]]), None)


def qwen3_30b() -> Any:
    """The shape of Qwen3-30B-A3B."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    routed: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    positions: dict[str, Any] = {"max_position_embeddings": 262144, "vocab_size": 151936, "dtype": "bfloat16"}
    return Qwen3MoeConfig(**sizes, **heads, **routed, **positions, tie_word_embeddings=False)


def gpt_oss_20b() -> Any:
    """The shape of GPT-OSS-20B."""
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32, dtype="bfloat16", max_position_embeddings=131072)


def gemma4_26b() -> Any:
    """The shape of the decoder of Gemma-4-26B-A4B."""
    sizes: dict[str, Any] = {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30}
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
    wide: dict[str, Any] = {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    routed: dict[str, Any] = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    none: dict[str, Any] = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "dtype": "bfloat16"}
    positions: dict[str, Any] = {"max_position_embeddings": 262144, "sliding_window": 1024}
    return Gemma4TextConfig(**sizes, **heads, **wide, **routed, **none, **positions, enable_moe_block=True)


@pytest.mark.parametrize(("shape", "most"), [(qwen3_30b, 22), (gpt_oss_20b, 17), (gemma4_26b, 21)])
def test_the_plan_fits_24_gib(shape: Any, most: int) -> None:
    """128K tokens of context; whole experts do not fit."""
    found = ra.plan(shape(), context=131072, quantization="int4", gpu_memory="24GiB")
    assert found.fits and found.device_bytes < most << 30, found
    assert "experts at 4 bits" in found.shape.weights_note
    assert found.shape.active_parameters < found.shape.parameters / 4
    whole = ra.plan(shape(), context=131072, quantization="int8", gpu_memory="24GiB")
    assert not whole.fits


def test_the_plan_counts_what_is_held() -> None:
    """To 1 % of tiles of the same model, but for linear layers, which are whole here."""
    model = build("gpt_oss").to(torch.bfloat16)
    wanted = held_bytes(pack(copy.deepcopy(model), "tiles"))
    held = sum(
        packed_bytes(matrix_shape(one, name), 64) - 2 * getattr(one, name).numel()
        for one in model.modules()
        for name in expert_parameters(one) or ()
    )
    assert held_bytes(model) + held == wanted


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as GPT-OSS's: experts in blocks of 32 numbers of E2M1, all else whole."""
    if importlib.util.find_spec("kernels") is not None:
        pytest.skip("the package kernels is installed")
    folder = tmp_path_factory.mktemp("mxfp4")
    build("gpt_oss").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_stays_in_four_bits(mxfp4: Path) -> None:
    """Without a loss: transformers' own bfloat16 copies have the same numbers."""
    model = load_model(mxfp4, device="cpu")
    whole = AutoModelForCausalLM.from_pretrained(mxfp4, dtype=torch.float32).float()
    held = list(filter(has_packed_experts, model.modules()))
    for one, other in zip(held, filter(expert_parameters, whole.modules()), strict=True):
        for name in expert_parameters(other) or ():
            weight = getattr(one, name)
            assert torch.equal(weight.copies(0, len(weight)), getattr(other, name))
    ids = random_ids(1, 40)
    assert worst(logits_of(model, ids), logits_of(whole, ids)) <= TOLERANCE
    assert worst(logits_of(model, ids[:, :3]), logits_of(whole, ids[:, :3])) <= TOLERANCE
    assert held_bytes(model) < held_bytes(whole) / 2
    with pytest.raises(ra.ConfigError, match=r"quantised already \(mxfp4\)"):
        load_model(mxfp4, device="cpu", quantization="int4")


def test_mxfp4_on_a_gpu_is_what_the_file_has(mxfp4: Path) -> None:
    """Tiles of the same numbers, exact in bfloat16; the plan counts them, and not the file's bytes."""
    tensors = load_file(mxfp4 / "model.safetensors")
    stored = load_model(mxfp4, device="cpu")
    for one in filter(has_packed_experts, stored.modules()):
        for weight in one._parameters.values():
            if type(weight) is ExpertWeights:
                full = next(own for own, found in stored.named_parameters() if found is weight)
                tiles = module.float_tiles(tensors[f"{full}_blocks"], tensors[f"{full}_scales"], CPU)
                assert torch.equal(tiles.matrices(0, 4).float(), weight.held.matrices(0, 4))
                placed = module.float_tiles(tensors[f"{full}_blocks"], tensors[f"{full}_scales"], CPU, on_host=3)
                assert type(placed) is PlacedExperts and len(placed.weights.host) == 3
                assert torch.equal(placed.matrices(0, 4), tiles.matrices(0, 4))
    assert "mxfp4" in model_shape(stored.config).weights_note
    shape = ra.plan(str(mxfp4), context=100).shape
    assert "experts at 4 bits" in shape.weights_note
    assert 0 < shape.weight_bytes < shape.parameters * shape.dtype_bytes


@pytest.mark.parametrize("rows", [1, 8])
def test_kernels_are_loaded_before_they_are_needed(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products of zeros with each token's experts; nothing is launched if there are no kernels."""
    model, seen = pack(build("gpt_oss"), "tiles"), []
    real = PackedExperts.gathered_products

    def noted(self: PackedExperts, numbers: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((tuple(numbers.shape), tuple(chosen.shape)))
        return real(self, numbers, chosen, bias)

    monkeypatch.setattr(PackedExperts, "gathered_products", noted)
    layer = model.model.layers[0]
    module.load_expert_kernels(layer, rows)
    assert not seen
    monkeypatch.setattr(PackedExperts, "has_kernel", True)
    module.load_expert_kernels(layer, rows)
    assert seen == [((rows, 96), (rows, 2)), ((2 * rows, 64), (rows, 2))]


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAMILIES)
def test_a_card_multiplies_and_captures(name: str, folders: dict[str, Path]) -> None:
    """Loaded onto it: prompts by copies, questions and captured steps by the kernel, as with copies of all experts."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = load_model(folders[name], device="cuda", quantization="int4", attn_implementation="eager")
    held = list(filter(has_packed_experts, model.modules()))
    assert held and all(isinstance(one.down_proj.held, PackedExperts) for one in held)
    whole = unpack(model)
    for tokens in (1, 5, 60, 200):
        ids = random_ids(2, tokens, seed=tokens).cuda()
        expected, found = logits_of(whole, ids).float(), logits_of(model, ids).float()
        assert float((found - expected).norm() / expected.norm()) < 0.03
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == 12
    assert replayed.difference(eager) <= 0.1
    ra.disable(model)
