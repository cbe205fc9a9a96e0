"""Two indexes of faiss behind the interface: `ivf` (inverted lists) and `hnsw` (graph), for keys searched by
inner product.

They are the baselines of the RetrievalAttention paper (section 2.3): built from the keys alone, they do not know
where attention's queries lie. faiss holds its own float32 copy of the keys, so scores are exact. It is imported
on first use. Importing this module registers the two kinds.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numba
import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.testing import (
    MAX_KEYS,
    Format,
    HeadShape,
    HostBytes,
    KeyIndex,
    SearchResult,
    StateValue,
    Training,
    check_rows,
    check_search,
    check_threads,
    order_codes,
    register,
    to_float32,
)

IVF_CENTROIDS = 512
IVF_PROBED_SHARE = 150 / 512
"""The paper's way of reaching its recall at 128K: 150 of 512 lists."""
KEYS_PER_CENTROID = 64


@dataclass(frozen=True)
class IvfOptions:
    """centroids: lists; None: 512, fewer below 32K keys. nprobe: lists per search; None: 29 % of them.

    iterations, seed: of k-means. Raises ConfigError for other values.
    """

    centroids: int | None = None
    nprobe: int | None = None
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("centroids", "nprobe", "iterations"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        _check_int("seed", self.seed, 0)


@dataclass(frozen=True)
class HnswOptions:
    """m: neighbours per key and level (twice on the lowest).

    ef_construction, ef_search: width of the beam when building and searching (at least k). metric: what neighbours are
    near in, "ip" or "l2" (searches always score by inner product; graphs built by inner product alone are poor on keys
    of uneven norm). build_threads: more than 1 is faster, but then two builds are not the same graph. seed: of the
    keys' levels. Raises ConfigError for other values.
    """

    m: int = 16
    ef_construction: int = 100
    ef_search: int = 200
    metric: str = "l2"
    build_threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("m", 2), ("ef_construction", 1), ("ef_search", 1), ("seed", 0)):
            _check_int(name, getattr(self, name), least)
        if self.metric not in ("ip", "l2"):
            raise ConfigError(f'metric={self.metric!r} must be "ip" or "l2"')
        check_threads(self.build_threads)


