"""Residents: the nodes that are in memory, their bytes, and which of them is given up first. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from retrieval_attn.batch.node import Held, Node

__all__ = ["Residents", "worth"]


def worth(node: Node, now: float) -> float:
    """Seconds to make one byte of it anew, per second since its last use: the least is given up first.

    Cost alone would keep long texts forever that nobody comes back to; age alone gives up a document that took minutes
    for a system prompt that takes milliseconds.
    """
    return node.rebuild_seconds / max(node.nbytes, 1) / max(now - node.used, 1e-9)


class Residents:
    """Nodes with something in memory. A node's parent is in memory before it, and leaves after it.

    Not thread-safe: the tree calls it under its lock.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._nodes: dict[Node, None] = {}
        self._last: dict[Node, None] = {}  # those without a child in memory

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def add(self, node: Node, held: Held, rebuild_seconds: float) -> None:
        """The node holds this from now on; its parent is in memory."""
        node.held, node.nbytes, node.rebuild_seconds = held, int(held.nbytes), rebuild_seconds
        self.nbytes += node.nbytes
        self._nodes[node] = self._last[node] = None
        if node.parent is not None:
            node.parent.held_children += 1
            self._last.pop(node.parent, None)

    def drop(self, node: Node) -> Held:
        """The node holds nothing from now on; what it held. It has no child in memory."""
        held = node.held
        assert held is not None and not node.held_children
        self.nbytes -= node.nbytes
        del self._nodes[node], self._last[node]
        node.held, node.nbytes = None, 0
        if node.parent is not None:
            node.parent.held_children -= 1
            if node.parent in self._nodes and not node.parent.held_children:
                self._last[node.parent] = None
        return held

    def victims(self, keep: Collection[Node], now: float) -> Iterator[Node]:
        """Nodes to give up, the least worth first; the caller drops each before it asks for the next.

        Never a leased one, one of keep, or one with a child in memory. A parent comes into question when its last
        child is dropped. O(nodes without children) for the first, O(log) for each further one.
        """
        kept = set(keep)
        heap = [(worth(node, now), node.number, node) for node in self._last if not node.refs and node not in kept]
        heapq.heapify(heap)
        while heap:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            yield node
            if parent is not None and parent in self._last and not parent.refs and parent not in kept:
                heapq.heappush(heap, (worth(parent, now), parent.number, parent))

    def check(self) -> None:
        """Raises AssertionError unless counts and sums are those of the nodes."""
        if self.nbytes != sum(node.nbytes for node in self._nodes):
            raise AssertionError(f"{self.nbytes} bytes are counted, but nodes have other sums")
        if set(self._last) != {node for node in self._nodes if not node.held_children}:
            raise AssertionError("nodes without a child in memory are not those that are listed")
        for node in self._nodes:
            if node.held is None or node.gone or node.parent is None or not node.parent.in_memory:
                raise AssertionError(f"{node!r} is listed as in memory, but it or its parent is not")
