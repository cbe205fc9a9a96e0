"""index="auto" keeps codes on the device where there is room for them, and only there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.index.device import PLANNED
from retrieval_attn.memory import device_room, index_choice
from retrieval_attn.memory.device import DEVICE_RESERVE, DeviceLayout, DeviceSize, state_bytes
from retrieval_attn.memory.device_room import IndexChoice, chosen_index, free_device_bytes, reading_layout
from retrieval_attn.memory.plan import plan
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import GIB
from retrieval_attn.offload import managed
from retrieval_attn.runner import hidden_states
from tests.memory.test_activations import hybrid_27b
from tests.memory.test_plan import llama3_8b
from tests.tiny_models import build_model, random_ids, tiny_model

AUTO = ra.Config()


def test_codes_go_where_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Llama-3-8B at 128K within 24 GiB: 15 of them weights. The log says what was chosen, and why."""
    caplog.set_level(logging.INFO)
    assert chosen_index(llama3_8b(), AUTO, 131072, 8 * GIB).index == PLANNED
    assert "codes of all keys lie on the device" in caplog.text
    assert chosen_index(llama3_8b(), AUTO, 131072, GIB) is AUTO
    assert "do not fit" in caplog.text
    assert plan(llama3_8b(), config={"index": "device"}, host_memory="64GiB").fits


def test_a_chunk_that_makes_room_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The largest of halves with which codes fit, and the largest codes that do; with twice as much at once none fit.
    Its plan fits. Where no chunk makes room the keys stay on the host.
    """
    caplog.set_level(logging.INFO)
    free = int(2.6 * GIB)
    chosen = chosen_index(llama3_8b(), AUTO, 131072, free)
    chunk = chosen.prefill_chunk
    assert chosen.index == PLANNED and 512 <= chunk < 8192 and 8192 % chunk == 0
    assert f"prefill_chunk={chunk} makes room for them" in caplog.text
    limit = free + plan(llama3_8b()).shape.weight_bytes + DEVICE_RESERVE
    smallest = {"key_bytes": 16, "rescore": 16, "finer_bytes": 64}
    for size, options, fits in ((chunk, chosen.index_options, True), (2 * chunk, smallest, False)):
        config = AUTO.replace(index=PLANNED, index_options=dict(options), prefill_chunk=size)
        assert (plan(llama3_8b(), 131072, limit, config=config).device_bytes <= limit) == fits
    asked = chosen_index(llama3_8b(), AUTO.replace(prefill_chunk=chunk), 131072, free)
    assert asked == chosen and max(record.levelno for record in caplog.records) == logging.INFO
    caplog.clear()
    assert chosen_index(llama3_8b(), AUTO, 131072, GIB) is AUTO and "do not fit" in caplog.text


def test_smaller_codes_come_before_a_smaller_chunk() -> None:
    """At each chunk from the largest codes to the smallest, then the chunk is halved."""
    found = [chosen_index(llama3_8b(), AUTO, 131072, int(gib * GIB)) for gib in (6, 4.2, 3.4, 3, 2.6, 2.2, 1.8)]
    order = [(-one.prefill_chunk, -(dict(one.index_options).get("key_bytes") or 64)) for one in found]
    assert order == sorted(order) and len({chunk for chunk, _ in order}) > 2 and len({size for _, size in order}) > 2


@pytest.mark.parametrize(
    ("tokens", "free_gib", "options", "many_chunk"),
    [
        (262144, 8.2, {}, 8192),
        (393216, 8.2, {"key_bytes": 48, "rescore": 3}, 512),
        (524288, 8.2, {"key_bytes": 32, "rescore": 6, "finer_bytes": 64}, None),
        (524288, 7.5, {"key_bytes": 24, "rescore": 12, "finer_bytes": 64}, None),
        (1048576, 8.2, None, None),
    ],
)
def test_smaller_codes_where_the_usual_ones_do_not_fit(
    tokens: int, free_gib: float, options: dict[str, int] | None, many_chunk: int | None
) -> None:
    """What a card of 24 GiB has beside Llama-3-8B's weights: codes shrink with the context, and name more keys. The
    plan of what was chosen fits; more retrieved keys than a program can pick among leave the keys to the host unless
    codes of the usual size fit in chunks of many_chunk.
    """
    free = int(free_gib * GIB)
    chosen = chosen_index(llama3_8b(), AUTO, tokens, free)
    if options is None:
        assert chosen is AUTO
        return
    assert (chosen.index, dict(chosen.index_options)) == (PLANNED, options)
    weights = plan(llama3_8b()).shape.weight_bytes
    assert plan(llama3_8b(), tokens, free + weights + DEVICE_RESERVE, "128GiB", config=chosen).fits
    alone = dict(chosen_index(llama3_8b(), AUTO, tokens, free, finer=False).index_options)
    assert alone == {name: value for name, value in options.items() if name != "finer_bytes"}
    many = AUTO.replace(retrieve=1000)
    left = chosen_index(llama3_8b(), many, tokens, free)
    usual = many if many_chunk is None else many.replace(index=PLANNED, prefill_chunk=many_chunk)
    assert left == usual


@pytest.mark.parametrize(("tokens", "free_gib"), [(131072, 1.2), (1 << 20, 8.2)])
def test_codes_on_the_host_where_none_fit(tokens: int, free_gib: float, caplog: pytest.LogCaptureFixture) -> None:
    """If it has room, the device reads host memory and answers estimate what is not named; the plan of it fits."""
    caplog.set_level(logging.INFO)
    free, room = int(free_gib * GIB), 1 << 40
    options = {"key_bytes": 16, "rescore": 32, "finer_bytes": 64, "codes_on_host": True}
    chosen = chosen_index(llama3_8b(), AUTO, tokens, free, host_free=152 * tokens * 1024)  # no room for rows
    assert (chosen.index, dict(chosen.index_options)) == (PLANNED, options)
    assert "codes of all keys come from the host, 16 bytes each" in caplog.text
    limit = free + plan(llama3_8b()).shape.weight_bytes + DEVICE_RESERVE
    assert plan(llama3_8b(), tokens, limit, config=chosen).device_bytes <= limit
    assert chosen_index(llama3_8b(), AUTO, tokens, free, host_free=room, finer=False) is AUTO
    assert chosen_index(llama3_8b(), AUTO, tokens, free, host_free=(1 << 17) * tokens) is AUTO, "keys fill it"
    for config in (AUTO.replace(tail=False), AUTO.replace(retrieve=200)):
        assert chosen_index(llama3_8b(), config, tokens, free, host_free=room) is config


def test_no_finer_codes_where_a_device_cannot_read_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the system says is logged; a read does not end for it."""
    assert managed.reads_host.__wrapped__(torch.device("cpu"))

    def refused(*given: Any) -> Any:
        raise MemoryPlanError("`ulimit -l` shows a limit")

    monkeypatch.setattr(managed, "host_rows", refused)
    assert not managed.reads_host.__wrapped__(torch.device("cpu"))
    assert "no finer codes" in caplog.text and "ulimit" in caplog.text


