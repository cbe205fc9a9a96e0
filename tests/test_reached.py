"""Captured steps in which the device reads the keys that it named, emulated: as if the host had read them."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.batch.exact import ExactPool
from retrieval_attn.cache.instruments import tail_shares
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.engine.graph import reached
from retrieval_attn.engine.graph.reached import Reads
from retrieval_attn.index.formats import Format
from retrieval_attn.offload import page_lock
from retrieval_attn.offload.page_lock import lock_pages, lock_rest
from tests.graph_cases import CONFIG, DEVICE, DEVICE_CASES, Decoded, enabled
from tests.test_bucket import Rows
from tests.test_bucket_pages import rows_of, trees
from tests.test_rows import Pair
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("emulated_graphs")


@pytest.fixture(autouse=True)
def device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "NAMED_READER", "device")


@pytest.fixture
def device_reads_half(monkeypatch: pytest.MonkeyPatch, device_reads: None) -> None:
    monkeypatch.setattr(reached, "NAMED_READER", "half")


def kinds_of(decoder: Any) -> list[tuple[int, ...]]:
    return [kind.reads for kind in decoder.graphs]


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_steps_equal_eager_decoding(case: str, host_callback: str) -> None:
    """Across spills, rows with padding and rows on one path."""
    model, options = enabled("llama"), DEVICE_CASES[case]
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert any(any(reads) for reads in kinds_of(graphed.decoder))
    assert all(
        len(reads) in (0, len(graphed.cache.layers)) for reads in kinds_of(graphed.decoder)
    )  # a batch is one part


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3"])
def test_models_of_every_kind(name: str) -> None:
    """Soft cap, learned sinks, sliding layers."""
    model, options = enabled(name), DEVICE_CASES["device"]
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert any(any(reads) for reads in kinds_of(graphed.decoder))


@pytest.mark.parametrize("host_dtype", ["bfloat16", "float16", "int8"])
def test_keys_in_every_format(host_dtype: str) -> None:
    """As the host reads them; the same tokens, and logits but for the order of additions."""
    config = CONFIG.replace(**DEVICE, host_dtype=host_dtype)
    model = enabled("llama")
    eager, graphed = (Decoded(model, graph, config=config, prompt=200) for graph in (False, True))
    assert graphed.difference(eager) <= 1e-4
    assert any(any(reads) for reads in kinds_of(graphed.decoder))


def test_without_late_keys_nobody_asks_the_host(host_callback: str) -> None:
    """Until a window's oldest tokens move to the host, which have no codes: then it attends to those."""
    model = enabled("llama")
    options: dict[str, Any] = {"config": CONFIG.replace(**DEVICE), "prompt": 200}
    eager = Decoded(model, False, **options, new=20)
    graphed = Decoded(model, True, **options, new=20)
    assert graphed.difference(eager) <= 1e-5
    calls, layers = graphed.decoder.runtime.calls, len(graphed.cache.layers)
    assert set(kinds_of(graphed.decoder)) == {(Reads.DEVICE,) * layers, (Reads.BOTH,) * layers}
    before = Decoded(model, True, **options, new=3)  # the graphs are there
    assert before.decoder is graphed.decoder and before.decoder.runtime.calls == calls
    assert before.cache.stats().keys_scanned == 0
    again = Decoded(model, True, **options, new=20)
    assert 0 < again.decoder.runtime.calls - calls < 20 * layers
    assert again.difference(eager) <= 1e-5


def test_what_is_estimated_is_tallied() -> None:
    model = enabled("llama")
    options: dict[str, Any] = {**DEVICE_CASES["device"], "new": 20}
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    found = tail_shares(graphed.cache)
    for number, tail in tail_shares(eager.cache).items():
        assert found[number].count == tail.count == 20
        torch.testing.assert_close(found[number].means(), tail.means(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"tail": False}, {"index": "flat", "index_options": {}}])
def test_others_are_the_hosts_as_before(options: dict[str, Any]) -> None:
    """Without estimates a query attends to the best of all keys, named or late, which only one reader can tell."""
    config = CONFIG.replace(**{**DEVICE, **options})
    model = enabled("llama")
    eager, graphed = (Decoded(model, graph, config=config, prompt=200) for graph in (False, True))
    assert graphed.difference(eager) <= 1e-5
    assert kinds_of(graphed.decoder) == [()]


def test_memory_that_no_device_reads_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "reach_entries", lambda *arguments: None)
    model, options = enabled("llama"), DEVICE_CASES["device"]
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert kinds_of(graphed.decoder) == [()] and graphed.decoder.runtime.calls > 0


