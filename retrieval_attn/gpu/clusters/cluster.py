"""Clusters of a layer's keys, by which the keys that no query retrieved are estimated.

k-means over keys and values together: two keys are near where queries score them alike and their values are alike,
either as far as it spreads. A few rounds of Lloyd's algorithm over a sample, then one pass that assigns every key and
sums keys and values. A cluster's mean value is told by weights: what counts are the keys that queries leave out and
still look at. Plain PyTorch on any device; sums are products with one-hot matrices, never atomic additions, so that the
same keys give the same clusters.

Non-finite keys are put into some cluster and make its sums non-finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError

MAX_CLUSTERS = 256
"""A key's cluster is one byte."""
ROUNDS = 4
SAMPLE_KEYS = 8192
"""That the rounds look at. 4,096 and 3 rounds halve their time, and raise KL by a third (code at 8K, Gemma 3 270M)."""
SAMPLE_QUERIES = 4096
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: keys differ a little even where no query looks."""
BYTES_AT_ONCE = 232 << 20
"""Of scores, one-hot matrices and keys with values at a time: less than the activations of a chunk that was read
before, and as much as the sample of eight heads takes. On one H100 pieces of 48 MiB took 20.8 ms for 131,072 keys of 8
heads and 256 clusters, 15.2 of them to launch."""
BYTES_PER_SCORE = 12
"""While keys are weighed: a float32, what a logarithm of a sum takes, and who is best."""
ALIGNED = 64
"""Keys of a piece are a multiple of this: matrix units take others at half the pace."""
GOLDEN = (math.sqrt(5) - 1) / 2
WEIGHING_QUERIES = 64
"""Queries of each head that tell the keys' usual weights; KL with 256 was the same within 5 %."""
BEST = 100
"""Keys of a query that it is taken to retrieve, about: their weight does not count."""
RANKED = 8
"""Every eighth key or so is ranked, to find about where the best ones end."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e4
"""Of the mean weight: a cluster that no query looks at has the plain mean of its values; halves hold what is less."""


class Clusters(NamedTuple):
    """Keys of each key-value head by clusters: what `make_clusters` returns.

    centers (heads, clusters, head_dim) float32, mean keys projected by the metric. members (heads, n) uint8: the
    cluster of each key. counts (heads, clusters) int32; key_sums (heads, clusters, head_dim) and value_sums (heads,
    clusters, value_dim) float32, 0 where a cluster is empty. value_shifts: as value_sums, what the weighted mean of its
    values is more than their plain mean.
    """

    centers: Tensor
    members: Tensor
    counts: Tensor
    key_sums: Tensor
    value_sums: Tensor
    value_shifts: Tensor


class _Sums(NamedTuple):
    """counts (heads, clusters) float32 and rows (heads, clusters, dim of keys and values): sums of keys with their
    values. weights, weighted (heads, clusters, value_dim): of weighted keys and their values; zeros without weights.
    """

    counts: Tensor
    rows: Tensor
    weights: Tensor
    weighted: Tensor

    @classmethod
    def zeros(cls, like: Tensor, clusters: int, dim: int, value_dim: int) -> _Sums:
        """Return sums of no keys. like: (heads, ...)."""
        shapes = [(like.shape[0], clusters, *rest) for rest in ((), (dim + value_dim,), (), (value_dim,))]
        return cls(*(like.new_zeros(shape, dtype=torch.float32) for shape in shapes))

    def means(self, before: Tensor) -> Tensor:
        """(heads, clusters, dim of both): mean rows; of a cluster without keys, what it had."""
        return torch.where(self.counts[..., None] > 0, self.rows / self.counts.clamp_min(1)[..., None], before)


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


def usual_weights(keys: Tensor, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
    """(heads, n) float32, mean 1: the mean weight of each key over queries, where it is not among a query's best.

    keys (heads, n, head_dim), queries (heads, group, m, head_dim), of which WEIGHING_QUERIES of each of `group` are
    looked at; those that are not finite count nothing. scale, softcap: of scores.
    """
    heads, count, dim = keys.shape
    some = _sampled(queries.flatten(0, 1), WEIGHING_QUERIES).reshape(heads, -1, dim)
    some = torch.where(some.isfinite().all(dim=2, keepdim=True), some, 0) * scale
    total = keys.new_zeros(heads, count, dtype=torch.float32)
    if not count or not some.shape[1]:
        return total + 1
    ranked = spread(-(-count // RANKED), count, keys.device)
    best = min(len(ranked), BEST // RANKED + 1)
    at_once = max(1, BYTES_AT_ONCE // (heads * count * BYTES_PER_SCORE))
    for asked in some.split(at_once, dim=1):
        scores = _products(asked, keys)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        least = scores[..., ranked].topk(best, dim=2, sorted=True).values[..., -1:]
        named = scores >= least
        scores.sub_(scores.logsumexp(dim=2, keepdim=True)).exp_()
        total += scores.masked_fill_(named, 0).sum(dim=1)
    mean = total.mean(dim=1, keepdim=True)
    weights = torch.where(mean > 0, total / torch.where(mean > 0, mean, 1), 1)
    return weights.clamp_(LEAST_WEIGHT, MOST_WEIGHT)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """(heads, m, n) float32 of queries (heads, m, head_dim) and keys (heads, n, head_dim)."""
    if keys.is_cuda and keys.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(queries.to(keys.dtype), keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.float().transpose(1, 2))


def make_clusters(
    keys: Tensor, values: Tensor, metric: Tensor | None, clusters: int, weights: Tensor | None = None,
    between: Callable[[], object] = lambda: None,
) -> Clusters:  # fmt: skip
    """Cluster keys (heads, n, head_dim) with their values (heads, n, value_dim), any floating dtype, and sum them.

    metric: (heads, head_dim, head_dim) float32 as `metric_of` gives it; None: the identity. clusters: 1 to 256. Fewer
    keys than clusters leave some empty; without keys, centres are zeros. weights: (heads, n) float32 as `usual_weights`
    gives them; None: all alike. between: called when the centres are found, before all keys are assigned. Raises
    ShapeError.
    """
    heads, count, dim = keys.shape
    if not 1 <= clusters <= MAX_CLUSTERS or values.shape[:2] != keys.shape[:2]:
        raise ShapeError(
            f"clustering needs 1 to {MAX_CLUSTERS} clusters and a value for each key, got {clusters}, keys "
            f"{tuple(keys.shape)} and values {tuple(values.shape)}"
        )
    if not count:
        none = _Sums.zeros(keys, clusters, dim, values.shape[2])
        no_keys, members = none.rows[..., :dim], keys.new_zeros(heads, 0, dtype=torch.uint8)
        return Clusters(no_keys, members, none.counts.int(), no_keys, none.weighted, none.weighted)
    sample = _sampled(keys, SAMPLE_KEYS), _sampled(values, SAMPLE_KEYS)
    joint = _joint_metric(*sample, metric)
    means = torch.cat(sample, dim=2)[:, spread(clusters, sample[0].shape[1], keys.device)].float()
    rows = _JoinedRows(*sample, clusters)
    for _ in range(ROUNDS):
        means = _pass(rows, means, joint)[1].means(means)
    between()
    rows = _JoinedRows(keys, values, clusters)
    members, sums = _pass(rows, means, joint, weights)
    found = sums.means(means)
    shifts = torch.zeros_like(sums.weighted)
    if weights is not None:
        usual = sums.weighted / sums.weights.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        shifts = torch.where(sums.counts[..., None] > 0, usual - found[..., dim:], 0)
    centers = _projected(found[..., :dim], metric)
    key_sums, value_sums = (part.contiguous() for part in sums.rows.split((dim, values.shape[2]), dim=2))
    return Clusters(centers, members, sums.counts.int(), key_sums, value_sums, shifts)


def _joint_metric(keys: Tensor, values: Tensor, metric: Tensor | None) -> Tensor:
    """(heads, dim, dim) float32, of rows of a key and its value: either part has a mean squared distance of 1 from its
    mean over keys (heads, n, head_dim), as `metric` projects them, and values (heads, n, value_dim).
    """
    heads, _, dim = keys.shape
    joint = keys.new_zeros(heads, dim + values.shape[2], dim + values.shape[2], dtype=torch.float32)
    joint[:, :dim, :dim] = torch.eye(dim, device=keys.device) if metric is None else metric
    joint[:, dim:, dim:] = torch.eye(values.shape[2], device=keys.device)
    for part, rows in ((slice(None, dim), keys), (slice(dim, None), values)):
        projected = _projected(rows.float(), joint[:, part, part])
        squares = (projected - projected.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1)[:, None, None]
        joint[:, part, part] /= torch.where(squares > 0, squares, 1).sqrt()
    return joint


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


class _JoinedRows:
    """Keys with their values as matrix products take them, a piece of the tokens at a time.

    Behind a row's numbers are ones, by which a product of rows adds a bias and counts. Rows of bfloat16 on a GPU come
    twice, for sides of two bfloat16 numbers each; their products are sums in float32.
    """

    def __init__(self, keys: Tensor, values: Tensor, clusters: int) -> None:
        """keys (heads, n, head_dim), values (heads, n, value_dim), n > 0."""
        self._parts = keys, values
        self.heads, self.count, dim = keys.shape
        self.value_dim = values.shape[2]
        self.dim, self.device = dim + self.value_dim, keys.device
        self.split = keys.is_cuda and keys.dtype == values.dtype == torch.bfloat16
        self.dtype = torch.bfloat16 if self.split else torch.float32
        copies = 2 if self.split else 1
        width = copies * self.dim + (3 if self.split else 1)
        self.width = width + -width % 8  # rows begin on multiples of 16 bytes
        self._pieces = _pieces(self.count, _bytes_per_key(keys, values, clusters))
        self.most = max(-((start - stop) // ALIGNED) * ALIGNED for start, stop in self._pieces)
        self._left = torch.ones(self.heads, self.most, self.width, dtype=self.dtype, device=keys.device)
        self._copies = self._left[..., : copies * self.dim].unflatten(2, (copies, self.dim))
        self._filled = False

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield tokens and their rows (heads, tokens, width), which hold until the next piece."""
        keys, values = self._parts
        for start, stop in self._pieces:
            if not self._filled:
                there, span = self._copies[:, : stop - start], slice(start, stop)
                there[..., : keys.shape[2]] = keys[:, span, None]
                there[..., keys.shape[2] :] = values[:, span, None]
                self._filled = len(self._pieces) == 1
            yield slice(start, stop), self._left[:, : stop - start]

    def summed(self, rows: Tensor) -> Tensor:
        """Return a piece's rows with one copy of their numbers, and behind these ones."""
        return rows[..., self.dim :] if self.split else rows

    def right(self, sides: Tensor, bias: Tensor) -> Tensor:
        """Return (heads, width, clusters), with which rows give scores. sides (heads, dim, clusters), bias (heads, 1,
        clusters).
        """
        terms = [*_terms(sides, 2), *_terms(bias, 3)] if self.split else [sides, bias]
        padding = bias.new_zeros(self.heads, self.width - sum(term.shape[1] for term in terms), bias.shape[2])
        return torch.cat([*terms, padding.to(self.dtype)], dim=1)


