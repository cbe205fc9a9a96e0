"""SharedPlan: which rows of a batch attend to which pages, as int32 numbers that a kernel walks.

A batch is a forest: a *node* is a span of tokens in pages that one or more rows share, and a row lies over at most
`levels` nodes (Hydragen's hierarchy; RelayAttention's system prompt is its one-level case). The numbers lie in device
memory of fixed size and are written when the batch changes, so one captured graph serves every forest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError, ShapeError

PAGE_TOKENS = 64
"""Keys of a page, and of one block of the kernel."""
LEVELS = 4
"""Nodes over which a row can lie at most."""
MAX_SPLITS = 32
"""Parts that the keys of a node are cut into at most: a merge holds all of one level in one tile."""
MIN_SPLIT_PAGES = 4
"""Pages of a part at least: below, a program spends its time on starting and on writing its part."""
LARGEST_TILE = 128
NARROW_TILE = 32
"""Queries of a tile at most, of heads of more than NARROW_DIM numbers, on a GPU with less shared memory than an H100:
128 of heads of 256 take 144 KiB, 32 take 84."""
NARROW_DIM = 128
WIDE_DIM = 256
"""Heads of more numbers take tiles of SMALLEST_TILE queries there, and pages one at a time everywhere."""
EXACT_TILE = 16
SMALLEST_TILE = 16
SIDE_BY_SIDE = 2
"""Programs with a tile below the largest that a multiprocessor has room for. While one of them multiplies, the other's
pages come: a row's 131,072 tokens, 8 heads of 128, take 187 us by two and 230 by one (H100)."""
PACKED_SIDE_BY_SIDE = 3
PACKED_SPLITS = 64
"""The same of int8 pages with the smallest tile, whose programs wait more and have less to read: 115 us, by two 129."""
ITEM = 8
"""Numbers of an item of the work list: head, first entry and count of the node's rows, tile of its queries, first entry
of its pages, first and last token, slot."""

Ids = Sequence[int] | NDArray[np.int32]