class _FaissIndex(KeyIndex):
    """What both kinds share: float32 copies, padding of short answers, exact fill-up, saving."""

    def __init__(self, head_dim: int, fmt: Format, options: Any) -> None:
        """An empty index. options: of the kind; they may be replaced between searches."""
        self._fmt, self._head_dim, self.options = fmt, head_dim, options
        self._index: Any = None  # made when the first key comes: faiss cannot train on nothing

    @classmethod
    def host_bytes(cls, options: Any, head: HeadShape) -> tuple[HostBytes, ...]:
        """See KeyIndex.host_bytes."""
        return (HostBytes(4 * head.head_dim + cls.link_bytes(options), None, "a float32 copy and links per key"),)

    @staticmethod
    @abstractmethod
    def link_bytes(options: Any) -> int:
        """Bytes per key beside the copy."""

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: Any, training: Training) -> Self:
        """See KeyIndex.make; nothing is trained."""
        check_rows("keys", keys, fmt, 2)
        index = cls(fmt.dim_of(keys), fmt, options)
        index.insert(keys)
        return index

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> Self:
        """The saved index; see KeyIndex.from_state."""
        index = cls(fmt.dim_of(keys), fmt, cls._saved_options(state))
        index._restore(state, len(keys))
        return index

    @classmethod
    @abstractmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> Any:
        """The options whose plain values are in `state`. Raises InputDataError."""

    @abstractmethod
    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        """An empty, trained faiss index for keys like these (n >= 1, head_dim)."""

    @abstractmethod
    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, Any, int]:
        """faiss's scores and ids (n, k) of ids below limit, and distances computed; each effort tries harder."""

    @abstractmethod
    def _add(self, keys: npt.NDArray[np.float32]) -> None:
        """Append keys to the faiss index."""

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append copies of keys (n, head_dim). Raises ShapeError for another shape or dtype, NaN or infinity."""
        check_rows("keys", keys, self._fmt, 2)
        if self._fmt.dim_of(keys) != self._head_dim:
            raise ShapeError(
                f"keys must be (n, {self._head_dim}) as the index is, got {(len(keys), self._fmt.dim_of(keys))}"
            )
        if len(self) + len(keys) > MAX_KEYS:
            raise ShapeError(f"an index holds at most {MAX_KEYS} keys, got {len(self) + len(keys)}; use two")
        if not len(keys):
            return
        plain = to_float32(keys, self._fmt)
        if not np.isfinite(plain).all():
            raise ShapeError(f"index {self.kind!r} needs finite keys, got NaN or infinity; use flat for such keys")
        if self._index is None:
            self._index = self._new(plain)
        self._add(plain)

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """See KeyIndex.search. A query that found fewer than k keys is searched again more widely, at last exactly.

        A query with NaN or infinity gets some keys, scored as the arithmetic has it.
        """
        queries, k = check_search(queries, self._head_dim, k, limit)
        stop = len(self) if limit is None else min(int(limit), len(self))
        kept = min(k, stop)
        ids = np.full((len(queries), k), -1, np.int32)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        scanned = 0
        finite = np.array([bool(np.isfinite(row).all()) for row in queries], np.bool_)
        asked = np.where(finite[:, None], queries, np.float32(0))
        open_rows = np.arange(len(queries) if kept else 0)
        with _faiss_threads(numba.get_num_threads()):
            for effort in range(3):
                if not len(open_rows):
                    break
                found_scores, found_ids, work = self._search(asked[open_rows], kept, stop, effort)
                scanned = max(scanned, work) if effort else work
                ids[open_rows, :kept], scores[open_rows, :kept] = found_ids, found_scores
                open_rows = open_rows[(found_ids < 0).any(1)]
            for row in open_rows:
                exact = self._vectors(np.arange(stop)) @ asked[row]
                best = np.argsort(-exact, kind="stable")[:kept]
                ids[row, :kept], scores[row, :kept] = best, exact[best]
                scanned += stop
            for row in np.flatnonzero(~finite) if kept else ():
                with np.errstate(invalid="ignore", over="ignore"):
                    scores[row, :kept] = self._vectors(ids[row, :kept]) @ queries[row]
        return _ordered(ids, scores, scanned)

    def _vectors(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """The keys called `ids`, (len(ids), head_dim) float32."""
        found: npt.NDArray[np.float32] = self._index.reconstruct_batch(ids.astype(np.int64))
        return found

    def state(self) -> dict[str, StateValue]:
        """faiss's own serialisation, the float32 keys with it."""
        faiss = _faiss()

        data = np.empty(0, np.uint8) if self._index is None else faiss.serialize_index(self._index)
        plain = {name: 0 if value is None else value for name, value in vars(self.options).items()}
        return {"faiss": data, **plain}

    def _restore(self, state: Mapping[str, StateValue], length: int) -> None:
        faiss = _faiss()

        data = state.get("faiss")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
            raise InputDataError(f"the state of an index of kind {self.kind!r} lacks its faiss data; build it again")
        if not data.size:
            return
        try:
            self._index = faiss.deserialize_index(np.array(data))
        except RuntimeError as error:
            raise InputDataError(
                f"faiss cannot read the saved {self.kind!r} index ({error}); build it again"
            ) from error
        if self._index.ntotal != length or self._index.d != self._head_dim:
            raise InputDataError(
                f"the saved {self.kind!r} index holds {self._index.ntotal} keys of {self._index.d}, its keys are "
                f"{length} of {self._head_dim}; build it again"
            )

    def __len__(self) -> int:
        return 0 if self._index is None else int(self._index.ntotal)

    @property
    def head_dim(self) -> int:
        """Elements of one key."""
        return self._head_dim


