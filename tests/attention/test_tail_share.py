"""How much of attention was estimated: by the host's step, by a layer, in an answer's statistics."""

from copy import copy

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.source import TailMass, largest_share, mean_share
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn_eval.bench.fidelity.captured_mass import CapturedMass
from tests.cpu.apart import attend_apart
from tests.cpu.test_clusters import DIM, GROUP, KV_HEADS, SCALE, make_path, make_queries
from tests.tiny_models import QUESTION, Loaded, needle_text

CONFIG = ra.Config(sink=8, window=64, retrieve=50, prefill_chunk=512)


@pytest.fixture(scope="module")
def text() -> str:
    return needle_text(6_000)


@pytest.mark.parametrize("apart", [False, True])
def test_the_share_is_that_of_the_estimated_weights(apart: bool) -> None:
    path, queries = make_path(700), make_queries(2)
    if apart:
        found = attend_apart(path, queries, 4, 690, 20, SCALE)
    else:
        found = attend_path(path, queries, 4, 690, 20, scale=SCALE)
    assert found.rest is not None and found.rest.shape == (KV_HEADS * GROUP, 2)
    keys = path.read(4, 690)[0]
    for head in range(KV_HEADS * GROUP):
        scores = np.sort(queries[head] @ keys[head // GROUP].T * SCALE, axis=1)[:, -20:].astype(np.float64)
        attended = np.exp(scores - found.lse[head][:, None]).sum(axis=1)  # share of the attended keys
        np.testing.assert_allclose(found.rest[head], 1 - attended, atol=2e-5)
    assert (found.rest > 0.05).any()


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_is_estimated_where_all_is_attended_to_or_nothing_is_there(apart: bool) -> None:
    path, queries = make_path(100), make_queries()
    for start, stop, top_k in ((0, 100, 100), (50, 50, 7)):
        if apart:
            found = attend_apart(path, queries, start, stop, top_k, SCALE)
        else:
            found = attend_path(path, queries, start, stop, top_k, scale=SCALE)
        assert found.rest is not None and not found.rest.any()
    path.clusters = None
    assert attend_path(path, queries, 0, 100, 5, scale=SCALE).rest is None
    assert queries.shape[2] == DIM


def test_a_layer_sums_shares_of_all_keys() -> None:
    """Two rows, three heads, two tokens: the host's share times the host's weight among all."""
    generator = torch.Generator().manual_seed(0)
    tail, expected = TailMass(), np.zeros(3)
    for _ in range(2):
        rest, host, static = (torch.rand(2, 3, 2, generator=generator) for _ in range(3))
        tail.add(rest, host, torch.logaddexp(host, static))
        weights = np.exp(np.stack([host.numpy(), static.numpy()]).astype(np.float64))
        expected += (rest.numpy() * weights[0] / weights.sum(axis=0)).sum(axis=(0, 2))
    np.testing.assert_allclose(tail.means(), expected / 8, rtol=1e-6)
    none = TailMass()
    assert mean_share({0: none, 4: tail}) == pytest.approx(expected.mean() / 8)
    layer, head, share = largest_share({0: none, 4: tail}) or (-1, -1, 0.0)
    assert (layer, head) == (4, int(expected.argmax())) and share == pytest.approx(expected.max() / 8)
    assert mean_share({0: none}) is None and largest_share({}) is None


def test_many_tokens_are_summed_with_those_that_wait() -> None:
    """Tokens one by one, more than wait at once, then a question; a copy made in between goes its own way."""
    generator = torch.Generator().manual_seed(1)
    tail, shares, copies = TailMass(), [], []
    for new in [1] * 300 + [7, 1]:
        rest, host = (torch.rand(1, 3, new, generator=generator) for _ in range(2))
        tail.add(rest, host, host + 1)
        shares.append(rest.double().numpy()[0] / np.e)
        if len(shares) in (5, 200):
            copies.append((copy(tail), np.concatenate(shares, axis=1)))
    np.testing.assert_allclose(tail.means(), np.concatenate(shares, axis=1).mean(axis=1), rtol=1e-6)
    for other, before in copies:
        assert other.count == before.shape[1]
        np.testing.assert_allclose(other.means(), before.mean(axis=1), rtol=1e-6)


def test_what_was_not_estimated_was_captured(loaded: Loaded, text: str) -> None:
    """Every head and token measured: the estimate of the mass is near the mass, and worse heads are named."""
    shares = []
    for retrieve in (50, 5):
        context = ra.Context(*loaded, CONFIG.replace(retrieve=retrieve)).read(text, progress=False)
        mass = CapturedMass(context.cache, 64)
        stats = context.ask(QUESTION, max_new_tokens=6, question_attention="retrieval").stats
        assert stats.tail_share is not None and stats.tail_share_most is not None
        assert 1 - stats.tail_share == pytest.approx(mass.mean(), abs=0.05)
        most = stats.tail_share_most
        assert stats.tail_share <= most.share <= 1
        assert stats.to_dict()["tail_share_most"] == {"layer": most.layer, "head": most.head, "share": most.share}
        layers: list[ra.RetrievalCache] = context.cache.layers  # type: ignore[assignment]
        assert not layers[0].tail.count, "an answer's fork counts for itself"  # type: ignore[attr-defined]
        shares.append(stats.tail_share)
    assert 0 < shares[0] < shares[1]


def test_without_estimates_there_is_no_share(loaded: Loaded, text: str) -> None:
    for changes, expected in (({"tail": False}, None), ({"retrieve": "all"}, 0.0)):
        context = ra.Context(*loaded, CONFIG.replace(**changes)).read(text, progress=False)
        assert context.ask(QUESTION, max_new_tokens=3).stats.tail_share == expected
