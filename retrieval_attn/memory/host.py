"""Bytes of keys, values, indexes and clusters on the host, from a model's shape and the options. Arithmetic only."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrieval_attn.config import Config
from retrieval_attn.memory.shape import ModelShape
from retrieval_attn.memory.units import FLOAT_BYTES

if TYPE_CHECKING:
    from retrieval_attn.index.base import HostBytes


@dataclass(frozen=True)
class HostSize:
    """Bytes that sequences of one length take on the host: of `batch` sequences that share nothing."""

    shape: ModelShape
    options: Config
    batch: int = 1

    @property
    def rows(self) -> tuple[int, int]:
        """Bytes of one key and of one value of one head, as the host stores them."""
        from retrieval_attn.index.formats import Format

        shape, name = self.shape, self.options.host_dtype
        if name == "auto":
            return shape.key_dim * shape.dtype_bytes, shape.value_dim * shape.dtype_bytes
        fmt = Format.from_name(name)
        return fmt.row_bytes(shape.key_dim), fmt.row_bytes(shape.value_dim)

    @property
    def heads(self) -> int:
        """Key-value heads of all sequences and layers that the host stores."""
        return self.batch * self.shape.full_layers * self.shape.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token of context."""
        return self.heads * sum(self.rows)

    def index_size(self) -> tuple[HostBytes, ...]:
        """Return the maximum memory of the index of a head, one entry for each kind that it may become."""
        from retrieval_attn.index.base import HeadShape
        from retrieval_attn.index.spec import IndexSpec

        shape, options = self.shape, self.options
        head = HeadShape(shape.key_dim, shape.value_dim, shape.q_heads // shape.kv_heads, options.host_dtype == "int8")
        return IndexSpec.of(options.index, options.index_options).host_bytes(head)

    def index_bytes(self, tokens: int) -> int:
        """Bytes of the indexes over `tokens` tokens of each sequence, at most."""
        return self.heads * max(held.bytes(tokens) for held in self.index_size())

    def index_text(self, tokens: int) -> str:
        """Describe the largest part of `index_bytes`."""
        return max(self.index_size(), key=lambda held: held.bytes(tokens)).text

    def cluster_bytes(self, tokens: int) -> int:
        """Bytes of the clusters of `tokens` tokens of each sequence."""
        from retrieval_attn.index.spec import IndexSpec

        shape, options = self.shape, self.options
        if not self.heads or not options.estimates:
            return 0
        spec = IndexSpec.of(options.index, options.index_options)
        on_device = spec.keeps_codes(shape.key_dim)
        middle = tokens - options.sink - options.window
        return self.heads * host_cluster_bytes(middle, shape.key_dim, shape.value_dim, on_device)

    def most_tokens(self, room: int, other_bytes: int = 0) -> int | None:
        """Tokens of each sequence that fit `room` bytes with their indexes and clusters; None: any number, nothing is
        held.

        other_bytes: bytes per token of other data in the same memory.
        """
        each = self.token_bytes + other_bytes
        if not each:
            return None
        indexes = self.index_size()

        def needed(tokens: int) -> int:
            index = max(held.bytes(tokens) for held in indexes)
            return tokens * each + self.heads * index + self.cluster_bytes(tokens)

        # more tokens never need less
        return max(0, bisect.bisect_right(range(max(0, room) // each + 1), room, key=needed) - 1)


def host_cluster_bytes(tokens: int, key_dim: int, value_dim: int, on_device: bool) -> int:
    """Return host bytes of one head's clusters for `tokens` tokens: a byte for each, probes, sums, shifts of values and
    the step's table.

    on_device: a device estimates; mean values lie here, too, and the few clusters of what comes later. Otherwise
    samples do.
    """
    from retrieval_attn.cpu.cluster_sums import columns_for
    from retrieval_attn.cpu.clusters import LATE_CLUSTERS, clusters_for, samples_for

    if tokens <= 0:
        return 0
    probes, sums = key_dim + 1, 1 + key_dim + value_dim
    clusters = clusters_for(tokens)
    numbers, halves = clusters * (probes + 2 * sums + value_dim) + 1, 0
    if on_device:
        numbers += clusters * value_dim + min(LATE_CLUSTERS, clusters) * (probes + 2 * sums)
    else:
        halves = columns_for(clusters * samples_for(clusters)) * key_dim
    return tokens + FLOAT_BYTES * numbers + FLOAT_BYTES // 2 * halves
