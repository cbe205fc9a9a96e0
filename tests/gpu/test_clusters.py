"""Clusters of keys: what they sum, that they are near, and that the same keys give the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.clusters import cluster
from retrieval_attn.gpu.clusters.cluster import make_clusters, metric_of, probes_of, spread


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
    probes, offsets = probes_of(pieces.centers, metric)
    nearest = (keys.float() @ probes.transpose(1, 2) + offsets[:, None]).argmax(dim=2)
    assert int((nearest != pieces.members).sum()) <= count // 1000  # rounded differently


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_become_clusters_and_members_are_nearest(device: str, dtype: torch.dtype) -> None:
    """In the metric of the queries, by distances in float64; spreads are near the groups' own."""
    keys, values, queries = made(device, 20_000, dtype)
    metric = metric_of(queries)
    found = make_clusters(keys, values, metric, 32)
    projected = keys.double() @ metric.double().transpose(1, 2)
    distance = torch.cdist(projected, found.centers.double())
    own = distance.gather(2, found.members.long()[..., None])[..., 0]
    assert bool((own <= distance.amin(dim=2) + 1e-3).all())
    # a group's keys are spread by 1 in each of 16 directions, whose weights are the metric's
    spread_of_group = metric.double().square().sum(dim=(1, 2))
    assert bool((own.square().mean(dim=1) < 1.01 * spread_of_group).all())
    plain = make_clusters(keys, values, None, 32)
    far = torch.cdist(keys.double(), plain.centers.double()).gather(2, plain.members.long()[..., None])
    assert bool((far.square().mean(dim=(1, 2)) < 16.2).all())


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
