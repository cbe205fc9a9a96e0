"""What shared prefixes may have on a GPU: how much by default, and that an engine's tree keeps to it."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.engine import prefix_handle as held
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import ConfigError, MemoryPlanError
from retrieval_attn.memory import device_room as module
from retrieval_attn.memory import host_room, reclaim
from retrieval_attn.memory.arithmetic import HOST_RESERVE
from retrieval_attn.memory.device import DeviceSize
from retrieval_attn.memory.device_room import (
    MARGIN,
    IndexChoice,
    exact_device_bytes,
    prefix_cache_device_bytes,
    shared_room,
)
from retrieval_attn.memory.index_choice import opened_bytes, reading_bytes
from retrieval_attn.memory.plan import plan
from retrieval_attn.memory.reclaim import idle_device_bytes, register
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import GIB
from retrieval_attn.server.settings import EngineSpec
from tests.engine.audit import check_engine
from tests.engine.test_engine import ids, llm_of
from tests.memory.test_plan import llama3_8b
from tests.tiny_models import random_ids, tiny_model
from tests.waiting import WAIT_SECONDS

CHUNK = 2048


@pytest.fixture(autouse=True)
def no_other_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle texts of other tests' engines, which are not collected yet, count here otherwise."""
    monkeypatch.setattr(reclaim, "_holders", [])


def size_of(rows: int) -> DeviceSize:
    return DeviceSize(model_shape(llama3_8b(), None), Config(prefill_chunk=CHUNK), CHUNK, rows)


def test_what_rows_reading_and_a_question_leave() -> None:
    """Llama-3-8B and 18 rows: windows of 1,280 tokens with 131,072 bytes each, and a chunk's activations."""
    size = size_of(18)
    rows = 18 * size.window_tokens * 131072
    reading = replace(size, batch=1).chunks.bytes(CHUNK)
    assert size.window_bytes == rows and 0 < reading < GIB
    assert shared_room(size, 64 * GIB) == 64 * GIB - rows - reading - GIB
    assert shared_room(size, 64 * GIB, gpus=2) == 64 * GIB - rows - 2 * (reading + GIB)
    assert shared_room(size, rows) == 0
    assert shared_room(size, rows + reading + GIB) == 0
    assert 400 < shared_room(size, 62 * GIB) / (rows / 18) < 430, "windows of entries on a card of 80 GB"


def test_the_number_of_a_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """None on a CPU. On GPUs, which a stand-in claims here, what all of them have to spare counts."""
    model = tiny_model("llama")
    config = Config(prefill_chunk=CHUNK)
    assert prefix_cache_device_bytes(model, config, 18) is None and exact_device_bytes(model, config, 18) is None
    assert default_limits(model, config).prefix_cache_device_bytes is None
    spare = {torch.device("cuda", 0): 3 * GIB, torch.device("cuda", 1): 2 * GIB}
    monkeypatch.setattr(module, "devices", lambda _: tuple(spare))
    monkeypatch.setattr(module, "spare_bytes", spare.__getitem__)
    size = DeviceSize(model_shape(model), config, CHUNK, 18)
    assert prefix_cache_device_bytes(model, config, 18) == shared_room(size, 5 * GIB, gpus=2) > 2 * GIB
    pages = exact_device_bytes(model, config, 18)
    shared = prefix_cache_device_bytes(model, config, 18)
    assert shared is not None and pages == (shared + 2 * GIB) // 2
    assert exact_device_bytes(model, config, 10**6) == 0, "rows come first"
    limits = default_limits(model, config)
    assert limits.prefix_cache_device_bytes == shared_room(size, 5 * GIB, gpus=2)
    assert limits.sharing(None) is limits and limits.sharing(5).prefix_cache_device_bytes == 5


