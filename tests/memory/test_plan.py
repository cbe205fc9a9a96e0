"""The plan's arithmetic against measured bytes, against the models themselves and against hand sums."""

from __future__ import annotations

import argparse
import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MixtralConfig, T5Config

from retrieval_attn.cli.plan import add_arguments, run
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, InputDataError, MemoryPlanError, UnsupportedModelError
from retrieval_attn.memory import shape as shape_module
from retrieval_attn.memory.device import DEVICE_RESERVE, DeviceSize
from retrieval_attn.memory.plan import HOST_RESERVE, Plan, plan
from retrieval_attn.memory.shape import model_shape

GIB = 2**30


def llama3_8b(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 20,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**{**sizes, **changes})


def tiny(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "dtype": "float32",
    }
    return LlamaConfig(**{**sizes, **changes})


def item(items: tuple[Any, ...], name: str) -> int:
    return sum(one.bytes for one in items if one.name == name)


def prefill_bytes(answer: Plan) -> int:
    """Of one layer's pass: what was traced had copied each layer's KV before the next began."""
    passing = [one for one in answer.device if one.name.startswith("prefill") and "copied" not in one.name]
    return sum(one.bytes for one in passing)


@pytest.mark.parametrize(
    ("context", "chunk", "measured_gib"),
    [
        (131072, 2048, 1.78),
        (131072, 4096, 1.99),
        (131072, 8192, 2.41),
        (131072, 16384, 3.25),
        (131072, 32768, 4.94),
        (262144, 8192, 3.97),
        (524288, 8192, 7.10),
        (1048576, 8192, 13.35),
    ],
)
def test_prefill_peak_equals_measured_bytes(context: int, chunk: int, measured_gib: float) -> None:
    """Peak live bytes of Llama-3-8B's layer-major prefill, traced on meta tensors. Breaks if a term is lost:
    the hidden states alone are 1 GiB at 128K, the widest MLP activation 0.66 GiB at chunk 8192."""
    answer = plan(llama3_8b(), context=context, gpu_memory="80GiB", config={"prefill_chunk": chunk})
    assert prefill_bytes(answer) / GIB == pytest.approx(measured_gib, rel=0.01)


