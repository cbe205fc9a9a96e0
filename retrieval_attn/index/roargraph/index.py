"""RoarGraph for attention keys: a graph trained by the exact lists of real queries, searched by beam over codes.

One graph per key-value head serves all query heads of its group (or one graph per query head, as the paper has it).
Keys that no training list names are left out unless told otherwise, and found by the landmark that they lie near
(see `landmarks`); inserted keys are scanned one by one until
there are enough to link them in one go. What the graph cannot answer is answered exactly by a scan: few keys, a
query that is not finite, k of a size that a scan is faster for, a limit far below the end, or too few keys found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numba
import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, NotFiniteError, ShapeError
from retrieval_attn.index.base import (
    MAX_KEYS,
    HeadShape,
    HeldBytes,
    SearchResult,
    Training,
    check_search,
    check_training,
)
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.flat_task import exact_search
from retrieval_attn.index.formats import Format, check_rows, kernel_view, to_float32
from retrieval_attn.index.kernels.codes import code_width, encode_keys, encode_query
from retrieval_attn.index.kernels.knn import training_lists
from retrieval_attn.index.memory import one_layout
from retrieval_attn.index.roargraph import graph as graph_head
from retrieval_attn.index.roargraph.graph import HeadGraph
from retrieval_attn.index.roargraph.options import GraphOptions
from retrieval_attn.index.roargraph.search import make_scratch, search_rows
from retrieval_attn.index.roargraph.task import SearchArguments, graph_search, prepare_graph, room_for
from retrieval_attn.index.runs import JoinedKeys, RunsIndex
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest
from retrieval_attn.index.threads import kernel_threads

SCAN_SHARE = 16
"""More than one key in so many wanted: a scan is faster than a graph."""
MAX_QUERIES = 8192
"""With 2,048 of 131,072 tokens, keys that hold nearly all of a query's weight had no edge that led there
(docs/archive/log.md); more than this take memory and time that are not there beside a model which reads."""


MIN_PER_HIDDEN = 8
"""Keys of a graph for each hidden one, at least, where it is searched: with 9 % of 65,536 hidden a step took 1.0 ms in
place of 3.4, and found .895 of the weight in place of .923; with 31 % it took 5.2 ms, a scan of all others 1.4."""


@register
class RoarGraphIndex(RunsIndex):
    """Approximate best keys from a query-aware graph. Options: see GraphOptions.

    Without training lists they are computed from the training queries.
    """

    kind: ClassVar[str] = "roargraph"
    trains: ClassVar[bool] = True
    lists_suffice: ClassVar[bool] = True
    max_queries: ClassVar[int] = MAX_QUERIES
    Options = GraphOptions
    hides_first_keys: ClassVar[bool] = True

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, options: GraphOptions, heads: list[HeadGraph]) -> None:
        """Over keys that `heads` were built from; no heads: every search scans. Callers use `build`."""
        self._keys: JoinedKeys = JoinedKeys(keys, fmt)
        self._heads = heads
        self.options = options
        self._saving = False  # whether somebody may still read the links as they are

    @classmethod
    def list_length(cls, options: GraphOptions, num_keys: int) -> int:
        return int(options.list_k) if num_keys >= max(1, options.exact_below) else 0

    @classmethod
    def host_bytes(cls, options: GraphOptions, head: HeadShape) -> tuple[HeldBytes, ...]:
        """See KeyIndex.host_bytes. An id and a term of the distance, 4 bytes each, lie beside code and links."""
        links = options.degree_for(head.head_dim)
        each = code_width(head.head_dim) + 4 * links + 8
        if not options.listed_only:
            return (HeldBytes(each, None, f"code and {links} links per key at most"),)
        listed = cls.training_queries(MAX_KEYS, head.train_queries) * head.group * options.list_k
        nodes = listed + options.landmarks
        return (HeldBytes(each, nodes, f"code, {links} links of {nodes:,} keys a head, ids", 4),)

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: GraphOptions, training: Training) -> RoarGraphIndex:
        """See KeyIndex.make. Fewer than `exact_below` keys make no graph and need no training.

        Raises ShapeError for arrays that do not fit or keys that are not finite, ConfigError where nothing was given to
        train on.
        """
        check_rows("keys", keys, fmt, 2)
        if len(keys) > MAX_KEYS:
            raise ShapeError(f"an index holds at most {MAX_KEYS} keys, got {len(keys)}; use two")
        queries, lists = check_training(training.queries, training.lists, fmt.dim_of(keys), len(keys))
        _check_finite(keys, fmt, 0)
        if len(keys) < options.exact_below or not len(keys):
            return cls(keys, fmt, options, [])
        if lists is None:
            if queries is None:
                raise ConfigError(
                    f"roargraph needs training queries or their lists for {len(keys)} keys (from exact_below="
                    f"{options.exact_below} on), got neither; pass queries (heads, m, {fmt.dim_of(keys)}), or use "
                    "index='flat'"
                )
            lists = training_lists(queries, keys, fmt, encode_keys(keys, fmt), options.list_k)
        heads, each, length = lists.shape
        groups = lists if options.per_query_head else lists.reshape(1, heads * each, length)
        return cls(keys, fmt, options, [graph_head.build_graph(keys, fmt, one, options) for one in groups])

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k keys that the graph leads to; see KeyIndex.search.

        With one graph per query head, row i of n belongs to query head i * heads // n. With `beta`, places of keys
        too far below the best are -1. A query with NaN or infinity is answered by a scan, as `flat` answers it.
        """
        queries, k = check_search(queries, self.head_dim, k, limit)
        num, length = len(queries), len(self)
        visible = length if limit is None else min(int(limit), length)
        ids = np.full((num, k), -1, np.int32)
        scores = np.full((num, k), -np.inf, np.float32)
        beta = self.options.beta
        scanned = 0
        scan = np.ones(num, bool)
        if self._serves(k, visible) and num:
            finite = np.isfinite(queries).all(axis=1)
            scanned = self._search_graphs(queries, k, visible, ids, scores)
            short = ids[:, min(k, visible) - 1] < 0 if beta is None else ids[:, 0] < 0
            scan = short | ~finite
        if visible and scan.any():
            exact = search_exact(self._keys.whole[None, :visible], queries[None, scan], k, self._keys.fmt)
            ids[scan], scores[scan] = exact.ids[0], exact.scores[0]
            scanned += exact.keys_scanned
            if beta is not None:
                far = ~(scores >= scores[:, :1] - np.float32(beta)) & np.isfinite(scores[:, :1])
                ids[far], scores[far] = -1, -np.inf
        return SearchResult(ids, scores, scanned)

    def _search_graphs(
        self,
        queries: npt.NDArray[np.float32],
        k: int,
        visible: int,
        ids: npt.NDArray[np.int32],
        scores: npt.NDArray[np.float32],
    ) -> int:
        """Search every row in its graph; returns keys scored."""
        num = len(queries)
        heads = self._heads
        if num % len(heads):
            raise ShapeError(
                f"queries must be a multiple of {len(heads)} rows, one block for each query head's graph, got {num}"
            )
        each = num // len(heads)
        scored = 0
        keys = one_layout(kernel_view(self._keys.whole, self._keys.fmt)[None])
        beta = np.float32(-1.0 if self.options.beta is None else self.options.beta)
        # keys beyond the limit take places in the pool: it gets longer by their share
        beam = -(-self.options.beam * len(self) // visible)
        room = -(-room_for(k, self.options.beam) * len(self) // visible)
        with kernel_threads(None):
            workers = min(each, numba.get_num_threads())
            for i, head in enumerate(heads):
                rows = slice(i * each, (i + 1) * each)
                own = queries[rows]
                coded = encode_query(own, head.coded)
                graph = head.graph
                scratch = make_scratch(room, graph.adjacency.shape[1], head.nodes, workers)
                _, count, _ = search_rows(
                    graph, keys, own, coded.planes, coded.step, k, room, beam, beta, 0, visible,
                    scratch, ids[rows], scores[rows],
                )  # fmt: skip
                scored += int(count)
        return scored

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim), n may be 0. More than `tail` unlinked ones are linked, all of them.

        Keys that do not follow the earlier ones in memory are copied. Raises ShapeError for another shape or dtype,
        keys that are not finite, or more than 2**31 - 1. An index that was built without a graph stays without.
        """
        self._keys.check(keys)
        if not len(keys):
            return
        start, stop, fmt = len(self), len(self) + len(keys), self._keys.fmt
        _check_finite(keys, fmt, start)
        ids = np.arange(start, stop, dtype=np.int32)
        heads = [graph_head.append_nodes(head, keys, fmt, ids, stop) for head in self._heads]
        if heads and heads[0].nodes - heads[0].linked > self.options.tail:
            if self._saving:
                heads = [graph_head.with_own_links(head) for head in heads]
            self._saving = False
            heads = [graph_head.link_tail(head, self.options) for head in heads]
        self._keys.add(keys)
        self._heads = heads

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible; costs a pass over the graph."""
        if length < 0:
            raise ConfigError(f"length={length} must be >= 0")
        if length < len(self):
            self._heads = [graph_head.without_keys_from(head, length) for head in self._heads]
            self._keys.cut(length)
        return True

    def state(self) -> dict[str, Any]:
        """Options and arrays of every graph. Keys that are not linked yet are saved so."""
        self._saving = True
        plain: dict[str, Any] = {f"option.{name}": value for name, value in self.options.plain().items()}
        plain["graphs"] = len(self._heads)
        for i, head in enumerate(self._heads):
            plain.update({f"{i}.{name}": value for name, value in graph_head.graph_state(head).items()})
        return plain

    @classmethod
    def from_state(
        cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, Any], *, coder: Any = None, trusted: bool = False
    ) -> RoarGraphIndex:
        """The index whose `state()` was `state`, over the same keys; see KeyIndex.from_state."""
        check_rows("keys", keys, fmt, 2)
        plain = {name.removeprefix("option."): v for name, v in state.items() if name.startswith("option.")}
        heads = []
        for i in range(int(state.get("graphs", 0))):
            own = {name.removeprefix(f"{i}."): v for name, v in state.items() if name.startswith(f"{i}.")}
            heads.append(graph_head.graph_from_state(own, fmt.dim_of(keys), len(keys), trusted))
        return cls(keys, fmt, GraphOptions.from_plain(plain), heads)

    def search_arguments(self) -> list[SearchArguments]:
        """One for each graph (one for all query heads, or one each); empty where every search scans."""
        options = self.options
        return [
            SearchArguments(
                head.graph,
                head.coded.mean,
                head.coded.scale,
                kernel_view(self._keys.whole, self._keys.fmt),
                options.beam,
                -1.0 if options.beta is None else float(options.beta),
            )
            for head in self._heads
        ]

    @classmethod
    def prepare(cls, options: GraphOptions, fmt: Format) -> bool:
        prepare_graph(fmt)
        return True

    def compiled_search(self, request: SearchRequest) -> CompiledSearch | None:
        """See KeyIndex.compiled_search.

        Where a graph with a range (`beta`) is too small to be one, its own search has to cut what a scan finds.
        """
        arguments = self.search_arguments()
        if not arguments:
            return exact_search(request.fmt) if self.options.beta is None else None
        served = self._serves(request.k, request.visible) and request.queries % len(arguments) == 0
        # with more hidden keys single queries find too few, and a scan for one costs more than a scan for all
        served = served and MIN_PER_HIDDEN * request.hidden <= len(self)
        if not served:
            return exact_search(request.fmt)
        return graph_search(request, arguments, len(self), self._keys.fmt.row_bytes(self.head_dim))

    def _serves(self, k: int, visible: int) -> bool:
        """Whether the graph, not a scan, answers for the best k of `visible` keys."""
        return bool(self._heads) and 2 * visible > len(self) and visible >= SCAN_SHARE * k

    @property
    def stats(self) -> dict[str, int]:
        """Numbers of the graphs, see `graph.graph_stats`."""
        return graph_head.graph_stats(self._heads, len(self))

    @property
    def nbytes(self) -> int:
        """Graphs, codes, and keys that had to be copied."""
        return self._keys.nbytes + sum(head.graph_nbytes + head.code_nbytes for head in self._heads)


def _check_finite(keys: npt.NDArray[Any], fmt: Format, first: int) -> None:
    """Raise NotFiniteError for NaN or infinity, in blocks: float32 of all keys would be as large again."""
    for start in range(0, len(keys), 1 << 16):
        block = keys[start : start + (1 << 16)]
        bad = ~np.isfinite(to_float32(block, fmt)).all(axis=1)
        if bad.any():
            raise NotFiniteError(
                f"keys must be finite, got {int(bad.sum())} with NaN or infinity, the first at id "
                f"{first + start + int(bad.argmax())}; leave them out or use index='flat'"
            )
