"""RoarGraph for attention keys: a graph trained by the exact lists of real queries, searched by beam over codes.

One graph per key-value head serves all query heads of its group. Keys that no training list names are left out, and
found by the landmark that they lie near (see `landmarks`); inserted keys are scanned one by one until there are enough
to link them in one go. What the graph cannot answer is answered exactly by a scan: few keys, a
query that is not finite, k of a size that a scan is faster for, a limit far below the end, or too few keys found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, NotFiniteError, ShapeError
from retrieval_attn.index.base import (
    MAX_KEYS,
    HeadShape,
    HeldMemory,
    HostBytes,
    IndexMemory,
    KeyIndex,
    Training,
    TrainingNeeds,
    check_training,
)
from retrieval_attn.index.formats import Format, check_rows, kernel_view, to_float32
from retrieval_attn.index.kernels.codes import code_width, encode_keys
from retrieval_attn.index.kernels.knn import training_lists
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.roargraph import graph as graph_head
from retrieval_attn.index.roargraph.graph import LIST_K, GraphOptions, HeadGraph
from retrieval_attn.index.roargraph.search import SearchArguments, graph_search, graph_task
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.scans import exact_search
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest
from retrieval_attn.index.task.tasks import task_address

EXACT_BELOW = 4096
"""Fewer keys than this are scanned."""
TAIL = 256
"""Inserted keys that are scanned one by one before they are linked."""
SCAN_SHARE = 16
"""If more than one key in SCAN_SHARE is wanted, a scan is faster than a graph."""
MAX_QUERIES = 8192
"""With 2,048 of 131,072 tokens, keys that hold nearly all of a query's weight had no edge that led there
(docs/archive/log.md); more than this take memory and time that a reading model does not leave."""


MIN_PER_HIDDEN = 8
"""Keys of a graph for each hidden one, at least, where it is searched: with 9 % of 65,536 hidden a step took 1.0 ms in
place of 3.4, and found .895 of the weight in place of .923; with 31 % it took 5.2 ms, a scan of all others 1.4."""


def graph_bytes(options: GraphOptions, head: HeadShape, queries: int) -> HostBytes:
    """Return the host memory of a graph trained on `queries` queries per query head.

    A node takes its code, its links, an id and a term of the distance (4 bytes each).
    """
    links = options.degree_for(head.head_dim)
    each = code_width(head.head_dim) + 4 * links + 8
    nodes = queries * head.group * LIST_K + options.landmarks
    return HostBytes(each, nodes, f"code, {links} links of {nodes:,} keys a head, ids", 4)


def _memory(options: GraphOptions, head: HeadShape) -> IndexMemory:
    return IndexMemory((graph_bytes(options, head, RoarGraphIndex.training.queries(MAX_KEYS)),))


@register(memory=_memory, compile_tasks=lambda options, fmt: task_address(graph_task, fmt))
class RoarGraphIndex(KeyIndex):
    """Approximate best keys from a query-aware graph. Options: see GraphOptions.

    Without training lists they are computed from the training queries.
    """

    kind: ClassVar[str] = "roargraph"
    Options = GraphOptions
    training: ClassVar[TrainingNeeds] = TrainingNeeds(MAX_QUERIES, LIST_K, EXACT_BELOW, only_lists=True)

    def __init__(self, keys: npt.NDArray[Any], fmt: Format, options: GraphOptions, head: HeadGraph | None) -> None:
        """Over keys that the graph `head` was built from; None: every search scans. Callers use `build`."""
        self._keys = StoredKeys(keys, fmt)
        self._head = head
        self.options = options
        self._saving = False  # whether a save may still read the links as they are

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: GraphOptions, training: Training) -> RoarGraphIndex:
        """Build a graph. Fewer than EXACT_BELOW keys make no graph and need no training.

        Raises ShapeError for arrays that do not fit or keys that are not finite, ConfigError where nothing was given to
        train on.
        """
        check_rows("keys", keys, fmt, 2)
        if len(keys) > MAX_KEYS:
            raise ShapeError(f"an index holds at most {MAX_KEYS} keys, got {len(keys)}; split them over two indexes")
        queries, lists = check_training(training.queries, training.lists, fmt.dim_of(keys), len(keys))
        _check_finite(keys, fmt, 0)
        if len(keys) < EXACT_BELOW or not len(keys):
            return cls(keys, fmt, options, None)
        if lists is None:
            if queries is None:
                raise ConfigError(
                    f"roargraph needs training queries or their lists for {len(keys)} keys (from "
                    f"{EXACT_BELOW} on), got neither; pass queries (heads, m, {fmt.dim_of(keys)}), or use "
                    "index='flat'"
                )
            lists = training_lists(queries, keys, fmt, encode_keys(keys, fmt), LIST_K)
        heads, each, length = lists.shape
        return cls(keys, fmt, options, graph_head.build_graph(keys, fmt, lists.reshape(heads * each, length), options))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim), n may be 0. More than TAIL unlinked ones are linked, all of them.

        Keys that do not follow the earlier ones in memory are copied. Raises ShapeError for another shape or dtype,
        keys that are not finite, or more than 2**31 - 1. An index that was built without a graph stays without.
        """
        self._keys.check(keys)
        if not len(keys):
            return
        start, stop, fmt = len(self), len(self) + len(keys), self._keys.fmt
        _check_finite(keys, fmt, start)
        ids = np.arange(start, stop, dtype=np.int32)
        head = None if self._head is None else graph_head.append_nodes(self._head, keys, fmt, ids, stop)
        if head is not None and head.nodes - head.linked > TAIL:
            if self._saving:
                head = graph_head.with_own_links(head)
            self._saving = False
            head = graph_head.link_tail(head, self.options)
        self._keys.add(keys)
        self._head = head

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible; costs a pass over the graph."""
        if length < 0:
            raise ConfigError(f"length={length} must be >= 0 keys")
        if length < len(self):
            if self._head is not None:
                self._head = graph_head.without_keys_from(self._head, length)
            self._keys.cut(length)
        return True

    def state(self) -> dict[str, Any]:
        """Options and the arrays of the graph. Keys that are not linked yet are saved so."""
        self._saving = True
        plain: dict[str, Any] = {f"option.{name}": value for name, value in self.options.plain().items()}
        return plain if self._head is None else {**plain, **graph_head.graph_state(self._head)}

    @classmethod
    def from_state(
        cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, Any], *, coder: Any = None, trusted: bool = False
    ) -> RoarGraphIndex:
        """The index whose `state()` was `state`, over the same keys; see KeyIndex.from_state."""
        check_rows("keys", keys, fmt, 2)
        plain = {name.removeprefix("option."): v for name, v in state.items() if name.startswith("option.")}
        own = {name: value for name, value in state.items() if not name.startswith("option.")}
        head = graph_head.graph_from_state(own, fmt.dim_of(keys), len(keys), trusted) if own else None
        return cls(keys, fmt, GraphOptions.from_plain(plain), head)

    def search_arguments(self) -> SearchArguments | None:
        """Return the graph's arguments of a search; None: every search scans."""
        if self._head is None:
            return None
        keys, coded = kernel_view(self._keys.whole, self._keys.fmt), self._head.coded
        return SearchArguments(self._head.graph, coded.mean, coded.scale, keys, self.options.beam)

    def task(self, request: SearchRequest) -> CompiledSearch:
        arguments = self.search_arguments()
        served = self._serves(request.k, request.visible)
        # with more hidden keys single queries find too few, and a scan for one costs more than a scan for all
        served = served and MIN_PER_HIDDEN * request.hidden <= len(self)
        if arguments is None or not served:
            return exact_search(request.fmt)
        return graph_search(request, arguments, len(self), self._keys.fmt.row_bytes(self._keys.head_dim))

    def _serves(self, k: int, visible: int) -> bool:
        """Whether the graph, not a scan, answers for the best k of `visible` keys."""
        return self._head is not None and 2 * visible > len(self) and visible >= SCAN_SHARE * k

    @property
    def memory(self) -> HeldMemory:
        """The graph, codes, and keys that had to be copied."""
        head = self._head
        return HeldMemory(self._keys.nbytes + (0 if head is None else head.graph_nbytes + head.code_nbytes))


def _check_finite(keys: npt.NDArray[Any], fmt: Format, first: int) -> None:
    """Raise NotFiniteError for NaN or infinity, in blocks: float32 of all keys would be as large again."""
    for start in range(0, len(keys), 1 << 16):
        block = keys[start : start + (1 << 16)]
        bad = ~np.isfinite(to_float32(block, fmt)).all(axis=1)
        if bad.any():
            raise NotFiniteError(
                f"keys must be finite, got {int(bad.sum())} with NaN or infinity, the first at id "
                f"{first + start + int(bad.argmax())}; remove them or use index='flat'"
            )
