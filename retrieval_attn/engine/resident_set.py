"""Residents: the nodes that are in memory, their bytes, and which of them are given up first. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from retrieval_attn.engine.node import Node, Payload, Sizes

__all__ = ["ResidentSet", "worth"]


def worth(node: Node, now: float, kinds: Sequence[int]) -> float:
    """Seconds to make one byte of it anew, of these kinds, per second since its last use: the least is given up first.

    Cost alone would keep long texts forever that nobody comes back to; age alone gives up a document that took minutes
    for a system prompt that takes milliseconds.
    """
    return node.rebuild_seconds / max(node.sizes.of(kinds), 1) / max(now - node.used, 1e-9)


class ResidentSet:
    """Nodes with something in memory. A node's parent is in memory before it, and leaves after it.

    Not thread-safe: the tree calls it under its lock.
    """

    def __init__(self) -> None:
        self.sizes = Sizes()
        self._nodes: dict[Node, None] = {}
        self._last: dict[Node, None] = {}  # those without a child in memory

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def add(self, node: Node, held: Payload, rebuild_seconds: float) -> None:
        """The node holds this from now on; its parent is in memory."""
        node.held, node.sizes, node.rebuild_seconds = held, held.sizes, rebuild_seconds
        self.sizes = self.sizes.plus(node.sizes)
        self._nodes[node] = self._last[node] = None
        if node.parent is not None:
            node.parent.held_children += 1
            self._last.pop(node.parent, None)

    def drop(self, node: Node) -> None:
        """The node holds nothing from now on. It has no child in memory."""
        assert node.held is not None and not node.held_children
        self.sizes = self.sizes.less(node.sizes)
        del self._nodes[node], self._last[node]
        node.held, node.sizes = None, Sizes()
        if node.parent is not None:
            node.parent.held_children -= 1
            if node.parent in self._nodes and not node.parent.held_children:
                self._last[node.parent] = None

    def victims(self, need: Sizes, now: float) -> Iterator[Node]:
        """Nodes to give up until so many bytes of each kind are free; the caller drops each before the next is found.

        The least worth goes first of those that have bytes of a kind that is still lacking; then those without, that
        stand before such a one. Never a leased one, or one with children: a parent comes into question when its last
        child is dropped. O(nodes without children times their depth) for the first, O(log) for
        each further one, until another kind is lacking.
        """
        while (kinds := need.lacking) and (
            heap := [(*_order(node, now, kinds), node) for node in self._last if _helps(node, kinds)]
        ):
            heapq.heapify(heap)
            while heap and need.lacking == kinds:
                node = heapq.heappop(heap)[-1]
                parent, need = node.parent, need.less(node.sizes)
                yield node
                if parent is not None and parent in self._last and _helps(parent, kinds):
                    heapq.heappush(heap, (*_order(parent, now, kinds), parent))

    def check(self) -> None:
        """Raises AssertionError unless counts and sums are those of the nodes."""
        if self.sizes != (sums := Sizes(*map(sum, zip(Sizes(), *(node.sizes for node in self._nodes), strict=True)))):
            raise AssertionError(f"{self.sizes} are counted, but nodes have {sums}")
        if set(self._last) != {node for node in self._nodes if not node.held_children}:
            raise AssertionError("nodes without a child in memory are not those that are listed")
        for node in self._nodes:
            if node.held is None or node.gone or node.parent is None or not node.parent.in_memory:
                raise AssertionError(f"{node!r} is listed as in memory, but it or its parent is not")


def _order(node: Node, now: float, kinds: Sequence[int]) -> tuple[bool, float, int]:
    return not node.sizes.of(kinds), worth(node, now, kinds), node.number


def _helps(node: Node, kinds: Sequence[int]) -> bool:
    """Whether a node may go, and has bytes of these kinds, or a node that may go after it does."""
    one: Node | None = node
    while one is not None and one.parent is not None and not one.refs:
        if one.sizes.of(kinds):
            return True
        one = one.parent
    return False