def _terms(numbers: Tensor, count: int) -> list[Tensor]:
    """`count` bfloat16 numbers for each of `numbers`, float32: their sum but for the last one's error."""
    terms = [numbers.to(torch.bfloat16)]
    while len(terms) < count:
        numbers = numbers - terms[-1]
        terms.append(numbers.to(torch.bfloat16))
    return terms


def _pass(rows: _JoinedRows, means: Tensor, metric: Tensor, weights: Tensor | None = None) -> tuple[Tensor, _Sums]:
    """Assign keys with their values to the nearest of means (heads, clusters, dim of both), and sum.

    weights: (heads, n) of the keys.
    """
    clusters, dim = means.shape[1], rows.dim
    right = rows.right(*_sides(_projected(means, metric), metric))
    members = torch.empty(rows.heads, rows.count, dtype=torch.uint8, device=rows.device)
    one_hot = torch.empty(rows.heads, clusters, rows.most, dtype=rows.dtype, device=rows.device)
    sums: Tensor | None = None
    weighted: Tensor | None = None
    for span, piece in rows.pieces():
        own = _product(piece, right).argmax(dim=2)
        members[:, span] = own
        chosen = one_hot[..., : piece.shape[1]].zero_().scatter_(1, own[:, None], 1)
        # products with 0 and 1 are exact
        sums = _added(sums, _product(chosen, rows.summed(piece)))
        if weights is not None:
            chosen.scatter_(1, own[:, None], weights[:, None, span].to(chosen.dtype))
            ofs = rows.summed(piece)[..., dim - rows.value_dim :]
            weighted = _added(weighted, _product(chosen, ofs))
    assert sums is not None
    counts, added = sums[..., dim], sums[..., :dim]
    if weighted is None:
        none = added.new_zeros(rows.heads, clusters, rows.value_dim)
        return members, _Sums(counts, added, torch.zeros_like(counts), none)
    return members, _Sums(counts, added, weighted[..., rows.value_dim], weighted[..., : rows.value_dim])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left (heads, m, k) @ right (heads, k, n), summed in float32."""
    return torch.bmm(left, right) if left.dtype == torch.float32 else torch.bmm(left, right, out_dtype=torch.float32)


def _added(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums.add_(more)


def _bytes_per_key(keys: Tensor, values: Tensor, clusters: int) -> int:
    """Return the bytes of a pass per key, all heads, at most: 6 for each of its numbers and its value's, and those of
    scores and choices.
    """
    return keys.shape[0] * (6 * (keys.shape[2] + values.shape[2]) + 8 * clusters)


def _pieces(count: int, bytes_per_key: int) -> list[tuple[int, int]]:
    at_once = max(ALIGNED, BYTES_AT_ONCE // bytes_per_key // ALIGNED * ALIGNED)
    return [(start, min(count, start + at_once)) for start in range(0, count, at_once)]
