"""What the plan says of rotary tables and of a state's layers against what transformers' own modules make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache

from retrieval_attn.attention.state import StateLayer
from retrieval_attn.config import Config
from retrieval_attn.memory.device import DeviceLayout, DeviceSize, rotary_bytes
from retrieval_attn.memory.plan import plan
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.tower import FRAGMENTED, tower_shape
from retrieval_attn.model.layers import decoder_parts
from tests.memory.live_bytes import LiveBytes, on_meta
from tests.model import multimodal_models
from tests.model.test_hybrid import CONFIGS as HYBRIDS
from tests.model.test_hybrid import new_model, shared_model
from tests.tiny_models import CONFIGS, config_of, random_ids, tiny_model
from tools.card.four_bits import SHAPES

CHUNK = 4096
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def table_bytes(model: Any, rows: int, tokens: int) -> int:
    """Bytes of all cosines and sines that a forward of so many tokens makes."""
    seen: list[int] = []

    def noted(module: Any, args: Any, out: tuple[torch.Tensor, ...]) -> None:
        seen.append(sum(table.nbytes for table in out))

    hooks = [rotary.register_forward_hook(noted) for rotary in decoder_parts(model).rotaries]
    try:
        with torch.no_grad():
            place = torch.arange(tokens).expand(rows, -1)
            model(input_ids=random_ids(rows, tokens), position_ids=place, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(seen)


def tiny(name: str) -> Any:
    if name in HYBRIDS:
        return shared_model(name)
    return tiny_model(name) if name in CONFIGS else multimodal_models.shared_model(name)


@pytest.mark.parametrize("name", [*CONFIGS, *HYBRIDS, *multimodal_models.NAMES])
def test_rotary_tables_have_as_many_bytes_as_planned(name: str) -> None:
    """Partial rotation, halves, tables of each type of layer, three axes, none: of a model and of its config."""
    model = tiny(name)
    for source in (model, model.config):
        size = DeviceSize(model_shape(source, "float32"), Config(), 24, batch=2)
        assert 24 * rotary_bytes(size) == table_bytes(model, 2, 24)


def test_tables_that_are_rescaled_as_positions_come_are_counted() -> None:
    """Without a look at positions, which the meta device cannot give."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
    model = new_model("qwen3_next", rope_parameters=rope)
    assert model_shape(model.config).rotary_numbers == table_bytes(model, 1, 10) // 10 // 4 == 16


def layer_peak(config: Any, chunk: int) -> int:
    """Most bytes alive in the first decoder layer's forward of a second chunk, its input too. On the meta device."""

    def traced() -> int:
        model = AutoModelForCausalLM.from_config(config).eval()
        state = StateLayer()
        cache = Cache(layers=[state])
        tables = torch.empty(1, chunk, 64)

        def forward() -> None:
            layer, states = model.model.layers[0], torch.empty(1, chunk, config.hidden_size)
            layer(states, position_embeddings=(tables, tables), attention_mask=None, past_key_values=cache)

        with torch.no_grad():
            forward()
            known = [*model.parameters(), *model.buffers(), tables, *(held for _, held in state.states())]
            with LiveBytes(known) as live:
                forward()
        return live.peak

    return int(on_meta(traced, torch.bfloat16))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_5_text", {}),
        ("qwen3_5_text", {"hidden_size": 2048, "intermediate_size": 512, "linear_num_value_heads": 16}),
        ("qwen3_5_text", {"linear_num_key_heads": 8, "linear_num_value_heads": 32, "linear_key_head_dim": 64}),
        ("qwen3_next", {**EXPERTS, "hidden_size": 2048, "linear_num_value_heads": 32}),
    ],
)
def test_a_chunk_in_a_layer_with_a_state(model_type: str, changes: dict[str, Any]) -> None:
    """Qwen3.5-27B's shape and others, live bytes traced through transformers' layer without flash-linear-attention."""
    sizes = {**SHAPES["qwen3.5-27b"][1], "num_hidden_layers": 4, **changes}
    config = config_of(model_type, dtype="bfloat16", **sizes)
    size = DeviceSize(model_shape(config), Config(), 1 << 20)
    assert size.chunks.token_bytes(CHUNK) == pytest.approx(layer_peak(config, CHUNK) / CHUNK, rel=0.01)


def test_an_mlp_that_takes_more_than_a_state_counts() -> None:
    """The largest of what a token passes through, and of a part of a model without such layers no state."""
    sizes = {**SHAPES["qwen3.5-27b"][1], "num_hidden_layers": 4}
    wide = model_shape(config_of("qwen3_5_text", dtype="bfloat16", **{**sizes, "intermediate_size": 1 << 17}))
    assert DeviceSize(wide, Config(), 1 << 20).chunks.token_bytes(8192) == 3 * (5120 + (1 << 17)) * 2
    full = config_of("qwen3_5_text", dtype="bfloat16", **{**sizes, "layer_types": ["full_attention"] * 4})
    assert DeviceSize(model_shape(full), Config(), 1 << 20).chunks.token_bytes(8192) == 3 * (5120 + 17408) * 2


def hybrid_27b() -> Any:
    return config_of("qwen3_5_text", dtype="bfloat16", max_position_embeddings=1 << 20, **SHAPES["qwen3.5-27b"][1])


