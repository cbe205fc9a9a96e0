"""What a node of the tree keeps of windows, which every fork has a copy of: what is used, and all of it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache, pack
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.prefix_handle import PrefixEntry
from retrieval_attn.gpu.attention.window import WindowCache
from tests.tiny_models import handed_out, random_ids, tiny_model

CONFIG = ra.Config(sink=4, window=24, retrieve=6)


@pytest.fixture
def model() -> Iterator[Any]:
    for found in handed_out(tiny_model("llama")):
        yield ra.enable(found)


def windows_of(cache: RetrievalCache) -> list[WindowCache]:
    """Of all layers."""
    found = [layer.window for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    return [window for window in found if window is not None]


@pytest.mark.parametrize("tokens", [3, 20, 100])
def test_a_fork_of_a_packed_cache_goes_on_as_before(tokens: int, model: Any) -> None:
    """Its buffers are as large as ever, so that graphs know them; tokens that come move the window as without."""
    plain, held = RetrievalCache(model, CONFIG), RetrievalCache(model, CONFIG)
    ids, more = random_ids(1, tokens), random_ids(1, 40, seed=1)
    with torch.no_grad():
        for cache in (plain, held):
            model(ids, past_key_values=cache)
        slots = [window.slots for window in windows_of(plain.fork())]
        pack(held)
        for window in windows_of(held):
            low, high = window.span
            assert (low, high) == (0, window.buffers[0].shape[2]) and window.room == 0
            assert window.nbytes == sum(part.untyped_storage().nbytes() for part in window.buffers)
        forks = plain.fork(), held.fork()
        assert [window.slots for window in windows_of(forks[1])] == slots
        for at in range(40):
            wanted, found = (model(more[:, at : at + 1], past_key_values=fork).logits for fork in forks)
            assert torch.equal(wanted, found)
            assert [window.buffers[0].shape[2] for window in windows_of(forks[1])] == slots
        # the packed one itself did not change
        wanted, found = (model(more[:, :1], past_key_values=fork).logits for fork in (plain.fork(), held.fork()))
        assert torch.equal(wanted, found)


def test_every_node_counts_its_own_windows(model: Any) -> None:
    """A node behind another has a copy of the windows, and not what both share."""
    first = RetrievalCache(model, CONFIG)
    with torch.no_grad():
        model(random_ids(1, 100), past_key_values=first)
        second = first.fork()
        model(random_ids(1, 5, seed=1), past_key_values=second)
    one = PrefixEntry.beyond(first, Sizes())
    other = PrefixEntry.beyond(second, one.shared)
    windows = sum(window.nbytes for window in windows_of(second))
    assert windows > 0 and one.sizes.total == first.host_nbytes + first.device_nbytes
    assert other.sizes.total == second.host_nbytes + second.device_nbytes - one.shared.total
    assert other.sizes.total >= windows


def test_host_and_device_are_told_apart(model: Any) -> None:
    """On a CPU all is the host's. Where windows lie elsewhere, they and codes are counted there, tensor by tensor."""
    cache = RetrievalCache(model, CONFIG.replace(index="device"))
    with torch.no_grad():
        model(random_ids(1, 300), past_key_values=cache)
    pack(cache)
    windows, codes = windows_of(cache), sum(index.memory.device for index in cache.coded_indexes)
    own, host = sum(window.nbytes for window in windows), cache.host_nbytes
    clusters = cache.device_nbytes - own - codes
    assert own and host and codes
    assert PrefixEntry.beyond(cache, Sizes()).sizes == Sizes(host + own + codes + clusters)
    before = PrefixEntry.beyond(cache.fork(), Sizes())
    for window in windows:
        key, value = window.buffers
        window.use(torch.empty_like(key, device="meta"), torch.empty_like(value, device="meta"))
    assert PrefixEntry.beyond(cache, Sizes()).sizes == Sizes(host, own + codes + clusters)
    assert before.sizes.device == 0
    # what it shares with what is before it is that one's; windows are its own
    whole = PrefixEntry.beyond(cache, Sizes())
    assert PrefixEntry.beyond(cache, whole.shared).sizes == Sizes(0, own)
