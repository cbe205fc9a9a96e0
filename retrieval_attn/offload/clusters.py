"""ClusterBuild: the clusters of one layer's new keys, made where the keys lie, then brought to the host's paths."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.clusters import ClusterSums, KeyClusters, clusters_for, largest_clusters, mean_values
from retrieval_attn.cpu.store import SequenceKV, cluster_table, take_clusters
from retrieval_attn.gpu.clusters.cluster import make_clusters, metric_of, probes_of
from retrieval_attn.offload.staging import staging


@dataclass
class _Job:
    """Clusters of tokens [start, stop) of a path. made: on the device, then on the host; none: tokens join those that
    the path has.
    """

    host: SequenceKV
    start: int
    stop: int
    made: list[Any] = field(default_factory=list)


class ClusterBuild:
    """The clusters that one layer's pass asks for: `add` or `extend`, `fetch`, `place`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: list[_Job] = []

    @property
    def requested(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._jobs)

    def add(self, host: SequenceKV, span: tuple[int, int], kv: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        """Tokens span[0] .. span[1] of `host` get clusters.

        kv: keys (kv_heads, n, head_dim) and values (kv_heads, n, value_dim) of these tokens. queries: (q_heads, m,
        head_dim), in whose metric keys are near each other, or None.
        """
        keys, values = kv
        metric = None if queries is None else metric_of(queries.unflatten(0, (len(keys), -1)).flatten(1, 2))
        found = make_clusters(keys, values, metric, clusters_for(span[1] - span[0]))
        sums = found.counts.float(), found.key_sums, found.value_sums
        made = [*probes_of(found.centers, metric), found.members, *sums]
        self._jobs.append(_Job(host, *span, made))

    def extend(self, host: SequenceKV, span: tuple[int, int]) -> None:
        """The clusters of `host` take in the tokens of span that they do not know."""
        if host.clusters is not None:
            self._jobs.append(_Job(host, *span))

    def fetch(self, ready: torch.cuda.Event | None) -> None:
        """Bring what was made to the host, once `ready` is over."""
        for job in self._jobs:
            arrays: list[Any] = [None] * len(job.made)

            def take(place: int, array: Any, into: list[Any] = arrays) -> None:
                into[place] = array.copy()  # the ring's buffers are written to again

            pieces = [([tensor], functools.partial(take, place)) for place, tensor in enumerate(job.made)]
            staging(self._device).bring(pieces, ready)
            job.made = arrays

    def place(self) -> None:
        """Give the paths their clusters: the tokens have come. `fetch` came before."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if not job.made:
                cluster_table(job.host, job.start, job.stop)
                continue
            probes, offsets, members, *sums = job.made
            # of keys that are not finite nothing is known; attention over them is NaN where full attention is
            if not all(np.isfinite(array).all() for array in (probes, offsets, *sums)):
                continue
            found = ClusterSums(*sums)
            coded = job.host.spec.keeps_device_keys
            of_device = (mean_values(found), largest_clusters(probes, offsets, found.counts)) if coded else ()
            take_clusters(job.host, KeyClusters(probes, offsets, *of_device), (job.start, job.stop), members, found)
