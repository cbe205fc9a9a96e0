"""Captured steps in which the device reads the keys that it named, emulated: as if the host had read them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from retrieval_attn.engine.paged_prefix import PagedKVPool
from retrieval_attn.index import base
from retrieval_attn.index.device import PLANNED
from retrieval_attn.runner.graph import host_row_gather as reached
from retrieval_attn.runner.graph.host_row_gather import Reads
from tests.runner.graph_cases import CONFIG, DEVICE, DEVICE_CASES, FINER, Decoded, enabled
from tests.runner.test_graph_runner import Rows
from tests.runner.test_graph_runner_prefixes import rows_of, trees
from tests.runner.test_rows import Pair
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("emulated_graphs")

REACHED: dict[str, Any] = {
    **DEVICE, "index": PLANNED, "host_dtype": "int8", "index_options": {**DEVICE["index_options"], "int8_rows": True},
}  # fmt: skip
"""The host, which eager steps ask, has the same rounded numbers."""


def case_of(name: str) -> dict[str, Any]:
    """One of DEVICE_CASES, with rows that the device reads."""
    case = DEVICE_CASES[name]
    options = {**case["config"].index_options, "int8_rows": True}
    return {**case, "config": case["config"].replace(index=PLANNED, host_dtype="int8", index_options=options)}


def kinds_of(decoder: Any) -> list[tuple[int, ...]]:
    return [kind.host_access for kind in decoder.graphs]


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_steps_equal_eager_decoding(case: str) -> None:
    """Across spills, rows with padding and rows on one path."""
    model, options = enabled("llama"), case_of(case)
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert any(any(reads) for reads in kinds_of(graphed.decoder))
    assert all(
        len(reads) in (0, len(graphed.cache.layers)) for reads in kinds_of(graphed.decoder)
    )  # a batch is one part


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3"])
def test_models_of_every_kind(name: str) -> None:
    """Soft cap, learned sinks, sliding layers."""
    model, options = enabled(name), case_of("device")
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert any(any(reads) for reads in kinds_of(graphed.decoder))


def test_hosts_that_do_not_round() -> None:
    """Keys in the model's dtype, of which the device reads rounded ones: a thousandth of the logits, as with int8."""
    model = enabled("llama")
    eager, graphed, rounded = (
        Decoded(
            model, graph, config=CONFIG.replace(**{**REACHED, "host_dtype": own, "index_options": options}), prompt=200
        )
        for graph, own, options in (
            (False, "auto", DEVICE["index_options"]),
            (True, "auto", REACHED["index_options"]),
            (False, "int8", DEVICE["index_options"]),
        )
    )
    assert any(any(reads) for reads in kinds_of(graphed.decoder))
    assert 0 < graphed.difference(eager) <= 2 * rounded.difference(eager)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("codes", [{"key_bytes": 64}, FINER["index_options"]])
def test_codes_tell_what_most_of_the_named_keys_weigh(
    codes: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a byte for each number nearly what the keys themselves would, in graphs of their own."""
    monkeypatch.setattr(base, "TRAIN_QUERIES", 64)  # 400 tokens have no 2,048 queries that differ
    model, found = enabled("llama"), []
    for share in (1.0, 0.25):
        own = {
            "retrieve": 2 if "rescore" in codes else 8,
            "index_options": {**codes, "int8_rows": True, "key_share": share},
        }
        config = CONFIG.replace(**{**REACHED, **own})
        found.append(Decoded(model, True, config=config, prompt=400, batch=batch, new=6))
    every, some = found
    assert some.decoder is not every.decoder
    assert all(set(reads) == {Reads.DEVICE} for one in found for reads in kinds_of(one.decoder))
    off = some.differences(every)
    # of 2 keys a query, a step may name another that is as near: far less than what retrieval itself is off, .015
    assert 0 < off.median() <= 5e-4 and off.max() <= 5e-3


def test_without_late_keys_nobody_asks_the_host() -> None:
    """Until a window's oldest tokens move to the host, which have no codes: then it attends to those."""
    model = enabled("llama")
    options: dict[str, Any] = {"config": CONFIG.replace(**REACHED), "prompt": 200}
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


def test_steps_of_both_readers_are_not_shared() -> None:
    """A graph that was recorded for the host is no other one's, of the same model and text."""
    model = enabled("llama")
    options = {**REACHED, "index_options": DEVICE["index_options"]}
    host, rows = (Decoded(model, True, config=CONFIG.replace(**one), prompt=200) for one in (options, REACHED))
    assert host.decoder is not rows.decoder and host.decoder.runtime.calls > 0
    assert [any(any(reads) for reads in kinds_of(one.decoder)) for one in (host, rows)] == [False, True]


def test_what_is_estimated_is_tallied() -> None:
    model = enabled("llama")
    options: dict[str, Any] = {**case_of("device"), "new": 20}
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    found = graphed.cache.tail_shares()
    for number, tail in eager.cache.tail_shares().items():
        assert found[number].count == tail.count == 20
        torch.testing.assert_close(found[number].means(), tail.means(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"tail": False}, {"index": "flat", "index_options": {}}])
def test_others_are_the_hosts_as_before(options: dict[str, Any]) -> None:
    """Without estimates a query attends to the best of all keys, named or late, which only one reader can tell."""
    config = CONFIG.replace(**{**REACHED, **options})
    model = enabled("llama")
    eager, graphed = (Decoded(model, graph, config=config, prompt=200) for graph in (False, True))
    assert graphed.difference(eager) <= 1e-5
    assert kinds_of(graphed.decoder) == [()]


def test_memory_that_no_device_reads_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "reach_entries", lambda *arguments: None)
    model, options = enabled("llama"), case_of("device")
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert kinds_of(graphed.decoder) == [()] and graphed.decoder.runtime.calls > 0


def spilled(rows: Rows) -> Any:
    """The group of four rows that joined, spilled and left."""
    rows.steps(rows.pairs[:3], 20)
    rows.steps(rows.pairs, 60)
    rows.steps(rows.pairs[1:3], 10)
    assert rows.runner.reason == ""
    return rows.runner._pool


@pytest.mark.usefixtures("compiled", "one_thread")
def test_rows_of_a_batch_are_as_alone() -> None:
    """Rows of any length, one without keys on the host; they join, spill and leave."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = Rows(model, [20, 300, 900, 400], **REACHED)
    group = spilled(rows)
    found = {read for bucket in group.graphs.values() for reads in kinds_of(bucket.decoder) for read in reads}
    assert found == {Reads.BOTH, Reads.DEVICE}
    assert rows.runner.captures == sum(len(bucket.decoder.graphs) for bucket in group.graphs.values())
    rows.check_books(host_reads_all=False)


@pytest.mark.usefixtures("compiled", "one_thread")
def test_rows_over_pages_are_as_alone() -> None:
    """Pages, named keys and late ones; forks, crops and random members."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = rows_of(model, trees(model, PagedKVPool(1000, 40), **REACHED))
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
    group: Any = rows.runner._pool
    kinds = [kind for bucket in group.graphs.values() for kind in bucket.decoder.graphs]
    assert any(kind.prefix_depth and Reads.BOTH in kind.host_access for kind in kinds)
    rows.check_books(host_reads_all=False)
