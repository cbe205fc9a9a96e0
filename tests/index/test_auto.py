"""`auto`: which index it takes, why, and that it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn.index import auto, create
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn_eval.bench.synthetic import SyntheticHead, synthetic_head

KEYS = 8192


@pytest.fixture(scope="module")
def head() -> SyntheticHead:
    return synthetic_head(KEYS, head_dim=64, train=1024, decode=16)


def built(head: SyntheticHead, count: int = KEYS, **options: Any) -> Any:
    keys = from_float32(head.keys[:count], Format.BFLOAT16)
    return create("auto", keys, fmt=Format.BFLOAT16, queries=head.train_rotated, **options)


def test_few_keys_are_scanned_and_many_get_a_graph(head: SyntheticHead, monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto.notes[built(head, 2000)] == "flat: only 2,000 keys"
    short = built(head)
    assert short.kind == "flat" and "up to 262,144" in auto.notes[short]
    monkeypatch.setattr(auto, "SCAN_BELOW", 0)
    graph = built(head, recall=0.5)
    assert graph.kind == "roargraph" and "held-out recall@100" in auto.notes[graph]
    found = graph.search(head.decode[0], 100)
    assert found.keys_scanned < 0.6 * 16 * KEYS
    untrained = create("auto", from_float32(head.keys, Format.BFLOAT16), fmt=Format.BFLOAT16)
    assert auto.notes[untrained] == "flat: 8,192 keys and no queries to train on"


def test_a_graph_that_finds_too_little_is_not_taken(head: SyntheticHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained on other queries than it is judged by: a floor that no graph reaches gives a scan, with the reason."""
    monkeypatch.setattr(auto, "SCAN_BELOW", 0)
    index = built(head, recall=1.0)
    assert index.kind == "flat" and "below 1.0" in auto.notes[index]
    exact = (from_float32(head.keys, Format.BFLOAT16).astype(np.uint32) << 16).view(np.float32)
    best = np.argsort(-(head.decode[0] @ exact.T), axis=1)[:, :10]
    ids = index.search(head.decode[0], 10).ids
    assert sum(len(np.intersect1d(a, b)) for a, b in zip(ids, best, strict=True)) >= 0.99 * best.size


def test_a_scan_of_many_keys_is_one_of_a_sketch(head: SyntheticHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a graph is slower or finds too little; codes of all elements where the sketch finds too little as well."""
    monkeypatch.setattr(auto, "SKETCH_FROM", KEYS)
    for below, recall, why in ((KEYS + 1, 0.9, "up to 8,193"), (0, 1.0, "below 1.0")):
        monkeypatch.setattr(auto, "SCAN_BELOW", below)
        index = built(head, recall=recall)
        assert index.kind == "sketch" and why in auto.notes[index] and "held-out recall@100" in auto.notes[index]
    monkeypatch.setattr(auto, "MIN_SKETCH_RECALL", 1.01)
    monkeypatch.setattr(auto, "SCAN_BELOW", KEYS + 1)
    index = built(head)
    assert index.kind == "flat" and "a sketch finds" in auto.notes[index]


@pytest.mark.parametrize("options", [{"recall": 2}, {"recall": True}, {"scan_below": 5}])
def test_options_out_of_range_are_refused(head: SyntheticHead, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        built(head, **options)


def test_held_out_queries_are_not_trained_on(head: SyntheticHead, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    graph = auto.RoarGraphIndex.build.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, keys: Any, fmt: Any, options: Any, training: Any) -> Any:
        shown.append(training.queries)
        return graph(cls, keys, fmt, options, training)

    monkeypatch.setattr(auto.RoarGraphIndex, "build", classmethod(watched))
    monkeypatch.setattr(auto, "SCAN_BELOW", 0)
    built(head)
    assert shown[0].shape[1] == head.train_rotated.shape[1] - auto.HELD_OUT
