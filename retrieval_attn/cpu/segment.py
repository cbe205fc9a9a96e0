"""A span of tokens of one layer in host memory, and the index over it. `SequenceKV` chains segments into a sequence.

Memory is reserved as address space and taken page by page as tokens are written; large segments ask for 2 MiB pages.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.replica import KVReplica, Replicas, new_replicas, present, register_replica, total_memory
from retrieval_attn.cpu.step.tables import SearchRange
from retrieval_attn.errors import ConfigError, MemoryPlanError, ShapeError
from retrieval_attn.index import base
from retrieval_attn.index.base import HeldMemory
from retrieval_attn.index.flat import scans_exactly
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.memory import HUGE_PAGE, PAGE, mapped
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.threads import uninterrupted

ROOM_SHARE, ROOM_TOKENS = 16, 1 << 18
"""Address space of a text that prompts may continue, in times its tokens, and its maximum in tokens."""
LEARNED_SHARE = 4
"""A text is copied and gets new codes once it has more than this times the tokens that these were learned from."""

Each = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
"""Does what `map` does, in threads say."""


def room_for(tokens: int) -> int:
    """Return the tokens that a segment has address space for, if prompts may continue its text of `tokens` tokens."""
    return max(tokens + tokens // 2, min(ROOM_SHARE * tokens, ROOM_TOKENS))


class HeadCoders(Protocol):
    """Makes the codes of a layer's heads where a device keeps them; `code` is an `index.device.HeadsCoder`."""

    def for_head(self, head: int) -> Any:
        """Return the coder of this head: an `index.device.Coder`."""


@register_replica
@dataclass(frozen=True, eq=False)
class SegmentIndex(KVReplica["Segment"]):
    """One index per head, with its codes on a device if its kind has some.

    The first key of each is the segment's token `first`.
    """

    kind: ClassVar[str] = "index"
    of_segments: ClassVar[bool] = True
    first: int
    heads: tuple[base.KeyIndex, ...]
    learned: int = 0
    """Number of keys that it was built from."""

    @property
    def num_tokens(self) -> int:
        return self.first + len(self.heads[-1])  # the last one to grow: another thread may be at it

    @property
    def nbytes(self) -> HeldMemory:
        return total_memory(head.memory for head in self.heads)

    def truncate(self, owner: Segment, length: int) -> bool:
        longest = max(map(len, self.heads))  # an insertion may have ended between two heads
        if self.first + longest <= length:
            return True
        kept = length - self.first
        owner.changes += 1
        if kept <= 0:
            owner.replicas[self.kind] = None
            return True
        return all([head.truncate(min(kept, len(head))) for head in self.heads])


class SegmentTail:
    """The tokens of a sealed segment from `start` on, as long as a path keeps this: see `Segment.continue_from`.

    is_shared: a fork has it, too, so that no path may append to it or drop tokens of it.
    """

    __slots__ = ("__weakref__", "is_shared", "segment", "start")

    def __init__(self, segment: Segment, start: int) -> None:
        self.segment, self.start, self.is_shared = segment, start, False