def test_pages_leave_room_for_rows_with_many_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-2-7B, 34 rows beside 13.5 GB of weights on a card of 80 GB: pages take half of what windows leave, and idle
    texts what is then left, but for a question's GiB.
    """
    shape = llama3_8b()
    shape.num_key_value_heads = shape.num_attention_heads
    spare, place = 64 * GIB, torch.device("cuda", 0)
    monkeypatch.setattr(module, "devices", lambda _: (place,))
    monkeypatch.setattr(module, "spare_bytes", {place: spare}.__getitem__)
    monkeypatch.setattr(module, "model_shape", lambda _: model_shape(shape, None))
    config = Config(prefill_chunk=CHUNK)
    windows = DeviceSize(model_shape(shape, None), config, CHUNK, 34).window_bytes
    pages, shared = (of(tiny_model("llama"), config, 34) for of in (exact_device_bytes, prefix_cache_device_bytes))
    assert pages is not None and shared is not None and windows > 19 * GIB
    assert windows + 2 * pages < spare - GIB // 4 and windows + spare // 2 + pages > spare
    assert windows + shared < spare - GIB


def test_pages_are_taken_from_what_idle_texts_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("cuda", 0)
    monkeypatch.setattr(module, "devices", lambda _: (place,))
    monkeypatch.setattr(module, "spare_bytes", {place: 4 * GIB}.__getitem__)
    llm = llm_of()
    with Engine(llm, paged_prefix_tokens=256, paged_prefix_pages=1000) as engine:
        limits, pages = engine._limits, engine._exact
        assert pages is not None and pages.nbytes == 1000 * 64 * limits.token_bytes
        assert limits.prefix_cache_device_bytes is not None
        assert engine._device_bytes == limits.prefix_cache_device_bytes - pages.nbytes > 0
    with Engine(llm, limits=replace(limits, prefix_cache_device_bytes=5), paged_prefix_tokens=256) as engine:
        assert engine._device_bytes == 5


def test_idle_texts_yield_to_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new text needs GPU memory that idle ones hold: as many are evicted as it lacks, the oldest first, and none
    while there is room.
    """
    model, free = tiny_model("llama"), [0]
    choice = IndexChoice(model, Config(index="flat"))
    tree = RadixCache()
    register(tree)
    for number in range(4):
        tree.insert(tree.root, ids(100, number), Text(Sizes(10, GIB)), "", rebuild_seconds=1.0)
    leased = tree.match([*ids(100, 0), 1], "", leased=True)
    assert idle_device_bytes() == 3 * GIB and leased.lease is not None
    monkeypatch.setattr(module, "whole_device_bytes", lambda _: free[0] + 4 * GIB - tree.sizes.device)
    monkeypatch.setattr(module, "reads_host", lambda _: False)
    shape = model_shape(model)
    needed = reading_bytes(shape, choice.config, 50_000, 64 * GIB)
    for free[0], left in (
        (needed + MARGIN, 4), (needed + MARGIN - 1, 3), (needed + MARGIN - 2 * GIB, 2), (0, 2 if needed < GIB else 1),
    ):  # fmt: skip
        choice.make_room(50_000)
        assert len(tree) == left, (free, needed)
    choice.make_room(1 << 40)
    assert len(tree) == 1 and idle_device_bytes() == 0, "the leased one stays"
    leased.lease.release()
    opened = opened_bytes(shape, choice.config, 50_000)
    assert opened < needed
    for free[0], left in ((opened + MARGIN - 3 * GIB, 1), (opened + MARGIN - 3 * GIB - 1, 0)):
        choice.take(choice.config, 50_000)
        assert len(tree) == left


def test_a_question_evicts_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context has its codes: a chunk needs no room, and a longer prompt only that of its own tokens."""
    model = tiny_model("llama")
    cache = RetrievalCache(model, Config(index="flat"))
    asked: list[int] = []
    monkeypatch.setattr(IndexChoice, "make_room", lambda self, tokens, batch=1: asked.append(tokens))
    ra.enable(model, cache.config)
    with torch.no_grad(), ra.prefill_by_layer(model, 256):
        for tokens in (900, 12, 300):
            model(random_ids(1, tokens), past_key_values=cache)
    ra.disable(model)
    assert asked == [900, 300]


def test_idle_texts_yield_to_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question on a long text needs room for keys and values of some layers besides the codes that come back: other
    texts yield it, and a request waits where they hold too little.
    """
    model, free = tiny_model("llama"), [0]
    choice = IndexChoice(model, Config(index="flat"))
    tree = RadixCache()
    register(tree)
    tree.insert(tree.root, ids(100, 1), Text(Sizes(10, GIB)), "", rebuild_seconds=1.0)
    monkeypatch.setattr(module, "whole_device_bytes", lambda _: free[0])
    shape = model_shape(model)
    tokens = 2 * GIB // (3 * shape.kv_layer_bytes)
    needed = module.question_bytes(shape, tokens)
    assert module.question_bytes(shape, 10) == GIB and abs(needed - 2 * GIB) < 3 * shape.kv_layer_bytes
    for free[0], fits, left in (
        (MARGIN + needed + 5, True, 1), (MARGIN + needed + 4 - GIB, False, 0), (MARGIN + needed + 4, False, 0)
    ):  # fmt: skip
        assert choice.can_ask(5, tokens) == fits, free
        choice.make_room_to_ask(5, tokens)
        assert len(tree) == left, free
    assert IndexChoice(None, Config(index="flat")).can_ask(1 << 50, 1)


def test_idle_texts_yield_to_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is copied where host and device have room for it; idle texts yield only then."""
    model, free, host = tiny_model("llama"), [0], [0]
    choice = IndexChoice(model, Config(index="flat"))
    tree = RadixCache()
    register(tree)
    tree.insert(tree.root, ids(100, 1), Text(Sizes(10, GIB)), "", rebuild_seconds=1.0)
    monkeypatch.setattr(module, "whole_device_bytes", lambda _: free[0])
    monkeypatch.setattr(module, "available_host_bytes", lambda: host[0])
    shape = model_shape(model)
    needed = reading_bytes(shape, choice.config, 400_000, 64 * GIB)
    nbytes = shape.full_layers * 1000 + module.COPY_SPARE
    for free[0], host[0], fits, left in (
        (MARGIN + needed, nbytes, True, 1), (MARGIN + needed, nbytes - 1, False, 1),
        (MARGIN + 10 - GIB, nbytes, False, 1), (MARGIN + needed - GIB, nbytes, True, 0),
    ):  # fmt: skip
        assert choice.make_room_to_copy(400_000, 1000) == fits, (free, host)
        assert len(tree) == left, (free, host)


class Text(NamedTuple):
    """Payload of a node."""

    sizes: Sizes


def test_idle_texts_yield_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a prefill is refused for lack of host memory, texts that nobody uses go."""
    tree = RadixCache()
    register(tree)
    for number in range(3):
        tree.insert(tree.root, ids(100, number), Text(Sizes(GIB)), "", rebuild_seconds=1.0)
    needed = plan(llama3_8b(), 1000, host_memory=1)
    least = needed.host_bytes - HOST_RESERVE - needed.shape.host_table_bytes
    short = [0]
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: least + 3 * GIB - tree.sizes.host - short[0] * GIB)
    for short[0], left in ((0, 3), (2, 1), (3, 0)):
        host_room.require_host_room(llama3_8b(), Config(), 1000, 1, hidden_on_host=False)
        assert len(tree) == left
    short[0] = 4
    with pytest.raises(MemoryPlanError, match="of host memory"):
        host_room.require_host_room(llama3_8b(), Config(), 1000, 1, hidden_on_host=False)


def test_a_bound_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    limits = default_limits(llm.model, llm.config)
    assert limits.sharing(None) is limits
    with pytest.raises(ConfigError, match="the model runs on none"):
        limits.sharing(1 << 30)
    with pytest.raises(ConfigError, match="prefix_cache_device_bytes"):
        replace(limits, prefix_cache_device_bytes=-1)
    monkeypatch.setattr("retrieval_attn.llm.LLM", lambda *_, **__: SimpleNamespace(**vars(llm)))
    with pytest.raises(ConfigError, match="the model runs on none"):
        EngineSpec("tiny", {}, llm.config.to_dict(), prefix_cache_device_bytes=1 << 30).load()


