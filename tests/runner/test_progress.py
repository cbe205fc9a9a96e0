"""The bar over a reading counts layers that are read and indexed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.offload import work as host_work
from retrieval_attn.runner.prefill import finish_prefill
from retrieval_attn.runner.progress import WAITING, ReadingBar
from tests.offload.test_prefill import CONFIG, around_each_build, retrieving
from tests.tiny_models import random_ids
from tests.waiting import WAIT_SECONDS


def test_layers_count_when_they_are_indexed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both layers of the model are read before the first index is built: nothing is done by then, and the description
    says what is waited for; then one after the other, with a time left.
    """
    monkeypatch.setattr(host_work, "overlaps", lambda device: True)
    may_build = threading.Event()
    around_each_build(monkeypatch, lambda: may_build.wait(WAIT_SECONDS))
    counts: list[int] = []
    with retrieving(CONFIG) as model:
        cache: Any = ra.RetrievalCache(model, CONFIG)
        with ReadingBar(cache, "reading 300 tokens", show=True) as bar:
            bar._bar.delay = 0.0
            model(random_ids(1, 300), past_key_values=cache)
            assert bar.count == 0 and cache.on_layer is not None
            bar.wait()
            assert cache.on_layer is None
            may_build.set()

            def shown() -> None:
                bar.show()
                counts.append(bar._bar.n)
                assert bar._bar.n == bar.count

            finish_prefill(cache, shown)
            assert counts[-1] == bar.count == len(cache.layers) and counts == sorted(counts)
        assert cache.on_layer is None
    assert WAITING in capsys.readouterr().err
    assert all(
        isinstance(index, RoarGraphIndex) for layer in cache.layers for index in layer.hosts[0].segments[0].indexes
    )


def test_a_hidden_bar_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with retrieving(CONFIG) as model, torch.no_grad():
        cache: Any = ra.RetrievalCache(model, CONFIG)
        with ReadingBar(cache, "reading", show=False) as bar:
            bar._bar.delay = 0.0
            model(random_ids(1, 300), past_key_values=cache)
            bar.wait()
            finish_prefill(cache, bar.show)
            assert bar.count == len(cache.layers)
    assert not capsys.readouterr().err
