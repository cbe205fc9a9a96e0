"""Two indexes of faiss behind the interface: `ivf` (inverted lists) and `hnsw` (graph), for keys searched by
inner product.

They are the baselines of the RetrievalAttention paper (section 2.3): built from the keys alone, they do not know
where attention's queries lie. faiss selects candidates by its own float32 copy of the keys. It is imported
on first use. Importing this module registers the two kinds.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numba
import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.testing import (
    CompiledSearch,
    Format,
    HeadShape,
    HeldMemory,
    HostBytes,
    IndexMemory,
    KeyIndex,
    SearchRequest,
    StateValue,
    StoredKeys,
    Training,
    called_search,
    check_threads,
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
    """Common part of both kinds: float32 copies, wider searches for short answers, saving."""

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, options: Any) -> None:
        """keys: those of the faiss index, which the caller sets. options: of the kind; may be replaced at any time."""
        self._keys, self.options = StoredKeys(keys, fmt), options
        self._index: Any = None  # made when the first key comes: faiss cannot train on nothing

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: Any, training: Training) -> Self:
        """Build without training."""
        index = cls(keys[:0], fmt, options)
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
        index = cls(keys, fmt, cls._saved_options(state))
        index._restore(state)
        return index

    @classmethod
    @abstractmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> Any:
        """The options whose plain values are in `state`. Raises InputDataError."""

    @abstractmethod
    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        """An empty, trained faiss index for keys like these (n >= 1, head_dim)."""

    @abstractmethod
    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, int]:
        """faiss's ids (n, k) below limit, and distances computed; each effort tries harder."""

    @abstractmethod
    def _add(self, keys: npt.NDArray[np.float32]) -> None:
        """Append keys to the faiss index."""

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append copies of keys (n, head_dim). Raises ShapeError for another shape or dtype, NaN or infinity."""
        self._keys.check(keys)
        if not len(keys):
            return
        plain = to_float32(keys, self._keys.fmt)
        if not np.isfinite(plain).all():
            raise ShapeError(f"index {self.kind!r} needs finite keys, got NaN or infinity; use flat for such keys")
        if self._index is None:
            self._index = self._new(plain)
        self._add(plain)
        self._keys.add(keys)

    def task(self, request: SearchRequest) -> CompiledSearch:
        return called_search(
            request,
            self._keys.head_dim,
            request.k,
            lambda queries, limit, threads: self._candidates(queries, request.k, limit, threads),
        )

    def _candidates(
        self, queries: npt.NDArray[np.float32], k: int, limit: int, threads: int
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Return the ids that faiss finds, searching more widely for a query with fewer than k; and scores computed.

        A query that still has fewer gets none, and one with NaN or infinity: they are answered by a scan.
        """
        kept = min(k, limit)
        ids = np.full((len(queries), kept), -1, np.int32)
        scanned = 0
        open_rows = np.flatnonzero(np.isfinite(queries).all(axis=1))
        with _one_at_a_time, _faiss_threads(threads):
            for effort in range(3):
                if not len(open_rows):
                    break
                found, work = self._search(queries[open_rows], kept, limit, effort)
                scanned = max(scanned, work) if effort else work
                ids[open_rows] = found
                open_rows = open_rows[(found < 0).any(axis=1)]
        lost = (ids < 0).any(axis=1)
        ids[lost] = -1
        return ids, scanned + int(lost.sum()) * limit

    def state(self) -> dict[str, StateValue]:
        """faiss's own serialisation, the float32 keys with it."""
        faiss = _faiss()

        data = np.empty(0, np.uint8) if self._index is None else faiss.serialize_index(self._index)
        plain = {name: 0 if value is None else value for name, value in vars(self.options).items()}
        return {"faiss": data, **plain}

    def _restore(self, state: Mapping[str, StateValue]) -> None:
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
        if self._index.ntotal != len(self) or self._index.d != self._keys.head_dim:
            raise InputDataError(
                f"the saved {self.kind!r} index holds {self._index.ntotal} keys of {self._index.d}, its keys are "
                f"{len(self)} of {self._keys.head_dim}; build it again"
            )


def _copy_and(links: Callable[[Any], int]) -> Callable[[Any, HeadShape], IndexMemory]:
    """Facts of a kind: a float32 copy of every key, and links(options) bytes."""
    return lambda options, head: IndexMemory(
        (HostBytes(4 * head.head_dim + links(options), None, "a float32 copy and links per key"),)
    )