class Segment:
    """Up to `capacity` tokens: keys (kv_heads, capacity, head_dim), values (kv_heads, capacity, value_dim), as stored.

    Tokens [0, length) are written. Only the owner appends, and only until `freeze`; then one path may go on behind the
    last token, see `continue_from`. The index may be extended by any path that shares the segment: it covers tokens
    that no longer change, and each search is limited to the part that its path sees. What it finds depends on what was
    inserted: once `sealed`, only a path that goes on inserts.
    """

    def __init__(
        self,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int,
        fmt: Format,
        *,
        expected: int | None = None,
        sure: int | None = None,
    ) -> None:
        """Reserve the address space. Raises MemoryPlanError if the system refuses it.

        capacity: of a large segment rounded up, so that every head begins a memory page. expected: tokens that may well
        come (None: capacity); of many, every head begins a memory page. sure: tokens that come (None: expected). Few of
        them are kept in small pages, for a 2 MiB page per head would be taken by the first token already.
        """
        if capacity > base.MAX_KEYS:
            raise ConfigError(f"a segment holds at most {base.MAX_KEYS} tokens, got {capacity}; use several")
        self.page_tokens = 0
        """Tokens after which keys and values of each head both begin a memory page; 0: in a small segment."""
        if (expected := capacity if expected is None else expected) * fmt.row_bytes(head_dim) >= 2 * HUGE_PAGE:
            # rows after which a key and a value begin a memory page again
            self.page_tokens = math.lcm(*(PAGE // math.gcd(PAGE, fmt.row_bytes(dim)) for dim in (head_dim, value_dim)))
            capacity = min(-(-capacity // self.page_tokens) * self.page_tokens, base.MAX_KEYS)
        sure = expected if sure is None else sure
        self.keys = _reserve((num_kv_heads, capacity, fmt.width(head_dim)), fmt, sure)
        self.values = _reserve((num_kv_heads, capacity, fmt.width(value_dim)), fmt, sure)
        self.locked_ends: tuple[int, ...] = ()
        """Ends of the token ranges, one after the other from 0 on, that are page-locked (`offload/page_lock.py`)."""
        self.locked_rows: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
        """Keys and values where they are page-locked, if that is another address: a file's own pages. Not to be written
        to."""
        self.fmt = fmt
        self.length = 0
        self.frozen = self.sealed = False
        self.is_hole = False
        """Whether it stands for tokens that nothing reads any more: their numbers are gone, and it has no memory."""
        self.grown: tuple[int, ...] = ()
        """Where the index ended after each insertion into the frozen segment: one that was saved before takes in the
        same tokens together."""
        self.changes = 0
        """Number of changes of the index."""
        self.replicas: Replicas = new_replicas(self, of_segments=True)
        self._tails: tuple[tuple[base.KeyIndex, ...], int, tuple[base.Searchable, ...]] | None = None
        self._extending = threading.Lock()
        self._continued: list[tuple[int, weakref.ref[SegmentTail]]] = []  # where each began

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return int(self.keys.shape[1])

    @property
    def locked_tokens(self) -> int:
        """Number of first tokens in page-locked memory."""
        return self.locked_ends[-1] if self.locked_ends else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens written."""
        heads, _, width = self.keys.shape
        return 0 if self.is_hole else int(heads * self.length * (width + self.values.shape[2]) * self.fmt.bytes)

    @property
    def _index(self) -> SegmentIndex | None:
        found = self.replicas[SegmentIndex.kind]
        assert found is None or isinstance(found, SegmentIndex)
        return found

    @property
    def indexes(self) -> tuple[base.KeyIndex, ...]:
        """The index of each head, () without one."""
        index = self._index
        return () if index is None else index.heads

    @property
    def indexed(self) -> tuple[int, int]:
        """First token that the index covers and the token after its last; (0, 0) without one."""
        index = self._index
        return (0, 0) if index is None else (index.first, index.num_tokens)

    @contextlib.contextmanager
    def steady_index(self) -> Iterator[tuple[base.KeyIndex, ...]]:
        """Yield the index of each head, () without one; no path inserts tokens meanwhile."""
        with self._extending:
            yield self.indexes

    def outgrows_index(self, tokens: int) -> bool:
        """Return whether its index was built from a small part of `tokens` tokens."""
        index = self._index
        return index is not None and index.first + LEARNED_SHARE * index.learned < tokens

    def continue_from(self, length: int, room: int) -> SegmentTail | None:
        """Let one path append up to `room` tokens behind the first `length` tokens of a sealed segment.

        Others see their own first tokens, and codes find the same among these whatever follows. Returns None if there
        are other tokens behind, no room, or an index of another kind. The tokens count until nothing keeps the tail.
        """
        index = self._index
        if index is None or not all(isinstance(one, base.DeviceSearch) for one in index.heads):
            return None
        if not self.sealed or self.is_hole or length + room > self.capacity:
            return None
        with self._extending:
            self._drop_unheld()
            if length != self.length or (self._continued and self._continued[-1][0] == length):
                return None  # another path has tokens there, or will append some
            tail = SegmentTail(self, length)
            self._continued.append((length, weakref.ref(tail)))
            return tail

    def _drop_unheld(self) -> None:
        """Drop the tokens of tails that nothing keeps."""
        while self._continued and self._continued[-1][1]() is None:
            start, _ = self._continued.pop()
            self._cut(start)

    def _cut(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        if length < self.length:
            dropped = [one.truncate(self, length) for one in present(self.replicas)]
            assert all(dropped), "codes and rows are dropped token by token"
            self.length = length

    def may_change(self, token: int) -> bool:
        """Return whether a path may write other tokens from `token` on, once it has dropped those there."""
        return not self.frozen or any(start <= token for start, _ in list(self._continued))

    def cut(self, tail: SegmentTail, length: int) -> None:
        """Drop tokens of the newest tail from `length` on, to be overwritten by its path."""
        with self._extending:
            self._drop_unheld()
            assert self._continued[-1][1]() is tail, "another path goes on"
            self._cut(max(length, tail.start))

    def resume(self, tail: SegmentTail) -> None:
        """Let the path of an earlier tail go on again: what followed it was dropped."""
        with self._extending:
            while self._continued[-1][1]() is not tail:
                self._continued.pop()

    def extend_index(self, stop: int, *, continued: bool = False) -> None:
        """Insert the tokens between the end of the index and `stop`, if there is an index.

        continued: by the path that goes on behind a sealed segment.
        """
        if self._index is not None and (continued or not self.sealed):
            self._extended(self._index.first, stop)

    def append(self, keys: npt.NDArray[Any], values: npt.NDArray[Any], each: Each = map) -> None:
        """Write n tokens at the end: (kv_heads, n, head_dim), (kv_heads, n, value_dim); the caller checks
        the room. each: as `map`, for the heads.
        """
        start, stop = self.length, self.length + keys.shape[1]
        assert stop <= self.capacity, (stop, self.capacity)
        assert self._continued or not self.frozen, "a frozen segment is continued by one path"

        def put(head: int) -> None:
            self.keys[head, start:stop] = keys[head]
            self.values[head, start:stop] = values[head]

        if each is map:
            self.keys[:, start:stop], self.values[:, start:stop] = keys, values
        else:
            for _ in each(put, range(len(self.keys))):
                pass
        self.length = stop
        for replica in present(self.replicas):
            replica.append(self, start, keys, values)

    def freeze(self) -> None:
        """No more appends: from now on several paths may use the segment."""
        self.frozen = True

    def truncate(self, length: int) -> None:
        """Drop tokens from `length` on, to be overwritten; freeze instead if a replica cannot drop them."""
        assert not self.frozen and length <= self.length, (self.frozen, length, self.length)
        if not all([one.truncate(self, length) for one in present(self.replicas)]):
            self.freeze()
            return
        self.length = length

    def replicas_from_device(self, tokens: int, begun: Replicas) -> list[KVReplica[Any]]:
        """Return the replicas that take the newest `tokens` tokens from the device; none if some are elsewhere.

        begun: results of `KVReplica.of_prefill`; the segment gets those that it does not have.
        """
        start = self.length - tokens
        for kind, replica in begun.items() if start >= 0 else ():
            if replica is not None and self.replicas.get(kind) is None:
                replica.attach(self, start)
                self.replicas[kind] = replica
        followers = [one for one in present(self.replicas) if one.from_device]
        return [one for one in followers if one.num_tokens == start or 0 < one.num_tokens < start]

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Views of keys and values of tokens [start, stop), not to be written to."""
        return self.keys[:, start:stop], self.values[:, start:stop]

    def build_index(
        self,
        spec: IndexSpec,
        start: int,
        stop: int,
        queries: npt.NDArray[np.float32] | base.QueryMoment | None,
        lists: npt.NDArray[np.int32] | None = None,
        each: Each = map,
        coder: HeadCoders | None = None,
    ) -> None:
        """Index tokens [start, stop) of every head; queries (kv_heads, group, m, head_dim), their moment or None;
        lists (kv_heads, group, m, kk) or None. each: as `map`, for the heads. coder: see `SequenceKV.build_index`.
        """
        keys, _ = self.read(start, stop)
        training, step = base.HeadsTraining(queries, lists, coder), spec.cls.built_together

        def build(first: int) -> Sequence[base.KeyIndex]:
            heads = slice(first, first + step)
            return spec.build_heads(keys[heads], self.fmt, training.some(heads))

        self.take_index(start, tuple(one for some in each(build, range(0, len(keys), step)) for one in some))

    def take_index(self, first: int, heads: tuple[base.KeyIndex, ...]) -> None:
        """The index of each head, over the tokens from `first` on, in place of what the segment has."""
        self.replicas[SegmentIndex.kind], self.grown = SegmentIndex(first, heads, len(heads[0])), ()
        self.changes += 1

    def pieces(self, low: int, high: int, first: int, most_tail: int) -> list[SearchRange]:
        """Tokens [low, high) as a step takes them, with ids from `first` + low on.

        Tokens after the index's end are scanned, if sealed or up to most_tail of them; more are inserted into it first.
        """
        whole = SearchRange(self.keys, self.values, low, high, first)
        index = self._index
        if index is None or all(map(scans_exactly, index.heads)) or index.first >= high:
            return [whole]
        if high - index.num_tokens > most_tail and low < index.num_tokens and not self.sealed:
            index = self._extended(low, high)
        end = index.num_tokens
        if low >= end:
            return [whole]
        after = [whole._replace(low=end)] if high > end else []
        if low > index.first and isinstance(index.heads[0], base.DeviceSearch):
            behind = self._behind(index, low)
            piece = whole._replace(high=min(high, end), indexes=behind, index_first=low, version=self.changes)
            return [whole] if behind is None else [piece, *after]
        pieces = [whole._replace(high=index.first)] if low < index.first else []
        covered = whole._replace(low=max(low, index.first), high=min(high, end), indexes=index.heads)
        return [*pieces, covered._replace(index_first=index.first, version=self.changes), *after]

    def _behind(self, index: SegmentIndex, low: int) -> tuple[base.Searchable, ...] | None:
        """Return the searches of the index from token `low` on; the same objects until the index changes."""
        tails = self._tails
        if tails is None or tails[0] is not index.heads or tails[1] != low:
            found = [head.tail(low - index.first) for head in index.heads if isinstance(head, base.DeviceSearch)]
            tails = self._tails = index.heads, low, tuple(tail for tail in found if tail is not None)
        return tails[2] if len(tails[2]) == len(index.heads) else None

    def _extended(self, start: int, stop: int) -> SegmentIndex:
        """The index, covering tokens up to `stop`; a segment without one gets an exact one from `start`."""
        index = self._index
        if index is not None and index.num_tokens >= stop:
            return index
        with self._extending:  # forks in two threads must not insert the same tokens twice
            if self._index is None:
                self.build_index(IndexSpec.of("flat"), start, stop, None)
            index = self._index
            assert index is not None
            if index.num_tokens < stop:
                try:
                    for heads, keys in self._missing(index, stop):
                        with uninterrupted():  # forks share the index, and it must not hold half of its new keys
                            type(heads[0]).insert_heads(heads, keys)
                finally:
                    self.changes += 1
                if self.frozen and not self.sealed:
                    self.grown = (*self.grown, stop)
            return index

    def _missing(self, index: SegmentIndex, stop: int) -> Iterator[tuple[tuple[base.KeyIndex, ...], npt.NDArray[Any]]]:
        """Yield heads with their keys before `stop` that the index lacks: several heads, unless an interruption left
        some behind.
        """
        together = index.heads[0].built_together
        for first in range(0, len(index.heads), together):
            some = index.heads[first : first + together]
            alike = len({(len(one), type(one)) for one in some}) == 1
            for at, heads in [(first, some)] if alike else [(first + i, (one,)) for i, one in enumerate(some)]:
                yield heads, self.read(index.first + len(heads[0]), stop)[0][at : at + len(heads)]


def restored_segment(
    keys: npt.NDArray[Any], values: npt.NDArray[Any], fmt: Format, first: int, heads: tuple[base.KeyIndex, ...]
) -> Segment:
    """A frozen segment of keys (kv_heads, n, head_dim) and values (kv_heads, n, value_dim), as stored, taken as they
    are: maps of files, say. heads: the index of each head over the tokens from `first` on, () for none.

    Raises ShapeError for arrays that are not C-contiguous and writable, as kernels are compiled for.
    """
    for name, array in (("keys", keys), ("values", values)):
        check_rows(name, array, fmt, 3)
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ShapeError(f"{name} of a saved segment must be C-contiguous and writable; map them copy on write")
    heads_held, length, _ = keys.shape
    dims = fmt.dim_of(keys), fmt.dim_of(values)
    if values.shape[:2] != (heads_held, length):
        raise ShapeError(f"values must be ({heads_held}, {length}, {dims[1]}) as keys are, got {values.shape}")
    segment = Segment(heads_held, 0, *dims, fmt)
    segment.keys, segment.values, segment.length, segment.frozen = keys, values, length, True
    if heads:
        segment.take_index(first, heads)
    return segment


def hole_for(tokens: int, num_kv_heads: int, head_dim: int, value_dim: int, fmt: Format) -> Segment:
    """A frozen segment in place of tokens that nothing reads any more: address space, in which zeros would be read."""
    hole = Segment(num_kv_heads, tokens, head_dim, value_dim, fmt, expected=0)
    hole.length, hole.frozen, hole.is_hole = tokens, True, True
    return hole


class Span(NamedTuple):
    """The first `length` tokens of `segment`, as part of a path."""

    segment: Segment
    length: int


class PathPart(NamedTuple):
    """Tokens [low, high) of a segment whose token 0 is token `first` of the path."""

    segment: Segment
    low: int
    high: int
    first: int


class PathTokens(Protocol):
    """A path as its replicas read it: see `SequenceKV`."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    fmt: Format

    def __len__(self) -> int:
        """Number of tokens."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Segments in order, with the number of tokens of each that belong to the path."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of `spans`."""

    def parts(self, start: int, stop: int) -> list[PathPart]:
        """Return the parts of segments that tokens [start, stop) are."""


def _reserve(shape: tuple[int, int, int], fmt: Format, expected: int) -> npt.NDArray[Any]:
    """An array whose pages are taken on first write, begun on a 2 MiB boundary and in 2 MiB pages if it is large."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * fmt.bytes
    huge = expected * shape[2] * fmt.bytes >= 2 * HUGE_PAGE  # wasted: at most half as much as is used
    try:
        buffer = mapped(max(1, nbytes) + (HUGE_PAGE if huge else 0), "host keys and values", huge)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryPlanError(
            f"{nbytes / 2**20:.1f} MiB of host memory are needed for {shape[1]} tokens of one layer, but the "
            f"allocation failed ({error}); free memory or read a shorter text"
        ) from error
    offset = -buffer.ctypes.data % HUGE_PAGE if huge else 0
    return buffer[offset : offset + nbytes].view(fmt.dtype).reshape(shape)
