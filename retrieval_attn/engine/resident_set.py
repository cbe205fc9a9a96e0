"""Nodes of the prefix cache in memory, their bytes and their order of eviction. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from math import log2
from typing import NamedTuple

from retrieval_attn.engine.node import Namespace, Node, Offloadable, Payload, Sizes

__all__ = ["ResidentSet"]

FIRST_HALF_LIFE, LEAST_HALF_LIFE, MOST_HALF_LIFE = 0.3, 0.05, 1.5
"""Turnovers in which a heat halves. A turnover is over when as many bytes were added as are in memory."""
SHORTER, LONGER = 0.7, 1.2
"""Factors of the half-life when an evicted node returns: within a turnover of its last use, and later."""
CHILD_HEAT = 2.0
"""Maximum heat of a new child by its parent's: the next turn of a session is as likely as the turns before it."""
LATEST = 2.0
"""Factor of the latest used node's heat: the next question is likely to be about the same text."""
NOT_WAITED_FOR = 1 << 30
"""Position in the queue of nodes that no waiting request continues."""
MAX_EVICTED = 4096
"""Evicted nodes whose heat is kept."""


LEAST_OFFLOADED = 1 << 20
"""Minimum bytes of GPU memory of a node that is offloaded; an offloaded node has fewer left."""


