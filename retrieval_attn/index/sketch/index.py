"""A scan of keys in the few numbers that the queries look at. Then the best get their exact scores.

q . k is approximated by (A q) . (B k): the change of basis in which the first numbers carry most of what training
queries tell keys apart by (the leading eigenvectors of Sq^1/2 Sk Sq^1/2, with Sq the second moment of queries and Sk
the covariance of keys). The first numbers of B k are stored in 8 bits, the next in 4, the rest not at all (`rows`), in
the order of leaves of 16 near keys. What is scanned is a front of fewer bits (`front`), of the leaves that look
promising (`leaves`), one pass for all queries; keys that pass are scored by their rows, and the best of those exactly.
How much of each is measured by held-out queries (`fit`). What it needs is one eigenproblem of head_dim, one matrix
product and one sorting per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, NotFiniteError
from retrieval_attn.index.base import (
    TRAIN_QUERIES,
    DeviceBytes,
    HeadShape,
    HeldMemory,
    HostBytes,
    IndexMemory,
    KeyIndex,
    State,
    StateValue,
    Training,
    TrainingNeeds,
    check_training,
)
from retrieval_attn.index.flat import SCAN_SHARE, rescore_count, search_exact
from retrieval_attn.index.formats import Format, to_float32
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.sketch.build import (
    SAMPLED_KEYS,
    Ordered,
    RowCoder,
    check_finite,
    held_for,
    no_leaves,
    ordered_keys,
    projected,
)
from retrieval_attn.index.sketch.front import (
    FEW_KEYS,
    HELD_K,
    HELD_OUT,
    Way,
    best_way,
    empty_front,
    plan_front,
    sizes_for,
    way_for_few,
    write_front,
)
from retrieval_attn.index.sketch.front import with_room as front_with_room
from retrieval_attn.index.sketch.rows import (
    BLOCK,
    ROW_STEP,
    allocate,
    clear_places,
    empty_rows,
    out_of_reach,
    scaled_rows,
    with_room,
    write_rows,
)
from retrieval_attn.index.sketch.scan import PLACE_BYTES, TREE_NUMBERS
from retrieval_attn.index.sketch.state import restored_arguments, saved_arguments
from retrieval_attn.index.sketch.task import SketchArguments, sketch_search, sketch_task
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.scans import exact_search
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest
from retrieval_attn.index.task.tasks import task_address

MIN_BYTES = 8
RESCORE = 2
"""Keys scored exactly per key wanted."""
LEARNED = 4
"""Queries that the projection needs, for each number of theirs: with fewer none is held out."""
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: directions without queries must not blow up."""
LATE_SHARE = 8
"""Keys are ordered again when more than one in LATE_SHARE came after the last ordering."""


