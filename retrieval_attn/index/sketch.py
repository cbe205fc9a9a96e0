"""A scan of keys in few dimensions: those that the queries look at. Then the best get their exact scores.

q . k is approximated by (A q) . (B k) with A, B of `rank` rows: the projection that has the least squared error over
the training queries and the keys (the leading eigenvectors of Sq^1/2 Sk Sq^1/2, with Sq the second moment of queries
and Sk the covariance of keys). B k is stored as u8 codes and all of them are scanned, one pass for all queries.
What it needs is one eigenproblem of head_dim and one matrix product per head; it depends on the data only through
the spectrum, so it degrades evenly where graphs lose single answers.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index.base import KeyIndex, SearchResult, StateValue, check_search, check_training, register
from retrieval_attn.index.coded import best_codes
from retrieval_attn.index.codes import Codes, codes_from_state, encode_keys, encode_query, extend_codes
from retrieval_attn.index.dots import TILE_QUERIES, score_tile
from retrieval_attn.index.flat import SCAN_SHARE, check_rescore, rescore_count, search_pieces
from retrieval_attn.index.formats import Format, kernel_view, to_float32
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.pieces import KeyPieces

RANK = 64
RESCORE = 10
"""Keys scored exactly per key wanted."""
SAMPLED_KEYS = 32768
"""Most keys that the projection is learned from, evenly spaced."""
FLOOR = 1e-6
"""Least eigenvalue of the queries' second moment, of its mean: directions without queries must not blow up."""
BLOCK = 64


@njit(nogil=True, cache=True)
def _project(keys, length, rows, out):
    """out[i, j] = rows[j] . keys[0, i] for i < length; rows (multiple of 4, d) float32, out (length, rows) float32."""
    scores = np.empty((TILE_QUERIES, BLOCK), np.float32)
    for tile in range(0, length, BLOCK):
        size = min(BLOCK, length - tile)
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
    """Scan of a query-aware low-rank sketch, exact scores for the best of it.

    A query that is not finite gets the exact answer, and so does a search for more than one key in four (after
    `rescore`), for which a sketch saves nothing.
    """

    kind: ClassVar[str] = "sketch"
    trains: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"rank", "rescore"})

    def __init__(
        self,
        keys: KeyPieces,
        codes: Codes,
        query_side: npt.NDArray[np.float32],
        key_side: npt.NDArray[np.float32],
        rescore: int,
    ) -> None:
        """codes: of the projected keys; query_side, key_side (rank, head_dim): A and B. Callers use `build`."""
        self._keys = keys
        self._codes = codes
        self._query_side = query_side
        self._key_side = key_side
        self._rescore = rescore
        self._measured = len(self)  # how many keys the range of the codes was taken from

    @classmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> SketchIndex:
        """See KeyIndex.build. Options:

        rank: dimensions kept, 1 to head_dim (default 64, or head_dim if that is less); a code row takes a multiple
            of 64 bytes whatever it is.
        rescore: how many keys get an exact score for each that is wanted (default 10).
        Without keys the projection keeps what queries have most of. Raises ConfigError for other values or without
        finite training queries, ShapeError for keys that are not finite.
        """
        pieces = KeyPieces(keys, fmt)
        dim = keys.shape[1]
        rank = options.pop("rank", min(RANK, dim))
        rescore = options.pop("rescore", RESCORE)
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 1 <= rank <= dim:
            raise ConfigError(f"rank={rank!r} must be a whole number from 1 to head_dim={dim}")
        check_rescore(rescore)
        queries, _ = check_training(queries, None, dim, len(keys))
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not len(rows):
            raise ConfigError("sketch needs finite training queries, got none; pass queries (heads, m, head_dim)")
        sample = to_float32(keys[:: max(1, len(keys) // SAMPLED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise ShapeError("keys to be sketched must be finite; leave the others out or use index='flat'")
        query_side, key_side = learn_projection(
            rows, sample if len(sample) else np.eye(dim, dtype=np.float32), int(rank)
        )
        codes = encode_keys(_projected(keys, fmt, key_side), Format.FLOAT32)
        return cls(pieces, codes, query_side, key_side, int(rescore))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, projected as the first ones were; see KeyIndex.insert. Raises ShapeError."""
        self._keys.check(keys)
        projected = _projected(keys, self._keys.fmt, self._key_side)
        fmt, length = self._keys.fmt, len(self)
        self._codes, self._measured = extend_codes(
            self._codes,
            projected,
            Format.FLOAT32,
            length,
            self._measured,
            lambda: [_projected(array, fmt, self._key_side) for array in self._keys.within(length)],
        )
        self._keys.add(keys)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        return True

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k of the keys that the sketch puts first; see KeyIndex.search."""
        queries, k = check_search(queries, self.head_dim, k, limit)
        stop = len(self) if limit is None else min(int(limit), len(self))
        kept = rescore_count(self._rescore, k)
        if stop < SCAN_SHARE * kept:
            return search_pieces(self._keys.within(stop), queries, k, self._keys.fmt)
        with np.errstate(invalid="ignore", over="ignore"):
            coded = encode_query((queries @ self._query_side.T).astype(np.float32), self._codes)
        ids, scores = self._keys.best(best_codes(self._codes.codes, stop, coded.planes, kept), queries, k)
        lost = np.isnan(coded.offset)
        if lost.any():
            exact = search_pieces(self._keys.within(stop), queries[lost], k, self._keys.fmt)
            ids[lost], scores[lost] = exact.ids, exact.scores
        return SearchResult(ids, scores, len(queries) * stop)

    def state(self) -> dict[str, StateValue]:
        """See KeyIndex.state."""
        codes = self._codes
        return {
            "rescore": self._rescore,
            "rows": codes.codes[: len(self)],
            "mean": codes.mean,
            "scale": codes.scale,
            "query_side": self._query_side,
            "key_side": self._key_side,
        }

    @classmethod
    def from_state(cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, StateValue]) -> SketchIndex:
        """See KeyIndex.from_state."""
        sides = [state.get("query_side"), state.get("key_side")]
        rescore = state.get("rescore")
        ranks = {side.shape for side in sides if isinstance(side, np.ndarray) and side.dtype == np.float32}
        shape = next(iter(ranks)) if len(ranks) == 1 else ()
        if (
            len(shape) != 2
            or shape[1] != keys.shape[1]
            or not isinstance(rescore, int)
            or not 1 <= shape[0] <= shape[1]
        ):
            raise InputDataError("the state is not one of a sketch over such keys; build the index again from its keys")
        codes = codes_from_state(state, len(keys), shape[0])
        return cls(KeyPieces(keys, fmt), codes, np.array(sides[0]), np.array(sides[1]), rescore)

    def __len__(self) -> int:
        return self._keys.length

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self._keys.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the projection."""
        return int(self._codes.nbytes + self._query_side.nbytes + self._key_side.nbytes)


def _projected(keys: npt.NDArray[Any], fmt: Format, key_side: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """B k of keys (n, head_dim) in `fmt`: (n, rank) float32, bit-identical however keys are cut into calls."""
    rank = len(key_side)
    rows = np.zeros((-(-rank // TILE_QUERIES) * TILE_QUERIES, key_side.shape[1]), np.float32)
    rows[:rank] = key_side
    out = np.empty((len(keys), rank), np.float32)
    if len(keys):
        _project(one_layout(kernel_view(keys, fmt)[None]), len(keys), rows, out)
    return out