def spilled(rows: Rows) -> Any:
    """The group of four rows that joined, spilled and left."""
    rows.steps(rows.pairs[:3], 20)
    rows.steps(rows.pairs, 60)
    rows.steps(rows.pairs[1:3], 10)
    assert rows.runner.reason == ""
    return rows.runner._group


@pytest.mark.usefixtures("compiled", "one_thread")
def test_rows_of_a_batch_are_as_alone() -> None:
    """Rows of any length, one without keys on the host; they join, spill and leave."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = Rows(model, [20, 300, 900, 400], **DEVICE)
    group = spilled(rows)
    found = {read for bucket in group.buckets.values() for reads in kinds_of(bucket.decoder) for read in reads}
    assert found == {Reads.BOTH, Reads.DEVICE}
    assert rows.runner.captures == sum(len(bucket.decoder.graphs) for bucket in group.buckets.values())
    rows.check_books(host_reads_all=False)


@pytest.mark.usefixtures("compiled", "one_thread", "device_reads_half")
def test_the_device_reads_for_half_of_the_rows(host_callback: str) -> None:
    """One graph of a size serves rows before and after they spill, whoever of them has keys without codes."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = Rows(model, [300, 900, 400, 700], **DEVICE)
    group = spilled(rows)
    for bucket in group.buckets.values():
        assert kinds_of(bucket.decoder) == [(Reads.HOST, Reads.BOTH) * len(model.model.layers)]
    rows.check_books(host_reads_all=False)


@pytest.mark.usefixtures("compiled", "one_thread")
def test_rows_over_pages_are_as_alone() -> None:
    """Pages, named keys and late ones; forks, crops and random members."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = rows_of(model, trees(model, ExactPool(1000, 40), **DEVICE))
    chance = random.Random(3)
    for step in range(24):
        if step in (5, 15):
            rows.pairs.append(Pair(model, rows.pairs[step // 5].row.fork()))
            rows.pairs[-1].token = 7 + step
        present = [pair for pair in rows.pairs if chance.random() < 0.6] or rows.pairs
        rows.steps(present, 1)
        if chance.random() < 0.1:
            chance.choice(rows.pairs).crop(chance.randint(1, 4))
    assert rows.runner.replays == 24 and rows.runner.reason == ""
    group: Any = rows.runner._group
    kinds = [kind for bucket in group.buckets.values() for kind in bucket.decoder.graphs]
    assert any(kind.levels and Reads.BOTH in kind.reads for kind in kinds)
    rows.check_books(host_reads_all=False)


@pytest.mark.parametrize("tokens", [100, 20_000])
def test_all_that_a_segment_holds_is_page_locked(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not: whole where it is small, else to the last page of each head, and from there on once more."""
    locked: list[tuple[int, int]] = []
    given_back: list[int] = []

    def register(address: int, nbytes: int, flags: int = 0) -> str:
        assert not any(address < stop and address + nbytes > start for start, stop in locked), "twice"
        locked.append((address, address + nbytes))
        return ""

    monkeypatch.setattr(page_lock, "register", register)
    monkeypatch.setattr(page_lock, "unregister", given_back.extend)
    monkeypatch.setattr(page_lock, "LEAST_BYTES", 1 << 12)
    segment = Segment(2, 40_000 if tokens > 1000 else 200, 64, 128, Format.BFLOAT16)
    assert bool(segment.page_tokens) == (tokens > 1000)
    for count in (tokens, 33, 64):
        numbers = np.ones((2, count, 128), np.uint16)
        segment.append(numbers[..., :64], numbers)
        lock_pages(segment)
        assert lock_rest(segment) and segment.locked_tokens >= segment.length
        for array in (segment.keys, segment.values):
            for head in array[:, : segment.length]:
                begin, end = head.ctypes.data, head.ctypes.data + head.nbytes
                assert sum(max(0, min(stop, end) - max(start, begin)) for start, stop in locked) == head.nbytes
    assert list(segment.locked_ends) == sorted(set(segment.locked_ends))
    del segment, array, head
    gc.collect()
    assert sorted(given_back) == sorted(start for start, _ in locked)


def test_a_refusal_leaves_keys_to_the_host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(page_lock, "register", lambda *arguments: "no more of it")
    monkeypatch.setattr(page_lock, "unregister", lambda addresses: None)
    monkeypatch.setattr(page_lock, "_refused", threading.Event())
    monkeypatch.setattr(page_lock, "_said", set())
    segment = Segment(2, 200, 64, 64, Format.BFLOAT16)
    segment.append(np.ones((2, 100, 64), np.uint16), np.ones((2, 100, 64), np.uint16))
    assert not lock_rest(segment) and not lock_rest(segment) and not segment.locked_tokens
    assert [record.message.count("no more of it") for record in caplog.records] == [1]
