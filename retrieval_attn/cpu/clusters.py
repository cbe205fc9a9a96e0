"""Clusters of a path's keys, by which attention estimates what it did not retrieve.

A read makes `KeyClusters`: probes, one per cluster and key-value head, that tell which cluster a key belongs to. A path
keeps `PathClusters`: the number of keys, mean keys and summed values of every cluster over the tokens that retrieval
covers now. Tokens that leave the window join their cluster when a step is planned for them. The step that uses all this
is in `step/estimate.py`.

A byte per key and head says its cluster. Forks share these bytes and the probes; the sums of a path are its own, copied
when a fork first changes them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.cluster_sums import SampledKeys, count_tokens, fill_table, nearest_clusters
from retrieval_attn.cpu.segment import PathPart, Segment
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format, to_float32
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.memory import mapped

MAX_CLUSTERS = 256
"""A byte names a cluster."""
LATE_CLUSTERS = 16
"""Of tokens that a device has no codes of: they are few."""
CLUSTER_COUNTS = ((1 << 14, 64), (1 << 16, 128), (1 << 62, 256))
"""Clusters by the most tokens that they serve."""
KEYS_PER_CLUSTER = 16
"""At least, on average: fewer say nothing about those that are left."""
SAMPLES = 1024
"""Keys of a head that tell how much clusters weigh. The exponential of a mean score is less than the mean exponential:
with 16 keys of each of 64 clusters the KL on code at 8K is that of all keys' scores, a third of that by mean keys."""
TOKENS_AT_ONCE = 4096
"""Tokens whose float32 numbers are held at once while they join, and that are added up by themselves."""
FEW_TOKENS = 1024
"""Maximum tokens that join by a compiled loop on this thread, without the threads of a matrix product."""

Floats = npt.NDArray[np.float32]


class ClusterSums(NamedTuple):
    """Sums of the clusters of some tokens, float32, C clusters; zeros for a cluster without keys.

    counts (kv_heads, C): keys. key_sums (kv_heads, C, head_dim), value_sums (kv_heads, C, value_dim).
    """

    counts: Floats
    key_sums: Floats
    value_sums: Floats


class ClusterTable(NamedTuple):
    """Clusters of one path as a step reads them, float32, C-contiguous; fixed address until the path's table changes.

    counts (kv_heads, C). means (kv_heads, head_dim, C): mean keys, a column each. value_sums (kv_heads, C, value_dim).
    samples: as many keys of each cluster; None: there are none.
    """

    counts: Floats
    means: Floats
    value_sums: Floats
    samples: SampledKeys | None = None

    @property
    def clusters(self) -> int:
        """Clusters of a head."""
        return int(self.counts.shape[1])

    @property
    def sampled(self) -> int:
        """Samples of a cluster."""
        return 0 if self.samples is None else self.samples.number