def all_apart(_: Tensor) -> bool:
    """As if the model ran on a GPU."""
    return True


def ask_all(engine: Engine, documents: int) -> list[tuple[int, ...]]:
    """A question about each; the ticks after the last end have passed when this returns."""
    found = []
    for number in range(documents):
        found.append(engine.submit(Request((ids(400, number), ids(5, 90)), 3)).result().tokens)
        check_engine(engine)
    engine.submit(Request(((5,),), 1)).result()
    return found


def test_an_engine_keeps_to_each_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room on the host, the tree gives up what the device has no room for, and the other way round; what it has
    on the device does not count as memory that jobs have no more. Answers are those of an engine without a tree.
    """
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=0) as engine:
        expected = ask_all(engine, 6)
    monkeypatch.setattr(held, "on_device", all_apart)
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        assert ask_all(engine, 6) == expected
        whole = engine.stats["shared"]
        assert (whole.prefix_entries_resident, whole.evicted) == (6, 0) and whole.device_nbytes and whole.host_nbytes
        assert engine._scheduler._places.outside_bytes == whole.host_nbytes
    limits = replace(default_limits(llm.model, llm.config), prefix_cache_device_bytes=whole.device_nbytes * 5 // 12)
    with Engine(llm, limits=limits, prefix_cache_bytes=1 << 26) as engine:
        assert ask_all(engine, 6) == expected
        shared = engine.stats["shared"]
        assert (shared.prefix_entries_resident, shared.evicted) == (
            2,
            4,
        ) and shared.device_nbytes <= whole.device_nbytes * 5 // 12
    with Engine(llm, prefix_cache_bytes=whole.host_nbytes * 5 // 12) as engine:
        assert ask_all(engine, 6) == expected
        shared = engine.stats["shared"]
        assert (shared.prefix_entries_resident, shared.evicted) == (
            2,
            4,
        ) and shared.host_nbytes <= whole.host_nbytes * 5 // 12
    with Engine(llm, limits=replace(limits, prefix_cache_device_bytes=0), prefix_cache_bytes=1 << 26) as engine:
        assert ask_all(engine, 6) == expected
        assert engine.stats["shared"].prefix_entries_resident == 0


def test_a_text_that_cannot_stay_evicts_no_other_one() -> None:
    """While it is asked it is in use, and afterwards it goes; a small text stays cached."""
    llm = llm_of()
    small, large = ids(300, 1), ids(1600, 2)
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        engine.submit(Request((small, ids(5, 90)), 2)).result()
        nbytes = engine.stats["shared"].nbytes
    with Engine(llm, prefix_cache_bytes=2 * nbytes) as engine:
        cached = [
            engine.submit(Request((text, ids(5, 90)), 2)).result().cached_tokens for text in (small, large, small)
        ]
        assert cached == [0, 0, 300]
        engine.submit(Request(((5,),), 1)).result()
        shared = engine.stats["shared"]
        assert (shared.prefix_entries_resident, shared.evicted) == (1, 1) and shared.nbytes <= 2 * nbytes
        check_engine(engine)


def test_a_holder_may_be_collected_while_holders_are_counted() -> None:
    """Its removal must not wait for the lock that the same thread holds."""
    from retrieval_attn.memory import reclaim as module

    class Idle:
        def reclaim(self, host: int, device: int) -> tuple[int, int]:
            return 0, 0

        def idle_device_bytes(self) -> int:
            return 0

    holder = Idle()
    register(holder)
    before = len(module._holders)
    done = threading.Event()

    def collect(held: list[Idle]) -> None:
        with module._lock:
            held.clear()
        done.set()

    held = [holder]
    del holder
    threading.Thread(target=collect, args=(held,), daemon=True).start()
    assert done.wait(WAIT_SECONDS) and len(module._holders) == before - 1