@pytest.mark.parametrize(
    ("index", "context", "prefill_gib", "decode_gib"),
    [
        ("flat", 16384, 17.55, 16.09),
        ("flat", 131072, 19.09, 16.09),
        ("device", 16384, 17.72, 16.46),
        ("device", 65536, 19.34, 17.21),
        ("device", 131072, 21.16, None),
    ],
)
def test_the_plan_covers_what_processes_held(
    index: str, context: int, prefill_gib: float, decode_gib: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-3-8B's shape on an H100, CUDA context included (docs/archive/results/h100: memory, memory_device,
    prefill_device). Nothing beyond the plan, which is no more than half a GiB above.
    """
    monkeypatch.setattr("retrieval_attn.config.SPILL_TOKENS", 128)  # as those processes had it
    config = {"index": index}
    answer = plan(llama3_8b(), context=context, host_memory="64GiB", config=config, embedding="device")
    assert prefill_gib <= answer.device_bytes / GIB <= prefill_gib + 0.5
    if decode_gib is not None:
        assert decode_gib <= answer.decode_bytes / GIB <= decode_gib + 0.5


def test_llama3_8b_at_128k_on_24_gib() -> None:
    """The numbers README opens with: 8.03 G parameters, 128 KiB of KV per token, 16 GiB at 128K."""
    answer = plan(llama3_8b(), host_memory="64GiB")
    assert answer.shape.parameters == 8_030_261_248
    assert answer.kv_bytes_per_token == 131072
    assert item(answer.host, "keys and values") == 16 * GIB
    assert answer.fits
    assert item(answer.device, "prefill: KV being copied") == GIB // 2
    assert item(answer.host, "input embedding") == 128256 * 4096 * 2
    codes = item(answer.device, "codes of keys") + item(answer.device, "clusters of coded keys")
    assert answer.device_bytes - codes == pytest.approx(18.4 * GIB, rel=0.01)
    assert codes == pytest.approx(2.4 * GIB, rel=0.01) and answer.config.index == "device-auto"
    whole = plan(llama3_8b(), host_memory="64GiB", embedding="device")
    assert whole.device_bytes == answer.device_bytes + 128256 * 4096 * 2
    assert not answer.full_attention.fits
    assert answer.full_attention.fits_quantized
    assert any("weights in 4 bits" in text and "KV in int8" in text for text in answer.advice)


def test_parameters_and_bytes_equal_a_real_models() -> None:
    """The meta device must count what a loaded model holds, tied weights once."""
    for config in (tiny(), tiny(tie_word_embeddings=True)):
        model = AutoModelForCausalLM.from_config(config)
        counted, held = model_shape(config), model_shape(model)
        assert counted.parameters == held.parameters == model.num_parameters()
        assert counted.weight_bytes == 4 * model.num_parameters()
        assert model_shape(config, "bfloat16").weight_bytes == 2 * model.num_parameters()


def test_a_config_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read asks, and building a model takes long: of configs that say the same one is built."""
    built: list[object] = []
    on_meta = shape_module._on_meta

    def counted(config: Any) -> Any:
        built.append(config)
        return on_meta(config)

    monkeypatch.setattr(shape_module, "_on_meta", counted)
    monkeypatch.setattr(shape_module, "_shapes", {})
    config = tiny()
    first = model_shape(config)
    assert model_shape(config) == model_shape(copy.deepcopy(config)) == first and len(built) == 1
    config.num_hidden_layers += 1  # changed in place
    assert model_shape(config).layers == first.layers + 1 and len(built) == 2
    assert model_shape(config, "bfloat16").dtype == "bfloat16" and len(built) == 3
    for width in range(shape_module.KEPT_SHAPES + 1):
        model_shape(tiny(vocab_size=100 + width))
    assert len(shape_module._shapes) == shape_module.KEPT_SHAPES
    model_shape(config)
    assert len(built) == 5 + shape_module.KEPT_SHAPES


def test_window_and_host_equal_hand_sums() -> None:
    """3 layers x 2 heads x (8 + 8) numbers x 4 bytes = 384 bytes per token."""
    options = Config(sink=4, window=16, prefill_chunk=32)
    answer = plan(tiny(), context=100, batch=2, gpu_memory="2GiB", host_memory="4GiB", config=options)
    assert item(answer.device, "sinks and window") == 2 * 28 * 384
    assert item(answer.device, "prefill: KV of one layer") == 2 * 100 * 128
    assert item(answer.host, "keys and values") == 2 * 100 * 384
    index = 2 * 100 * 3 * 2 * (64 + 4 * 32 + 8)  # a line of codes, 32 links, id and term, for each key of each head
    assert item(answer.host, "index") == index
    # 80 keys in 4 clusters: probes, sums twice, shifts of values, 16 samples of each in bfloat16, distance
    clusters = 2 * 3 * 2 * (80 + 4 * (4 * (9 + 2 * 17 + 8) + 1) + 2 * 4 * 16 * 8)
    assert item(answer.host, "clusters") == clusters
    assert answer.host_bytes == 2 * 100 * 384 + index + clusters + HOST_RESERVE
    paper = plan(tiny(), context=100, batch=2, host_memory="4GiB", config=options.replace(tail=False))
    assert paper.host_bytes == answer.host_bytes - clusters
    scan = plan(tiny(), context=100, gpu_memory="2GiB", host_memory="4GiB", config=options.replace(index="flat"))
    assert item(scan.host, "index") == 0


def test_host_dtype_counts_on_the_host_only() -> None:
    """float32 models may keep int8 on the host: less than half the bytes there, the device unchanged."""
    wide = plan(tiny(), context=1000, host_memory="4GiB")
    narrow = plan(tiny(), context=1000, host_memory="4GiB", config={"host_dtype": "int8"})
    assert 2 * item(narrow.host, "keys and values") < item(wide.host, "keys and values")
    assert narrow.device == wide.device