class ResidentSet:
    """Nodes with a payload. A node's parent enters before it and is evicted after it.

    The node with the fewest hit tokens to expect per byte is evicted first: heat x tokens / bytes. A node's heat counts
    its insertions and the lookups that end in it, and decays with the bytes that are added, not with time. The heat
    of evicted nodes is kept, so that a document in frequent use soon stays. The latest used node's heat counts twice,
    because its follow-up is likely. See docs/benchmarks.md, prefix cache eviction.

    How fast heat decays adapts to the requests, from near LRU to near LFU, as ARC (FAST 2003) adapts its two lists: an
    evicted node that returns soon after its last use would have stayed in LRU order, one that returns late would not.

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
        self._half_life = FIRST_HALF_LIFE
        self._turnovers = 0.0  # added bytes over the bytes in memory at each addition
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
        self._turnovers += node.sizes.total / max(self.sizes.total + node.sizes.total, 1)
        node.text_key = node.namespace, hash(node.prefix(len(node)).tobytes())
        node.heat, node.heat_at = self._return(node)
        self.count_use(node)
        if node.parent is not None:
            node.heat = max(node.heat, min(self._heat(node.parent), CHILD_HEAT))
        self.sizes = self.sizes.plus(node.sizes)
        self.idle = self.idle if node.refs else self.idle.plus(node.sizes)
        self._nodes[node] = self._last[node] = None
        if node.parent is not None:
            node.parent.held_children += 1
            self._last.pop(node.parent, None)

    def _return(self, node: Node) -> tuple[float, float]:
        """Return the kept heat of an evicted node with its time, and adapt the half-life; 0 and now for a new one."""
        found = self._evicted.pop(node.text_key, None)
        if found is None:
            return 0.0, self._turnovers
        changed = self._half_life * (SHORTER if self._turnovers - found[1] < 1 else LONGER)
        self._half_life = min(max(changed, LEAST_HALF_LIFE), MOST_HALF_LIFE)
        return found

    def count_use(self, node: Node) -> None:
        """Count a use of a node; of successive ones, the first. Its ancestors are at least as hot: they go after it.

        Questions on one text are successive: an answer that is cached below it in between is no other text.
        """
        one, heat = node, self._heat(node) + (not self._is_latest(node))
        self._latest = node
        while one.parent is not None:
            one.heat, one.heat_at = heat, self._turnovers
            one = one.parent
            heat = max(heat, self._heat(one))

    def _is_latest(self, node: Node) -> bool:
        """Return whether the latest used node is this one or below it."""
        one = self._latest
        while one is not None and one is not node:
            one = one.parent
        return one is node

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

    def next_to_offload(
        self, tried: Container[int], *, copied: bool | None = None, leased: bool = False
    ) -> tuple[Node, Offloadable] | None:
        """Return the least recently used node that holds GPU memory which it can offload; None: none.

        tried: numbers of nodes that are left out. copied: whether the node's data has been copied to host memory; None:
        either. leased: include nodes with leases.
        """
        best: tuple[Node, Offloadable] | None = None
        for node in self._nodes:
            if (node.refs and not leased) or node.sizes.device < LEAST_OFFLOADED or node.number in tried:
                continue
            if not isinstance(node.held, Offloadable) or copied not in (None, node.held.copied):
                continue
            if best is None or node.used < best[0].used:
                best = node, node.held
        return best

    def drop(self, node: Node) -> None:
        """Remove the payload of a node whose children have none."""
        assert node.held is not None and not node.held_children and not node.refs
        self._evicted[node.text_key] = node.heat, node.heat_at
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]
        self.sizes, self.idle = self.sizes.less(node.sizes), self.idle.less(node.sizes)
        del self._nodes[node], self._last[node]
        node.held, node.sizes = None, Sizes()
        if node is self._latest:
            self._latest = node.parent if node.parent in self._nodes else None
        if node.parent is not None:
            node.parent.held_children -= 1
            if node.parent in self._nodes and not node.parent.held_children:
                self._last[node.parent] = None

    def supersede(self, node: Node, heir: Node) -> None:
        """Remove the payload of a node whose tokens `heir` has as well, which is as hot from now on.

        Nothing is evicted: the cache turned over by what `heir` has more.
        """
        heat, nbytes = self._heat(heir), node.sizes.total
        self.drop(node)
        del self._evicted[node.text_key]
        self._turnovers -= nbytes / max(self.sizes.total + nbytes, 1)
        heir.heat, heir.heat_at = max(heat, self._heat(node)), self._turnovers

    def victims(
        self, need: Sizes, limit: Sizes | None = None, waiting: Mapping[Node, int] | None = None,
        pinned: Set[Node] = frozenset(),
    ) -> Iterator[Node]:  # fmt: skip
        """Yield nodes to evict until `need` bytes of each kind are free. The caller may drop each before the next.

        Nodes that alone exceed `limit` go first, because they cannot stay whatever else goes; then nodes with bytes of
        a lacking kind, fewest expected hit tokens per such byte first; then nodes without such bytes whose parents have
        some. Nodes of their kind follow that sessions continue, and then those that waiting requests continue, the last
        request's first. Leased nodes and nodes with children are never evicted: a parent becomes a candidate after its
        last child.
        The first node costs O(leaves times their depth), each further one O(log), until another kind is lacking.

        waiting: position in the queue of the first request that continues a node. pinned: see `SessionPins`.
        """
        if not need.lacking:
            return
        order = _EvictionOrder(limit, self._latest, waiting or {}, set(pinned), self._half_life)
        left, children = dict(self._last), dict[Node, int]()
        while (kinds := need.lacking) and (heap := [order.item(node, kinds) for node in left if _helps(node, kinds)]):
            heapq.heapify(heap)
            while heap and need.lacking == kinds:
                node = heapq.heappop(heap)[-1]
                parent, need = node.parent, need.less(node.sizes)
                del left[node]
                if parent is not None and parent in self._nodes:
                    order.pinned.update([parent] if node in order.pinned else [])
                    children[parent] = children.get(parent, parent.held_children) - 1
                yield node
                if parent is not None and children.get(parent) == 0:
                    left[parent] = None
                    if _helps(parent, kinds):
                        heapq.heappush(heap, order.item(parent, kinds))

    def _heat(self, node: Node) -> float:
        """Return the decayed heat of a node; 0 for the root."""
        return node.heat * 0.5 ** ((self._turnovers - node.heat_at) / self._half_life)


class _EvictionOrder(NamedTuple):
    """Order of `ResidentSet.victims`."""

    limit: Sizes | None
    latest: Node | None
    waiting: Mapping[Node, int]
    pinned: set[Node]
    half_life: float

    def item(self, node: Node, kinds: Sequence[int]) -> tuple[bool, bool, int, bool, float, float, int, Node]:
        """Return a node behind the values that order it, the first to evict having the least."""
        limit, nbytes = self.limit, node.sizes.of(kinds)
        fits = limit is None or all(node.sizes[kind] <= limit[kind] for kind in kinds)
        needed = -self.waiting.get(node, NOT_WAITED_FOR)
        heat = node.heat * (LATEST if node is self.latest else 1)
        # as a logarithm, which orders nodes at all times as the decayed heat does
        score = log2(heat * len(node) / max(nbytes, 1)) + node.heat_at / self.half_life
        return fits, not nbytes, needed, node in self.pinned, score, node.used, node.number, node


def _helps(node: Node, kinds: Sequence[int]) -> bool:
    """Return whether evicting the node, or a parent that can be evicted after it, frees bytes of these kinds."""
    one: Node | None = node
    while one is not None and one.parent is not None and not one.refs:
        if one.sizes.of(kinds):
            return True
        one = one.parent
    return False
