"""Tree: which beginnings of texts are known, so that each is read, stored and indexed once. Imports no torch.

A radix tree over token ids (RadixAttention, SGLang) whose nodes are whole spans with an index each, 10^2 to 10^6
tokens. So its splits are logical: a child may begin inside a node's span, and what the node holds is never cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.engine.audit import check_nodes
from retrieval_attn.engine.ids import Ids, common, int32_row
from retrieval_attn.engine.inflight_prefills import InflightPrefills, PrefillClaim
from retrieval_attn.engine.node import Branches, Namespace, Node, Payload, Place, Sizes
from retrieval_attn.engine.resident_set import ResidentSet
from retrieval_attn.errors import ConfigError, ReleasedError, ShapeError

__all__ = ["Lease", "Match", "RadixCache", "PrefixCacheStats", "ending", "longest"]


class Lease:
    """A request's hold on a node; `with` or `release` ends it. Any thread may release it, and more than once."""

    __slots__ = ("_give_back", "node", "open")

    def __init__(self, node: Node, give_back: Callable[[Lease], None]) -> None:
        """Made by `Tree.lease`. give_back: the tree's, which sets `open`, so that of two threads one gives it back."""
        self.node = node
        self.open = True
        self._give_back = give_back

    def __repr__(self) -> str:
        return f"Lease({self.node!r}, {'open' if self.open else 'released'})"

    def release(self) -> None:
        """Gives the node back; does nothing the second time."""
        self._give_back(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Match(NamedTuple):
    """The longest known beginning of a text; the root's place where nothing is known.

    node, tokens: the last node and how many tokens of its span. length: tokens in all. lease: on node, if one was asked
    for.
    """

    node: Node
    tokens: int
    length: int
    lease: Lease | None = None

    @property
    def place(self) -> Place:
        """Where the rest of the text begins."""
        return Place(self.node, self.tokens)


def longest(root: Node, ids: Ids, namespace: Namespace) -> Match:
    """The longest match of all ids; of equally long ones the one whose span ends there, then the one found first.

    Every id is compared. Each node is visited once at most, and only those whose first tokens agree: O(tokens + nodes
    on the way), and once more for each node that doubles another's span.
    """
    best, most = (root, 0), (0, True)

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best, most
        found = node.start + tokens, tokens == len(node)
        if found > most:
            best, most = (node, tokens), found
        return found == (len(ids), True)

    _walk(root, ids, namespace, visit)
    return Match(*best, most[0])


def ending(root: Node, ids: Ids, namespace: Namespace) -> Node | None:
    """The node whose span ends where ids end, all of which agree.

    Of several one of the namespace's own comes first, then the one found first.
    """
    best: Node | None = None

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best
        if tokens == len(node) and node.end == len(ids) and node.parent is not None:
            own = node.namespace == namespace
            if best is None or (own and best.namespace != namespace):
                best = node
            return own
        return False

    _walk(root, ids, namespace, visit)
    return best


def _walk(root: Node, ids: Ids, namespace: Namespace, visit: Callable[[Node, int], bool]) -> None:
    """Visit nodes that agree with ids: with the number of tokens that do; until visit says enough."""
    namespaces = (None,) if namespace is None else (None, namespace)
    stack = [root]
    while stack:
        node = stack.pop()
        rest = ids[node.start :]
        tokens = common(node.ids, rest)
        if visit(node, tokens):
            return
        if node.branches is not None:
            for name in namespaces:
                stack += node.branches.behind(name, tokens, rest)


class PrefixCacheStats(NamedTuple):
    """Counts of a prefix cache.

    Attributes:
        prefix_entries_resident: nodes of the tree.
        nbytes: bytes of all entries.
        host_nbytes, device_nbytes, page_nbytes: bytes in host memory, on GPUs and in KV pages.
        prefix_lookups, prefix_tokens_queried: lookups, and tokens of the prompts that were looked up.
        hits, tokens_hit: lookups that found a cached prefix, and tokens of these prefixes.
        evicted, evicted_bytes: evicted entries and their bytes.
        reading, waiting: prefills in flight, and claims that wait for them.
    """

    prefix_entries_resident: int = 0
    nbytes: int = 0
    host_nbytes: int = 0
    device_nbytes: int = 0
    page_nbytes: int = 0
    prefix_lookups: int = 0
    hits: int = 0
    prefix_tokens_queried: int = 0
    tokens_hit: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    reading: int = 0
    waiting: int = 0

    def add_lookup(self, tokens: int, hit: int) -> PrefixCacheStats:
        """Return the counts with one more lookup.

        Args:
            tokens: length of the prompt.
            hit: length of its cached prefix.
        """
        return self._replace(
            prefix_lookups=self.prefix_lookups + 1,
            hits=self.hits + (hit > 0),
            prefix_tokens_queried=self.prefix_tokens_queried + tokens,
            tokens_hit=self.tokens_hit + hit,
        )

    def add_eviction(self, entries: int, nbytes: int) -> PrefixCacheStats:
        """Return the counts with more evicted entries."""
        return self._replace(evicted=self.evicted + entries, evicted_bytes=self.evicted_bytes + nbytes)


class RadixCache:
    """Prefixes of texts, by namespace.

    A node is found by its first share_tokens tokens, or all of a shorter one: fewer tokens in common are not worth a
    shared parent, which could not leave memory before its last child. (So a text of so few tokens is not found by an
    equal one, which has its last token to read.) Texts of a namespace are seen by this namespace
    alone; those of None by all.

    Thread-safe: any method may be called by any thread, and holds one lock for at most some milliseconds. An engine's
    planning thread matches, inserts and evicts; the thread that runs steps and those that read texts release leases
    and claims. A node without a lease may be evicted between two calls: `match(leased=True)` leaves no gap.
    """

    def __init__(self, *, share_tokens: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds; with a given one everything is deterministic. Raises ConfigError for share_tokens < 1."""
        if share_tokens < 1:
            raise ConfigError(f"share_tokens must be at least 1, but is {share_tokens}")
        self.root = Node(None, np.zeros(0, np.int32), None, 0)
        self._share_tokens = share_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._residents = ResidentSet()
        self._pending = InflightPrefills(share_tokens)
        self._count = 0
        self._last_number = 0
        self._counts = PrefixCacheStats()

    def __len__(self) -> int:
        """Nodes, the root not counted."""
        return self._count

    @property
    def sizes(self) -> Sizes:
        """Bytes that nodes hold in memory."""
        return self._residents.sizes

    @property
    def stats(self) -> PrefixCacheStats:
        """Counts of one moment."""
        with self._lock:
            host, device, pages = sizes = self._residents.sizes
            return self._counts._replace(
                prefix_entries_resident=self._count,
                nbytes=sizes.total,
                host_nbytes=host,
                device_nbytes=device,
                page_nbytes=pages,
                reading=len(self._pending),
                waiting=self._pending.waiting,
            )

    def match(
        self,
        ids: Sequence[int] | NDArray[np.integer],
        namespace: Namespace,
        *,
        leased: bool = False,
        again: bool = False,
    ) -> Match:
        """The longest known beginning, at most all ids but the last: the model must see one to go on.

        leased: with a lease on the node. again: of a request that asked before, so that it does not count twice. Of no
        ids nothing is known. Raises ShapeError for ids that are none.
        """
        given = int32_row(ids)
        with self._lock:
            found = longest(self.root, given[:-1], namespace)
            if not again:
                self._counts = self._counts.add_lookup(len(given), found.length)
            return found._replace(lease=self._lease(found.node)) if leased else found

    def insert(
        self,
        parent: Node | Place | Match,
        ids: Sequence[int] | NDArray[np.integer],
        held: Payload,
        namespace: Namespace,
        *,
        rebuild_seconds: float = 0.0,
    ) -> Node:
        """The node of a span behind a place of the tree; behind the whole parent where that is a node.

        If a node already ends there with all the same ids, it is returned with what it holds: then `node.held is not
        held`. A span that an existing one goes on with in part becomes a node of its own nevertheless.
        Raises ReleasedError if the parent was evicted; ConfigError for a node of another namespace; ShapeError for no
        ids, or a place so near the parent's beginning that no match leads there.
        """
        span = int32_row(ids).copy()
        span.flags.writeable = False
        place = _place(parent)
        with self._lock:
            _must_take(place, span, namespace, self._share_tokens)
            whole = np.concatenate((place.node.prefix(place.at), span))
            node = ending(self.root, whole, namespace)
            if node is None:
                node = self._new(place, span, namespace)
                self._residents.add(node, held, rebuild_seconds)
            node.used = self._clock()
            return node

    def pending(
        self, parent: Node | Place | Match, ids: Sequence[int] | NDArray[np.integer], namespace: Namespace
    ) -> PrefillClaim:
        """A claim to read ids, the rest of a text behind a match: `mine`, or waiting for a read that serves it.

        Keep the match leased. Where the tree has learned more since the match, the claim waits for nothing: its future
        is resolved to the node, and the request matches again. Raises as `insert`.
        """
        rest = int32_row(ids)
        place = _place(parent)
        with self._lock:
            _must_take(place, rest, namespace, self._share_tokens)
            whole = np.concatenate((place.node.prefix(place.at), rest))
            found = longest(self.root, whole[:-1], namespace)
            if found.length > place.length:
                claim = PrefillClaim(self._pending, whole, place.length, namespace)
                claim.future.set_result(found.node)
                return claim
            return self._pending.claim(whole, place.length, namespace)

    def lease(self, node: Node) -> Lease:
        """Holds a node and all before it; also counts as a use. Raises ReleasedError where it was evicted."""
        with self._lock:
            return self._lease(node)

    def evict(self, need: Sizes) -> Sizes:
        """Gives up what nodes hold until so many bytes of each kind are free, or none of a kind that is lacking may go
        any more; exactly how many bytes went.

        Nodes without children go, those with bytes of a kind that is lacking and the least worth of them first (see
        `residents.worth`), and their parents after them; never leased ones.
        """
        freed, dropped = Sizes(), 0
        with self._lock:
            for node in self._residents.victims(need, self._clock()):
                freed = freed.plus(node.sizes)
                self._residents.drop(node)
                dropped += 1
                self._prune(node)
            self._counts = self._counts.add_eviction(dropped, freed.total)
        return freed

    def check(self) -> None:
        """Raises AssertionError unless all counts, links and references agree. O(nodes)."""
        self._pending.check()
        with self._lock:
            self._residents.check()
            check_nodes(self.root, self._residents, self._count)

    def _new(self, place: Place, span: Ids, namespace: Namespace) -> Node:
        self._last_number += 1
        self._count += 1
        parent, at = place
        node = Node(place, span, namespace, self._last_number)
        if parent.branches is None:
            parent.branches = Branches(self._share_tokens)
        parent.branches.add(node, doubles=at < len(parent) and parent.ids[at] == span[0])
        return node

    def _lease(self, node: Node) -> Lease:
        _must_be_here(node)
        node.leases += 1
        self._refer(node, 1)
        return Lease(node, self._give_back)

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            if lease.open:
                lease.open = False
                lease.node.leases -= 1
                self._refer(lease.node, -1)
                self._prune(lease.node)

    def _refer(self, node: Node | None, more: int) -> None:
        now = self._clock()
        while node is not None:
            node.refs += more
            node.used = now
            node = node.parent

    def _prune(self, node: Node) -> None:
        """Remove a node without held bytes, children and leases; then its parent if the same is true of it."""
        while not (node.in_memory or node.refs or node.branches):
            parent = node.parent
            assert parent is not None and parent.branches is not None
            parent.branches.remove(node)
            if not parent.branches:
                parent.branches = None
            node.gone = True
            self._count -= 1
            node = parent


def _must_take(place: Place, span: Ids, namespace: Namespace, share_tokens: int) -> None:
    _must_be_here(place.node)
    _check_place(place, share_tokens)
    if not len(span):
        raise ShapeError("a node needs at least one token, but none was given")
    if place.node.namespace is not None and place.node.namespace != namespace:
        raise ConfigError("a node must have its parent's namespace, or a parent that is everybody's")


def _must_be_here(node: Node) -> None:
    if node.gone:
        raise ReleasedError(f"{node!r} was evicted; match again, and keep a lease on what is used")


def _check_place(place: Place, share_tokens: int) -> None:
    node, at = place
    least = min(share_tokens, len(node))
    if not least <= at <= len(node):
        raise ShapeError(f"a place in {node!r} must be behind {least} to {len(node)} of its tokens, but is at {at}")


def _place(parent: Node | Place | Match) -> Place:
    if isinstance(parent, Node):
        return Place(parent, len(parent))
    return parent.place if isinstance(parent, Match) else parent