def pages_for(tokens: int) -> int:
    """Return the number of pages of `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class SharedNode(NamedTuple):
    """Tokens that rows share: they lie in `pages`, in order, the last page maybe in part; no tokens take no pages."""

    pages: Ids
    tokens: int
    rows: Ids


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes that a plan, and a graph that reads it, is made for.

    rows: of the batch, exactly. pages: entries in all nodes' tables together, at most. splits: parts of a node, at
    most. tile: queries (rows times query heads of a key-value head) that one program attends with.
    """

    rows: int
    q_heads: int
    kv_heads: int
    pages: int
    levels: int
    splits: int
    tile: int

    @classmethod
    def of(
        cls, rows: int, q_heads: int, kv_heads: int, pages: int, *, levels: int = LEVELS, processors: int = 1,
        exact: bool = False, packed: bool = False, largest: int = LARGEST_TILE,
    ) -> PlanShape:  # fmt: skip
        """For a batch on a device with `processors` multiprocessors; 1 on a CPU. exact: of float32, which takes more
        room. packed: of int8 pages. largest: largest number of queries of a tile.

        Tile and splits depend on the batch's size alone, and the parts of a node on its length besides: what a row gets
        does not depend, not in its last bit, on the other rows. Raises ConfigError, the numbers named.
        """
        if min(rows, q_heads, kv_heads, levels) < 1 or pages < 0 or q_heads % kv_heads:
            raise ConfigError(
                f"a plan needs rows, levels and heads of at least 1, query heads a multiple of key heads, 0 or more "
                f"pages; got rows={rows}, levels={levels}, q_heads={q_heads}, kv_heads={kv_heads}, pages={pages}."
            )
        queries = rows * (q_heads // kv_heads)
        most = EXACT_TILE if exact else largest
        tile = min(most, max(SMALLEST_TILE, 1 << (queries - 1).bit_length()))
        programs = -(-queries // tile) * kv_heads
        most_splits, side_by_side = MAX_SPLITS, SIDE_BY_SIDE if tile < LARGEST_TILE else 1
        if packed and tile == SMALLEST_TILE:
            most_splits, side_by_side = PACKED_SPLITS, PACKED_SIDE_BY_SIDE
        splits = _splits(programs, processors * side_by_side, most_splits)
        return cls(rows, q_heads, kv_heads, pages, levels, splits, tile)

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.q_heads // self.kv_heads

    @property
    def slots(self) -> int:
        """Partials of one query head at most."""
        return self.levels * self.splits

    @property
    def items(self) -> int:
        """Entries of the work list at most: every row may have nodes of its own."""
        tiles = self.rows * max(1, -(-self.group // self.tile))
        return self.levels * self.splits * self.kv_heads * tiles


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _splits(programs: int, together: int, most: int) -> int:
    """Into how many parts a node is cut, so that the last round of `together` programs has few places without one."""
    best, best_share = 1, 0.0
    for splits in range(1, most + 1):
        rounds = -(-programs * splits // together)
        share = programs * splits / (rounds * together)
        if share > best_share + 0.02:
            best, best_share = splits, share
        if rounds > 4:
            break
    return best


class SharedPlan:
    """Work list, rows and levels of a batch; see the module.

    nodes: what was written last. device memory, int32: count (1,): entries of `work` (items, ITEM) that are used. rows
    (levels * rows,): of all nodes, one after the other. pages: the same of their pages. levels (rows, levels): parts
    that a row has at each level.
    """

    def __init__(self, shape: PlanShape, device: torch.device | str = "cpu") -> None:
        """Create a plan without nodes. Its memory is allocated now and keeps its address."""
        self.shape, self.nodes = shape, list[SharedNode]()
        sizes = 1, shape.rows * shape.levels, shape.rows * shape.levels, shape.pages, shape.items * ITEM
        self._starts = np.concatenate([[0], np.cumsum([-(-size // 4) * 4 for size in sizes])]).tolist()
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        cuda = self._buffer.is_cuda
        self._staged = torch.zeros(self._starts[-1], dtype=torch.int32, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None
        views = [self._buffer[start : start + size] for start, size in zip(self._starts, sizes, strict=False)]
        self.count, levels, self.rows, self.pages, work = views
        self.levels, self.work = levels.view(shape.rows, shape.levels), work.view(shape.items, ITEM)

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def serves(self, query: torch.Tensor, kv_heads: int) -> bool:
        """Whether it is for queries (rows, q_heads, ...) like these."""
        shape = self.shape
        return (shape.rows, shape.q_heads, shape.kv_heads) == (
            *query.shape[:2],
            kv_heads,
        ) and query.device == self.device

    def write(self, nodes: Sequence[SharedNode]) -> None:
        """Be the plan of these nodes, those nearer to the beginning of a row's text first. Nodes without rows or tokens
        may be among them. Raises ShapeError, and changes nothing then, for rows or pages that the plan has no room for.

        One copy to the device, on the current stream; kernels launched there later see it.
        """
        numbers = np.zeros(self._starts[-1], np.int32)
        count, levels, rows, pages, work = (
            numbers[start:stop] for start, stop in zip(self._starts[:-1], self._starts[1:], strict=True)
        )
        items = self._fill(nodes, levels, rows, pages)
        work[: items.size] = items.ravel()
        count[0] = len(items)
        if self._copied is not None:
            self._copied.synchronize()  # what was staged before has left
        used = self._starts[-2] + items.size
        self._staged.numpy()[:used] = numbers[:used]
        self._buffer[:used].copy_(self._staged[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self.nodes = [one for one in nodes if one.tokens and len(one.rows)]

    def _fill(
        self, nodes: Sequence[SharedNode], levels: NDArray[np.int32], rows: NDArray[np.int32], pages: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Write the tables; the work list, longest parts first."""
        shape = self.shape
        depth = np.zeros(shape.rows, np.int64)
        at_row = at_page = 0
        found: list[tuple[int, NDArray[np.int32]]] = []
        for node in nodes:
            own, table = np.asarray(node.rows, np.int32), np.asarray(node.pages, np.int32)
            if not own.size or not node.tokens:
                continue
            self._check(node, own, table, depth, at_page)
            level = int(depth[own].max())
            depth[own] = level + 1
            rows[at_row : at_row + len(own)] = own
            pages[at_page : at_page + len(table)] = table
            size = max(MIN_SPLIT_PAGES, -(-len(table) // shape.splits)) * PAGE_TOKENS
            begins = np.arange(0, node.tokens, size)
            levels.reshape(-1)[own * shape.levels + level] = len(begins)
            found.append((size, self._items(node, len(own), (at_row, at_page), begins, size, level * shape.splits)))
            at_row, at_page = at_row + len(own), at_page + len(table)
        found.sort(key=lambda one: -one[0])
        return np.concatenate([np.zeros((0, ITEM), np.int32), *(items for _, items in found)])

    def _items(
        self, node: SharedNode, rows: int, at: tuple[int, int], begins: NDArray[np.int64], size: int, slot: int
    ) -> NDArray[np.int32]:
        """Return the work items of one node, tiles of the same keys side by side so that most reads hit a cache."""
        tiles = -(-rows * self.shape.group // self.shape.tile)
        items = np.empty((len(begins), self.shape.kv_heads, tiles, ITEM), np.int32)
        items[..., 0] = np.arange(self.shape.kv_heads)[:, None]
        items[..., 1], items[..., 2] = at[0], rows
        items[..., 3] = np.arange(tiles)
        items[..., 4] = at[1]
        items[..., 5] = begins[:, None, None]
        items[..., 6] = np.minimum(begins + size, node.tokens)[:, None, None]
        items[..., 7] = slot + np.arange(len(begins))[:, None, None]
        return items.reshape(-1, ITEM)

    def _check(
        self, node: SharedNode, rows: NDArray[np.int32], pages: NDArray[np.int32], depth: NDArray[np.int64], used: int
    ) -> None:
        shape = self.shape
        if rows.min() < 0 or rows.max() >= shape.rows or len(np.unique(rows)) != len(rows):
            raise ShapeError(
                f"rows of a node must be distinct numbers from 0 to {shape.rows - 1}, got {rows.tolist()}."
            )
        if node.tokens < 0 or len(pages) != pages_for(node.tokens) or pages.min() < 0:
            raise ShapeError(
                f"{node.tokens} tokens of a node need {pages_for(node.tokens)} pages of {PAGE_TOKENS} tokens, numbered "
                f"from 0, got {len(pages)} pages."
            )
        if int(depth[rows].max()) >= shape.levels:
            raise ShapeError(
                f"a row has more than {shape.levels} nodes, the levels of the plan; make a plan with more levels."
            )
        if used + len(pages) > shape.pages:
            raise ShapeError(
                f"the nodes need at least {used + len(pages)} pages, the plan has {shape.pages}; make a plan with more "
                "pages."
            )
