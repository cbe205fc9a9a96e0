"""ClusterBuild: the clusters of one layer's new keys, made where the keys lie, then brought to the host's paths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.cluster_sums import SampledKeys
from retrieval_attn.cpu.clusters import (
    TOKENS_AT_ONCE,
    ClusterSums,
    ClusterTable,
    KeyClusters,
    clusters_for,
    largest_clusters,
    mean_values,
    samples_for,
)
from retrieval_attn.cpu.store import SequenceKV, cluster_table, join_newest, take_clusters
from retrieval_attn.gpu.clusters.cluster import (
    make_clusters,
    mean_distances,
    metric_of,
    probes_of,
    sample_keys,
    usual_weights,
)
from retrieval_attn.index.formats import to_float32
from retrieval_attn.offload.staging import brought, staging

DRIFTED = 1.45
"""Above this ratio of mean squared distances, clusters are made again. With the bundled model texts of another kind
after 6.5K tokens (code, JSON) gave 1.67 and 2.18 in one layer, 1.24 and 1.26 in another, and more of the same kind 1.15
to 1.38."""


@dataclass
class _ClusterJob:
    """Clusters of tokens [start, stop) of a path. made: on the device, then on the host. joins: tokens join those that
    the path has, its newest ones as `made` says, if it says anything.
    """

    host: SequenceKV
    start: int
    stop: int
    made: list[Any] = field(default_factory=list)
    joins: bool = False


class ClusterBuild:
    """The clusters that one layer's pass asks for: `add` or `extend`, `fetch`, `place`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: list[_ClusterJob] = []

    @property
    def requested(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._jobs)

    @property
    def fetches(self) -> bool:
        """Whether `fetch` has anything to bring."""
        return any(job.made for job in self._jobs)

    def add(
        self,
        host: SequenceKV,
        span: tuple[int, int],
        kv: tuple[Tensor, Tensor],
        queries: Tensor | None,
        scale: float = 1.0,
        softcap: float | None = None,
        *,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Tokens span[0] .. span[1] of `host` get clusters.

        kv: keys (kv_heads, n, head_dim) and values (kv_heads, n, value_dim) of these tokens. queries: (q_heads, m,
        head_dim), in whose metric keys are near each other, and which tell what keys usually weigh, or None. scale,
        softcap: of the queries' scores. between: called between the parts of this work.
        """
        keys, values = kv
        metric = weights = None
        if queries is not None and queries.shape[1]:
            grouped = queries.unflatten(0, (len(keys), -1))
            metric, weights = metric_of(grouped.flatten(1, 2)), usual_weights(keys, grouped, scale, softcap)
            between()
        found = make_clusters(keys, values, metric, clusters_for(span[1] - span[0]), weights, between)
        between()
        sums = found.counts.float(), found.key_sums, found.value_sums
        probes, offsets = probes_of(found.centers, metric)
        means = found.key_sums / found.counts.clamp_min(1)[..., None]
        distances = mean_distances(keys, probes, offsets, found.counts, means)
        made = [probes, offsets, found.members, *sums, distances, found.value_shifts]
        if not host.spec.keeps_codes(host.head_dim):
            made.append(sample_keys(keys, found, samples_for(found.counts.shape[1])))
        self._jobs.append(_ClusterJob(host, *span, made))

    def extend(self, host: SequenceKV, span: tuple[int, int], keys: Callable[[], Tensor]) -> None:
        """The clusters of `host` take in the tokens of span that they do not know.

        keys: gives those of the path's newest tokens (kv_heads, n, head_dim); a GPU that has them finds their clusters.
        """
        if host.clusters is not None:
            made = [nearest_on_device(host.clusters.shared, keys())] if self._device.type == "cuda" else []
            self._jobs.append(_ClusterJob(host, *span, made, joins=True))

    def fetch(self, ready: torch.cuda.Event | None) -> None:
        """Bring what was made to the host, once `ready` is over."""
        for job in (one for one in self._jobs if one.made):
            arrays: list[list[Any]] = [[] for _ in job.made]

            def take(place: int, array: Any, into: list[list[Any]] = arrays) -> None:
                into[place].append(array.copy())  # the ring's buffers are written to again

            ring = staging(self._device)
            pieces = [
                ([some], functools.partial(take, place))
                for place, tensor in enumerate(job.made)
                for some in (tensor.split(1) if tensor.nbytes > ring.size // 2 else [tensor])
            ]
            ring.bring(pieces, ready)
            job.made = [np.concatenate(some) for some in arrays]

    def place(self) -> None:
        """Give the paths their clusters: the tokens have come. `fetch` came before."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if job.joins:
                for members in job.made:
                    join_newest(job.host, members)
                cluster_table(job.host, job.start, job.stop)
                continue
            probes, offsets, members, counts, key_sums, value_sums, distances, shifts, *sampled = job.made
            sums = ClusterSums(counts, key_sums, value_sums)
            # of keys that are not finite nothing is known; attention over them is NaN where full attention is
            if not all(np.isfinite(array).all() for array in (probes, offsets, *sums, shifts)):
                continue
            coded = job.host.spec.keeps_codes(job.host.head_dim)
            late = largest_clusters(probes, offsets, counts) if coded else None
            samples = SampledKeys.of(sampled[0], probes.shape[1]) if sampled else None
            shared = KeyClusters(probes, offsets, None, late, distances, samples, shifts)
            take_clusters(job.host, shared, (job.start, job.stop), members, sums)
            if coded:
                shared.mean_values = mean_values(_coded_table(job.host, job.start, job.stop))


def nearest_on_device(shared: KeyClusters, keys: Tensor) -> Tensor:
    """The cluster of each key (heads, n, head_dim) on a device: uint8 (heads, n). See `KeyClusters.assign`."""
    probes, offsets = (torch.from_numpy(array).to(keys.device) for array in (shared.probes, shared.offsets))
    some = [
        (part.float() @ probes.transpose(1, 2) + offsets[:, None]).argmax(dim=2).to(torch.uint8)
        for part in keys.split(TOKENS_AT_ONCE, dim=1)
    ]
    return torch.cat(some, dim=1)


def cluster_stored(host: SequenceKV, start: int, stop: int) -> None:
    """Tokens [start, stop) of a path get clusters from what the host stores, as they are near each other by themselves.

    For a path that was too short to get some when it was read. Of keys that are not finite none are made.
    """
    keys, values = (torch.from_numpy(to_float32(rows, host.fmt)) for rows in host.read(start, stop))
    build = ClusterBuild(keys.device)
    build.add(host, (start, stop), (keys, values), None)
    build.fetch(None)
    build.place()


def drifted(host: SequenceKV, keys: Tensor) -> bool:
    """Whether keys (kv_heads, n, head_dim), n > 0, of a path's newest tokens are farther from their clusters than those
    that the clusters were made of; False without clusters.
    """
    if host.clusters is None or (before := host.clusters.shared.distances) is None:
        return False
    shared, table = host.clusters.shared, host.clusters.table
    known = shared.probes, shared.offsets, table.counts, table.means.transpose(0, 2, 1)
    found = brought(mean_distances(keys, *(torch.from_numpy(array).to(keys.device) for array in known)))
    return bool(np.mean(found / np.maximum(before, np.finfo(np.float32).tiny)) > DRIFTED)


def _coded_table(host: SequenceKV, start: int, stop: int) -> ClusterTable:
    """Return the clusters of tokens that a device index may cover: those in the first segment of the range."""
    first = host.parts(start, stop)[0]
    table = cluster_table(host, start, first.first + first.high)
    assert table is not None
    return table
