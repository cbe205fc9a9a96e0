"""GPTQ's and AWQ's checkpoints without their package: what they hold, word by word, is what the model computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.memory.plan import plan
from retrieval_attn.model import grouped_loading
from retrieval_attn.model.experts import has_packed_experts
from retrieval_attn.model.grouped import GroupedMatrix, of_awq, of_gptq
from retrieval_attn.model.grouped_loading import converted, reads_grouped
from retrieval_attn.model.loading import load_model
from retrieval_attn.model.quantization import packed_modules
from tests.model.packed_weights import pack

GROUP = 32
METHODS = "gptq", "gptq_v2", "awq"
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def rounded(weight: Tensor, group: int = GROUP, least: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """numbers (out, in) int64, scales and zeros (out, groups), as a checkpoint's maker finds them. least: of a zero,
    which "gptq" stores less one.
    """
    parts = weight.view(len(weight), -1, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(least, 15)
    numbers = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.flatten(1).long(), scales, zeros.long()


def word(numbers: list[int]) -> int:
    """Eight numbers, the first one in the lowest four bits, as a signed integer."""
    found = sum(number << 4 * place for place, number in enumerate(numbers))
    return found - (1 << 32) if found >= 1 << 31 else found


def stored(method: str, numbers: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """The tensors of a matrix in a checkpoint, packed number by number."""
    (rows, columns), groups = numbers.shape, scales.shape[1]
    order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else range(8)
    zero = [[int(zeros[row, group]) - (method == "gptq") for row in range(rows)] for group in range(groups)]
    qzeros = [[word([line[8 * at + one] & 15 for one in order]) for at in range(rows // 8)] for line in zero]
    held = numbers.tolist()
    if method == "awq":
        qweight = [
            [word([held[8 * at + one][column] for one in order]) for at in range(rows // 8)]
            for column in range(columns)
        ]
    else:
        qweight = [[word(held[row][8 * at : 8 * at + 8]) for row in range(rows)] for at in range(columns // 8)]
    found = {
        "qweight": torch.tensor(qweight, dtype=torch.int32), "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": scales.t().half().contiguous(),
    }  # fmt: skip
    if method != "awq":
        found["g_idx"] = torch.arange(columns, dtype=torch.int32) // (columns // groups)
    return found


def exact(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = numbers.view(*scales.shape, -1)
    return ((grouped - zeros[..., None]) * scales[..., None]).flatten(1).float()


def of(method: str, parts: dict[str, Tensor]) -> GroupedMatrix:
    return of_awq(**parts) if method == "awq" else of_gptq(**parts, moved=method == "gptq")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(16, 64, 32), (48, 128, 128), (24, 256, 64)])
def test_what_a_checkpoint_holds(method: str, rows: int, columns: int, group: int) -> None:
    kept = rounded(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), group, method == "gptq")
    matrix = of(method, stored(method, *kept))
    assert matrix.group == group and torch.equal(matrix.numbers.long(), kept[0])
    assert torch.equal(matrix.weights(), exact(*kept))


@pytest.mark.parametrize("method", METHODS)
def test_the_form_that_kernels_read(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows filled up, a sixteenth of a step off at most: by torch's layout as its kernel on CUDA has it."""
    pytest.importorskip("torchao", reason="torchao is not installed")

    class Ops:
        @staticmethod
        def _convert_weight_to_int4pack(pairs: Tensor, tiles: int) -> Tensor:
            assert tiles == 8 and pairs.dtype == torch.uint8
            numbers = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1)
            return pack(numbers.int())

    monkeypatch.setattr(torch.ops, "aten", Ops, raising=False)
    kept = rounded(torch.randn(24, 320, generator=torch.Generator().manual_seed(1)))
    weight = of(method, stored(method, *kept)).packed()
    monkeypatch.undo()
    assert weight.shape == (24, 320) and weight.block_size == [1, GROUP]
    weights = PackedWeights(weight.qdata, weight.scale_and_zero, weight.shape[1])
    off = (weights.matrix.float() - exact(*kept)).abs().view(24, -1, GROUP) / kept[1][..., None]
    assert off.max() <= 1 / 8, "bfloat16 weights of 8 steps are a sixteenth off themselves"
    scale, zero = weight.scale_and_zero.float().unbind(-1)
    there = (kept[0].view(24, -1, GROUP) - 8) * scale.t()[:, : 320 // GROUP, None] + zero.t()[:, : 320 // GROUP, None]
    assert ((there.flatten(1) - exact(*kept)).abs().view(24, -1, GROUP) / kept[1][..., None]).max() <= 1 / 16


def test_columns_in_an_order_of_their_own_are_refused() -> None:
    parts = stored("gptq", *rounded(torch.randn(16, 64, generator=torch.Generator().manual_seed(1))))
    parts["g_idx"] = parts["g_idx"].flip(0)
    with pytest.raises(InputDataError, match="desc_act.*gptqmodel"):
        of_gptq(**parts, moved=True)


def test_damaged_matrices_are_refused() -> None:
    parts = stored("awq", *rounded(torch.randn(16, 64, generator=torch.Generator().manual_seed(1))))
    with pytest.raises(InputDataError, match=r"16 rows and 64 columns .* \(16, 1\)"):
        of_awq(parts["qweight"], parts["qzeros"], parts["scales"][:1])


def test_a_matrix_without_zeros_is_refused() -> None:
    parts = stored("awq", *rounded(torch.randn(16, 64, generator=torch.Generator().manual_seed(1))))
    del parts["qzeros"]
    with pytest.raises(InputDataError, match="no qzeros"):
        converted("awq", "gemm", parts, whole=True, dtype=torch.float32)


def options_of(method: str, **changes: Any) -> dict[str, Any]:
    """What a checkpoint's config says of its weights."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, **changes}
    layout = {"checkpoint_format": method} if method == "gptq_v2" else {}
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        **layout,
        **changes,
    }


@pytest.fixture(scope="module", params=METHODS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, needle_model_path: Path
) -> tuple[str, Path, Any]:
    """The method, a folder, and the model that it is of, whose weights are what the folder holds."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(needle_model_path).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            kept = rounded(tensors.pop(f"model.{name}.weight"))
            tensors |= {f"model.{name}.{part}": one for part, one in stored(request.param, *kept).items()}
            module.weight.data = exact(*kept)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_options(folder, options_of(request.param))
    return request.param, folder, model


def write_options(folder: Path, options: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": options}))


def ids() -> Tensor:
    return torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(2))


def test_a_checkpoint_is_read_without_its_package(checkpoint: tuple[str, Path, Any]) -> None:
    _, folder, model = checkpoint
    loaded = load_model(folder, device="cpu", dtype="float32")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found = loaded.get_submodule(name)
            assert type(found) is nn.Linear and torch.equal(found.weight, module.weight), name
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, model(ids()).logits)


