"""Lists of key ids by query centroid: training queries are clustered, and a list holds what its queries looked for.

A search probes the lists of the centroids nearest to its query, scores their keys by code and the best of those
exactly. Keys that no training list names are added to the list of the centroid that scores them highest among keys of
their size, so that every key is in one list at least. Inserted keys are scanned one by one until there are enough to
be listed in one go. Inputs and rule follow RetrievalAttention's observation that queries lie far from keys: clusters
of keys (`ivf`) answer such queries badly, clusters of queries do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index.base import SearchResult, StateValue, check_search, check_training, register
from retrieval_attn.index.flat import answer_lost, check_rescore, rescore_count, search_exact, search_pieces
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import Codes, codes_from_state, encode_keys, encode_more, encode_query
from retrieval_attn.index.kernels.knn import training_lists
from retrieval_attn.index.pieces import KeyPieces, PiecesIndex
from retrieval_attn.index.probe import Lists, add_to_lists, drop_from_lists, lists_of_queries, scan_rows
from retrieval_attn.index.query_clusters import cluster_queries, directions

RESCORE = 3
"""Keys scored exactly per key wanted."""
RECENT = 1024
"""Inserted keys that are scanned one by one before they are put into lists."""


@dataclass(frozen=True)
class PostingOptions:
    """Options of `postings`, checked.

    centroids: lists, at most (default: one for 16 training queries, 1024 at most). probe: lists read per search.
    most: keys of a list that training queries may fill, most often named first. list_k: keys that a training query
    names, where lists are not given. rescore: keys scored exactly per key wanted. exact_below: fewer keys than this
    are scanned, and lists are never made. seed: of the clustering.
    """

    centroids: int = 1024
    probe: int = 8
    most: int = 1000
    list_k: int = 100
    rescore: int = RESCORE
    exact_below: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("centroids", "probe", "most", "list_k", "exact_below", "seed"):
            value = getattr(self, name)
            least = 0 if name in ("exact_below", "seed") else 1
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number >= {least}")
        check_rescore(self.rescore)


_OPTIONS = tuple(PostingOptions.__dataclass_fields__)


@register
class PostingsIndex(PiecesIndex):
    """Approximate best keys from the lists of near queries. Options: see PostingOptions, and `lists`.

    A query that is not finite, and one whose lists hold fewer keys than are wanted, gets the exact answer.
    keys_scanned does not count centroids: they are no keys, and at most `centroids` products per query.
    """

    kind: ClassVar[str] = "postings"
    trains: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({*_OPTIONS, "lists"})

    def __init__(self, keys: KeyPieces, codes: Codes, lists: Lists | None, options: PostingOptions) -> None:
        """codes: of the keys. lists: None for a scan of all keys. Callers use `build`."""
        self._keys = keys
        self._codes = codes
        self._lists = lists
        self.options = options

    @classmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> PostingsIndex:
        """See KeyIndex.build; lists: int32 (query heads, m, kk) of these queries, computed here if not given.

        Raises ConfigError for options out of range or without finite training queries where there are enough keys
        for lists, ShapeError for keys that are not finite.
        """
        given = options.pop("lists", None)
        chosen = PostingOptions(**options)
        pieces = KeyPieces(keys, fmt)
        dim = fmt.dim_of(keys)
        queries, given = check_training(queries, given, dim, len(keys))
        codes = encode_keys(keys, fmt)
        if len(keys) < chosen.exact_below or not len(keys):
            return cls(pieces, codes, None, chosen)
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        finite = np.isfinite(rows).all(axis=1)
        if queries is None or not finite.any():
            raise ConfigError(
                f"postings needs finite training queries for {len(keys)} keys (from exact_below={chosen.exact_below} "
                f"on), got none; pass queries (heads, m, {dim}), or use index='flat'"
            )
        named = training_lists(queries, keys, fmt, codes, chosen.list_k) if given is None else given
        named = named.reshape(-1, named.shape[2])[finite]
        centroids, member = cluster_queries(rows[finite] * codes.scale, chosen.centroids, chosen.seed)
        lists = lists_of_queries(centroids, member, named, chosen.most, len(keys))
        unlisted = np.setdiff1d(np.arange(len(keys), dtype=np.int32), lists.ids, assume_unique=False)
        return cls(pieces, codes, add_to_lists(lists, codes, unlisted, len(keys)), chosen)

    @property
    def lists(self) -> Lists | None:
        """The lists, for callers that search without this class; None where all keys are scanned."""
        return self._lists

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys; every 1024 of them are put into lists. See KeyIndex.insert. Raises ShapeError."""
        self._keys.check(keys)
        self._codes = encode_more(self._codes, keys, self._keys.fmt, len(self))
        self._keys.add(keys)
        lists = self._lists
        if lists is not None and len(self) - lists.listed >= RECENT:
            recent = np.arange(lists.listed, len(self), dtype=np.int32)
            self._lists = add_to_lists(lists, self._codes, recent, len(self))

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
        if self._lists is not None and length < self._lists.listed:
            self._lists = drop_from_lists(self._lists, length)
        return True

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k keys of the lists probed; see KeyIndex.search."""
        queries, k = check_search(queries, self.head_dim, k, limit)
        lists, codes = self._lists, self._codes
        stop = len(self) if limit is None else min(int(limit), len(self))
        if lists is None or not len(queries):
            return search_pieces(self._keys.within(stop), queries, k, self._keys.fmt)
        finite = np.asarray(np.isfinite(queries).all(axis=1))
        near = directions(np.where(finite[:, None], queries, 0) * codes.scale)
        probes = search_exact(lists.centroids[None], near[None], self.options.probe, Format.FLOAT32).ids[0]
        kept = min(rescore_count(self.options.rescore, k), stop)
        coded, scanned = scan_rows(codes.codes, encode_query(queries, codes).planes, probes, lists, stop, kept)
        ids, scores = self._keys.best(coded, queries, k)
        lost: npt.NDArray[np.bool_] = np.logical_or(~finite, (ids[:, : min(k, stop)] < 0).any(axis=1))
        exact = answer_lost(self._keys, stop, queries, k, lost, ids, scores)
        return SearchResult(ids, scores, int(scanned[~lost].sum()) + exact)

    def state(self) -> dict[str, StateValue]:
        """See KeyIndex.state."""
        codes, lists = self._codes, self._lists
        state: dict[str, StateValue] = {name: int(getattr(self.options, name)) for name in _OPTIONS}
        state |= {"rows": codes.codes[: len(self)], "mean": codes.mean, "scale": codes.scale}
        if lists is not None:
            state |= {"queries": lists.centroids, "offsets": lists.offsets, "ids": lists.ids, "listed": lists.listed}
        return state

    @classmethod
    def from_state(cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, StateValue]) -> PostingsIndex:
        """See KeyIndex.from_state."""
        try:
            options = replace(PostingOptions(), **{name: state[name] for name in _OPTIONS})  # type: ignore[arg-type]
            lists = Lists.from_state(state, len(keys), fmt.dim_of(keys)) if "listed" in state else None
        except (KeyError, ConfigError, ShapeError) as error:
            raise InputDataError(f"the state is not one of postings over such keys ({error}); build again") from error
        return cls(KeyPieces(keys, fmt), codes_from_state(state, len(keys), fmt.dim_of(keys)), lists, options)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, centroids and lists."""
        return self._codes.nbytes + (0 if self._lists is None else self._lists.nbytes)
