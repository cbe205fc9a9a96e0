"""Clusters of keys: what they sum, that they are near, and that the same keys give the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.clusters import cluster
from retrieval_attn.gpu.clusters.cluster import make_clusters, metric_of, spread, usual_weights


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(device: str, count: int, dtype: torch.dtype, groups: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (2, count, 16) in groups far from each other, values (2, count, 24), and queries (2, 300, 16)."""
    rng = torch.Generator().manual_seed(count)
    group = torch.randint(groups, (2, count), generator=rng)
    middles = 6 * torch.randn(2, groups, 16, generator=rng) + 9
    keys = middles.gather(1, group[..., None].expand(-1, -1, 16)) + torch.randn(2, count, 16, generator=rng)
    values = torch.randn(2, count, 24, generator=rng)
    queries = torch.randn(2, 300, 16, generator=rng) * torch.linspace(0.01, 2, 16)
    return keys.to(device, dtype), values.to(device, dtype), queries.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 5, 1000, 9001])
def test_sums_are_those_of_the_members(
    device: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every cluster, however few keys there are, in one piece or in many; and the same ones at every call."""
    keys, values, queries = made(device, count, dtype)
    metric = metric_of(queries)
    found = make_clusters(keys, values, metric, 16)
    assert found.members.shape == (2, count) and found.members.dtype == torch.uint8
    chosen = (found.members.long()[..., None] == torch.arange(16, device=device)).double().transpose(1, 2)
    assert torch.equal(found.counts.double(), chosen.sum(dim=2))
    for sums, rows in ((found.key_sums, keys), (found.value_sums, values)):
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums.double(), chosen @ rows.double(), rtol=1e-5, atol=1e-3)
    assert all(torch.equal(one, two) for one, two in zip(found, make_clusters(keys, values, metric, 16), strict=True))
    monkeypatch.setattr(cluster, "BYTES_AT_ONCE", 40_000)
    pieces = make_clusters(keys, values, metric, 16)
    assert torch.equal(pieces.counts.sum(dim=1), found.counts.sum(dim=1))
    assert int((found.members != pieces.members).sum()) <= count // 100  # rounded differently


def joint(keys: Tensor, values: Tensor, metric: Tensor | None) -> Tensor:
    """(heads, n, dim of both) float64: projected keys and values, either with a mean squared spread of 1."""
    projected = keys.double() if metric is None else keys.double() @ metric.double().transpose(1, 2)
    parts = []
    for part in (projected, values.double()):
        away = part - part.mean(dim=1, keepdim=True)
        parts.append(away / away.square().sum(dim=2).mean(dim=1).sqrt()[:, None, None])
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_members_are_nearest_in_keys_and_values_together(device: str, dtype: torch.dtype) -> None:
    """Either as far as it spreads, keys in the metric of the queries, by distances in float64."""
    keys, values, queries = made(device, 20_000, dtype)
    # values have groups of their own, that keys say nothing of
    halves = torch.arange(20_000, device=device)[None, :, None] % 2
    values = values + (8 * halves * torch.linspace(-1, 1, 24, device=device)).to(dtype)
    for metric in (metric_of(queries), None):
        found = make_clusters(keys, values, metric, 32)
        own = found.members.long()
        rows = joint(keys, values, metric)
        chosen = torch.nn.functional.one_hot(own, 32).double().transpose(1, 2)
        means = chosen @ rows / chosen.sum(dim=2, keepdim=True).clamp_min(1)
        distance = torch.cdist(rows, means).masked_fill(chosen.sum(dim=2)[:, None] == 0, torch.inf)
        nearest = distance.gather(2, own[..., None])[..., 0] <= distance.amin(dim=2) + 0.05
        assert float(nearest.double().mean()) > 0.98
        # keys alone would put as many of either group of values into a cluster
        odd = (chosen @ halves.double().expand(2, -1, -1))[..., 0].gather(1, own) / found.counts.gather(1, own)
        assert float(torch.minimum(odd, 1 - odd).mean()) < 0.1


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_usual_weights_are_those_beyond_the_best(
    device: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As softmax gives them, mean over queries, which are taken some at a time; broken queries count nothing."""
    keys, _, queries = made(device, 900, torch.float32)
    keys, queries = keys - 9, queries.unflatten(1, (3, 100))[:, :, : cluster.WEIGHING_QUERIES]
    monkeypatch.setattr(cluster, "RANKED", 1)
    monkeypatch.setattr(cluster, "BEST", 30)
    monkeypatch.setattr(cluster, "BYTES_AT_ONCE", 12 * 2 * 900 * 50)
    found = usual_weights(keys, queries, 0.2, softcap)
    scores = queries.flatten(1, 2).double() @ keys.double().transpose(1, 2) * 0.2
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    best = scores.topk(31, dim=2).indices
    mean = scores.softmax(dim=2).scatter(2, best, 0).mean(dim=1)
    expected = (mean / mean.mean(dim=1, keepdim=True)).clamp_min(cluster.LEAST_WEIGHT)
    assert float(expected.amax()) > 1.5, "some keys weigh much more than others"
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
    assert bool((usual_weights(keys, queries[:, :, :0], 0.2, softcap) == 1).all())
    assert bool((usual_weights(keys * torch.nan, queries, 0.2, softcap) == 1).all())
    assert usual_weights(keys[:, :0], queries, 0.2, softcap).shape == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifts_lead_to_the_weighted_means(device: str, dtype: torch.dtype) -> None:
    """Of the same clusters with the same sums; without weights there are none, and equal weights are none."""
    keys, values, queries = made(device, 3000, dtype)
    metric = metric_of(queries)
    weights = torch.rand(2, 3000, generator=torch.Generator().manual_seed(1)).to(device).pow(4) + 1e-3
    plain, found = (make_clusters(keys, values, metric, 16, given) for given in (None, weights))
    assert torch.equal(plain.members, found.members) and torch.equal(plain.value_sums, found.value_sums)
    assert not bool(plain.value_shifts.any())
    chosen = torch.nn.functional.one_hot(found.members.long(), 16).double().transpose(1, 2)
    own = chosen * weights.double()[:, None]
    mean = chosen @ values.double() / chosen.sum(dim=2, keepdim=True).clamp_min(1)
    usual = own @ values.double() / own.sum(dim=2, keepdim=True).clamp_min(1e-9)
    assert float((usual - mean).abs().amax()) > 0.1
    atol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.value_shifts.double(), usual - mean, rtol=1e-3, atol=atol)
    alike = make_clusters(keys, values, metric, 16, torch.ones_like(weights))
    assert float(alike.value_shifts.abs().amax()) < 1e-4