def test_it_answers(checkpoint: tuple[str, Path, Any]) -> None:
    _, folder, _ = checkpoint
    llm = ra.LLM(folder, device="cpu", dtype="float32", max_context=200)
    answer = llm.read(ids()[0].tolist(), progress=False).continue_with([5], max_new_tokens=4, ignore_eos=True)
    assert len(answer.tokens) == 4
    linear = sum(one.weight.numel() for one in llm.model.model.modules() if isinstance(one, nn.Linear))
    assert plan(folder, 200).shape.weight_bytes < 4 * linear, "those of a GPU, in 4 bits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"bits": 8}, "8 bits"), ({"checkpoint_format": "marlin"}, "marlin"), ({"desc_act": True}, "desc_act")],
)
def test_what_only_the_package_reads(
    checkpoint: tuple[str, Path, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    method, folder, _ = checkpoint
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write_options(tmp_path, options_of(method, **changes))
    with pytest.raises(ConfigError, match=f"{words}.*pip install gptqmodel"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inner", [64, 40], ids=["packed", "whole"])
def test_experts_are_joined(method: str, inner: int, tmp_path: Path) -> None:
    """A checkpoint has the matrices of each for itself; those of sizes without a kernel become whole."""
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **more})).eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        group = GROUP if tensors[name].shape[1] % GROUP == 0 else 8
        kept = rounded(tensors.pop(name).float(), group)
        parts = stored(method, *kept)
        tensors |= {name.removesuffix("weight") + part: one for part, one in parts.items()}
        layer, expert = name.split(".")[2], name.split(".")[-3]
        if expert.isdigit():
            held, leaf = model.model.layers[int(layer)].mlp.experts, name.split(".")[-2]
            rows = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner), "down_proj": slice(None)}[leaf]
            whole = held.down_proj if leaf == "down_proj" else held.gate_up_proj
            whole.data[int(expert), rows] = exact(*kept)
        else:
            model.get_submodule(name.removesuffix(".weight")).weight.data = exact(*kept)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_options(tmp_path, options_of(method))
    loaded = load_model(tmp_path, device="cpu", dtype="float32")
    packed = [one for one in loaded.modules() if has_packed_experts(one)]
    assert len(packed) == (2 if inner == 64 else 0)
    with torch.no_grad():
        assert (loaded(ids()).logits - model(ids()).logits).abs().max() < 1e-5
        weight = loaded.model.layers[1].mlp.experts.gate_up_proj
        torch.testing.assert_close(weight[2], model.model.layers[1].mlp.experts.gate_up_proj[2], atol=1e-6, rtol=1e-5)


def test_where_the_package_is_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**{**SIZES, "quantization_config": options_of("awq")})
    assert reads_grouped(config) and not reads_grouped(LlamaConfig(**SIZES))
    monkeypatch.setattr(grouped_loading, "LIBRARY", "torch")
    assert not reads_grouped(config)


@pytest.mark.cuda
def test_on_a_gpu_they_are_kernels_weights(checkpoint: tuple[str, Path, Any]) -> None:
    """Rows of fewer numbers than torch's layout has are filled up; logits are those of 16-bit weights, nearly."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    _, folder, model = checkpoint
    loaded = load_model(folder, device="cuda")
    linear = [one for one in model.model.modules() if isinstance(one, nn.Linear)]
    found = packed_modules(loaded)
    assert len(found) == len(linear)
    for module, (_, weights) in zip(linear, found, strict=True):
        assert (weights.matrix.float().cpu() - module.weight).abs().max() <= module.weight.abs().max() / 64
    with torch.no_grad():
        near, exactly = loaded(ids().cuda()).logits.float().cpu(), model(ids()).logits
    assert (near - exactly).abs().max() <= 0.03 * exactly.abs().max()
