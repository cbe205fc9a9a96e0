"""Bytes of the clusters by which attention estimates what it does not retrieve. Arithmetic only.

What is counted is in `cpu/clusters.py` for the host, and in `attention/coded_clusters.py` and `gpu/clusters/` for a
device that has codes of the keys.
"""

from __future__ import annotations

from retrieval_attn.cpu.cluster_sums import columns_for
from retrieval_attn.cpu.clusters import LATE_CLUSTERS, MAX_CLUSTERS, clusters_for, samples_for
from retrieval_attn.gpu.clusters.mass import MEAN_DTYPE, mass_grid
from retrieval_attn.index.device import SPARE_TOKENS

NUMBER = 4
"""Bytes of a float32."""


def host_cluster_bytes(tokens: int, key_dim: int, value_dim: int, on_device: bool) -> int:
    """Return host bytes of one head's clusters for `tokens` tokens: a byte for each, probes, sums, shifts of values and
    the step's table.

    on_device: a device estimates; mean values lie here, too, and the few clusters of what comes later. Otherwise
    samples do.
    """
    if tokens <= 0:
        return 0
    probes, sums = key_dim + 1, 1 + key_dim + value_dim
    clusters = clusters_for(tokens)
    numbers, halves = clusters * (probes + 2 * sums + value_dim) + 1, 0
    if on_device:
        numbers += clusters * value_dim + min(LATE_CLUSTERS, clusters) * (probes + 2 * sums)
    else:
        halves = columns_for(clusters * samples_for(clusters)) * key_dim
    return tokens + NUMBER * numbers + NUMBER // 2 * halves


def device_head_bytes(key_dim: int, value_dim: int) -> int:
    """Return device bytes of a head's clusters without a byte per key: spare room, mean values, estimates per query."""
    return SPARE_TOKENS + MAX_CLUSTERS * value_dim * MEAN_DTYPE.itemsize + 2 * key_dim * NUMBER


def mass_bytes(rows: int, kv_heads: int, q_heads: int) -> int:
    """Return the maximum bytes that programs sum for `rows` rows of a batch in one layer; layers take turns."""
    _, _, programs = mass_grid(rows * kv_heads, q_heads // kv_heads)
    return rows * q_heads * programs * MAX_CLUSTERS * NUMBER
