"""One graph with its coded keys: built from lists, searched, grown and cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import Codes, encode_keys, encode_more
from retrieval_attn.index.memory import aligned_empty, usable
from retrieval_attn.index.roargraph import build as graph_build
from retrieval_attn.index.roargraph import landmarks
from retrieval_attn.index.roargraph.build import distance_terms, link_nodes
from retrieval_attn.index.roargraph.search import Cells, Graph, make_scratch

LIST_K = 100
"""Length of a training list; longer ones that are given are cut."""


@dataclass(frozen=True)
class GraphOptions:
    """How the graph is made and searched. Raises ConfigError for a value of another type or out of range.

    beam: nodes that a search expands at most (more: better and slower). degree: edges per node at most; None: 32 up
    to head_dim 128, 48 above. landmarks: keys far from each other that every search starts from (see `landmarks`).
    """

    beam: int = 160
    degree: int | None = None
    landmarks: int = 256

    def __post_init__(self) -> None:
        for name, low, high in (("beam", 1, 1 << 16), ("degree", 2, 256), ("landmarks", 1, 1 << 16)):
            value = getattr(self, name)
            if value is None and name == "degree":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a whole number from {low} to {high}")

    def degree_for(self, head_dim: int) -> int:
        """Edges per node at most for keys of `head_dim` elements."""
        if self.degree is not None:
            return int(self.degree)
        return 32 if head_dim <= 128 else 48

    def plain(self) -> dict[str, int]:
        """The options as plain values, for `from_plain`; those that are None are left out."""
        return {name: int(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> GraphOptions:
        """Options whose `plain()` was `plain`. Raises ConfigError for names or values that are none."""
        try:
            return cls(**plain)
        except TypeError as error:
            raise ConfigError(
                f"a saved graph has options that this release does not have ({error}); build the index again"
            ) from error


TARGETS = 16
"""Best keys that each training list is attached to."""
FILL = 16
"""Edges a node gets at least if it has candidates."""
CANDIDATES = 256
"""Keys considered for a node's edges at most."""
ENTRIES = 16
"""Much named nodes that every search starts from, in addition to the landmarks."""


class HeadGraph(NamedTuple):
    """A graph and what codes its keys. Methods that change it return another one: searches keep the one they have.

    graph.codes is coded.codes. minus: (room,) int32 for linking (see graph_insert), or empty until keys are linked.
    """

    graph: Graph
    coded: Codes
    minus: npt.NDArray[np.int32]

    @property
    def linked(self) -> int:
        """Nodes with edges."""
        return int(self.graph.counts[0])

    @property
    def nodes(self) -> int:
        """All nodes, those too that are scanned one by one."""
        return int(self.graph.counts[1])

    @property
    def num_keys(self) -> int:
        """Keys it was made or grown over, in the graph or not."""
        return int(self.graph.counts[2])

    @property
    def graph_nbytes(self) -> int:
        """Bytes of edges, ids, entries, cells and terms."""
        graph = self.graph
        arrays = (graph.adjacency, graph.ids, graph.entries, *graph.cells, self.minus)
        return sum(int(array.nbytes) for array in arrays)

    @property
    def code_nbytes(self) -> int:
        """Bytes of the coded keys."""
        return self.coded.nbytes


def build_graph(keys: npt.NDArray[Any], fmt: Format, lists: npt.NDArray[np.int32], options: GraphOptions) -> HeadGraph:
    """The graph over keys (n, head_dim) that lists (m, kk) int32 of key ids make, best first, -1 for none.

    Raises ShapeError for keys that are not finite.
    """
    lists = np.ascontiguousarray(lists[:, :LIST_K])
    length = len(keys)
    counts = graph_build.list_counts(lists, length)
    every = encode_keys(keys, fmt)
    marks = landmarks.choose_landmarks(every.codes, _ratios(every), options.landmarks)
    ids = _landmarks_first(graph_build.hot_first(counts), counts, marks.ids)
    coded = encode_keys(keys[ids], fmt)  # in finer steps than all keys would have
    near = graph_build.near_of(coded.codes, _ratios(coded))
    local = graph_build.relabelled(lists, ids, length)
    adjacency = graph_build.make_edges(near, local, ids, _shape(options, fmt.dim_of(keys)))
    homes = _nodes_of(marks.ids, ids, length)[marks.homes]
    landmarks.join_landmarks(adjacency, homes[ids], marks.gaps[ids])
    number = len(marks.ids)
    entries = np.union1d(np.arange(number, dtype=np.int32), graph_build.choose_entries(adjacency, ENTRIES))
    outside = np.ones(length, bool)
    outside[ids] = False
    cells = landmarks.make_cells(homes, marks.gaps, np.flatnonzero(outside).astype(np.int32), number)
    graph = Graph(coded.codes, adjacency, ids, entries, _counts(len(ids), len(ids), length), *cells)
    return HeadGraph(graph, coded, np.empty(0, np.int32))


