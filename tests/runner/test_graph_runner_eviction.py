"""Rows of a graph whose windows are full: what is done ahead, while steps replay, and what is not done again."""

from __future__ import annotations

from typing import Any

import pytest

import retrieval_attn.attention.layer_kv as held_module
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.cpu.store import indexed_from
from retrieval_attn.offload.work import HostWork
from retrieval_attn.runner.graph.sequence_slot import GraphSlot
from tests.runner.graph_cases import DEVICE, graph_step
from tests.runner.test_graph_runner import KINDS, Rows
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")

SIZES: dict[str, Any] = {"window": 32}
"""Several times the tokens of a spill stay: none of a spill is one of the next."""


def layers_of(rows: Rows) -> list[Any]:
    return [layer for pair in rows.pairs for layer in pair.row.layers]


@pytest.mark.parametrize("index", ["flat", "sketch", "device"])
def test_tokens_reach_the_host_while_steps_replay(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, and not when windows are full. Breaks if a step waits for copies."""
    kind = DEVICE if index == "device" else {"index": index, "retrieve": 40}
    rows = Rows(build_model("llama", head_dim=64), [300, 900, 500], **{**kind, **SIZES})
    when: list[str] = []
    inside, copy, room = [False], HostWork.copy_now, GraphSlot.evict_block

    def evict_block(self: GraphSlot) -> None:
        inside[0] = True
        room(self)
        inside[0] = False

    def copy_now(self: HostWork) -> None:
        when.append("full" if inside[0] else "ahead")
        copy(self)

    rows.steps(rows.pairs, 1)
    with monkeypatch.context() as patch:
        patch.setattr(GraphSlot, "evict_block", evict_block)
        patch.setattr(HostWork, "copy_now", copy_now)
        caches = [pair.row for pair in rows.pairs]
        for _ in range(82):
            graph_step(rows.runner, caches, [5] * len(caches), [cache.get_seq_length() for cache in caches])
    layers = layers_of(rows)
    assert set(when) == {"ahead"} and 8 * len(layers) <= len(when) <= 11 * len(layers)
    rows.runner.close()
    for layer in layers:
        held, host = layer.held, layer.hosts[0]
        assert held.tail_start <= held.host_columns <= held.columns and len(host) == held.host_columns


@pytest.mark.parametrize("index", ["flat", "device"])
def test_rows_are_as_alone_whatever_was_done_ahead(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it cannot be done ahead: windows that are full then wait for it."""
    kind = DEVICE if index == "device" else {"index": index, "retrieve": 40}
    for fails in (False, True):
        rows = Rows(build_model("llama", head_dim=64), [300, 900], **{**kind, **SIZES})
        tried: list[int] = []

        def failing(held: LayerKV, tried: list[int] = tried) -> None:
            tried.append(1)
            raise MemoryError("no page")

        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(LayerKV, "prepare_spill", failing)
            rows.steps(rows.pairs, 60)
            rows.pairs[0].crop(5)
            rows.steps(rows.pairs, 30)
        assert bool(tried) == fails and rows.runner.replays == 90 and rows.runner.reason == ""
        rows.check_books()


def test_keys_without_codes_join_no_clusters_but_their_own() -> None:
    """Those of coded keys are for the device, which has none of these."""
    rows = Rows(build_model("llama", head_dim=64), [900], **{**DEVICE, **SIZES})
    rows.steps(rows.pairs, 60)
    for layer in layers_of(rows):
        host = layer.hosts[0]
        last, clusters = host.segments[-1], host.clusters
        assert len(host.segments) > 1 and clusters.late is not None
        assert clusters.shared.joined(last) == (0, 0) and clusters.late.shared.joined(last)[1] > 0
    rows.check_books()


def test_a_window_is_joined_ahead_by_what_will_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a window is full, planning finds the clusters of what left it known."""
    rows = Rows(build_model("llama", head_dim=64), [900], **{**DEVICE, **SIZES})
    rows.steps(rows.pairs, 12)
    asked: list[tuple[int, int]] = []
    join = held_module.join_clusters

    def noted(path: Any, start: int, stop: int) -> None:
        asked.append((start, stop))
        join(path, start, stop)

    monkeypatch.setattr(held_module, "join_clusters", noted)
    rows.steps(rows.pairs, 16)
    held = layers_of(rows)[0].held
    spill = rows.pairs[0].row.config.spill
    assert asked and all(stop - start == spill < SIZES["window"] for start, stop in asked)
    assert (held.ranges[0][1] - spill, held.ranges[0][1]) in asked


@pytest.mark.parametrize("kind", ["device", "sketch"])
def test_windows_of_short_indexed_texts_move_as_alone(kind: str) -> None:
    """Their segment was copied, without its index, when the first tokens came: other keys were found from then on."""
    rows = Rows(build_model("llama", head_dim=64), [195, 120], **{**KINDS[kind], "retrieve": 6})
    rows.steps(rows.pairs, 40)
    assert (rows.runner.replays, rows.runner.reason) == (40, "")
    for pair in rows.pairs:
        layers: list[Any] = [*pair.row.layers, *pair.alone.layers]
        for layer in layers:
            assert indexed_from(layer.hosts[0], 0) > 0
    rows.check_books()