# a 64-bit id and a list position
@register(memory=_copy_and(lambda options: 16))
class IvfIndex(_FaissIndex):
    """Inverted lists around k-means centroids of the keys; the `nprobe` lists that score best are scanned."""

    kind: ClassVar[str] = "ivf"
    Options = IvfOptions

    @classmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> IvfOptions:
        saved: dict[str, Any] = {name: int(_number(state, name)) for name in vars(IvfOptions())}
        return IvfOptions(**{**saved, **{name: saved[name] or None for name in ("centroids", "nprobe")}})

    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        faiss = _faiss()

        wanted = self.options.centroids or min(IVF_CENTROIDS, len(keys) // KEYS_PER_CENTROID)
        lists = max(1, min(wanted, len(keys)))
        quantizer = faiss.IndexFlatIP(self._keys.head_dim)
        index = faiss.IndexIVFFlat(quantizer, self._keys.head_dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.cp.seed = self.options.iterations, self.options.seed
        index.cp.min_points_per_centroid = 1  # no warnings on stderr about small sets
        with _faiss_threads(1):  # k-means in several threads is not the same in every bit
            index.train(keys)
        index.set_direct_map_type(faiss.DirectMap.Array)  # reconstruction by id
        return index

    def _add(self, keys: npt.NDArray[np.float32]) -> None:
        with _faiss_threads(1):
            self._index.add(keys)

    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, int]:
        faiss = _faiss()

        lists = int(self._index.nlist)
        nprobe = min(lists, self.options.nprobe or max(1, round(IVF_PROBED_SHARE * lists)))
        nprobe = (nprobe, min(lists, 4 * nprobe), lists)[effort]
        parameters = faiss.SearchParametersIVF(nprobe=nprobe, sel=_selector(limit, len(self)))
        before = faiss.cvar.indexIVF_stats.ndis
        _, ids = self._index.search(queries, k, params=parameters)
        return ids, int(faiss.cvar.indexIVF_stats.ndis - before)

    @property
    def memory(self) -> HeldMemory:
        """float32 keys, 64-bit ids, list positions and centroids."""
        if self._index is None:
            return HeldMemory(0)
        return HeldMemory(
            len(self) * (4 * self._keys.head_dim + 8 + 8) + int(self._index.nlist) * 4 * self._keys.head_dim
        )


# two lists of neighbours on the lowest level, about one more above it, and the place of the lists
@register(memory=_copy_and(lambda options: 4 * 3 * options.m + 12))
class HnswIndex(_FaissIndex):
    """A navigable small-world graph over the keys."""

    kind: ClassVar[str] = "hnsw"
    Options = HnswOptions

    @classmethod
    def _saved_options(cls, state: Mapping[str, StateValue]) -> HnswOptions:
        names = ("m", "ef_construction", "ef_search", "build_threads", "seed")
        saved = {name: int(_number(state, name)) for name in names}
        saved["build_threads"] = min(saved["build_threads"], vars(numba.config)["NUMBA_NUM_THREADS"])
        return HnswOptions(metric=str(state.get("metric")), **saved)

    def _restore(self, state: Mapping[str, StateValue]) -> None:
        super()._restore(state)
        if self._index is not None:
            self._searches_by("ip")

    def _new(self, keys: npt.NDArray[np.float32]) -> Any:
        faiss = _faiss()

        index = faiss.IndexHNSWFlat(self._keys.head_dim, self.options.m, self._faiss_metric(self.options.metric))
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

    def _search(self, queries: npt.NDArray[np.float32], k: int, limit: int, effort: int) -> tuple[Any, int]:
        faiss = _faiss()

        beam = min(max(self.options.ef_search, k) * 8**effort, max(k, len(self)))
        parameters = faiss.SearchParametersHNSW(efSearch=beam, sel=_selector(limit, len(self)))
        before = faiss.cvar.hnsw_stats.ndis
        _, ids = self._index.search(queries, k, params=parameters)
        return ids, int(faiss.cvar.hnsw_stats.ndis - before)

    @property
    def memory(self) -> HeldMemory:
        """float32 keys, neighbour lists, and per key its level and the place of its lists."""
        if self._index is None:
            return HeldMemory(0)
        neighbours = int(self._index.hnsw.neighbors.size())
        return HeldMemory(len(self) * (4 * self._keys.head_dim + 4 + 8) + 4 * neighbours)


def _faiss() -> Any:
    """faiss, imported when first needed: it brings a second OpenMP and BLAS into the process."""
    return importlib.import_module("faiss")


def _selector(limit: int, length: int) -> Any:
    """faiss's filter for ids below limit, None where nothing needs filtering."""
    faiss = _faiss()

    return None if limit >= length else faiss.IDSelectorRange(0, limit)


_one_at_a_time = threading.Lock()
"""faiss counts distances for the whole process, and each search takes all threads that it may."""


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
