"""Int8 rows of keys and values that a device reads: what they hold as a segment grows, is cropped, forked and saved."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.store import replica_memory
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.prefix_handle import PrefixEntry
from retrieval_attn.errors import ConfigError, MemoryPlanError
from retrieval_attn.gpu.codes.host_row_gather import HostRowGather, RowShape
from retrieval_attn.index.device import KEY_SHARE, PLANNED, ROW_STEPS_BYTES, SPARE_TOKENS
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec, available
from retrieval_attn.memory import device_room, host_room
from retrieval_attn.memory.device_room import IndexChoice, chosen_index
from retrieval_attn.memory.index_choice import with_rows
from retrieval_attn.memory.plan import HOST_RESERVE, plan
from retrieval_attn.memory.units import GIB
from retrieval_attn.offload import int8_rows as rounded
from retrieval_attn.offload.int8_rows import Int8RowMirror, ask_for_rows, new_rows, rows_of
from retrieval_attn.offload.staging import all_to_host, pack
from retrieval_attn.store.store import ContextStore
from tests.index.test_host_codes import TOKENS, answer, context_of, ids_of
from tests.memory.test_plan import llama3_8b
from tests.runner.graph_cases import CONFIG, Decoded, enabled
from tests.runner.test_host_row_gather import REACHED, kinds_of
from tests.tiny_models import build_model
from tests.waiting import wait_until

HEADS, DIMS = 2, (32, 48)


def numbers(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values (heads, tokens, dim)."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(HEADS, tokens, dim, generator=generator).to(dtype) for dim in DIMS)
    return keys, values


def appended(
    segment: Segment, kv: tuple[Tensor, Tensor], empty: Int8RowMirror | None = None, write: bool = True
) -> None:
    """Tokens come to a segment, and with `write` to its rows."""
    keys, values = all_to_host(kv, segment.fmt)
    segment.append(keys, values)
    tokens = kv[0].shape[1]
    for rows in segment.replicas_from_device(tokens, {rounded.KIND: empty}) if write else ():
        rows.append_device(segment, segment.length - tokens, *kv)


def check(segment: Segment, kv: tuple[Tensor, Tensor], start: int, first: int = 0) -> None:
    """Rows of tokens from `start` on are those that int8 storage has, number for number. first: of kv's."""
    rows = rows_of(segment)
    assert isinstance(rows, Int8RowMirror)
    entries = rows.entries(segment, start, segment.length, 7)
    assert entries is not None
    for head, entry in enumerate(entries):
        assert (entry.ids, entry.least) == (segment.length - start, 7)
        place = 0
        for part, one in enumerate(kv):
            stored = pack(one[head, start - first :], Format.INT8)
            dim = stored.shape[1] - 4
            assert torch.equal(entry.rows[:, place : place + dim], stored[:, :dim])
            steps = stored[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
            assert torch.equal(entry.steps[:, part], steps[:, 0])
            place += dim


@pytest.mark.parametrize("fmt", list(Format))
def test_rows_are_those_of_int8_storage(fmt: Format) -> None:
    """Of tokens that were on the device, and of later ones, which come from the host as it stores them."""
    dtype = torch.bfloat16 if fmt is Format.BFLOAT16 else torch.float16 if fmt is Format.FLOAT16 else torch.float32
    segment, first, later = Segment(HEADS, 9000, *DIMS, fmt), numbers(300, 1, dtype), numbers(70, 2, dtype)
    appended(segment, first, new_rows(*first))
    check(segment, first, 20)
    appended(segment, later, write=False)
    both = torch.cat([first[0], later[0]], 1), torch.cat([first[1], later[1]], 1)
    check(segment, both, 0)


def test_more_tokens_than_there_was_room_for() -> None:
    """Rows move, and those before stay as they are; what was cropped is written anew."""
    segment, first = Segment(HEADS, 9000, *DIMS, Format.FLOAT32), numbers(100, 1)
    appended(segment, first, new_rows(*first))
    before = rows_of(segment)
    assert isinstance(before, Int8RowMirror)
    assert before.nbytes == (HEADS * before._rows.shape[1] * sum(DIMS), HEADS * before._rows.shape[1] * ROW_STEPS_BYTES)
    assert replica_memory([], [segment]) == before.nbytes
    more = numbers(SPARE_TOKENS + 50, 2)
    appended(segment, more)
    both = torch.cat([first[0], more[0]], 1), torch.cat([first[1], more[1]], 1)
    check(segment, both, 0)
    segment.truncate(150)
    other = numbers(30, 3)
    appended(segment, other)
    cropped = torch.cat([both[0][:, :150], other[0]], 1), torch.cat([both[1][:, :150], other[1]], 1)
    check(segment, cropped, 64)


def test_rows_that_begin_behind_pages() -> None:
    """The host has no tokens before: a segment that counts them, where a prefix lies in pages."""
    segment, kv = Segment(HEADS, 900, *DIMS, Format.FLOAT32), numbers(60, 1)
    segment.length = 40
    appended(segment, kv, new_rows(*kv))
    check(segment, kv, 48, first=40)
    segment.truncate(10)
    rows = rows_of(segment)
    assert isinstance(rows, Int8RowMirror) and rows.length == 0


def test_widths_that_no_kernel_reads() -> None:
    keys, values = torch.zeros(1, 5, 40), torch.zeros(1, 5, 64)
    assert new_rows(keys, values) is None
    with pytest.raises(ConfigError, match="int8_rows"):
        IndexSpec.of("device", {"int8_rows": 1})


def rows_in(cache: ra.RetrievalCache) -> list[Any]:
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    return [rows_of(segment) for layer in layers for host in layer.hosts for segment in host.segments]


@pytest.mark.usefixtures("emulated_graphs")
def test_forks_share_rows_and_count_them() -> None:
    """A fork's steps read them, too; bytes are counted once."""
    model = enabled("llama")
    done = Decoded(model, True, config=CONFIG.replace(**REACHED), prompt=200, new=3)
    held = rows_in(done.cache)
    assert held and all(held)
    plain = Decoded(
        model, True, config=CONFIG.replace(**{**REACHED, "index_options": {"key_bytes": 64}}), prompt=200, new=3
    )
    assert done.cache.host_nbytes - plain.cache.host_nbytes == sum(one.nbytes.host for one in held)
    assert done.cache.device_nbytes - plain.cache.device_nbytes == sum(one.nbytes.device for one in held)
    fork = done.cache.fork()
    assert [id(one) for one in rows_in(fork)] == [id(one) for one in held]
    assert fork.device_nbytes == done.cache.device_nbytes


@pytest.mark.usefixtures("emulated_graphs")
def test_rows_go_with_their_cache() -> None:
    """A captured step that read them does not keep them: 8 GiB, of 128K tokens of an 8B model."""
    model = enabled("llama")
    done = Decoded(model, True, config=CONFIG.replace(**REACHED), prompt=200, new=3)
    decoder, held = done.decoder, [weakref.ref(one) for one in rows_in(done.cache)]
    assert any(any(reads) for reads in kinds_of(decoder))
    del done
    gc.collect()
    assert decoder.graphs and held and not any(one() for one in held)
    reaches: list[Any] = [host._gather for slot in decoder.slots for host in slot.hosts]
    assert reaches and not any(entry for one in reaches for entry in one.entries)


@pytest.mark.usefixtures("emulated_graphs")
def test_plans_look_at_rows_once() -> None:
    """A batch is planned again whenever a row joins: what the others read is known."""
    segment, kv = Segment(HEADS, 900, *DIMS, Format.FLOAT32), numbers(60, 1)
    appended(segment, kv, new_rows(*kv))
    held: Any = rows_of(segment)
    first = held.entries(segment, 16, 60, 7)
    assert held.entries(segment, 16, 60, 7) is first
    assert held.entries(segment, 16, 60, 8) is not first
    reach = HostRowGather(HEADS, RowShape(*DIMS), torch.device("cpu"))
    reach.bind(first)
    before = reach.table.clone()
    reach.bind([first[0], None])
    assert torch.equal(reach.table[0], before[0]) and not reach.table[1].any()
    reach.forget(slice(0, 1))
    assert reach.entries == [None, None]
    reach.bind(first)
    assert torch.equal(reach.table, before)


def made_rows() -> None:
    """Wait for the threads that make rows."""
    wait_until(lambda: not rounded._makers().busy, pause=0.002)


@pytest.mark.usefixtures("emulated_graphs")
def test_a_context_that_was_saved_gets_rows(tmp_path: Path) -> None:
    """Rows are not saved. It answers by the host, until a thread has made them: those that reading made."""
    config = CONFIG.replace(**REACHED, graph=True)
    context = context_of(config)
    context.read(ids_of(context, TOKENS), progress=False)
    question = ids_of(context, 8)
    first = answer(context, question)
    store = ContextStore(tmp_path / "store")
    context.save("rows", store=store)
    again = context_of(config).open("rows", store=store, progress=False)
    assert answer(again, question) == first
    made_rows()
    for made, read in zip(rows_in(again.cache), rows_in(context.cache), strict=True):
        assert isinstance(made, Int8RowMirror) and made.length == read.length
        assert torch.equal(made._rows[:, : made.length], read._rows[:, : made.length])
        assert torch.equal(made._steps[:, : made.length], read._steps[:, : made.length])
    assert answer(again, question) == first
    again.kept.wait()


def test_rows_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No room, a disk that fails: the host goes on attending, nothing is tried twice, and the log says why once."""
    caplog.set_level(logging.INFO)
    segment, kv = Segment(HEADS, 900, *DIMS, Format.FLOAT32), numbers(60, 1)
    appended(segment, kv, write=False)
    where = torch.device("cpu")
    ask_for_rows(segment, where)
    assert rows_of(segment) is None, "more may come to it"
    segment.freeze()

    def fails(*given: Any) -> Any:
        raise OSError("the disk went away")

    monkeypatch.setattr(rounded, "populate", fails)
    for _ in range(2):
        ask_for_rows(segment, where)
        made_rows()
    assert isinstance(rows_of(segment), rounded.RowsUnderWay) and replica_memory([], [segment]) == (0, 0)
    assert caplog.text.count("the disk went away") == 1


def test_no_memory_for_rows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When the text is read, when it grows, or when a step is planned: the host attends, and the log says why."""
    taken = rounded.host_rows

    def refused(*given: Any) -> Any:
        raise MemoryPlanError("no such memory")

    monkeypatch.setattr(rounded, "host_rows", refused)
    rounded._say_none.cache_clear()
    assert all(new_rows(*numbers(60, 1)) is None for _ in range(2))
    assert caplog.text.count("no such memory") == 1
    for plans in (False, True):
        segment, kv = Segment(HEADS, 9000, *DIMS, Format.FLOAT32), numbers(60, 1)
        monkeypatch.setattr(rounded, "host_rows", taken)
        appended(segment, kv, new_rows(*kv))
        monkeypatch.setattr(rounded, "host_rows", refused)
        caplog.clear()
        rounded._say_none.cache_clear()
        held: Any = rows_of(segment)
        appended(segment, numbers(SPARE_TOKENS + 50, 2), write=not plans)
        if plans:
            assert held.entries(segment, 0, segment.length, 7) is None
        assert isinstance(rows_of(segment), rounded.RowsUnderWay) and "no such memory" in caplog.text


def test_rows_make_way_for_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read where only rows of others are in its way; those that a step reads keep their memory."""
    rounded._having.clear()
    kept = []
    for seed in range(3):
        segment, kv = Segment(HEADS, 900, *DIMS, Format.FLOAT32), numbers(60, seed)
        appended(segment, kv, new_rows(*kv))
        kept.append(segment)
    held: Any = rows_of(kept[0])
    entries, each = held.entries(kept[0], 0, 60, 7), held.nbytes.host
    before = [entry.rows.clone() for entry in entries]
    free = [10 * GIB]

    def available() -> int:
        return free[0] + each * sum(isinstance(rows_of(one), rounded.RowsUnderWay) for one in kept)

    monkeypatch.setattr(host_room, "available_host_bytes", available)
    needed = plan(llama3_8b(), 1000, host_memory=1)
    free[0] = needed.host_bytes - HOST_RESERVE - needed.shape.host_table_bytes - 2 * each
    host_room.require_host_room(llama3_8b(), ra.Config(), 1000, 1, hidden_on_host=False)
    gone = [isinstance(rows_of(one), rounded.RowsUnderWay) for one in kept]
    assert sum(gone) == 2
    del held
    gc.collect()
    assert all(torch.equal(entry.rows, one) for entry, one in zip(entries, before, strict=True))
    free[0] -= 2 * each
    with pytest.raises(MemoryPlanError, match="of host memory"):
        host_room.require_host_room(llama3_8b(), ra.Config(), 1000, 1, hidden_on_host=False)
    assert all(isinstance(rows_of(one), rounded.RowsUnderWay) for one in kept)


def test_rows_of_a_context_that_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host has room now, whatever it had when the text was read; never without codes there."""
    model, free = build_model("llama"), [0]
    monkeypatch.setattr(IndexChoice, "_host_free", lambda self, model: free[0])
    choice = IndexChoice(model, ra.Config())
    saved = ra.Config(index="device", index_options={"key_bytes": 32, "int8_rows": True})
    for free[0], options in ((0, {"key_bytes": 32}), (64 * GIB, {"key_bytes": 32, "int8_rows": True})):
        choice.take(saved, 1 << 16)
        assert choice.config.index == PLANNED
        assert choice.config.index_options == options and choice.spec.host_reads.rows == (len(options) == 2)
    choice.take(ra.Config(index="device", index_options={"int8_rows": True}), 1 << 16)
    assert choice.config.index_options == {"int8_rows": True, "key_share": 0.25}
    choice.take(ra.Config(index="sketch"), 1 << 16)
    assert not choice.spec.host_reads.rows


@pytest.mark.parametrize("share", [0, 1.5, float("nan"), True, "half"])
def test_a_share_of_keys_that_is_none(share: Any) -> None:
    with pytest.raises(ConfigError, match="key_share"):
        IndexSpec.of(PLANNED, {"int8_rows": True, "key_share": share})


def test_the_share_of_keys_is_chosen() -> None:
    """A user who asks for rows gets a quarter, `auto` all keys if codes are smaller than the usual ones."""
    with pytest.raises(ConfigError, match="no option key_share"):
        IndexSpec.of("device", {"int8_rows": True, "key_share": 0.25})
    for options in ({}, {"key_bytes": 40, "rescore": 4}):
        asked = IndexSpec.of("device", {**options, "int8_rows": True})
        chosen = with_rows(ra.Config(index=PLANNED, index_options=options))
        assert asked.host_reads.key_share == KEY_SHARE
        assert IndexSpec.of(chosen.index, chosen.index_options).host_reads.key_share == (1 if options else KEY_SHARE)
    assert PLANNED not in available()


@pytest.mark.parametrize(("bus", "taken"), [(64e9, True), (32e9, True), (16e9, False), (None, True)])
def test_rows_where_the_bus_is_fast(monkeypatch: pytest.MonkeyPatch, bus: float | None, taken: bool) -> None:
    """As the system tells; not where a graph is refused, for eager steps ask the host."""
    model = build_model("llama")
    monkeypatch.setattr(device_room, "has_managed", lambda device: True)
    monkeypatch.setattr(device_room, "bus_bandwidth", lambda device: bus)
    monkeypatch.setattr(device_room, "available_host_bytes", lambda: GIB)
    assert IndexChoice(model, ra.Config())._host_free(model) == taken * GIB
    assert IndexChoice(model, ra.Config(graph=False))._host_free(model) == 0


def test_rows_where_the_host_has_room(caplog: pytest.LogCaptureFixture) -> None:
    """Of Llama-3-8B's 128K: 16 GiB of keys and values, 8 of rows. No more than half of what keys leave is taken."""
    caplog.set_level(logging.INFO)
    given: dict[str, Any] = {"tokens": 131072, "free": 8 * GIB}
    found = {
        gib: chosen_index(llama3_8b(), ra.Config(), **given, host_free=gib * GIB).index_options for gib in (0, 31, 33)
    }
    assert [dict(one) for one in found.values()] == [{}, {}, {"int8_rows": True, "key_share": 0.25}]
    assert "which reads int8 rows on the host" in caplog.text
    eager = chosen_index(llama3_8b(), ra.Config(tail=False), **given, host_free=64 * GIB)
    assert eager.index_options == {}
    sizes = [
        plan(llama3_8b(), 131072, config={"index": "device", "index_options": options})
        for options in ({}, {"int8_rows": True})
    ]
    assert sizes[1].host_bytes - sizes[0].host_bytes == 32 * 8 * 131072 * 256
    assert sizes[1].device_bytes - sizes[0].device_bytes == 32 * 8 * (131072 + SPARE_TOKENS) * ROW_STEPS_BYTES
    tight = chosen_index(llama3_8b(), ra.Config(), 131072, int(4.1 * GIB), host_free=64 * GIB)
    assert tight.index == PLANNED, "codes that fit without rows are taken without"


@pytest.mark.usefixtures("emulated_graphs")
def test_a_trees_budget_is_not_for_rows() -> None:
    """A server holds as many texts as without: rows make way."""
    sizes = []
    for options in (REACHED["index_options"], {"key_bytes": 64}):
        config = CONFIG.replace(**{**REACHED, "index_options": options})
        done = Decoded(enabled("llama"), True, config=config, prompt=200, new=3)
        rows = sum(one.nbytes.host for one in rows_in(done.cache) if one is not None)
        sizes.append((PrefixEntry.beyond(done.cache, Sizes()).sizes, rows))
    assert sizes[0][1] > 0 == sizes[1][1]
    steps = sizes[0][0].host - sizes[1][0].host
    assert steps == sizes[0][1] * ROW_STEPS_BYTES // (2 * 16), "on a CPU what a device would have is the host's"


def test_steps_of_offloaded_rows_come_back() -> None:
    """They leave the device, an earlier reader keeps its own, and the next one has the same numbers."""
    segment = Segment(HEADS, 400, *DIMS, Format.FLOAT32)
    kv = numbers(300, 1)
    appended(segment, kv, new_rows(*kv))
    rows = rows_of(segment)
    assert isinstance(rows, Int8RowMirror)
    before = rows.entries(segment, 0, 300, 1)
    assert before is not None and rows.nbytes.device > 0
    steps = [one.steps.clone() for one in before]
    for _ in range(2):
        rows.offload()
        assert rows.nbytes.device == rows.offloadable_bytes() == 0
    assert all(torch.equal(one.steps, own) for one, own in zip(before, steps, strict=True))
    after = rows.entries(segment, 0, 300, 1)
    assert after is not None and after is not before and rows.nbytes.device > 0
    assert all(torch.equal(one.steps, own) for one, own in zip(after, steps, strict=True))


def test_rows_that_were_used_last_go_last() -> None:
    """Memory is taken from rows of other texts than the one that is being asked."""
    segments = []
    for seed in range(3):
        segment, kv = Segment(HEADS, 200, *DIMS, Format.FLOAT32), numbers(150, seed)
        appended(segment, kv, new_rows(*kv))
        segments.append(segment)
    rows = [rows_of(segment) for segment in segments]
    assert all(isinstance(one, Int8RowMirror) for one in rows)
    first = rows[0]
    assert isinstance(first, Int8RowMirror) and first.entries(segments[0], 0, 150, 1) is not None
    held = rounded.held_rows_bytes()
    gone = sum(one is not None and not isinstance(one, Int8RowMirror) for one in (rows_of(s) for s in segments))
    assert gone == 0 and held >= 3 * first.nbytes.host
    gc.collect()
    others = rounded.held_rows_bytes() - 3 * first.nbytes.host
    assert rounded.drop_rows(others + 1) > others
    assert [isinstance(rows_of(segment), Int8RowMirror) for segment in segments] == [True, False, True]
    assert rounded.drop_rows(1) == first.nbytes.host
    assert [isinstance(rows_of(segment), Int8RowMirror) for segment in segments] == [True, False, False]


def test_rows_are_counted_while_threads_make_others() -> None:
    """The count of an engine's step does not fail when a prefill adds segments."""

    before, numbers_of = rounded.held_rows_bytes(), range(-20_000, 0)

    def note() -> None:
        for number in numbers_of:
            rounded._held_bytes[number] = 1

    thread = threading.Thread(target=note)
    thread.start()
    while thread.is_alive():
        assert rounded.held_rows_bytes() >= 0
    thread.join()
    assert rounded.held_rows_bytes() >= before + 20_000
    for number in numbers_of:
        del rounded._held_bytes[number]


def test_bytes_are_counted_as_long_as_rows_exist() -> None:
    """Rows that grow, have a copy of their steps and are dropped."""
    gc.collect()
    before, kv = rounded.held_rows_bytes(), numbers(150, 9)
    rows = new_rows(*kv)
    assert rows is not None and rounded.held_rows_bytes() == before + rows.nbytes.host > before
    for _ in range(40):
        rows.write(*kv)
    assert rounded.held_rows_bytes() == before + rows.nbytes.host
    rows.copy_to_host()
    assert rounded.held_rows_bytes() == before + rows.nbytes.host
    rows.write(*kv)
    assert rounded.held_rows_bytes() == before + rows.nbytes.host
    del rows
    assert rounded.held_rows_bytes() == before
