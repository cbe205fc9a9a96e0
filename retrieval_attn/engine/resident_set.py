"""Nodes of the prefix cache in memory, their bytes and their order of eviction. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sequence

from retrieval_attn.engine.node import Node, Offloadable, Payload, Sizes

__all__ = ["ResidentSet", "eviction_score"]


def eviction_score(node: Node, now: float, kinds: Sequence[int]) -> float:
    """Return seconds of prefill per byte and per second since the last use. The lowest score is evicted first.

    Cost alone would keep long unused texts forever; age alone would evict a document that took minutes for a system
    prompt that takes milliseconds. `kinds`: kinds of bytes that count.
    """
    return node.rebuild_seconds / max(node.sizes.of(kinds), 1) / max(now - node.used, 1e-9)


LEAST_OFFLOADED = 1 << 20
"""Bytes of GPU memory from which on a node is offloaded: what remains of a offloaded one is less."""


class ResidentSet:
    """Nodes with a payload. A node's parent enters before it and is evicted after it.

    Not thread-safe: the prefix cache calls it under its lock.

    Attributes:
        sizes: bytes of all payloads.
        idle: bytes of those without a lease on them or below them.
    """

    def __init__(self) -> None:
        self.sizes = self.idle = Sizes()
        self._nodes: dict[Node, None] = {}
        self._last: dict[Node, None] = {}  # those without a child in memory

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def add(self, node: Node, held: Payload, rebuild_seconds: float) -> None:
        """Store a payload in a node whose parent has one."""
        node.held, node.sizes, node.rebuild_seconds = held, held.sizes, rebuild_seconds
        self.sizes = self.sizes.plus(node.sizes)
        self.idle = self.idle if node.refs else self.idle.plus(node.sizes)
        self._nodes[node] = self._last[node] = None
        if node.parent is not None:
            node.parent.held_children += 1
            self._last.pop(node.parent, None)

    def refer(self, node: Node, more: int) -> None:
        """Count `more` leases on a node or below it."""
        before, node.refs = node.refs, node.refs + more
        if not before and node.refs:
            self.idle = self.idle.less(node.sizes)
        elif before and not node.refs:
            self.idle = self.idle.plus(node.sizes)

    def recount(self, node: Node) -> None:
        """Count a node's bytes again: its payload moved some to other memory."""
        if node.held is None:
            return
        more = node.held.sizes.less(node.sizes)
        node.sizes = node.sizes.plus(more)
        self.sizes = self.sizes.plus(more)
        self.idle = self.idle if node.refs else self.idle.plus(more)

    def next_to_offload(self, tried: Container[int]) -> tuple[Node, Offloadable] | None:
        """Return the least recently used node without leases that holds GPU memory which it can offload; None: none.

        tried: numbers of nodes that are left out.
        """
        best: tuple[Node, Offloadable] | None = None
        for node in self._nodes:
            if node.refs or node.sizes.device < LEAST_OFFLOADED or node.number in tried:
                continue
            if isinstance(node.held, Offloadable) and (best is None or node.used < best[0].used):
                best = node, node.held
        return best

    def drop(self, node: Node) -> None:
        """Remove the payload of a node whose children have none."""
        assert node.held is not None and not node.held_children and not node.refs
        self.sizes, self.idle = self.sizes.less(node.sizes), self.idle.less(node.sizes)
        del self._nodes[node], self._last[node]
        node.held, node.sizes = None, Sizes()
        if node.parent is not None:
            node.parent.held_children -= 1
            if node.parent in self._nodes and not node.parent.held_children:
                self._last[node.parent] = None

    def victims(self, need: Sizes, now: float, limit: Sizes | None = None) -> Iterator[Node]:
        """Yield nodes to evict until `need` bytes of each kind are free. The caller drops each before it asks for the
        next.

        Nodes that alone exceed `limit` go first, because they cannot stay whatever else goes; then nodes with bytes of
        a lacking kind, lowest `eviction_score` first; then nodes without such bytes whose parents have some. Leased
        nodes and nodes with children are never evicted: a parent becomes a candidate when its last child is dropped.
        The first node costs O(leaves times their depth), each further one O(log), until another kind is lacking.
        """
        while (kinds := need.lacking) and (
            heap := [(*_order(node, now, kinds, limit), node) for node in self._last if _helps(node, kinds)]
        ):
            heapq.heapify(heap)
            while heap and need.lacking == kinds:
                node = heapq.heappop(heap)[-1]
                parent, need = node.parent, need.less(node.sizes)
                yield node
                if parent is not None and parent in self._last and _helps(parent, kinds):
                    heapq.heappush(heap, (*_order(parent, now, kinds, limit), parent))


def _order(node: Node, now: float, kinds: Sequence[int], limit: Sizes | None) -> tuple[bool, bool, float, int]:
    fits = limit is None or all(node.sizes[kind] <= limit[kind] for kind in kinds)
    return fits, not node.sizes.of(kinds), eviction_score(node, now, kinds), node.number


def _helps(node: Node, kinds: Sequence[int]) -> bool:
    """Return whether evicting the node, or a parent that can be evicted after it, frees bytes of these kinds."""
    one: Node | None = node
    while one is not None and one.parent is not None and not one.refs:
        if one.sizes.of(kinds):
            return True
        one = one.parent
    return False
