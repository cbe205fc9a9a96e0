"""GGUF files give the config, weights and tokens of the model that they were made of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils

import retrieval_attn as ra
from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError, InputDataError, UnsupportedModelError
from retrieval_attn.gpu.expert_blocks import PlacedExperts
from retrieval_attn.gpu.packed_experts import PackedExperts
from retrieval_attn.memory.plan import plan
from retrieval_attn.model.experts import ExpertWeights, expert_parameters, has_packed_experts
from retrieval_attn.model.fused.host import HostLayer
from retrieval_attn.model.gguf.blocks import BLOCKS
from retrieval_attn.model.gguf.checkpoint import (
    FOUR_BITS,
    TILES,
    config_of,
    kept_experts,
    settled,
    unpacked_formats,
    weights_of,
)
from retrieval_attn.model.gguf.file import read, resolve
from retrieval_attn.model.layers import decoder_layers
from retrieval_attn.model.loading import load, load_model
from retrieval_attn.model.quantization import packed_modules, plain_tensors, unpacked_bytes
from retrieval_attn.model.stored import StoredWeight
from tests.model.gguf_files import TOKENS, Family, Writer, add_tokenizer, blocks, gguf, write
from tests.model.packed_weights import pack

ROPE = 1e6
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def theta(value: float = ROPE, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": value, "rope_type": "default", **more}}


def llama3_factors() -> np.ndarray:
    """The tensor rope_freqs, as convert_hf_to_gguf.py computes it."""
    found = []
    for frequency in ROPE ** -(np.arange(0, 64, 2) / 64):
        length = 2 * np.pi / frequency
        if length < 8192 / 4:
            found.append(1.0)
        elif length > 8192:
            found.append(32.0)
        else:
            smooth = (8192 / length - 1) / 3
            found.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(found, np.float32)


LONG, SHORT = np.linspace(1, 8, 32, dtype=np.float32), np.linspace(1, 2, 32, dtype=np.float32)
MIXTURE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
FAMILIES = [
    Family("llama", "LlamaForCausalLM", "Q4_0", theta(10_000.0), {"rope.freq_base": 10_000.0}),
    Family(
        "llama", "LlamaForCausalLM", "Q4_K", {**theta(**LLAMA3), "tie_word_embeddings": True},
        {"rope.freq_base": ROPE, "rope_freqs.weight": llama3_factors()},
    ),
    Family("llama", "MistralForCausalLM", "Q6_K", {**theta(), "num_attention_heads": 8, "sliding_window": None}, {
        "rope.freq_base": ROPE,
    }),
    Family("qwen2", "Qwen2ForCausalLM", "Q8_0", theta(**YARN), {
        "rope.freq_base": ROPE, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
    }),
    Family("qwen3", "Qwen3ForCausalLM", "Q5_K", {**theta(), "head_dim": 128}, {"rope.freq_base": ROPE}),
    Family(
        "qwen3moe", "Qwen3MoeForCausalLM", "Q4_K",
        {**theta(), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
        {"rope.freq_base": ROPE, **MIXTURE},
    ),
    Family("gemma2", "Gemma2ForCausalLM", "Q5_0", {
        "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
    }, {"attention.sliding_window": 16, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    Family("gemma3", "Gemma3ForCausalLM", "Q3_K", {
        "tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": ROPE},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }, {
        "attention.sliding_window": 16, "rope.freq_base": ROPE, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }),
    Family("phi3", "Phi3ForCausalLM", "Q2_K", {
        "num_key_value_heads": 4, "original_max_position_embeddings": 2048, "sliding_window": None,
        "rope_parameters": {
            "rope_theta": 10_000.0, "rope_type": "longrope", "long_factor": LONG.tolist(),
            "short_factor": SHORT.tolist(), "original_max_position_embeddings": 2048,
        },
    }, {
        "rope.scaling.original_context_length": 2048, "rope_factors_long.weight": LONG,
        "rope_factors_short.weight": SHORT, "attention.sliding_window": 0,
    }),
    Family("gpt-oss", "GptOssForCausalLM", "MXFP4", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 16,
        "rope_parameters": {**theta(150_000.0, **YARN)["rope_parameters"], "truncate": False},
    }, {
        **MIXTURE, "attention.sliding_window": 16, "rope.freq_base": 150_000.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024,
    }),
    Family("glm4", "Glm4ForCausalLM", "F16", theta(10_000.0, partial_rotary_factor=0.5), {
        "rope.freq_base": 10_000.0, "rope.dimension_count": 32,
    }),
]  # fmt: skip
LLAMA = FAMILIES[0]


def ids() -> torch.Tensor:
    return torch.randint(TOKENS, (1, 40), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_logits_are_those_of_the_dequantized_model(family: Family, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", family)
    loaded = load_model(tmp_path / "model.gguf", device="cpu", dtype="float32", attn_implementation="eager")
    assert loaded.config.model_type in (model.config.model_type, "llama")
    weights = model.state_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    with torch.no_grad():
        got, expected = loaded(ids()).logits, model(ids()).logits
    assert torch.equal(got, expected) or (got - expected).abs().max() < 1e-5 * expected.abs().max()
    assert expected.std() > 1e-3, "weights that do nothing"
    assert loaded.generation_config.eos_token_id == ([2, 3] if family.name == "gpt-oss" else [2])
    assert ra.verify(loaded).ok


@pytest.mark.parametrize("number", BLOCKS, ids=lambda number: BLOCKS[number].name)
def test_blocks_are_unpacked_as_their_package_does(number: int) -> None:
    known = BLOCKS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == known.name and gguf.GGML_QUANT_SIZES[kind] == (known.size, known.nbytes)
    rng = np.random.default_rng(1)
    data = blocks(rng.standard_normal((24, 512), dtype=np.float32), known.name, rng)
    found = known.weights(torch.from_numpy(data), torch.float32)
    expected = gguf.quants.dequantize(data, kind)
    assert found.shape == (24, 512) and np.array_equal(found.numpy(), expected)
    stored = known.stored(torch.from_numpy(data), torch.float32)
    np.testing.assert_allclose(stored.widened(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert sum(part.nbytes for part in plain_tensors([stored])) == known.storage.nbytes(24, 512)
    assert stored.numbers.dtype == (torch.uint8 if known.name in (*FOUR_BITS, "MXFP4") else torch.int8)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 15


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, LLAMA)
    return path


def test_a_file_is_a_model(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "retrieval_attn"):
        llm = ra.LLM(file, device="cpu", max_context=200)
    assert "unpacked" not in caplog.text and isinstance(llm.model.lm_head.weight, StoredWeight)
    assert llm.tokenizer("the then").input_ids[0] == 1, "begins as the file says"
    assert llm.tokenizer.decode(llm.tokenizer("the then ä").input_ids, skip_special_tokens=True) == "the then ä"
    assert llm.tokenizer.chat_template and llm.model.generation_config.eos_token_id == [2]
    answer = llm.read("the text " * 20, progress=False).ask("the", max_new_tokens=3, ignore_eos=True)
    assert len(answer.tokens) == 3


def test_names_of_a_file(file: Path, tmp_path: Path) -> None:
    assert resolve(file, download=False) == str(file)
    assert resolve(file.parent, download=False) == str(file)
    blob = tmp_path / "sha256-0"
    blob.write_bytes(file.read_bytes())
    assert resolve(blob, download=False) == str(blob), "by its first bytes"
    assert resolve("owner/name", download=False) is None and resolve("bundled", download=False) is None


def test_files_of_the_hub_are_read_in_its_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--owner--name"
    (home / "snapshots" / "abc" / "q4").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    (home / "snapshots" / "abc" / "q4" / "tiny.gguf").write_bytes(file.read_bytes())
    found = resolve("owner/name/q4/tiny.gguf", download=True)
    assert found is not None and Path(found).samefile(home / "snapshots" / "abc" / "q4" / "tiny.gguf")
    with pytest.raises(InputDataError, match="hf download owner/name q4/other.gguf"):
        resolve("owner/name/q4/other.gguf", download=False)


def test_shards_are_one_model(file: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "whole.gguf", LLAMA)
    whole = read(tmp_path / "whole.gguf")
    names = list(whole.tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        writer = Writer(tmp_path / f"m-0000{number}-of-00002.gguf", LLAMA)
        if number == 1:
            for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
                writer.writer.add_uint32(f"llama.{key}", whole.get(key))
            for key in ("head_count", "head_count_kv"):
                writer.writer.add_uint32(f"llama.attention.{key}", whole.get(f"attention.{key}"))
            add_tokenizer(writer.writer)
        for name in part:
            stored = whole.tensors[name]
            own = next(one for one in gguf.GGUFReader(tmp_path / "whole.gguf").tensors if one.name == name)
            floats = stored.kind == 0
            writer.writer.add_tensor(name, own.data, raw_dtype=None if floats else own.tensor_type)
        writer.close()
    (tmp_path / "whole.gguf").unlink()
    loaded = load_model(tmp_path, device="cpu", dtype="float32")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InputDataError, match="00002-of-00002.gguf is missing"):
        load_model(tmp_path, device="cpu")


def test_a_plan_counts_from_the_header(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = plan(file, 1024, dtype="float32").shape
    loaded = load_model(file, device="cpu", dtype="float32")
    assert shape.weight_bytes == sum(weight.nbytes for weight in loaded.parameters())
    stored = plan(settled(load(AutoConfig, file), torch.device("cpu"), "auto", alone=True), 1024, dtype="float32").shape
    parts = plain_tensors(load_model(file, device="cpu").parameters())
    assert stored.weight_bytes == sum(part.nbytes for part in parts) < shape.weight_bytes / 5
    assert "unpacked from Q4_0" in shape.weights_note and shape.max_positions == 4096
    assert main(["plan", str(file), "--max-context", "1k"]) == 0
    out = capsys.readouterr().out
    assert "tiny.gguf (llama, 2 layers" in out and "GGUF: what it stores in 4 bits" in out


BF16 = Family("llama", "LlamaForCausalLM", "BF16", theta(10_000.0), {"rope.freq_base": 10_000.0})
PROGRAMS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma2": 2, "gemma3": 6}
"""Layers that run as programs on a CPU; others have merged matrices, experts or other parts."""


@pytest.mark.parametrize("family", [*(one for one in FAMILIES if one.block != "F16"), BF16], ids=str)
def test_a_cpu_multiplies_matrices_as_they_are_stored(family: Family, tmp_path: Path) -> None:
    """Logits of a prompt and of decode steps, of one row and of several, are those of the widened weights."""
    write(tmp_path / "model.gguf", family)
    stored, whole = (load_model(tmp_path / "model.gguf", device="cpu", dtype=dtype) for dtype in ("auto", "float32"))
    linear = [one.weight for one in stored.modules() if isinstance(one, torch.nn.Linear | torch.nn.Embedding)]
    assert linear and all(isinstance(one, StoredWeight) for one in linear) and stored.dtype == torch.float32
    routed = [one for one in stored.modules() if expert_parameters(one)]
    assert all(map(has_packed_experts, routed)) and bool(routed) == (family.name in ("qwen3moe", "gpt-oss"))
    programs = [layer.forward for layer, _ in decoder_layers(stored) if isinstance(layer.forward, HostLayer)]
    assert len(programs) == PROGRAMS.get(family.name, 0)
    for rows in (1, 3):
        found = [_steps(model, rows) for model in (stored, whole)]
        assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].abs().max()
    assert all(one._scoring is not None for one in programs) and found[1].std() > 1e-3


def _steps(model: Any, rows: int) -> torch.Tensor:
    """Logits of a prompt of 20 tokens and of four steps, (rows, 24, tokens)."""
    ra.enable(model, ra.Config(sink=4, window=8))
    cache, tokens = ra.RetrievalCache(model), torch.arange(24 * rows).view(rows, 24) % TOKENS
    pieces = tokens[:, :20], *tokens[:, 20:].split(1, dim=1)
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def test_changed_modules_are_noticed(file: Path) -> None:
    """A replaced, adapted or watched module runs, though its layer ran as a program before."""
    model = load_model(file, device="cpu")
    before, seen = _steps(model, 1), list[int]()
    watch = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(_steps(model, 1), before, atol=1e-5) and len(seen) == 5
    watch.remove()
    assert torch.equal(_steps(model, 1), before), "the program runs again"
    assert len(seen) == 5
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(512, 256))
    changed = _steps(model, 1)[:, 20:]
    assert (changed - before[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", [LLAMA, FAMILIES[1], FAMILIES[5]], ids=str)
def test_matrices_of_4_bits_stay_packed_on_a_gpu(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's layout as its kernel on CUDA has it: a sixteenth of a step off at most, as those of AWQ."""
    pytest.importorskip("torchao", reason="torchao is not installed")

    def as_on_cuda(pairs: torch.Tensor, tiles: int) -> torch.Tensor:
        return pack(torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1).int())

    model = write(tmp_path / "model.gguf", family)
    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", as_on_cuda)
    config = load(AutoConfig, tmp_path / "model.gguf")
    ahead: list[float] = []

    def warm_up(model: Any, places: dict[str, torch.device], quantizer: Any) -> None:
        ahead.append(sum(modeling_utils.get_total_byte_count(model, places, quantizer).values()))

    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", warm_up)
    place = {"": torch.device("cpu")}
    loaded = load(AutoModelForCausalLM, tmp_path / "model.gguf", config=config, device_map=place)
    monkeypatch.undo()
    assert ahead == [0], "bytes of 16 bits a weight may exceed the GPU"
    linear = [name for name, one in model.model.named_modules() if isinstance(one, torch.nn.Linear)]
    found = packed_modules(loaded)
    assert len(found) == len(linear) and not hasattr(loaded.config, "quantization_config")
    shape = plan(tmp_path / "model.gguf", 1024).shape
    largest = unpacked_bytes(loaded)
    assert largest >= max(2 * one.weight.numel() for one in model.model.modules() if isinstance(one, torch.nn.Linear))
    assert shape.weight_bytes == largest + sum(one.nbytes for one in plain_tensors(loaded.parameters()))
    for module, weights in found:
        name = next(name for name, one in loaded.named_modules() if one is module)
        exact = model.get_submodule(name).weight
        steps = weights.scales[..., 0].float().t().repeat_interleave(32, 1)[:, : exact.shape[1]].abs()
        assert ((weights.matrix.float() - exact).abs() <= steps / 16 + exact.abs() / 128).all(), name
        assert weights.group == 32 and exact.std() > 0


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_of_4_bits_stay_packed_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up join as the model has them; MXFP4 without a loss. Other formats are unpacked, and named."""
    family = next(one for one in FAMILIES if one.name == name)
    model = write(tmp_path / "model.gguf", family)
    file = read(tmp_path / "model.gguf")
    config = config_of(file)
    found, placed = (
        weights_of(file, config, torch.bfloat16, torch.device("cpu"), form=TILES, host_experts=count)
        for count in (0, 3)
    )
    kept = kept_experts(file, TILES)
    routed = plan(tmp_path / "model.gguf", 1024).shape.routed
    assert routed is not None and routed.layers == config.num_hidden_layers
    assert len(kept) == 2 * config.num_hidden_layers
    for parameter, exact in model.named_parameters():
        if parameter.endswith(("gate_up_proj", "down_proj")) and ".experts." in parameter:
            weight = found[parameter][...]
            assert type(weight) is ExpertWeights and isinstance(weight.held, PackedExperts)
            copies = weight.copies(0, len(weight)).float()
            other = placed[parameter][...]
            assert isinstance(other.held, PlacedExperts) and len(other.held.weights.host) == 3
            assert torch.equal(other.copies(0, len(other)).float(), copies)
            assert copies.shape == exact.shape and copies.std() > 0
            if name == "gpt-oss":
                assert torch.equal(copies, exact.to(torch.bfloat16).float())
            assert (copies - exact).abs().max() < exact.abs().max() / 64
    assert not unpacked_formats(file, TILES)
    monkeypatch.setattr("retrieval_attn.model.gguf.checkpoint.FOUR_BITS", ())
    if name == "qwen3moe":
        assert not kept_experts(file, TILES) and unpacked_formats(file, TILES) == ["Q4_K"]


@pytest.mark.cuda
def test_packed_matrices_on_a_gpu(file: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    packed, whole = load_model(file, device="cuda"), load_model(file, device="cuda", dtype="float32")
    assert len(packed_modules(packed)) == 14 and not packed_modules(whole)
    with torch.no_grad():
        got, expected = (one(ids().cuda()).logits.float() for one in (packed, whole))
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(ConfigError, match="quantised already"):
        load_model(file, device="cuda", quantization="int4")


def test_weights_are_packed_again_if_asked(file: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    loaded = load_model(file, device="cpu", quantization="int8")
    assert "Int8" in type(loaded.model.layers[0].mlp.up_proj.weight).__name__


def test_commands_take_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file), "--device", "cpu"]) == 0
    assert "llama: exact" in capsys.readouterr().out


def changed(file: Path, tmp_path: Path, *, cut: int | None = None, old: bytes = b"", new: bytes = b"") -> Path:
    """A copy that ends after `cut` bytes, or with other bytes."""
    path = tmp_path / "changed.gguf"
    data = file.read_bytes()[:cut]
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cut": 100}, InputDataError, "header .* is damaged .*download"),
        ({"cut": -4000}, InputDataError, "incomplete, download"),
        ({"old": b"GGUF\3", "new": b"GGUF\1"}, InputDataError, r"^\S+ is a GGUF file of version 1.*convert it"),
        ({"old": b"GGUF", "new": b"GGML"}, InputDataError, r"^\S+ is no GGUF file"),
        ({"old": b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", "new": b"general.architecture\x08\0\0\0"
          b"\x05\0\0\0\0\0\0\0mamba"}, UnsupportedModelError, "architecture 'mamba'.*llama, qwen2"),
        ({"old": b"attn_output.weight", "new": b"attn_strange.weigh"}, UnsupportedModelError, "attn_strange"),
        ({"old": b"blk.1.ffn_up.weight", "new": b"blk.7.ffn_up.weight"}, InputDataError, "1 weights"),
        ({"old": b"llama.block_count", "new": b"llama.block_coun_"}, InputDataError, "lacks sizes"),
    ],
)  # fmt: skip
def test_files_that_are_refused(
    file: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_model(changed(file, tmp_path, **change), device="cpu")


def test_names_that_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="There is no file.*owner/name/file.gguf"):
        load_model(tmp_path / "none.gguf", device="cpu")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(InputDataError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(ConfigError, match="tensor_parallel"):
        load_model(file, tensor_parallel=True)


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    metadata = {"rope.freq_base": ROPE, "rope_freqs.weight": llama3_factors() + 0.2}
    write(tmp_path / "model.gguf", Family("llama", "LlamaForCausalLM", "Q4_0", theta(), metadata))
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        load_model(tmp_path / "model.gguf", device="cpu")
