"""A scan of keys in the few numbers that the queries look at. Then the best get their exact scores.

q . k is approximated by (A q) . (B k): the change of basis in which the first numbers carry most of what training
queries tell keys apart by (the leading eigenvectors of Sq^1/2 Sk Sq^1/2, with Sq the second moment of queries and Sk
the covariance of keys). The first numbers of B k are stored in 8 bits, the next in 4, the rest not at all (`blocks`),
and all keys are scanned, one pass for all queries. What it needs is one eigenproblem of head_dim and one matrix product
per head; it depends on the data only through the spectrum, so it degrades evenly where graphs lose single answers.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index.base import KeyIndex, SearchResult, StateValue, check_search, check_training, register
from retrieval_attn.index.block_scan import best_of_blocks
from retrieval_attn.index.blocks import (
    BLOCK,
    KeyBlocks,
    allocate,
    empty_blocks,
    key_bytes,
    out_of_reach,
    with_room,
    write_blocks,
)
from retrieval_attn.index.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.flat import SCAN_SHARE, check_rescore, rescore_count, search_pieces
from retrieval_attn.index.formats import Format, kernel_view, to_float32
from retrieval_attn.index.memory import aligned_empty, one_layout
from retrieval_attn.index.pieces import KeyPieces

LEAST_BYTES = 8
RESCORE = 4
"""Keys scored exactly per key wanted."""
SAMPLED_KEYS = 32768
"""Most keys that the projection is learned from, evenly spaced."""
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: directions without queries must not blow up."""
TILE = 64
PROJECTED_AT_ONCE = 8192


class SketchArguments(NamedTuple):
    """What a compiled search of a sketch reads: coded keys, and what queries are projected by, (rank, head_dim)."""

    keys: KeyBlocks
    query_side: npt.NDArray[np.float32]


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
    moment = np.einsum("mi,mj->ij", queries, queries, dtype=np.float64, optimize=True) / len(queries)
    centred = keys.astype(np.float64) - keys.mean(axis=0, dtype=np.float64)
    covariance = centred.T @ centred / len(keys)
    values, vectors = np.linalg.eigh(moment)
    values = np.maximum(values, FLOOR * max(float(values.mean()), np.finfo(np.float64).tiny))
    root = vectors * np.sqrt(values) @ vectors.T
    inverse = vectors / np.sqrt(values) @ vectors.T
    _, leading = np.linalg.eigh(root @ covariance @ root)
    leading = leading[:, ::-1][:, :rank]
    return (leading.T @ inverse).astype(np.float32), (leading.T @ root).astype(np.float32)