def _landmarks_first(
    ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32], marks: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Keys of the nodes: landmarks by how many lists name them, then the other ids (hot first) as they are."""
    first = marks[np.lexsort((marks, -counts[marks]))]
    mark = np.zeros(len(counts), bool)
    mark[marks] = True
    return np.concatenate([first, ids[~mark[ids]]])


def _nodes_of(keys: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    """The nodes of these keys (below `length`), for nodes whose keys are `ids`."""
    nodes = np.full(length, -1, np.int32)
    nodes[ids] = np.arange(len(ids), dtype=np.int32)
    return nodes[keys]


def append_nodes(
    head: HeadGraph, keys: npt.NDArray[Any], fmt: Format, ids: npt.NDArray[np.int32], num_keys: int
) -> HeadGraph:
    """Further keys (n, head_dim), called `ids`, as nodes without edges."""
    start = head.nodes
    stop = start + len(keys)
    coded = encode_more(head.coded, keys, fmt, start)
    graph = head.graph
    adjacency, named = _grown(graph.adjacency, start, stop), _grown(graph.ids, start, stop)
    adjacency[start:stop] = -1
    named[start:stop] = ids
    graph = Graph(coded.codes, adjacency, named, graph.entries, _counts(head.linked, stop, num_keys), *graph.cells)
    return HeadGraph(graph, coded, head.minus)


def link_tail(head: HeadGraph, options: GraphOptions) -> HeadGraph:
    """Give edges to all nodes that have none. Rows of other nodes change in place: both graphs stay searchable."""
    graph, start, stop = head.graph, head.linked, head.nodes
    if start == stop:
        return head
    shape = _shape(options, len(head.coded.mean))
    ratios = _ratios(head.coded)
    minus = _grown(head.minus, len(head.minus), stop)
    first = min(len(head.minus), start)
    distance_terms(graph.codes, first, stop, ratios, minus)
    scratch = make_scratch(256, shape.degree, stop)
    link_nodes(graph, minus, ratios, start, stop, shape.fill, scratch)
    entries = graph.entries
    if not len(entries):
        entries = np.arange(min(ENTRIES, stop), dtype=np.int32)
    graph = graph._replace(entries=entries, counts=_counts(stop, stop, head.num_keys))
    return HeadGraph(graph, head.coded, minus)


def with_own_links(head: HeadGraph) -> HeadGraph:
    """The graph with a copy of its links: `link_tail` changes rows that others may be reading."""
    copied = aligned_empty(head.graph.adjacency.shape, np.int32)
    copied[:] = head.graph.adjacency
    return head._replace(graph=head.graph._replace(adjacency=copied))


def without_keys_from(head: HeadGraph, length: int) -> HeadGraph:
    """The graph without keys >= length; edges to them are dropped."""
    graph, nodes = head.graph, head.nodes
    stays = graph.ids[:nodes] < length
    numbers = np.where(stays, np.cumsum(stays) - 1, -1).astype(np.int32)
    linked = int(stays[: head.linked].sum())
    rows = graph.adjacency[: head.linked][stays[: head.linked]]
    moved = np.where((rows >= 0) & (rows < nodes), numbers[np.clip(rows, 0, max(0, nodes - 1))], -1)
    adjacency = aligned_empty((int(stays.sum()), graph.adjacency.shape[1]), np.int32)
    order = np.argsort(moved < 0, axis=1, kind="stable")  # holes to the end
    adjacency[:linked] = np.take_along_axis(moved, order, axis=1)
    codes = aligned_empty((int(stays.sum()), graph.codes.shape[1]), np.uint8)
    codes[:] = graph.codes[:nodes][stays]
    entries = numbers[graph.entries]
    entries = entries[entries >= 0]
    if not len(entries):
        entries = np.arange(min(len(graph.entries), linked), dtype=np.int32)
    remain = np.arange(head.num_keys) < length
    cells = landmarks.without_keys(graph.cells, remain, stays[: len(graph.cells.starts) - 1])
    graph = Graph(
        codes,
        adjacency,
        graph.ids[:nodes][stays],
        np.ascontiguousarray(entries),
        _counts(linked, int(stays.sum()), min(length, head.num_keys)),
        *cells,
    )
    return HeadGraph(graph, head.coded._replace(codes=codes), head.minus[:0])


def graph_state(head: HeadGraph) -> dict[str, Any]:
    """Arrays that `graph_from_state` makes the same graph of."""
    graph, nodes = head.graph, head.nodes
    return {
        "codes": graph.codes[:nodes],
        "mean": head.coded.mean,
        "scale": head.coded.scale,
        "adjacency": graph.adjacency[:nodes],
        "ids": graph.ids[:nodes],
        "entries": graph.entries,
        "counts": graph.counts,
        "cell_starts": graph.cells.starts,
        "cell_keys": graph.cells.keys,
    }


def graph_from_state(state: Mapping[str, Any], head_dim: int, num_keys: int, trusted: bool = False) -> HeadGraph:
    """The graph whose `graph_state` was `state`. Raises InputDataError if the arrays do not fit each other or the keys.

    Arrays are taken as they are (a map of a file stays one); numbers that would lead outside of them are refused,
    unless they are trusted (`KeyIndex.from_state`).
    """
    try:
        codes, adjacency, ids = state["codes"], state["adjacency"], state["ids"]
        entries, counts = state["entries"], state["counts"]
        mean, scale = state["mean"], state["scale"]
        cells = Cells(state["cell_starts"], state["cell_keys"])
    except KeyError as error:
        raise InputDataError(f"a saved graph needs {error}, which is missing; build the index again") from error
    nodes = len(ids)
    fits = (
        codes.dtype == np.uint8
        and codes.ndim == 2
        and len(codes) == nodes
        and codes.shape[1] == -(-head_dim // 64) * 64
        and adjacency.dtype == np.int32
        and adjacency.ndim == 2
        and len(adjacency) == nodes
        and ids.dtype == np.int32
        and ids.shape == (nodes,)
        and entries.dtype == np.int32
        and counts.dtype == np.int64
        and counts.shape == (3,)
        and mean.dtype == scale.dtype == np.float32
        and mean.shape == scale.shape == (head_dim,)
        and 0 <= counts[0] <= counts[1] == nodes <= counts[2] == num_keys
        and (
            trusted
            or (
                _within(ids, 0, num_keys)
                and _within(entries, 0, int(counts[0]))
                and _within(adjacency[: int(counts[0])], -1, nodes)
                and landmarks.cells_fit(cells, nodes, num_keys)
            )
        )
    )
    if not fits:
        raise InputDataError(
            f"a saved graph does not fit {num_keys} keys with head_dim={head_dim} (wrong shapes or ids); restore it "
            "with the keys it was saved with, or build the index again"
        )
    arrays = [usable(array) for array in (codes, adjacency, ids, entries, counts)]
    coded = Codes(arrays[0], np.array(mean), np.array(scale))
    graph = Graph(*arrays, *(usable(array) for array in cells))
    return HeadGraph(graph, coded, np.empty(0, np.int32))


def _within(array: npt.NDArray[Any], low: int, high: int) -> bool:
    return array.size == 0 or (int(array.min()) >= low and int(array.max()) < high)


def _counts(linked: int, nodes: int, keys: int) -> npt.NDArray[np.int64]:
    return np.array([linked, nodes, keys], np.int64)


def _ratios(coded: Codes) -> npt.NDArray[np.float32]:
    return graph_build.channel_ratios(coded.scale, coded.codes.shape[1])


def _shape(options: GraphOptions, head_dim: int) -> graph_build.Shape:
    degree = options.degree_for(head_dim)
    return graph_build.Shape(degree, TARGETS, min(FILL, degree), CANDIDATES)


def _grown(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    """`array` if `needed` rows fit, else a larger one with the first `used` rows in it."""
    if needed <= len(array):
        return array
    larger = aligned_empty((needed + needed // 4 + 64, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger
