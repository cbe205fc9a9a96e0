"""A scan of keys in the few numbers that the queries look at. Then the best get their exact scores.

q . k is approximated by (A q) . (B k): the change of basis in which the first numbers carry most of what training
queries tell keys apart by (the leading eigenvectors of Sq^1/2 Sk Sq^1/2, with Sq the second moment of queries and Sk
the covariance of keys). The first numbers of B k are stored in 8 bits, the next in 4, the rest not at all (`blocks`),
in blocks of 16 near keys, and the blocks that look promising are scanned (`leaves`), one pass for all queries. What it
needs is one eigenproblem of head_dim, one matrix product and one sorting per head.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import ConfigError, InputDataError, NotFiniteError
from retrieval_attn.index.base import (
    DeviceBytes,
    HeadShape,
    HeldBytes,
    SearchResult,
    StateValue,
    Training,
    check_search,
    check_training,
)
from retrieval_attn.index.flat import SCAN_SHARE, answer_lost, check_rescore, rescore_count, search_runs
from retrieval_attn.index.flat_task import exact_search
from retrieval_attn.index.formats import Format, kernel_view, to_float32
from retrieval_attn.index.kernels.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.kernels.key_codes import CodeSpace
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.runs import KeyRuns, RunsIndex
from retrieval_attn.index.sketch.blocks import (
    BLOCK,
    allocate,
    clear_places,
    decoded,
    empty_blocks,
    out_of_reach,
    with_room,
    write_blocks,
)
from retrieval_attn.index.sketch.coding import RowCoder, code_rows, place_rows, row_space
from retrieval_attn.index.sketch.leaves import PLACE_BYTES, TREE_NUMBERS, Leaves, code_means, leaf_order, needed_share
from retrieval_attn.index.sketch.search import SketchArguments, best_of_blocks
from retrieval_attn.index.sketch.state import restored_arguments, saved_arguments
from retrieval_attn.index.sketch.task import prepare_sketch, sketch_search
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest

MIN_BYTES = 8
RESCORE = 2
"""Keys scored exactly per key wanted."""
SAMPLED_KEYS = 8192
"""Most keys that the projection is learned from, evenly spaced."""
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: directions without queries must not blow up."""
TILE = 64
MIN_LEAVES = 512
"""With fewer leaves all are looked at."""
HELD_OUT, HELD_K = 64, 100
"""Training queries, and best keys of each, that tell how many leaves have to be looked at."""
FOUND = 0.98
"""Share of those keys that lie in the leaves looked at."""
LATE_SHARE = 8
"""Keys are ordered anew when more than one in so many came after the last ordering."""


@njit(nogil=True, cache=True)
def _project(keys, length, rows, out):
    """out[i, j] = rows[j] . keys[0, i] for i < length; rows (multiple of 4, d) float32, out (length, rows) float32."""
    scores = np.empty((TILE_QUERIES, TILE), np.float32)
    for tile in range(0, length, TILE):
        size = min(TILE, length - tile)
        for first in range(0, len(rows), TILE_QUERIES):
            score_tile(rows, first, keys[0], tile, size, scores)
            for i in range(size):
                for j in range(TILE_QUERIES):
                    if first + j < out.shape[1]:
                        out[tile + i, first + j] = scores[j, i]