@register
class SketchIndex(KeyIndex):
    """Scan of a query-aware sketch of the keys, exact scores for the best of it.

    A query that is not finite gets the exact answer, and so does a search for more than one key in four (after
    `rescore`), for which a sketch saves nothing.
    """

    kind: ClassVar[str] = "sketch"
    trains: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"key_bytes", "rescore"})

    def __init__(
        self,
        keys: KeyPieces,
        blocks: KeyBlocks,
        query_side: npt.NDArray[np.float32],
        key_side: npt.NDArray[np.float32],
        rescore: int,
    ) -> None:
        """blocks: of the projected keys; query_side, key_side (rank, head_dim): A and B. Callers use `build`."""
        self._keys = keys
        self._blocks = blocks
        self._query_side = query_side
        self._key_side = key_side
        self._rescore = rescore
        self._measured = len(self)  # how many keys the steps were taken from

    @classmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> SketchIndex:
        """See KeyIndex.build. Options:

        key_bytes: most bytes per key, at least 8 (default head_dim / 2).
        rescore: how many keys get an exact score for each that is wanted (default 4).
        Without keys the projection keeps what queries have most of. Raises ConfigError for other values or without
        finite training queries, ShapeError for keys that are not finite.
        """
        pieces = KeyPieces(keys, fmt)
        dim = fmt.dim_of(keys)
        budget = options.pop("key_bytes", max(LEAST_BYTES, dim // 2))
        rescore = options.pop("rescore", RESCORE)
        if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < LEAST_BYTES:
            raise ConfigError(f"key_bytes={budget!r} must be a whole number of at least {LEAST_BYTES}")
        check_rescore(rescore)
        queries, _ = check_training(queries, None, dim, len(keys))
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not len(rows):
            raise ConfigError("sketch needs finite training queries, got none; pass queries (heads, m, head_dim)")
        sample = to_float32(keys[:: max(1, len(keys) // SAMPLED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise ShapeError("keys to be sketched must be finite; leave the others out or use index='flat'")
        known = sample if len(sample) else np.eye(dim, dtype=np.float32)
        sides = learn_projection(rows, known, dim)
        variances = (known.astype(np.float64) @ sides[1].T.astype(np.float64)).var(axis=0)
        wide, narrow = allocate(variances, int(budget))
        query_side, key_side = (_cut(side, wide + narrow) for side in sides)
        nothing = empty_blocks(np.empty((0, len(key_side)), np.float32), wide, 0)
        index = cls(pieces, nothing, query_side, key_side, int(rescore))
        index._encode_all(pieces.within(len(keys)), len(keys))
        return index

    def _encode_all(self, arrays: list[npt.NDArray[Any]], room: int) -> None:
        """Code the keys of `arrays`, ids from 0 on, with steps that fit them. Raises ShapeError."""
        total = sum(len(array) for array in arrays)
        every = max(1, total // SAMPLED_KEYS)
        sample = [_projected(array[::every], self._keys.fmt, self._key_side) for array in arrays]
        numbers = np.concatenate(sample) if sample else np.empty((0, len(self._key_side)), np.float32)
        _check_finite(numbers, 0, every)
        self._blocks = empty_blocks(numbers, self._blocks.wide, room)
        self._measured, written = total, 0
        for array in arrays:
            for first in range(0, len(array), PROJECTED_AT_ONCE):
                written += self._encode(array[first : first + PROJECTED_AT_ONCE], written)

    def _encode(self, keys: npt.NDArray[Any], start: int) -> int:
        numbers = _projected(keys, self._keys.fmt, self._key_side)
        _check_finite(numbers, start, 1)
        blocks = self._blocks
        write_blocks(numbers, blocks.blocks, start, blocks.mean, blocks.step, blocks.wide)
        return len(keys)

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, projected as the first ones were; see KeyIndex.insert. Raises ShapeError.

        All keys are coded anew when there are twice as many as the steps were taken from, or a far larger one comes.
        """
        self._keys.check(keys)
        length, total = len(self), len(self) + len(keys)
        numbers = _projected(keys, self._keys.fmt, self._key_side)
        _check_finite(numbers, length, 1)
        if len(keys) and (total >= 2 * self._measured or out_of_reach(self._blocks, numbers)):
            self._encode_all([*self._keys.within(length), keys], total + total // 4)
        else:
            self._blocks = blocks = with_room(self._blocks, total, length)
            write_blocks(numbers, blocks.blocks, length, blocks.mean, blocks.step, blocks.wide)
        self._keys.add(keys)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        return True

    def rescore_count(self, k: int) -> int:
        """How many keys get an exact score when the best k are wanted."""
        return rescore_count(self._rescore, k)

    def search_arguments(self) -> SketchArguments:
        """What a compiled search of this index needs besides the keys; another object after every change."""
        return SketchArguments(self._blocks, self._query_side)

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k of the keys that the sketch puts first; see KeyIndex.search."""
        queries, k = check_search(queries, self.head_dim, k, limit)
        stop = len(self) if limit is None else min(int(limit), len(self))
        kept = self.rescore_count(k)
        if stop < SCAN_SHARE * kept:
            return search_pieces(self._keys.within(stop), queries, k, self._keys.fmt)
        found, lost = best_of_blocks(self._blocks, stop, queries, self._query_side, kept)
        ids, scores = self._keys.best(found, queries, k)
        if lost.any():
            exact = search_pieces(self._keys.within(stop), queries[lost], k, self._keys.fmt)
            ids[lost], scores[lost] = exact.ids, exact.scores
        return SearchResult(ids, scores, len(queries) * stop)

    def state(self) -> dict[str, StateValue]:
        """See KeyIndex.state."""
        blocks = self._blocks
        return {
            "rescore": self._rescore,
            "wide": blocks.wide,
            "blocks": blocks.blocks[: -(-len(self) // BLOCK)],
            "mean": blocks.mean,
            "step": blocks.step,
            "reach": blocks.reach,
            "query_side": self._query_side,
            "key_side": self._key_side,
        }

    @classmethod
    def from_state(cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, StateValue]) -> SketchIndex:
        """See KeyIndex.from_state."""
        rescore, wide, step = state.get("rescore"), state.get("wide"), state.get("step")
        rank = step.shape[0] if isinstance(step, np.ndarray) and step.ndim == 1 else -1
        if not isinstance(rescore, int) or not isinstance(wide, int) or not 0 <= wide <= rank:
            raise InputDataError("the state is not one of a sketch over such keys; build the index again from its keys")
        rows, width = -(-len(keys) // BLOCK), key_bytes(wide, rank - wide) * BLOCK
        expected: dict[str, tuple[type, tuple[int, ...]]] = {"blocks": (np.uint8, (rows, width))}
        expected |= {name: (np.float32, (rank,)) for name in ("mean", "step", "reach")}
        expected |= {name: (np.float32, (rank, fmt.dim_of(keys))) for name in ("query_side", "key_side")}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (dtype, shape) in expected.items():
            array = state.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "nothing"
                raise InputDataError(
                    f"{name} of the sketch must be {np.dtype(dtype)} {shape}, got {given}; build the index again"
                )
            if not np.isfinite(array).all():
                raise InputDataError(f"{name} of the sketch must be finite; build the index again")
            arrays[name] = array
        blocks = aligned_empty((rows + rows % 2, width), np.uint8)
        blocks[:rows] = arrays["blocks"]
        mean, step, reach, query_side, key_side = (np.array(arrays[name]) for name in list(expected)[1:])
        return cls(KeyPieces(keys, fmt), KeyBlocks(blocks, mean, step, reach, wide), query_side, key_side, rescore)

    def __len__(self) -> int:
        return self._keys.length

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self._keys.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the projection."""
        return int(self._blocks.nbytes + self._query_side.nbytes + self._key_side.nbytes)


def _cut(side: npt.NDArray[np.float32], rank: int) -> npt.NDArray[np.float32]:
    """The first `rank` rows, zeros behind the last."""
    rows = np.zeros((rank, side.shape[1]), np.float32)
    rows[: len(side)] = side[:rank]
    return rows


def _check_finite(numbers: npt.NDArray[np.float32], start: int, every: int) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(bad):
        raise ShapeError(
            f"keys to be sketched must be finite, got {len(bad)} with NaN or infinity, the first at id "
            f"{start + int(bad[0]) * every}; leave them out or use index='flat'"
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