def test_int8_at_a_million_tokens_fits_128_gb() -> None:
    """32 layers x 8 heads x (132 + 132) bytes per token; scanned keys are their own codes, a graph holds few keys.

    Breaks if the steps behind the rows are forgotten, or if a scan of int8 keys were charged for codes.
    """
    tokens, kv = 1 << 20, 32 * 8 * 264 << 20
    config = {"host_dtype": "int8", "index": "flat", "index_options": {"codes": "int8"}}
    scan = plan(llama3_8b(), context=tokens, host_memory="128GB", config=config)
    assert item(scan.host, "keys and values") == kv and item(scan.host, "index") == 0
    clusters = item(scan.host, "clusters")
    table = item(scan.host, "input embedding")
    # 8 GiB: hidden states, while it is read
    assert scan.host_bytes == kv + clusters + 8 * GIB + table + HOST_RESERVE < 84e9
    assert not any("host" in reason for reason in scan.reasons)
    graph = plan(llama3_8b(), context=tokens, host_memory="128GiB", config={"host_dtype": "int8"}, decide=False)
    # 2,048 queries x 4 heads x lists of 100 and 256 landmarks name no more keys than that; an id for each other one
    nodes = 819_200 + 256
    assert item(graph.host, "index") == 32 * 8 * (nodes * (128 + 4 * 32 + 8) + (tokens - nodes) * 4)
    options: dict[str, Any] = {"host_dtype": "int8", "tail": False}
    placed: dict[str, Any] = {"host_memory": "128GiB", "embedding": "device", "decide": False}
    paper = plan(llama3_8b(), context=tokens, config=options, **placed)
    assert paper.host_bytes < 128 << 30 and not any("host" in reason for reason in paper.reasons)
    assert graph.host_bytes - paper.host_bytes - table == clusters < 0.7 * GIB  # a byte for each key, sums, samples
    # 8,192 queries where the index is a graph for sure: their lists may name every key
    options = {"host_dtype": "int8", "index": "roargraph"}
    sure = plan(llama3_8b(), context=tokens, host_memory="128GiB", config=options)
    assert item(sure.host, "index") == 32 * 8 * tokens * (128 + 4 * 32 + 8)
    wide = plan(llama3_8b(), context=tokens, host_memory="128GiB")
    assert item(wide.host, "keys and values") * 264 == kv * 512 and any("host" in r for r in wide.reasons)


@pytest.mark.parametrize("host", ["64GB", "128GiB", "1TiB"])
def test_largest_context_of_an_int8_host(host: str) -> None:
    """Below and above the number of keys that a graph can hold, one token more does not fit."""
    options: dict[str, Any] = {"gpu_memory": "1TiB", "host_memory": host, "config": {"host_dtype": "int8"}}
    largest = plan(llama3_8b(), **options).largest_context
    above, at = plan(llama3_8b(), context=largest + 1, **options), plan(llama3_8b(), context=largest, **options)
    assert at.host_bytes <= at.host_memory < above.host_bytes


def test_a_million_tokens_are_read_in_24_gib() -> None:
    """Llama-3-8B in bf16 with int8 rows: hidden states (8 GiB) lie on the host, and one layer's keys (4 GiB) are on the
    device at a time. Neither way alone suffices.
    """
    answer = plan(llama3_8b(), 1 << 20, "24GiB", "128GiB", config={"host_dtype": "int8", "index": "sketch"})
    assert answer.fits and answer.device_bytes <= 24 * GIB and answer.largest_context >= 1 << 20
    assert item(answer.host, "prefill: hidden states") == 8 * GIB
    assert item(answer.device, "prefill: KV of one layer") == 4 * GIB
    assert item(answer.device, "prefill: hidden states") == 3 * 8192 * 4096 * 2
    for movable in (False, True):
        shape = replace(answer.shape, hidden_movable=movable)
        size = DeviceSize(shape, answer.config, 1 << 20).fitting(24 * GIB)
        assert size.layout.hidden_on_host == movable == (size.reading_bytes <= 24 * GIB)
    roomy = plan(llama3_8b(), 1 << 20, "80GiB", "128GiB", config={"host_dtype": "int8", "index": "sketch"})
    assert roomy.device_bytes == pytest.approx(34.067 * GIB, rel=0.001)  # 80 MiB of them codes of a head
    assert roomy.host_bytes == answer.host_bytes - 8 * GIB - item(answer.host, "input embedding")


def test_device_memory_while_generating_does_not_depend_on_the_context() -> None:
    """The claim of the whole package, in its own arithmetic."""
    config = {"index": "sketch"}
    short, long = (plan(llama3_8b(), context=size, gpu_memory="80GiB", config=config) for size in (1 << 15, 1 << 20))
    assert short.decode_bytes == long.decode_bytes


def test_sliding_layers_keep_their_window_and_stay_off_the_host() -> None:
    """Gemma-3: five sliding layers to one full one; only full layers have keys on the host."""
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        sliding_window=64,
        dtype="float32",
    )
    answer = plan(config, context=1000, host_memory="4GiB")
    assert (answer.shape.full_layers, answer.shape.sliding_layers) == (1, 5)
    assert item(answer.device, "sliding layers") == 5 * 64 * 128
    assert item(answer.host, "keys and values") == 1000 * 128


def test_a_model_with_nothing_to_retrieve_is_told_so() -> None:
    """All layers sliding: retrieval would do nothing, and the plan says it."""
    answer = plan(tiny(layer_types=["sliding_attention"] * 3, sliding_window=16), context=64)
    assert answer.kv_bytes_per_token == 0
    assert "nothing to retrieve" in answer.advice[0]


def test_experts_that_are_not_visited_are_not_read() -> None:
    """The bandwidth floor of a mixture counts two of eight experts, its memory all eight."""
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=50,
    )
    shape = model_shape(config)
    one_expert = 3 * 32 * 64
    assert shape.parameters - shape.active_parameters == 2 * 6 * one_expert + 50 * 32
    assert shape.mlp_width == 2 * 64


@pytest.mark.parametrize(("context", "gpu"), [(131072, "20GiB"), (262144, "24GiB"), (65536, "18GiB")])
def test_largest_chunk_fits_and_the_next_does_not(context: int, gpu: str) -> None:
    """The suggested chunk is used as given: it must fit, and be the largest that does (in steps of 256)."""
    limit = int(gpu.removesuffix("GiB")) * GIB
    for config in (Config(index="sketch"), plan(llama3_8b(), context=context, gpu_memory=gpu).config):
        largest = plan(llama3_8b(), context=context, gpu_memory=gpu, config=config).largest_chunk
        assert 0 < largest < context
        below, above = (
            plan(llama3_8b(), context=context, gpu_memory=gpu, config=config.replace(prefill_chunk=chunk)).device_bytes
            for chunk in (largest, largest + 256)
        )
        assert below <= limit < above


@pytest.mark.parametrize("host", ["16GiB", "1TiB"])
def test_largest_context_fits_and_one_token_more_does_not(host: str) -> None:
    """Once the host is the limit, once the GPU."""
    model = llama3_8b(max_position_embeddings=1 << 22)
    largest = plan(model, host_memory=host).largest_context
    assert plan(model, context=largest, host_memory=host).fits
    assert not plan(model, context=largest + 1, host_memory=host).fits


def test_a_plan_that_does_not_fit_says_why_and_raises_on_demand() -> None:
    """All three limits at once: positions, GPU, host. `require` carries the arithmetic in its message."""
    answer = plan(llama3_8b(max_position_embeddings=8192), 1 << 20, "20GiB", host_memory="64GiB")
    assert not answer.fits
    assert len(answer.reasons) == 3
    with pytest.raises(MemoryPlanError, match="8,192") as caught:
        answer.require()
    assert "keys and values" in str(caught.value)
    fitting = plan(tiny(), context=64, host_memory="4GiB")
    assert fitting.require() is fitting


def test_too_large_chunk_names_the_one_that_fits() -> None:
    """The cure in the message is the largest chunk, not advice to buy a GPU."""
    answer = plan(llama3_8b(), host_memory="64GiB", config={"prefill_chunk": 100_000, "index": "sketch"})
    assert not answer.fits
    assert f"prefill_chunk={answer.largest_chunk}" in answer.reasons[0]


def test_advice_follows_what_fits_on_the_gpu() -> None:
    """Where KV fits there retrieval is not sold; 8B at 1M tokens takes 74 GiB even with 4-bit weights and 8-bit KV."""
    answer = plan(llama3_8b(), context=8192, host_memory="64GiB")
    assert answer.full_attention.fits
    assert answer.full_attention.floor_ms < answer.full_attention.retrieval_floor_ms
    assert answer.advice[0].startswith("When KV fits on the GPU, full attention there is exact")
    assert 'index="full"' in answer.advice[0]
    answer = plan(llama3_8b(), context=1 << 20, host_memory="256GiB")
    assert not answer.full_attention.fits_quantized
    assert "what retrieval is for" in answer.advice[0]


def test_advice_offers_4_bits_to_models_that_have_more() -> None:
    """131,072 tokens of a model in 4 bits fit with KV in int8 alone; a checkpoint's own format cannot be changed."""
    for quantization, context in (("int4", 131072), ("int4", 1 << 20), ("awq", 131072), ("awq", 1 << 20)):
        config = llama3_8b()
        if quantization == "awq":
            config.quantization_config = {"quant_method": "awq", "bits": 4}
        choice: dict[str, Any] = {"quantization": "int4"} if quantization == "int4" else {}
        answer = plan(config, context, gpu_memory="14GiB", host_memory="256GiB", **choice)
        assert answer.shape.quantized and not answer.full_attention.fits
        text = " ".join((*answer.advice, *answer.reasons))
        assert "8" in text and "4 bits" not in text and "4-bit" not in text and "quantise" not in text, text
    eight = plan(llama3_8b(), 131072, gpu_memory="16GiB", host_memory="256GiB", quantization="int8")
    assert not eight.shape.quantized and "4 bits" in " ".join(eight.advice)


@pytest.mark.parametrize(("context", "full", "retrieval"), [(16384, 6.7, 8.7), (65536, 8.8, 9.4), (98304, 10.2, 9.8)])
def test_estimated_speeds_are_near_what_an_h100_measured(context: int, full: float, retrieval: float) -> None:
    """Milliseconds per token of `FULL_KEYS`; cards with less bandwidth take longer by what is read."""
    answer = plan(llama3_8b(), context, gpu_memory="80GiB", host_memory="64GiB")
    older, newer, h100 = answer.speeds
    assert (older.gpu, newer.gpu, h100.gpu) == ("RTX 3090", "RTX 4090", "H100 SXM")
    assert h100.full_ms == pytest.approx(full, rel=0.03) and h100.retrieval_ms == pytest.approx(retrieval, rel=0.06)
    slower = (1 / older.bandwidth - 1 / h100.bandwidth) / (1 / newer.bandwidth - 1 / h100.bandwidth)
    assert older.full_ms - h100.full_ms == pytest.approx(slower * (newer.full_ms - h100.full_ms))
    assert older.retrieval_ms is not None and newer.retrieval_ms is not None and h100.retrieval_ms is not None
    assert (
        2 < newer.retrieval_ms / h100.retrieval_ms < older.retrieval_ms / h100.retrieval_ms < h100.bandwidth / 9.36e11
    )


def test_no_speed_is_estimated_of_an_index_on_the_host() -> None:
    answer = plan(llama3_8b(), 131072, host_memory="64GiB", config={"index": "flat"})
    assert [one.retrieval_ms for one in answer.speeds] == [None] * 3 and all(one.full_ms > 0 for one in answer.speeds)
    rows = [line for line in str(answer).splitlines() if "estimated by bandwidth" in line or "by retrieval  " in line]
    assert len(rows) == 2 and rows[1].split()[2:] == ["-", "-", "-"] and len(rows[0]) <= 100
    assert [one["gpu"] for one in answer.to_dict()["speeds"]] == ["RTX 3090", "RTX 4090", "H100 SXM"]


