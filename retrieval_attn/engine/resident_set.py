"""Nodes of the prefix cache in memory, their bytes and their order of eviction. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sequence
from math import log2

from retrieval_attn.engine.node import Namespace, Node, Offloadable, Payload, Sizes

__all__ = ["ResidentSet"]

HALF_LIFE = 1.5
"""Turnovers in which a heat halves. A turnover is over when as many bytes were evicted as are in memory."""
CHILD_HEAT = 2.0
"""Maximum heat of a new child by its parent's: the next turn of a session is as likely as the turns before it."""
LATEST_SHARE = 0.25
"""Maximum share of the bytes in memory with which the latest used node is evicted last."""
MAX_EVICTED = 4096
"""Evicted nodes whose heat is kept."""


LEAST_OFFLOADED = 1 << 20
"""Minimum bytes of GPU memory of a node that is offloaded; an offloaded node has fewer left."""


class ResidentSet:
    """Nodes with a payload. A node's parent enters before it and is evicted after it.

    The node with the fewest hit tokens to expect per byte is evicted first: heat x tokens / bytes. A node's heat counts
    its insertions and the lookups that end in it, and decays with the bytes that are evicted, not with time. The heat
    of evicted nodes is kept, so that a document in frequent use soon stays. The latest used node goes last, because its
    follow-up comes next, unless it is large. See docs/benchmarks.md, prefix cache eviction.

    Not thread-safe: the prefix cache calls it under its lock.

    Attributes:
        sizes: bytes of all payloads.
        idle: bytes of those without a lease on them or below them.
    """

    def __init__(self) -> None:
        self.sizes = self.idle = Sizes()
        self._nodes: dict[Node, None] = {}
        self._last: dict[Node, None] = {}  # those without a child in memory
        self._latest: Node | None = None  # that was used
        self._turnovers = 0.0  # evicted bytes over the bytes in memory at each eviction
        self._evicted: dict[tuple[Namespace, int], tuple[float, float]] = {}  # heat and time, oldest first

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def add(self, node: Node, held: Payload, rebuild_seconds: float) -> None:
        """Store a payload in a node whose parent has one."""
        node.held, node.sizes, node.rebuild_seconds = held, held.sizes, rebuild_seconds
        node.text_key = node.namespace, hash(node.prefix(len(node)).tobytes())
        node.heat, node.heat_at = self._evicted.pop(node.text_key, (0.0, self._turnovers))
        self.count_use(node)
        if node.parent is not None:
            node.heat = max(node.heat, min(self._heat(node.parent), CHILD_HEAT))
        self.sizes = self.sizes.plus(node.sizes)
        self.idle = self.idle if node.refs else self.idle.plus(node.sizes)
        self._nodes[node] = self._last[node] = None
        if node.parent is not None:
            node.parent.held_children += 1
            self._last.pop(node.parent, None)

    def count_use(self, node: Node) -> None:
        """Count a use of a node. Its ancestors are at least as hot: they are evicted after it."""
        self._latest = node
        one, heat = node, self._heat(node) + 1
        while one.parent is not None:
            one.heat, one.heat_at = heat, self._turnovers
            one = one.parent
            heat = max(heat, self._heat(one))

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
        self._turnovers += node.sizes.total / max(self.sizes.total, 1)
        self._evicted[node.text_key] = node.heat, node.heat_at
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]
        self.sizes, self.idle = self.sizes.less(node.sizes), self.idle.less(node.sizes)
        del self._nodes[node], self._last[node]
        node.held, node.sizes = None, Sizes()
        if node is self._latest:
            self._latest = None
        if node.parent is not None:
            node.parent.held_children -= 1
            if node.parent in self._nodes and not node.parent.held_children:
                self._last[node.parent] = None

    def victims(self, need: Sizes, limit: Sizes | None = None) -> Iterator[Node]:
        """Yield nodes to evict until `need` bytes of each kind are free. The caller drops each before it asks for the
        next.

        Nodes that alone exceed `limit` go first, because they cannot stay whatever else goes; then nodes with bytes of
        a lacking kind, fewest expected hit tokens per such byte first and the latest used one last; then nodes without
        such bytes whose parents have some. Leased nodes and nodes with children are never evicted: a parent becomes a
        candidate when its last child is dropped.
        The first node costs O(leaves times their depth), each further one O(log), until another kind is lacking.
        """
        latest = self._latest
        if latest is not None and latest.sizes.total > LATEST_SHARE * self.sizes.total:
            latest = None
        while (kinds := need.lacking) and (
            heap := [(*_order(node, kinds, limit, latest), node) for node in self._last if _helps(node, kinds)]
        ):
            heapq.heapify(heap)
            while heap and need.lacking == kinds:
                node = heapq.heappop(heap)[-1]
                parent, need = node.parent, need.less(node.sizes)
                yield node
                if parent is not None and parent in self._last and _helps(parent, kinds):
                    heapq.heappush(heap, (*_order(parent, kinds, limit, latest), parent))

    def _heat(self, node: Node) -> float:
        """Return the decayed heat of a node; 0 for the root."""
        return node.heat * 0.5 ** ((self._turnovers - node.heat_at) / HALF_LIFE)


def _order(
    node: Node, kinds: Sequence[int], limit: Sizes | None, latest: Node | None
) -> tuple[bool, bool, bool, float, float, int]:
    fits, nbytes = limit is None or all(node.sizes[kind] <= limit[kind] for kind in kinds), node.sizes.of(kinds)
    # as a logarithm, which orders nodes at all times as the decayed heat does
    score = log2(node.heat * len(node) / max(nbytes, 1)) + node.heat_at / HALF_LIFE
    return fits, not nbytes, node is latest, score, node.used, node.number


def _helps(node: Node, kinds: Sequence[int]) -> bool:
    """Return whether evicting the node, or a parent that can be evicted after it, frees bytes of these kinds."""
    one: Node | None = node
    while one is not None and one.parent is not None and not one.refs:
        if one.sizes.of(kinds):
            return True
        one = one.parent
    return False
