"""Clusters of a path's keys, by which attention estimates what it did not retrieve.

A read makes `KeyClusters`: probes, one per cluster and key-value head, that tell which cluster a key belongs to. A path
keeps `PathClusters`: the number of keys, mean keys and summed values of every cluster over the tokens that retrieval
covers now. Tokens that leave the window join their cluster when a step is planned for them. The step that uses all this
is in `step/attend_task.py`.

A byte per key and head says its cluster. Forks share these bytes and the probes; the sums of a path are its own, copied
when a fork first changes them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.cluster_sums import PAIR, SampledKeys, columns_for, count_tokens, fill_table, nearest_clusters
from retrieval_attn.cpu.replica import KVReplica, State, array_memory, register_replica, total_memory
from retrieval_attn.cpu.segment import PathPart, PathTokens, Segment, Span
from retrieval_attn.errors import InputDataError, ShapeError
from retrieval_attn.index.base import HeldMemory
from retrieval_attn.index.formats import Format, to_float32
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.memory import mapped

MAX_CLUSTERS = 256
"""A byte names a cluster."""
LATE_CLUSTERS = 16
"""Of tokens that a device has no codes of: they are few."""
KEYS_PER_CLUSTER = 16
"""At least, on average: fewer say nothing about those that are left."""
SAMPLES = 4096
"""Keys of a head that tell how much clusters weigh. The exponential of a mean score is less than the mean exponential:
by mean keys alone the KL on code at 8K is three times as large. 8 keys of each of 256 clusters in place of 16 double
it, 4 raise it fourfold (code and JSON, bundled model)."""
TOKENS_AT_ONCE = 4096
"""Tokens whose float32 numbers are held at once while they join, and that are added up by themselves."""
FEW_TOKENS = 1024
"""Maximum tokens that join by a compiled loop on this thread, without the threads of a matrix product."""

Floats = npt.NDArray[np.float32]
ClusterArrays = dict[str, npt.NDArray[Any]]
_SAVED = ("probes", "offsets", "mean_values", "distances", "value_shifts")


class ClusterSums(NamedTuple):
    """Sums of the clusters of some tokens, float32, C clusters; zeros for a cluster without keys.

    counts (kv_heads, C): keys. key_sums (kv_heads, C, head_dim), value_sums (kv_heads, C, value_dim).
    """

    counts: Floats
    key_sums: Floats
    value_sums: Floats


class ClusterTable(NamedTuple):
    """Clusters of one path as a step reads them, float32, C-contiguous; fixed address until the path's table changes.

    counts (kv_heads, C). means (kv_heads, head_dim, C): mean keys, a column each. value_sums (kv_heads, C, value_dim):
    counts times the mean value, of keys as they usually weigh where that is known. samples: as many keys of each
    cluster; None: there are none.
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
    """Return the number of clusters for `tokens` tokens: a power of 2, at most one for 16 tokens."""
    return max(1, min(MAX_CLUSTERS, 1 << max(0, (tokens // KEYS_PER_CLUSTER).bit_length() - 1)))


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
        value_shifts: Floats | None = None,
    ) -> None:
        """mean_values: (kv_heads, C, value_dim) of the keys that were read, where a device estimates by them. late: the
        fewer clusters of tokens that come later there. distances: (kv_heads,), the mean squares of the distances of the
        keys that were read to their clusters' means, where that is known. samples: of these keys, where the host
        estimates. value_shifts: (kv_heads, C, value_dim), what the mean value of keys as they usually weigh is more
        than their plain mean.

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
        self.value_shifts = value_shifts
        self.on_devices: weakref.WeakKeyDictionary[Segment, dict[Any, Any]] = weakref.WeakKeyDictionary()
        """What devices hold of the members of a segment, by device; forks share it."""
        self._members: weakref.WeakKeyDictionary[Segment, _Members] = weakref.WeakKeyDictionary()
        self._joining = threading.Lock()

    @property
    def clusters(self) -> int:
        """Clusters of a head."""
        return int(self.probes.shape[1])

    @property
    def segments(self) -> set[Segment]:
        """Segments with tokens that have joined a cluster."""
        return set(self._members)

    def memory(self, segments: Container[Segment]) -> HeldMemory:
        """Return the bytes of probes, mean values, distances, samples, and of the known members of `segments`, on the
        host and on devices, with those of `late`.
        """
        known = [one for segment, one in list(self._members.items()) if segment in segments]
        members = sum(one.ids.shape[0] * (one.stop - one.first) for one in known)
        arrays = self.probes, self.offsets, self.mean_values, self.distances, self.samples, self.value_shifts
        own = HeldMemory(
            members + sum(one.nbytes for one in arrays if one is not None),
            sum(
                one.nbytes
                for segment, there in list(self.on_devices.items())
                if segment in segments
                for one in there.values()
            ),
        )
        return own if self.late is None else total_memory([own, self.late.memory(segments)])

    def with_same_members(self) -> KeyClusters:
        """Return clusters with the same members, for a path whose samples and mean values will differ."""
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

    def join_ahead(self, segment: Segment, low: int, high: int, fmt: Format) -> None:
        """Assign clusters to those of a frozen segment's tokens [low, high) that follow the ones with a cluster.

        The clusters are those of `members`; the lock is not held while they are found, so that no step waits for it.
        """
        with self._joining:
            held = self._of(segment)
            start = held.stop if held.first < held.stop else low
        if start >= high:
            return
        ids = np.empty((len(segment.keys), high), np.uint8)
        self._join(segment, start, high, fmt, ids)
        with self._joining:
            if held.first == held.stop:
                held.first = held.stop = start
            if held.stop == start:  # no other thread joined these meanwhile
                held.ids[:, start:high] = ids[:, start:]
                held.stop = high

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
                for there in self.on_devices.get(segment, {}).values():
                    there.cut(length)
        if self.late is not None:
            self.late.forget(segment, length)

    def copy_members(self, segment: Segment, copy: Segment) -> None:
        """The tokens of `copy` are the first of `segment` and have their clusters: by keys alone some would differ."""
        start, stop = self.joined(segment)
        stop = min(stop, copy.length)
        if start < stop:
            self.take(copy, start, self.known(segment)[:, start:stop])
        if self.late is not None:
            self.late.copy_members(segment, copy)

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

    def state(self, prefix: str) -> tuple[dict[str, Any], ClusterArrays]:
        """Return plain values and arrays of all but the members."""
        arrays = {f"{prefix}{name}": array for name in _SAVED if (array := getattr(self, name)) is not None}
        plain: dict[str, Any] = {"samples": None, "late": None}
        if self.samples is not None:
            arrays[f"{prefix}samples"] = self.samples.packed
            plain["samples"] = [self.samples.clusters, self.samples.number]
        if self.late is not None:
            plain["late"], own = self.late.state(f"{prefix}late/")
            arrays.update(own)
        return plain, arrays

    @classmethod
    def restored(
        cls, path: PathTokens, plain: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], prefix: str
    ) -> KeyClusters:
        """Return the clusters with this state, without members. Raises InputDataError."""
        late = None if plain["late"] is None else cls.restored(path, plain["late"], arrays, f"{prefix}late/")
        probes, offsets, means, distances, shifts = (arrays.get(f"{prefix}{name}") for name in _SAVED)
        if probes is None or offsets is None:
            raise InputDataError("the saved clusters of a sequence have no probes or offsets; save the context again")
        clusters, heads = probes.shape[1] if probes.ndim == 3 else 0, path.num_kv_heads
        _require(probes, (heads, clusters, path.head_dim), "probes")
        _require(offsets, (heads, clusters), "offsets")
        for name, array in (("mean_values", means), ("value_shifts", shifts)):
            if array is not None:
                _require(array, (heads, clusters, path.value_dim), name)
        if distances is not None:
            _require(distances, (heads,), "distances")
        samples = None
        if plain["samples"] is not None:
            samples = _restored_samples(path, plain["samples"], arrays[f"{prefix}samples"], clusters)
        return cls(probes, offsets, means, late, distances, samples, shifts)

    def restore_members(
        self, spans: Sequence[Span], pieces: list[list[int]], arrays: Mapping[str, npt.NDArray[Any]], prefix: str
    ) -> None:
        """Take the members of pieces [span, first, stop] of tokens. Raises InputDataError."""
        for number, (span, low, high) in enumerate(pieces):
            if type(span) is not int or not 0 <= span < len(spans):
                raise InputDataError(
                    f"saved clusters belong to span {span!r:.80}, but there are {len(spans)}; save the context again"
                )
            segment, members = spans[span].segment, arrays[f"{prefix}{number}"]
            if members.dtype != "u1":
                raise InputDataError(
                    f"members of saved clusters must be uint8, got {members.dtype}; save the context again"
                )
            self.restore(segment, _checked_span([low, high], segment.length), members)

    def _of(self, segment: Segment) -> _Members:
        held = self._members.get(segment)
        if held is None:
            held = self._members[segment] = _Members.none(len(segment.keys), segment.capacity)
        return held


class ClusterMark(NamedTuple):
    """Clusters of a saved path: the shared ones, and the tokens of each segment in one, for these and for `late`."""

    shared: KeyClusters
    joined: dict[Segment, tuple[int, int]]
    late: dict[Segment, tuple[int, int]]


@register_replica
class PathClusters(KVReplica[PathTokens]):
    """The clusters of the tokens [start, stop) of one path, which `cover` moves. Not for two threads at once.

    Saved names: "clusters/NAME" and "clusters/late/NAME" of sums and of shared arrays, "members/i" and "late_members/i"
    of the i-th piece of tokens.
    """

    kind = "clusters"

    def __init__(self, shared: KeyClusters, fmt: Format, span: tuple[int, int], sums: ClusterSums) -> None:
        """sums: over the path's tokens span[0] .. span[1], whose members `shared` knows. They are not written to."""
        self.shared, self.fmt = shared, fmt
        self.start, self.stop = span
        self._sums = sums
        self._table = _table_of(sums, shared)
        self._own = False  # whether sums and table are this path's alone
        self._late: PathClusters | None = None

    @classmethod
    def empty(cls, shared: KeyClusters, fmt: Format, value_dim: int) -> PathClusters:
        """Clusters of no tokens yet."""
        heads, clusters, dim = shared.probes.shape
        shapes = (heads, clusters), (heads, clusters, dim), (heads, clusters, value_dim)
        return cls(shared, fmt, (0, 0), ClusterSums(*(np.zeros(shape, np.float32) for shape in shapes)))

    @property
    def num_tokens(self) -> int:
        return self.stop

    @property
    def nbytes(self) -> HeldMemory:
        return total_memory(self.allocations(self.shared.segments).values())

    def allocations(self, segments: Container[Segment]) -> dict[int, HeldMemory]:
        """Return the bytes of sums and tables, which forks share, and of the shared clusters."""
        return {**array_memory(self.arrays), id(self.shared): self.shared.memory(segments)}

    @property
    def stamp(self) -> tuple[int, ...]:
        return id(self), id(self._table), self.start, self.stop

    def offloadable_bytes(self, segments: Iterable[Segment]) -> int:
        held = [there for segment in segments if (there := self.shared.on_devices.get(segment))]
        return sum(one.nbytes for there in held for one in there.values())

    def offload(self, segments: Iterable[Segment]) -> None:
        """Drop the members of these segments on devices. They are copied from the host again."""
        for segment in segments:
            self.shared.on_devices.pop(segment, None)

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

    def forget(self, owner: PathTokens, start: int, stop: int) -> PathClusters:
        """Return clusters of the tokens [start, stop) alone, with their own samples and mean values."""
        other, pieces = self.fork(), owner.parts
        other.shared = shared = self.shared.with_same_members()
        other.cover(start, stop, pieces)
        if shared.samples is not None:
            shared.samples = _sampled(other, shared.samples, list(pieces(start, stop)))
            other._table = _table_of(other._sums, shared)
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

    def follow_copy(self, segment: Segment, copy: Segment) -> None:
        self.shared.copy_members(segment, copy)

    def truncate(self, owner: PathTokens, length: int) -> bool:
        for one in (self, self._late):
            if one is not None and length < one.stop:
                one.cover(one.start, max(length, one.start), owner.parts)
        for segment, low, _, _ in owner.parts(length, len(owner)):
            if low and segment.may_change(low):  # other tokens may be written there
                self.shared.forget(segment, low)
        return True

    def cover(self, start: int, stop: int, pieces: Callable[[int, int], Iterable[PathPart]]) -> ClusterTable:
        """The table over the tokens [start, stop) of the path. pieces: where some of its tokens lie, in order.

        Few tokens more or less than before are added or taken off; from another start on, all are counted again.
        """
        if (start, stop) == (self.start, self.stop):
            return self._table
        anew = start != self.start or self.stop - stop > stop - start
        if anew:
            self._sums = ClusterSums(*map(np.zeros_like, self._sums))
            self.start = self.stop = start
            self._table, self._own = _table_of(self._sums, self.shared), True
        elif not self._own:  # a copy of the table: to divide all sums again takes four times as long
            self._sums, self._own = _copied(self._sums), True
            counts, means, value_sums, _ = self._table
            self._table = ClusterTable(counts.copy(), means.copy(), value_sums.copy(), self.shared.samples)
        sign, changed = 1 if stop >= self.stop else -1, None
        for segment, low, high, _ in pieces(min(stop, self.stop), max(stop, self.stop)):
            arrays = segment.keys, segment.values, self.shared.members(segment, low, high, self.fmt)
            for at in range(low, high, TOKENS_AT_ONCE):
                others = count_tokens(*arrays, (at, min(at + TOKENS_AT_ONCE, high)), sign, self.fmt, self._sums)
                changed = others if changed is None else changed | others
        self.stop = stop
        if changed is not None:
            fill_table(changed, self._sums, self.shared.value_shifts, self._table[:3])
        return self._table

    # -- saving --------------------------------------------------------------------------------------

    def mark(self, owner: PathTokens) -> ClusterMark:
        shared, segments = self.shared, owner.segments
        late = {} if shared.late is None else {segment: shared.late.joined(segment) for segment in segments}
        return ClusterMark(shared, {segment: shared.joined(segment) for segment in segments}, late)

    def state(self, owner: PathTokens, since: int, tokens: Sequence[int], mark: ClusterMark | None) -> State:
        shared, known = self.shared, mark if mark is not None and mark.shared is self.shared else None
        plain: dict[str, Any] = {"known": known is not None, "span": [self.start, self.stop]}
        arrays = self._saved_sums("clusters/")
        if self._late is not None:
            plain["late_span"] = [self._late.start, self._late.stop]
            arrays.update(self._late._saved_sums("clusters/late/"))
        if known is None:
            told, own = shared.state("clusters/")
            plain.update(told)
            arrays.update(own)
        pieces = _Pieces(owner.spans, since, tokens)
        plain["members"], members = pieces.of(shared, {} if known is None else known.joined, "members/")
        arrays.update(members)
        if shared.late is not None:
            joined = {} if known is None else known.late
            plain["late_members"], members = pieces.of(shared.late, joined, "late_members/")
            arrays.update(members)
        return plain, arrays

    def _saved_sums(self, prefix: str) -> ClusterArrays:
        self._own = False  # the path copies them before it changes its own
        return {f"{prefix}{name}": array for name, array in self._sums._asdict().items()}

    @classmethod
    def restored(
        cls,
        owner: PathTokens,
        plain: Mapping[str, Any],
        arrays: Mapping[str, npt.NDArray[Any]],
        earlier: PathClusters | None,
    ) -> PathClusters:
        if not plain["known"]:
            shared = KeyClusters.restored(owner, plain, arrays, "clusters/")
        elif earlier is None:
            raise InputDataError(
                "the saved clusters refer to those of an earlier record, which has none; save the context again"
            )
        else:
            shared = earlier.shared
        tokens = sum(span.segment.length for span in owner.spans)  # a path may see fewer of a segment than it has
        sums = _restored_sums(owner, arrays, "clusters/", shared.clusters)
        found = cls(shared, owner.fmt, _checked_span(plain["span"], tokens), sums)
        if plain.get("late_span") is not None:
            if shared.late is None:
                raise InputDataError(
                    "a saved sequence has tokens in late clusters, but no late clusters; save the context again"
                )
            sums = _restored_sums(owner, arrays, "clusters/late/", shared.late.clusters)
            found._late = cls(shared.late, owner.fmt, _checked_span(plain["late_span"], tokens), sums)
        shared.restore_members(owner.spans, plain["members"], arrays, "members/")
        if shared.late is not None:
            shared.late.restore_members(owner.spans, plain["late_members"], arrays, "late_members/")
        return found


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


def _table_of(sums: ClusterSums, shared: KeyClusters) -> ClusterTable:
    heads, clusters, dim = sums.key_sums.shape
    means: Floats = np.empty((heads, dim, clusters), np.float32)
    table = ClusterTable(np.empty_like(sums.counts), means, np.empty_like(sums.value_sums), shared.samples)
    _fill(table, sums, shared.value_shifts)
    return table


def _fill(table: ClusterTable, sums: ClusterSums, shifts: Floats | None) -> None:
    """Write what `sums` say into the table, in place: a planned step reads it where it lies."""
    table.counts[:] = sums.counts
    np.divide(sums.key_sums.transpose(0, 2, 1), np.maximum(sums.counts, 1)[:, None], out=table.means)
    table.value_sums[:] = sums.value_sums
    if shifts is not None:
        table.value_sums[:] += sums.counts[:, :, None] * shifts


def _copied(sums: ClusterSums) -> ClusterSums:
    return ClusterSums(*(array.copy() for array in sums))


def _restored_samples(path: PathTokens, told: Any, packed: npt.NDArray[Any], clusters: int) -> SampledKeys:
    known, number = told
    shape = packed.shape
    whole = type(number) is int and number > 0 and known == clusters and packed.ndim == 4 and shape[3] % PAIR == 0
    if not whole or shape[1] * shape[3] != columns_for(clusters * number):
        raise InputDataError(
            f"saved samples {told!r:.80} of {clusters} clusters do not fit an array of {shape}; save the context again"
        )
    _require(packed, (path.num_kv_heads, shape[1], path.head_dim, shape[3]), "samples", "<u2")
    return SampledKeys(packed, clusters, number)


def _restored_sums(path: PathTokens, arrays: Mapping[str, npt.NDArray[Any]], prefix: str, clusters: int) -> ClusterSums:
    shapes = {"key_sums": (path.head_dim,), "value_sums": (path.value_dim,)}
    for name in ClusterSums._fields:
        _require(arrays[f"{prefix}{name}"], (path.num_kv_heads, clusters, *shapes.get(name, ())), name)
    return ClusterSums(*(arrays[f"{prefix}{name}"] for name in ClusterSums._fields))


def _require(array: npt.NDArray[Any], shape: tuple[int, ...], name: str, dtype: str = "<f4") -> None:
    if array.shape != shape or array.dtype != dtype:
        raise InputDataError(
            f"the {name} of saved clusters must be {dtype} of {shape}, got {array.dtype.str} of {array.shape}; save "
            "the context again"
        )


def _checked_span(told: Any, stop: int) -> tuple[int, int]:
    """Two whole numbers in order, from 0 to `stop`. Raises InputDataError."""
    first, last = told
    if not (type(first) is int and type(last) is int and 0 <= first <= last <= stop):
        raise InputDataError(f"tokens {told!r:.80} of saved clusters must lie in 0 to {stop}; save the context again")
    return first, last


class _Pieces(NamedTuple):
    """Saved tokens of a path: see `KVReplica.state`."""

    spans: Sequence[Span]
    since: int
    tokens: Sequence[int]

    def of(
        self, shared: KeyClusters, known: Mapping[Segment, tuple[int, int]], prefix: str
    ) -> tuple[list[list[int]], ClusterArrays]:
        """Return pieces [span, first, stop] of tokens with their clusters, and the arrays, without `known` tokens.

        Those of a span from `since` on have all places of its segment, right where the piece says, so that they can be
        taken as they are.
        """
        pieces: list[list[int]] = []
        arrays: ClusterArrays = {}
        for number, (span, tokens) in enumerate(zip(self.spans, self.tokens, strict=True)):
            first, stop = shared.joined(span.segment)
            stop = min(stop, tokens)
            ids = shared.known(span.segment)
            whole = number >= self.since
            low, high = known.get(span.segment, (first, first))
            low, high = (first, first) if whole or low >= high else (low, high)
            for start, end in ((first, low), (high, stop)):
                if start < end:
                    # a copy, a byte per key: the members of neighbouring tokens change when others join
                    arrays[f"{prefix}{len(pieces)}"] = (ids[:, :tokens] if whole else ids[:, start:end]).copy()
                    pieces.append([number, start, end])
        return pieces, arrays