def test_metric_is_the_queries_second_moment(device: str) -> None:
    """Whatever its scale; queries that are not finite count nothing; no query, or none but zeros: the identity."""
    queries = made(device, 1, torch.float32)[2]
    moment = queries.double().transpose(1, 2) @ queries.double() / 300
    for scale in (1.0, 1e-6, 1e6):
        metric = metric_of(queries * scale).double() / scale
        torch.testing.assert_close(metric.transpose(1, 2) @ metric, moment, rtol=1e-4, atol=2e-5)
    broken = torch.cat([queries, torch.full_like(queries[:, :2], torch.nan)], dim=1)
    torch.testing.assert_close(metric_of(broken), metric_of(queries))
    one = torch.eye(16, device=device).expand(2, -1, -1)
    assert torch.equal(metric_of(queries[:, :0]), one) and torch.equal(metric_of(queries * 0), one)
    # fewer queries than directions: the others are all but ignored
    few = metric_of(queries[:, :3])
    unseen = torch.linalg.qr(queries[0, :3].T, mode="complete").Q[:, 3:]
    assert 0 < float((few[0] @ unseen).norm(dim=0).amax()) < 3e-3


def test_equal_keys_and_keys_that_are_not_finite(device: str) -> None:
    """All in one cluster; broken keys get some cluster and end nothing."""
    keys, values, _ = made(device, 1, torch.float32)
    found = make_clusters(keys.expand(-1, 700, -1), values.expand(-1, 700, -1), None, 64)
    assert found.counts.amax(dim=1).tolist() == [700, 700]
    broken = keys.repeat(1, 9, 1)
    broken[:, 4] = torch.nan
    assert int(make_clusters(broken, values.repeat(1, 9, 1), None, 4).counts.sum()) == 18


def test_places_are_spread() -> None:
    """Ascending, all different, in equal spans, and not always the same column of a table."""
    places = spread(500, 8000, torch.device("cpu"))
    assert bool((places.diff() > 0).all()) and bool((places // 16 == torch.arange(500)).all())
    assert len(set((places % 16).tolist())) == 16
    assert spread(5, 5, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4] and not len(spread(0, 0, torch.device("cpu")))


@pytest.mark.parametrize("clusters,count", [(0, 5), (257, 5), (4, 6)])
def test_refused(clusters: int, count: int) -> None:
    with pytest.raises(ShapeError, match="1 to 256 clusters and a value for each key"):
        make_clusters(torch.zeros(1, 5, 4), torch.zeros(1, count, 4), None, clusters)
