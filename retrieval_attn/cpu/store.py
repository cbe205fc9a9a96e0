"""Keys and values of one layer of one sequence in host memory: a path of segments, the last of which grows.

Forks share segments, so a prefix that many sequences continue is held once. What two paths can see never
changes: a segment is written only past its end, only by the one path that owns it, and never again once it
is shared (frozen). The index of a segment belongs to the segment, so forks share that as well.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.clusters import ClusterSums, ClusterTable, KeyClusters, PathClusters
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.replica import KVReplica, Replicas, new_replicas, present, total_memory
from retrieval_attn.cpu.segment import Each, HeadCoders, PathPart, Segment, SegmentTail, Span, hole_for, room_for
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.auto import notes
from retrieval_attn.index.base import HeldMemory, QueryMoment
from retrieval_attn.index.flat import scans_exactly
from retrieval_attn.index.formats import Format, check_queries, check_rows
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.threads import check_threads, kernel_threads

RESERVE_TOKENS = 4096
MIN_TAIL_TOKENS = 1024
TAIL_TOKENS = 2048
"""Keys that a graph got later are found less well than those it was built from: the newest are scanned."""
COPIED_TOKENS = 256
"""A frozen last segment up to this long is copied into the new tail: many forks must not leave a chain of crumbs."""


class PathSnapshot(NamedTuple):
    """State of a path, for `SequenceKV.restore`."""

    length: int
    replicas: Replicas
    budgets: HeadBudgets | None
    spans: tuple[Span, ...]
    is_merged: bool
    tails: tuple[SegmentTail, ...]
    appends: bool


class SequenceKV:
    """One layer's host keys and values of one sequence.

    Not for use by two threads at once; its forks may be.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        fmt: Format,
        *,
        index: IndexSpec | None = None,
        threads: int | None = None,
        pool: Pool | None = None,
        layer: int = 0,
    ) -> None:
        """An empty path.

        index: what `build_index` builds, None = flat. threads: of attention over it, None = all of the pool (or as many
        as Numba has). pool: of worker threads, None = the shared one. layer: named in errors. Raises ConfigError.
        """
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        check_threads(threads)
        self.num_kv_heads, self.head_dim, self.value_dim, self.fmt = num_kv_heads, head_dim, value_dim, fmt
        self.spec = IndexSpec.of("flat") if index is None else index
        self.threads, self.pool, self.layer = threads, pool, layer
        self.tail_tokens = TAIL_TOKENS
        """Tokens after the end of an index that are scanned before they are inserted into it, all at once."""
        self.steps: dict[tuple[int, int], LayerStep] = {}
        """What attention keeps between two tokens, by the number of paths that share a step, and queries of each."""
        self.index_seconds = 0.0
        """Seconds spent in `build_index` and `extend_index` of this path (its forks start at 0)."""
        self.token_bytes = num_kv_heads * (fmt.row_bytes(head_dim) + fmt.row_bytes(value_dim))
        """Bytes of one token's keys and values."""
        self.replicas: Replicas = new_replicas(self, of_segments=False)
        self.budgets: HeadBudgets | None = None  # as measured for `Config(retrieve="auto")`
        self.is_merged = False
        """Whether `merge` has copied what the path shared. False for a fork: it shares the copy."""
        self._spans: list[Span] = []
        self._tails: tuple[SegmentTail, ...] = ()  # of segments that this path, or one that it forked, has continued
        self._appends = False  # whether it writes behind the last of them
        self._length, self._changes, self._reserved, self._sure = 0, 0, RESERVE_TOKENS, RESERVE_TOKENS

    def __len__(self) -> int:
        return self._length

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the path in order; forks share them."""
        return tuple(span.segment for span in self._spans)

    @property
    def nbytes(self) -> int:
        """Bytes of this path's tokens, shared or not (`held_memory` counts shared segments once)."""
        return self._length * self.token_bytes

    @property
    def clusters(self) -> PathClusters | None:
        """By which attention estimates what it does not retrieve; None: it leaves that out."""
        found = self.replicas[PathClusters.kind]
        assert found is None or isinstance(found, PathClusters)
        return found

    @clusters.setter
    def clusters(self, value: PathClusters | None) -> None:
        self.replicas[PathClusters.kind] = value

    @property
    def takes_index(self) -> bool:
        """Whether segments that are not sealed may get an index. False if another one has codes on a device, which are
        searched for one segment only.
        """
        kept = [one for one in self.segments if one.indexes and (one.sealed or (one.frozen and len(self._spans) > 1))]
        return not (kept and self.spec.keeps_codes(self.head_dim))

    @property
    def index_kinds(self) -> dict[str, int]:
        """How many heads of the path's indexed segments have an index of each kind."""
        return dict(Counter(index.kind for span in self._spans for index in span.segment.indexes))

    @property
    def index_notes(self) -> list[str]:
        """Why `auto` chose the kinds of the indexes, each reason once, in order."""
        found = [notes.get(index, "") for span in self._spans for index in span.segment.indexes]
        return [note for note in dict.fromkeys(found) if note]

    def reserve(self, tokens: int, sure: int | None = None) -> SequenceKV:
        """Let the next new segment have room for at least `tokens` tokens; returns the path. ConfigError below 0.

        Address space; memory is taken as tokens come, in large pages where those that are `sure` (None: all) fill them.
        Give the expected length: a path that outgrows it continues in further segments, each searched on its own.
        """
        if tokens < 0:
            raise ConfigError(f"reserve_tokens={tokens} must be >= 0")
        self._reserved, self._sure = tokens, tokens if sure is None else sure
        return self

    def append(self, keys: npt.NDArray[Any], values: npt.NDArray[Any], each: Each = map) -> None:
        """Add n tokens at the end, copying them: keys (kv_heads, n, head_dim), values (kv_heads, n,
        value_dim), as stored.

        dtype fmt.dtype, last axis fmt.width of the dim, rows contiguous, n may be 0. each: does what `map` does, in
        threads say, for the heads. Raises ShapeError, or MemoryPlanError if memory cannot be had; the path is then
        unchanged.
        """
        check_rows("keys", keys, self.fmt, 3)
        check_rows("values", values, self.fmt, 3)
        count = keys.shape[1]
        wanted = _shapes(self, count)
        if (keys.shape, values.shape) != wanted:
            raise ShapeError(f"keys and values must be {wanted[0]} and {wanted[1]}, got {keys.shape}, {values.shape}")
        if not count:
            return
        last = self._spans[-1].segment if self._spans else None
        room = 0 if last is None or (last.frozen and not self._goes_on(last)) else last.capacity - last.length
        added = self._new_tail(count - room) if count > room else None
        head = min(room, count)
        if head:
            self._spans[-1].segment.append(keys[:, :head], values[:, :head], each)
            self._spans[-1] = Span(self._spans[-1].segment, self._spans[-1].segment.length)
        if added is not None:
            replaced, segment = added
            segment.append(keys[:, head:], values[:, head:], each)
            self._spans[len(self._spans) - replaced :] = [Span(segment, segment.length)]
        start, self._length, self._changes = self._length, self._length + count, self._changes + 1
        for replica in present(self.replicas):
            replica.append(self, start, keys, values)

    def _goes_on(self, segment: Segment) -> bool:
        """Return whether this path may go on behind a segment that others share."""
        return self._appends and segment is self._tails[-1].segment and not self._tails[-1].is_shared

    @property
    def continues(self) -> bool:
        """Whether the only segment is one that this path, or the path it was forked from, has continued."""
        return len(self._spans) == 1 and bool(self._tails)

    def appends_in_place(self, more: int) -> bool:
        """Return whether the only segment has room for `more` tokens of this path, which must not be empty."""
        last = self._spans[-1].segment
        is_open = len(self._spans) == 1 and (not last.frozen or self._goes_on(last))
        return is_open and last.capacity - last.length >= more

    def continue_first(self, more: int, each: Each = map) -> bool:
        """Continue the path's first segment: copy later segments into it; `more` next tokens follow.

        Returns False, without a change, if another path has continued it (`Segment.continue_from`) or it lacks room.
        each: as in `append`.
        """
        first, behind = self._spans[0], self.parts(self._spans[0].length, self._length)
        room = self._length - first.length + more
        if self._goes_on(first.segment):
            if first.length + room > first.segment.capacity:
                return False
        elif (tail := first.segment.continue_from(first.length, room)) is None:
            return False
        else:
            self._tails = (*self._tails, tail)
        if self.clusters is not None:
            self.clusters.shared.forget(first.segment, first.length)  # those of tokens that are gone
        for part in behind:
            first.segment.append(*part.segment.read(part.low, part.high), each)
        self._spans, self._appends = [Span(first.segment, self._length)], True
        self._changes += 1
        self.steps.clear()
        return True

    def seal(self) -> None:
        """From now on the path's tokens are for forks to continue, and no fork changes what others find in them."""
        self._appends = False
        for segment in self.segments:
            segment.freeze()
            segment.sealed = True

    def _new_tail(self, count: int) -> tuple[int, Segment]:
        """A segment with room for `count` more, begun with a copy of a short frozen last one without an index; spans
        that it replaces.
        """
        replaced = 0
        last = self._spans[-1] if self._spans else None
        if last is not None and last.segment.frozen and last.length <= COPIED_TOKENS:
            # one that is searched by an index keeps it: when tokens come must not decide how those before are found
            replaced = int(all(map(scans_exactly, last.segment.indexes)))
        copied = self._spans[-1].length if replaced else 0
        capacity = max(copied + count, self._reserved, MIN_TAIL_TOKENS, self._length // 4)
        expected, sure = (max(copied + count, tokens) for tokens in (self._reserved, self._sure))
        dims = self.num_kv_heads, capacity, self.head_dim, self.value_dim
        segment = Segment(*dims, self.fmt, expected=expected, sure=sure)
        self._reserved = self._sure = 0
        if replaced:
            segment.append(*self._spans[-1].segment.read(0, copied))
            for replica in present(self.replicas):
                replica.follow_copy(self._spans[-1].segment, segment)
        return replaced, segment

    def merge(self, room: int, each: Each = map) -> None:
        """Copy all tokens into one segment of this path, without an index, with room for `room` more.

        A device searches codes of one segment: a path that grew in many would never have codes of all of its tokens.
        Replicas of the segments, such as int8 rows, are not copied; clusters assign the tokens of the copy when asked.
        each: as in `append`. Raises MemoryPlanError if memory cannot be had; the path is then unchanged.
        """
        expected, dims = self._length + room, (self.head_dim, self.value_dim)
        segment = Segment(self.num_kv_heads, room_for(expected), *dims, self.fmt, expected=expected)
        for part in self.parts(0, self._length):
            segment.append(*part.segment.read(part.low, part.high), each)
        self._spans, self.is_merged = [Span(segment, self._length)], True
        self._tails, self._appends = (), False
        self._changes += 1
        self.steps.clear()

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Memory that a fork or a built index still uses is left to it.

        Arrays from `read` of the forgotten part may be overwritten by later appends. Raises ConfigError
        unless 0 <= length <= len(self).
        """
        if not 0 <= length <= self._length:
            raise ConfigError(f"length={length} must lie in 0 .. {self._length}, the tokens held")
        for replica in present(self.replicas):
            replica.truncate(self, length)  # while the tokens are there
        kept: list[Span] = []
        left = length
        for span in self._spans:
            if left <= 0:
                break
            kept.append(Span(span.segment, min(span.length, left)))
            left -= kept[-1].length
        if kept and kept[-1].length < kept[-1].segment.length:
            if self._goes_on(kept[-1].segment):
                kept[-1].segment.cut(self._tails[-1], kept[-1].length)
            elif not kept[-1].segment.frozen:
                kept[-1].segment.truncate(kept[-1].length)
        self._spans = kept
        ends = {span.segment: span.length for span in kept}
        before, self._tails = self._tails, tuple(one for one in self._tails if ends.get(one.segment, 0) > one.start)
        self._appends &= self._tails[-1:] == before[-1:]
        self._length, self._changes = length, self._changes + 1

    def fork(self) -> SequenceKV:
        """A second path with the same tokens. All segments and indexes are shared; both may go on."""
        for segment in self.segments:  # a crop may go back into any of them, and write on from there
            segment.freeze()
        for tail in self._tails:
            tail.is_shared = True
        other = SequenceKV(
            self.num_kv_heads,
            self.head_dim,
            self.value_dim,
            self.fmt,
            index=self.spec,
            threads=self.threads,
            pool=self.pool,
            layer=self.layer,
        ).reserve(0)
        other.tail_tokens = self.tail_tokens
        other.replicas, other.budgets = _forked(self.replicas), self.budgets
        other._spans, other._tails = list(self._spans), self._tails
        other._length = self._length
        return other

    def snapshot(self) -> PathSnapshot:
        """Return the state of the path, for `restore`. Costs no copy of tokens."""
        state = _forked(self.replicas), self.budgets, self.spans, self.is_merged, self._tails, self._appends
        return PathSnapshot(self._length, *state)

    def restore(self, snapshot: PathSnapshot) -> None:
        """Drop what followed a snapshot. Nothing may have been dropped since that it has."""
        self.replicas, self.budgets = dict(snapshot.replicas), snapshot.budgets
        segments = [span.segment for span in snapshot.spans]
        if segments and [span.segment for span in self._spans[: len(segments)]] != segments:  # copied since
            *before, (last, length) = snapshot.spans
            # what was appended there before the copy
            length = last.length if snapshot.appends or not last.frozen else length
            self._spans = [*before, Span(last, length)]
            self._length = sum(span.length for span in self._spans)
            self._tails, self._appends = snapshot.tails, snapshot.appends
        self.is_merged = snapshot.is_merged
        self.truncate(snapshot.length)
        self._tails, self._appends = snapshot.tails, snapshot.appends
        if self._appends and not self._tails[-1].is_shared:
            self._tails[-1].segment.resume(self._tails[-1])

    def forget(self, start: int, stop: int) -> None:
        """Have replicas cover nothing but tokens [start, stop), the only ones that are retrieved from now on.

        The path keeps its earlier tokens until `release_before`. Raises ConfigError outside the path.
        """
        self.replicas = {kind: one and one.forget(self, start, stop) for kind, one in self.replicas.items()}

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys (kv_heads, n, head_dim), values (kv_heads, n, value_dim) of tokens [start, stop), as stored.

        Views (not to be written to) if they lie in one segment, else copies. ConfigError if outside the path.
        """
        pieces = [segment.read(low, high) for segment, low, high, _ in self.parts(start, stop)]
        if not pieces:
            shapes = _shapes(self, 0)
            return np.empty(shapes[0], self.fmt.dtype), np.empty(shapes[1], self.fmt.dtype)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([k for k, _ in pieces], axis=1), np.concatenate([v for _, v in pieces], axis=1)

    def parts(self, start: int, stop: int) -> list[PathPart]:
        """Where tokens [start, stop) lie, in order. Raises ConfigError if outside the path."""
        if not 0 <= start <= stop <= self._length:
            raise ConfigError(f"the range must lie within 0 .. {self._length} tokens, got [{start}, {stop})")
        parts = []
        first = 0
        for span in self._spans:
            low, high = max(start - first, 0), min(stop - first, span.length)
            if low < high:
                parts.append(PathPart(span.segment, low, high, first))
            first += span.length
        return parts

    def build_index(
        self,
        start: int,
        stop: int,
        queries: npt.NDArray[np.float32] | QueryMoment | None = None,
        lists: npt.NDArray[np.int32] | None = None,
        each: Each | None = None,
        coder: HeadCoders | None = None,
    ) -> None:
        """Build this path's kind of index over tokens [start, stop), one per key-value head and segment.

        queries: (q_heads, m, head_dim) float32 sample for kinds that train, its moments by kv head, or None. lists:
        (q_heads, m, kk) int32, the best tokens of each, counted from `start`, best first, for kinds that take them;
        used where the range lies in one segment. each: does what `map` does, in threads say, for the heads of a
        segment; it then looks after Numba's threads. coder: makes codes on a device, for kinds that keep some there.
        Replaces earlier indexes of the segments touched, for their forks too (answers stay right), but for sealed ones.
        Builds none unless `takes_index`.
        Adds to `index_seconds`.
        """
        began = time.perf_counter()
        parts = self.parts(start, stop)
        grouped = queries
        if isinstance(queries, np.ndarray):
            grouped = _by_kv_head(check_queries("training queries", queries, 3), self.num_kv_heads)
        by_head = None if lists is None or len(parts) > 1 else _by_kv_head(lists, self.num_kv_heads)
        with kernel_threads(self.threads) if each is None else contextlib.nullcontext():
            for segment, low, high, _ in (part for part in parts if self.takes_index and not part.segment.sealed):
                segment.build_index(self.spec, low, high, grouped, by_head, each or map, coder)
        self.index_seconds += time.perf_counter() - began

    def extend_index(self, stop: int) -> None:
        """Insert tokens before `stop` that follow an index in its segment into it, so that no later search has to.

        Does nothing where there is no index. Adds to `index_seconds`. Raises ConfigError outside the path.
        """
        began = time.perf_counter()
        with kernel_threads(self.threads):
            for segment, _, high, _ in self.parts(0, stop):
                segment.extend_index(high, continued=self._goes_on(segment))
        self.index_seconds += time.perf_counter() - began

    @property
    def spans(self) -> tuple[Span, ...]:
        """Segments in order, with the number of tokens of each that belong to this path."""
        return tuple(self._spans)

    def set_spans(self, spans: Sequence[Span]) -> None:
        """Replace the path by spans of frozen segments; the next tokens begin a new segment, as after a fork.

        Clusters are not changed. Raises ConfigError for a span that is longer than its segment.
        """
        for segment, length in spans:
            if not 0 <= length <= segment.length or not segment.frozen:
                raise ConfigError(f"a span of {length} tokens needs a frozen segment of as many, got {segment.length}")
        self._changes += 1
        self._spans, self._tails, self._appends = list(spans), (), False
        self._length = sum(span.length for span in spans)
        self.reserve(0)

    def release_before(self, stop: int) -> None:
        """Release segments that end at or before token `stop`, which is never read again.

        Their memory is freed once no other path and no planned step holds them.
        """
        released = count = 0
        for span in self._spans:
            if released + span.length > stop:
                break
            released, count = released + span.length, count + 1
        if not all(span.segment.is_hole for span in self._spans[:count]):
            hole = hole_for(released, self.num_kv_heads, self.head_dim, self.value_dim, self.fmt)
            self._changes += 1
            self._spans[:count] = [Span(hole, released)]
            self.steps.clear()

    def plan_stamp(self) -> tuple[Hashable, ...]:
        """Return a value that changes with the segments, indexes or clusters that a step was planned for."""
        stamps = [one.stamp for one in self.replicas.values() if one is not None]
        return self._changes, self.tail_tokens, *stamps, *[span.segment.changes for span in self._spans]


def _forked(replicas: Replicas) -> Replicas:
    return {kind: None if one is None else one.fork() for kind, one in replicas.items()}


def _shapes(path: SequenceKV, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of stored keys and values."""
    widths = path.fmt.width(path.head_dim), path.fmt.width(path.value_dim)
    return (path.num_kv_heads, tokens, widths[0]), (path.num_kv_heads, tokens, widths[1])


def keep_no_memory(path: SequenceKV, tokens: int) -> None:
    """Replace a path's memory by `tokens` counted tokens, which are stored elsewhere and never read from it."""
    hole = hole_for(tokens, path.num_kv_heads, path.head_dim, path.value_dim, path.fmt)
    path.set_spans([Span(hole, tokens)])
    path.steps.clear()


def outgrows_codes(path: SequenceKV, tokens: int) -> bool:
    """Return whether a text of `tokens` tokens that goes on behind a path needs codes that are learned again."""
    first = path.segments[0] if path.segments and path.spec.keeps_codes(path.head_dim) else None
    return first is not None and first.outgrows_index(tokens)


def indexed_from(path: SequenceKV, start: int) -> int:
    """Tokens of a path from `start` on that indexes cover. Raises ConfigError outside the path."""
    covered = 0
    for segment, low, high, _ in path.parts(start, len(path)):
        first, stop = segment.indexed
        covered += max(0, min(stop, high) - max(first, low))
    return covered


def cluster_table(path: SequenceKV, start: int, stop: int) -> ClusterTable | None:
    """Return the table of the clusters of a path's tokens [start, stop), which may be empty; None without clusters.

    Valid, and right where it lies, until the next call for other tokens. Raises ConfigError outside the path.
    """
    return None if path.clusters is None else path.clusters.cover(start, stop, path.parts)


def join_clusters(path: SequenceKV, start: int, stop: int) -> None:
    """Have a path's tokens [start, stop) join clusters before a step is planned for them: those for keys without codes
    where a device has codes of others. Nothing without clusters. Raises ConfigError outside the path.
    """
    if path.clusters is not None:
        late = path.clusters.late
        shared = path.clusters.shared if late is None else late.shared
        for segment, low, high, _ in path.parts(start, stop):
            shared.members(segment, low, high, path.fmt)


def join_newest(path: SequenceKV, members: npt.NDArray[np.uint8]) -> None:
    """A path's newest tokens have these members (kv_heads, n); those before them without any join clusters first.

    Nothing without clusters.
    """
    if path.clusters is None:
        return
    shared, start = path.clusters.shared, len(path) - members.shape[1]
    for segment, low, high, first in path.parts(start, len(path)):
        known, stop = shared.joined(segment)
        if known < stop < low:
            shared.members(segment, stop, low, path.fmt)
        if not known < stop or stop <= high:  # else another path has all of them
            shared.restore(segment, (low, high), members[:, first + low - start : first + high - start])


def take_clusters(
    path: SequenceKV, shared: KeyClusters, span: tuple[int, int], members: npt.NDArray[np.uint8], sums: ClusterSums
) -> None:
    """A path's tokens span[0] .. span[1] have these members (kv_heads, n) and sums; later ones join them.

    Raises ConfigError outside the path.
    """
    start, stop = span
    for segment, low, high, first in path.parts(start, stop):
        shared.take(segment, low, members[:, first + low - start : first + high - start])
    path.clusters = PathClusters(shared, path.fmt, span, sums)


def held_memory(paths: Iterable[SequenceKV], *, reclaimable: bool = True) -> HeldMemory:
    """Return the bytes of the tokens and replicas that `paths` hold together; what they share is counted once.

    reclaimable: whether replicas count whose memory is freed if a text needs it.
    """
    every = list(paths)
    segments = segments_of(every)
    stored = HeldMemory(sum(segment.nbytes for segment in segments))
    return total_memory([stored, replica_memory(every, segments, reclaimable=reclaimable)])


def replica_memory(
    paths: Iterable[SequenceKV], segments: Collection[Segment], *, reclaimable: bool = True
) -> HeldMemory:
    """Return the bytes of the replicas of `segments`, and of those of paths as far as they are of these segments."""
    found: dict[int, HeldMemory] = {}
    for replica in replicas_of(paths, segments):
        if reclaimable or not replica.reclaimable:
            found.update(replica.allocations(segments))
    return total_memory(found.values())


def replicas_of(paths: Iterable[SequenceKV], segments: Iterable[Segment]) -> Iterator[KVReplica[Any]]:
    """Yield the replicas of paths and of segments."""
    for path in paths:
        yield from present(path.replicas)
    for segment in segments:
        yield from present(segment.replicas)


def segments_of(paths: Iterable[SequenceKV]) -> set[Segment]:
    """The segments of paths, each once."""
    return {segment for path in paths for segment in path.segments}


def _by_kv_head(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """(q_heads, m, ...) as (kv_heads, group, m, ...)."""
    if rows.ndim != 3 or rows.shape[0] % heads:
        raise ShapeError(f"training data must be (q_heads, m, ...) with a multiple of {heads} heads, got {rows.shape}")
    return rows.reshape(heads, rows.shape[0] // heads, *rows.shape[1:])