def learn_projection(
    queries: npt.NDArray[np.float32], keys: npt.NDArray[np.float32], rank: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A and B, both (rank, d) float32: q . (k - mean) ~ (A q) . (B (k - mean)) with the least squared error.

    queries (m, d), keys (n, d), both finite and at least one row.
    """
    moment = _second_moment(queries)
    covariance = _second_moment(keys, centred=True)
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, FLOOR * max(float(values.mean()), np.finfo(np.float64).tiny))
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = vectors / np.sqrt(values) @ vectors.T
    _, leading = np.linalg.eigh(root @ covariance @ root)
    leading = leading[:, ::-1][:, :rank]
    return (leading.T @ inverse).astype(np.float32), (leading.T @ root).astype(np.float32)


def _second_moment(rows: npt.NDArray[np.float32], *, centred: bool = False) -> npt.NDArray[np.float64]:
    """Mean of the products of all pairs of numbers of a row, (d, d). centred: of their distances from the mean row.

    Products of the distances are summed in float32, in a third of the time of float64. Rows may be of any size: none
    overflows.
    """
    largest = max(float(np.abs(rows).max()), float(np.finfo(np.float32).tiny))
    scaled = rows / np.float32(largest)
    mean = scaled.mean(axis=0, dtype=np.float64)
    scaled -= mean.astype(np.float32)
    products = (scaled.T @ scaled).astype(np.float64) / len(rows)
    return (products if centred else products + np.outer(mean, mean)) * largest**2


@dataclass(frozen=True)
class SketchOptions:
    """key_bytes: most bytes per key, at least 8; None: head_dim / 2. rescore: how many keys get an exact score for each
    that is wanted. share: of the leaves, what is looked at; None: what training queries need to find 98 % of their best
    100 keys, by count and by weight. 1.0: all. Raises ConfigError for other values.
    """

    key_bytes: int | None = None
    rescore: int = RESCORE
    share: float | None = None

    def __post_init__(self) -> None:
        share = self.share
        if share is not None and (isinstance(share, bool) or not isinstance(share, float | int) or not 0 < share <= 1):
            raise ConfigError(f"share={share!r} must be above 0 and at most 1, or None to measure it")
        check_key_bytes(self.key_bytes)
        check_rescore(self.rescore)

    def budget(self, head_dim: int) -> int:
        """Most bytes per key."""
        return max(MIN_BYTES, head_dim // 2) if self.key_bytes is None else int(self.key_bytes)


@register
class SketchIndex(RunsIndex):
    """Scan of a query-aware sketch of the keys, exact scores for the best of it.

    A query that is not finite gets the exact answer, and so does a search for more than one key in four (after
    `rescore`), for which a sketch saves nothing.
    """

    kind: ClassVar[str] = "sketch"
    trains: ClassVar[bool] = True
    keeps_device_keys: ClassVar[bool] = True
    Options = SketchOptions
    hides_first_keys: ClassVar[bool] = True

    def __init__(self, keys: KeyRuns, arguments: SketchArguments, key_side: npt.NDArray[np.float32], rescore: int):
        """key_side (rank, head_dim): B. Callers use `build`."""
        self._keys = keys
        self._search = arguments
        self._key_side = key_side
        self._rescore = rescore
        self._measured = len(self)
        """How many keys the steps were taken from."""
        self._saving = False  # whether somebody may still read the last block as it is

    @classmethod
    def host_bytes(cls, options: SketchOptions, head: HeadShape) -> tuple[HeldBytes, ...]:
        each = options.budget(head.head_dim) + PLACE_BYTES
        return (HeldBytes(each, None, "a sketch of every key, its id and share of a leaf"),)

    @classmethod
    def device_bytes(cls, options: SketchOptions, head_dim: int) -> DeviceBytes:
        return DeviceBytes(building=TREE_NUMBERS + options.budget(head_dim))

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: SketchOptions, training: Training) -> SketchIndex:
        """See KeyIndex.make. Without keys the projection keeps what queries have most of.

        Raises ConfigError without finite training queries, ShapeError for keys that are not finite.
        """
        runs = KeyRuns(keys, fmt)
        dim, share = fmt.dim_of(keys), options.share
        queries, _ = check_training(training.queries, None, dim, len(keys))
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not len(rows):
            raise ConfigError("sketch needs finite training queries, got none; pass queries (heads, m, head_dim)")
        sample = to_float32(keys[:: max(1, len(keys) // SAMPLED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise NotFiniteError("keys to be sketched must be finite; leave the others out or use index='flat'")
        known = sample if len(sample) else np.eye(dim, dtype=np.float32)
        sides = learn_projection(rows, known, dim)
        variances = (known.astype(np.float64) @ sides[1].T.astype(np.float64)).var(axis=0)
        wide, narrow = allocate(variances, options.budget(dim))
        query_side, key_side = (_cut(side, wide + narrow) for side in sides)
        nothing = empty_blocks(np.empty((0, len(key_side)), np.float32), wide, 0)
        none = Leaves(code_means(np.empty((0, len(key_side)), np.float32)), 0, 1.0 if share is None else float(share))
        empty = SketchArguments(nothing, np.empty(0, np.int32), 0, query_side, none)
        index = cls(runs, empty, key_side, int(options.rescore))
        index._encode_all(runs.within(len(keys)), len(keys), share is None or share < 1, training.coder)
        if share is None and index._search.leaves.ordered:
            index._fit_share(rows if queries is None else queries)
        return index

    def _encode_all(
        self, arrays: list[npt.NDArray[Any]], room: int, leafy: bool, coder: RowCoder | None = None
    ) -> None:
        """Code the keys of `arrays`, ids from 0 on, with steps that fit them; leafy: in leaves. Raises ShapeError.

        coder: makes the rows of the keys, of one array, elsewhere.
        """
        total, fmt, rank = sum(len(array) for array in arrays), self._keys.fmt, len(self._key_side)
        every = max(1, total // SAMPLED_KEYS)
        sample = [_projected(array[::every], fmt, self._key_side) for array in arrays]
        numbers = np.concatenate(sample) if sample else np.empty((0, rank), np.float32)
        _check_finite(numbers, 0, every)
        blocks = empty_blocks(numbers, self._search.keys.wide, max(room, total))
        space, steps = row_space(self._key_side, numbers, blocks)
        rows = _coded(space, arrays, fmt) if coder is None else coder.rows(space, fmt, *arrays)
        leaves = self._search.leaves
        leafy = leafy and total >= MIN_LEAVES * BLOCK
        tree = rows[:, :TREE_NUMBERS].view(np.int8)
        order = leaf_order(tree, steps) if leafy else np.arange(total, dtype=np.int32)
        clear_places(blocks, total // BLOCK * BLOCK, total)
        means = place_rows(rows, order, blocks)
        ids = np.full(len(blocks.blocks) * BLOCK, -1, np.int32)
        ids[:total] = order
        coded = Leaves(code_means(means), len(means), leaves.share) if leafy else leaves._replace(ordered=0)
        self._search = self._search._replace(keys=blocks, ids=ids, total=len(means), leaves=coded)
        self._measured = total

    def _fit_share(self, queries: npt.NDArray[np.float32]) -> None:
        """Look at as many leaves as some of queries (heads, m, head_dim) need; the heads look together."""
        count = max(1, HELD_OUT // len(queries))
        few = queries[:, :: max(1, queries.shape[1] // count)][:, :count]
        few = few[:, np.isfinite(few).all(axis=(0, 2))]
        group = len(few)
        held = np.ascontiguousarray(few.transpose(1, 0, 2).reshape(-1, few.shape[2]))
        if not len(held):
            return
        found = search_runs(self._keys.within(len(self)), held, min(HELD_K, len(self)), self._keys.fmt)
        places = np.empty(len(self), np.int64)
        ids = self._search.ids[: self._search.total * BLOCK]
        places[ids[ids >= 0]] = np.flatnonzero(ids >= 0)
        leaves = self._search.leaves
        means = decoded(leaves.means, leaves.ordered)
        side = self._search.query_side[: means.shape[1]]
        scores = ((held @ side.T) @ means[:, : len(side)].T).astype(np.float32)
        logits = (found.scores / np.sqrt(self.head_dim)).astype(np.float64)
        weights: npt.NDArray[np.float64] = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        share = needed_share(scores, places[found.ids] // BLOCK, FOUND, weights, group)
        self._search = self._search._replace(leaves=leaves._replace(share=share))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, projected as the first ones were; see KeyIndex.insert. Raises ShapeError.

        They lie behind the leaves and are always looked at, until they are one in eight: then all keys are ordered and
        coded anew, as they are when there are twice as many as the steps were taken from, or a far larger one comes.
        """
        self._keys.check(keys)
        length, total = len(self), len(self) + len(keys)
        numbers = _projected(keys, self._keys.fmt, self._key_side)
        _check_finite(numbers, length, 1)
        search = self._search
        late = search.total - search.leaves.ordered if search.leaves.ordered else 0
        crowded = LATE_SHARE * late > search.total or search.total * BLOCK > 2 * (total + BLOCK)
        if len(keys) and (total >= 2 * self._measured or crowded or out_of_reach(search.keys, numbers)):
            self._encode_all([*self._keys.within(length), keys], total + total // 4, search.leaves.share < 1)
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
        blocks = with_room(search.keys, stop, used, self._saving)
        ids = search.ids
        if self._saving or len(ids) < len(blocks.blocks) * BLOCK:
            ids = np.full(len(blocks.blocks) * BLOCK, -1, np.int32)
            ids[:used] = search.ids[:used]
        self._saving = False
        clear_places(blocks, used, stop)
        write_blocks(numbers, blocks.blocks, used, blocks.mean, blocks.step, blocks.wide)
        ids[used:stop] = np.arange(length, length + len(numbers))
        self._search = search._replace(keys=blocks, ids=ids, total=-(-stop // BLOCK))

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        search = self._search
        self._search = search._replace(ids=np.where(search.ids < length, search.ids, -1).astype(np.int32))
        return True

    def rescore_count(self, k: int) -> int:
        """How many keys get an exact score when the best k are wanted."""
        return rescore_count(self._rescore, k)

    def search_arguments(self) -> SketchArguments:
        """What a compiled search of this index needs besides the keys; another object after every change."""
        return self._search

    @classmethod
    def prepare(cls, options: SketchOptions, fmt: Format) -> bool:
        prepare_sketch(fmt)
        return True

    def compiled_search(self, request: SearchRequest) -> CompiledSearch:
        kept = self.rescore_count(request.k)
        if request.visible < SCAN_SHARE * kept:
            return exact_search(request.fmt)
        # leaves of hidden keys take places: so many more are looked at
        share = self._search.leaves.share
        if request.hidden:
            share *= len(self) / max(1, len(self) - request.hidden)
        return sketch_search(request, self._search, kept, share)

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k of the keys that the sketch puts first; see KeyIndex.search."""
        queries, k = check_search(queries, self.head_dim, k, limit)
        stop = len(self) if limit is None else min(int(limit), len(self))
        kept = self.rescore_count(k)
        if stop < SCAN_SHARE * kept:
            return search_runs(self._keys.within(stop), queries, k, self._keys.fmt)
        found, scanned, lost = best_of_blocks(self._search, stop, queries, kept)
        ids, scores = self._keys.best(found, queries, k)
        answer_lost(self._keys, stop, queries, k, lost, ids, scores)
        return SearchResult(ids, scores, scanned)

    @property
    def share(self) -> float:
        """Of the leaves, what a search looks at for each query; 1.0: every key."""
        return self._search.leaves.share if self._search.leaves.ordered else 1.0

    def state(self) -> dict[str, StateValue]:
        self._saving = True
        return {"rescore": self._rescore, "measured": self._measured, **saved_arguments(self._search, self._key_side)}

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> SketchIndex:
        rescore, measured = state.get("rescore"), state.get("measured", len(keys))
        if not isinstance(rescore, int) or not isinstance(measured, int):
            raise InputDataError("the state is not one of a sketch over such keys; build the index again from its keys")
        index = cls(KeyRuns(keys, fmt), *restored_arguments(state, len(keys), fmt.dim_of(keys), trusted), rescore)
        index._measured = measured
        return index

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, their ids, the leaves and the projection."""
        search = self._search
        sides = search.query_side.nbytes + self._key_side.nbytes
        return int(search.keys.nbytes + search.ids.nbytes + search.leaves.means.nbytes + sides)


def check_key_bytes(given: object) -> None:
    """Raise ConfigError unless `given` is None or a whole number >= MIN_BYTES."""
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < MIN_BYTES:
        raise ConfigError(f"key_bytes={given!r} must be a whole number of at least {MIN_BYTES}")


def _coded(space: CodeSpace, arrays: list[npt.NDArray[Any]], fmt: Format) -> npt.NDArray[np.uint8]:
    """Rows of the keys of `arrays`, see `coding`. Raises ShapeError."""
    parts, before = [np.empty((0, space.key_bytes), np.uint8)], 0
    for array in arrays:
        rows, bad = code_rows(space, array, fmt)
        if bad >= 0:
            raise NotFiniteError(_not_finite("one", before + bad))
        parts.append(rows)
        before += len(array)
    return parts[1] if len(arrays) == 1 else np.concatenate(parts)


def _cut(side: npt.NDArray[np.float32], rank: int) -> npt.NDArray[np.float32]:
    """The first `rank` rows, zeros behind the last."""
    rows = np.zeros((rank, side.shape[1]), np.float32)
    rows[: len(side)] = side[:rank]
    return rows


def _check_finite(numbers: npt.NDArray[np.float32], start: int, every: int) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(bad):
        raise NotFiniteError(_not_finite(str(len(bad)), start + int(bad[0]) * every))


def _not_finite(count: str, first: int) -> str:
    return (
        f"keys to be sketched must be finite, got {count} with NaN or infinity, the first at id {first}; leave them "
        "out or use index='flat'"
    )


def _projected(keys: npt.NDArray[Any], fmt: Format, key_side: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """B k of keys (n, head_dim) in `fmt`: (n, rank) float32, bit-identical however keys are cut into calls."""
    rank = len(key_side)
    rows = np.zeros((-(-rank // TILE_QUERIES) * TILE_QUERIES, key_side.shape[1]), np.float32)
    rows[:rank] = key_side
    out = np.empty((len(keys), rank), np.float32)
    if len(keys):
        _project(one_layout(kernel_view(keys, fmt)[None]), len(keys), rows, out)
    return out
