"""Clusters of a layer's keys, by which the keys that no query retrieved are estimated.

k-means in the metric of the queries: two keys are near where queries score them alike. A few rounds of Lloyd's
algorithm over a sample, then one pass that assigns every key and sums keys and values. Plain PyTorch on any device;
sums are products with one-hot matrices, never atomic additions, so that the same keys give the same clusters.

Non-finite keys are put into some cluster and make its sums non-finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError

MAX_CLUSTERS = 256
"""A key's cluster is one byte."""
ROUNDS = 4
SAMPLE_KEYS = 8192
SAMPLE_QUERIES = 4096
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: keys differ a little even where no query looks."""
BYTES_AT_ONCE = 192 << 20
"""Of scores, one-hot matrices and float32 keys at a time: less than the activations of a chunk that was read before.
On one H100 pieces of 48 MiB took 20.8 ms for 131,072 keys of 8 heads and 256 clusters, 15.2 of them to launch."""
ALIGNED = 64
"""Keys of a piece are a multiple of this: matrix units take others at half the pace."""
GOLDEN = (math.sqrt(5) - 1) / 2


class Clusters(NamedTuple):
    """Keys of each key-value head by clusters: what `make_clusters` returns.

    centers (heads, clusters, head_dim) float32, projected by the metric. members (heads, n) uint8: the cluster of each
    key. counts (heads, clusters) int32; key_sums (heads, clusters, head_dim) and value_sums (heads, clusters,
    value_dim) float32, 0 where a cluster is empty.
    """

    centers: Tensor
    members: Tensor
    counts: Tensor
    key_sums: Tensor
    value_sums: Tensor


class _Sums(NamedTuple):
    """counts (heads, clusters) float32 and sums (heads, clusters, dim) float32, of keys and of values."""

    counts: Tensor
    keys: Tensor
    values: Tensor


def metric_of(queries: Tensor) -> Tensor:
    """P (heads, head_dim, head_dim) float32: |P k - P k'|^2 is the mean of (q . (k - k'))^2.

    queries (heads, m, head_dim) of any floating dtype, of which at most SAMPLE_QUERIES are looked at; those that are
    not finite count nothing. Without queries, or where all are zero, P is the identity.
    """
    heads, count, dim = queries.shape
    some = _sampled(queries, SAMPLE_QUERIES).double()
    finite = some.isfinite().all(dim=2, keepdim=True)
    some = torch.where(finite, some, 0)
    moment = some.transpose(1, 2) @ some / finite.sum(dim=1, keepdim=True).clamp_min(1)
    mean = moment.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
    one = torch.eye(dim, dtype=torch.float64, device=queries.device)
    moment = torch.where(mean > 0, moment / torch.where(mean > 0, mean, 1) + FLOOR * one, one)
    # any root will do: distances are those of P^T P. This one needs no eigenvectors and does not wait for the device
    lower, _ = torch.linalg.cholesky_ex(moment)
    return (lower.transpose(1, 2) * torch.where(mean > 0, mean, 1).sqrt()).float().contiguous()


def make_clusters(keys: Tensor, values: Tensor, metric: Tensor | None, clusters: int) -> Clusters:
    """Cluster keys (heads, n, head_dim), any floating dtype, and sum their values (heads, n, value_dim).

    metric: (heads, head_dim, head_dim) float32 as `metric_of` gives it; None: the identity. clusters: 1 to 256. Fewer
    keys than clusters leave some empty; without keys, centres are zeros. Raises ShapeError.
    """
    heads, count, dim = keys.shape
    if not 1 <= clusters <= MAX_CLUSTERS or values.shape[:2] != keys.shape[:2]:
        raise ShapeError(
            f"clustering needs 1 to {MAX_CLUSTERS} clusters and a value for each key, got {clusters}, keys "
            f"{tuple(keys.shape)} and values {tuple(values.shape)}"
        )
    if not count:
        zeros = keys.new_zeros(heads, clusters, dim, dtype=torch.float32)
        no_values = zeros.new_zeros(heads, clusters, values.shape[2])
        return Clusters(zeros, keys.new_zeros(heads, 0, dtype=torch.uint8), zeros[..., 0].int(), zeros, no_values)
    sample = _sampled(keys, SAMPLE_KEYS)
    means = sample[:, spread(clusters, sample.shape[1], keys.device)].float()
    for _ in range(ROUNDS):
        _, sums = _pass(sample, sample[..., :0], means, metric)
        filled = sums.counts[..., None] > 0
        means = torch.where(filled, sums.keys / sums.counts.clamp_min(1)[..., None], means)
    members, sums = _pass(keys, values, means, metric)
    return Clusters(_projected(means, metric), members, sums.counts.int(), sums.keys, sums.values)


def spread(count: int, total: int, device: torch.device) -> Tensor:
    """int64 (count,): places among `total`, one in each of `count` equal spans, ascending.

    Not equally spaced, or a text that repeats itself would show one of its columns alone.
    """
    span = torch.arange(count, dtype=torch.float64, device=device)
    places = ((span + (span * GOLDEN).frac()) * (total / max(1, count))).long()
    return places.clamp_max(max(0, total - 1))


def _sampled(rows: Tensor, most: int) -> Tensor:
    """Return at most `most` of rows (heads, n, dim), evenly spaced."""
    return rows[:, spread(min(rows.shape[1], most), rows.shape[1], rows.device)]


def sample_keys(keys: Tensor, clusters: Clusters, number: int) -> Tensor:
    """`number` keys of each cluster, evenly spaced among its keys: (heads, head_dim, clusters * number) float32.

    Clusters with fewer keys have some twice. For one without any, zeros.
    """
    heads, count, dim = keys.shape
    counts = clusters.counts.long()[:, :, None]
    if not count:
        return keys.new_zeros(heads, dim, counts.shape[1] * number, dtype=torch.float32)
    order = clusters.members.argsort(dim=1, stable=True)
    begun = counts.cumsum(dim=1) - counts
    turn = torch.arange(number, device=keys.device)
    place = (begun + (2 * turn + 1) * counts // (2 * number)).flatten(1).clamp_max(count - 1)
    chosen = keys.gather(1, order.gather(1, place)[:, :, None].expand(-1, -1, dim)).float()
    filled = (counts > 0).expand(-1, -1, number).flatten(1)[:, :, None]
    return (chosen * filled).transpose(1, 2).contiguous()


def probes_of(centers: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """probes (heads, clusters, head_dim) and offsets (heads, clusters), float32: the cluster of a key is the first with
    the greatest probe . key + offset. centers, metric: as in `make_clusters`.
    """
    sides, bias = _sides(centers, metric)
    return sides.transpose(1, 2).contiguous(), bias[:, 0]


def mean_distances(keys: Tensor, probes: Tensor, offsets: Tensor, counts: Tensor, means: Tensor) -> Tensor:
    """(heads,) float32: mean squared distance of keys (heads, n, head_dim) to the means of their clusters, n > 0.

    probes, offsets: as `probes_of` has them. counts (heads, clusters); means (heads, clusters, head_dim) float32. Of
    many keys a sample; clusters without keys take none.
    """
    some = _sampled(keys, SAMPLE_KEYS).float()
    offsets = torch.where(counts > 0, offsets, -torch.inf)[:, None]
    own = torch.baddbmm(offsets, some, probes.transpose(1, 2)).argmax(dim=2)
    # rows of a matrix: on a CPU `gather` takes number by number
    first = means.shape[1] * torch.arange(len(means), device=means.device)[:, None]
    away = some - means.flatten(0, 1)[own + first]
    return away.square().sum(dim=2).mean(dim=1)


def _projected(keys: Tensor, metric: Tensor | None) -> Tensor:
    return keys if metric is None else keys @ metric.transpose(1, 2)


def _sides(centers: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """sides (heads, head_dim, clusters), bias (heads, 1, clusters): k . side + bias is greatest at the nearest one.

    The keys themselves need no projection.
    """
    # relative to the middle of all centres: keys far from the origin, as real ones are, would drown the differences
    middle = centers.mean(dim=1, keepdim=True)
    away = centers - middle
    bias = -(away * (middle + 0.5 * away)).sum(dim=2)[:, None]
    return (away if metric is None else away @ metric).transpose(1, 2).contiguous(), bias


class _Nearest:
    """Assigns keys to the nearest of centres, a piece at a time."""

    def __init__(self, keys: Tensor, centers: Tensor, metric: Tensor | None, most: int) -> None:
        """keys: like those to come, at most `most` at once."""
        self._sides, self._bias = _sides(centers, metric)
        self._left: Tensor | None = None
        if not (keys.is_cuda and keys.dtype == torch.bfloat16):
            return
        # by matrix units, in one product: two bfloat16 numbers for each of a side, three for a bias
        terms = _terms(self._sides, 2) + _terms(self._bias, 3)
        heads, _, dim = keys.shape
        padding = -(2 * dim + 3) % 8  # rows begin on multiples of 16 bytes
        none = self._bias.new_zeros(heads, padding, self._bias.shape[2], dtype=keys.dtype)
        self._right = torch.cat([*terms, none], dim=1)
        self._left = keys.new_ones(heads, most, self._right.shape[1])

    def __call__(self, keys: Tensor) -> Tensor:
        """int64 (heads, n)."""
        if self._left is None:
            return torch.baddbmm(self._bias, keys.float(), self._sides).argmax(dim=2)
        count, dim = keys.shape[1:]
        left = self._left[:, :count]
        left[..., : 2 * dim].unflatten(2, (2, dim)).copy_(keys[:, :, None])
        return torch.bmm(left, self._right, out_dtype=torch.float32).argmax(dim=2)


def _terms(numbers: Tensor, count: int) -> list[Tensor]:
    """`count` bfloat16 numbers for each of `numbers`, float32: their sum but for the last one's error."""
    terms = []
    for _ in range(count):
        terms.append(numbers.to(torch.bfloat16))
        numbers = numbers - terms[-1].float()
    return terms


def _pass(keys: Tensor, values: Tensor, means: Tensor, metric: Tensor | None) -> tuple[Tensor, _Sums]:
    """Assign keys (heads, n, head_dim) to the nearest of means (heads, clusters, head_dim), and sum."""
    heads, count, dim = keys.shape
    clusters = means.shape[1]
    members = torch.empty(heads, count, dtype=torch.uint8, device=keys.device)
    counts = torch.zeros(heads, clusters, dtype=torch.float32, device=keys.device)
    sums = _Sums(counts, means.new_zeros(means.shape), means.new_zeros(heads, clusters, values.shape[2]))
    pieces = _pieces(count, _bytes_per_key(keys, clusters))
    most = max((-((start - stop) // ALIGNED) * ALIGNED for start, stop in pieces), default=0)
    nearest = _Nearest(keys, _projected(means, metric), metric, most)
    # products with 0 and 1 are exact: matrix units for halves add them in float32
    halves = keys.is_cuda and keys.dtype == values.dtype and keys.dtype in (torch.bfloat16, torch.float16)
    one_hot = keys.new_empty(heads, clusters, most, dtype=keys.dtype if halves else torch.float32)
    for start, stop in pieces:
        own = nearest(keys[:, start:stop])
        members[:, start:stop] = own
        chosen = one_hot[..., : stop - start].zero_().scatter_(1, own[:, None], 1)
        sums.counts.add_(chosen.sum(dim=2, dtype=torch.float32))
        for into, rows in ((sums.keys, keys), (sums.values, values)):
            some = rows[:, start:stop]
            if halves and rows.shape[2]:
                into.add_(torch.bmm(chosen, some, out_dtype=torch.float32))
            elif rows.shape[2]:
                into.baddbmm_(chosen, some.float())
    return members, sums


def _bytes_per_key(keys: Tensor, clusters: int) -> int:
    """Return the bytes of a pass per key, all heads: its float32 numbers, or two copies; scores and choices."""
    return keys.shape[0] * (4 * keys.shape[2] + 8 * clusters)


def _pieces(count: int, bytes_per_key: int) -> list[tuple[int, int]]:
    at_once = max(ALIGNED, BYTES_AT_ONCE // bytes_per_key // ALIGNED * ALIGNED)
    return [(start, min(count, start + at_once)) for start in range(0, count, at_once)]
