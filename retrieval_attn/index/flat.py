"""The exact index: every key is scored, in one pass for all queries of a head's group (keys are read once).

It needs no training and no memory, and is the reference that approximate kinds are measured against. With
codes="int8" it scores one byte per channel instead and gives only the best of those their exact scores: half the
bytes of bfloat16 or less, and a recall of .99 and more, for one byte of memory per channel. Keys that are stored as
int8 are such bytes themselves: only the query is rounded, and nothing is held in addition.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index.base import (
    HeadShape,
    HostBytes,
    KeyIndex,
    SearchResult,
    StateValue,
    Training,
    check_wanted,
    one_result,
)
from retrieval_attn.index.flat_task import coded_search, exact_search, prepare_codes
from retrieval_attn.index.formats import Format, check_queries, kernel_view, row_steps
from retrieval_attn.index.kernels.coded import best_codes
from retrieval_attn.index.kernels.codes import (
    Codes,
    check_finite,
    code_width,
    codes_from_state,
    encode_keys,
    encode_query,
    extend_codes,
)
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.kernels.scan import TILE_KEYS, scan_exact
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.runs import KeyRuns, RunsIndex, stacked, unpack
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest
from retrieval_attn.index.threads import kernel_threads

MIN_KEYS_PER_TASK = 2048
TASKS_PER_THREAD = 4
RESCORE = 1
"""Keys scored exactly per key wanted; the spare ones alone (57 for 100) give recall@100 of 1.000 where tried."""
MIN_SPARE = 32
SCAN_SHARE = 4
"""If more than one key in SCAN_SHARE would be scored again, all are scored exactly instead."""
POOL_BYTES = 64 << 20
"""Most memory for candidate pools in one pass; more queries are searched in several passes."""


@njit(nogil=True, cache=True)
def _scan(keys, queries, num_queries, start, stop, k, pool):
    """`scan_exact` without a bound, with scratch of its own."""
    counts = np.empty(num_queries, np.int64)
    floors = np.full(num_queries, EMPTY, np.int64)
    bounds = np.empty(num_queries, np.float32)
    scores = np.empty((TILE_QUERIES, TILE_KEYS), np.float32)
    scan_exact(keys, queries, num_queries, start, stop, k, pool, counts, floors, bounds, scores)


@njit(parallel=True, nogil=True, cache=True)
def _scan_heads(keys, length, queries, num_queries, splits, k, pools):
    """`_scan` of every head in parts: pools (heads, splits, num_queries, capacity), queries (heads, padded, d).

    keys (at least heads, at least length, d).
    """
    heads = queries.shape[0]
    for task in prange(heads * splits):
        head = task // splits
        split = task % splits
        start = length * split // splits
        stop = length * (split + 1) // splits
        _scan(keys[head], queries[head], num_queries, start, stop, k, pools[head, split])


def search_exact(keys: npt.NDArray[Any], queries: npt.NDArray[np.float32], k: int, fmt: Format) -> SearchResult:
    """Exact best k of each head: keys (heads, n, d) in `fmt`, queries (heads, m, d) float32 C-contiguous.

    Rows must be contiguous, the other strides are free. Returns ids and scores (heads, m, k); the result
    does not depend on the number of threads. The caller checks shapes.
    """
    heads, length = keys.shape[:2]
    num_queries = queries.shape[1]
    ids = np.full((heads, num_queries, k), -1, np.int32)
    scores = np.full((heads, num_queries, k), -np.inf, np.float32)
    if length and num_queries and heads:
        kept = min(k, length)
        splits = _num_splits(heads, length)
        capacity = min(2 * kept + 64, -(-length // splits) + 1)
        capacity = max(capacity, kept)
        at_once = max(TILE_QUERIES, POOL_BYTES // (8 * heads * splits * capacity))
        for first in range(0, num_queries, at_once):
            rows = slice(first, min(first + at_once, num_queries))
            best = _best(keys, queries[:, rows], kept, fmt, splits, capacity)
            unpack(best, ids[:, rows, :kept], scores[:, rows, :kept])
    return SearchResult(ids, scores, heads * num_queries * length)


def _best(
    keys: npt.NDArray[Any], queries: npt.NDArray[np.float32], k: int, fmt: Format, splits: int, capacity: int
) -> npt.NDArray[np.int64]:
    """Packed candidates (heads, queries, k), best first; k <= keys.shape[1]."""
    heads, num_queries, dim = queries.shape
    padded = -(-num_queries // TILE_QUERIES) * TILE_QUERIES
    tiles = np.zeros((heads, padded, dim), np.float32)
    tiles[:, :num_queries] = queries
    pools = np.empty((heads, splits, num_queries, capacity), np.int64)
    with kernel_threads(None):
        _scan_heads(one_layout(kernel_view(keys, fmt)), keys.shape[1], tiles, num_queries, splits, k, pools)
    best = pools[..., :k].transpose(0, 2, 1, 3).reshape(heads, num_queries, splits * k)
    if splits > 1:
        best.partition(splits * k - k, axis=-1)
        best = best[..., -k:]
    return np.ascontiguousarray(np.sort(best, axis=-1)[..., ::-1])


def _num_splits(heads: int, length: int) -> int:
    """Parts that the keys of one head are cut into: enough tasks to balance, none too small to pay for itself."""
    wanted = -(-TASKS_PER_THREAD * numba.get_num_threads() // heads)
    return max(1, min(wanted, length // MIN_KEYS_PER_TASK))


@dataclass(frozen=True)
class FlatOptions:
    """codes: "none" (an exact scan) or "int8" (a scan of coded keys, then exact scores of the best).

    Raises ConfigError for another value.
    """

    codes: str = "none"

    def __post_init__(self) -> None:
        if self.codes not in ("none", "int8"):
            raise ConfigError(f"codes={self.codes!r} must be 'none' or 'int8'")


@register
class FlatIndex(RunsIndex):
    """Search of all keys, over views of the caller's.

    A NaN score ranks below -inf; infinities rank as numbers do. A query that is not finite gets the exact answer
    with codes, too.
    """

    kind: ClassVar[str] = "flat"
    Options = FlatOptions
    hides_first_keys: ClassVar[bool] = True

    def __init__(
        self, keys: npt.NDArray[Any], fmt: Format, codes: Codes | None = None, measured: int | None = None
    ) -> None:
        """keys (n, head_dim) of dtype fmt.dtype, rows contiguous; n may be 0. codes: of these keys, or None for an
        exact scan. measured: how many keys their range was taken from, None: all. Raises ShapeError.
        """
        self._keys = KeyRuns(keys, fmt)
        self._codes = codes
        self.exact = codes is None
        self._measured = len(keys) if measured is None else measured

    @classmethod
    def host_bytes(cls, options: FlatOptions, head: HeadShape) -> tuple[HostBytes, ...]:
        """See KeyIndex.host_bytes. A scan searches the stored keys themselves; int8 keys are codes already."""
        if options.codes == "none" or head.int8:
            return super().host_bytes(options, head)
        return (HostBytes(code_width(head.head_dim), None, "a code per key"),)

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: FlatOptions, training: Training) -> FlatIndex:
        """See KeyIndex.make; nothing is trained. Raises ShapeError for codes="int8" and keys that are not finite."""
        codes = None
        if options.codes == "int8":
            codes = _no_codes(keys, fmt, 0) if fmt is Format.INT8 else encode_keys(keys, fmt)
        return cls(keys, fmt, codes)

    @property
    def codes(self) -> Codes | None:
        """The coded keys, rows [0, len(self)) written; None for an exact scan. See `scans_stored`."""
        return self._codes

    @property
    def scans_stored(self) -> bool:
        """Whether the stored int8 keys serve as codes; `codes` then has no rows, and what a query is coded against."""
        return self._codes is not None and self._keys.fmt is Format.INT8

    def rescore_count(self, k: int) -> int:
        """How many keys get an exact score when the best k are wanted."""
        return rescore_count(RESCORE, k)

    @classmethod
    def prepare(cls, options: FlatOptions, fmt: Format) -> bool:
        exact_search(fmt)
        if options.codes == "int8":
            prepare_codes(fmt)
        return True

    def compiled_search(self, request: SearchRequest) -> CompiledSearch:
        kept = self.rescore_count(request.k)
        if self._codes is None or request.visible < SCAN_SHARE * kept:
            return exact_search(request.fmt)
        return coded_search(request, self._codes, self.scans_stored, kept)

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append a view of keys (n, head_dim).

        Raises ShapeError for another shape, dtype or more than 2**31 - 1, and for coded keys that are not finite.
        All keys are coded again when there are twice as many as the range was taken from, or a far larger one comes.
        """
        self._keys.check(keys)
        fmt, length = self._keys.fmt, len(self)
        if self.scans_stored:
            _no_codes(keys, fmt, length)
        elif self._codes is not None:
            self._codes, self._measured = extend_codes(
                self._codes, keys, fmt, length, self._measured, lambda: self._keys.within(length)
            )
        self._keys.add(keys)

    def state(self) -> dict[str, StateValue]:
        if self._codes is None:
            return {"codes": "none"}
        if self.scans_stored:
            return {"codes": "int8"}
        codes = self._codes
        rows: dict[str, StateValue] = {"rows": codes.codes[: len(self)], "mean": codes.mean, "scale": codes.scale}
        return {"codes": "int8", "measured": self._measured, **rows}

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> FlatIndex:
        measured = state.get("measured")
        if state.get("codes") not in ("none", "int8") or not isinstance(measured, int | None):
            raise InputDataError("the saved state is not one of a flat index; build the index again from its keys")
        codes = None
        if state["codes"] == "int8" and fmt is Format.INT8:
            codes = _no_codes(keys[:0] if trusted else keys, fmt, 0)
        elif state["codes"] == "int8":
            codes = codes_from_state(state, len(keys), fmt.dim_of(keys), trusted)
        return cls(keys, fmt, codes, measured)

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The exact best k; see KeyIndex.search."""
        found = self.search_heads([self], check_queries("queries", queries, 2)[None], k, limit=limit)
        return SearchResult(found.ids[0], found.scores[0], found.keys_scanned)

    @classmethod
    def search_heads(
        cls, indexes: Sequence[KeyIndex], queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None
    ) -> SearchResult:
        """All heads in one kernel call where their keys lie evenly in one array, else one call per head."""
        flats = [index for index in indexes if isinstance(index, FlatIndex)]
        if len(flats) != len(indexes) or not flats:
            raise ConfigError(
                f"search_heads of flat needs at least one index of kind flat, got {[index.kind for index in indexes]}"
            )
        queries = check_queries("queries", queries, 3)
        heads, _, dim = queries.shape
        if heads != len(flats) or any(dim != flat.head_dim for flat in flats):
            raise ShapeError(
                f"queries must be ({len(flats)}, n, {flats[0].head_dim}) as the keys are, got {queries.shape}"
            )
        check_wanted(k, limit)
        if all(flat._codes is None for flat in flats):
            runs = [flat._keys.within(len(flat) if limit is None else int(limit)) for flat in flats]
            with kernel_threads(None):
                together = stacked(runs) if all(flat._keys.fmt is flats[0]._keys.fmt for flat in flats) else None
                if together is not None:
                    return search_exact(together, queries, int(k), flats[0]._keys.fmt)
        return one_result([flat._search(queries[i], int(k), limit) for i, flat in enumerate(flats)])

    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int | None) -> SearchResult:
        """One head, queries (n, head_dim); exact where codes would not save anything or have no answer."""
        codes = self._codes
        stop = len(self) if limit is None else min(int(limit), len(self))
        kept = self.rescore_count(k)
        if codes is None or stop < SCAN_SHARE * kept:
            return search_runs(self._keys.within(stop), queries, k, self._keys.fmt)
        coded = encode_query(queries, codes)
        found = self._best_stored(coded.planes, stop, kept) if self.scans_stored else None
        found = best_codes(codes.codes, stop, coded.planes, kept) if found is None else found
        ids, scores = self._keys.best(found, queries, k)
        lost = np.isnan(coded.offset)  # not finite: every key has the same code sum
        answer_lost(self._keys, stop, queries, k, lost, ids, scores)
        return SearchResult(ids, scores, len(queries) * stop)

    def _best_stored(self, planes: npt.NDArray[np.int8], stop: int, kept: int) -> npt.NDArray[np.int64]:
        """`best_codes` over the stored keys [0, stop), in however many arrays they lie."""
        found, first = [], 0
        for keys in self._keys.within(stop):
            # an id is packed as what it lacks of the largest
            found.append(best_codes(kernel_view(keys, self._keys.fmt), len(keys), planes, kept) - first)
            first += len(keys)
        if len(found) == 1:
            return found[0]
        together = np.concatenate(found, axis=1)
        together.partition(together.shape[1] - kept, axis=1)
        return together[:, -kept:]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes; of the caller's keys only views are held."""
        return 0 if self._codes is None or self.scans_stored else self._codes.nbytes