def samples_for(clusters: int) -> int:
    """How many keys of each cluster are kept to tell how much its keys weigh."""
    return max(1, min(KEYS_PER_CLUSTER, SAMPLES // clusters))


def clusters_for(tokens: int) -> int:
    """Return the number of clusters for `tokens` tokens: a power of 2, more for more tokens, at most one for 16."""
    wanted = next(count for most, count in CLUSTER_COUNTS if tokens <= most)
    return max(1, min(wanted, 1 << max(0, (tokens // KEYS_PER_CLUSTER).bit_length() - 1)))


class _Members:
    """The clusters of a segment's tokens [first, stop): ids (kv_heads, capacity) uint8."""

    def __init__(self, ids: npt.NDArray[np.uint8], first: int = 0, stop: int = 0) -> None:
        self.ids, self.first, self.stop = ids, first, stop

    @classmethod
    def none(cls, heads: int, capacity: int) -> _Members:
        """Return empty members with room for `capacity` tokens."""
        ids = mapped(max(1, heads * capacity), "clusters of keys", False)
        return cls(ids[: heads * capacity].reshape(heads, -1))


class KeyClusters:
    """The clusters of one layer's keys, shared by all paths that continue the read which made them.

    probes (kv_heads, C, head_dim) and offsets (kv_heads, C) float32: a key belongs to the cluster whose probe . key +
    offset is largest, the first of equal ones.
    """

    def __init__(
        self,
        probes: Floats,
        offsets: Floats,
        mean_values: Floats | None = None,
        late: KeyClusters | None = None,
        distances: Floats | None = None,
        samples: SampledKeys | None = None,
    ) -> None:
        """mean_values: (kv_heads, C, value_dim) of the keys that were read, where a device estimates by them. late: the
        fewer clusters of tokens that come later there. distances: (kv_heads,), the mean squares of the distances of the
        keys that were read to their clusters' means, where that is known. samples: of these keys, where the host
        estimates.

        Raises ShapeError for shapes that do not fit, or more than MAX_CLUSTERS.
        """
        if probes.ndim != 3 or offsets.shape != probes.shape[:2] or not 1 <= probes.shape[1] <= MAX_CLUSTERS:
            raise ShapeError(
                f"probes must be (heads, 1 .. {MAX_CLUSTERS} clusters, head_dim) and offsets (heads, clusters), got "
                f"{probes.shape} and {offsets.shape}"
            )
        self.probes = np.ascontiguousarray(probes, np.float32)
        self.offsets = np.ascontiguousarray(offsets, np.float32)
        self.mean_values, self.late, self.distances, self.samples = mean_values, late, distances, samples
        self.on_devices: weakref.WeakKeyDictionary[Segment, dict[Any, Any]] = weakref.WeakKeyDictionary()
        """What devices hold of the members of a segment, by device; forks share it."""
        self._members: weakref.WeakKeyDictionary[Segment, _Members] = weakref.WeakKeyDictionary()
        self._joining = threading.Lock()

    @property
    def clusters(self) -> int:
        """Clusters of a head."""
        return int(self.probes.shape[1])

    def nbytes(self, segments: Container[Segment]) -> int:
        """Bytes of probes, mean values, distances and samples, and of the known members of these segments, not of those
        that others have who share the clusters; of `late`, too.
        """
        known = [one for segment, one in list(self._members.items()) if segment in segments]
        members = sum(one.ids.shape[0] * (one.stop - one.first) for one in known)
        others = sum(one.nbytes for one in (self.mean_values, self.distances, self.samples) if one is not None)
        late = 0 if self.late is None else self.late.nbytes(segments)
        return self.probes.nbytes + self.offsets.nbytes + members + others + late

    def kin(self) -> KeyClusters:
        """The same clusters with the same members, for a path whose samples and mean values will differ."""
        other = object.__new__(KeyClusters)
        other.__dict__.update(self.__dict__, on_devices=weakref.WeakKeyDictionary())
        return other

    def assign(self, keys: Floats) -> npt.NDArray[np.uint8]:
        """The cluster of each key (heads, n, head_dim): uint8 (heads, n)."""
        scores = keys @ self.probes.transpose(0, 2, 1) + self.offsets[:, None]
        found: npt.NDArray[np.uint8] = scores.argmax(axis=2).astype(np.uint8)
        return found

    def _join(self, segment: Segment, start: int, stop: int, fmt: Format, ids: npt.NDArray[np.uint8]) -> None:
        """ids[:, start:stop] = the clusters of these tokens of a segment."""
        if start < stop <= start + FEW_TOKENS and not self.clusters % TILE_QUERIES:
            nearest_clusters(segment.keys, (start, stop), fmt, self.probes, self.offsets, ids)
            return
        for at in range(start, stop, TOKENS_AT_ONCE):
            some = slice(at, min(at + TOKENS_AT_ONCE, stop))
            ids[:, some] = self.assign(to_float32(segment.keys[:, some], fmt))

    def take(self, segment: Segment, first: int, members: npt.NDArray[np.uint8]) -> None:
        """Tokens of `segment` from `first` on belong to `members` (kv_heads, n)."""
        with self._joining:
            held = self._of(segment)
            held.first, held.stop = first, first + members.shape[1]
            held.ids[:, held.first : held.stop] = members

    def members(self, segment: Segment, low: int, high: int, fmt: Format) -> npt.NDArray[np.uint8]:
        """ids (kv_heads, capacity) of a segment, right for its tokens [low, high): those without a cluster join one."""
        with self._joining:
            known = self._members.get(segment)
            if known is not None and known.first <= low and high <= known.stop:  # nearly always
                return known.ids
            held = self._of(segment)
            if held.first == held.stop:
                held.first = held.stop = low
            # a gap would be told from nothing: what lies between joins, too
            for start, stop in ((min(low, held.first), held.first), (held.stop, max(high, held.stop))):
                self._join(segment, start, stop, fmt, held.ids)
            held.first, held.stop = min(low, held.first), max(high, held.stop)
            return held.ids

    def known(self, segment: Segment) -> npt.NDArray[np.uint8]:
        """ids (kv_heads, capacity) of a segment, right for the tokens that have joined a cluster."""
        with self._joining:
            return self._of(segment).ids

    def forget(self, segment: Segment, length: int) -> None:
        """Other tokens may be written to `segment` from `length` on."""
        with self._joining:
            held = self._members.get(segment)
            if held is not None:
                held.stop = max(held.first, min(held.stop, length))
        if self.late is not None:
            self.late.forget(segment, length)

    def joined(self, segment: Segment) -> tuple[int, int]:
        """First token of `segment` whose cluster is known and the token after the last; (0, 0) for none."""
        held = self._members.get(segment)
        return (0, 0) if held is None else (held.first, held.stop)

    def restore(self, segment: Segment, span: tuple[int, int], members: npt.NDArray[np.uint8]) -> None:
        """Tokens span[0] .. span[1] of `segment` belong to members (kv_heads, that many), those besides that are known
        keep theirs; or, where none is, to members (kv_heads, capacity), which are taken as they are.

        Raises ShapeError for another shape, or a gap to those that are known.
        """
        (start, stop), shape = span, (len(segment.keys), segment.capacity)
        with self._joining:
            held = self._members.get(segment)
            if held is None and members.shape == shape:
                self._members[segment] = _Members(members, start, stop)
                return
            held = self._of(segment)
            known = (held.first, held.stop) if held.first < held.stop else (start, start)
            if members.shape != (shape[0], stop - start) or stop < known[0] or start > known[1]:
                raise ShapeError(
                    f"members of tokens {span} must be {(shape[0], stop - start)} and join those of {known}, got "
                    f"{members.shape}"
                )
            held.ids[:, start:stop] = members
            held.first, held.stop = min(start, known[0]), max(stop, known[1])

    def _of(self, segment: Segment) -> _Members:
        held = self._members.get(segment)
        if held is None:
            held = self._members[segment] = _Members.none(len(segment.keys), segment.capacity)
        return held


class PathClusters:
    """The clusters of the tokens [start, stop) of one path, which `cover` moves. Not for two threads at once."""

    def __init__(self, shared: KeyClusters, fmt: Format, span: tuple[int, int], sums: ClusterSums) -> None:
        """sums: over the path's tokens span[0] .. span[1], whose members `shared` knows. They are not written to."""
        self.shared, self.fmt = shared, fmt
        self.start, self.stop = span
        self._sums = sums
        self._table = _table_of(sums, shared.samples)
        self._own = False  # whether sums and table are this path's alone
        self._late: PathClusters | None = None

    @classmethod
    def empty(cls, shared: KeyClusters, fmt: Format, value_dim: int) -> PathClusters:
        """Clusters of no tokens yet."""
        heads, clusters, dim = shared.probes.shape
        shapes = (heads, clusters), (heads, clusters, dim), (heads, clusters, value_dim)
        return cls(shared, fmt, (0, 0), ClusterSums(*(np.zeros(shape, np.float32) for shape in shapes)))

    def nbytes(self, segments: Container[Segment]) -> int:
        """Bytes of sums and tables, and of what is shared, as far as it is of these segments."""
        return held_cluster_bytes([self], segments)

    @property
    def table(self) -> ClusterTable:
        """Table of the clusters of the tokens [start, stop)."""
        return self._table

    @property
    def arrays(self) -> list[Floats]:
        """Sums and tables, those of `late`, too."""
        counts, means, values, _ = self._table  # samples are shared
        own: list[Floats] = [*self._sums, counts, means, values]
        return own if self._late is None else own + self._late.arrays

    def fork(self) -> PathClusters:
        """The same clusters for a fork of the path: sums are shared until one of the two changes its own."""
        other = object.__new__(PathClusters)
        self._own = False
        other.__dict__.update(self.__dict__)
        other._late = None if self._late is None else self._late.fork()
        return other

    def renewed(self, start: int, stop: int, pieces: Callable[[int, int], Iterable[PathPart]]) -> PathClusters:
        """Clusters of the tokens [start, stop) of the path alone, of which samples and mean values are new, too.

        pieces: as in `cover`. For this path: its forks keep what it had.
        """
        other = self.fork()
        other.shared = shared = self.shared.kin()
        other.cover(start, stop, pieces)
        if shared.samples is not None:
            shared.samples = _sampled(other, shared.samples, list(pieces(start, stop)))
            other._table = _table_of(other._sums, shared.samples)
        if shared.mean_values is not None:
            first = next(iter(pieces(start, stop)), None)  # what an index on a device may cover
            known = other.fork()
            shared.mean_values = mean_values(
                known.cover(start, stop if first is None else first.first + first.high, pieces)
            )
        return other

    @property
    def late(self) -> PathClusters | None:
        """The clusters of the tokens that a device has no codes of; None where no device has any."""
        if self._late is None and self.shared.late is not None:
            self._late = PathClusters.empty(self.shared.late, self.fmt, self._sums.value_sums.shape[2])
        return self._late

    @property
    def shared_sums(self) -> ClusterSums:
        """Sums over the tokens [start, stop), which stay as they are: the path copies them before it changes its
        own.
        """
        self._own = False
        return self._sums

    def restored_late(self, span: tuple[int, int], sums: ClusterSums) -> None:
        """`late` has these sums over the path's tokens span[0] .. span[1]."""
        assert self.shared.late is not None
        self._late = PathClusters(self.shared.late, self.fmt, span, sums)

    @property
    def begun_late(self) -> PathClusters | None:
        """`late` where it was asked for."""
        return self._late

    def truncate(self, length: int, pieces: Callable[[int, int], Iterable[PathPart]]) -> None:
        """The path's tokens from `length` on are about to be forgotten. pieces: as in `cover`."""
        for one in (self, self._late):
            if one is not None and length < one.stop:
                one.cover(one.start, max(length, one.start), pieces)

    def cover(self, start: int, stop: int, pieces: Callable[[int, int], Iterable[PathPart]]) -> ClusterTable:
        """The table over the tokens [start, stop) of the path. pieces: where some of its tokens lie, in order.

        Few tokens more or less than before are added or taken off; from another start on, all are counted again.
        """
        if (start, stop) == (self.start, self.stop):
            return self._table
        anew = start != self.start or self.stop - stop > stop - start
        if anew:
            self._sums = _zeros_like(self._sums)
            self.start = self.stop = start
        elif not self._own:
            self._sums = _copied(self._sums)
        if anew or not self._own:
            self._table, self._own = _table_of(self._sums, self.shared.samples), True
        sign, changed = 1 if stop >= self.stop else -1, None
        for segment, low, high, _ in pieces(min(stop, self.stop), max(stop, self.stop)):
            arrays = segment.keys, segment.values, self.shared.members(segment, low, high, self.fmt)
            for at in range(low, high, TOKENS_AT_ONCE):
                others = count_tokens(*arrays, (at, min(at + TOKENS_AT_ONCE, high)), sign, self.fmt, self._sums)
                changed = others if changed is None else changed | others
        self.stop = stop
        if changed is not None:
            fill_table(changed, self._sums, self._table[:3])
        return self._table


def held_cluster_bytes(clusters: Iterable[PathClusters], segments: Container[Segment]) -> int:
    """Bytes that clusters of several paths of these segments hold together; what they share is counted once."""
    every = list(clusters)
    shared = {id(one.shared): one.shared.nbytes(segments) for one in every}
    arrays = {id(array): array.nbytes for one in every for array in one.arrays}
    return sum(shared.values()) + sum(arrays.values())


def largest_clusters(probes: Floats, offsets: Floats, counts: Floats) -> KeyClusters:
    """The LATE_CLUSTERS with the most keys, of probes (kv_heads, C, head_dim), offsets and counts (kv_heads, C)."""
    chosen = np.argsort(-counts, axis=1, kind="stable")[:, :LATE_CLUSTERS]
    return KeyClusters(
        np.take_along_axis(probes, chosen[:, :, None], axis=1), np.take_along_axis(offsets, chosen, axis=1)
    )


def mean_values(sums: ClusterSums | ClusterTable) -> Floats:
    """(kv_heads, C, value_dim): mean values; of a cluster without keys, those of all keys."""
    total = np.maximum(sums.counts.sum(axis=1), 1)[:, None]
    every = (sums.value_sums.sum(axis=1) / total)[:, None]
    means = sums.value_sums / np.maximum(sums.counts, 1)[:, :, None]
    found: Floats = np.where(sums.counts[:, :, None] > 0, means, every).astype(np.float32)
    return found


def _sampled(path: PathClusters, like: SampledKeys, parts: list[PathPart]) -> SampledKeys:
    """Keys of the tokens in `parts`, as many of each cluster as `like` has, evenly spaced among its keys.

    Clusters with fewer keys have some twice, those without any zeros.
    """
    shared, fmt, number = path.shared, path.fmt, like.number
    heads, clusters, dim = shared.probes.shape
    found = np.zeros((heads, clusters * number, dim), np.float32)
    turn = np.arange(number)
    for head in range(heads):
        members = np.concatenate([shared.known(one.segment)[head, one.low : one.high] for one in parts])
        ends = np.cumsum([0, *(one.high - one.low for one in parts)])
        order = np.argsort(members, kind="stable")
        counts = np.bincount(members, minlength=clusters)
        places = (np.cumsum(counts) - counts)[:, None] + (2 * turn + 1) * counts[:, None] // (2 * number)
        chosen = order[np.minimum(places, len(members) - 1).ravel()]
        for one, begun, ended in zip(parts, ends, ends[1:], strict=False):
            own = (chosen >= begun) & (chosen < ended)
            rows = one.segment.keys[head, chosen[own] - begun + one.low]
            found[head, own] = to_float32(rows, fmt)
        found[head, np.repeat(counts == 0, number)] = 0
    return SampledKeys.of(found.transpose(0, 2, 1), clusters)


def _table_of(sums: ClusterSums, samples: SampledKeys | None) -> ClusterTable:
    heads, clusters, dim = sums.key_sums.shape
    means: Floats = np.empty((heads, dim, clusters), np.float32)
    table = ClusterTable(np.empty_like(sums.counts), means, np.empty_like(sums.value_sums), samples)
    _fill(table, sums)
    return table


def _fill(table: ClusterTable, sums: ClusterSums) -> None:
    """Write what `sums` say into the table, in place: a planned step reads it where it lies."""
    table.counts[:] = sums.counts
    np.divide(sums.key_sums.transpose(0, 2, 1), np.maximum(sums.counts, 1)[:, None], out=table.means)
    table.value_sums[:] = sums.value_sums


def _copied(sums: ClusterSums) -> ClusterSums:
    return ClusterSums(*(array.copy() for array in sums))


def _zeros_like(sums: ClusterSums) -> ClusterSums:
    arrays: list[Any] = [np.zeros_like(array) for array in sums]
    return ClusterSums(*arrays)
