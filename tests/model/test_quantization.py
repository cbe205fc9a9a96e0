"""Weights in 8 and 4 bits: loaded, planned and captured; real torchao, and errors that name what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import retrieval_attn as ra
from retrieval_attn.config import QUANTIZATIONS
from retrieval_attn.memory.weights import quantized_bytes
from retrieval_attn.model.loading import load_model
from retrieval_attn.model.quantization import FORMATS, PACKAGE, held_bytes, loading_config, missing_package
from retrieval_attn.runner.graph.support import cache_refusal, model_refusal
from tests.model.test_models import ALL, TOLERANCE, eager_steps, steps, worst
from tests.runner.graph_cases import CONFIG, Decoded
from tests.tiny_models import random_ids

TORCHAO = ("int8", "int4")
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 97, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, needle_model_path: Path) -> Path:
    """A checkpoint whose matrices have rows of 1,024 numbers, as large models' have multiples of that."""
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096}
    config = LlamaConfig(**{**SIZES, **heads}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(needle_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=TORCHAO)
def quantised(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Any]:
    """The name and the loaded model; eager attention."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = load_model(folder, device="cpu", dtype="float32", quantization=request.param)
    model.set_attn_implementation("eager")
    return request.param, model


def test_the_names_are_the_same_everywhere() -> None:
    """Of the command line's flags and of what loads."""
    assert tuple(FORMATS) == QUANTIZATIONS


def test_weights_are_held_in_few_bits(quantised: tuple[str, Any], folder: Path) -> None:
    """The linear layers are quantised, the output is not; logits stay near those of whole weights, not equal."""
    name, model = quantised
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linear = sum(module.weight.numel() for module in whole.model.modules() if isinstance(module, torch.nn.Linear))
    saved = held_bytes(whole) - held_bytes(model)
    assert saved == pytest.approx(linear * (4 - {"int8": 1, "int4": 0.5 + 2 * 4 / 64}[name]), rel=0.01)
    ids = random_ids(1, 40)
    with torch.no_grad():
        wanted, got = whole(input_ids=ids).logits, model(input_ids=ids).logits
    error = float((got - wanted).norm() / wanted.norm())
    assert 1e-4 < error < {"int8": 0.05, "int4": 0.3}[name]


def test_retrieval_equals_eager_attention(quantised: tuple[str, Any]) -> None:
    """With the same weights; layer by layer, too."""
    _, model = quantised
    pieces = list(random_ids(1, 50).split([44, *[1] * 6], dim=1))
    expected = eager_steps(model, pieces)
    for chunk in (4096, 19):
        ra.enable(model, ALL, prefill_chunk=chunk)
        got = steps(model, ra.RetrievalCache(model, ALL), pieces)
        ra.disable(model)
        assert worst(got, expected) <= 10 * TOLERANCE  # sums of int4's kernel depend on the number of rows
    assert ra.verify(model).ok


@pytest.mark.usefixtures("emulated_graphs")
def test_a_step_with_quantised_weights_is_captured(quantised: tuple[str, Any]) -> None:
    """Replays equal eager decoding, and other weights get another decoder though they stand at no address."""
    _, model = quantised
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == 12
    assert replayed.difference(eager) <= 2e-5
    before = replayed.decoder.signature
    assert 0 not in [tensor.data_ptr() for tensor in model.parameters() if type(tensor) is torch.nn.Parameter]
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = weight.qdata
    try:
        weight.qdata = kept.clone()
        assert Decoded(model, True).decoder.signature != before
    finally:
        weight.qdata = kept
    ra.disable(model)


@pytest.mark.parametrize("name", TORCHAO)
def test_the_plan_counts_their_bytes(name: str, folder: Path, quantised: tuple[str, Any]) -> None:
    """To 1 % of what the loaded model holds, but for the copy of one matrix that is made where it is multiplied."""
    if quantised[0] != name:
        pytest.skip("the other model's turn")
    shape = ra.plan(str(folder), context=1000, dtype="float32", quantization=name).shape
    copied = 4 * 1024 * 1024
    assert shape.weight_bytes - copied == pytest.approx(held_bytes(quantised[1]), rel=0.01)
    assert name in shape.weights_note
    loaded = ra.plan(quantised[1], context=1000).shape
    assert loaded.weight_bytes == held_bytes(quantised[1]) and loaded.parameters == shape.parameters


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_an_8b_model_fits_a_smaller_card(name: Any) -> None:
    """Llama-3-8B's shape: 8.03 G parameters, 6.98 G of them in linear layers; plan and command say so."""
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    config = LlamaConfig(**sizes, **heads, vocab_size=128256, dtype="bfloat16")
    whole = ra.plan(config, embedding="device").shape.weight_bytes
    found = ra.plan(config, quantization=name, embedding="device").shape.weight_bytes
    assert whole - found == pytest.approx(6.98e9 * {"8": 1, "4": 2 - 4.5 / 8}[name.strip("intb-")[0]], rel=0.03)


@pytest.mark.parametrize("name", TORCHAO)
def test_llm_reads_and_answers(name: Any, folder: Path) -> None:
    """Through the public API; the statistics say how it decoded."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    llm = ra.LLM(folder, device="cpu", quantization=name, threads=1, retrieve="all")
    answer = llm.read([5, 6, 7, 8] * 20, progress=False).continue_with([5, 6], max_new_tokens=3)
    assert answer.stats.decoded == "eager" and answer.stats.new_tokens <= 3


def test_a_quantised_checkpoint_is_loaded_as_it_says(folder: Path, tmp_path: Path) -> None:
    """Saved by torchao; a second quantisation is refused by name, in the plan too."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    load_model(folder, device="cpu", dtype="float32", quantization="int8").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="float32")
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    with pytest.raises(ra.ConfigError, match=r"quantised already \(torchao\)"):
        load_model(tmp_path, device="cpu", quantization="int4")
    with pytest.raises(ra.ConfigError, match=r"quantised already \(torchao\)"):
        ra.plan(str(tmp_path), quantization="int4")
    assert ra.plan(str(tmp_path), context=100).shape.weights_note.startswith("torchao, as stored")
    size, note = quantized_bytes(model, model.config.quantization_config, 4, None)
    assert "8 bits" in note and size > 0


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_missing_package_is_named(name: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda found: None)
    with pytest.raises(ra.ConfigError, match=f"needs the package {PACKAGE}.*pip install {PACKAGE}"):
        loading_config(name, LlamaConfig(), torch.device("cpu"))


def test_a_checkpoint_whose_package_is_missing_names_it(folder: Path, tmp_path: Path) -> None:
    """A folder that says compressed-tensors, which is not installed here."""
    if "compressed_tensors" in sys.modules:
        pytest.skip("compressed-tensors is installed")
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ra.ConfigError, match="pip install compressed-tensors"):
        load_model(tmp_path, device="cpu")
    assert "pip install awq2" in str(missing_package(ImportError("x"), _with_method("awq2")))