def _no_codes(keys: npt.NDArray[np.int8], fmt: Format, start: int) -> Codes:
    """Return the space of queries if stored int8 keys serve as codes. Raises ShapeError unless all are finite."""
    bad = ~np.isfinite(row_steps(keys))
    check_finite((int(bad.sum()), int(bad.argmax()) if len(bad) else 0), start)
    dim = fmt.dim_of(keys)
    return Codes(np.empty((0, code_width(dim)), np.uint8), np.zeros(dim, np.float32), np.ones(dim, np.float32))


def check_rescore(rescore: object) -> None:
    """Raise ConfigError unless `rescore` is a whole number >= 1."""
    if isinstance(rescore, bool) or not isinstance(rescore, int | np.integer) or rescore < 1:
        raise ConfigError(f"rescore={rescore!r} must be a whole number >= 1, the candidates per retrieved key")


def rescore_count(rescore: int, k: int) -> int:
    """How many of the best by code get an exact score: `rescore` per key wanted, at least a quarter and 32 more."""
    return max(rescore * k, k + k // 4 + MIN_SPARE)


def answer_lost(
    keys: KeyRuns,
    stop: int,
    queries: npt.NDArray[np.float32],
    k: int,
    lost: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
) -> int:
    """Write exact answers over keys [0, stop) in place of those of the lost queries; returns the scores computed."""
    if not lost.any():
        return 0
    exact = search_runs(keys.within(stop), queries[lost], k, keys.fmt)
    ids[lost], scores[lost] = exact.ids, exact.scores
    return exact.keys_scanned


def search_runs(runs: list[npt.NDArray[Any]], queries: npt.NDArray[np.float32], k: int, fmt: Format) -> SearchResult:
    """Exact best k over keys that lie in several arrays, ids counted through."""
    found = [search_exact(run[None], queries[None], k, fmt) for run in runs]
    if not found:
        empty = np.full((len(queries), k), -1, np.int32)
        return SearchResult(empty, np.full(empty.shape, -np.inf, np.float32), 0)
    bases = np.cumsum([0] + [len(run) for run in runs])
    ids = np.concatenate(
        [np.where(one.ids[0] < 0, -1, one.ids[0] + base) for one, base in zip(found, bases, strict=False)], axis=1
    )
    scores = np.concatenate([one.scores[0] for one in found], axis=1)
    order = np.argsort(-order_codes(scores, ids), axis=1, kind="stable")[:, :k]
    return SearchResult(
        np.take_along_axis(ids, order, axis=1).astype(np.int32),
        np.take_along_axis(scores, order, axis=1),
        sum(one.keys_scanned for one in found),
    )


def order_codes(scores: npt.NDArray[np.float32], ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """int64 that order like scores (any shape): NaN below -inf, and entries whose id is negative below all.

    -0.0 and 0.0 get the same code. Ties are left to the caller (a stable sort keeps the earlier entry first).
    """
    bits = (scores + np.float32(0.0)).view(np.int32)
    codes = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    codes = np.where(np.isnan(scores), -(2**31), codes)
    return np.where(ids < 0, -(2**32), codes)