@register
class IvfIndex(_FaissIndex):
    """Inverted lists around k-means centroids of the keys; the `nprobe` lists that score best are scanned."""

    kind: ClassVar[str] = "ivf"
    Options = IvfOptions

    @staticmethod
    def link_bytes(options: IvfOptions) -> int:
        """A 64-bit id and a list position."""
        return 16

    @classmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> IvfOptions:
        saved: dict[str, Any] = {name: int(_number(state, name)) for name in vars(IvfOptions())}
        return IvfOptions(**{**saved, **{name: saved[name] or None for name in ("centroids", "nprobe")}})

    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        faiss = _faiss()

        wanted = self.options.centroids or min(IVF_CENTROIDS, len(keys) // KEYS_PER_CENTROID)
        lists = max(1, min(wanted, len(keys)))
        quantizer = faiss.IndexFlatIP(self._head_dim)
        index = faiss.IndexIVFFlat(quantizer, self._head_dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.cp.seed = self.options.iterations, self.options.seed
        index.cp.min_points_per_centroid = 1  # no warnings on stderr about small sets
        with _faiss_threads(1):  # k-means in several threads is not the same in every bit
            index.train(keys)
        index.set_direct_map_type(faiss.DirectMap.Array)  # reconstruction by id
        return index

    def _add(self, keys: npt.NDArray[np.float32]) -> None:
        with _faiss_threads(1):
            self._index.add(keys)

    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, Any, int]:
        faiss = _faiss()

        lists = int(self._index.nlist)
        nprobe = min(lists, self.options.nprobe or max(1, round(IVF_PROBED_SHARE * lists)))
        nprobe = (nprobe, min(lists, 4 * nprobe), lists)[effort]
        parameters = faiss.SearchParametersIVF(nprobe=nprobe, sel=_selector(limit, len(self)))
        before = faiss.cvar.indexIVF_stats.ndis
        scores, ids = self._index.search(queries, k, params=parameters)
        return scores, ids, int(faiss.cvar.indexIVF_stats.ndis - before)

    @property
    def nbytes(self) -> int:
        """float32 keys, 64-bit ids, list positions and centroids."""
        if self._index is None:
            return 0
        return len(self) * (4 * self._head_dim + 8 + 8) + int(self._index.nlist) * 4 * self._head_dim


@register
class HnswIndex(_FaissIndex):
    """A navigable small-world graph over the keys."""

    kind: ClassVar[str] = "hnsw"
    Options = HnswOptions

    @staticmethod
    def link_bytes(options: HnswOptions) -> int:
        """Two lists of neighbours on the lowest level, about one more above it, and the place of the lists."""
        return 4 * 3 * options.m + 12

    @classmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> HnswOptions:
        names = ("m", "ef_construction", "ef_search", "build_threads", "seed")
        saved = {name: int(_number(state, name)) for name in names}
        saved["build_threads"] = min(saved["build_threads"], vars(numba.config)["NUMBA_NUM_THREADS"])
        return HnswOptions(metric=str(state.get("metric")), **saved)

    def _restore(self, state: Mapping[str, StateValue], length: int) -> None:
        super()._restore(state, length)
        if self._index is not None:
            self._searches_by("ip")

    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        faiss = _faiss()

        index = faiss.IndexHNSWFlat(self._head_dim, self.options.m, self._faiss_metric(self.options.metric))
        index.hnsw.efConstruction = self.options.ef_construction
        return index

    def _add(self, keys: npt.NDArray[np.float32]) -> None:
        # the generator of levels is not saved with an index: start it anew where the keys stand
        self._index.hnsw.rng = _faiss().RandomGenerator(self.options.seed + len(self))
        self._searches_by(self.options.metric)
        try:
            with _faiss_threads(self.options.build_threads):
                self._index.add(keys)
        finally:
            self._searches_by("ip")

    def _searches_by(self, metric: str) -> None:
        """The same graph and vectors, other distances: faiss takes them from the storage's metric."""
        index, number = self._index, self._faiss_metric(metric)
        index.metric_type = number
        index.storage.metric_type = number
        index.hnsw.is_similarity = metric == "ip"  # releases before 1.15 ask the storage and ignore this

    @staticmethod
    def _faiss_metric(metric: str) -> int:
        faiss = _faiss()

        return int(faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2)

    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, Any, int]:
        faiss = _faiss()

        beam = min(max(self.options.ef_search, k) * 8**effort, max(k, len(self)))
        parameters = faiss.SearchParametersHNSW(efSearch=beam, sel=_selector(limit, len(self)))
        before = faiss.cvar.hnsw_stats.ndis
        scores, ids = self._index.search(queries, k, params=parameters)
        return scores, ids, int(faiss.cvar.hnsw_stats.ndis - before)

    @property
    def nbytes(self) -> int:
        """float32 keys, neighbour lists, and per key its level and the place of its lists."""
        if self._index is None:
            return 0
        neighbours = int(self._index.hnsw.neighbors.size())
        return len(self) * (4 * self._head_dim + 4 + 8) + 4 * neighbours


def _faiss() -> Any:
    """faiss, imported when first needed: it brings a second OpenMP and BLAS into the process."""
    return importlib.import_module("faiss")


def _selector(limit: int, length: int) -> Any:
    """faiss's filter for ids below limit, None where nothing needs filtering."""
    faiss = _faiss()

    return None if limit >= length else faiss.IDSelectorRange(0, limit)


def _ordered(ids: npt.NDArray[np.int32], scores: npt.NDArray[np.float32], scanned: int) -> SearchResult:
    """Best first, the lower id between equal scores, -1 last."""
    by_id = np.argsort(ids, axis=1, kind="stable")
    ids, scores = np.take_along_axis(ids, by_id, axis=1), np.take_along_axis(scores, by_id, axis=1)
    scores = np.where(ids < 0, np.float32(-np.inf), scores)
    order = np.argsort(-order_codes(scores, ids), axis=1, kind="stable")
    return SearchResult(np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1), scanned)


@contextlib.contextmanager
def _faiss_threads(count: int) -> Iterator[None]:
    """faiss's parallel regions of this thread on `count` threads inside the block."""
    faiss = _faiss()

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number >= {least}")


def _number(state: Mapping[str, StateValue], name: str) -> int | float:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputDataError(f"the saved index lacks {name} (got {value!r}); build it again")
    return value