def learn_projection(
    moment: npt.NDArray[np.float64], keys: npt.NDArray[np.float32], rank: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A and B, both (..., rank, d) float32: q . (k - mean) ~ (A q) . (B (k - mean)) with the least squared error.

    moment (..., d, d): the `second_moment` of the queries. keys (..., n, d), n > 0, of any number of heads, finite.
    """
    covariance = second_moment(keys, centred=True)
    values, vectors = np.linalg.eigh(moment)
    least = FLOOR * np.maximum(values.mean(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    lengths, back = np.sqrt(np.maximum(values, least))[..., None, :], vectors.swapaxes(-1, -2)
    root, inverse = vectors * lengths @ back, vectors / lengths @ back
    _, leading = np.linalg.eigh(root @ covariance @ root)
    leading = leading[..., ::-1][..., :rank].swapaxes(-1, -2)
    return (leading @ inverse).astype(np.float32), (leading @ root).astype(np.float32)


def second_moment(rows: npt.NDArray[np.float32], *, centred: bool = False) -> npt.NDArray[np.float64]:
    """Mean of the products of all pairs of numbers of a row (..., n, d), (..., d, d). centred: of their distances from
    the mean row.

    Products of the distances are summed in float32, in a third of the time of float64. Rows may be of any size: none
    overflows.
    """
    scaled, mean, largest = scaled_rows(rows.reshape(-1, *rows.shape[-2:]))
    moment = (scaled.swapaxes(1, 2) @ scaled).astype(np.float64)
    moment /= rows.shape[-2]
    if not centred:
        moment += mean[:, :, None] * mean[:, None]
    return (moment * np.square(largest)[:, None, None]).reshape(*rows.shape[:-2], *moment.shape[1:])


@dataclass(frozen=True)
class SketchOptions:
    """key_bytes: most bytes per key, at least 8; None: head_dim / 2. Raises ConfigError for other values."""

    key_bytes: int | None = None

    def __post_init__(self) -> None:
        check_key_bytes(self.key_bytes)

    def budget(self, head_dim: int) -> int:
        """Most bytes per key."""
        return max(MIN_BYTES, head_dim // 2) if self.key_bytes is None else int(self.key_bytes)


def _memory(options: SketchOptions, head: HeadShape) -> IndexMemory:
    budget = options.budget(head.head_dim)
    front = sizes_for(min(2 * budget, head.head_dim))[-1]
    each = -(-budget // ROW_STEP) * ROW_STEP + front + PLACE_BYTES
    host = HostBytes(each, None, "a sketch of every key, its id and share of a leaf")
    return IndexMemory((host,), DeviceBytes(building=TREE_NUMBERS + budget))


@register(memory=_memory, keeps_device_keys=True, compile_tasks=lambda options, fmt: task_address(sketch_task, fmt))
class SketchIndex(KeyIndex):
    """Scan of a query-aware sketch of the keys, exact scores for the best of it.

    A query that is not finite gets the exact answer, and so does a search that would score more than one key in four
    exactly, for which a sketch saves nothing.
    """

    kind: ClassVar[str] = "sketch"
    Options = SketchOptions
    training: ClassVar[TrainingNeeds] = TrainingNeeds(TRAIN_QUERIES)

    def __init__(self, keys: StoredKeys, arguments: SketchArguments, key_side: npt.NDArray[np.float32]) -> None:
        """key_side (rank, head_dim): B. Callers use `build`."""
        self._keys = keys
        self._search = arguments
        self._key_side = key_side
        self._measured = len(self)
        """How many keys the steps were taken from."""
        self._way = Way(arguments.front.key_bytes, arguments.passing, arguments.leaves.share)
        self._saving = False  # whether a save may still read the last block as it is

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: SketchOptions, training: Training) -> SketchIndex:
        """Build a sketch. Without keys the projection keeps what queries have most of.

        Raises ConfigError without finite training queries, ShapeError for keys that are not finite.
        """
        stored = StoredKeys(keys, fmt)
        dim = fmt.dim_of(keys)
        queries, _ = check_training(training.queries, None, dim, len(keys))
        held, queries = _held_out(queries)
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not len(rows):
            raise ConfigError("sketch needs finite training queries, got none; pass queries (heads, m, head_dim)")
        sample = to_float32(keys[:: max(1, len(keys) // SAMPLED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise NotFiniteError(
                "keys of a sketch must be finite, got NaN or infinity; remove these keys or use index='flat'"
            )
        known = sample if len(sample) else np.eye(dim, dtype=np.float32)
        sides = learn_projection(second_moment(rows), known, dim)
        variances = (known.astype(np.float64) @ sides[1].T.astype(np.float64)).var(axis=0)
        wide, narrow = allocate(variances, options.budget(dim))
        query_side, key_side = (_cut(side, wide + narrow) for side in sides)
        nothing, none = np.empty((0, len(key_side)), np.float32), no_leaves(len(key_side))
        rows_of_none, way = empty_rows(nothing, wide, 0), way_for_few(len(key_side))
        front = empty_front(plan_front(nothing, rows_of_none.mean, [way.size])[way.size], 0)
        empty = SketchArguments(rows_of_none, front, np.empty(0, np.int32), 0, query_side, none, way.passing, 0, 0)
        index = cls(stored, empty, key_side)
        index._way = way
        index._encode_all(stored.whole, len(keys), True, training.coder, held)
        return index

    def _encode_all(
        self,
        stored: npt.NDArray[Any],
        room: int,
        leafy: bool,
        coder: RowCoder | None = None,
        held: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Code the stored keys (n, head_dim), ids from 0 on; leafy: in leaves. Raises NotFiniteError.

        coder: codes the keys elsewhere. held: queries (heads, m, head_dim) to fit the search to; None:
        as before.
        """
        wide = self._search.keys.wide
        made = ordered_keys(stored, self._keys.fmt, self._key_side, wide, room=room, leafy=leafy, coder=coder)
        if held is not None and len(self) >= FEW_KEYS:
            self._fit(made, held)
        front, leaves = made.front(self._way.size), made.leaves._replace(share=self._way.share)
        total, side = len(stored), self._search.query_side
        whole = total // BLOCK
        self._search = SketchArguments(
            made.keys, front, made.ids, made.total, side, leaves, self._way.passing, total, whole
        )
        self._measured = total

    def _fit(self, made: Ordered, queries: npt.NDArray[np.float32]) -> None:
        """Search as queries (heads, m, head_dim) need it that nothing was learned from; the heads look together."""
        held = np.ascontiguousarray(queries.transpose(1, 0, 2).reshape(-1, queries.shape[2]))
        if not len(held):
            return
        keys, fmt = self._keys.whole, self._keys.fmt
        found = search_exact(keys, held, min(HELD_K, len(self)), fmt)
        best = projected(keys[found.ids.ravel()], fmt, self._key_side)
        told = held_for(made, self._search.query_side, held, found, best, len(queries))
        plans = plan_front(made.numbers, made.keys.mean, sizes_for(len(self._key_side)))
        self._way = best_way(told, plans, self.rescore_count(HELD_K))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, projected as the first ones were; see KeyIndex.insert. Raises ShapeError.

        They lie behind the leaves and are always looked at, until they are one in eight: then all keys are ordered and
        coded again, as they are when there are twice as many as the steps were taken from, or a far larger one comes.
        """
        self._keys.check(keys)
        length, total = len(self), len(self) + len(keys)
        numbers = projected(keys, self._keys.fmt, self._key_side)
        check_finite(numbers, length, 1)
        search = self._search
        late = search.total - search.leaves.ordered if search.leaves.ordered else 0
        crowded = LATE_SHARE * late > search.total or search.total * BLOCK > 2 * (total + BLOCK)
        if len(keys) and (total >= 2 * self._measured or crowded or out_of_reach(search.keys, numbers)):
            self._encode_all(self._keys.extended(keys), total + total // 4, search.leaves.share < 1)
        elif len(keys):
            self._append(numbers, length)
        self._keys.add(keys)

    def _append(self, numbers: npt.NDArray[np.float32], length: int) -> None:
        """Code numbers (n, rank) as keys from id `length` on, in the free places behind all others."""
        search = self._search
        used = search.total * BLOCK
        if search.total > search.leaves.ordered:  # the last block has no mean that would change
            used -= BLOCK - 1 - int(np.flatnonzero(search.ids[used - BLOCK : used] >= 0).max(initial=-1))
        stop = used + len(numbers)
        rows = with_room(search.keys, stop, used, self._saving)
        front = front_with_room(search.front, rows, used, self._saving)
        ids = search.ids
        if self._saving or len(ids) < len(rows.rows):
            ids = np.full(len(rows.rows), -1, np.int32)
            ids[:used] = search.ids[:used]
        self._saving = False
        write_rows(numbers, rows.rows, used, rows.mean, rows.step, rows.wide)
        clear_places(rows, stop)
        write_front(front, rows, used, stop)
        ids[used:stop] = np.arange(length, length + len(numbers))
        self._search = search._replace(
            keys=rows, front=front, ids=ids, total=-(-stop // BLOCK), length=length + len(numbers)
        )

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        search = self._search
        ids = np.where(search.ids < length, search.ids, -1).astype(np.int32)
        self._search = search._replace(ids=ids, length=length, whole=0)
        return True

    def rescore_count(self, k: int) -> int:
        """How many keys get an exact score when the best k are wanted."""
        return rescore_count(RESCORE, k)

    def search_arguments(self) -> SketchArguments:
        """Return the arguments of a compiled search in addition to the keys; a new object after every change."""
        return self._search

    def task(self, request: SearchRequest) -> CompiledSearch:
        kept = self.rescore_count(request.k)
        if request.visible < SCAN_SHARE * kept:
            return exact_search(request.fmt)
        # leaves of hidden keys take places: as many more are looked at
        share = self._search.leaves.share
        if request.hidden:
            share *= len(self) / max(1, len(self) - request.hidden)
        return sketch_search(request, self._search, kept, share)

    @property
    def share(self) -> float:
        """Share of the leaves that a search scans for each query; 1.0: every key."""
        return self._search.leaves.share if self._search.leaves.ordered else 1.0

    def state(self) -> dict[str, StateValue]:
        self._saving = True
        return {"measured": self._measured, **saved_arguments(self._search, self._key_side)}

    @classmethod
    def from_state(
        cls, keys: npt.NDArray[Any], fmt: Format, state: State, *, coder: Any = None, trusted: bool = False
    ) -> SketchIndex:
        measured = state.get("measured", len(keys))
        if not isinstance(measured, int):
            raise InputDataError(
                "the saved state is not one of a sketch over these keys; build the index again from its keys"
            )
        index = cls(StoredKeys(keys, fmt), *restored_arguments(state, len(keys), fmt.dim_of(keys), trusted))
        index._measured = measured
        return index

    @property
    def memory(self) -> HeldMemory:
        """Bytes of copied keys, the rows, their front and ids, the leaves and the projection."""
        search = self._search
        sides = search.query_side.nbytes + self._key_side.nbytes
        codes = search.keys.nbytes + search.front.nbytes + search.ids.nbytes + search.leaves.means.nbytes
        return HeldMemory(self._keys.nbytes + int(codes + sides))


def _held_out(
    queries: npt.NDArray[np.float32] | None,
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None]:
    """Some of queries (heads, m, head_dim), all finite, to weigh by, and those that may be learned from: the others,
    where there are enough of them.
    """
    if queries is None or not queries.size:
        return None, queries
    count = max(1, HELD_OUT // len(queries))
    places = np.arange(0, queries.shape[1], max(1, queries.shape[1] // count))[:count]
    held = queries[:, places]
    others = np.delete(queries, places, axis=1)
    if others.shape[0] * others.shape[1] < LEARNED * others.shape[2]:
        others = queries
    return held[:, np.isfinite(held).all(axis=(0, 2))], others


def check_key_bytes(given: object) -> None:
    """Raise ConfigError unless `given` is None or a whole number >= MIN_BYTES."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < MIN_BYTES:
        raise ConfigError(f"key_bytes={given!r} must be a whole number of at least {MIN_BYTES}")


def _cut(side: npt.NDArray[np.float32], rank: int) -> npt.NDArray[np.float32]:
    """The first `rank` rows, zeros behind the last."""
    rows = np.zeros((rank, side.shape[1]), np.float32)
    rows[: len(side)] = side[:rank]
    return rows