def _with_method(method: str) -> Any:
    config = LlamaConfig()
    config.quantization_config = {"quant_method": method}
    return config


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 8}, 8),
    ],
)
def test_bits_of_methods_in_a_config(options: dict[str, Any], bits: int) -> None:
    """Of a config without its folder."""
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 64}, num_attention_heads=4))
    assert f"linear layers at {bits} bits" in quantized_bytes(model, options, 2, None)[1]


def test_other_names_and_combinations_are_refused(folder: Path) -> None:
    """Unknown names, unknown keywords of plan, tensor parallel, a loaded model."""
    with pytest.raises(ra.ConfigError, match="quantization must be one of int8, int4"):
        ra.LLM(folder, device="cpu", quantization="int2")  # type: ignore[arg-type]
    with pytest.raises(ra.ConfigError, match="quantization must be one of int8, int4"):
        ra.LLM(folder, device="cpu", quantization="bnb-4bit")  # type: ignore[arg-type]
    with pytest.raises(ra.ConfigError, match="quantization must be one of int8, int4"):
        ra.plan(str(folder), quantization="int2")
    with pytest.raises(ra.ConfigError, match="does not know bits"):
        ra.plan(str(folder), bits=4)  # type: ignore[call-arg]
    with pytest.raises(ra.ConfigError, match="does not work with tensor_parallel"):
        load_model(folder, tensor_parallel=True, quantization="int8")
    with pytest.raises(ra.ConfigError, match="is loaded already"):
        ra.plan(AutoModelForCausalLM.from_pretrained(folder), quantization="int8")


def test_layers_that_look_for_outliers_are_not_captured() -> None:
    """bitsandbytes' 8-bit layers, named in the reason; a class of that name stands for them."""

    class Linear8bitLt(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.state = type("State", (), {"threshold": 6.0})()

    model: Any = ra.enable(LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 64}, num_attention_heads=4)))
    cache = ra.RetrievalCache(model, CONFIG)
    with torch.no_grad():
        model(input_ids=random_ids(1, 40), past_key_values=cache)
    assert cache_refusal(cache) is None and model_refusal(model) is None
    model.model.layers[0].extra = Linear8bitLt()
    assert "looks for outliers" in str(model_refusal(model))


@pytest.mark.cuda
@pytest.mark.parametrize("name", TORCHAO)
def test_quantised_weights_on_a_gpu(name: Any, folder: Path) -> None:
    """Loaded there, captured as a graph, as eager decoding answers; the planned bytes are those that are held."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = load_model(folder, device="cuda", quantization=name)
    assert model.dtype == (torch.bfloat16 if name == "int4" else torch.float32)
    assert all(tensor.device.type == "cuda" for tensor in model.parameters())
    shape = ra.plan(str(folder), context=1000, dtype=str(model.dtype)[6:], quantization=name).shape
    copied = 1024 * 1024 * model.dtype.itemsize  # of the largest matrix, while rows are many
    assert shape.weight_bytes - copied == pytest.approx(held_bytes(model), rel=0.01)
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == 12
    tolerance = 0.05 if name == "int4" else 1e-4
    assert replayed.difference(eager) <= tolerance * float(eager.logits[-1].abs().max())


@pytest.mark.cuda
def test_int4_on_a_gpu_needs_bfloat16(folder: Path) -> None:
    """Its kernel takes nothing else."""
    with pytest.raises(ra.ConfigError, match='needs dtype="bfloat16"'):
        load_model(folder, device="cuda", dtype="float16", quantization="int4")
