"""Indexes as the words that a step's search tasks read, and the scratch that searching them takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.step import descriptor as words
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.flat import SCAN_SHARE as CODES_SHARE
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.index.roargraph.index import SCAN_SHARE, SEEDS, RoarGraphIndex, SearchArguments, room_for
from retrieval_attn.index.sketch.index import SketchIndex
from retrieval_attn.index.sketch.search import scratch_floats


class IndexWords:
    """Rows of words that describe the indexes of a plan to the step, and the scratch that searching them takes."""

    def __init__(self, queries: int, padded: int, top_k: int) -> None:
        self._queries, self._padded, self._top_k = queries, padded, top_k
        self.kept_alive: list[Any] = []
        self.pool = self.visited = self.fresh = self.planes = self.kept = self.numbers = self.sample = self.named = 1

    def codes(self, index: KeyIndex, first: int, visible: int) -> int:
        """Address of the row of an index with codes; 0 if it has none, or a scan of the keys is the better search."""
        if type(index) is not FlatIndex or index.codes is None:
            return 0
        kept = index.rescore_count(self._top_k)
        if visible < CODES_SHARE * kept:
            return 0
        codes, mean, scale = index.codes
        row = np.zeros(words.GRAPH_WORDS, np.int64)
        for word, array in ((words.CODES, codes), (words.MEAN, mean), (words.STEP_SIZES, scale)):
            row[word] = array.ctypes.data
        row[words.CODE_ROWS], row[words.CODE_WIDTH] = codes.shape
        # stored keys serve as codes: their rows are the tokens of the piece
        row[words.GRAPH_FIRST], row[words.KEPT] = 0 if index.scans_stored else first, kept
        self.kept = max(self.kept, kept)
        self.planes = max(self.planes, self._padded * codes.shape[1])
        self.kept_alive += [row, index.codes]
        return int(row.ctypes.data)

    def sketch(self, index: KeyIndex, first: int, visible: int) -> int:
        """Address of the row of a sketch; 0 if it is none, or a scan of the keys is the better search."""
        if type(index) is not SketchIndex:
            return 0
        kept = index.rescore_count(self._top_k)
        if visible < CODES_SHARE * kept:
            return 0
        arguments = index.search_arguments()
        coded, ids, total, side, leaves = arguments
        means, rank = leaves.means, len(arguments.query_side)
        row = np.zeros(words.GRAPH_WORDS, np.int64)
        arrays: dict[int, npt.NDArray[Any]] = {
            words.CODES: coded.blocks,
            words.STEP_SIZES: coded.step,
            words.QUERY_SIDE: side,
            words.IDS: ids,
            words.LEAVES: means.blocks,
            words.LEAF_STEPS: means.step,
            words.READY: aligned_empty((8,), np.int64),
            words.CHOSEN: aligned_empty((self._padded // TILE_QUERIES, total + 1), np.int32),
            words.COUNTS: aligned_empty((self._padded // TILE_QUERIES,), np.int64),
            words.OWN_PLANES: aligned_empty((self._padded, rank), np.int8),
            words.OWN_STEPS: aligned_empty((self._padded // TILE_QUERIES, 2, TILE_QUERIES), np.float32),
            words.OWN_BOUNDS: aligned_empty((self._padded,), np.float32),
        }
        arrays[words.READY][:] = 0
        arrays[words.OWN_PLANES][:] = 0
        for word, array in arrays.items():
            row[word] = array.ctypes.data
        row[words.TOTAL], row[words.ORDERED] = total, leaves.ordered
        row[words.LEAF_ROWS], row[words.LEAF_NUMBERS] = len(means.blocks), len(means.step)
        row[words.SHARE] = int(np.float32(leaves.share).view(np.int32))
        row[words.CODE_ROWS], row[words.CODE_WIDTH] = coded.blocks.shape
        row[words.RANK], row[words.WIDE] = len(side), coded.wide
        row[words.GRAPH_FIRST], row[words.KEPT] = first, kept
        self.kept = max(self.kept, kept)
        self.planes = max(self.planes, TILE_QUERIES * len(means.step))
        self.numbers = max(self.numbers, rank)
        self.sample = max(self.sample, scratch_floats(len(means.blocks)))
        self.kept_alive += [row, arguments, arrays]
        return int(row.ctypes.data)

    def given(self, index: KeyIndex, first: int, visible: int, ids: npt.NDArray[np.int32] | None) -> int:
        """Address of the row of candidates that a device names in ids (queries, room); 0 if it names none."""
        if type(index) is not DeviceIndex or ids is None or not index.serves(self._top_k, visible):
            return 0
        row = np.zeros(words.GRAPH_WORDS, np.int64)
        row[words.IDS], row[words.ROOM] = ids.ctypes.data, ids.shape[1]
        row[words.GRAPH_FIRST], row[words.KEPT] = first, index.rescore_count(self._top_k)
        self.named = max(self.named, ids.shape[1])
        self.kept_alive += [row, ids]
        return int(row.ctypes.data)

    def graph(self, index: KeyIndex, first: int, visible: int) -> int:
        """Address of the rows of a graph, whose first key is token `first`; 0 if a scan is the better search."""
        if not isinstance(index, RoarGraphIndex):
            return 0
        arguments = index.search_arguments()
        if (
            not arguments
            or self._queries % len(arguments)
            or 2 * visible <= len(index)
            or visible < SCAN_SHARE * self._top_k
        ):
            return 0
        rows = aligned_empty((len(arguments), words.GRAPH_WORDS), np.int64)
        for row, given in zip(rows, arguments, strict=True):
            self._describe(row, given, index.fmt.row_bytes(index.head_dim), len(index), first, visible)
        rows[:, words.GRAPHS] = len(arguments)
        seeds = np.full((self._queries, SEEDS if index.options.seeds else 0), -1, np.int32)
        rows[:, words.SEED_NODES], rows[:, words.SEEDS] = seeds.ctypes.data, seeds.shape[1]
        self.kept_alive += [rows, arguments, seeds]
        return int(rows.ctypes.data)

    def _describe(
        self,
        row: npt.NDArray[np.int64],
        given: SearchArguments,
        row_bytes: int,
        length: int,
        first: int,
        visible: int,
    ) -> None:
        graph = given.graph
        code_rows, width = graph.codes.shape
        degree = graph.adjacency.shape[1]
        # keys beyond the limit take places in the pool: it gets longer by their share
        room = -(-room_for(self._top_k, given.beam) * length // visible)
        beta = int(np.float32(given.beta).view(np.int32))
        arrays: dict[int, npt.NDArray[Any]] = {
            words.CODES: graph.codes,
            words.EDGES: graph.adjacency,
            words.NODE_IDS: graph.ids,
            words.START_NODES: graph.entries,
            words.NODE_COUNTS: graph.counts,
            words.CELL_STARTS: graph.cells.starts,
            words.CELL_KEYS: graph.cells.keys,
            words.MEAN: given.mean,
            words.STEP_SIZES: given.scale,
        }
        assert len(given.keys) < 2 or given.keys.strides == (row_bytes, given.keys.itemsize), given.keys.strides
        row[words.GRAPH_KEYS] = given.keys.ctypes.data
        for word, array in arrays.items():
            assert array.flags.c_contiguous, (word, array.strides)
            row[word] = array.ctypes.data
        numbers = {
            words.CODE_ROWS: min(code_rows, len(graph.adjacency), len(graph.ids)),
            words.CODE_WIDTH: width,
            words.DEGREE: degree,
            words.STARTS: len(graph.entries),
            words.LANDMARKS: len(graph.cells.starts) - 1,
            words.GRAPH_FIRST: first,
            words.PLANES: given.planes,
            words.ROOM: room,
            words.BEAM: -(-given.beam * length // visible),
            words.PATIENCE: given.patience,
            words.BETA: beta,
        }
        for word, number in numbers.items():
            row[word] = number
        block = max(degree, 64)
        self.pool = max(self.pool, room + block)
        self.visited = max(self.visited, int(graph.counts[1]) // 64 + 8)
        self.fresh = max(self.fresh, block)
        self.planes = max(self.planes, 2 * width)