@pytest.mark.parametrize(("tokens", "chunk", "in_state"), [(1 << 20, 8192, False), (1 << 18, 8192, True)])
def test_the_plan_of_a_27b_hybrid(tokens: int, chunk: int, in_state: bool) -> None:
    """Tables of a quarter of the head. A token takes 353 KiB in a layer with a state and 132 in one with keys, but
    there the keys of all tokens are, too: the peak is in the one or the other, and never has both.
    """
    answer = plan(hybrid_27b(), tokens, "24GiB", "128GiB", config={"prefill_chunk": chunk})
    items = {item.name: item.bytes for item in answer.device}
    assert items["prefill: rotary tables"] == tokens * 2 * 64 * 2
    assert items["prefill: one chunk"] == chunk * (361504 if in_state else 3 * (5120 + 17408) * 2)
    assert items.get("prefill: KV of one layer", 0) == (0 if in_state else tokens * 4096)
    size = DeviceSize(model_shape(hybrid_27b()), Config(), tokens, layout=DeviceLayout(True, 1))
    both = size.fixed_bytes + tokens * size.token_bytes, chunk * size.chunks.visiting
    attending, mixing = (1.5 * chunk * one for one in (size.chunks.attending, size.chunks.mixing))
    assert size.reading_bytes == sum(both) + max(attending, mixing - tokens * 4096)


def test_two_layers_of_keys_stay_beside_a_state() -> None:
    """Where a layer's keys may still leave while the next one computes they count in both."""
    size = DeviceSize(model_shape(hybrid_27b()), Config(), 1 << 20, layout=DeviceLayout())
    assert size.chunks.absent == 0 and size.chunks.in_state(1)


@pytest.mark.parametrize("layout", [DeviceLayout(), DeviceLayout(False, 1), DeviceLayout(True, 1)])
@pytest.mark.parametrize("free_mib", [100, 1000, 5000])
def test_the_largest_chunk_costs_what_is_free(layout: DeviceLayout, free_mib: int) -> None:
    """One token more does not fit, whichever layer the peak is in."""
    chunks = DeviceSize(model_shape(hybrid_27b()), Config(), 1 << 18, layout=layout).chunks
    free = free_mib << 20
    most = chunks.most(free)
    assert chunks.bytes(most) <= free < chunks.bytes(most + 1)


SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "patch_size": 14}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {**SIZES, "num_attention_heads": 4, "num_hidden_layers": 3, "image_size": 448},
    "mistral3": {**SIZES, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 3, "image_size": 448},
    "qwen2_vl": {"depth": 3, "embed_dim": 256, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 4, "patch_size": 14},
    "qwen2_5_vl": {**SIZES, "depth": 3, "num_heads": 4, "out_hidden_size": 96, "fullatt_block_indexes": [0]},
    "qwen3_vl": {
        **SIZES, "depth": 3, "num_heads": 4, "out_hidden_size": 96, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_takes_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    """Live bytes of an image of 1,024 patches, its pixels included: the formula without fragmentation, or less."""
    side, patches = 448, 1024
    model: Any = multimodal_models.new_model(name, vision=TOWERS[name], ids={"mm_tokens_per_image": 256}).to(dtype)
    model.set_attn_implementation("sdpa")
    if name in ("gemma3", "mistral3"):
        given: dict[str, Any] = {"pixel_values": torch.zeros(1, 3, side, side)}
        given |= {"image_sizes": torch.tensor([[side, side]])} if name == "mistral3" else {}
    else:
        given = {"pixel_values": torch.zeros(patches, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 32, 32]])}
    with torch.no_grad():
        model.model.get_image_features(**given, return_dict=True)
        with LiveBytes([*model.parameters(), *model.buffers(), *given.values()]) as live:
            model.model.get_image_features(**given, return_dict=True)
    tower = tower_shape(model.config, "", dtype.itemsize, 1)
    assert tower is not None
    tokens = -(-patches // tower.merged)
    masks = patches**2 * tower.pair_bytes
    planned = int((tower.image_bytes(tokens) - masks) / (1 + FRAGMENTED)) + masks
    assert 0.9 * planned / 1.35 <= live.peak + given["pixel_values"].nbytes <= 1.1 * planned


def test_a_plan_counts_towers_and_images() -> None:
    """Weights, and what the largest image of a short context takes beyond a chunk; nothing for a text model."""
    config = multimodal_models.new_model("qwen2_5_vl", vision=TOWERS["qwen2_5_vl"]).config
    config.text_config.max_position_embeddings = 32768
    asked: dict[str, Any] = {"dtype": "bfloat16", "config": {"index": "flat"}}
    found = plan(config, context=20_000, gpu_memory="24GiB", **asked)
    tower = found.shape.tower
    assert tower is not None and tower.patches == 65536 and "of them for images" in found.shape.weights_note
    items = {item.name: item.bytes for item in found.device}
    passing = sum(size for name, size in items.items() if name.startswith("prefill: ") or name == "fragmentation")
    assert passing == tower.image_bytes(20_000) == tower.image_bytes(16384)
    least = found.device_bytes
    assert plan(config, context=20_000, gpu_memory=least, **asked).fits
    short = plan(config, context=20_000, gpu_memory=least - (1 << 20), **asked)
    assert not short.fits and short.largest_chunk == 0 and short.largest_context < 20_000
    assert plan(config, context=1000, gpu_memory=least, **asked).device_bytes < least
    text = plan(config_of("llama"), context=20_000, dtype="bfloat16")
    assert text.shape.tower is None and "prefill: image" not in [item.name for item in text.device]


def test_the_largest_image_is_that_of_the_processor(tmp_path: Path) -> None:
    """By either form of preprocessor_config.json."""
    model = multimodal_models.new_model("qwen2_vl")
    model.save_pretrained(tmp_path)
    for given in ({"size": {"shortest_edge": 3136, "longest_edge": 784_000}}, {"max_pixels": 784_000}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
        tower = model_shape(tmp_path).tower
        assert tower is not None and tower.patches == 4000 and tower.merged == 4