@pytest.mark.parametrize("tokens", [65536, 131072, 262144, 524288, 1048576])
@pytest.mark.parametrize("limit_gib", [20, 24, 32])
def test_reading_does_as_the_plan_says(tokens: int, limit_gib: int) -> None:
    """Hidden states on the host or not, one layer's keys on the device or two: one arithmetic decides both."""
    config = AUTO.replace(index="flat")
    answer = plan(llama3_8b(), tokens, limit_gib * GIB, "1TiB", config=config)
    free = limit_gib * GIB - answer.shape.weight_bytes - DEVICE_RESERVE
    layout = reading_layout(llama3_8b(), config, tokens, free, 1, hidden_movable=True)
    host, device = ({item.name for item in items} for items in (answer.host, answer.device))
    assert layout.hidden_on_host == ("prefill: hidden states" in host)
    assert (layout.kv_layers == 2) == ("prefill: KV being copied" in device)
    assert not reading_layout(llama3_8b(), config, tokens, free, 1, hidden_movable=False).hidden_on_host


def test_copies_of_states_come_behind_the_reading() -> None:
    """A captured step's copies of the states (466 MB of Qwen3.5-27B's shape) take the room that one layer's keys have
    while reading: they are no reason to take smaller codes.
    """
    config = hybrid_27b()
    coded = AUTO.replace(index="device", index_options={})
    size = DeviceSize(model_shape(config), coded, 1 << 18, 1).fitting(0)
    held, copies = state_bytes(size)
    assert copies == 3 * held > 400e6
    free = size.reading_bytes - copies - model_shape(config).weight_bytes - DEVICE_RESERVE
    assert size.decode_bytes < size.reading_bytes - copies
    assert chosen_index(config, AUTO, 1 << 18, free).index_options == {}
    assert chosen_index(config, AUTO, 1 << 18, free - 1).index_options != {}