def test_quantised_weights_count_at_their_bits(tmp_path: Path) -> None:
    """4-bit: matrices at 4.5 bits, embedding and head in full; stored weights override the estimate."""
    quantization = {"quant_method": "awq", "bits": 4}
    config = tiny(dtype="bfloat16")
    whole = model_shape(config)
    config.quantization_config = quantization
    shape = model_shape(config)
    matrices = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert shape.parameters == whole.parameters
    assert shape.weight_bytes == matrices * 4.5 / 8 + 2 * (whole.parameters - matrices)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    assert model_shape(tmp_path).weight_bytes == 1234
    config.quantization_config = {"quant_method": "unheard_of"}
    with pytest.raises(ConfigError, match="unheard_of"):
        model_shape(config)


def test_folder_and_model_and_config_give_the_same_plan(tmp_path: Path) -> None:
    """Three ways in, one answer; a folder needs only its config.json."""
    config = tiny()
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    answers = [plan(source, context=128, host_memory="4GiB") for source in (config, str(tmp_path), tmp_path)]
    assert {answer.device_bytes for answer in answers} == {answers[0].device_bytes}
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert plan(model, context=128, host_memory="4GiB").device_bytes == answers[0].device_bytes + buffers


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"context": 0}, ConfigError, "context"),
        ({"context": 1.5}, ConfigError, "context"),
        ({"batch": True}, ConfigError, "batch"),
        ({"gpu_memory": "24 gigs"}, ConfigError, "gpu_memory"),
        ({"host_memory": -1}, ConfigError, "host_memory"),
        ({"dtype": "int8"}, ConfigError, "int8"),
        ({"dtype": torch.float64}, ConfigError, "float64"),
        ({"config": {"windw": 3}}, ConfigError, "windw"),
        ({"model_or_config_or_path": "no/such-model"}, InputDataError, "no/such-model"),
        ({"model_or_config_or_path": 7}, ConfigError, "int"),
        ({"model_or_config_or_path": torch.nn.Linear(2, 2)}, ConfigError, "Linear"),
        ({"model_or_config_or_path": T5Config()}, UnsupportedModelError, "t5"),
    ],
)
def test_bad_input_has_its_own_error(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """Nothing is clamped, defaulted or passed on to a library that fails later."""
    with pytest.raises(error, match=words):
        plan(**{"model_or_config_or_path": tiny(), "host_memory": "4GiB", **arguments})


def test_table_is_aligned_and_narrow() -> None:
    """Sizes end in one column, so that they can be compared by eye; nothing needs a wide terminal."""
    text = str(plan(llama3_8b(), context=1 << 20, host_memory="64GiB"))
    lines = text.splitlines()
    sizes = [re.match(r"  [^-].{29} *[\d.,]+ [GMK]iB", line) for line in lines]
    assert len([match for match in sizes if match]) > 10
    assert len({match.end() for match in sizes if match}) == 1
    assert max(map(len, lines)) <= 100
    assert "It does not fit" in text


def test_to_dict_is_json_with_the_sums() -> None:
    answer = plan(tiny(), context=64, host_memory="4GiB")
    read = json.loads(json.dumps(answer.to_dict()))
    assert read["fits"] is True
    assert read["device_bytes"] == sum(one["bytes"] for one in read["device"]) == answer.device_bytes
    assert read["device_bytes"] > DEVICE_RESERVE


def test_command_prints_the_table_and_returns_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 when it fits and 1 when not, so that scripts can ask."""
    tiny().save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    base = [str(tmp_path), "--max-context", "512", "--host-memory", "4GiB"]
    assert run(parser.parse_args(base)) == 0
    assert "It fits." in capsys.readouterr().out
    assert run(parser.parse_args([*base, "--gpu-memory", "1MiB", "--json"])) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    short = ["--max-context", "1k", "--sink", "0", "--window", "2k", "--json"]
    assert run(parser.parse_args([str(tmp_path), "--host-memory", "4GiB", *short])) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["context"] == 1024
    assert (read["config"]["sink"], read["config"]["window"]) == (0, 2048)
    with pytest.raises(ConfigError, match="--max-context='128q' is not a number of tokens"):
        run(parser.parse_args([str(tmp_path), "--max-context", "128q"]))
