"""Clusters of a path that was too short for some when it was read: made from what has left the window since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention import layer_kv as held
from retrieval_attn.cpu.host_attend import attend_path
from tests.cpu import test_clusters
from tests.runner.graph_cases import Decoded, enabled
from tests.tiny_models import build_model, random_ids


@pytest.fixture(autouse=True)
def _turns_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of up to 64 tokens retrieves."""
    monkeypatch.setattr("retrieval_attn.attention.retrieval.DECODE_TOKENS", 64)


CONFIG = ra.Config(sink=4, window=16, retrieve=4, index="auto")


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_a_long_generation_gets_clusters(tail: bool, host_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From so many keys on and not before, equal to the definition; never without estimates."""
    monkeypatch.setattr(held, "CLUSTERED_FROM", 100)
    config = CONFIG.replace(tail=tail, host_dtype=host_dtype)
    model: Any = ra.enable(build_model("llama"), config)
    cache = ra.RetrievalCache(model, config)
    made = []
    with torch.no_grad():
        for start in range(0, 200, 10):
            model(random_ids(1, 10, seed=start), past_key_values=cache)
            layers: list[Any] = cache.layers
            for layer in layers:
                (host,), ((low, high),) = layer.hosts, layer.held.ranges
                assert (host.clusters is not None) == (tail and high - low >= 100)
                made.append(host.clusters is not None)
    assert any(made) == tail
    if not tail:
        return
    assert not all(made)
    for name in ("DIM", "VALUE_DIM"):
        monkeypatch.setattr(test_clusters, name, 16)
    for layer in layers:
        (host,), ((low, high),) = layer.hosts, layer.held.ranges
        assert host.clusters.shared.clusters == 4 and low == 4 and high >= 170
        queries = np.random.default_rng(0).normal(size=(6, 1, 16)).astype(np.float32)
        found = attend_path(host, queries, low, high, 4, scale=test_clusters.SCALE)
        assert found.rest is not None and (found.rest > 0).all()
        test_clusters.check(found, test_clusters.reference(host, queries, (low, high), 4))


@pytest.mark.usefixtures("emulated_graphs")
def test_a_captured_step_takes_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays over blocks that leave the window, before there are clusters and after: logits of the eager way."""
    model = enabled("llama")
    without = Decoded(model, True, prompt=20, new=50)
    monkeypatch.setattr(held, "CLUSTERED_FROM", 24)
    graphed, eager = (Decoded(model, graph, prompt=20, new=50) for graph in (True, False))
    assert graphed.decoder is not None and graphed.difference(eager) <= 1e-5
    layers: list[Any] = graphed.cache.layers
    assert all(host.clusters is not None for layer in layers for host in layer.hosts)
    others: list[Any] = without.cache.layers
    assert all(host.clusters is None for layer in others for host in layer.hosts)
    assert not torch.equal(torch.stack(graphed.logits), torch.stack(without.logits))