def test_nothing_is_chosen_without_need() -> None:
    """Another device, a short text, an index that was asked for: the config is the one that was given."""
    for config, tokens, free in (
        (AUTO, 131072, None),
        (AUTO, 1000, 80 * GIB),
        (AUTO.replace(index="sketch"), 131072, 80 * GIB),
        (AUTO.replace(index_options={"recall": 0.8}), 131072, 80 * GIB),
    ):
        assert chosen_index(llama3_8b(), config, tokens, free) is config
    assert free_device_bytes(tiny_model("llama")) is None


def test_neither_pieces_nor_a_copy_leave_room_for_codes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if a read is begun that cannot end: between tensors lie pieces, and matrices of 4 bits are copied. Of
    pieces the log says what helps.
    """
    caplog.set_level(logging.INFO)
    model: Any = build_model("llama")
    taken = {"split_bytes": 0, "unpacked_bytes": 0}
    monkeypatch.setattr(device_room, "input_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(device_room, "reads_host", lambda device: True)
    monkeypatch.setattr(device_room, "spare_bytes", lambda device: 4 * GIB)
    for name in taken:
        monkeypatch.setattr(device_room, name, lambda where, name=name: taken[name])

    def chosen() -> str:
        choice = IndexChoice(model, AUTO)
        choice.decide(100_000)
        return choice.config.index

    assert chosen() == PLANNED
    for name in taken:
        taken[name] = 4 * GIB
        caplog.clear()
        assert chosen() == "auto"
        assert ("4.00 GiB of the device's memory is free in pieces" in caplog.text) == (name == "split_bytes")
        taken[name] = 0


def test_pieces_are_no_room_for_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read goes by what its index was chosen by. Qwen3-32B's shape lost one to .72 GiB in pieces."""
    model: Any = ra.enable(build_model("llama"), AUTO)
    free: list[int | None] = []
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: 4 * GIB)
    monkeypatch.setattr(device_room, "split_bytes", lambda device: GIB)
    own = hidden_states.reading_layout

    def noted(
        model_config: Any, config: ra.Config, tokens: int, room: int | None, batch: int, *, hidden_movable: bool
    ) -> DeviceLayout:
        free.append(room)
        return own(model_config, config, tokens, room, batch, hidden_movable=hidden_movable)

    monkeypatch.setattr(hidden_states, "reading_layout", noted)
    states = hidden_states.HiddenStates(model)
    states.begin(ra.RetrievalCache(model), 100, 1, 16)
    states.end()
    assert free == [3 * GIB]


def test_a_choice_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes more than arithmetic says; without a GPU there is nothing to leave."""
    free: list[int | None] = [4 * GIB]
    given: list[int | None] = []

    def noted(
        model_config: Any, config: ra.Config, tokens: int, room: int | None, *rest: Any, **more: Any
    ) -> ra.Config:
        given.append(room)
        return config

    monkeypatch.setattr(device_room, "chosen_index", noted)
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: free[0])
    model: Any = build_model("llama")
    for free[0] in (4 * GIB, None):
        device_room.IndexChoice(model, AUTO).decide(20000)
    assert given == [4 * GIB - device_room.MARGIN, None]


def test_a_context_reads_with_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache has codes, asks them, and keeps who watches the layers."""
    monkeypatch.setattr(index_choice, "SKETCH_FROM", 100)
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: GIB)
    model: Any = ra.enable(build_model("llama"), ra.Config(sink=4, window=16, retrieve=2))
    tokenizer: Any = Tokenizer()
    context = ra.Context(model, tokenizer)
    seen: list[None] = []
    context.cache.on_layer = lambda: seen.append(None)
    context.read(random_ids(1, 400)[0].tolist(), progress=False)
    assert context.cache.index_kinds() == {"device": sum(context.cache.index_kinds().values())}
    assert context.config.index == "auto" and context.cache.index.config.index == PLANNED and seen
    layers: list[Any] = context.cache.layers
    codes = context.cache.device_nbytes - sum(layer.window.nbytes for layer in layers)
    assert 0 < codes == sum(index.memory.device for index in context.cache.coded_indexes)
    with torch.no_grad():
        assert context.continue_with([5], max_new_tokens=3).tokens


def test_auto_is_decided_for_every_cache_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls and `generate` get what a context gets; later layers do not decide by the memory that is left, and a
    cache that is emptied decides anew.
    """
    free = iter([GIB, GIB, 0])
    monkeypatch.setattr(index_choice, "SKETCH_FROM", 100)
    monkeypatch.setattr(device_room, "free_device_bytes", lambda model: next(free))
    config = ra.Config(sink=4, window=16, retrieve=2)
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
    all_special_ids: tuple[int, ...] = ()

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def test_texts_of_an_engine_get_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen once for the longest text, in what windows and graphs leave: rows of any lengths share graphs then. A text
    for which it lacks memory gets what fits; without a layout each text gets its own.
    """
    model, room = tiny_model("llama"), [1 << 30]
    config = ra.Config(prefill_chunk=4096)
    longest = 100_000
    monkeypatch.setattr(device_room, "whole_device_bytes", lambda _: device_room.MARGIN + room[0])
    monkeypatch.setattr(device_room, "devices", lambda _: (torch.device("cuda"),))
    monkeypatch.setattr(device_room, "spare_bytes", lambda _: room[0])
    monkeypatch.setattr(device_room, "GRAPH_BYTES", 1 << 20)
    monkeypatch.setattr(
        device_room.EngineLayout, "free", property(lambda layout: device_room.MARGIN + room[0] - layout.unpacked)
    )

    def chosen(tokens: int) -> Any:
        choice = IndexChoice(model, config)
        choice.decide(tokens)
        return choice.config

    apart = {tokens: chosen(tokens) for tokens in (100, 20_000, longest)}
    assert len({str(one.index_options) + one.index for one in apart.values()}) > 1, "each its own"
    device_room.share_layout(model, config, 4, None)
    shared = device_room.layout_of(model)
    assert shared is not None and shared.config.index == PLANNED and shared.unpacked == 0
    layout = shared.config
    try:
        together = {tokens: chosen(tokens) for tokens in (100, 20_000, longest)}
        for one in together.values():
            assert (one.index, one.index_options) == (layout.index, layout.index_options)
        assert IndexChoice(model, config).has_room(longest)
        room[0] = 16 << 20
        assert not IndexChoice(model, config).has_room(longest) and IndexChoice(model, config).has_room(100)
        small = chosen(longest)
        assert (small.index, small.index_options) != (layout.index, layout.index_options)
    finally:
        device_room.drop_layout(model)
    assert device_room.layout_of(model) is None and IndexChoice(model, config).has_room(longest)


def test_fewer_rows_where_windows_leave_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The most rows, of powers of two, whose windows leave room to read a text; one row where none do. On a CPU as many
    as asked for.
    """
    caplog.set_level(logging.INFO)
    model, config = tiny_model("llama"), ra.Config(index="flat", prefill_chunk=256)
    assert device_room.planned_rows(model, config, 16, 5000) == 16
    shape = model_shape(model)
    one = DeviceSize(shape, config, 256, 1)
    free = [0]
    monkeypatch.setattr(device_room, "whole_device_bytes", lambda _: free[0])
    needed = index_choice.reading_bytes(shape, config, 5000, 1)
    for rows in (1, 2, 8, 16):
        fixed = device_room.MARGIN + device_room.GRAPH_BYTES + needed
        free[0] = fixed + rows * (one.window_bytes + one.sliding_bytes + sum(state_bytes(one)))
        assert device_room.planned_rows(model, config, 16, 5000) == rows
        assert device_room.planned_rows(model, config, 11, 5000) == (11 if rows == 16 else rows)
        free[0] -= 1
        assert device_room.planned_rows(model, config, 16, 5000) == max(1, rows // 2)
    assert "steps take 8 rows at most: windows of 16 leave no room to read 5000 tokens" in caplog.text


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


def test_codes_count_on_the_host_only_where_hidden_states_may_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a module that may look at hidden states has to hold them: the index is chosen beside them."""
    seen: list[bool] = []

    def noted(model_config: Any, config: ra.Config, *rest: Any, hidden_movable: bool, **more: Any) -> ra.Config:
        seen.append(hidden_movable)
        return config

    monkeypatch.setattr(device_room, "chosen_index", noted)
    model: Any = build_model("llama")
    device_room.IndexChoice(model, AUTO).decide(20000)
    model.model.adapter = torch.nn.Linear(1, 1)
    device_room.IndexChoice(model, AUTO).decide(20000)
    assert seen == [True, False]
