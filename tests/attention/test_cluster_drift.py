"""Clusters are made anew when a turn is unlike what was read, and only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.store import SequenceKV
from tests.memory.test_clusters import clusters_on_device
from tests.tiny_models import build_model, random_ids

TOKENS, TURN = 3000, 480
CONFIG = ra.Config(sink=4, window=16, retrieve=4, index="flat")
WORDS = {"read": torch.arange(8, 40), "other": torch.arange(48, 80)}


def text(words: str, tokens: int, seed: int) -> torch.Tensor:
    """Some of the tokens, (1, tokens): another text has other ones, whose keys are elsewhere."""
    own = WORDS[words]
    return own[random_ids(1, tokens, seed=seed) % len(own)]


def paths_of(cache: ra.RetrievalCache) -> list[SequenceKV]:
    return [host for number in range(len(cache.layers)) for host in cache.batch.hosts(number)]


def shared_of(cache: ra.RetrievalCache) -> list[Any]:
    return [path.clusters.shared if path.clusters else None for path in paths_of(cache)]


def members_of(path: SequenceKV, start: int, stop: int) -> np.ndarray[Any, Any]:
    """(kv_heads, tokens): the clusters that tokens [start, stop) of a path joined."""
    assert path.clusters is not None
    shared = path.clusters.shared
    return np.concatenate([shared.known(one.segment)[:, one.low : one.high] for one in path.parts(start, stop)], axis=1)


def run(model: Any, cache: ra.RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits[:, -1]
    return logits


def read(config: ra.Config = CONFIG, model: Any = None) -> tuple[Any, ra.RetrievalCache]:
    model = ra.enable(build_model("yi"), config) if model is None else model
    cache = ra.RetrievalCache(model, config)
    run(model, cache, text("read", TOKENS, 1))
    return model, cache


@pytest.mark.parametrize(
    ("words", "turn", "anew"), [("other", TURN, True), ("read", TURN, False), ("other", 60, False)]
)
def test_another_text_gets_clusters_of_its_own(words: str, turn: int, anew: bool) -> None:
    """Not the same kind of text, and not a turn that is small beside what was read."""
    model, cache = read()
    before = shared_of(cache)
    run(model, cache, text(words, turn, 2))
    for path, old in zip(paths_of(cache), before, strict=True):
        assert path.clusters is not None and (path.clusters.shared is not old) == anew
        start, stop = 4, TOKENS + turn - 16
        assert (path.clusters.start, path.clusters.stop) == (start, stop)
        # every key is counted once, whoever made its cluster
        table = path.clusters.table
        assert (table.counts.sum(axis=1) == stop - start).all()
        keys, values = path.read(start, stop)
        shared = path.clusters.shared
        assert shared.value_shifts is not None
        own_values = table.value_sums - table.counts[:, :, None] * shared.value_shifts
        np.testing.assert_allclose(own_values.sum(axis=1), values.sum(axis=1), atol=1e-2)
        members = members_of(path, start, stop)
        assert [np.bincount(own, minlength=table.clusters).tolist() for own in members] == table.counts.tolist()
        if anew:
            assert old.distances is not None and (path.clusters.shared.distances != old.distances).all()


def test_forks_keep_the_clusters_they_had() -> None:
    """Their answers are those of a fork that nobody followed, bit by bit."""
    model, cache = read()
    alone = read(model=model)[1]
    fork = cache.fork()
    before = shared_of(fork)
    run(model, cache, text("other", TURN, 2))
    assert all(one is two for one, two in zip(shared_of(fork), before, strict=True))
    assert not any(one is two for one, two in zip(shared_of(cache), before, strict=True))
    for seed in range(3, 33):  # a block leaves the window, too
        ids = text("read", 1, seed)
        assert torch.equal(run(model, fork, ids), run(model, alone, ids))


def test_a_device_follows() -> None:
    """Members of all coded keys, and mean values over them alone: a fork's turn has no codes."""
    config = CONFIG.replace(index="device")
    model, cache = read(config)
    run(model, cache, text("read", 1, 3))
    held = clusters_on_device(cache)
    fork = cache.fork()
    for one in (fork, cache):
        run(model, one, text("other", TURN, 2))
        run(model, one, text("other", 1, 4))
        assert clusters_on_device(one) >= held
    for one, coded in ((fork, TOKENS), (cache, TOKENS)):
        for path in paths_of(one):
            clusters, segments = path.clusters, path.segments
            assert clusters is not None and clusters.shared.mean_values is not None and clusters.shared.late is not None
            stop = path.parts(4, len(path))[0].high
            assert stop >= coded - 16 and (one is cache or stop < TOKENS + TURN)
            (device_side,) = clusters.shared.on_devices[segments[0]].values()
            keys, values = path.read(4, min(stop, clusters.stop))
            members = members_of(path, 4, min(stop, clusters.stop))
            found = device_side.members[:, : device_side.length].cpu().numpy()
            assert (found == members[:, : device_side.length]).all()
            for head, own in enumerate(members):
                filled = np.unique(own)
                means = np.stack([values[head][own == c].mean(axis=0) for c in filled])
                shifts = clusters.shared.value_shifts
                assert shifts is not None
                np.testing.assert_allclose(
                    clusters.shared.mean_values[head][filled], means + shifts[head][filled], atol=0.05
                )
