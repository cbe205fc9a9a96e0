"""Keys and values of one layer of one sequence in host memory: a path of segments, the last of which grows.

Forks share segments, so a prefix that many sequences continue is held once. What two paths can see never
changes: a segment is written only past its end, only by the one path that owns it, and never again once it
is shared (frozen). The index of a segment belongs to the segment, so forks share that as well.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.attend import (
    attend_range_heads,
    check_score_options,
    merge_partials,
)
from retrieval_attn.cpu.host_attend import HostPartial, attend_apart, attend_paths
from retrieval_attn.cpu.pool import Pool, default_pool
from retrieval_attn.cpu.segment import Each, HeadCoders, Segment
from retrieval_attn.cpu.step.piece import Piece
from retrieval_attn.cpu.step.plan import LayerStep
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_queries, check_rows
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.threads import check_threads, kernel_threads

RESERVE_TOKENS = 4096
MIN_TAIL_TOKENS = 1024
TAIL_TOKENS = 2048
"""Keys that a graph got later are found less well than those it was built from: the newest are scanned."""
COPIED_TOKENS = 256
"""A frozen last segment up to this long is copied into the new tail: many forks must not leave a chain of
crumbs.
"""


@dataclass(frozen=True)
class _Span:
    """The first `length` tokens of `segment`, as part of a path."""

    segment: Segment
    length: int


class HostPath:
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
        reserve_tokens: int = RESERVE_TOKENS,
        threads: int | None = None,
        tail_tokens: int = TAIL_TOKENS,
        pool: Pool | None = None,
        layer: int = 0,
    ) -> None:
        """An empty path.

        reserve_tokens: tokens the first segment has room for (address space; memory is taken as tokens
        come). Give the expected length: a path that outgrows it continues in further segments, each
        searched on its own. index: what `build_index` builds, None = flat. threads: of `attend`, None = all of the pool
        (or as many as Numba has). tail_tokens: tokens after the end of an index that are scanned before they are
        inserted into it, all at once. pool: of worker threads, None = the shared one. layer: named in errors.
        Raises ConfigError.
        """
        if tail_tokens < 0:
            raise ConfigError(f"tail_tokens={tail_tokens} must be >= 0")
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        check_threads(threads)
        self.spec = IndexSpec.of("flat") if index is None else index
        self._heads, self._head_dim, self._value_dim = num_kv_heads, head_dim, value_dim
        self._fmt = fmt
        self._threads = threads
        self._tail_tokens, self._pool, self._layer = tail_tokens, pool, layer
        self._steps: dict[int, LayerStep] = {}  # by the number of paths that share one
        self._spans: list[_Span] = []
        self._length = 0
        self._reserved = 0
        self._index_seconds = 0.0
        self.reserve(reserve_tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def fmt(self) -> Format:
        """Storage format of keys and values."""
        return self._fmt

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""
        return self._heads

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the path in order; forks share them."""
        return tuple(span.segment for span in self._spans)

    @property
    def nbytes(self) -> int:
        """Bytes of this path's tokens, shared or not (`held_bytes` counts shared segments once)."""
        return self._length * self._token_bytes

    @property
    def index_nbytes(self) -> int:
        """Bytes that the indexes of this path hold beyond the keys, shared or not."""
        return sum(span.segment.index_nbytes for span in self._spans)

    @property
    def index_seconds(self) -> float:
        """Seconds spent in `build_index` and `extend_index` of this path (its forks start at 0)."""
        return self._index_seconds

    @property
    def indexed_tokens(self) -> int:
        """Tokens of the path that indexes cover."""
        covered = 0
        for span in self._spans:
            first, stop = span.segment.indexed
            covered += max(0, min(stop, span.length) - first)
        return covered

    @property
    def index_kinds(self) -> dict[str, int]:
        """How many heads of the path's indexed segments have an index of each kind."""
        return dict(Counter(index.kind for span in self._spans for index in span.segment.indexes))

    @property
    def index_notes(self) -> list[str]:
        """What the indexes say about themselves (their `note`, if they have one), each once, in order."""
        notes = [getattr(index, "note", "") for span in self._spans for index in span.segment.indexes]
        return [note for note in dict.fromkeys(notes) if note]

    @property
    def _token_bytes(self) -> int:
        return self._heads * (self._fmt.row_bytes(self._head_dim) + self._fmt.row_bytes(self._value_dim))

    def reserve(self, tokens: int) -> None:
        """Let the next new segment have room for at least `tokens` tokens. Raises ConfigError below 0."""
        if tokens < 0:
            raise ConfigError(f"reserve_tokens={tokens} must be >= 0")
        self._reserved = tokens

    def append(
        self,
        keys: npt.NDArray[Any],
        values: npt.NDArray[Any],
        each: Each = map,
    ) -> None:
        """Add n tokens at the end, copying them: keys (kv_heads, n, head_dim), values (kv_heads, n,
        value_dim), as stored.

        dtype fmt.dtype, last axis fmt.width of the dim, rows contiguous, n may be 0. each: does what `map` does, in
        threads say, for the heads. Raises ShapeError, or MemoryPlanError if memory cannot be had; the path is then
        unchanged.
        """
        check_rows("keys", keys, self._fmt, 3)
        check_rows("values", values, self._fmt, 3)
        count = keys.shape[1]
        wanted = self._shapes(count)
        if (keys.shape, values.shape) != wanted:
            raise ShapeError(f"keys and values must be {wanted[0]} and {wanted[1]}, got {keys.shape}, {values.shape}")
        if not count:
            return
        room = self._room()
        added = self._new_tail(count - room) if count > room else None
        head = min(room, count)
        if head:
            self._spans[-1].segment.append(keys[:, :head], values[:, :head], each)
            self._spans[-1] = _Span(self._spans[-1].segment, self._spans[-1].segment.length)
        if added is not None:
            replaced, segment = added
            segment.append(keys[:, head:], values[:, head:], each)
            self._spans[len(self._spans) - replaced :] = [_Span(segment, segment.length)]
        self._length += count

    def _room(self) -> int:
        """Tokens that the last segment can still take in place."""
        if not self._spans or self._spans[-1].segment.frozen:
            return 0
        segment = self._spans[-1].segment
        return segment.capacity - segment.length

    def _new_tail(self, count: int) -> tuple[int, Segment]:
        """A segment with room for `count` more, begun with a copy of a short frozen last one; spans it
        replaces.
        """
        replaced = 0
        if self._spans and self._spans[-1].segment.frozen and self._spans[-1].length <= COPIED_TOKENS:
            replaced = 1
        copied = self._spans[-1].length if replaced else 0
        capacity = max(copied + count, self._reserved, MIN_TAIL_TOKENS, self._length // 4)
        expected = max(copied + count, self._reserved)
        segment = Segment(self._heads, capacity, self._head_dim, self._value_dim, self._fmt, expected=expected)
        self._reserved = 0
        if replaced:
            segment.append(*self._spans[-1].segment.read(0, copied))
        return replaced, segment

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on. Memory that a fork or a built index still uses is left to it.

        Arrays from `read` of the forgotten part may be overwritten by later appends. Raises ConfigError
        unless 0 <= length <= len(self).
        """
        if not 0 <= length <= self._length:
            raise ConfigError(f"length={length} must lie in 0 .. {self._length}, the tokens held")
        kept: list[_Span] = []
        left = length
        for span in self._spans:
            if left <= 0:
                break
            kept.append(_Span(span.segment, min(span.length, left)))
            left -= kept[-1].length
        if kept and kept[-1].length < kept[-1].segment.length and not kept[-1].segment.frozen:
            kept[-1].segment.truncate(kept[-1].length)
        self._spans = kept
        self._length = length

    def fork(self) -> HostPath:
        """A second path with the same tokens.

        No bulk copy: all segments and indexes are shared; both may go on.
        """
        for span in self._spans:  # a crop may go back into any of them, and write on from there
            span.segment.freeze()
        other = HostPath(
            self._heads,
            self._head_dim,
            self._value_dim,
            self._fmt,
            index=self.spec,
            reserve_tokens=0,
            threads=self._threads,
            tail_tokens=self._tail_tokens,
            pool=self._pool,
            layer=self._layer,
        )
        other._spans = list(self._spans)
        other._length = self._length
        return other

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys (kv_heads, n, head_dim), values (kv_heads, n, value_dim) of tokens [start, stop), as stored.

        Views (not to be written to) if they lie in one segment, else copies. ConfigError if outside the path.
        """
        pieces = [segment.read(low, high) for segment, low, high in self._pieces(start, stop)]
        if not pieces:
            shapes = self._shapes(0)
            return np.empty(shapes[0], self._fmt.dtype), np.empty(shapes[1], self._fmt.dtype)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([k for k, _ in pieces], axis=1), np.concatenate([v for _, v in pieces], axis=1)

    def _shapes(self, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of stored keys and values."""
        widths = self._fmt.width(self._head_dim), self._fmt.width(self._value_dim)
        return (self._heads, tokens, widths[0]), (self._heads, tokens, widths[1])

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._length:
            raise ConfigError(f"the range must lie within 0 .. {self._length} tokens, got [{start}, {stop})")

    def _step_of(self, rows: int) -> LayerStep:
        """The step for this path and rows - 1 others, on the pool it was given or the one that everything shares."""
        pool = default_pool() if self._pool is None else self._pool
        step = self._steps.get(rows)
        if step is None or step.pool is not pool:
            step = self._steps[rows] = LayerStep(pool, self._fmt, layer=self._layer)
        return step

    def _pieces(self, start: int, stop: int) -> list[tuple[Segment, int, int]]:
        """(segment, first, end) of the parts of [start, stop), in order, positions within the segment."""
        self._check_range(start, stop)
        pieces = []
        first = 0
        for span in self._spans:
            low, high = max(start - first, 0), min(stop - first, span.length)
            if low < high:
                pieces.append((span.segment, low, high))
            first += span.length
        return pieces

    def build_index(
        self,
        start: int,
        stop: int,
        queries: npt.NDArray[np.float32] | None = None,
        lists: npt.NDArray[np.int32] | None = None,
        each: Each | None = None,
        coder: HeadCoders | None = None,
    ) -> None:
        """Build this path's kind of index over tokens [start, stop), one per key-value head and segment.

        queries: (q_heads, m, head_dim) float32 sample for kinds that train, or None. lists: (q_heads, m, kk) int32,
        the best tokens of each, counted from `start`, best first, for kinds that take them; used where the range lies
        in one segment. each: does what `map` does, in threads say, for the heads of a segment; it then looks after
        Numba's threads. coder: makes codes on a device, for kinds that keep some there. Replaces earlier indexes of the
        segments touched, for their forks too (answers stay right). Adds to `index_seconds`.
        """
        began = time.perf_counter()
        pieces = self._pieces(start, stop)
        grouped = None if queries is None else self._by_kv_head(check_queries("training queries", queries, 3))
        by_head = None if lists is None or len(pieces) > 1 else self._by_kv_head(lists)
        with kernel_threads(self._threads) if each is None else contextlib.nullcontext():
            for segment, low, high in pieces:
                segment.build_index(self.spec, low, high, grouped, by_head, each or map, coder)
        self._index_seconds += time.perf_counter() - began

    def _by_kv_head(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(q_heads, m, ...) as (kv_heads, group, m, ...)."""
        if rows.ndim != 3 or rows.shape[0] % self._heads:
            raise ShapeError(
                f"training data must be (q_heads, m, ...) with a multiple of {self._heads} heads, got {rows.shape}"
            )
        return rows.reshape(self._heads, rows.shape[0] // self._heads, *rows.shape[1:])

    def extend_index(self, stop: int) -> None:
        """Insert tokens before `stop` that follow an index in its segment into it, so that no later search has to.

        Does nothing where there is no index. Adds to `index_seconds`. Raises ConfigError outside the path.
        """
        began = time.perf_counter()
        with kernel_threads(self._threads):
            for segment, _, high in self._pieces(0, stop):
                segment.extend_index(high)
        self._index_seconds += time.perf_counter() - began

    def attend(
        self,
        queries: npt.NDArray[np.float32],
        start: int,
        stop: int,
        top_k: int | None,
        *,
        scale: float,
        softcap: float | None = None,
        threads: int | None = None,
    ) -> HostPartial:
        """Attention of queries (q_heads, n, head_dim) float32 over tokens [start, stop).

        Query head h belongs to key-value head h // (q_heads // kv_heads). top_k: each query attends to its
        top_k best keys of the whole range (the same for equal scores: the earlier token), or None for all
        tokens. Tokens not yet in the index of their segment are scanned, or inserted if they are many. Scores are
        scale * q.k,
        soft-capped if softcap is given. threads: overrides the path's. An empty range gives out 0 and lse
        -inf. Raises ShapeError, ConfigError.
        """
        return attend_paths([self], [queries], [(start, stop)], top_k, scale=scale, softcap=softcap, threads=threads)[0]

    def exact_lse(
        self,
        queries: npt.NDArray[np.float32],
        start: int,
        stop: int,
        heads: Sequence[int] | None = None,
        *,
        scale: float,
        softcap: float | None = None,
        threads: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Log-sum-exp of all scores over tokens [start, stop): (heads, n) float32, of the query heads named, None: all.

        queries (q_heads, n, head_dim) float32. Reads every key of those heads. With the lse of `attend`,
        exp(lse - exact_lse) is the share of full attention's weight that the retrieved keys captured. An empty range
        gives -inf. Raises ShapeError, ConfigError.
        """
        check_score_options(scale, softcap)
        group = len(self._grouped(queries)) and queries.shape[0] // self._heads
        chosen = range(queries.shape[0]) if heads is None else heads
        wrong = [head for head in chosen if not 0 <= head < queries.shape[0]]
        if wrong:
            raise ConfigError(f"heads {wrong} must lie in 0 .. {queries.shape[0] - 1}")
        pieces = self._pieces(start, stop)
        result = np.full((len(chosen), queries.shape[1]), -np.inf, np.float32)
        with kernel_threads(self._threads if threads is None else threads):
            for row, head in enumerate(chosen if pieces else ()):
                own, of = np.ascontiguousarray(queries[head : head + 1]), slice(head // group, head // group + 1)
                parts = [
                    # keys in place of values, which nobody needs: they are at hand
                    attend_range_heads(own, s.keys[of], s.keys[of], low, high, self._fmt, scale, softcap)
                    for s, low, high in pieces
                ]
                result[row] = merge_partials(parts)[1][0]
        return result

    def _step_pieces(self, start: int, stop: int) -> list[Piece]:
        """Tokens [start, stop) as a step takes them."""
        pieces: list[Piece] = []
        first = 0
        for span in self._spans:
            low, high = max(start - first, 0), min(stop - first, span.length)
            if low < high:
                pieces += span.segment.pieces(low, high, first, self._tail_tokens)
            first += span.length
        return pieces

    def _grouped(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(q_heads, n, head_dim) -> (kv_heads, group * n, head_dim), a view if queries is contiguous."""
        queries = check_queries("queries", queries, 3)
        q_heads, n, dim = queries.shape
        if dim != self._head_dim or q_heads < 1 or q_heads % self._heads:
            raise ShapeError(
                f"queries must be (a multiple of {self._heads} heads, n, {self._head_dim}), got {queries.shape}"
            )
        return queries.reshape(self._heads, q_heads // self._heads * n, dim)


def held_bytes(paths: Iterable[HostPath]) -> int:
    """Bytes of the tokens and indexes that `paths` hold together, each shared segment counted once."""
    segments = {id(segment): segment for path in paths for segment in path.segments}
    return sum(segment.nbytes + segment.index_nbytes for segment in segments.values())


def prepare(fmt: Format, spec: IndexSpec | None = None, tokens: int | None = None) -> float:
    """Compile what `HostPath.attend` runs for `fmt` and this kind of index (None: flat), or load it from Numba's cache.

    To be called while a model loads: otherwise the first token waits for the compiler (ten to twenty seconds once).
    tokens: of the context, where they are known. Returns the seconds it took.
    """
    began = time.perf_counter()
    spec = IndexSpec.of("flat") if spec is None else spec
    path = HostPath(2, 1, 1, fmt, reserve_tokens=4)
    row = np.zeros((2, 2, fmt.width(1)), fmt.dtype)
    path.append(row, row)
    queries = np.zeros((2, 1, 1), np.float32)
    for top_k in (1, None):
        path.attend(queries, 0, 2, top_k, scale=1.0)
    if not spec.prepare(fmt, tokens):
        attend_apart(path, queries, 0, 2, 1, 1.0, None, None)
    return time.perf_counter() - began
