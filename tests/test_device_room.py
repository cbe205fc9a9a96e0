"""index="auto" keeps codes on the device where there is room for them, and only there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.memory import device_room
from retrieval_attn.memory.device_room import chosen_index, free_device_bytes
from retrieval_attn.memory.plan import GIB, plan
from tests.test_memory_plan import llama3_8b
from tests.tiny_models import build_model, random_ids, tiny_model

AUTO = ra.Config()


def test_codes_go_where_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Llama-3-8B at 128K within 24 GiB: 15 of them weights. The log says what was chosen, and why."""
    caplog.set_level(logging.INFO)
    assert chosen_index(llama3_8b(), AUTO, 131072, 8 * GIB).index == "device"
    assert "codes of all keys lie on the device" in caplog.text
    assert chosen_index(llama3_8b(), AUTO, 131072, 5 * GIB) is AUTO
    assert "do not fit" in caplog.text
    assert plan(llama3_8b(), config={"index": "device"}, host_memory="64GiB").fits


def test_nothing_is_chosen_without_need() -> None:
    """Another device, a short text, an index that was asked for: the config is the one that was given."""
    for config, tokens, free in (
        (AUTO, 131072, None),
        (AUTO, 1000, 80 * GIB),
        (AUTO.replace(index="sketch"), 131072, 80 * GIB),
        (AUTO.replace(index_options={"scan_below": 5}), 131072, 80 * GIB),
    ):
        assert chosen_index(llama3_8b(), config, tokens, free) is config
    assert free_device_bytes(tiny_model("llama")) is None


def test_a_context_reads_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache has codes, asks them, and keeps who watches the layers."""
    monkeypatch.setattr(device_room, "SKETCH_FROM", 100)
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: GIB)
    model: Any = ra.enable(build_model("llama"), ra.Config(sink=4, window=16, spill=8, retrieve=2))
    tokenizer: Any = Tokenizer()
    context = ra.Context(model, tokenizer)
    seen: list[None] = []
    context.cache.on_layer = lambda: seen.append(None)
    context.read(random_ids(1, 400)[0].tolist(), progress=False)
    assert context.cache.index_kinds() == {"device": sum(context.cache.index_kinds().values())}
    assert context.config.index == "auto" and context.cache.index.config.index == "device" and seen
    layers: list[Any] = context.cache.layers
    codes = context.cache.device_nbytes - sum(layer.window.nbytes for layer in layers)
    assert 0 < codes == sum(index.device_nbytes for index in context.cache.coded_indexes)
    with torch.no_grad():
        assert context.continue_with([5], max_new_tokens=3).tokens


def test_auto_is_decided_for_every_cache_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls and `generate` get what a context gets; later layers do not decide by the memory that is left, and a
    cache that is emptied decides anew.
    """
    free = iter([GIB, GIB, 0])
    monkeypatch.setattr(device_room, "SKETCH_FROM", 100)
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: next(free))
    config = ra.Config(sink=4, window=16, spill=8, retrieve=2)
    model: Any = ra.enable(build_model("llama"), config)
    cache = ra.RetrievalCache(model, config)
    ids = random_ids(1, 400)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert set(cache.index_kinds()) == {"device"}
        other = ra.RetrievalCache(model, config)
        options = {"custom_generate": ra.generate, "max_new_tokens": 2, "do_sample": False}
        model.generate(ids, past_key_values=other, **options)
        assert set(other.index_kinds()) == {"device"}
        cache.reset()
        model(ids, past_key_values=cache)
    assert set(cache.index_kinds()) == {"flat"} and next(free, None) is None


class Tokenizer:
    """As much of one as a context of token ids needs."""

    eos_token_id = pad_token_id = 0
    bos_token_id = chat_template = None

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.cuda
def test_free_memory_follows_the_cap() -> None:
    """What the allocator may still have, never more than the device."""
    model = build_model("llama").to("cuda")
    free = free_device_bytes(model)
    total = torch.cuda.get_device_properties(0).total_memory
    assert free is not None and 0 < free <= total
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        capped = free_device_bytes(model)
        assert capped is not None and capped <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        model.to("cpu")
